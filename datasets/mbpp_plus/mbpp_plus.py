"""MBPP+ (Liu et al. 2023) and sanitized MBPP (Austin et al. 2021): Python functions, judged by their tests. Asked as
humaneval_plus; the problem is the text and the first of its tests, as EvalPlus writes it.
"""

import dataclasses
import re

from common import DataError, field, load_set, record

HUMANEVAL = load_set("humaneval_plus")
FILES = {"mbpp_plus": ("MbppPlus.jsonl", "MbppPlus.jsonl.gz", "test.jsonl"),
         "mbpp": ("mbpp_sanitized_test.jsonl", "sanitized-mbpp.json", "sanitized-mbpp.jsonl")}


def tests_of(name, value, place):
    """The program behind an answer."""
    if name == "mbpp_plus":
        if "test" not in value and "plus_input" in value:
            raise DataError(place, "got EvalPlus's own release, whose tests only EvalPlus can run, wanted the field 'test': "
                            "test.jsonl of https://huggingface.co/datasets/evalplus/mbppplus")
        return field(value, "test", place).rstrip() + "\n"
    return "\n".join(field(value, "test_imports", place, list, blank=True) + field(value, "test_list", place, list)) + "\n"


def entry_point(code, test):
    """The function that the first test calls, of those that the code defines. Empty: none, and an answer keeps all that it
    defines."""
    defined = re.findall(r"^(?:async +def|def|class) +(\w+)", code, re.MULTILINE)
    return next((name for name in re.findall(r"(\w+) *\(", test) if name in defined), "")


def read(name, source, _options):
    for number, (place, value) in enumerate(source.records(source.need(*FILES[name])), 1):
        first = field(value, "test_list", place, list)[0]
        id = value.get("task_id", f"{name}-{number}")
        code = field(value, "code", place)
        yield record(place, id, f'"""\n{field(value, "prompt", place).strip()}\n{first.strip()}\n"""', [code],
                     entry_point=entry_point(code, first), tests=[tests_of(name, value, place)])


SET = dataclasses.replace(
    HUMANEVAL, name="mbpp_plus", title="MBPP+, 378 functions, and sanitized MBPP",
    source="https://huggingface.co/datasets/evalplus/mbppplus (test.jsonl); "
           "https://github.com/google-research/google-research/tree/master/mbpp",
    version="MBPP+ 0.2.0", licence="Apache-2.0 (MBPP+), CC BY 4.0 (MBPP)", read=read,
    wanted="test.jsonl or sanitized-mbpp.json, an object a record with prompt, code, test_imports, test_list and, for MBPP+, test",
    tasks={name: dataclasses.replace(HUMANEVAL.tasks["humaneval"], files=files) for name, files in FILES.items()})
