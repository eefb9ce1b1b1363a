"""LeanKV and KVQuant in plain torch, from the papers' method descriptions: tokens are stored in more bits, in fewer, or not at
all, and numbers as entries of codebooks.
"""
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
    """A token's mean score says how it is stored. Each step at most one token of a head steps down, by the merged rule or the paper's."""

    BITS = {"key": (8, 4), "value": (4, 2)}

    def configure(self, spec):
        self.page, self.recent = spec.get("page_size", 16), spec.get("window", 64)
        self.high_from, self.low_from = spec.get("high_from", 1.0), spec.get("low_from", 0.02)
        self.of_token = spec.get("unit", "n") == "i"
        self.leaving_decides, self.counted = spec.get("rule") == "algorithm_1", spec.get("age") == "counted"
        self.window = 64
        self.queries = math.inf if spec.get("queries") == "all" else self.window
        self.lower, self.sums, self.state = {}, {}, {}  # (layer, side); of (layer, KV head): {position: ...}

    def encode(self, layer, side, x):
        more, fewer = coded(x, *self.BITS[side])
        before = self.lower.get((layer, side))
        self.lower[layer, side] = fewer if before is None else torch.cat([before, fewer], 1)
        return more

    def prompt(self, layer, prompt):
        n, kept = prompt.n, []
        self.first = max(0, n - self.queries) if self.counted else 0  # the first query that counts in decode steps
        if self.spec.get("greatest", "mean") == "score":
            of_heads = prompt.last_rows.reshape(self.model.kv_heads, self.model.group, -1, n).amax(1).sum(1)
        else:
            rows = prompt.column_sums if math.isinf(self.queries) else prompt.last_rows.sum(1)
            of_heads = rows.reshape(self.model.kv_heads, self.model.group, n).amax(1)
        for kv, sums in enumerate(of_heads.tolist()):
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
        leaving = seen - self.recent
        means = {p: sums[p] / (seen - max(p, self.first)) * seen for p in state if p <= leaving}  # in units of 1 / seen
        h, high = min(((means[p], p) for p in means if state[p] == HIGH), default=(math.inf, None))
        l, low = min(((means[p], p) for p in means if state[p] != HIGH), default=(math.inf, None))
        if self.leaving_decides:
            m = means.get(leaving, math.nan)
            if m < self.low_from:
                del state[leaving]
            elif m < self.high_from:
                self.replace(state, leaving, low if l < self.low_from else None)
            elif m >= self.high_from and h < self.low_from:
                del state[high]
            elif m >= self.high_from and h < self.high_from:
                self.replace(state, high, None)
        elif h < self.low_from and h < l:
            del state[high]
        elif h < self.high_from:
            self.replace(state, high, low if l < self.low_from else None)

    def replace(self, state, high, low):
        """The high token becomes low, in the place of a low one or as one more."""
        if low is not None:
            state[high] = state.pop(low)
            return
        state[high] = WAITS
        waiting = [p for p in state if state[p] == WAITS]
        if len(waiting) == self.page:
            state.update(dict.fromkeys(waiting, LOW))


