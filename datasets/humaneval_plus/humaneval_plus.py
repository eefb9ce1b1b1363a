"""HumanEval+ (Liu et al. 2023) and HumanEval (Chen et al. 2021): Python functions, judged by their tests. The prompt is the one
that EvalPlus gives chat models: Apache-2.0. A reference is a program that fails if the answer in front of it is wrong.
"""

from common import DataError, DataSet, Task, field, record

PROMPT = ("Please provide a self-contained Python script that solves the following problem in a markdown code block:\n"
          "```python\n{input}\n```\n")
OPENING = ("Below is a Python script with a self-contained function that solves the problem and passes corresponding tests:\n"
           "```python\n")
EVALPLUS = "EvalPlus's prompt for chat models, github.com/evalplus/evalplus (Apache-2.0)"
NOTE = "Scoring runs the answers' code: metric: {unit_tests: {execute_code: true}}. An answer ends where EvalPlus ends one."
# EvalPlus ends an answer of a chat model at the closing fence, and at code that is no part of the solution.
STOPS = ("\n```", "\nif __name__", "\ndef main(", "\nprint(")
FILES = {"humaneval_plus": ("HumanEvalPlus.jsonl", "HumanEvalPlus.jsonl.gz", "test.jsonl"),
         "humaneval": ("HumanEval.jsonl.gz", "HumanEval.jsonl")}


def task_of(files):
    return Task(prompt=PROMPT, answer_opening=OPENING, metric="unit_tests", max_new_tokens=768, references="tests", files=files,
                stop=STOPS)


def read(name, source, _options):
    for place, value in source.records(source.need(*FILES[name])):
        if "test" not in value and "plus_input" in value:
            raise DataError(place, "got EvalPlus's own release, whose tests only EvalPlus can run, wanted the field 'test': "
                            "test.jsonl of https://huggingface.co/datasets/evalplus/humanevalplus")
        entry = field(value, "entry_point", place)
        yield record(place, field(value, "task_id", place), field(value, "prompt", place).strip(),
                     [field(value, "canonical_solution", place)], entry_point=entry,
                     tests=[f"{field(value, 'test', place).rstrip()}\n\ncheck({entry})\n"])


SET = DataSet(
    name="humaneval_plus", title="HumanEval+ and HumanEval, 164 functions", paper="Liu et al. 2023, arXiv 2305.01210",
    source="https://huggingface.co/datasets/evalplus/humanevalplus (test.jsonl); https://github.com/openai/human-eval (data)",
    version="the files of 2024; HumanEval at 6d43fb980f9f", licence="Apache-2.0 (HumanEval+), MIT (HumanEval)",
    prompt_source=EVALPLUS,
    wanted="test.jsonl or HumanEval.jsonl.gz, an object a line with task_id, prompt, entry_point, canonical_solution and test",
    tasks={name: task_of(files) for name, files in FILES.items()}, read=read, note=NOTE)
