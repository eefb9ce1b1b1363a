"""HeteroCache, in plain torch, from the paper's method description.

A profile comes with the policy's JSON: `profile: {name: [layer][kv_head]}`.
"""
import math
import statistics

import torch
import torch.nn.functional as F

import policies
from policies import Full, group_reduce, top

ANCHOR, VOLATILE, PIVOT, SATELLITE = range(4)  # `role` of a profile


class HeteroCache(Full):
    """Pivots keep the prompt and watch their attention. When it drifts, their satellites fetch other tokens."""

    def configure(self, spec):
        self.threshold, self.recent = spec.get("threshold", 0.5), spec.get("window", 5)
        self.period, self.kernel = spec.get("check_every", 5), spec.get("kernel", 5)
        self.lead = 1 if spec.get("stagger", True) else 0
        self.window, heads = 1, (self.model.layers, self.model.kv_heads)
        profile = {name: torch.tensor(rows).double() for name, rows in spec.get("profile", {}).items()}
        clusters = spec.get("clustering", True)
        self.role = profile["role"].long() if clusters else torch.full(heads, ANCHOR)
        self.pivot = profile["pivot_of"].long() if clusters else torch.full(heads, -1)
        self.stable = profile["stable"] if spec.get("allocation", True) else torch.ones(heads).double()
        self.least, self.fill = spec.get("least_stability", 0.05), spec.get("fill", True)
        self.recalls, self.beside = spec.get("retrieval", True), spec.get("asynchrony", True)
        self.by_position = spec.get("recall_order", "score") == "position"  # of the largest satellite's tokens, as the code does
        self.coming = {}  # (layer, satellite) -> the tokens that come beside the next step
        self.base, self.overlaps, self.steps, self.own = {}, {}, {}, {}

    def divide(self, n):
        """Tokens of each head of the model; the mean of a compressed one."""
        compressed = (self.role == ANCHOR) | (self.role == SATELLITE)
        count, full = int(compressed.sum()), int((~compressed).sum())
        base = min(max(int((compressed.numel() * min(self.tokens, n) - full * n) / count), 1), n)
        weights = 1 / self.stable.clamp(min=self.least)
        tokens, left, total = torch.full(self.role.shape, n), compressed.clone(), float(count * base)
        while True:
            share = total * weights / weights[left].sum()
            over = left & (share >= n)
            if not self.fill or not over.any():
                break
            left &= ~over  # they take n each, the others divide the rest
            total -= n * int(over.sum())
        tokens[left] = (share[left] + 1e-6).long().clamp(1, n)
        return tokens, base

    def pooled(self, shares):
        """shares [G, n]: an average over neighbours, with zeros beyond the ends, and the greatest of the group."""
        return F.avg_pool1d(shares[:, None], self.kernel, 1, self.kernel // 2)[:, 0].amax(0)

    def prompt(self, layer, prompt):
        self.n = prompt.n
        everything = [torch.arange(prompt.n)] * self.model.kv_heads
        tokens, self.of_base = self.divide(prompt.n)
        if self.of_base == prompt.n:
            return everything
        rows = prompt.last_rows[:, -1].reshape(self.model.kv_heads, self.model.group, -1)
        kept = []
        for kv in range(self.model.kv_heads):
            score = self.pooled(rows[kv])
            if self.role[layer, kv] == PIVOT:
                self.base[layer, kv] = set(top(score, self.of_base).tolist())
                self.overlaps[layer, kv] = []
            kept.append(top(score, int(tokens[layer, kv])))
            self.own[layer, kv] = len(kept[-1])
        return kept

    def attended(self, layer, q, keys, kept, shares):
        self.scores = {}
        for kv in range(self.model.kv_heads):
            if (layer, kv) in self.base and self.recalls:
                query = q[kv * self.model.group:(kv + 1) * self.model.group]
                shares = (query @ keys[kv, :self.n].T / math.sqrt(keys.shape[-1])).softmax(-1)
                self.scores[kv] = self.pooled(shares)

    def after(self, layer, kept, mass):
        step = self.steps.get(layer, 0)
        self.steps[layer] = step + 1
        kept = list(kept)

        def fetch(head, tokens):
            kept[head] = torch.cat([tokens, kept[head][kept[head] >= self.n]])

        for of_layer, head in list(self.coming):
            if of_layer == layer:
                fetch(head, self.coming.pop((layer, head)))
        for kv, score in self.scores.items():
            best = set(top(score, self.of_base).tolist())
            self.overlaps[layer, kv].append(len(best & self.base[layer, kv]) / self.of_base)
            if (step + 1 + self.lead * layer) % self.period:
                continue
            recent = ([1.0] * self.recent + self.overlaps[layer, kv])[-self.recent:]
            if statistics.median(recent) >= self.threshold:
                continue
            self.decisions.setdefault((layer, kv), []).append(step)
            self.base[layer, kv], self.overlaps[layer, kv] = best, []
            satellites = [other for other in range(self.model.kv_heads)
                          if self.role[layer, other] == SATELLITE and self.pivot[layer, other] == kv]
            largest = max((self.own[layer, other] for other in satellites), default=0)
            for other in satellites:
                fetched = top(score, largest if self.by_position else self.own[layer, other])[:self.own[layer, other]]
                if self.beside:
                    self.coming[layer, other] = fetched
                else:
                    fetch(other, fetched)
        return kept


policies.POLICIES.update(heterocache=HeteroCache)
