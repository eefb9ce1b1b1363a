#!/usr/bin/env python3
"""Writes core/test/golden/policies/head_profiles.json: what the profilers of heads find on the model datasets/models/recall.

Usage: head_profiles.py [core/test/golden [--check]]
Format: README.md in this folder. A text begins at the first token of text/english.txt where no set and no role depends on
rounding: f32, f64 and weights off by 1e-5 agree.
"""
import json
import math
import os
import statistics
import sys

import torch
import torch.nn.functional as F

import export_policies
import llama
from offloading_policies import page_bounds
from policies import top

PROMPT, STEPS, COPY = 120, 12, 29
CASES = {
    "duo_attention_heads": {"sinks": 4, "window": 16},
    "razor_attention_heads": {"repeats": 4},
    "flexicache_heads": {"top_pages": 8, "window": 4, "unstable": 0.25},
    "heterocache_heads": {"k": 24, "kernel": 5, "steps": STEPS, "tau_stable": 0.6, "tau_sim": 0.55, "ratio": 0.8},
}
PAGE = 4
ANCHOR, VOLATILE, PIVOT, SATELLITE = range(4)


class Seen:
    """A text under the full cache: queries [layer][Hq, n, D] and keys [layer][Hkv, n, D], rotated to their positions."""

    def __init__(self, model, ids):
        self.model, self.q, self.k = model, [], []
        x, positions = model.embed(ids), torch.arange(len(ids))
        for layer in range(model.layers):
            q, k, v = model.qkv(layer, x)
            self.q.append(model.rotate(q, positions))
            self.k.append(model.rotate(k, positions))
            x = model.after_attention(layer, x, model.prompt_attention(self.q[-1], self.k[-1], v)[0])

    def queries(self, layer, kv, i):
        """[G, D] of a KV head, at position i."""
        return self.q[layer][kv * self.model.group:(kv + 1) * self.model.group, i]

    def shares(self, layer, kv, i):
        """[G, i + 1] of a KV head."""
        keys = self.k[layer][kv, :i + 1]
        return (self.queries(layer, kv, i) @ keys.T / math.sqrt(keys.shape[-1])).softmax(-1).double()

    def of_heads(self, number):
        """[layer][KV head] of number(layer, KV head)."""
        return [[number(layer, kv) for kv in range(self.model.kv_heads)] for layer in range(self.model.layers)]


def duo(seen, n, steps, spec):
    """The share of attention beyond sinks and window, the greatest of the group, the mean of the steps."""
    def gate(layer, kv):
        beyond = [seen.shares(layer, kv, i)[:, spec["sinks"]:i + 1 - spec["window"]].sum(1).amax().item()
                  for i in range(n, n + steps)]
        return sum(beyond) / steps
    return {"gate": seen.of_heads(gate)}, []


def razor(seen, n, steps, spec):
    """The prompt's copies, behind BOS: attention to earlier copies of a query's token (echo), or to the tokens behind them."""
    first, period = n % spec["repeats"], n // spec["repeats"]

    def score(layer, kv, behind):
        total = torch.zeros(seen.model.group, dtype=torch.float64)
        for i in range(first + period, n):
            shares = seen.shares(layer, kv, i)
            total += shares[:, [j + behind for j in range(i - period, first - 1, -period)]].sum(1)
        return (total / (n - first - period)).amax().item()
    return {"echo": seen.of_heads(lambda layer, kv: score(layer, kv, 0)),
            "induction": seen.of_heads(lambda layer, kv: score(layer, kv, 1))}, []


