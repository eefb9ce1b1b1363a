"""Writes core/test/golden/metrics.json: answers, references and the scores that the public scorers give them.

    pip install rouge==1.0.1 rouge-score==0.1.2 python-Levenshtein
    python tools/goldens/metrics.py [--check | --against DIR]

ROUGE and a ratio of code come from these packages, the other ratio from difflib. Everything else is written here from the
scorers' definitions, with Python's own str and re. --against compares the file with the scorers themselves, where DIR has
checkouts of them (public_scorers.py). Random cases have seed 1.
"""

import json
import random
import re
import string
import sys
from collections import Counter
from difflib import SequenceMatcher
from pathlib import Path

import Levenshtein
from rouge import Rouge
from rouge_score.rouge_scorer import RougeScorer

import public_scorers

FILE = Path(__file__).parents[2] / "core/test/golden/metrics.json"


# SQuAD


def words(text):
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(the|an|a)\b", " ", text).split()


def token_f1(answer, reference, of_nothing):
    a, r = words(answer), words(reference)
    if not a or not r:
        return float(a == r) if of_nothing else 0.0
    common = sum((Counter(a) & Counter(r)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(a), common / len(r)
    return 2 * precision * recall / (precision + recall)


# ROUGE

SCORER = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=False)
LINES = RougeScorer(["rougeLsum"], use_stemmer=False)


def rouge_score(kind):
    return lambda answer, reference: SCORER.score(reference, answer)[kind].fmeasure


def rouge_lsum(answer, reference):
    return LINES.score(reference, answer)["rougeLsum"].fmeasure


def longbench_rouge(answer, reference):
    try:
        return Rouge().get_scores([answer], [reference], avg=True)["rouge-l"]["f"]
    except ValueError:  # a text without sentences
        return 0.0


# LongBench


def first_line(answer):
    return answer.lstrip("\n").split("\n")[0]


def share(numbers, right):
    return numbers.count(right) / len(numbers) if numbers else 0.0


def count(answer, reference):
    return share(re.findall(r"\d+", answer), reference)


def retrieval(word):
    return lambda answer, reference: share(re.findall(r"\d+", answer), re.search(word + r"(\d+)", reference)[1])


def classification(answer, reference, classes):
    named = [c for c in classes if c in answer]
    for one in named:  # the scorer walks the list that it shortens
        if one in reference and one != reference:
            named.remove(one)
    return 1 / len(named) if reference in named else 0.0


def code_sim(ratio):
    def score(answer, reference):
        lines = [x for x in answer.lstrip("\n").split("\n") if not re.search("[`#]|//", x)]
        line = lines[0] if lines else ""
        if line == reference:
            return 1.0
        return round(100 * ratio(line, reference)) / 100 if line and reference else 0.0

    return score


def difflib_ratio(a, b):
    return SequenceMatcher(None, a, b).ratio()


# Folded texts. Case and white space are those of ASCII, as bytes have them.


def folded(text):
    return b" ".join(text.encode().lower().split())


def contains(answer, reference):
    return float(folded(reference) in folded(answer))


def exact(answer, reference):
    return float(folded(answer.lstrip(" \t\r\n").split("\n")[0]) == folded(reference))


def prefix(answer, reference):
    return float(folded(answer).startswith(folded(reference)))


# RULER


def string_match(answer, reference):
    answer = re.sub("[\x00-\x1f]", "\n", answer.strip()).strip()
    return float(reference.lower() in answer.lower())


# Choices


def choice(answer, reference):
    alone = "(?<![A-Za-z0-9])[%s](?![A-Za-z0-9])"
    found = re.search(alone % "A-D", answer) or re.search(alone % "a-d", answer)
    return float(bool(found) and found[0].upper() == reference.upper())


def simple_evals_choice(answer, reference):
    """OpenAI's simple-evals, MMLU, with the prompt's last word before the answer."""
    found = re.search(r"(?i)Answer[ \t]*:[ \t]*\$?([A-D])\$?", "Answer:" + answer)
    return float(bool(found) and found[1].upper() == reference.upper())


def longbench_v2_choice(answer, reference):
    answer = answer.replace("*", "")
    found = re.search(r"The correct answer is \(([A-D])\)", answer) or re.search(r"The correct answer is ([A-D])", answer)
    return float(bool(found) and found[1] == reference)


def gpqa_choice(answer, reference):
    for phrase in ("answer is ", "Answer: ", "answer: ", "answer ", ""):
        found = re.search(phrase + r"\((.)\)", answer)
        if found and found[1] in "ABCD":
            return float(found[1] == reference)
    return 0.0


def infinitebench_choice(answer, references):
    answer = answer.strip()
    if not answer:
        return 0.0
    if answer[0] in "ABCD":
        return float(answer[0] in references)
    if answer in references:
        return 1.0
    text = re.sub(" +", " ", re.sub("[\n\"'.,?!{}]", " ", answer))
    for phrase in ("answer is:", "answer:", "answer is", "option is"):
        at = text.find(phrase)
        if at >= 0:
            rest = text[at + len(phrase) + 1 :]
            return float(len(text) > at + len(phrase) and any(rest.startswith(r) for r in references))
    letters = [w for w in text.split() if w in "ABCD"]
    return float(bool(letters) and letters[0] in references)


def choice_pro(answer, reference):
    found = (re.search(r"answer is \(?([A-J])\)?", answer) or re.search(r".*[aA]nswer:\s*([A-J])", answer)
             or re.search(r"(\b[A-J]\b)(?!.*\b[A-J]\b)", answer, re.DOTALL))  # fmt: skip
    random.seed(12345)
    return float((found[1] if found else random.choice("ABCDEFGHIJ")) == reference)


def infinitebench_word(answer, reference):
    return float(reference in re.sub("[\n:\"'.,?!{}]", " ", answer).split())


def infinitebench_name(answer, references):
    return float(references[0] in re.sub("[\n:\"'.,?!{}]", " ", answer).upper().split())


def first_integer(answer, reference):
    found = re.search("[0-9]+", answer)
    return float((found[0] if found else "") == reference)


CHINESE_MARKS = (
    "\uff01\uff1f\uff61\u3002\uff02\uff03\uff04\uff05\uff06\uff07\uff08\uff09\uff0a\uff0b\uff0c\uff0d\uff0f\uff1a\uff1b\uff1c\uff1d\uff1e"
    "\uff20\uff3b\uff3c\uff3d\uff3e\uff3f\uff40\uff5b\uff5c\uff5d\uff5e\uff5f\uff60\uff62\uff63\uff64\u3001\u3003\u300b\u300c\u300d\u300e"
    "\u300f\u3010\u3011\u3014\u3015\u3016\u3017\u3018\u3019\u301a\u301b\u301c\u301d\u301e\u301f\u3030\u303e\u303f\u2013\u2014\u2018\u2019"
    "\u201b\u201c\u201d\u201e\u201f\u2026\u2027\ufe4f."
)


def f1_characters(answer, reference):
    def characters(text):
        return list("".join("".join(c for c in text.lower() if c not in set(string.punctuation + CHINESE_MARKS)).split()))

    a, r = characters(answer), characters(reference)
    common = sum((Counter(a) & Counter(r)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(a), common / len(r)
    return 2 * precision * recall / (precision + recall)


def leading_numbers(answer, reference):
    numbers, right = [int(n) for n in re.split("[^0-9]", answer) if n], json.loads(reference)
    count = 0
    while count < min(len(numbers), len(right)) and numbers[count] == right[count]:
        count += 1
    return count / len(right)


def first_number(answer, reference):
    found = re.search(r"\d+\.\d+|\d+", answer)
    if not found:
        return 0.0
    if "." in reference:
        return float(float(found[0]) == float(reference))
    return float("." not in found[0] and int(found[0]) == int(reference))


def last_integer(answer, reference):
    words = re.sub("[\n.`'\":]", " ", answer).split()
    try:
        return float(int(words[-1]) == int(reference))
    except (IndexError, ValueError):
        return 0.0


def infinitebench_option(answer, references):
    answer = answer.strip()
    if answer[:2] in (references[0] + ".", references[0] + ":"):
        return 1.0
    text = re.sub(" +", " ", re.sub("[\n`'\"*-]|[Oo]ption", " ", answer))
    for phrase in ("answer is:", "is:", "answer:"):
        _, there, rest = text.partition(phrase)
        if there:
            return float(rest != "" and rest[1:].startswith(tuple(references)))
    return 0.0


# L-Eval, closed tasks


def leval_part(answer, reference):
    def bare(text):
        text = "".join(c for c in text if c not in string.punctuation)
        return " ".join(re.sub(r"\b(?:the|an|a)\b", " ", text).split())

    def tight(text):
        return text.replace(" ", "").lower()

    own, right = bare(answer), bare(reference)
    if not set(right) - set("ABCD"):
        return 1.0 if own == right else 0.0 if set(own) - set(right) else 0.25
    try:
        return float(float(answer) == float(reference))
    except ValueError:
        return float(tight(reference) in tight(answer))


def leval_options(reference):
    return re.sub("[^A-D]", "", reference.split()[0]) or "A"


def leval_choice(answer, reference):
    if not answer.strip():
        return 0.0
    first = re.search("[A-D]", answer)
    return leval_part(answer if answer in "ABCD" else first[0] if first else "A", leval_options(reference))


def leval_letters(answer, reference):
    if not answer.strip():
        return 0.0
    start = re.match("[A-D]*", answer)[0]
    rest = answer[len(start) :].partition("Question")[0]
    found = set(start) if len(start) > 1 else set(start) | set(re.findall(r"[A-D](?=[\s.)])", rest))
    run = re.search("[A-D]+", rest)
    letters = answer if answer in "ABCD" else "".join(sorted(found)) or (run[0] if run else "A")
    return leval_part(letters, leval_options(reference))


def leval_math(answer, reference):
    def number(text):
        found = re.search(r"The answer is (\S+)", text)
        words = [found[1]] if found else [w for w in text.partition("\n\n")[0].split(" ") if re.search(r"\d", w)]
        return re.sub(r"\D", "", words[-1].partition(".")[0]) if words else ""

    return leval_part(number(answer), number(reference))


def leval_code(answer, reference):
    def output(text):
        text = re.sub(r"[,'\\]", "", re.sub(r"\s+", " ", text)).replace(".0", "")
        return text.replace("] [", "][").replace("[ [", "[[").replace("] ]", "]]")

    text, most = output(answer), len(reference.split()) + 3
    for filler in ("will be", "of the code", "is", "would be", "the value of", "the result of", "printed"):
        text = "".join(text.split(filler))
    _, there, rest = text.rpartition("the final output")
    pieces = re.split(r"\s+", rest)
    return leval_part(" ".join(pieces[:most] if there else pieces[-most:]), output(reference))


def leval_judgment(answer, reference):
    words = [w for w in answer.lower().partition("[fact:")[0].split() if "true" in w or "false" in w]
    truth = "<error>" if not words else "true" if "true" in words[0] else "false"
    return leval_part(truth, reference.lower())


# Mathematics


def last_box(text):
    at = text.rfind("\\boxed")
    if at < 0 or not text.startswith("\\boxed{", at):
        return None
    depth = 0
    for i in range(at + 6, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[at + 7 : i]
    return None


class Unreadable(Exception):
    pass


def normalized(text):
    for old, new in (("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", "")):
        text = text.replace(old, new)
    for old in ("\\right", "^{\\circ}", "^\\circ", "\\$"):
        text = text.replace(old, "")
    if text.count("\\text{ ") > 1:
        raise Unreadable
    text = text.partition("\\text{ ")[0].replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    text = "0" + text if text[0] == "." else text
    if text.count("=") == 1 and len(text.partition("=")[0]) <= 2:
        text = text.partition("=")[2]
    if text.endswith("\\sqrt") or "\\sqrt\\sqrt" in text:
        raise Unreadable
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text, flags=re.S).replace(" ", "")
    start, *rest = text.split("\\frac")
    out = start
    for piece in rest:
        if not piece:
            raise Unreadable
        if piece[0] != "{" and len(piece) == 1:
            out = text
            break
        braced = re.sub(r"^([^{])", r"{\1}", piece, flags=re.S)
        out += "\\frac" + (re.sub(r"^(\{.\})([^{])", r"\1{\2}", braced, flags=re.S) if piece[0] != "{" else piece)
    out = "\\frac{1}{2}" if out == "0.5" else out
    integer = r"(0|-?[1-9][0-9]*)"
    return re.sub(f"^{integer}/{integer}$(?!\n)", r"\\frac{\1}{\2}", out)


def boxed(answer, reference):
    box, own = last_box(answer), last_box(reference)
    right = reference if own is None else own
    if box is None:
        return 0.0
    try:
        return float(normalized(box) == normalized(right))
    except Unreadable:
        return float(box == right)


def marked(text):
    found = re.search(r"#### (-?[0-9.,]+)", text)
    return found[1].replace(",", "") if found else None


def gsm8k(answer, reference):
    right = marked(reference) or reference.replace(",", "")
    return float(marked(answer) == right)


def last_number(answer, reference):
    found = [a or b for a, b in re.findall(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", answer)]

    def bare(text):
        for pattern in (",", r"\$", "(?s).*#### ", r"\.$"):
            text = re.sub(pattern, "", text)
        return text

    return float(bare(found[-1] if found else "[invalid]") == bare(reference))


# Cases

NASTY = [
    "",
    " ",
    "\r\n",
    "...",
    "?!,;:",
    "the a an",
    "The cat sat on a mat.",
    "the\tcat\r\nsat\r\non the mat",
    "cat cat cat dog",
    "\u201cThe\u201d answer\u2014a \u2018test\u2019 \u2013 an end",
    "\u00c9COLE na\u00efve \u0130stanbul stra\u00dfe \u03a3\u0391\u03a3",
    "\u00e9cole NA\u00cfVE i\u0307stanbul STRASSE \u03c3\u03b1\u03c2",
    "\u6f22\u5b57 \u3002\u7b54\u6848\u662f\uff11\uff12",
    "\u00a0non\u2003breaking\u3000space ",
    "a_b the_c x-ray they're",
    "\U0001f363 sushi \U0001f363",
    "One. Two. Three. One two three",
    "line one\n\nline two. ",
    "The cat. The dog. A bird . ",
    "\x1cunit\x1f separators\x00null",
]


def nasty(count, reference_count=1):
    pairs = [(a, [b]) for a in NASTY for b in NASTY if b.strip()]
    random.seed(1)
    random.shuffle(pairs)
    made = pairs[:count]
    made += [(a, random.sample([x for x in NASTY if x.strip()], 4)) for a in NASTY] if reference_count > 1 else []
    return made


def texts(count, alphabet, longest):
    def text():
        return "".join(random.choice(alphabet) for _ in range(random.randint(0, longest)))

    random.seed(1)
    made = []
    while len(made) < count:
        answer, reference = text(), text()
        if reference.strip():
            made.append((answer, [reference]))
    return made


WORDS = ["the ", "a ", "an ", "cat ", "Cat, ", "dog. ", "dog", ".", "ran ", "\n", "\u201cthe\u201d ", "\u00c9a ", "x_y "]
CODE = list("abcdef(){}[]=+ .,;xyzif") + ["return ", "    ", "self.", "int "]


def best(function, cases):
    return [{"answer": a, "references": r, "score": max(function(a, x) for x in r)} for a, r in cases]


def mean(function, cases):
    return [{"answer": a, "references": r, "score": sum(function(a, x) for x in r) / len(r)} for a, r in cases]


def fewer(made):
    """All that score, and every seventh of the others."""
    return [case for i, case in enumerate(made) if case["score"] or i % 7 == 0]


def with_params(made, **params):
    return [{**case, "params": params} for case in made]


def on_first_line(function):
    return lambda answer, reference: function(first_line(answer), reference)


def prose():
    return nasty(40, 4) + texts(40, WORDS, 14) + [("\n\n" + a + "\nmore", r) for a, r in texts(10, WORDS, 8)]


def summaries():
    return texts(60, ["a ", "b ", "c ", "the ", "cat ", "dog ", "ran ", "\n", "\n", " \n"], 24)


def long_texts():
    """Texts of 10000 words, as a pattern and how often it is repeated; a scorer in Python needs seconds."""
    answer, reference = "alpha beta gamma delta epsilon ", "alpha gamma beta zeta "
    return answer, 2000, reference, 2500


def long_case(function):
    answer, n, reference, m = long_texts()
    return [{"answer": answer, "references": [reference], "times": [n, m], "score": function(answer * n, reference * m)}]


def classes():
    kinds = ["Person", "Person name", "Food", "Food, drink", "City", "Ci", "", "Zahl \u00e9"]
    kinds = [k for k in kinds if k]
    answers = ["", "Food", "Food, drink", "Person name and City", "City Ci", "none", "\n\nFood\nPerson", "Zahl \u00e9",
               "Person, Person name, Food, Food, drink, City", "food"]  # fmt: skip
    made = []
    for order in (kinds, kinds[::-1]):
        for first in (False, True):
            for answer in answers:
                for reference in kinds:
                    text = first_line(answer) if first else answer
                    made.append({"answer": answer, "references": [reference], "record": {"all_classes": order},
                                 "params": {"first_line": first}, "score": classification(text, reference, order)})  # fmt: skip
    return made[::3]


def numbers():
    answers = ["", "Paragraph 3", "3", "Paragraph 3, or 13 or 3.", "none", "\uff13 3", "12 012", "the 7th\r\n7 7", "-3"]
    return [(a, [r]) for a in answers for r in ("Paragraph 3", "see Paragraph  and Paragraph 12, Paragraph 3",
                                                "Paragraph \uff13", "xParagraph 7th")]  # fmt: skip


def chinese():
    return [(a, [r]) for a in ("", "\u6bb5\u843d3", "\u6bb5\u843d\uff13\u6216 3", "12") for r in
            ("\u6bb5\u843d3", "\u5728\u6bb5\u843d\u548c\u6bb5\u843d12")]  # fmt: skip


def counts():
    return [(a, [r]) for a in ("", "3", "There are 3 of 30", "3 3 4", "\uff13", "three", "03") for r in ("3", "\uff13", "03")]


def code():
    made = texts(40, CODE, 20)
    made += [("\n\n# comment\n// other\n```python\n" + a, r) for a, r in texts(10, CODE, 16)]
    made += [(a * 12, [r[0] * 11]) for a, r in texts(10, CODE, 20)]  # more than 200 characters: popular ones start no run
    made += [("return x\n", ["return x"]), ("`only` code", ["x"]), ("\n", ["x"]), ("h\u00e9llo = 1", ["hello = 1"]),
             ("x = 1\r\ny", ["x = 1"]), ("# all", ["# all"]), ("ab" * 3, ["ba" * 3])]  # fmt: skip
    return made


def choices():
    phrase = "The correct answer is "
    answers = ["", "A", phrase + "(A)", phrase + "A", phrase + "(A", phrase + "**(B)**", phrase + "E. " + phrase + "(C)",
               phrase + "B " + phrase + "(D)", "the correct answer is (A)", phrase + "\n(A)", phrase + "(AB)",
               phrase + "(E) or " + phrase + "Bob"]  # fmt: skip
    return [(a, [r]) for a in answers for r in "ABCD"]


def bracketed():
    answers = ["", "A", "(A)", "The correct answer is (B).", "The correct answer is B", "answer is (X). Answer: (C)", "answer is (X). answer is (C)",
               "(E) then (A)", "(D), so the answer is (C)", "answer: (A) Answer: (B)", "answer (D)", "answer is\n(B)", "answer is (\n) (A)", "((C)",
               "answer is (AB). (C)", "answer is (\u00e9) or (D)", "answer is (a), (b)", "Answer: (", "answer (A", "The answer is **(B)**", "(\n)(A)"]  # fmt: skip
    return [(a, [r]) for a in answers for r in "ABCD"]


def letters():
    """What a model says behind "Answer:", where simple-evals must agree; then answers in which the letter comes later."""
    direct = [" A", "B", " C.", " D)", " a", " b, or", "\tC\n\nQuestion", " $D$", " A\nB", " D: dogs", " C\u00e9"]
    made = [(a, [r]) for a in direct for r in "ABCD"]
    for answer, (reference,) in made:
        assert choice(answer, reference) == simple_evals_choice(answer, reference), answer
    later = ["", "none", " (C) because", "The answer is D.", "It is a case of B", "Because of A, not B", "Dogs", "AB", "a b", "1A A1 B",
             "_A_", "E or D", "\u00c9A", "ad", "x-b", "(d)"]  # fmt: skip
    return made + [(a, [r]) for a in later for r in "ABc"]


def folds():
    made = nasty(24) + [("the\nRED  fox", ["red FOX"]), ("\n \tParis \nand", ["paris"]), ("Paris, France", ["paris"]), ("", ["a"]),
                        ("a\u00a0b", ["a b"]), ("\u00c9t\u00e9", ["\u00e9t\u00e9"]), ("True story", ["false", "TRUE"]), ("x\r\ny", ["x"])]  # fmt: skip
    return made + [("Yes.\n", ["yes."]), ("1 2", ["12", "1  2"]), ("red and blue", ["red", "green", "Blue", "and "])]


def ten_choices():
    phrase = "The answer is "
    answers = ["", "A", phrase + "(J).", phrase + "J", phrase + "(K) or (C)", phrase + "((B)", phrase + "(K). answer is I", phrase + " (A)",
               "answer is B. " + phrase + "C", "Answer: E", "answer:\n\n F", "Answer: K\nanswer: G H", "answer: A, Answer: B\nAnswer: C",
               "xnswer: D", "Answer:\u00a0C", "x\nAnswer: (D)", "I take F", "A_ B1 C\u00e9 \u6f22D", "D\u2014E.", "G", "none at all", "Answer:",
               "nswer: J", phrase + "(", "ABC", "the ANSWER IS D: H\n", "answer: x answer:\n\nD\nanswer: E"]  # fmt: skip
    return [(a, [r]) for a in answers for r in "ABCDEFGHIJ"][::3]


def sequences():
    answers = ["", "1", "[1, 5, 8]", "1 5 9", "Values: [1, 5, 8, 9]", "01, 005", "-1 5", "1.5.8", "no", "\uff11, 5", "1,5,8,", "0",
               "123456789012345678901234567890", "8, 3, 5, -4"]  # fmt: skip
    return [(a, [r]) for a in answers for r in ("[1, 5, 8]", "[1]", "[-1, 5]", "[0, 1]", "[123456789012345678901234567890, 2]",
                                               "[8, 3, 5, -4]")]  # fmt: skip


def found_numbers():
    answers = ["", "42", "x 42.5 y", "042", "4 2", "-42", "42.", "42.x", ".5", "\uff14\uff12", "4\uff12.5", "1e3", "0.50", "none", "42.50 42"]
    return [(a, [r]) for a in answers for r in ("42", "42.5", "0.5", "4", "-42", "5", "2.0")]


def run_values():
    answers = ["", "7", "It is 7.", "7 apples", "= -7", "+7", "- 7", "`7`", "x: 007", "7_0", "7__0", "_7", "7_", "\uff17", "7.5", "--7", "-",
               "-0", "the value is: -70\n", "7\u00a0", "7\u200b", "seven", "'-7'"]  # fmt: skip
    return [(a, [r]) for a in answers for r in ("7", "-7", "70", "0", "-70", "5")]


def options():
    answers = ["", "B", "B.", "B: g", " B. g", "The answer is: B", "answer is:B", "answer is:", "answer is: \n", "it is: `g`", "answer:\n- **g**",
               "The error is: Option B", "option g", "Answer is: g", "answer:  C, is: B", "is:  gg", "A. answer is: B", "answer is: h\n", "answer: Optiong",
               "\nB: g", "  B.", "\u3000\x1cC.", "answer is:\u00a0g", "answer is:\u2014B"]  # fmt: skip
    return [(a, [r, t]) for a in answers for r, t in zip("ABC", ("f", "g", "h"))]


def chinese_texts():
    alphabet = ["\u5f20", "\u4e09", "\u674e", "\u3002", "\uff0c", " ", "\u300a", "\u300b", "a", "B", ".", "\u2014", "\u00a0", "\u3000"]
    return texts(60, alphabet, 9) + nasty(40, 4)


def books():
    answers = ["", "A", "B. text", "answer is: C", "the answer is:", "The answer is  D.", "option is A", "I say ABC",
               "BC or A", "answer:B", "answer is Long name!", "no idea", " A", "{D}", "answer is\n\nC, answer: A", "Long name", "\nB side\t", "Long name.", " \n "]  # fmt: skip
    return [(a, [r, t]) for a in answers for r, t in zip("ABCD", ("Long name", "B side", "Cat", "D"))]


def keys():
    return [(a, [r]) for a in ("", "ab-1", '"ab-1".', "{x:ab-1}", "ab-12", "ab-1\u00a0y", "AB-1") for r in ("ab-1", "12")]


def names():
    answers = ["", "Ann", "ANN", "Is it 'ann'?", "{ann:bob}", "Anna", "Ann Lee", "ann\u00a0lee", "Bob, or Ann.", "Ren\u00e9e!", "stra\u00dfe",
               "\u03bf\u03b4\u03cc\u03c2", "\u0131i", "z\u00ff", "\u01c6 \u01c5", "\u0436\u0456"]  # fmt: skip
    return [(a, r) for a in answers for r in (["ANN"], ["ann"], ["BOB", "ANN"], ["REN\u00c9E"], ["STRASSE"], ["\u039f\u0394\u038c\u03a3"],
                                              ["II"], ["Z\u0178"], ["\u01c4"], ["\u0416\u0406"])]  # fmt: skip


def exam_letters():
    answers = ["", " ", "A", "B.", "AB", "BC", "CA", "BD", "ABCD", "DCBA", "A, C", "A. and C.", "(B)", "The answer is D", "But C.", "none", "E",
               "AA", "A\nC\n", "C Question: A. B.", "xBA", "xBAC, D", "xQuestion A", "B) or D)", "b", "\u00c9A", "A\u3000C\u3000", "A-C.", "\n"]  # fmt: skip
    return [(a, [r]) for a in answers for r in ("A", "B", "C. text", "AC", "BA", "A,C", "ABD", "none")]


def exam_sums():
    answers = ["", "18", "The answer is 18.", "The answer is $1,800.50", "The answer is  7", "The answer is \n The answer is 5", "1 and 18\n\n19",
               "18 apples\nor 7", "The answer is x", "so \uff11\uff18", "007", "1.8", "-18", "the answer is 7 of 18", "18\n7", ".18 x", "3.x18"]  # fmt: skip
    return [(a, [r]) for a in answers for r in ("18", "The answer is 1800.", "7", "#### 18", "1", "none")]


def exam_outputs():
    answers = ["", "5", "5.0", "The output is 5", "the final output is 5 , or", "the value of the code is [1, 2, 3]", "[ [1, 2] [3] ]", "'ab'", "ab cd",
               "5 and more words than there may be", "the final output the final output 7 8 9 10 11 12 5", "one two 5 three four", " 5 one two three",
               "one two three 5 ", "5 one two three ", "\n5\n", "this", "True", "1e1", "inf", "nan", "+5", "a.0b", "\uff15", "5\u00a0is", "printed5 a b"]  # fmt: skip
    return [(a, [r]) for a in answers for r in ("5", "5.0", "[1, 2, 3]", "[[1, 2], [3]]", "ab", "10", "nan", "this is", "AB")]


def judgments():
    answers = ["", "True", "false.", "It is TRUE, not false", "untrue", "maybe [fact: True]", "False [fact: True]", "falsetrue", "t rue"]
    return [(a, [r]) for a in answers for r in ("True", "False", "true ")]


def topics():
    made = [("The topic is the history of  tea.", ["The history of tea"]), ("TEA", ["tea "]), ("5", ["5.0"]), ("5", ["5 cups"]), ("a A", ["A"]),
            ("A, B", ["AB"]), ("", ["B"]), ("the", ["a"]), ("the B", ["A B"]), ("thea B", ["B"]), ("+1", ["1"]), ("x\ny", ["x y"])]  # fmt: skip
    return made + nasty(12)


def integers():
    return [(a, [r]) for a in ("", "12", "x12.5", "-12", "\uff11 12", "1 2") for r in ("12", "1")]


def boxes():
    latex = ["\\frac12", "\\frac{1}{2}", "\\dfrac{1}{2}", "0.5", ".5", "1/2", "-1/2", "01/2", "\\frac1{72}", "\\frac{1}2",
             "\\sqrt3", "\\sqrt{3}", "2\\sqrt 3", "x=5", "k = 5", "abc=5", "5", "5\\%", "5\\text{ cm}", "90^\\circ",
             "90^{\\circ}", "\\left(1,2\\right)", "(1, 2)", "\\$5", "\\frac", "\\frac1", "\\sqrt", "a\\text{ b}\\text{ c}",
             "", "10\\!000", "10000", "x = .5", "{.5}", "{0.5}", "\\frac\u00bd3", "3/4/5", "\\tfrac34", "a\n5", "\\\\frac12",
             "\\sqrt\\sqrt2", "-0/2", "\\frac{\\frac12}3", "025"]  # fmt: skip
    made = [(f"so \\boxed{{{a}}}.", [b]) for a in latex for b in latex if b]
    random.seed(1)
    random.shuffle(made)
    same = [(f"\\boxed{{{a}}}", [b]) for a, b in (("\\frac12", "0.5"), ("1/2", "\\dfrac{1}{2}"), ("x=5", "5"), (".5", "0.5"),
            ("5\\text{ cm}", "5"), ("\\frac", "\\frac"), ("90^\\circ", "90"), ("\\sqrt3", "\\sqrt{3}"), ("3\\%", "3"))]  # fmt: skip
    shapes = ["5", "\\boxed{4} then \\boxed{5}", "\\boxed{5", "\\boxed 5", "\\fbox{5}", "\\boxed {5}", "\\boxed{{5}}", "",
              "\\boxed{5} \\boxed", "\\boxed{}", "\\boxed{5}\\fbox{4}", "\\boxed{5}}", "\\boxedx{5}"]  # fmt: skip
    made = made[:150] + same + [(a, [r]) for a in shapes for r in ("5", "thus \\boxed{5}")]
    return made


def sums():
    answers = ["", "#### 1,234", "so\n#### -5", "####5", "#### $5", "5", "is 5.", "#### 5.", "costs $1,234.50.", "#### x #### 5",
               "1,234", "-5", "- 5", "5 and 6", "\uff15", "#### 5\n#### 6", "...", "a-7b", "x $", "#### -"]  # fmt: skip
    return [(a, [r]) for a in answers for r in ("1 + 4 = 5\n#### 5", "#### 1,234", "-5", "1,234.50", "6")]


def needles():
    made = nasty(40, 4) + [("\x00\x01 a\tb \x1f", ["a\nb"]), ("a\tb", ["a b"]), ("X\u03a3", ["x\u03c2"]), ("7", ["7 "])]
    return made + [("red and blue", ["red", "green", "Blue", "and "]), ("RED\n", ["red"])]


def cases():
    lenient, strict = (lambda a, r: token_f1(a, r, True)), (lambda a, r: token_f1(a, r, False))
    fuzzy = {"difflib": difflib_ratio, "levenshtein": Levenshtein.ratio}
    return {
        "f1": best(lenient, prose()),
        "longbench_f1": best(strict, prose()) + with_params(best(on_first_line(strict), prose()[::2]), first_line=True),
        "exact_match": best(lambda a, r: float(words(a) == words(r)), prose()),
        "rouge_1": best(rouge_score("rouge1"), prose()) + long_case(rouge_score("rouge1")),
        "rouge_2": best(rouge_score("rouge2"), prose()) + long_case(rouge_score("rouge2")),
        "rouge_l": best(rouge_score("rougeL"), prose()) + long_case(rouge_score("rougeL")),
        "rouge_lsum": best(rouge_lsum, prose() + summaries()),
        "longbench_rouge": best(longbench_rouge, prose())
        + with_params(best(on_first_line(longbench_rouge), prose()[::2]), first_line=True),
        "classification": classes(),
        "count": best(count, counts()),
        "retrieval": best(retrieval("Paragraph "), numbers()),
        "retrieval_zh": best(retrieval("\u6bb5\u843d"), chinese()),
        "code_sim": best(code_sim(difflib_ratio), code()[::9])
        + [c for name, f in fuzzy.items() for c in with_params(best(code_sim(f), code()), ratio=name)],
        "string_match_part": best(string_match, needles()),
        "string_match_all": mean(string_match, needles()),
        "contains": best(contains, folds()),
        "contains_all": mean(contains, folds()),
        "exact": best(exact, folds()),
        "prefix": best(prefix, folds()),
        "choice": best(choice, letters()),
        "longbench_v2_choice": best(longbench_v2_choice, choices()),
        "gpqa_choice": fewer(best(gpqa_choice, bracketed())),
        "infinitebench_choice": [{"answer": a, "references": r, "score": infinitebench_choice(a, r)} for a, r in books()],
        "choice_pro": best(choice_pro, ten_choices()),
        "f1_characters": best(f1_characters, chinese_texts()),
        "leading_numbers": best(leading_numbers, sequences()),
        "first_number": best(first_number, found_numbers()),
        "last_integer": best(last_integer, run_values()),
        "infinitebench_option": [{"answer": a, "references": r, "score": infinitebench_option(a, r)} for a, r in options()],
        "leval_choice": fewer(best(leval_choice, exam_letters())),
        "leval_letters": fewer(best(leval_letters, exam_letters())),
        "leval_math": fewer(best(leval_math, exam_sums())),
        "leval_code": fewer(best(leval_code, exam_outputs())),
        "leval_judgment": best(leval_judgment, judgments()),
        "leval_part": best(leval_part, topics()),
        "word": best(infinitebench_word, keys()),
        "infinitebench_name": fewer([{"answer": a, "references": r, "score": infinitebench_name(a, r)} for a, r in names()]),
        "first_integer": best(first_integer, integers()),
        "boxed": best(boxed, boxes()),
        "gsm8k": best(gsm8k, sums()),
        "last_number": best(last_number, sums()),
    }


def compact(case):
    return json.dumps(case, ensure_ascii=False, separators=(",", ":"))


def main():
    if "--against" in sys.argv:
        same = public_scorers.compare(json.loads(FILE.read_text(encoding="utf-8")), sys.argv[sys.argv.index("--against") + 1])
        sys.exit(not same)
    lines = [f'"{name}": [\n' + ",\n".join(map(compact, made)) + "\n]" for name, made in cases().items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    if "--check" in sys.argv:
        sys.exit(text != FILE.read_text(encoding="utf-8"))
    FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
