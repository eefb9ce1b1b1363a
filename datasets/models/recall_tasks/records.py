"""Keys and values hidden in text. Questions ask for one value, for all values of a key, or for those of several keys."""

import math

from .problem import Maker, Problem, Turn, enumerate_and, fill, list_turn, maybe
from .wordings import ALL, ALL_OPENING, ATTRIBUTES, EVERY, FACTS, INTROS, MEASURES, ONE, ONE_OPENING, SOME, SOME_OPENING


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
    """Keys and values. A turn asks for one key, some keys, a list of keys, all values of a key, all values in order, or the
    key of a value."""
    a = attribute or r.choice(ATTRIBUTES)
    if attribute is None and fact is None and r.random() < 0.2:
        a, sentences = r.choice(MEASURES)
        fact, values = r.choice(sentences), values or r.choice(["7 digits", "digits", "digits"])
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
            if sum(v == vs[i][0] for _, v in facts_of) > 1:
                continue
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
    """Long lists of keys. The answer has all values in the order of the question."""
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
        keys=r.choice(["pair", "pair", "pair", "word", "word", None]),
        values=r.choice(["7 digits", "7 digits", "digits", None]),
    )


def ruler(r, text, room):
    """RULER's wordings of one value, all values of a key, and values of several keys, in texts with few or many facts."""
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
