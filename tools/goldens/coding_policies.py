"""LeanKV in plain torch, from the paper's method description: tokens are stored in more bits, in fewer, or not at all."""
import math

import torch

import policies
from policies import Full


def coded(x, bits, fewer):
    """x [..., D] through codes of so many bits by vector, and through the same codes in fewer bits."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    zero, scale = low.half().to(x.dtype), ((high - low) / (2**bits - 1)).half().to(x.dtype)
    codes = torch.where(scale > 0, (x - zero) / scale, torch.zeros_like(x)).round().clamp(0, 2**bits - 1)
    ratio = (2**bits - 1) // (2**fewer - 1)
    wide = (scale * ratio).half().to(x.dtype)
    return codes * scale + zero, (codes / ratio).round() * wide + zero


HIGH, WAITS, LOW = range(3)  # a token that waits counts as low, and its page of low tokens is not full yet


class LeanKv(Full):
    """A token's mean score says how it is stored. Each step at most one token of a head steps down (the merged rule)."""

    BITS = {"key": (8, 4), "value": (4, 2)}

    def configure(self, spec):
        self.page, self.recent = spec.get("page_size", 16), spec.get("window", 64)
        self.high_from, self.low_from = spec.get("high_from", 1.0), spec.get("low_from", 0.02)
        self.of_token = spec.get("unit", "n") == "i"
        self.window = self.queries = 64
        self.lower, self.sums, self.state = {}, {}, {}  # (layer, side); of (layer, KV head): {position: ...}

    def encode(self, layer, side, x):
        more, fewer = coded(x, *self.BITS[side])
        before = self.lower.get((layer, side))
        self.lower[layer, side] = fewer if before is None else torch.cat([before, fewer], 1)
        return more

    def prompt(self, layer, prompt):
        n, kept = prompt.n, []
        rows = prompt.last_rows.sum(1).reshape(self.model.kv_heads, self.model.group, n)
        for kv, sums in enumerate(rows.amax(1).tolist()):
            levels = {p: self.level(p, sums[p] / min(n - p, self.queries), n) for p in range(n)}
            low = [p for p, level in levels.items() if level == LOW]
            for p in low[len(low) // self.page * self.page:]:
                levels[p] = HIGH  # they fill no page
            self.state[layer, kv] = {p: level for p, level in levels.items() if level is not None}
            self.sums[layer, kv] = dict(enumerate(sums))
            kept.append(torch.tensor(sorted(self.state[layer, kv])))
            self.note(layer, kv)
        return kept

    def level(self, p, mean, n):
        unit = 1 / (p + 1 if self.of_token else n)
        if p >= n - self.recent or mean >= self.high_from * unit:
            return HIGH
        return LOW if mean >= self.low_from * unit else None

    def note(self, layer, kv):
        ordered = sorted(self.state[layer, kv].items())
        self.decisions.setdefault((layer, kv), []).append([number for pair in ordered for number in pair])

    def select(self, layer, q, k, kept):
        self.here = kept
        return kept, None

    def attend(self, layer, kv, q, keys, values):
        state = self.state[layer, kv]
        low = torch.tensor([state.get(p) == LOW for p in self.here[kv].tolist()])[:, None]
        keys, values = (torch.where(low, self.lower[layer, side][kv, self.here[kv]], rows)
                        for side, rows in (("key", keys), ("value", values)))
        return super().attend(layer, kv, q, keys, values)

    def attended(self, layer, q, keys, kept, shares):
        for kv, head in enumerate(kept):
            sums = self.sums[layer, kv]
            for p, share in zip(head.tolist(), shares[kv].amax(0).tolist()):
                sums[p] = sums.get(p, 0.0) + share
            self.state[layer, kv].setdefault(int(head[-1]), HIGH)

    def after(self, layer, kept, mass):
        left = []
        for kv, head in enumerate(kept):
            self.step_down(self.state[layer, kv], self.sums[layer, kv], int(head[-1]) + 1)
            left.append(torch.tensor(sorted(self.state[layer, kv])))
            self.note(layer, kv)
        return left

    def step_down(self, state, sums, seen):
        means = {p: sums[p] / (seen - p) * seen for p in state if p <= seen - self.recent}  # in units of 1 / seen
        h, high = min(((means[p], p) for p in means if state[p] == HIGH), default=(math.inf, None))
        l, low = min(((means[p], p) for p in means if state[p] != HIGH), default=(math.inf, None))
        if h < self.low_from and h < l:
            del state[high]
        elif h < self.high_from and l < self.low_from:
            state[high] = state.pop(low)
        elif h < self.high_from:
            state[high] = WAITS
            waiting = [p for p in state if state[p] == WAITS]
            if len(waiting) == self.page:
                state.update(dict.fromkeys(waiting, LOW))


policies.POLICIES.update(leankv=LeanKv)
