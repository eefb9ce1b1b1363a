"""AIME 2024: 30 problems whose answers are integers from 0 to 999. The demand is that of math500."""

import dataclasses

from common import DataError, DataSet, field, load_set, record

MATH500 = load_set("math500")
NAMES = ("aime24_test.jsonl", "aime_2024_problems.parquet", "aime24.jsonl", "aimo-validation-aime.jsonl", "test.jsonl")


def written_as(n):
    """`boxed` compares texts, and AIME's own answers have three digits: 5, 05 and 005 are all right."""
    return sorted({str(n), f"{n:02}", f"{n:03}"})


def read(_name, source, _options):
    for number, (place, raw) in enumerate(source.records(source.need(*NAMES)), 1):
        value = {key.lower(): v for key, v in raw.items()}  # Maxwell-Jia/AIME_2024 writes Problem, Answer
        if "url" in value and "2024_AIME" not in field(value, "url", place):
            source.left_out["other years"] = source.left_out.get("other years", 0) + 1
            continue
        answer = str(value.get("answer", ""))
        if not answer.isdigit() or int(answer) > 999:
            raise DataError(place, f"got the answer '{answer}', wanted an integer from 0 to 999")
        yield record(place, value.get("id", number), field(value, "problem", place), written_as(int(answer)))


SET = DataSet(
    name="aime24", title="AIME 2024, 30 problems", paper="Mathematical Association of America, 2024",
    source="https://huggingface.co/datasets/Maxwell-Jia/AIME_2024 or https://huggingface.co/datasets/AI-MO/aimo-validation-aime",
    version="I and II of 2024", licence="the problems are (c) Mathematical Association of America",
    prompt_source=MATH500.prompt_source,
    wanted=f"one of {', '.join(NAMES)}, an object a record with id, problem, answer and perhaps url",
    tasks={"aime24": dataclasses.replace(MATH500.tasks["math500"], files=NAMES)},
    read=read, note="FreeKV draws 8 answers each at temperature 0.6: the key sampling does so. 025 and 25 are both right.")