def flexicache(seen, n, steps, spec):
    """The overlap beyond chance of a window's first step with the later ones; each window votes for its lowest quarter."""
    count, window, kept = spec["top_pages"], spec["window"], []
    heads = [(layer, kv) for layer in range(seen.model.layers) for kv in range(seen.model.kv_heads)]

    def best(layer, kv, i):
        bounds = page_bounds(seen.queries(layer, kv, i), seen.k[layer][kv, :i + 1], PAGE)
        kept.append(top(bounds.amax(0), count).tolist())
        return set(kept[-1])
    votes, means = dict.fromkeys(heads, 0), {head: [] for head in heads}
    for begin in range(n, n + steps - window + 1, window):
        stability = {}
        for head in heads:
            first, overlaps = best(*head, begin), []
            for i in range(begin + 1, begin + window):
                chance = count / -(-(i + 1) // PAGE)
                overlaps.append(max(0.0, (len(first & best(*head, i)) / count - chance) / (1 - chance)))
            stability[head] = sum(overlaps) / (window - 1)
            means[head].append(stability[head])
        for head in sorted(heads, key=lambda head: stability[head])[:int(0.25 * len(heads))]:
            votes[head] += 1
    unstable = sorted(heads, key=lambda head: -votes[head])[:int(spec["unstable"] * len(heads))]
    return {"votes": seen.of_heads(lambda *head: votes[head]), "unstable": seen.of_heads(lambda *head: int(head in unstable)),
            "stability": seen.of_heads(lambda *head: statistics.mean(means[head]))}, kept


def overlap(a, b):
    return len(a & b) / min(len(a), len(b))


def heterocache(seen, n, steps, spec):
    """Roles by how alike the best tokens of a head and of its layer's other heads stay."""
    count, heads, kept = spec["k"], range(seen.model.kv_heads), []

    def best(layer, kv, i):
        row = seen.shares(layer, kv, i).mean(0)[:n]
        pooled = F.avg_pool1d(row[None, None], spec["kernel"], 1, spec["kernel"] // 2)[0, 0]
        kept.append(top(pooled, count).tolist())
        return set(kept[-1])
    arrays = {name: [] for name in ("stable", "similar", "role", "pivot_of")}
    for layer in range(seen.model.layers):
        of_prompt = [best(layer, kv, n - 1) for kv in heads]
        of_steps = [[best(layer, kv, i) for kv in heads] for i in range(n, n + spec["steps"])]
        stable = [statistics.median(overlap(sets[kv], of_prompt[kv]) for sets in of_steps) for kv in heads]
        similar = [statistics.median(max(overlap(sets[kv], sets[other]) for other in heads if other != kv) for sets in of_steps)
                   for kv in heads]
        pairs = [[statistics.mean(overlap(sets[a], sets[b]) for sets in of_steps) for b in heads] for a in heads]
        role, pivot_of = roles(stable, similar, pairs, spec)
        for name, row in (("stable", stable), ("similar", similar), ("role", role), ("pivot_of", pivot_of)):
            arrays[name].append(row)
    return {**arrays, "share": shares(arrays, spec)}, kept


def roles(stable, similar, pairs, spec):
    """A head without a similar one is an anchor or volatile. The others form stars: the head of most free neighbours is the
    pivot, of equal ones the first."""
    role = [ANCHOR if x >= spec["tau_stable"] else VOLATILE for x in stable]
    pivot_of = [-1] * len(stable)
    free = {head for head, x in enumerate(similar) if x >= spec["tau_sim"]}
    while free:
        stars = {head: {other for other in free if other != head and pairs[head][other] >= spec["tau_sim"]} for head in free}
        pivot = max(sorted(free), key=lambda head: len(stars[head]))
        role[pivot] = PIVOT
        for other in stars[pivot]:
            role[other], pivot_of[other] = SATELLITE, pivot
        free -= {pivot} | stars[pivot]
    return role, pivot_of


def shares(arrays, spec):
    """The share of a prompt that a head keeps on the device. None has more than 1; the others take the excess."""
    heads = [(layer, kv) for layer, row in enumerate(arrays["role"]) for kv in range(len(row))]
    compressed = {head for head in heads if arrays["role"][head[0]][head[1]] in (ANCHOR, SATELLITE)}
    total = spec["ratio"] * len(heads) - (len(heads) - len(compressed))
    weight = {head: 1 / max(arrays["stable"][head[0]][head[1]], 0.05) for head in compressed}
    out, left = dict.fromkeys(heads, 1.0), set(compressed)
    while left:
        share = {head: total * weight[head] / sum(weight[other] for other in left) for head in left}
        over = {head for head in left if share[head] > 1}
        if not over:
            out |= share
            break
        left, total = left - over, total - len(over)
    return [[out[layer, kv] for kv in range(len(row))] for layer, row in enumerate(arrays["role"])]


PROFILERS = {"duo_attention_heads": duo, "razor_attention_heads": razor, "flexicache_heads": flexicache,
             "heterocache_heads": heterocache}


def text_of(name, ids, start):
    """(prompt, forced tokens)"""
    if name == "razor_attention_heads":
        return [0] + ids[start:start + COPY] * CASES[name]["repeats"], []
    return ids[start:start + PROMPT], ids[start + PROMPT:start + PROMPT + STEPS]


def rounded(rows):
    return [[x if isinstance(x, int) else float(f"{x:.7g}") for x in row] for row in rows]


def discrete(arrays):
    return {name: rows for name, rows in arrays.items() if all(isinstance(x, int) for row in rows for x in row)}


def main():
    golden = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), "../../core/test/golden")
    with open(os.path.join(golden, "recall_logits.json")) as file:
        ids = json.load(file)["sequences"][0]["ids"]
    folder = "../../../datasets/models/recall"
    path = os.path.join(golden, folder)
    model, cases = llama.Llama(path), []
    others = [llama.Llama(path, torch.float64), export_policies.perturbed(model, 0), export_policies.perturbed(model, 1)]
    for name, spec in CASES.items():
        for start in range(0, len(ids) - PROMPT - STEPS, 4):
            prompt, forced = text_of(name, ids, start)
            found = [PROFILERS[name](Seen(one, prompt + forced), len(prompt), len(forced), spec) for one in (model, *others)]
            if all((discrete(arrays), kept) == (discrete(found[0][0]), found[0][1]) for arrays, kept in found):
                break
        else:
            raise SystemExit(f"{name}: no text without a near tie")
        cases.append({"name": name, "params": spec, "prompt": prompt, "forced": forced,
                      "arrays": {array: rounded(rows) for array, rows in found[0][0].items()}})
        print(f"{name}: from token {start}")
    text = "{" + f'"version": 1, "model": "{folder}", "page_size": {PAGE},\n "cases": [\n'
    text += ",\n".join("  " + json.dumps(case, separators=(",", ":")) for case in cases) + "\n]}\n"
    out = os.path.join(golden, "policies/head_profiles.json")
    if "--check" in sys.argv:
        with open(out) as file:
            raise SystemExit(0 if file.read() == text else "head_profiles.json is not what this script writes")
    with open(out, "w") as file:
        file.write(text)


if __name__ == "__main__":
    main()
