#!/usr/bin/env python3
"""Which pages does quest read? newest_page.py RECORDING.rec.h5 [RUN.h5] (needs h5py and numpy).

A recording gives each page's score and its true attention, by the full cache's queries. A run with metrics: [trace]
gives the pages that were read. Both are of newest_page.yaml: pages of 16 tokens, a budget of 8 pages and two dense
layers."""
import sys

import h5py
import numpy as np

PAGE, BUDGET, DENSE = 16, 8, 2


def floats(a):
    return (a.astype("u4") << 16).view("f4") if a.dtype == np.uint16 else a


def place(values, page):
    """How many pages stand before this one."""
    return int((values > values[page]).sum())


def pages_of(keys, queries):
    """Of a KV head: quest's scores, those of ArkVale's boxes, largest products of queries and keys, attention mass."""
    pages = [keys[i:i + PAGE] for i in range(0, len(keys), PAGE)]
    low, high = (np.stack([f(p, 0) for p in pages]) for f in (np.min, np.max))
    centre = (low + high) / 2
    radius = np.stack([np.abs(p - c).mean(0) for p, c in zip(pages, centre)])
    bound = [np.maximum(queries[:, None] * a, queries[:, None] * b).sum(-1)
             for a, b in ((low, high), (centre - radius, centre + radius))]
    products = queries @ keys.T
    starts = np.arange(0, len(keys), PAGE)
    best = np.maximum.reduceat(products, starts, 1)
    weights = np.exp((products - products.max(1, keepdims=True)) / keys.shape[1] ** 0.5)
    mass = np.add.reduceat(weights / weights.sum(1, keepdims=True), starts, 1).mean(0)
    return bound[0], bound[1], best, mass


def recorded(path):
    newest, needle = {}, []
    with h5py.File(path) as file:
        for case in file["cases"].values():
            prompt, fed, answer = (case[n][()] for n in ("prompt", "fed", "answer"))
            text = np.concatenate([prompt, fed])
            digits = answer[1:8]
            found = [i for i in range(len(text) - 7) if (text[i:i + 7] == digits).all()]
            queries = case["step_queries"]
            for layer in range(DENSE, queries.shape[0]):
                keys, q = floats(case["keys"][layer]), queries[layer]
                group = q.shape[1] // keys.shape[1]
                # The last token of the question gives the answer's first token.
                for step in range(len(text) - 1 - len(prompt), len(q)):
                    at = len(prompt) + step
                    for head in range(keys.shape[1]):
                        mine = q[step, head * group:(head + 1) * group]
                        bound, box, best, mass = pages_of(keys[:at + 1, head], mine)
                        n, scale, top = len(mass) - 1, keys.shape[2] ** 0.5, np.max(bound, 0)
                        loose = (bound - best).mean(0) / scale
                        newest.setdefault(at % PAGE + 1, []).append(
                            [place(x, n) < BUDGET for x in (top, np.max(box, 0), mass)] +
                            [mass[n], loose[n], loose[:n].mean(), mass[np.argsort(-top)[:BUDGET]].sum(),
                             np.sort(mass)[::-1][:BUDGET].sum()])
                        if found:
                            p = found[0] // PAGE
                            needle.append([mass[p]] + [place(x, p) < BUDGET for x in (top, np.max(box, 0), mass)])
    print("tokens in the newest page; heads that would read it by quest's bound, by ArkVale's box, by true mass; its\n"
          "mass; how far the bound is above the largest logit there, and in other pages; mass in 8 pages by bound, "
          "by mass")
    for tokens in sorted(newest):
        print(f"{tokens:3}", *(f"{x:6.2f}" for x in np.mean(newest[tokens], 0)))
    if not needle:
        return
    needle = np.array(needle)
    looked = needle[needle[:, 0] >= 0.1]
    print(f"needle's page: {len(looked) / len(needle):.2f} of heads and steps have a tenth of their mass there; it is "
          "among the best 8 by bound, box and mass in", *(f"{x:.2f}" for x in looked[:, 1:].mean(0)))


def written(path):
    """Numbers of 7 digits in the answer: is the page that they come from read, where the newest page is in any case?"""
    rows = []
    with h5py.File(path) as file:
        for case in file["cases"].values():
            prompt, fed, answer = (case[n][()] for n in ("prompt", "fed", "answer"))
            text, source = np.concatenate([prompt, fed]), {}
            for i in range(len(answer) - 6):
                for at in range(len(text) - 6):
                    if (text[at:at + 7] == answer[i:i + 7]).all():
                        source.update({step: at // PAGE for step in range(i, i + 7)})
                        break
            queries = case["step_queries"]
            for layer in range(DENSE, queries.shape[0]):
                keys, q = floats(case["keys"][layer]), queries[layer]
                group = q.shape[1] // keys.shape[1]
                for token, page in source.items():
                    step = len(fed) - 1 + token
                    for head in range(keys.shape[1]):
                        bound, box, _, mass = pages_of(keys[:len(prompt) + step + 1, head],
                                                       q[step, head * group:(head + 1) * group])
                        others = (x[:-1] for x in (np.max(bound, 0), np.max(box, 0), mass))
                        read = [page == len(mass) - 1 or place(x, page) < BUDGET - 1 for x in others]
                        rows.append([mass[page]] + read)
    rows = np.array(rows)
    looked = rows[rows[:, 0] >= 0.1]
    print(f"pages of the numbers written: {len(looked) / len(rows):.2f} of heads and steps have a tenth of their mass "
          "there; read beside the newest page by bound, box and mass:", *(f"{x:.2f}" for x in looked[:, 1:].mean(0)))


def traced(path):
    newest, scores = {}, {}
    with h5py.File(path) as file:
        for row in file["summary"]:
            cell = file[f"cells/{row['cell'].decode()}"]
            if "trace/events" not in cell or not row["policy"].startswith(b"quest"):
                continue
            name = f"{row['policy'].decode()}, {row['task'].decode()}"
            events, selected = cell["trace/events"][()], cell["trace/selected"][()]
            for i, sample in enumerate(cell["samples"]):
                if not np.isnan(sample["score"]):
                    key = name, int(sample["prompt_tokens"]) % PAGE
                    scores.setdefault(key, []).append(sample["score"])
                for e in events[(events["sample"] == i) & (events["token"] > 0)]:
                    at = int(sample["prompt_tokens"]) - 1 + int(e["token"])
                    read = selected[e["begin"]:e["begin"] + e["count"]]
                    newest.setdefault((name, at % PAGE + 1), []).append(at // PAGE in read)
    print("\nplace of the answer's first token in its page: score, questions")
    for (name, at), values in sorted(scores.items()):
        print(f"{name}: {at:2} {np.mean(values):.2f} {len(values)}")
    print("\ntokens in the newest page: share of heads that read it")
    for (name, tokens), values in sorted(newest.items()):
        print(f"{name}: {tokens:2} {np.mean(values):.2f}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    recorded(sys.argv[1])
    written(sys.argv[1])
    if len(sys.argv) == 3:
        traced(sys.argv[2])
