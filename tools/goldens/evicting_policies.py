"""Policies that evict by the attention of recent queries, in plain torch, from the papers' method descriptions.

Each keeps what its paper's formula names: whole rows of attention, time stamps, queries. Nothing is counted in advance.
"""
import math

import torch
import torch.nn.functional as F

import policies
from policies import Full, group_reduce, top


def top_newest(scores, count):
    """As policies.top, but of equal scores the higher index is in."""
    return len(scores) - 1 - top(scores.flip(0), count).flip(0)


class Evicting(Full):
    """Keeps `tokens` tokens at the prompt's end, and again after every `every` decode steps."""

    def configure(self, spec):
        self.first, self.last, self.every = 0, 0, spec.get("every", 1)
        self.steps, self.seen = {}, 0  # decode steps of a layer

    def pinned(self, scores):
        scores = scores.clone()
        scores[:self.first] = math.inf
        if self.last:
            scores[-self.last:] = math.inf
        return scores

    def after(self, layer, kept, mass):
        self.steps[layer] = self.steps.get(layer, 0) + 1
        if self.every == 0 or self.steps[layer] % self.every or len(kept[0]) <= self.tokens:
            return kept
        return [head[self.best(layer, kv, head, mass[kv])] for kv, head in enumerate(kept)]


class Cake(Evicting):
    """Mean plus gamma times the unbiased variance of the last queries' rows; then the current row decides alone."""

    def configure(self, spec):
        super().configure(spec)
        self.window = self.last = spec.get("window", 32)
        self.gamma, self.kernel = spec.get("gamma", 200.0), spec.get("kernel", 5)
        self.pooling, self.group = spec.get("pooling", "average"), spec.get("group", "mean")

    def prompt(self, layer, prompt):
        if prompt.n <= self.tokens:
            return [torch.arange(prompt.n)] * self.model.kv_heads
        score = self.score(prompt.last_rows[:, :, :prompt.n - self.window])
        recent = torch.arange(prompt.n - self.window, prompt.n)
        return [torch.cat([top(head, self.tokens - self.window), recent]) for head in score]

    def score(self, rows):
        """rows [Hq, w, n - w] of the older tokens, as the softmax over all tokens gives them."""
        score = rows.mean(1) + self.gamma * rows.var(1, unbiased=True)
        pool = F.max_pool1d if self.pooling == "max" else F.avg_pool1d
        score = pool(score[:, None], self.kernel, 1, self.kernel // 2)[:, 0]
        return group_reduce(score, self.model.kv_heads, self.group)

    def attended(self, layer, q, keys, kept, shares):
        rule = torch.amax if self.group == "max" else torch.mean
        self.now = [rule(head, 0) for head in shares]

    def best(self, layer, kv, head, mass):
        return top(self.pinned(self.now[kv]), self.tokens)


class Scissorhands(Evicting):
    """Counts, in the last `window` rows, those that gave a token less than 1 / (tokens that the query saw)."""

    def configure(self, spec):
        super().configure({"every": spec.get("drop", 400)})
        self.window, self.last = spec.get("window", 400), spec.get("recent", 10)
        self.each_head = spec.get("each_head", False)
        self.rows = {}  # (layer, KV head): a row for each query, [(positions that it saw, unimportant)]

    def note(self, layer, kv, positions, shares):
        """shares [G, len(positions)] of one query."""
        rows = shares if self.each_head else shares.mean(0, keepdim=True)
        unimportant = (rows < 1 / len(positions)).sum(0)
        self.rows.setdefault((layer, kv), []).append((positions, unimportant))

    def prompt(self, layer, prompt):
        everything = torch.arange(prompt.n)
        rows = prompt.last_rows.reshape(self.model.kv_heads, self.model.group, -1, prompt.n)
        for kv in range(self.model.kv_heads):
            for i in range(rows.shape[2]):
                visible = prompt.n - rows.shape[2] + 1 + i
                self.note(layer, kv, everything[:visible], rows[kv, :, i, :visible])
        if prompt.n <= self.tokens:
            return [everything] * self.model.kv_heads
        return [everything[self.best(layer, kv, everything, None)] for kv in range(self.model.kv_heads)]

    def attended(self, layer, q, keys, kept, shares):
        for kv, head in enumerate(kept):
            self.note(layer, kv, head, shares[kv])

    def best(self, layer, kv, head, mass):
        count = torch.zeros(int(head[-1]) + 1, dtype=torch.long)
        for positions, unimportant in self.rows[layer, kv][-self.window:]:
            count[positions] += unimportant
        return top_newest(self.pinned(-count[head].double()), self.tokens)


class Raas(Evicting):
    """The time when a token's share last exceeded the threshold; the oldest leave, of equal ones the first in the text."""

    def configure(self, spec):
        super().configure(spec)
        self.window = 1
        self.first, self.last = spec.get("sinks", 0), spec.get("window", 0)
        self.threshold, self.group = spec.get("threshold", 1e-4), spec.get("group", "mean")
        self.keep_prompt, self.stamps = spec.get("keep_prompt", True), spec.get("stamps", True)
        self.stamp = {}  # (layer, KV head): {position: time}

    def prompt(self, layer, prompt):
        fits = prompt.n <= self.tokens
        time = math.inf if fits and self.keep_prompt else 0
        for kv in range(self.model.kv_heads):
            self.stamp[layer, kv] = {position: time for position in range(prompt.n)}
        if fits:
            return [torch.arange(prompt.n)] * self.model.kv_heads
        scores = group_reduce(prompt.last_rows[:, -1], self.model.kv_heads, self.group)
        return [top(self.pinned(head), self.tokens) for head in scores]

    def attended(self, layer, q, keys, kept, shares):
        now = self.steps.get(layer, 0) + 1
        rule = torch.amax if self.group == "max" else torch.mean
        for kv, head in enumerate(kept):
            stamp, matters = self.stamp[layer, kv], rule(shares[kv], 0) > self.threshold
            for position, yes in zip(head.tolist(), matters.tolist()):
                new = position not in stamp
                if new or (yes and self.stamps and stamp[position] != math.inf):
                    stamp[position] = now

    def best(self, layer, kv, head, mass):
        stamps = torch.tensor([self.stamp[layer, kv][position] for position in head.tolist()], dtype=torch.float64)
        return top_newest(self.pinned(stamps), self.tokens)


class RaasPages(Full):
    """RaaS by pages: the step when a page's share of a softmax over bounds last exceeded the threshold; the oldest page leaves."""

    def configure(self, spec):
        self.window, self.page = 1, spec.get("page_size", 16)
        self.room = self.tokens // self.page - 1  # pages that stay beside the one to be filled
        self.first, self.last = (-(-spec.get(name, 0) // self.page) for name in ("sinks", "window"))  # pages
        self.threshold, self.dense = spec.get("threshold", 1e-4), spec.get("dense_layers", 0)
        self.scaled, self.keep_prompt, self.stamps = (
            spec.get(name, default) for name, default in (("scaled", False), ("keep_prompt", True), ("stamps", True)))
        self.pages, self.stamp = {}, {}  # (layer, KV head): positions of each page, and its time
        self.now = {}  # decode steps of a layer

    def prompt(self, layer, prompt):
        everything = [torch.arange(prompt.n)] * self.model.kv_heads
        if layer < self.dense:
            return everything
        fits = prompt.n <= self.room * self.page
        if prompt.n >= (self.room + 1) * self.page:
            scores = group_reduce(prompt.last_rows[:, -1], self.model.kv_heads, "mean")
            scores[:, :self.first * self.page] = math.inf
            scores[:, prompt.n - self.last * self.page:] = math.inf
            everything = [top(head, self.room * self.page) for head in scores]
        for kv, head in enumerate(everything):
            self.pages[layer, kv] = [page.tolist() for page in head.split(self.page)]
            self.stamp[layer, kv] = [math.inf if fits and self.keep_prompt else 0] * len(self.pages[layer, kv])
        return everything

    def shares(self, q, keys, pages):
        """q [G, D], keys [t, D]: [pages], the group's mean share of what no product with a page's key exceeds."""
        bounds = torch.stack([(q[:, None] * keys[page]).amax(1).sum(-1) for page in pages], -1)
        return (bounds / math.sqrt(q.shape[-1]) if self.scaled else bounds).softmax(-1).mean(0)

    def attended(self, layer, q, keys, kept, shares):
        self.now[layer] = now = self.now.get(layer, 0) + 1
        for kv in range(self.model.kv_heads if layer >= self.dense else 0):
            pages, stamp = self.pages[layer, kv], self.stamp[layer, kv]
            if len(pages[-1]) == self.page:
                pages.append([])
                stamp.append(now)
            pages[-1].append(int(kept[kv][-1]))
            queries = q[kv * self.model.group:(kv + 1) * self.model.group]
            matters = (self.shares(queries, keys[kv], pages) > self.threshold).tolist()
            self.decisions.setdefault((layer, kv), []).append(matters)
            matters = [yes and self.stamps for yes in matters[:-1]] + [True]  # the page of the newest token
            self.stamp[layer, kv] = [now if yes and old < now else old for yes, old in zip(matters, stamp)]

    def after(self, layer, kept, mass):
        if layer < self.dense:
            return kept
        return [self.evict(self.pages[layer, kv], self.stamp[layer, kv]) for kv in range(self.model.kv_heads)]

    def evict(self, pages, stamp):
        while len(pages) > self.room and len(pages[-1]) == self.page:
            oldest = min(range(self.first, len(pages) - self.last), key=lambda page: stamp[page])  # of equal ones the first
            del pages[oldest], stamp[oldest]
        return torch.tensor([position for page in pages for position in page])


class MorphKv(Evicting):
    """Softmax of each of the last `window` queries over the older tokens, logits of a group added up; max or sum of them."""

    def configure(self, spec):
        super().configure(spec)
        self.recent, self.fusion = spec.get("window", 200), spec.get("fusion", "max")
        self.queries = {}  # layer: [(Hq, D)], oldest first

    def decide(self, layer, kv, keys):
        """keys [kept, D] of one KV head. Returns indices."""
        group = slice(kv * self.model.group, (kv + 1) * self.model.group)
        old = keys[:-self.recent]
        shares = torch.stack([(q[group] @ old.T / math.sqrt(keys.shape[-1])).sum(0).softmax(-1)
                              for q in self.queries[layer][-self.recent:]])
        fused = shares.amax(0) if self.fusion == "max" else shares.sum(0)
        best = top(fused, self.tokens - self.recent)
        return torch.cat([best, torch.arange(len(old), len(keys))])

    def prompt(self, layer, prompt):
        self.queries[layer] = list(prompt.q.transpose(0, 1))
        if prompt.n <= self.tokens:
            return [torch.arange(prompt.n)] * self.model.kv_heads
        return [self.decide(layer, kv, prompt.k[kv]) for kv in range(self.model.kv_heads)]

    def attended(self, layer, q, keys, kept, shares):
        self.queries[layer].append(q)
        self.keys = keys

    def best(self, layer, kv, head, mass):
        return self.decide(layer, kv, self.keys[kv, head])


class Random:
    """SplitMix64 (Steele, Lea and Flood 2014), as kvlab starts it."""
    MASK = (1 << 64) - 1

    def __init__(self, seed, stream):
        self.state = self.mix(seed) ^ self.mix(~stream & self.MASK)

    def mix(self, z):
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9 & self.MASK
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb & self.MASK
        return z ^ (z >> 31)

    def next(self):
        self.state = (self.state + 0x9e3779b97f4a7c15) & self.MASK
        return self.mix(self.state)


def numbers(start, i):
    """Number i of the SplitMix64 sequence that starts at `start`."""
    draws = Random(0, 0)
    draws.state = start + 0x9e3779b97f4a7c15 * i & Random.MASK
    return draws.next()


class Keyformer(Evicting):
    """The sum over queries of softmax((logits + Gumbel noise) / tau), with a tau that grows from decode step to decode step.

    The noise of a query and a key follows from the sequence (0 here), the layer, the query's head and position, and the
    key's position. So a run has the plugin's noise."""

    def configure(self, spec):
        super().configure(spec)
        self.last = self.tokens * spec.get("recent", 30) // 100
        self.tau, self.tau_end, self.growth = spec.get("tau_init", 1.0), spec.get("tau_end", 2.0), spec.get("steps", 100)
        self.seed, self.noisy, self.fresh = spec.get("seed", 1), spec.get("noise", True), spec.get("fresh_noise", True)
        self.score = {}

    def noise(self, layer, position, head, keys, dtype):
        """Of one query head and the keys at these positions. Without fresh noise, that of the text's first query."""
        if not self.noisy:
            return torch.zeros(len(keys), dtype=dtype)
        kv, member = divmod(head, self.model.group)
        sequence = Random(self.seed, 1).next() + member & Random.MASK
        heads = Random(sequence, (position if self.fresh else 0) << 32 | layer).next()
        start, gumbel = numbers(heads, kv), []
        for key in keys.tolist():
            uniform = torch.tensor((numbers(start, key) >> 40) * 2.0**-24 + 2.0**-26, dtype=torch.float32).item()
            gumbel.append(-math.log(-math.log(uniform)))
        return torch.tensor(gumbel, dtype=torch.float64).to(dtype)

    def shares(self, layer, position, head, logits, keys, tau):
        """Of one query head: logits [keys], and the keys' positions."""
        return ((logits + self.noise(layer, position, head, keys, logits.dtype)) / tau).softmax(-1)

    def prompt(self, layer, prompt):
        total = torch.zeros(self.model.kv_heads, prompt.n, dtype=prompt.q.dtype)
        keys = prompt.k.repeat_interleave(self.model.group, 0)
        for i in range(prompt.n):
            logits = (keys[:, :i + 1] @ prompt.q[:, i, :, None]).squeeze(-1) / math.sqrt(keys.shape[-1])
            for head, row in enumerate(logits):
                share = self.shares(layer, i, head, row, torch.arange(i + 1), self.tau)
                total[head // self.model.group, :i + 1] += share / self.model.group
        for kv in range(self.model.kv_heads):
            self.score[layer, kv] = total[kv].clone()  # by text position
        everything = torch.arange(prompt.n)
        if prompt.n <= self.tokens:
            return [everything] * self.model.kv_heads
        return [everything[self.best(layer, kv, everything, None)] for kv in range(self.model.kv_heads)]

    def attended(self, layer, q, keys, kept, shares):
        part = min(self.steps.get(layer, 0) + 1, self.growth) / self.growth
        tau, position = self.tau + (self.tau_end - self.tau) * part, int(kept[0][-1])
        for kv, kept_of in enumerate(kept):
            score = self.score[layer, kv]
            self.score[layer, kv] = score = torch.cat([score, score.new_zeros(position + 1 - len(score))])
            for head in range(kv * self.model.group, (kv + 1) * self.model.group):
                logits = keys[kv, kept_of] @ q[head] / math.sqrt(keys.shape[-1])
                score[kept_of] += self.shares(layer, position, head, logits, kept_of, tau) / self.model.group

    def best(self, layer, kv, head, mass):
        return top(self.pinned(self.score[layer, kv][head]), self.tokens)


policies.POLICIES.update(keyformer=Keyformer, cake=Cake, scissorhands=Scissorhands, raas_tokens=Raas, raas=RaasPages, morphkv=MorphKv)