class KvQuant(Full):
    """The prompt's keys before RoPE, with thresholds of each channel, and its values, with thresholds of each token.

    The profile: `key_lower`, `key_upper` [layer][KV head * D + channel], `key_codebook`, `value_codebook` [layer][32]: 4 levels of 2
    bits after Q-Norm, then the entries of 2, 3 and 4 bits.
    """

    def configure(self, spec):
        self.bits, self.dense = spec.get("bits", 3), spec.get("dense_tokens", 0)
        self.exact, self.calibrated = spec.get("outliers", True), spec.get("calibration", True)
        self.share = spec.get("outlier_share", 0.01) if self.exact else 0.0
        self.profile = {name.removesuffix("_all"): torch.tensor(rows).double() for name, rows in spec.get("profile", {}).items()}
        self.fitted = self.calibrated and spec.get("nonuniform", True)
        self.normed = self.bits == 2 and spec.get("q_norm", True)

    def book(self, layer, side):
        """Centres, and the levels that stand for numbers next to them."""
        count = 2**self.bits
        if not self.fitted:
            return [torch.linspace(-1, 1, count).double()] * 2
        entries = self.profile[side + "_codebook"][layer]
        return entries[count:2 * count], entries[:count] if self.normed else entries[count:2 * count]

    def code(self, layer, side, x, lower, upper):
        """x [Hkv, tokens, D]; thresholds broadcast to it. Notes the number of each entry, -1 of an outlier."""
        centres, levels = self.book(layer, side)
        zero, reach = (upper + lower) / 2, (upper - lower) / 2
        nearest = ((x - zero) / reach)[..., None].sub(centres).abs().argmin(-1)
        if self.exact:
            nearest[(x < lower) | (x > upper)] = -1
        for kv in range(len(x)):
            self.decisions.setdefault((layer, kv), []).append(nearest[kv].flatten().tolist())
        return torch.where(nearest < 0, x, zero + reach * levels[nearest])

    def of_tokens(self, x):
        """Thresholds of each token's numbers, those of all KV heads."""
        numbers = x.transpose(0, 1).flatten(1)
        return (torch.quantile(numbers, share, 1)[None, :, None] for share in (self.share / 2, 1 - self.share / 2))

    def finish_cache(self, keys, values):
        for layer, (k, v) in enumerate(zip(keys, values)):
            self.store(layer, k, v, torch.arange(self.dense, k.shape[1]))

    def finish_step(self, layer, keys, values):
        if self.spec.get("generated", False):
            self.store(layer, keys, values, torch.tensor([keys.shape[1] - 1]))

    def store(self, layer, k, v, places):
        raw, value = self.model.rotate(k[:, places], -places).double(), v[:, places].double()
        if self.calibrated:
            lower, upper = (self.profile[name][layer].reshape(len(k), 1, -1) for name in ("key_lower", "key_upper"))
        else:
            lower, upper = self.of_tokens(raw)
        k[:, places] = self.model.rotate(self.code(layer, "key", raw, lower, upper).to(k.dtype), places)
        v[:, places] = self.code(layer, "value", value, *self.of_tokens(value)).to(v.dtype)


def calibrated(model, ids, share, exact):
    """A profile for KvQuant from the keys and values of a text: entries are quantiles, those after Q-Norm wider by a quarter."""
    profile, which = {}, "" if exact else "_all"
    x, positions = model.embed(ids), torch.arange(len(ids))
    share = share if exact else 0.0

    def entries(numbers, lower, upper):
        inside = ((numbers - (upper + lower) / 2) / ((upper - lower) / 2))[(numbers >= lower) & (numbers <= upper)]
        books = [torch.quantile(inside, (torch.arange(k).double() + 0.5) / k).tolist() for k in (4, 8, 16)]
        return [1.25 * entry for entry in books[0]] + sum(books, [])

    for layer in range(model.layers):
        q, k, v = model.qkv(layer, x)
        bounds = [torch.quantile(k.double(), at, 1, keepdim=True) for at in (share / 2, 1 - share / 2)]
        of_tokens = [torch.quantile(v.double().transpose(0, 1).flatten(1), at, 1)[None, :, None] for at in (share / 2, 1 - share / 2)]
        for name, row in (("key_lower", bounds[0].flatten().tolist()), ("key_upper", bounds[1].flatten().tolist()),
                          ("key_codebook", entries(k.double(), *bounds)), ("value_codebook", entries(v.double(), *of_tokens))):
            profile.setdefault(name + which, []).append([float(f"{number:.6g}") for number in row])
        attended, _, _ = model.prompt_attention(model.rotate(q, positions), model.rotate(k, positions), v)
        x = model.after_attention(layer, x, attended)
    return {**profile, "outlier_share": [[share if exact else 0.01]]}


policies.POLICIES.update(leankv=LeanKv, kvquant=KvQuant)
