"""A generator makes a Problem: facts, and turns of question and answer. Keys and values have many styles."""

import string
from dataclasses import dataclass


@dataclass
class Turn:
    question: str
    answer: str
    opening: str = ""  # the first words of the answer, which the prompt gives


@dataclass
class Problem:
    facts: list  # (text, must it stay), in the order in which they appear
    turns: list
    intro: str = ""
    block: bool = False  # the facts stand together
    hay: str = "text"  # text | noise | none: nothing between the facts
    joint: str = " "  # between the text and a fact
    layout: tuple | None = None  # LAYOUTS entry; drawn when None
    region: tuple | None = None  # Text.region that the text around the facts begins in


# (text before a question, text between it and the answer or its opening). A final blank belongs to the answer.
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
        """Draws `count` different values; fewer when the style does not have so many."""
        out = {}
        for _ in range(4 * count + 20):
            if len(out) == count:
                break
            out[self.draw()] = 1
        return list(out)


def fill(template, a="", k="", v="", ks=""):
    return template.replace("{a}", a).replace("{ks}", ks).replace("{k}", k).replace("{v}", v)


def enumerate_and(keys):
    """'a, b, and c', as RULER joins its queries."""
    return keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + ", and " + keys[-1]


def maybe(r, templates, p=0.5):
    return r.choice(templates) if r.random() < p else ""


def list_turn(r, keys, values, question, style=None):
    """A turn whose answer is a list, in the form that the question names."""
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


SMALL_WORDS = (
    "the a of to in and was is that with for by his her it as at on from which had has have been about all into over under after before "
    "every some any their there not will can must one this who when what where how does did you your we our they"
).split()


def phrase(r, text, low, high):
    return " ".join(
        r.choice(SMALL_WORDS) if r.random() < 0.45 else r.choice(text.words) for _ in range(r.randint(low, high))
    )
