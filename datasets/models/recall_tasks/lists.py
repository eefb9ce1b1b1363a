"""Lists with a place for each item, stores in one block, tables."""

from .problem import Maker, Problem, Turn, fill, list_turn


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
                    "Write down the whole list of {l}s.",
                    "Name all {l}s, one after the other, from the first to the last.",
                    "Put the {l}s in the order of their numbers.",
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
    """Long lists in order. The answer is the whole list."""
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
    km = Maker(r, text, keys or r.choice(["uuid", "pair", "pair", "pair", "word", "hex", "code", "full name", "file"]))
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


def table(r, text, room, *, n=None, fields=None):
    """Records with several fields. Questions ask for single fields, for a column, or for all records as a table."""
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
    """A long record of deliveries. The answer is the record as a table."""
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
