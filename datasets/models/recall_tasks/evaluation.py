"""The tasks that evaluate.py measures."""

import random

from .lists import key_value, numbered
from .others import copying, passkey, two_hops, variable_tracking
from .records import records
from .training import assemble

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
    "copy": (160, lambda r, t, n: copying(r, t, n, notes=6, length=60, apart=True)),
    "copy_near": (160, lambda r, t, n: copying(r, t, n, notes=6, length=60)),  # the text around may have the passage too
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
    """Sample `seed` of a task: exactly `length` tokens, room for the answer included. -> prompt ids, answer ids"""
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
