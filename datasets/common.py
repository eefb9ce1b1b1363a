"""What the converters of datasets/SET/SET.py share: what a set is, checked fields, records and templates.

A converter has a DataSet `SET`. Its `read` yields records, one dict each, made by `record`.
"""

import dataclasses
import importlib.util
import math
from pathlib import Path

from sources import DataError

FOLDER = Path(__file__).resolve().parent


@dataclasses.dataclass
class Task:
    """How one task of a set is asked and scored. Templates have {field}, and {{ }} for braces."""

    prompt: str  # before the question
    metric: str
    max_new_tokens: int
    question_text: str = ""
    answer_opening: str = ""  # the answer's first words, after the chat template
    chat: bool = True
    truncate: str = "none"  # or "middle"
    stop: tuple = ()  # texts that end an answer, as where the set was published
    references: str = "answers"
    files: tuple = ()  # names of the source file, any of which will do
    note: str = ""  # what differs from the published task


@dataclasses.dataclass
class DataSet:
    """A set: where it comes from, under which terms, and its tasks."""

    name: str
    title: str
    paper: str
    source: str  # where to get the files
    version: str  # which edition the tasks below describe
    licence: str  # of the data
    prompt_source: str
    wanted: str  # the files and their fields, for the error about a missing one
    tasks: dict  # name -> Task
    read: object  # read(task_name, source, options) -> iterator of records; it may set source.left_out
    options: object = None  # options(parser) adds the set's own options
    note: str = ""
    find_tasks: object = None  # find_tasks(source) -> {name: Task}, where the files decide which tasks there are
    sample: str = "none here"


# Fields


def field(value, name, place, kind=str, blank=False):
    """value[name], checked. kind: str, int, dict or list (of texts; numbers become texts). blank: it may be empty."""
    if name not in value:
        raise DataError(place, f"got no field '{name}', wanted one of: {', '.join(map(str, value))}")
    out = value[name]
    wanted = {str: "text", int: "an integer", list: "a list of texts", dict: "an object"}[kind]
    if kind is list and isinstance(out, (list, tuple)):
        if not all(isinstance(v, (str, int, float)) and not isinstance(v, bool) and math.isfinite(0 if isinstance(v, str) else v)
                   for v in out):
            raise DataError(place, f"got something else than texts in '{name}', wanted {wanted}")
        out = [str(v) for v in out]
    if not isinstance(out, kind) or isinstance(out, bool):
        raise DataError(place, f"got {type(out).__name__} in '{name}', wanted {wanted}")
    if not blank and (not out.strip() if kind is str else kind is not int and not out):
        raise DataError(place, f"got an empty '{name}', wanted {wanted}")
    return out


def name_of(value, name, place):
    """The record's own name: a text or an integer."""
    return field(value, name, place, int if type(value.get(name)) is int else str)


def choices(value, names, place):
    return [field(value, name, place).strip() for name in names]


def lettered(options, form="{}. {}"):
    """A line per option: A. text"""
    return "\n".join(form.format(letter(i), text) for i, text in enumerate(options))


def letter(index):
    return "ABCDEFGHIJKLMNOP"[index]


def record(place, id, input, answers, context="", **more):
    """One record of the schema. Answers must be texts that only a right answer has: none empty, at least one."""
    answers = list(answers)
    if not answers:
        raise DataError(place, "got no answers, wanted at least one reference")
    for answer in answers:
        if not isinstance(answer, str) or not answer.strip():
            raise DataError(place, "got an empty answer, wanted a reference: every answer would match it")
    if not (context.strip() or input.strip()):
        raise DataError(place, "got neither context nor question")
    return {"id": str(id), "context": context, "input": input, "answers": answers, **more}


# Templates


def asked(template, **settings):
    """A Task of a whole template: the part up to {context} is its prompt, the rest its question."""
    at = template.find("{context}")
    cut = len(template) if at < 0 else at + len("{context}")
    return Task(prompt=template[:cut], question_text=template[cut:], **settings)


# The sets


def load_set(folder):
    """The DataSet of datasets/FOLDER/FOLDER.py."""
    spec = importlib.util.spec_from_file_location(f"kvlab_datasets_{folder}", FOLDER / folder / f"{folder}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SET


def all_sets():
    return {p.parent.name: load_set(p.parent.name) for p in sorted(FOLDER.glob("*/*.py")) if p.stem == p.parent.name}
