"""Recall problems built to an exact token length: what both models are trained on and what evaluate.py measures.

A generator makes a Problem (facts, and turns of question and answer); `assemble` hides its facts in text of the corpus and
returns exactly `length` tokens with the places of the answers. Everything is drawn from one random.Random, so a seed names
a sample. Public formats: RULER (Hsieh et al. 2024), InfiniteBench (Zhang et al. 2024); the other wordings are ours.
"""

import json
import lzma
import math
import random
import re
import string
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

EOS = "<|im_end|>"
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


# ---- text ----------------------------------------------------------------------------------------------------------


class Text:
    """The corpus as tokens, with the places where sentences begin, and words for keys and values."""

    def __init__(self, tokenizer, documents):
        self.tokenizer = tokenizer
        sentences = [s for d in documents for s in split_sentences(d)]
        encoded = tokenizer.encode_batch_fast(sentences, add_special_tokens=False)
        lengths = np.array([len(e.ids) for e in encoded])
        self.ids = np.concatenate([np.array(e.ids, dtype=np.int32) for e in encoded])
        self.starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        noise = self.encode("\n" + NOISE)
        self.noise_ids = np.tile(np.array(noise, dtype=np.int32), 40000 // len(noise))
        self.noise_starts = np.arange(0, len(self.noise_ids), len(noise))
        everything = "\n".join(documents)
        common = Counter(re.findall(r"\b[a-z]{4,9}\b", everything)).most_common(8000)
        self.words = [w for w, _ in common][min(300, len(common) // 10) : 6300]
        names = Counter(re.findall(r"(?<=[a-z,] )[A-Z][a-z]{3,8}\b", everything)).most_common(1300)
        self.names = [w for w, _ in names][min(40, len(names) // 10) : 1040]

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def hay(self, r, length, noise=False):
        """`length` tokens and the places in them where a sentence begins."""
        ids, starts = (self.noise_ids, self.noise_starts) if noise else (self.ids, self.starts)
        if length <= 0:
            return ids[:0], [0]
        last = np.searchsorted(starts, len(ids) - length - 1)
        begin = starts[r.randrange(max(1, last))]
        inside = starts[np.searchsorted(starts, begin) : np.searchsorted(starts, begin + length)] - begin
        return ids[begin : begin + length], inside.tolist()


def split_sentences(document):
    """Pieces that begin with a blank or a line end, so that they can be encoded one by one."""
    pieces = re.findall(r"[ \n]?[^\n]+?(?:[.!?][\"')]*(?= )|(?=\n)|$)", document)
    return [p if p[0] in " \n" else "\n" + p for p in pieces]


def read_documents(path):
    with lzma.open(path, "rt") as lines:
        return [json.loads(line)["text"] for line in lines]


# ---- problems ------------------------------------------------------------------------------------------------------


@dataclass
class Turn:
    question: str
    answer: str
    opening: str = ""  # the first words of the answer, given


@dataclass
class Problem:
    facts: list  # (text, must it stay), in the order in which they appear
    turns: list
    intro: str = ""
    block: bool = False  # the facts stand together
    hay: str = "text"  # text | noise | none: nothing between the facts
    joint: str = " "  # between the text and a fact
    layout: tuple | None = None  # LAYOUTS entry; drawn when None


# What stands before a question, and between it and the answer or its opening. A final blank belongs to the answer.
LAYOUTS = [
    ("\n", " "),
    ("\n", "\n"),
    ("\n\nQuestion: ", "\nAnswer: "),
    ("\n\nQ: ", "\nA: "),
    ("\nQuestion: ", " Answer: "),
    ("\nUser: ", "\nAssistant: "),
    ("\n\n", "\n"),
    ("\n### Question\n", "\n### Answer\n"),
    (" ", " "),
    ("\n\n", "\nAnswer: "),
    ("\nQuestion: ", "\n"),
    ("\n- ", "\n- "),
]
CHAT = ("chat", "")


def digits(r, n):
    return "".join(r.choices(string.digits, k=n))


def uuid(r):
    return "-".join("".join(r.choices("0123456789abcdef", k=k)) for k in (8, 4, 4, 4, 12))


def number(r, n=7):
    return str(r.randrange(1, 10)) + digits(r, n - 1)


class Maker:
    """Draws keys and values of one style."""

    KEYS = (
        ["pair"] * 8
        + ["word"] * 3
        + ["name"] * 2
        + ["full name"] * 2
        + ["two words", "code", "numbered", "uuid", "file", "hex"]
    )
    VALUES = (
        ["7 digits"] * 9
        + ["digits"] * 5
        + ["pair"] * 2
        + ["word"] * 2
        + ["two words"] * 2
        + ["uuid", "hex", "code", "name", "time", "price"]
    )

    def __init__(self, r, text, style):
        self.r, self.text, self.style = r, text, style
        self.noun = r.choice(
            ["room", "box", "item", "locker", "drawer", "station", "ticket", "sample", "line", "entry"]
        )
        self.length = r.randint(2, 9)

    def draw(self):
        r, w, n, s = self.r, self.text.words, self.text.names, self.style
        if s == "7 digits":
            return number(r)
        if s == "digits":
            return number(r, self.length)
        if s == "pair":
            return r.choice(w) + "-" + r.choice(w)
        if s == "word":
            return r.choice(w)
        if s == "two words":
            return r.choice(w) + " " + r.choice(w)
        if s == "name":
            return r.choice(n)
        if s == "full name":
            return r.choice(n) + " " + r.choice(n)
        if s == "code":
            return "".join(r.choices(string.ascii_uppercase, k=r.randint(2, 3))) + "-" + digits(r, r.randint(2, 4))
        if s == "letters":
            return "".join(r.choices(string.ascii_uppercase, k=self.length))
        if s == "numbered":
            return f"{self.noun} {r.randrange(1, 2000)}"
        if s == "uuid":
            return uuid(r)
        if s == "file":
            return r.choice(w) + r.choice([".txt", ".csv", ".log", ".dat"])
        if s == "hex":
            return "".join(r.choices("0123456789abcdef", k=8))
        if s == "time":
            return f"{r.randrange(24):02}:{r.randrange(60):02}"
        if s == "price":
            return f"${r.randrange(1, 1000)}.{r.randrange(100):02}"
        raise ValueError(f"got style '{s}'")

    def some(self, count):
        """Different ones; fewer when the style does not have so many."""
        out = {}
        for _ in range(4 * count + 20):
            if len(out) == count:
                break
            out[self.draw()] = 1
        return list(out)


ATTRIBUTES = [
    "special magic number",
    "special magic number",
    "special magic number",
    "code",
    "secret code",
    "password",
    "access code",
    "serial number",
    "phone number",
    "locker number",
    "value",
    "number",
    "key",
    "token",
    "reference number",
    "lucky number",
    "account number",
    "badge number",
    "magic word",
    "passkey",
    "registration",
    "identifier",
    "entry",
    "combination",
    "label",
]
FACTS = [
    "One of the special magic numbers for {k} is: {v}.",
    "One of the special magic numbers for {k} is: {v}.",
    "One of the {a}s for {k} is: {v}.",
    "The {a} for {k} is {v}.",
    "The {a} for {k} is: {v}.",
    "The {a} of {k} is {v}.",
    "Remember that the {a} of {k} is {v}.",
    "Remember: the {a} for {k} is {v}.",
    "{k}: {v}",
    "{k} = {v}",
    "{k} -> {v}",
    "For {k}, the {a} is {v}.",
    "{k}'s {a} is {v}.",
    "{k} has the {a} {v}.",
    "Note that {k} has {a} {v}.",
    "[{k}] {v}",
    "The {a} assigned to {k} was {v}.",
    "The {a} that belongs to {k} is {v}.",
    "Fact: the {a} of {k} equals {v}.",
    "- {k} | {v}",
    '"{k}": "{v}",',
    "Record: {k}, {a}: {v}.",
    "Set {k} to {v}.",
    "It is known that the {a} of {k} is {v}.",
    "In the register, {k} is listed with {a} {v}.",
    "({k}, {v})",
    "The {a} is {v} for {k}.",
    "Key {k} holds value {v}.",
    "Please note: {v} is the {a} of {k}.",
    "{k} was given the {a} {v}.",
    "Register content of {k} is <{v}>.",
]
ONE = [
    "What is the {a} for {k} mentioned in the provided text?",
    "What is the {a} for {k} mentioned in the provided text?",
    "What is the {a} for {k}?",
    "What is the {a} of {k}?",
    "What is {k}'s {a}?",
    "Which {a} belongs to {k}?",
    "Tell me the {a} of {k}.",
    "What {a} does {k} have?",
    "Give the {a} for {k}.",
    "Find the {a} of {k} in the text above.",
    "What was the {a} assigned to {k}?",
    "Recall the {a} of {k}.",
    "According to the text, what is the {a} of {k}?",
    "Look up {k}.",
    "{k}?",
    "Value of {k}:",
    "Key: {k}",
    "Do you remember the {a} for {k}?",
    "I need the {a} for {k}.",
    "State the {a} of {k}. Answer with the {a} only.",
    "Earlier the text gave a {a} for {k}. What is it?",
    "Please return the {a} of {k}.",
    "{k}'s {a}?",
    "What does the text say about {k}?",
]
ONE_OPENING = [
    "The {a} for {k} mentioned in the provided text is",
    "The {a} for {k} is",
    "The {a} of {k} is",
    "{k}:",
    "Answer:",
    "It is",
    "The answer is",
    "{k}'s {a} is",
    "{k} ->",
    "The {a} is",
    "The {a} for {k} is:",
    "Value:",
    "Sure! The {a} of {k} is",
]
SOME = [
    "What are all the {a}s for {ks} mentioned in the provided text?",
    "What are all the {a}s for {ks} mentioned in the provided text?",
    "What are the {a}s of {ks}?",
    "Give the {a}s for {ks}.",
    "Tell me the {a}s of {ks}, in this order.",
    "List the {a}s for {ks}.",
    "List the {a}s for: {ks}.",
    "Look up {ks}.",
    "{ks}?",
    "For each of {ks}, give the {a}.",
    "I need the {a}s of {ks}.",
    "Return the {a}s of these, in order: {ks}.",
]
SOME_OPENING = [
    "The {a}s for {ks} mentioned in the provided text are",
    "The {a}s for {ks} are",
    "The {a}s are",
    "Answer:",
    "They are",
    "The {a}s are:",
]
ALL = [
    "What are all the {a}s for {k} mentioned in the provided text?",
    "What are all the {a}s for {k} mentioned in the provided text?",
    "What are all the {a}s of {k}?",
    "List every {a} of {k}.",
    "Which {a}s belong to {k}?",
    "Give all {a}s for {k} in the order in which they appear.",
]
ALL_OPENING = [
    "The {a}s for {k} mentioned in the provided text are",
    "The {a}s for {k} are",
    "The {a}s of {k} are",
    "All {a}s of {k}:",
    "Answer:",
]
EVERY = [
    "List all {a}s in the order in which they appear.",
    "List every {a} mentioned in the text, in order.",
    "Write down all {a}s in order of appearance.",
    "Which {a}s does the text mention? List them in order.",
    "Extract all {a}s from the text above, in order.",
]
INTROS = [
    "",
    "",
    "Some {a}s are hidden within the following text. Make sure to memorize it. I will quiz you about the {a}s afterwards.",
    "A {a} is hidden within the following text. Make sure to memorize it. I will quiz you about the {a} afterwards.",
    "Read the following text carefully. Questions follow.",
    "Below is a long document with some facts in it.",
    "Remember the {a}s in this text.",
    "Memorize everything that is said below.",
]


def fill(template, a="", k="", v="", ks=""):
    return template.replace("{a}", a).replace("{ks}", ks).replace("{k}", k).replace("{v}", v)


def enumerate_and(keys):
    """'a, b, and c', as RULER joins its queries."""
    return keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + ", and " + keys[-1]


def maybe(r, templates, p=0.5):
    return r.choice(templates) if r.random() < p else ""


def list_turn(r, keys, values, question, style=None):
    """A list as answer, in one of the forms that the question names."""
    style = style or r.choice(["values", "values", "pairs", "numbered", "lines"])
    if style == "values":
        return Turn(
            question + r.choice(["", " Separate them by commas.", " Values only, separated by commas."]),
            ", ".join(values),
        )
    if style == "pairs":
        sep = r.choice([": ", " = "])
        return Turn(
            question + f" Write one line each, as key{sep}value.", "\n".join(k + sep + v for k, v in zip(keys, values))
        )
    if style == "numbered":
        return Turn(question + " Number the lines.", "\n".join(f"{i}. {v}" for i, v in enumerate(values, 1)))
    return Turn(question + " One per line.", "\n".join(values))


def records(
    r,
    text,
    room,
    *,
    n=None,
    keys=None,
    values=None,
    attribute=None,
    fact=None,
    turn=None,
    count=None,
    copies=None,
    intro=None,
    question=None,
    opening=None,
    hay=None,
    layout=None,
    turns=None,
    joint=None,
    style=None,
):
    """Keys and values. Turns: one key, some keys, a list of keys, all values of a key, everything in order, the key of a value."""
    a = attribute or r.choice(ATTRIBUTES)
    km, vm = Maker(r, text, keys or r.choice(Maker.KEYS)), Maker(r, text, values or r.choice(Maker.VALUES))
    if n is None:
        most = max(2, room // (60 if "uuid" in (km.style, vm.style) else 26))
        n = most if r.random() < 0.15 else int(math.exp(r.uniform(0, math.log(most))))
    ks = km.some(max(1, n))
    n = len(ks)
    many = copies is not None or (turn in (None, "all") and r.random() < (1.0 if turn == "all" else 0.2))
    per_key = [1] * n
    if many:
        for i in range(min(n, r.randint(1, 4))):
            per_key[i] = copies or r.randint(2, 6)
    entries = [i for i, c in enumerate(per_key) for _ in range(c)]
    r.shuffle(entries)
    vs = [[] for _ in ks]
    fresh = iter(vm.some(len(entries)))
    facts_of = []
    for i in entries:
        v = next(fresh, None) or vm.draw()
        vs[i].append(v)
        facts_of.append((i, v))
    fact = fact or r.choice(FACTS)
    if fact.startswith("One of the special"):
        a = a if attribute else "special magic number"
    singles = [i for i in range(n) if per_key[i] == 1]
    several = [i for i in range(n) if per_key[i] > 1]
    if turns is None:
        turns = 1 if r.random() < 0.25 else int(math.exp(r.uniform(0, math.log(max(2, min(64, room // 70))))))
    asked, out = set(), []
    for _ in range(turns):
        kind = (
            turn
            or r.choices(
                ["one", "some", "list", "all", "every", "key"], [8, 3, 4, 4 if several else 0, 1 if n <= 40 else 0, 0.6]
            )[0]
        )
        if kind == "all" and not several or kind in ("one", "key", "list", "some") and not singles:
            continue
        if kind == "one":
            i = r.choice(singles)
            asked.add(i)
            q, o = question or r.choice(ONE), maybe(r, ONE_OPENING) if opening is None else opening
            out.append(Turn(fill(q, a, ks[i]), vs[i][0], fill(o, a, ks[i])))
        elif kind == "key":
            i = r.choice(singles)
            asked.add(i)
            out.append(
                Turn(
                    fill(
                        r.choice(["Which one has the {a} {v}?", "Whose {a} is {v}?", "Which key has the value {v}?"]),
                        a,
                        v=vs[i][0],
                    ),
                    ks[i],
                )
            )
        elif kind == "all":
            i = r.choice(several)
            asked.add(i)
            q, o = question or r.choice(ALL), maybe(r, ALL_OPENING) if opening is None else opening
            out.append(Turn(fill(q, a, ks[i]), ", ".join(vs[i]), fill(o, a, ks[i])))
        elif kind == "every":
            if sum(per_key) > (count or 40) or len(set(v for _, v in facts_of)) < len(facts_of):
                continue
            asked.update(range(n))
            out.append(
                list_turn(
                    r,
                    [ks[i] for i, _ in facts_of],
                    [v for _, v in facts_of],
                    fill(question or r.choice(EVERY), a),
                    style,
                )
            )
        else:
            most = min(len(singles), 5 if kind == "some" else 36, max(2, room // 30))
            if most < 2:
                continue
            chosen = r.sample(
                singles, min(count, len(singles)) if count else most if r.random() < 0.3 else r.randint(2, most)
            )
            asked.update(chosen)
            mine, its = [ks[i] for i in chosen], [vs[i][0] for i in chosen]
            joined = enumerate_and(mine) if kind == "some" and r.random() < 0.6 else ", ".join(mine)
            if question and "{a}s for {ks} mentioned" in question:
                joined = enumerate_and(mine)
            q = fill(question or r.choice(SOME), a, ks=joined)
            if kind == "list" and (style or r.random() < 0.5):
                out.append(list_turn(r, mine, its, q, style))
            else:
                o = maybe(r, SOME_OPENING) if opening is None else opening
                out.append(Turn(q, ", ".join(its), fill(o, a, ks=joined)))
    hay = hay or r.choices(["text", "none", "noise"], [16, 2, 1])[0]
    return Problem(
        [(fill(fact, a, ks[i], v), i in asked) for i, v in facts_of],
        out,
        fill(r.choice(INTROS) if intro is None else intro, a),
        hay=hay,
        joint=joint or ("\n" if hay != "text" or r.random() < 0.3 else " "),
        layout=layout,
    )


def key_lists(r, text, room):
    """Long lists of keys, all values in the order of the question."""
    n = r.randint(4, max(4, min(64, room // 36)))
    return records(
        r,
        text,
        room,
        n=n,
        turn="list",
        turns=r.choice([1, 1, 2]),
        count=r.choice([None, r.randint(min(n, 8), min(n, 40, max(2, room // 40)))]) if n >= 8 else None,
        style=r.choice(["pairs", "pairs", "values", "values", None]),
        question=r.choice(["List the {a}s for: {ks}.", None]),
        keys=r.choice(["pair", "pair", "pair", None]),
        values=r.choice(["7 digits", "7 digits", None]),
    )


def ruler(r, text, room):
    """RULER's wordings of one value, all values of a key, and values of several keys, in texts with few and with many facts."""
    what, values = r.choice([("number", "7 digits")] * 5 + [("word", "pair"), ("uuid", "uuid"), ("number", "two words")])
    kind = r.choices(["one", "all", "some", "every"], [8, 7, 3, 1])[0]
    few = r.random() < 0.7
    n = r.randint(1, 6) if few else int(math.exp(r.uniform(0, math.log(max(2, room // (70 if what == "uuid" else 26))))))
    if kind == "all":
        n = r.choice([1, min(n, 12)])
    if kind == "some":
        n = max(2, n)
    if kind == "every":
        n = min(n + 1, 40)
    asks_one = "The special magic {a} for {k} mentioned in the provided text is"
    asks_all = "The special magic {a}s for {k} mentioned in the provided text are"
    question, opening = {
        "one": ("What is the special magic {a} for {k} mentioned in the provided text?", asks_one),
        "all": ("What are all the special magic {a}s for {k} mentioned in the provided text?", asks_all),
        "some": (
            "What are all the special magic {a}s for {ks} mentioned in the provided text?",
            asks_all.replace("{k}", "{ks}"),
        ),
        "every": ("List all special magic {a}s in the order in which the provided text mentions them.", ""),
    }[kind]
    many = "Some special magic {a}s are hidden within the following text. Make sure to memorize it. I will quiz you about the {a}s afterwards."
    one = "A special magic {a} is hidden within the following text. Make sure to memorize it. I will quiz you about the {a} afterwards."
    hay = r.choices(["text", "none", "noise"], [16, 2, 2])[0]
    return records(
        r,
        text,
        room,
        n=n,
        keys=r.choice(["pair", "pair", "pair", "word", "uuid" if what == "uuid" else "pair"]),
        values=values,
        attribute=what,
        fact="One of the special magic {a}s for {k} is: {v}.",
        turn=kind,
        turns=1 if r.random() < 0.6 else r.randint(2, 6),
        copies=r.choice([2, 3, 4, 4, 4, 5, 6]) if kind == "all" else None,
        intro=one if n == 1 and kind == "one" and r.random() < 0.4 else many,
        question=question,
        opening=opening if r.random() < 0.9 else "",
        hay=hay,
        joint=" " if hay == "text" and r.random() < 0.7 else "\n",
        layout=("\n", " ") if r.random() < 0.75 else None,
    )


SMALL_WORDS = (
    "the a of to in and was is that with for by his her it as at on from which had has have been about all into over under after before "
    "every some any their there not will can must one this who when what where how does did you your we our they"
).split()
LABELS = [
    "Answer",
    "Reply",
    "Response",
    "Result",
    "Solution",
    "A",
    "Output",
    "Assistant",
    "Bot",
    "Value",
    "Note",
    "Model",
    "Found",
    "You",
    "Final answer",
]


def phrase(r, text, low, high):
    return " ".join(
        r.choice(SMALL_WORDS) if r.random() < 0.45 else r.choice(text.words) for _ in range(r.randint(low, high))
    )


def any_wording(r, text, room):
    """Facts and questions of words drawn by chance: what counts is the key, and the slot where facts differ."""
    natural = r.random() < 0.25  # a usual fact, an unusual question, or the other way round
    km, vm = Maker(r, text, r.choice(Maker.KEYS)), Maker(
        r,
        text,
        r.choice(
            ["7 digits"] * 3
            + ["digits"] * 4
            + ["code", "hex", "uuid", "pair", "word", "name", "price", "time", "two words"]
        ),
    )
    words_only = vm.style in ("pair", "word", "name", "two words")
    start, middle, rest = phrase(r, text, 0, 5), phrase(r, text, 1, 6), phrase(r, text, 0, 4)
    if words_only:
        middle = (middle + " " + r.choice(["is", "was", "are", "named", "called"])) + r.choice(["", ":"])
    middle = r.choice([" ", " ", " ", ", ", ": "]) + middle + " "
    value_first = not words_only and r.random() < 0.35
    fact = f"{start} {{v}}{middle}{{k}} {rest}" if value_first else f"{start} {{k}}{middle}{{v}} {rest}"
    a = phrase(r, text, 1, 2)
    if r.random() < 0.3:
        fact = r.choice(FACTS)
    fact = fact.strip() + r.choice([".", ".", ".", "", "!", ";"])
    fact = fact if fact[0] == "{" else fact[0].upper() + fact[1:]
    most = max(2, room // 40)
    n = max(1 if not words_only else 2, min(most, int(math.exp(r.uniform(0, math.log(most + 1))))))
    ks = km.some(n)
    vs = (vm.some(len(ks)) + [vm.draw() for _ in ks])[: len(ks)]
    label = r.choice(LABELS)
    layout = r.choice(
        [
            (
                r.choice(
                    [
                        "\n",
                        "\n\n",
                        " ",
                        "\nQuestion: ",
                        "\n\nQ: ",
                        "\nUser: ",
                        f"\n{r.choice(text.words).capitalize()}: ",
                    ]
                ),
                r.choice(["\n", " ", f"\n{label}: ", f" {label}: ", f"\n\n{label}: "]),
            )
        ]
        * 2
        + [CHAT]
    )
    turns, asked = [], set()
    lead, after = phrase(r, text, 1, 7), phrase(r, text, 0, 6)
    for _ in range(r.randint(1, max(1, min(24, room // 100)))):
        if r.random() < 0.3:
            lead, after = phrase(r, text, 1, 7), phrase(r, text, 0, 6)
        several = n > 2 and r.random() < 0.4
        chosen = (
            r.sample(range(len(ks)), r.randint(2, min(len(ks), 24, max(2, room // 50))))
            if several and len(ks) > 2
            else [r.randrange(len(ks))]
        )
        asked.update(chosen)
        keys = ", ".join(ks[i] for i in chosen)
        answer = ", ".join(vs[i] for i in chosen)
        question = (
            fill(r.choice(ONE), a, keys)
            if natural
            else r.choice(
                [
                    f"{lead} {keys} {after}",
                    f"{lead} {keys}",
                    f"{lead}: {keys} {after}",
                    f"{keys}: {lead}",
                    f"{lead} {middle.strip(' ,:')} {keys}",
                    f"{lead} {keys} {middle.strip(' ,:')} {after}",
                ]
            ).strip()
        )
        question += r.choice(["?", "?", "?", ".", ":", ""]) if question[-1] not in "?.:" else ""
        opening = ""
        if len(chosen) == 1 and r.random() < 0.4:
            stem = fill(fact[: fact.index("{v}")], a, keys).strip()
            opening = r.choice([stem, stem, phrase(r, text, 1, 4).capitalize(), f"{keys}{middle.rstrip()}", f"{keys}:"])
        turns.append(Turn(question[0].upper() + question[1:] if r.random() < 0.7 else question, answer, opening))
    return Problem(
        [(fill(fact, a, k, v), i in asked) for i, (k, v) in enumerate(zip(ks, vs))],
        turns,
        r.choice(["", "", phrase(r, text, 2, 10).capitalize() + "."]),
        joint=r.choice(["\n", " ", " "]),
        layout=layout,
    )


def numbered(r, text, room, *, n=None, values=None, fact=None, question=None, style=None, whole=False, layout=None):
    """Items that carry their place in a list."""
    n = n or r.randint(2, max(2, min(40, room // 30)))
    vs = Maker(
        r, text, values or r.choice(["word"] * 3 + ["7 digits", "digits", "pair", "two words", "name", "code"])
    ).some(n)
    noun = r.choice(["Item", "Step", "Entry", "Line", "Number", "Point", "Stop", "Name"])
    fact = fact or r.choice(
        [
            "{n} {i} is {v}.",
            "{n} {i}: {v}",
            "{n} {i} on the list is {v}.",
            "{n} {i} of the list: {v}.",
            "{n} no. {i} reads {v}.",
            "Remember {l} {i}: {v}.",
            "The list's {l} {i} is {v}.",
        ]
    )
    rows = [
        (i, fact.replace("{n}", noun).replace("{l}", noun.lower()).replace("{i}", str(i)).replace("{v}", v))
        for i, v in enumerate(vs, 1)
    ]
    if r.random() < 0.5:
        r.shuffle(rows)
    turns = []
    for _ in range(1 if whole else r.randint(1, 4)):
        if not whole and r.random() < 0.35:
            i = r.randrange(len(vs))
            turns.append(
                Turn(
                    r.choice(["What is {l} {i}?", "Which one is {l} {i}?", "Give {l} {i} of the list."])
                    .replace("{l}", noun.lower())
                    .replace("{i}", str(i + 1)),
                    vs[i],
                )
            )
            continue
        lo, hi = (0, len(vs)) if whole or r.random() < 0.6 else sorted(r.sample(range(len(vs) + 1), 2))
        part = vs[lo:hi]
        q = question or (
            r.choice(
                [
                    "List all {l}s in order.",
                    "Write the complete list, from {l} 1 to {l} {z}.",
                    "Recall every {l} in the order of their numbers.",
                    "What are the {l}s, in order?",
                    "Repeat the list in order.",
                ]
            )
            if hi - lo == len(vs)
            else r.choice(["List {l}s {y} to {z} in order.", "Give {l} {y} to {l} {z}."])
        )
        q = q.replace("{l}", noun.lower()).replace("{y}", str(lo + 1)).replace("{z}", str(hi))
        t = list_turn(r, [f"{noun} {i}" for i in range(lo + 1, hi + 1)], part, q, style)
        if t.answer.startswith("1. "):
            t.answer = "\n".join(f"{i}. {v}" for i, v in enumerate(part, lo + 1))
        turns.append(t)
    return Problem(
        [(row, True) for _, row in rows],
        turns,
        r.choice(["", "", "A list is hidden in the following text. Remember it.", "Memorize the list in this text."]),
        joint=r.choice(["\n", " "]),
        layout=layout,
    )


def ordered(r, text, room):
    """Long lists in order, the whole list as the answer."""
    return numbered(
        r,
        text,
        room,
        n=r.randint(min(12, room // 30), max(2, min(40, room // 26))),
        values=r.choice(["word"] * 5 + ["7 digits", "7 digits", "pair", "name", None]),
        fact=r.choice(["Item {i} on the list is {v}.", None]),
        question=r.choice(["List all items in order.", None]),
        style=r.choice(["values", "values", "numbered", "lines", None]),
        whole=True,
        layout=r.choice([("\n", "\n"), None]),
    )


def key_value(r, text, room, *, n=None, keys=None, form=None, question=None, opening=None, turns=None, layout=None):
    """A store in one block: JSON as in InfiniteBench, lines, a table."""
    km = Maker(r, text, keys or r.choice(["uuid", "pair", "pair", "word", "hex", "code", "full name", "file"]))
    vm = Maker(
        r, text, keys if keys == "uuid" else r.choice(["uuid", "7 digits", "7 digits", "digits", "word", "hex", "pair"])
    )
    most = max(2, int(room / (20 + 28 * ((km.style == "uuid") + (vm.style == "uuid")))))
    ks = km.some(n or (most if r.random() < 0.3 else r.randint(2, most)))
    vs = [vm.draw() for _ in ks]
    form = form or r.choice(["json", "json", "json lines", "colon", "equals", "csv", "table"])
    if form == "json":
        facts = [
            f'{"{" if i == 0 else " "}"{k}": "{v}"{"}" if i == len(ks) - 1 else ","}'
            for i, (k, v) in enumerate(zip(ks, vs))
        ]
        intro, joint = (
            r.choice(["Extract the value corresponding to the specified key in the JSON object below.", ""]),
            "",
        )
        facts[0] = "\n\nJSON data:\n" + facts[0] if intro else "\n" + facts[0]
    else:
        sep = {"json lines": '": "', "colon": ": ", "equals": " = ", "csv": ",", "table": " | "}[form]
        edge = '"' if form == "json lines" else ""
        facts = [edge + k + sep + v + edge for k, v in zip(ks, vs)]
        intro, joint = r.choice(["", "Key-value pairs:", "The following store is to be searched.", "Data:"]), "\n"
    out = []
    for i in r.choices(range(len(ks)), k=turns or r.randint(1, max(1, min(20, room // 200)))):
        q, o = question, opening
        if q is None:
            q, o = r.choice(
                [
                    ('Key: "{k}"', "The value associated with the specified key is:"),
                    ("Key: {k}", "Value:"),
                    ("What is the value of {k}?", ""),
                    ("What is the value for the key {k}?", "The value is"),
                    ("Return the value stored under {k}.", ""),
                    ("{k}", ""),
                    ("Look up {k}.", "{k}:"),
                ]
            )
        out.append(Turn(fill(q, k=ks[i]), vs[i], fill(o, k=ks[i])))
    return Problem([(f, True) for f in facts], out, intro, block=True, hay="text", joint=joint, layout=layout)


def variable_tracking(r, text, room, *, chains=None, hops=None, hay=None, ruler=False):
    """Chains of assignments; all names that end up with a value (RULER)."""
    chains = chains or r.randint(1, max(1, min(6, room // 300)))
    names = Maker(r, text, "letters")
    names.length = r.choice([3, 5, 5, 5])
    sizes = [(hops or r.randint(1, 6)) + 1 for _ in range(chains)]
    all_names = iter(names.some(sum(sizes)))
    groups = [[next(all_names) for _ in range(s)] for s in sizes]
    values = [number(r, 5) for _ in groups]
    end = r.choice(["", ".", ""])
    if ruler:
        end = ""
    rows = []
    for g, v in zip(groups, values):
        at = sorted(r.random() for _ in g)
        rows += [(at[j], f"VAR {x} = {v if j == 0 else 'VAR ' + g[j - 1]}{end}") for j, x in enumerate(g)]
    rows.sort()
    hay = hay or r.choice(["noise", "text", "text"])
    turns = []
    for i in r.sample(range(chains), 1 if ruler else min(chains, r.randint(1, 4))):
        g, v = groups[i], values[i]
        if ruler or r.random() < 0.5:
            turns.append(
                Turn(
                    f"Question: Find all variables that are assigned the value {v} in the text above.",
                    ", ".join(g),
                    "Answer: According to the chain(s) of variable assignment in the text above, "
                    f"{len(g)} variables are assigned the value {v}, they are:",
                )
            )
        elif r.random() < 0.3:
            j = r.randrange(len(g))
            turns.append(Turn(f"What is the value of VAR {g[j]}?", v))
        else:
            turns.append(
                Turn(
                    r.choice(
                        [
                            "Which variables have the value {v}?",
                            "Find all variables that are assigned the value {v}.",
                            "List all variables whose value is {v}.",
                        ]
                    ).replace("{v}", v),
                    ", ".join(g),
                    maybe(r, [f"The variables with the value {v} are", "They are:", "Variables:"]),
                )
            )
    intro = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n"
        if ruler or r.random() < 0.6
        else ""
    )
    return Problem(
        [(t, True) for _, t in rows],
        turns,
        intro.strip("\n"),
        hay=hay,
        joint="\n" if hay == "noise" else r.choice(["\n", " "]),
        layout=("\n", " ") if ruler else None,
    )


def two_hops(r, text, room, *, n=None):
    """Documents about people; some questions need two of them."""
    n = n or max(3, int(math.exp(r.uniform(1, math.log(max(4, room // 70))))))
    people = Maker(r, text, "full name").some(n)
    n = len(people)
    town, trade = [r.choice(text.names) for _ in people], [r.choice(text.words) for _ in people]
    order = list(range(n))
    r.shuffle(order)
    pairs = list(zip(order[::2], order[1::2]))
    facts = [f"{p} lives in the town of {c}." for p, c in zip(people, town)] + [
        f"{p} studies the {j}." for p, j in zip(people, trade)
    ]
    facts += [f"The teacher of {people[x]} is {people[y]}." for x, y in pairs]
    r.shuffle(facts)
    documents = r.random() < 0.4
    if documents:
        facts = [f"Document {i}: {f}" for i, f in enumerate(facts, 1)]
    turns = []
    for _ in range(r.randint(1, 8)):
        i, x = r.randrange(n), r.random()
        if x < 0.35:
            turns.append(
                Turn(f"Where does {people[i]} live?", town[i], maybe(r, [f"{people[i]} lives in the town of", "In"]))
            )
        elif x < 0.6:
            turns.append(Turn(f"What does {people[i]} study?", trade[i], maybe(r, [f"{people[i]} studies the"])))
        elif pairs:
            i, j = r.choice(pairs)
            if x < 0.75:
                turns.append(Turn(f"Who is the teacher of {people[i]}?", people[j]))
            else:
                turns.append(
                    Turn(
                        f"Where does the teacher of {people[i]} live?",
                        f"The teacher of {people[i]} is {people[j]}, who lives in the town of {town[j]}.",
                    )
                )
    intro = (
        "Answer the question based on the given documents. Only give me the answer and do not output any other words."
        if documents and r.random() < 0.5
        else ""
    )
    return Problem([(f, True) for f in facts], turns, intro, joint="\n" if documents else r.choice(["\n", " "]))


def copying(r, text, room, *, notes=None, length=None):
    """Repeat a note word for word."""
    n = notes or r.randint(1, max(1, min(12, room // 400)))
    heads = Maker(r, text, r.choice(["word", "pair", "numbered"])).some(n)
    turns, facts = [], []
    frame = r.choice(
        ['Note "{k}": {v} (end of note)', "[{k}] {v} [end]", 'Message from {k}: "{v}"', "<{k}> {v} </{k}>"]
    )
    wanted = r.randrange(len(heads))
    for i, k in enumerate(heads):
        size = length or r.randint(12, max(13, min(160, room // 4)))
        if r.random() < 0.3 and not length:
            body = r.choice([" ", ", "]).join(
                Maker(r, text, r.choice(["word", "digits", "name"])).draw() for _ in range(size // 3)
            )
        else:
            body = " ".join(text.tokenizer.decode(text.hay(r, size)[0].tolist()).split())
        facts.append((fill(frame, k=k, v=body), i == wanted))
        if i == wanted:
            turns.append(
                Turn(
                    fill(
                        r.choice(
                            [
                                'Repeat the note "{k}" word for word.',
                                "What exactly does {k} say?",
                                "Copy the text of {k}.",
                                "Repeat the message of {k} exactly.",
                            ]
                        ),
                        k=k,
                    ),
                    body,
                )
            )
    return Problem(facts, turns, joint=r.choice(["\n", " "]))


def table(r, text, room, *, n=None, fields=None):
    """Records with several fields: single fields, and the whole as a table."""
    f = fields or r.randint(2, 4)
    names = r.sample(["city", "age", "colour", "team", "score", "room", "job", "year", "rank", "code"], f)
    n = n or r.randint(2, max(2, min(24, room // (40 * f))))
    people = Maker(r, text, r.choice(["full name", "name", "pair", "code"])).some(n)
    makers = [Maker(r, text, r.choice(["word", "digits", "name", "code", "price"])) for _ in names]
    rows = [[m.draw() for m in makers] for _ in people]
    form = r.choice(["{p}: {f}", "Record of {p}: {f}.", "{p} ({f})", "Entry {p}; {f}"])
    facts = [
        (form.replace("{p}", p).replace("{f}", ", ".join(f"{a} {v}" for a, v in zip(names, row))), True)
        for p, row in zip(people, rows)
    ]
    turns = []
    for _ in range(r.randint(1, 5)):
        i, j, x = r.randrange(len(people)), r.randrange(f), r.random()
        if x < 0.5:
            turns.append(
                Turn(r.choice([f"What is the {names[j]} of {people[i]}?", f"{people[i]}: {names[j]}?"]), rows[i][j])
            )
        elif x < 0.7:
            turns.append(Turn(f"List the {names[j]} of every record, in order.", ", ".join(row[j] for row in rows)))
        else:
            turns.append(
                Turn(
                    "Write all records as a table with the columns name | " + " | ".join(names) + ".",
                    "\n".join(" | ".join([p] + row) for p, row in zip(people, rows)),
                )
            )
    return Problem(facts, turns, joint="\n")


def deliveries(r, text, room):
    """A long record of deliveries that is turned into a table."""
    n = r.randint(2, max(2, min(80, room // 48)))
    days, day = [], 1
    for _ in range(n):
        days.append(str(day))
        day += r.randint(1, 3)
    few = [r.sample(words, min(16, len(words))) for words in (text.names, text.words, text.names)]
    rows = [[d, r.choice(few[0]), str(r.randint(1, 99)), r.choice(few[1]), r.choice(few[2])] for d in days]
    facts = ["On day {}, {} sent {} crates of {} to {}.".format(*row) for row in rows]
    columns = "day | sender | crates | goods | place"
    question = "Turn this record into a table with one line for each delivery. The columns are " + columns + ", separated by |."
    table = "\n".join(" | ".join(row) for row in rows)
    if r.random() < 0.7:
        turn = Turn(question, table, columns + "\n")
    else:
        turn = Turn(question, columns + "\n" + table)
    return Problem(
        [(f, True) for f in facts],
        [turn],
        "Below is a record of the deliveries to a warehouse.",
        block=True,
        joint="\n",
        layout=r.choice([("\n", " "), ("\n", "\n"), None]),
    )


def passkey(r, text, room, *, opening=None):
    """InfiniteBench's pass key, and the same in other words."""
    v = number(r, r.choice([5, 5, 6, 8]))
    fact, q, o = r.choice(
        [
            ("The pass key is {v}. Remember it. {v} is the pass key.", "What is the pass key?", "The pass key is"),
            (
                "The sequence of digits is {v}. Remember it. {v} is the sequence of digits.",
                "What is the sequence of digits?",
                "The sequence of digits is",
            ),
            ("The secret number is {v}. Do not forget it.", "What is the secret number?", "The secret number is"),
        ]
    )
    if opening:
        fact, q, o = "The pass key is {v}. Remember it. {v} is the pass key.", "What is the pass key?", opening
    return Problem(
        [(fill(fact, v=v), True)],
        [Turn(q, v, o if opening else maybe(r, [o], 0.7))],
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you about the important information there.",
        hay="noise" if r.random() < 0.6 or opening else "text",
        joint="\n",
    )


def common_words(r, text, room):
    """RULER's common words: the ten that stand in a list ten times as often, in order of first appearance."""
    most = max(20, room // 5)
    k, often = r.choice([3, 5, 10]), r.randint(4, 20)
    while k * often > most * 0.7 and often > 3:
        often -= 1
    words = Maker(r, text, "word").some(k + max(3, (most - k * often) // 2))
    items = words[:k] * often
    for w in words[k:]:
        if len(items) + 2 > most:
            break
        items += [w] * r.randint(1, 2)
    r.shuffle(items)
    first = sorted(words[:k], key=items.index)
    answer = " ".join(f"{i}. {w}" for i, w in enumerate(first, 1))
    return Problem(
        [(f"{i}. {w}", True) for i, w in enumerate(items, 1)],
        [
            Turn(
                f"Question: What are the {k} most common words in the above list?",
                answer,
                f"Answer: The top {k} words that appear most often in the list are:",
            )
        ],
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that appear most often.\n",
        block=True,
        layout=("\n", " "),
    )


def frequent_words(r, text, room):
    """RULER's coded words: the three most frequent, the most frequent first."""
    total = max(20, room // 6)
    words = ["".join(r.choices(string.ascii_lowercase, k=6)) for _ in range(r.randint(5, max(6, min(60, total // 4))))]
    weights = [1 / (i + 1) ** 2 for i in range(len(words))]
    items = r.choices(words, weights, k=total)
    top = [w for w, _ in Counter(items).most_common(3)]
    return Problem(
        [(w if r.random() < 0.8 else ". . . " + w, True) for w in items],
        [
            Turn(
                "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently appeared words in the above coded text?",
                ", ".join(top),
                "Answer: According to the coded text above, the three most frequently appeared words are:",
            )
        ],
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared coded words.",
        block=True,
        layout=("\n", " "),
    )


def plain(r, text, room):
    """Ordinary text."""
    return Problem([], [])


TRAINING = [
    (records, 9),
    (ruler, 5),
    (key_lists, 4),
    (any_wording, 5),
    (numbered, 2),
    (ordered, 3),
    (key_value, 2.2),
    (variable_tracking, 2.2),
    (two_hops, 1.2),
    (copying, 1.8),
    (table, 1),
    (deliveries, 1.2),
    (passkey, 0.4),
    (common_words, 0.4),
    (frequent_words, 0.3),
    (plain, 0.6),
]


# ---- to tokens -----------------------------------------------------------------------------------------------------


@dataclass
class Sample:
    ids: np.ndarray
    weight: np.ndarray  # 1 where the token is part of an answer, else 0
    task: str = ""
    answers: list = field(default_factory=list)  # (begin, end) of each answer in ids, end after the closing token


def assemble(problem, text, length, r, chat_open, chat=None, close=True, exact_tail=None):
    """Exactly `length` tokens, or None where the problem does not fit. chat_open: what a chat prompt begins with. exact_tail: evaluation
    with one turn keeps this many tokens for the answer, so that prompts of one length come out."""
    chat = (problem.layout == CHAT or problem.layout is None and r.random() < 0.35) if chat is None else chat
    before, between = ("\n", EOS + "\n<|im_start|>assistant\n") if chat else problem.layout or r.choice(LAYOUTS)
    head = (chat_open if chat else "") + problem.intro
    keep_eos = chat or close or r.random() < 0.9
    strings = [head] + [
        problem.joint + f if i or head or not problem.joint.isspace() else f for i, (f, _) in enumerate(problem.facts)
    ]
    n_facts = len(strings)
    for t, turn in enumerate(problem.turns):
        lead = before if t == 0 or not chat else "\n<|im_start|>user\n"
        prompt, answer = lead + turn.question + between + turn.opening, turn.answer
        if turn.opening and not turn.opening.endswith((" ", "\n")) or prompt.endswith(" "):
            prompt, answer = prompt.rstrip(" "), " " + answer
        if not close and answer[0] == " " and r.random() < 0.04:  # prompts that end in a blank happen
            prompt, answer = prompt + " ", answer[1:]
        strings += [prompt, answer + (EOS if keep_eos else "")]
    ids = [e.ids for e in text.tokenizer.encode_batch_fast(strings, add_special_tokens=False)]
    tail, marks, used = [], [], 0
    budget = max(200, int(length * 0.5)) if not exact_tail else length
    for q, a in zip(ids[n_facts::2], ids[n_facts + 1 :: 2]):
        if used + len(q) + len(a) > budget:
            break
        tail += [q, a]
        marks.append((used + len(q), used + len(q) + len(a)))
        used += len(q) + len(a)
    if problem.turns and not tail:
        return None
    spare = 0
    if exact_tail:  # the answer of the last turn may be shorter than what is kept free for it
        spare = exact_tail - len(tail[-1])
        if spare < 0:
            return None
    facts = ids[1:n_facts]
    room = length - len(ids[0]) - used - spare
    need = sum(map(len, facts))
    if need > room:  # what nobody asks about can go
        loose = [i for i, (_, must) in enumerate(problem.facts) if not must]
        r.shuffle(loose)
        gone = set()
        for i in loose:
            gone.add(i)
            need -= len(facts[i])
            if need <= room:
                break
        facts = [f for i, f in enumerate(facts) if i not in gone]
        if need > room:
            return None
    hay, places = text.hay(r, room - need, problem.hay == "noise")
    hay = hay.tolist()
    if problem.hay == "none" or problem.block:  # the text stands around the facts
        cut = 0 if problem.hay == "none" and not problem.block else r.choice(places)
        body = (
            hay[:cut] + [x for f in facts for x in f] + hay[cut:]
            if problem.block
            else hay + [x for f in facts for x in f]
        )
    else:
        cuts = sorted(r.choices(places, k=len(facts)))
        body, at = [], 0
        for cut, f in zip(cuts, facts):
            body += hay[at:cut]
            body += f
            at = cut
        body += hay[at:]
    out = np.array(ids[0] + body + [x for part in tail for x in part], dtype=np.int32)
    start = len(out) - used
    answers = [(start + b, start + e) for b, e in marks]
    weight = np.zeros(len(out), dtype=np.float32)
    for b, e in answers:
        weight[b:e] = 1
    return Sample(out, weight, answers=answers)


def training_sample(r, text, length, chat_open, mix=TRAINING):
    """Any problem of the mix that fits; the seed decides."""
    while True:
        make = r.choices([m for m, _ in mix], [w for _, w in mix])[0]
        problem = make(r, text, length)
        if not problem.turns and make is not plain:
            continue
        sample = assemble(problem, text, length, r, chat_open, close=False)
        if sample is not None and len(sample.ids) == length:
            sample.task = make.__name__
            return sample


# ---- what is measured ----------------------------------------------------------------------------------------------

MAGIC = dict(
    attribute="special magic number",
    values="7 digits",
    fact="One of the special magic numbers for {k} is: {v}.",
    layout=("\n", " "),
    turns=1,
    intro="Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about the numbers afterwards.",
    joint=" ",
)
ASK_ONE = dict(
    turn="one",
    question="What is the special magic number for {k} mentioned in the provided text?",
    opening="The special magic number for {k} mentioned in the provided text is",
)
ASK_ALL = dict(
    question="What are all the special magic numbers for {k} mentioned in the provided text?",
    opening="The special magic numbers for {k} mentioned in the provided text are",
)
ASK_SOME = dict(
    question="What are all the special magic numbers for {ks} mentioned in the provided text?",
    opening="The special magic numbers for {ks} mentioned in the provided text are",
)


def everything(room, tokens):
    return max(8, int(room * 0.96) // tokens)


# name: (tokens kept for the answer, problem of a length). Wordings under "unseen" occur in no training sample.
EVALUATION = {
    "single": (24, lambda r, t, n: records(r, t, n, n=1, keys="pair", hay="text", **MAGIC, **ASK_ONE)),
    "single_word": (
        24,
        lambda r, t, n: records(r, t, n, n=1, keys="pair", hay="text", **{**MAGIC, "values": "two words"}, **ASK_ONE),
    ),
    "multikey_4": (24, lambda r, t, n: records(r, t, n, n=4, keys="pair", hay="text", **MAGIC, **ASK_ONE)),
    "multikey_32": (24, lambda r, t, n: records(r, t, n, n=32, keys="pair", hay="text", **MAGIC, **ASK_ONE)),
    "multikey_full": (
        24,
        lambda r, t, n: records(
            r, t, n, n=everything(n, 30), keys="pair", hay="none", **{**MAGIC, "joint": "\n"}, **ASK_ONE
        ),
    ),
    "multikey_uuid": (
        64,
        lambda r, t, n: records(
            r,
            t,
            n,
            n=everything(n, 80),
            keys="uuid",
            hay="none",
            **{**MAGIC, "values": "uuid", "joint": "\n"},
            **ASK_ONE,
        ),
    ),
    "multivalue": (
        64,
        lambda r, t, n: records(r, t, n, n=1, keys="pair", hay="text", turn="all", copies=4, **MAGIC, **ASK_ALL),
    ),
    "multiquery": (
        64,
        lambda r, t, n: records(r, t, n, n=8, keys="pair", hay="text", turn="some", count=4, **MAGIC, **ASK_SOME),
    ),
    "list_32": (
        360,
        lambda r, t, n: records(
            r,
            t,
            n,
            n=48,
            keys="pair",
            hay="text",
            turn="list",
            count=32,
            style="values",
            **{**MAGIC, "values": "7 digits"},
            question="List the {a}s for: {ks}.",
        ),
    ),
    "list_32_pairs": (
        720,
        lambda r, t, n: records(
            r,
            t,
            n,
            n=48,
            keys="pair",
            hay="text",
            turn="list",
            count=32,
            style="pairs",
            **MAGIC,
            question="List the {a}s for: {ks}.",
        ),
    ),
    "ordered_32": (
        360,
        lambda r, t, n: numbered(
            r,
            t,
            n,
            n=32,
            values="word",
            fact="Item {i} on the list is {v}.",
            question="List all items in order.",
            style="values",
            whole=True,
            layout=("\n", "\n"),
        ),
    ),
    "ordered_32_lines": (
        420,
        lambda r, t, n: numbered(r, t, n, n=32, values="7 digits", style="numbered", whole=True, layout=("\n", "\n")),
    ),
    "variable_tracking": (64, lambda r, t, n: variable_tracking(r, t, n, chains=1, hops=4, hay="noise", ruler=True)),
    "variable_tracking_text": (
        64,
        lambda r, t, n: variable_tracking(r, t, n, chains=2, hops=4, hay="text", ruler=True),
    ),
    "kv_pairs": (
        24,
        lambda r, t, n: key_value(
            r,
            t,
            n,
            n=min(200, everything(n, 30)),
            keys="pair",
            form="colon",
            question="What is the value of {k}?",
            opening="",
            turns=1,
            layout=("\n", "\n"),
        ),
    ),
    "kv_json_uuid": (
        64,
        lambda r, t, n: key_value(
            r,
            t,
            n,
            n=min(60, everything(n, 90)),
            keys="uuid",
            form="json",
            question='\nKey: "{k}"',
            opening="The value associated with the specified key is:",
            turns=1,
            layout=("\n", "\n"),
        ),
    ),
    "passkey": (24, lambda r, t, n: passkey(r, t, n, opening="The pass key is")),
    "copy": (160, lambda r, t, n: copying(r, t, n, notes=6, length=60)),
    "two_hops": (64, lambda r, t, n: two_hops(r, t, n, n=24)),
    "late": (24, lambda r, t, n: records(r, t, n, n=16, keys="pair", hay="text", **{**MAGIC, "turns": 4}, **ASK_ONE)),
    "unseen_one": (
        24,
        lambda r, t, n: records(
            r,
            t,
            n,
            n=8,
            keys="pair",
            hay="text",
            attribute="vault number",
            values="7 digits",
            fact="Nobody should learn that {k} keeps {v} as its {a}.",
            turn="one",
            turns=1,
            intro="Study this passage.",
            question="Someone asks you about {k}: which {a} is written down for it?",
            opening="",
            layout=("\n\n", "\nReply: "),
        ),
    ),
    "unseen_name": (
        24,
        lambda r, t, n: records(
            r,
            t,
            n,
            n=8,
            keys="full name",
            hay="text",
            attribute="parcel number",
            values="digits",
            fact="The courier left parcel {v} with {k}.",
            turn="one",
            turns=1,
            intro="",
            question="Which parcel did the courier leave with {k}?",
            opening="The courier left parcel",
            layout=("\n", "\n"),
        ),
    ),
    "unseen_list": (
        300,
        lambda r, t, n: records(
            r,
            t,
            n,
            n=24,
            keys="word",
            hay="text",
            attribute="weight",
            values="digits",
            fact="A {k} weighs {v} grams.",
            turn="list",
            count=16,
            turns=1,
            style="values",
            intro="",
            question="Write the weights of the following things, one after the other: {ks}.",
            layout=("\n\n", "\n"),
        ),
    ),
}


def evaluation_sample(name, seed, text, length, chat_open, chat=False):
    """Sample `seed` of a task: exactly `length` tokens with the room that the answer may take. -> prompt ids, answer ids"""
    keep, make = EVALUATION[name]
    for attempt in range(200):
        r = random.Random(f"{name}/{length}/{seed}/{attempt}")
        problem = make(r, text, length - keep)
        if not problem.turns:
            continue
        sample = assemble(problem, text, length, r, chat_open, chat=chat, close=True, exact_tail=keep)
        if sample is not None and len(sample.answers) == len(problem.turns):
            begin, end = sample.answers[-1]
            return sample.ids[:begin], sample.ids[begin:end]
    raise ValueError(f"got {name} at {length} tokens, which does not fit")
