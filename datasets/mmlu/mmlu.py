"""MMLU (Hendrycks et al. 2021): 57 subjects, four choices, five worked examples of the subject. The frame of the prompt is that
of github.com/hendrycks/test: MIT licence, copyright (c) 2020 Dan Hendrycks. Its run compares the probabilities of the four
letters; here the answer's first letter counts.
"""

import csv
import io

from common import DataError, DataSet, Task, letter, lettered, record


def options(parser):
    parser.add_argument("--shots", type=int, default=5, metavar="N", help="worked examples out of SUBJECT_dev.csv (default: 5)")


def rows(source, name):
    """(place, question, four choices, right letter) of a CSV file with or without the row question,choice0,..,answer."""
    try:
        table = list(csv.reader(io.StringIO(source.text(name), newline=""), strict=True))
    except csv.Error as error:
        raise DataError(source.place(name), f"got text that is no CSV ({error})") from None
    if table and table[0][-1:] == ["answer"]:
        table = table[1:]
    if not table:
        raise DataError(source.place(name), "got no records")
    for number, row in enumerate(table, 1):
        place = source.place(name, number)
        if len(row) != 6:
            raise DataError(place, f"got {len(row)} columns, wanted 6: question, four choices and answer")
        if not all(cell.strip() for cell in row):
            raise DataError(place, "got an empty column, wanted question, four choices and answer")
        if row[5] not in tuple("ABCD0123"):
            raise DataError(place, f"got the answer '{row[5]}', wanted A to D or 0 to 3")
        yield place, row[0], row[1:5], row[5] if row[5] in "ABCD" else letter(int(row[5]))


def asked_as(question, choices):
    return f"{question}\n{lettered(choices)}\nAnswer:"


def shots(source, subject, count):
    without = "--shots 0 asks without worked examples"
    examples = list(rows(source, source.need(f"{subject}_dev.csv", without=without)))[:count] if count else []
    if len(examples) < count:
        raise DataError(source.path, f"got {len(examples)} examples of {subject}, wanted --shots {count}")
    head = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
    return head + "".join(f"{asked_as(q, c)} {a}\n\n" for _, q, c, a in examples)


def read(_name, source, given):
    if given.shots < 0:
        raise DataError("", f"got --shots {given.shots}, wanted 0 or more")
    names = source.matching(r"[a-z_]+_test\.csv(\.gz)?")
    if not names:
        raise DataError(source.path, f"got no SUBJECT_test.csv, wanted {source.wanted}")
    for name in names:
        subject = name.rsplit("/", 1)[-1].removesuffix(".gz").removesuffix("_test.csv")
        context = shots(source, subject, given.shots)
        for number, (place, question, choices, answer) in enumerate(rows(source, name), 1):
            yield record(place, f"{subject}-{number}", asked_as(question, choices), [answer], context, subject=subject)


SET = DataSet(
    name="mmlu", title="MMLU, 14042 questions of 57 subjects", paper="Hendrycks et al. 2021, arXiv 2009.03300",
    source="https://github.com/hendrycks/test (data.tar, unpacked)", version="the CSV files of 2020", licence="MIT",
    prompt_source="the frame of github.com/hendrycks/test (MIT)",
    wanted="dev/SUBJECT_dev.csv and test/SUBJECT_test.csv, with the columns question, four choices, answer",
    tasks={"mmlu": Task(prompt="{context}", question_text="{input}", metric="choice", max_new_tokens=4, chat=False)},
    read=read, options=options,
    note="Records of one subject are neighbours: `questions: N` asks N over one prompt. LeanKV's paper does not say how it asks.")
