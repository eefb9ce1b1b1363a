"""Chains, hops, copies, a pass key, words counted, plain text."""

import math
import re
import string
from collections import Counter

from .problem import CHAT, Maker, Problem, Turn, fill, maybe, number
from .records import ruler


def variable_tracking(r, text, room, *, chains=None, hops=None, hay=None, ruler=False):
    """Chains of assignments. Questions ask for all names with a value (RULER), or for the value of a name."""
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


def passages(r, text, room):
    """Paragraphs. The question names one by its first words; the answer repeats it."""
    facts, turns, region = [], [], near(r, text)
    n = r.randint(1, 5)
    wanted = r.randrange(n)
    for i in range(n):
        body = excerpt(r, text, r.randint(16, max(17, min(140, room // 6))), region)
        body = edited(r, text, body) if r.random() < 0.3 else body
        facts.append((body + "\n", i == wanted))
        if i == wanted:
            first = " ".join(body.split(" ")[: r.randint(4, 7)])
            turns.append(
                Turn(
                    r.choice(
                        [
                            'Repeat the paragraph that begins with "{k}".',
                            'Copy the paragraph that starts "{k}" word for word.',
                            'One paragraph begins "{k}". Write all of it.',
                        ]
                    ).replace("{k}", first),
                    body,
                )
            )
    return Problem(facts, turns, joint="\n", region=region)


def near(r, text):
    """Often picks a part of the corpus: a passage is hard to tell from text of the same part around it."""
    return text.region(r, r.choice([20000, 40000])) if r.random() < 0.6 else None


def excerpt(r, text, tokens, region=None):
    """About so many tokens of the corpus on one line, whole words."""
    words = text.tokenizer.decode(text.hay(r, tokens, region=region)[0].tolist()).replace("\ufffd", "").split()
    return " ".join(words[:-1] if len(words) > 4 else words)


LIKE = [
    group.split()
    for group in (
        "this that these those|would should could might will shall|a the|is was|are were|has had have|I you he she we they|his her my your their our|"
        "him them me us|in on at by to from of with|and but or|not never|meanwhile meantime|here there|great good much|upon on|until till|'Yes,' 'No,'"
    ).split("|")
]


def edited(r, text, body, share=None):
    """The passage with some words changed. A language model's guess is wrong there; only the passage itself helps."""
    share = share or r.choice([0.05, 0.1, 0.2, 0.35])
    words = body.split(" ")
    out = []
    for i, word in enumerate(words):
        if r.random() >= share:
            out.append(word)
            continue
        like = [w for group in LIKE if word in group for w in group if w != word]
        x = r.random()
        if like and x < 0.7:
            out.append(r.choice(like))
        elif x < 0.35:
            out.append(r.choice(text.words))
        elif x < 0.5:
            out.append(r.choice(words))
        elif x < 0.6:
            out += [word, r.choice(text.words)]
        elif x < 0.7:
            pass
        else:
            bare = word.strip("'.,;:!?-")
            out.append(r.choice(["{}", "{}", "{},", "{}.", "{}...", "{}....", "'{}", "{}'", "{}?'", "{};", "{}!"]).format(bare or word))
    return " ".join(out) or body


def copying(r, text, room, *, notes=None, length=None, apart=False):
    """Notes, one of which the answer repeats word for word. The mark of a note's end does not occur inside it.

    apart: the text around the notes has none of their passages."""
    if notes is None and r.random() < 0.2:
        return passages(r, text, room)
    n = notes or r.randint(1, max(1, min(24, room // 300)))
    heads = Maker(r, text, r.choice(["word", "pair", "numbered"])).some(n)
    turns, facts = [], []
    region, source = text.apart(r, room) if apart else (near(r, text),) * 2
    frame = r.choice(
        [
            'Note "{k}": {v} (end of note)',
            "[{k}] {v} [end]",
            'Message from {k}: "{v}"',
            "<{k}> {v} </{k}>",
            "BEGIN {k}\n{v}\nEND {k}",
            "{k} wrote: {v} (end of letter)",
            "Note of {k}: <<{v}>>",
        ]
    )
    wanted = r.sample(range(len(heads)), 1 if notes else r.randint(1, min(len(heads), 12)))
    bodies = []
    changed = 0 if notes else r.choice([0, 0, 0.3, 1])
    for i, k in enumerate(heads):
        size = length or r.randint(12, max(13, min(160, room // 4)))
        if r.random() < 0.3 and not length:
            body = r.choice([" ", ", "]).join(
                Maker(r, text, r.choice(["word", "digits", "name"])).draw() for _ in range(size // 3)
            )
        elif bodies and changed and r.random() < 0.12:
            body = edited(r, text, r.choice(bodies), r.choice([0.05, 0.1, 0.2]))
        else:
            body = excerpt(r, text, size, source)
            body = edited(r, text, body) if r.random() < changed else body
        bodies.append(body.replace('"', "'").replace("[end]", "end").replace(">>", ">"))
        facts.append((fill(frame, k=k, v=bodies[-1]), i in wanted))
    for i in wanted:
        question = r.choice(
            [
                'Repeat the note "{k}" word for word.',
                "What exactly does {k} say?",
                "Copy the text of {k}.",
                "Repeat the message of {k} exactly.",
                "Quote {k} in full.",
                "Write out the text of {k} without changing a word.",
                "Give me the exact words of {k}.",
            ]
        )
        turns.append(Turn(fill(question, k=heads[i]), bodies[i]))
    return Problem(facts, turns, joint=r.choice(["\n", " "]), region=region)


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


def counted(r, words, common, often, others, seldom):
    """RULER's numbered list: the first words of `words` often, the next ones seldom, shuffled."""
    items = words[:common] * often + words[common : common + others] * seldom
    r.shuffle(items)
    return " ".join(f"{i}. {w}" for i, w in enumerate(items, 1))


def common_words(r, text, room):
    """RULER's common words, often after a worked example. The answer names, in any order, the words that stand in a list
    several times as often as the rest."""
    common = r.choice([3, 5, 10, 10])
    items = max(24, room // r.choice([10, 12, 20]))
    of_example = (20, 3, 1) if room < 4096 else (40, 10, 3)
    worked = r.random() < 0.6
    if worked:
        items = max(24, items - common * of_example[1] - (of_example[0] - common) * of_example[2])
    often, seldom = r.choice([(6, 1), (6, 1), (10, 1), (30, 3), (r.randint(4, 20), r.randint(1, 2))])
    while common * often > items * 0.6 and often > 3:
        often, seldom = often - 1, 1
    others = max(3, (items - common * often) // seldom)
    words = Maker(r, text, "word").some(max(common + others, of_example[0]))
    intro = "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that appear most often.\n"
    question = f"Question: What are the {common} most common words in the above list?"
    opening = f"Answer: The top {common} words that appear most often in the list are:"
    fact = ""
    if worked:
        size, many, few = of_example
        example = r.sample(words, size)
        answer = "".join(f" {i}. {w}" for i, w in enumerate(example[:common], 1))
        fact = intro + counted(r, example, common, many, size - common, few) + f"\n{question} {opening}{answer}\n"
    return Problem(
        [(fact + intro + counted(r, words, common, often, others, seldom), True)],
        [Turn(question, " ".join(f"{i}. {w}" for i, w in enumerate(r.sample(words[:common], common), 1)), opening)],
        hay="none",
        joint="\n",
        layout=r.choice([("\n", " "), CHAT]),
    )


def frequent_words(r, text, room):
    """RULER's coded words. The answer names the three most frequent ones, the most frequent first."""
    total = max(20, room // 6)
    words = ["".join(r.choices(string.ascii_lowercase, k=6)) for _ in range(r.randint(5, max(6, min(60, total // 4))))]
    weights = [1 / (i + 1) ** 2 for i in range(len(words))]
    while True:
        items = r.choices(words, weights, k=total)
        counts = Counter(items).most_common(4)
        if len({c for _, c in counts}) == len(counts) > 3:  # no ties
            break
    top = [w for w, _ in counts[:3]]
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
    """Ordinary text. Some has its punctuation set apart, as in tokenized corpora."""
    if r.random() < 0.6:
        return Problem([], [])
    words = text.tokenizer.decode(text.hay(r, int(room * 0.6))[0].tolist())
    words = re.sub(r"(?<=\w)-(?=\w)", " @-@ ", re.sub(r"(?<=\d)([,.])(?=\d)", r" @\1@ ", words))
    words = re.sub(r" *((?<!@)[,.;:!?()\[\]\"](?!@)) *", r" \1 ", words)
    return Problem([(words, True)], [], hay="none", joint=r.choice([" ", "\n"]), layout=("\n", "\n"))
