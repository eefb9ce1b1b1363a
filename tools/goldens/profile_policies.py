"""LServe and HeteroCache, in plain torch, from the papers' method descriptions.

A profile comes with the policy's JSON: `profile: {name: [layer][kv_head]}`.
"""
import math
import statistics

import torch
import torch.nn.functional as F

import policies
from head_policies import DuoAttention
from offloading_policies import page_bounds
from policies import Full, group_reduce, top
from retrieval_policies import pages_to_tokens


class LServe(DuoAttention):
    """Streaming heads keep sinks and a window. The others keep all and read pages, chosen every `choose_every` steps."""

    def configure(self, spec):
        self.page, self.group, self.scale = spec.get("page_size", 16), spec.get("group", "max"), spec.get("scale", 1.0)
        self.period = spec.get("choose_every", 4) if spec.get("reuse", True) else 1
        self.count = spec.get("tokens", 4096) // self.page - (self.period > 1)  # one is for a page that opens later
        self.chosen, self.steps = {}, {}
        super().configure(spec)

    def classes(self, spec):
        if not spec.get("retrieval_heads", True):
            return torch.zeros(self.model.layers, self.model.kv_heads, dtype=torch.bool)
        return super().classes(spec)

    def choose(self, layer, kv, q, keys):
        scores = page_bounds(q, keys, self.page)
        if self.group == "softmax_mean":
            scores = (scores * self.scale).softmax(-1)
        score = group_reduce(scores, 1, "mean" if self.group == "softmax_mean" else self.group)[0]
        score[-1] = math.inf  # the newest page is one of them
        self.chosen[layer, kv] = set(top(score, self.count).tolist())

    def prompt(self, layer, prompt):
        for kv in range(self.model.kv_heads):
            self.choose(layer, kv, prompt.q[kv * self.model.group:(kv + 1) * self.model.group, -1], prompt.k[kv])
        return super().prompt(layer, prompt)

    def select(self, layer, q, k, kept):
        step, read, pages = self.steps.get(layer, 0), [], []
        self.steps[layer] = step + 1
        for kv, head in enumerate(kept):
            if not self.everything[layer][kv]:  # reads all places that it holds
                read.append(head)
                pages.append(torch.arange(-(-len(head) // self.page)))
                continue
            if step % self.period == 0:
                self.choose(layer, kv, q[kv * self.model.group:(kv + 1) * self.model.group], k[kv])
            pages.append(torch.tensor(sorted(self.chosen[layer, kv] | {(k.shape[1] - 1) // self.page})))
            read.append(pages_to_tokens(pages[-1].tolist(), self.page, k.shape[1]))
        return read, pages

    def window_of(self, seen):
        return self.spec.get("window", 256)


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
        self.recalls = spec.get("retrieval", True)
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
            for other in range(self.model.kv_heads):
                if self.role[layer, other] == SATELLITE and self.pivot[layer, other] == kv:
                    fetched = top(score, self.own[layer, other])
                    kept[other] = torch.cat([fetched, kept[other][kept[other] >= self.n]])
        return kept


policies.POLICIES.update(lserve=LServe, heterocache=HeteroCache)
