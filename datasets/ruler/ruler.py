"""RULER (Hsieh et al. 2024): prompts that its own prepare.py made with some model's tokenizer. The tasks niah, multikey,
multivalue, multiquery, variable_tracking, common_words, frequent_words and qa make such prompts with the model's own one.
"""

import re

from common import DataError, DataSet, Task, field, record

NIAH = ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
        "niah_multivalue", "niah_multiquery")
# name: (longest answer, metric, the question's first words, the first words of the answer); the last place of each counts
TABLE = {name: (128, "string_match_all", r"\nWhat (?:is|are) (?:all )?the special magic ", r" The special magic ") for name in NIAH}
TABLE |= {
    "vt": (30, "string_match_all", r"\nQuestion: Find all variables ", r" Answer: "),
    "cwe": (120, "string_match_all", r"\nQuestion: What are the 10 most common words", r" Answer: "),
    "fwe": (50, "string_match_all", r"\nQuestion: Do not provide any explanation", r" Answer: "),
    "qa_1": (32, "string_match_part", r"\n\nAnswer the question based on the given documents", r" ?Answer:"),
    "qa_2": (32, "string_match_part", r"\n\nAnswer the question based on the given documents", r" ?Answer:"),
}


def find_tasks(source):
    """A task for each file. The name has the length that stands in front of it: 4096/niah_single_1 or 4096_niah_single_1."""
    tasks = {}
    for path in source.names:
        found = re.fullmatch(rf"(?:.*[/_])?({'|'.join(TABLE)})(?:/(?:validation|test))?\.jsonl(?:\.gz)?", path)
        if not found:
            continue
        length = re.findall(r"(?<![0-9])([0-9]{3,7})(?![0-9])", path[:found.start(1)])
        name = f"{found[1]}_{length[-1]}" if length else found[1]
        if name in tasks:
            raise DataError(source.path, f"got {path} and {tasks[name].files[0]}, wanted one file of {name}")
        most, metric = TABLE[found[1]][:2]
        tasks[name] = Task(prompt="{context}", question_text="{input}", answer_opening="{opening}", metric=metric,
                           max_new_tokens=most, files=(path,))
    return tasks


def last(pattern, text):
    """Where the last match begins. None: there is none."""
    places = [m.start() for m in re.finditer(pattern, text)]
    return places[-1] if places else None


def parts_of(text, prefix, name, place):
    """(context, question, answer's first words) of a whole prompt. prefix: the file's answer_prefix, or None."""
    _, _, asks, opens = TABLE[name]
    at = last(asks, text)
    if at is None:
        raise DataError(place, f"got no question of {name} in 'input', wanted one that begins like '{asks}'")
    question = text[at:]
    if prefix is not None:
        return text[:at], question.removesuffix(prefix), prefix
    cut = last(opens, question)
    return (text[:at], question, "") if cut is None else (text[:at], question[:cut], question[cut:])


def read(name, source, _options):
    task = find_tasks(source)[name]
    kind = next(k for k in sorted(TABLE, key=len, reverse=True) if name == k or re.fullmatch(rf"{k}_\d+", name))
    for place, value in source.records(task.files[0]):
        prefix = field(value, "answer_prefix", place, blank=True) if "answer_prefix" in value else None
        context, question, opening = parts_of(field(value, "input", place), prefix, kind, place)
        yield record(place, field(value, "index", place, int), question, field(value, "outputs", place, list), context,
                     opening=opening, length=field(value, "length", place, int))


SET = DataSet(
    name="ruler", title="RULER, 13 tasks, as prepared by its own generator", paper="Hsieh et al. 2024, arXiv 2404.06654",
    source="https://github.com/NVIDIA/RULER (scripts/data/prepare.py writes the files)",
    version="format of github.com/NVIDIA/RULER at c3f5e3b4f87f",
    licence="Apache-2.0 for the generator; the essays in some prompts are (c) Paul Graham, questions of qa have their sets' terms",
    prompt_source="the files themselves: RULER's templates (Apache-2.0)",
    wanted="LENGTH/TASK.jsonl or TASK/validation.jsonl, an object a line with index, input, outputs and length",
    tasks={name: Task(prompt="{context}", question_text="{input}", answer_opening="{opening}", metric=row[1],
                      max_new_tokens=row[0]) for name, row in TABLE.items()},
    find_tasks=find_tasks, read=read,
    note="Prompts have the length that they were made for in the tokens of that model. The chat template is the model's own.",
    sample="sample/, 4 prompts of niah_multikey_3: UUIDs in RULER's own words")
