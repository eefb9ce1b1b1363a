"""Facts and questions in words drawn by chance."""

import math

from .problem import CHAT, Maker, Problem, Turn, fill, phrase
from .wordings import FACTS, LABELS, ONE


def any_wording(r, text, room):
    """Facts and questions of words drawn by chance: only the key and the slot where facts differ matter."""
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
