"""GPQA (Rein et al. 2023): graduate questions with four choices. Its authors ask not to publish the questions as plain text, so
there is no sample. A hash of the question decides the order of the choices. If the right text is there twice, the first letter
counts, as in the authors' utils.py.
"""

import hashlib

from common import DataSet, Task, choices, field, letter, lettered, record

COLUMNS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
PROMPT = ("What is the correct answer to this question: {input}\n\nChoices:\n{choices}\n\nFormat your response as follows: \"The "
          "correct answer is (insert answer here)\"")


def read(name, source, _options):
    for number, (place, value) in enumerate(source.records(source.need(f"{name}.csv")), 1):
        question = field(value, "Question", place).strip()
        texts = choices(value, COLUMNS, place)
        order = sorted(range(4), key=lambda i: hashlib.sha256(f"{question}\0{i}".encode()).digest())
        shown = [texts[i] for i in order]
        id = value.get("Record ID") or f"{name}-{number}"
        yield record(place, id, question, [letter(shown.index(texts[0]))], choices=lettered(shown, "({}) {}"),
                     domain=value.get("High-level domain") or "")


def task_of(name):
    return Task(prompt=PROMPT, metric="gpqa_choice", max_new_tokens=16384, files=(f"{name}.csv",))


SET = DataSet(
    name="gpqa", title="GPQA, 198 to 546 questions with four choices", paper="Rein et al. 2023, arXiv 2311.12022",
    source="https://huggingface.co/datasets/Idavidrein/gpqa or https://github.com/idavidrein/gpqa (dataset.zip, unpacked)",
    version="the CSV files", licence="CC BY 4.0; its authors ask not to publish the questions as plain text",
    prompt_source="the zero-shot prompt of github.com/idavidrein/gpqa (MIT)",
    wanted=f"gpqa_main.csv, gpqa_diamond.csv or gpqa_extended.csv with the columns Question, {', '.join(COLUMNS)}",
    tasks={name: task_of(name) for name in ("gpqa_main", "gpqa_diamond", "gpqa_extended")}, read=read,
    note="FreeKV takes 50 questions (limit: 50, shuffle: true) and draws 8 answers each at temperature 0.6: the key sampling does so.",
    sample="no sample, as its authors ask")
