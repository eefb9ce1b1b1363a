#!/usr/bin/env python3
"""Scores an answer by rules that kvlab has no metric for. An experiment names one as the command of its metric:

    metric: {judge: {command: python3 datasets/judge.py program}}

    program         1 if the code of the answer passes a program of the references: humaneval_plus, mbpp_plus
    choice_pro      1 if the letter A to J of the answer is right: mmlu_pro
    f1_characters   F1 of the characters: longbook_qa_chn of infinitebench

It reads an object with answer, references and record from standard input and prints a number from 0 to 1. `program` RUNS THE
CODE THAT A MODEL WROTE, for at most 30 seconds and without your environment. It is no sandbox: use a machine or a container
that may be lost.
"""

import collections
import json
import re
import string
import subprocess
import sys
import tempfile
from pathlib import Path

SECONDS = 30
# InfiniteBench's compute_scores.py (MIT, copyright (c) 2023 OpenBMB) drops these beside the ASCII ones.
CHINESE_SIGNS = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏.")


def code_of(answer):
    """The answer's code. The prompt has opened a block, so it ends at the first fence; or the answer has a block of its own."""
    own = re.match(r"\s*```(?:python|py)?[ \t]*\n", answer)
    return (answer[own.end():] if own else answer).split("\n```")[0]


def passes(program):
    """Whether Python runs it to its last line. Code that ends the process earlier leaves no file."""
    with tempfile.TemporaryDirectory() as folder:
        end = Path(folder) / "end"
        text = f"{program}\n\nopen({str(end)!r}, 'w').close()\n"
        try:
            done = subprocess.run([sys.executable, "-I", "-"], input=text.encode("utf-8", "replace"), cwd=folder,
                                  env={"PATH": "/usr/bin:/bin"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                  timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0 and end.exists()


def program(answer, references):
    """1 if the answer's code passes the tests of a reference, which stand behind it."""
    return float(any(passes(f"{code_of(answer)}\n\n{tests}") for tests in references))


def choice_pro(answer, references):
    """The letter of "the answer is (X)", else the last letter after "answer:", else the last one that stands alone, as in
    MMLU-Pro's evaluate_from_local.py (Apache-2.0).
    """
    found = re.search(r"answer is \(?([A-J])\)?", answer) or re.search(r".*[aA]nswer:\s*([A-J])", answer) or \
        re.search(r"\b[A-J]\b(?!.*\b[A-J]\b)", answer, re.DOTALL)
    return float(bool(found) and found[found.lastindex or 0] in references)


def characters(text):
    drop = set(string.punctuation + CHINESE_SIGNS)
    return "".join(c for c in "".join(text.lower().split()) if c not in drop)


def f1_characters(answer, references):
    """The best F1 of the characters, as InfiniteBench's qa_f1_score_zh."""
    best, own = 0.0, characters(answer)
    for reference in map(characters, references):
        shared = sum((collections.Counter(own) & collections.Counter(reference)).values())
        if shared:
            best = max(best, 2 * shared / (len(own) + len(reference)))
    return best


METRICS = {"program": program, "choice_pro": choice_pro, "f1_characters": f1_characters}


def main(words):
    if len(words) != 1 or words[0] not in METRICS:
        print(f"judge.py: got {' '.join(words) or 'no word'}, wanted one of: {', '.join(METRICS)}", file=sys.stderr)
        return 2
    try:
        question = json.load(sys.stdin)
        answer, references = question["answer"], question["references"]
    except (ValueError, KeyError, TypeError) as error:
        print(f"judge.py: got no object with answer and references ({error})", file=sys.stderr)
        return 2
    print(METRICS[words[0]](answer, references))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
