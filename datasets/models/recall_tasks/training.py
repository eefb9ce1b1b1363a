"""Problems as tokens, and the training mix."""

from dataclasses import dataclass, field

import numpy as np

from .free import any_wording
from .lists import deliveries, key_value, numbered, ordered, table
from .others import common_words, copying, frequent_words, passkey, plain, two_hops, variable_tracking
from .problem import CHAT, LAYOUTS
from .records import key_lists, records, ruler

EOS = "<|im_end|>"
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
    (common_words, 2),
    (frequent_words, 0.6),
    (plain, 0.6),
]


@dataclass
class Sample:
    ids: np.ndarray
    weight: np.ndarray  # 1 where the token is part of an answer, else 0
    task: str = ""
    answers: list = field(default_factory=list)  # (begin, end) of each answer in ids, end after the closing token


def assemble(problem, text, length, r, chat_open, chat=None, close=True, exact_tail=None):
    """Returns exactly `length` tokens, or None where the problem does not fit. chat_open: the beginning of a chat prompt.
    exact_tail: evaluation with one turn keeps this many tokens for the answer, so that all prompts have one length."""
    chat = (problem.layout == CHAT or problem.layout is None and r.random() < 0.45) if chat is None else chat
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
        if not close and answer[0] == " " and r.random() < 0.04:  # users' prompts may end in a blank
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
    if need > room:  # facts that no question asks about can go
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
    hay, places = text.hay(r, room - need, problem.hay == "noise", problem.region)
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
    """Draws a problem of the mix that fits. Text follows the last answer. If every sample ended with its answer, the model
    would learn the end as a place in the sequence, and a list would stop nowhere else."""
    while True:
        make = r.choices([m for m, _ in mix], [w for _, w in mix])[0]
        after = r.randrange(length * r.choice([1, 6]) // 20)
        problem = make(r, text, length - after)
        if not problem.turns and make is not plain:
            continue
        sample = assemble(problem, text, length - after, r, chat_open, close=False)
        if sample is not None and len(sample.ids) == length - after:
            sample.task = make.__name__
            sample.ids = np.concatenate([sample.ids, text.hay(r, after)[0]])
            sample.weight = np.concatenate([sample.weight, np.zeros(after, dtype=np.float32)])
            return sample
