"""MMLU-Pro (Wang et al. 2024): 12032 questions with up to ten choices, and five worked examples of the category. The frame of
the prompt is that of github.com/TIGER-AI-Lab/MMLU-Pro: Apache-2.0.
"""

from common import DataError, DataSet, Task, field, letter, lettered, record

HEAD = ("The following are multiple choice questions (with answers) about {}. Think step by step and then finish your answer with "
        "\"the answer is (X)\" where X is the correct letter choice.\n\n\n")
TEST = ("test.jsonl", "test-00000-of-00001.parquet", "test.parquet")
VALIDATION = ("validation.jsonl", "validation-00000-of-00001.parquet", "validation.parquet")


def options(parser):
    parser.add_argument("--shots", type=int, default=5, metavar="N", help="worked examples of the category (default: 5)")


def asked_as(value, place):
    """The question with its choices. The files fill up shorter lists with N/A."""
    texts = [o for o in field(value, "options", place, list) if o != "N/A"]
    if not 2 <= len(texts) <= 10:
        raise DataError(place, f"got {len(texts)} options, wanted 2 to 10")
    return f"Question:\n{field(value, 'question', place)}\nOptions:\n{lettered(texts)}\nAnswer:", len(texts)


def examples(source, count):
    """category -> the prompt's head with worked examples."""
    out, seen = {}, {}
    for place, value in source.records(source.need(*VALIDATION)):
        category = field(value, "category", place)
        seen[category] = seen.get(category, 0) + 1
        if seen[category] <= count:
            worked = field(value, "cot_content", place).removeprefix("A: ")
            out[category] = out.get(category, "") + f"{asked_as(value, place)[0]} {worked}\n\n"
    return out, seen


def read(_name, source, given):
    if given.shots < 0:
        raise DataError("", f"got --shots {given.shots}, wanted 0 or more")
    shots, seen = examples(source, given.shots) if given.shots else ({}, {})
    for place, value in source.records(source.need(*TEST)):
        category = field(value, "category", place)
        if seen.get(category, 0) < given.shots:
            raise DataError(place, f"got {seen.get(category, 0)} examples of {category}, wanted --shots {given.shots}")
        question, count = asked_as(value, place)
        answer = field(value, "answer", place)
        if answer not in [letter(i) for i in range(count)]:
            raise DataError(place, f"got the answer '{answer}', wanted A to {letter(count - 1)}")
        yield record(place, field(value, "question_id", place, int), question, [answer],
                     HEAD.format(category) + shots.get(category, ""), category=category)


SET = DataSet(
    name="mmlu_pro", title="MMLU-Pro, 12032 questions with up to ten choices", paper="Wang et al. 2024, arXiv 2406.01574",
    source="https://huggingface.co/datasets/TIGER-Lab/MMLU-Pro", version="the files of 2024", licence="MIT",
    prompt_source="the frame of github.com/TIGER-AI-Lab/MMLU-Pro (Apache-2.0)",
    wanted=f"{TEST[0]} and {VALIDATION[0]} (or the .parquet files), with question_id, question, options, answer, category and "
           "cot_content",
    tasks={"mmlu_pro": Task(prompt="{context}", question_text="{input}", answer_opening=" Let's think step by step.",
                            metric="choice_pro", max_new_tokens=2048, stop=("Question:",), files=TEST)},
    read=read, options=options,
    note="`choice_pro` is the letter A to J of \"the answer is (X)\". LeanKV cites MMLU-Pro+ and does not say how it asks.")
