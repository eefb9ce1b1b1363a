"""Policies that rank tokens or pages by a number of each, and the controls, in plain torch, from the papers' descriptions."""
import math

import torch
import torch.nn.functional as F

import policies
from evicting_policies import Evicting, Random, numbers
from policies import Full, group_reduce, top


class Tova(Evicting):
    """The attention of the newest query, the mean over all query heads of a layer: its heads keep the same tokens."""

    def configure(self, spec):
        super().configure(spec)
        self.window, self.last = 1, 1 if spec.get("keep_last", False) else 0

    def prompt(self, layer, prompt):
        if prompt.n <= self.tokens:
            return [torch.arange(prompt.n)] * self.model.kv_heads
        return [top(self.pinned(prompt.last_rows[:, -1].double().mean(0)), self.tokens)] * self.model.kv_heads

    def attended(self, layer, q, keys, kept, shares):
        self.now = torch.cat(shares).double().mean(0)

    def best(self, layer, kv, head, mass):
        return top(self.pinned(self.now), self.tokens)


class ByKeys(Evicting):
    """Ranks what a head holds; the same numbers at the prompt's end and in decode steps."""

    def configure(self, spec):
        super().configure({"every": 0, **spec})

    def prompt(self, layer, prompt):
        self.keys = prompt.k
        everything = torch.arange(prompt.n)
        if prompt.n <= self.tokens:
            return [everything] * self.model.kv_heads
        return [self.best(layer, kv, everything, None) for kv in range(self.model.kv_heads)]

    def attended(self, layer, q, keys, kept, shares):
        self.keys = keys

    def best(self, layer, kv, head, mass):
        return top(self.pinned(self.rank(layer, kv, head)), self.tokens)


class KeyDiff(ByKeys):
    """Minus the cosine of a key with the mean of the normalised keys."""

    def rank(self, layer, kv, head):
        keys = self.keys[kv, head]
        return -F.cosine_similarity(keys, F.normalize(keys, dim=-1).mean(0, keepdim=True), -1)


class KCenter(ByKeys):
    """Greedy k-center of the keys between the pins. The oldest one is the first centre, and ranks first."""

    def configure(self, spec):
        super().configure(spec)
        self.first, self.last = spec.get("sinks", 0), int(spec.get("recent", 0.5) * self.tokens)

    def rank(self, layer, kv, head):
        keys = self.keys[kv, head[self.first:len(head) - self.last]].double()
        order = [0]
        while len(order) < self.tokens - self.first - self.last:
            apart = ((keys[:, None] - keys[order]) ** 2).sum(-1).amin(1)
            order.append(int(apart.argmax()))
        scores = torch.zeros(len(head))
        for i, place in enumerate(order):
            scores[self.first + place] = len(order) - i
        return scores


class RandomEviction(ByKeys):
    """A number of each token, which the seed, the layer, the KV head and the text position decide. No paper has it."""

    def configure(self, spec):
        super().configure(spec)
        self.first, self.last, self.seed = spec.get("sinks", 0), spec.get("recent", 0), spec.get("seed", 0)
        self.redraw = spec.get("redraw", False)

    def rank(self, layer, kv, head):
        time = int(head[-1]) + 1 if self.redraw else 0
        key = Random(Random(self.seed, 0).next(), time << 32 | layer).next()
        return torch.tensor([numbers(numbers(key, kv), position) >> 40 for position in head.tolist()]).double()


class OracleEvict(Evicting):
    """What the full cache gives a token in all later steps of the forced text. Between tokens without a future age decides."""

    def configure(self, spec):
        super().configure(spec)
        self.first, self.last = spec.get("sinks", 0), spec.get("recent", 0)
        self.future = []  # [layer][kv_head, decode step, text position], the group's mean

    def look_ahead(self, n):
        ids, model = self.text, self.model
        x, positions = model.embed(ids), torch.arange(len(ids))
        for layer in range(model.layers):
            q, k, v = model.qkv(layer, x)
            attended, _, rows = model.prompt_attention(model.rotate(q, positions), model.rotate(k, positions), v, len(ids) - n)
            self.future.append(rows.reshape(model.kv_heads, model.group, *rows.shape[1:]).mean(1))
            x = model.after_attention(layer, x, attended)

    def prompt(self, layer, prompt):
        if not self.future:
            self.look_ahead(prompt.n)
        everything = torch.arange(prompt.n)
        if prompt.n <= self.tokens:
            return [everything] * self.model.kv_heads
        return [self.best(layer, kv, everything, None) for kv in range(self.model.kv_heads)]

    def best(self, layer, kv, head, mass):
        later = self.future[layer][kv, self.steps.get(layer, 0):].double().sum(0)
        return top(self.pinned(later[head] + 1e-15 * head), self.tokens)


class ExpectedAttention(Full):
    """What a query attends to that is distributed as the prompt's are, at one of the next `horizon` positions."""

    def configure(self, spec):
        self.sinks, self.horizon, self.epsilon = spec.get("sinks", 4), spec.get("horizon", 512), spec.get("epsilon", 0.0)
        self.covariance, self.values = spec.get("covariance", True), spec.get("values", True)

    def prompt(self, layer, prompt):
        if prompt.n <= self.tokens:
            return [torch.arange(prompt.n)] * self.model.kv_heads
        scores = self.score(prompt.q, prompt.k, prompt.v, prompt.n)
        scores[:, :self.sinks] = math.inf
        return [top(head, self.tokens) for head in scores]

    def score(self, q, k, v, n):
        q = self.model.rotate(q, -torch.arange(n))[:, self.sinks:].double()  # as before RoPE
        dim = q.shape[-1]
        mean = q.mean(1)
        away = q - mean[:, None]
        covariance = away.transpose(1, 2) @ away / q.shape[1]
        rotation = mean_rotation(self.model, dim, n, self.horizon)
        mean, covariance = mean @ rotation.T, rotation @ covariance @ rotation.T
        keys = self.model.expand(k).double()
        z = (keys @ mean[..., None]).squeeze(-1) / math.sqrt(dim)
        if self.covariance:
            z = z + torch.einsum("hnd,hde,hne->hn", keys, covariance, keys) / (2 * dim)
        z[:, :self.sinks] = -math.inf
        shares = group_reduce(z.softmax(-1), self.model.kv_heads, "mean")
        return (shares + self.epsilon) * v.double().norm(dim=-1) if self.values else shares


def mean_rotation(model, dim, begin, count):
    """[D, D]: the mean of RoPE's matrices at `count` positions from `begin` on."""
    axes = torch.eye(dim, dtype=model.dtype)[:, None].expand(dim, count, dim)
    return model.rotate(axes, torch.arange(begin, begin + count)).double().mean(1).T


class Oracle(policies.Quest):
    """The pages with the largest sum of the step's own attention, reduced over the group token by token."""

    def configure(self, spec):
        super().configure({"group": "mean", **spec})

    def page_scores(self, q, k):
        shares = (q[:, None] @ self.model.expand(k).transpose(1, 2) / math.sqrt(q.shape[-1])).squeeze(1).softmax(-1)
        shares = group_reduce(shares.double(), self.model.kv_heads, self.group)
        return torch.stack([page.sum(-1) for page in shares.split(self.page, -1)], -1)


policies.POLICIES.update(tova=Tova, keydiff=KeyDiff, random=RandomEviction, k_center=KCenter,
                         expected_attention=ExpectedAttention, oracle=Oracle, oracle_evict=OracleEvict)
