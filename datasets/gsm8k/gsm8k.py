"""GSM8K (Cobbe et al. 2021): school mathematics. The published few-shot prompts of Wei et al. 2022 are not in the data, so the
worked examples are the first ones of train.jsonl, as they stand, without the <<calculator>> marks.
"""

import re

from common import DataError, DataSet, Task, field, record

RULE = "Answer the last question as the others are answered. End with #### and the number.\n\n"
ZERO_SHOT = "Think step by step. End with #### and the number.\n\n"


def options(parser):
    parser.add_argument("--shots", type=int, default=8, metavar="N", help="worked examples out of train.jsonl (default: 8); 0 needs no train.jsonl")


def worked(value, place):
    """(question, solution, number) of a record."""
    question, answer = field(value, "question", place), re.sub(r"<<[^>]*>>", "", field(value, "answer", place))
    solution, mark, number = answer.partition("####")
    number = number.strip().replace(",", "")
    if not mark or not re.fullmatch(r"-?\d+(\.\d+)?", number):
        raise DataError(place, "got an answer that does not end with #### and a number")
    return question.strip(), f"{solution.strip()}\n#### {number}", number


def shots(source, count):
    if count == 0:
        return ZERO_SHOT
    file = source.need("train.jsonl", without="--shots 0 asks without worked examples")
    examples = [worked(value, place)[:2] for place, value in source.records(file)][:count]
    if len(examples) < count:
        raise DataError(source.place("train.jsonl"), f"got {len(examples)} records, wanted at least --shots {count}")
    return RULE + "".join(f"Question: {q}\nAnswer: {a}\n\n" for q, a in examples)


def read(_name, source, given):
    if given.shots < 0:
        raise DataError("", f"got --shots {given.shots}, wanted 0 or more")
    context = shots(source, given.shots)
    for number, (place, value) in enumerate(source.records(source.need("test.jsonl")), 1):
        question, _, answer = worked(value, place)
        yield record(place, f"test-{number}", question, [answer], context, shots=given.shots)


SET = DataSet(
    name="gsm8k", title="GSM8K, 1319 questions", paper="Cobbe et al. 2021, arXiv 2110.14168",
    source="https://github.com/openai/grade-school-math (grade_school_math/data)", version="files at 3101c7d50724",
    licence="MIT", prompt_source="our own frame around examples of train.jsonl",
    wanted="test.jsonl, and train.jsonl for --shots, an object a line with question and answer, which ends with #### and a number",
    tasks={"gsm8k": Task(prompt="{context}", question_text="Question: {input}\nAnswer:", metric="gsm8k", max_new_tokens=512,
                         files=("test.jsonl",), stop=("\n\nQuestion:",))},
    read=read, options=options, note="LeanKV's paper does not say how it asks.", sample="sample/, 4 questions (MIT)")
