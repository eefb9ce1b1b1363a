"""The compression policies in plain torch, written from the papers' method descriptions.

A policy never holds keys. It names, per layer and KV head, the ascending positions that are kept and, before a decode
step's attention, the positions that are read. Prompts are attended in full; layer l is compressed after its attention.
"""
import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
import torch.nn.functional as F


def top(scores, count):
    """Ascending indices of the `count` largest scores [n]; ties go to the lower index."""
    return torch.sort(scores, descending=True, stable=True).indices[:max(count, 0)].sort().values


def group_reduce(per_query_head, kv_heads, rule):
    """[Hq, n] -> [Hkv, n], added in head order so that equal columns stay equal."""
    grouped = per_query_head.reshape(kv_heads, -1, per_query_head.shape[-1])
    if rule == "max":
        return grouped.amax(1)
    total = grouped[:, 0].clone()
    for head in range(1, grouped.shape[1]):
        total += grouped[:, head]
    return total if rule == "sum" else total / grouped.shape[1]


def attend(q, k, v):
    """One query: q [G, D], k and v [m, D]. Returns output [G, D] and probabilities [G, m]."""
    probability = (q @ k.T / math.sqrt(k.shape[-1])).softmax(-1)
    return probability @ v, probability


# --- budgets: how many tokens each KV head of a layer keeps, pins (the recent window) included --------------------

def by_weight(weights, floor, each, most):
    """Divides each * len(weights) tokens: `floor` for every head, and the rest by weight in exact numbers; none has more than
    `most`. Rounds down; the largest remainders get what that loses, of equal ones the first."""
    heaviest_first = sorted(range(len(weights)), key=lambda head: -weights[head])
    total, shares = Fraction(each) * len(weights), {}
    for at, head in enumerate(heaviest_first):
        others = heaviest_first[at:]
        rest, weight = total - sum(shares.values()) - floor * len(others), sum(weights[other] for other in others)
        open_shares = {other: floor + rest * (weights[other] / weight if weight else Fraction(1, len(others)))
                       for other in others}
        if open_shares[head] <= most:  # the heaviest has room, so all have
            shares |= open_shares
            break
        shares[head] = Fraction(most)
    counts = [math.floor(shares[head]) for head in range(len(weights))]
    for head in sorted(range(len(weights)), key=lambda head: counts[head] - shares[head])[:int(total) - sum(counts)]:
        counts[head] += 1
    return counts


def repaired(shares, counts, total, most):
    """Whole numbers near `shares` that add up to `total`: one more or less each time where the share is farthest away, of
    equal ones the first. None is negative or above `most`."""
    counts = list(counts)
    while sum(counts) != total:
        step = 1 if sum(counts) < total else -1
        room = [i for i, count in enumerate(counts) if 0 <= count + step <= most]
        if not room:
            break
        counts[max(room, key=lambda i: step * (shares[i] - counts[i]))] += step
    return counts


def split_budget(spec, layer, layers, scores, pins, profile=None):
    """scores [Hkv, c] of the c = n - pins candidates, n > tokens. Returns one count per KV head, pins included."""
    heads, candidates = scores.shape
    n, base = candidates + pins, spec["tokens"] - pins
    split = spec.get("split", "uniform")
    if split == "pyramid":
        beta = spec.get("beta", 20)
        low = base // beta
        high = 2 * base - low
        if high >= candidates:
            high, low = candidates, 2 * base - candidates
        if n >= 2 * base and layers > 1 and spec.get("exact_total", False):
            mean, mirror = base, layers - 1 - layer  # a layer and its mirror have twice the mean
            upper = math.ceil(high - Fraction(min(layer, mirror) * (high - low), layers - 1))
            base = upper if layer <= mirror else 2 * mean - upper
        elif n >= 2 * base and layers > 1:
            base = high - layer * ((high - low) // (layers - 1))
        return [min(base, candidates) + pins] * heads
    if split == "head_profile":
        weights = [Fraction(float(np.float32(x))) for row in profile[spec["weights"]] for x in row]  # a profile has f32
        counts = by_weight(weights, Fraction(spec.get("floor", 0.2)) * base, base, candidates)
        return [pins + count for count in counts[layer * heads:(layer + 1) * heads]]
    if split == "adakv":
        alpha = spec.get("floor", 0.2)
        winners = top(scores.flatten(), heads * base)
        counts = torch.bincount(winners // candidates, minlength=heads).tolist()
        shares = [count * (1 - alpha) + int(base * alpha) for count in counts]
        counts = [min(round(share), candidates) for share in shares]
        if spec.get("exact_total", False):
            counts = repaired(shares, counts, heads * base, candidates)
        return [count + pins for count in counts]
    if split != "uniform":
        raise ValueError(f"got split {split}, wanted uniform, pyramid, adakv or head_profile")
    return [spec["tokens"]] * heads


@dataclass
class Prompt:
    """The vectors and attention sums of a layer's prompt; q and k are rotated to their positions."""
    n: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    column_sums: torch.Tensor
    last_rows: torch.Tensor


class Full:
    cache_relative = False
    lists_tokens = False  # select names tokens, not pages
    window = 0  # last prompt queries whose probabilities the policy wants
    text = ()  # ids of the prompt and of the forced tokens

    def __init__(self, spec, model):
        self.spec, self.model = spec, model
        self.budget = spec.get("budget", {})
        self.tokens = self.budget.get("tokens")
        self.decisions = {}  # (layer, KV head): numbers that rounding may change and the lists do not show
        self.prompt_pages = {}  # layer: pages that each chunk of the prompt reads, [] for all that there are
        self.configure(spec)

    def configure(self, spec):
        pass

    def prompt_masks(self, layer):
        """(sinks, window) of each KV head, as llama.prompt_attention takes them, or None."""
        return None

    def attend_in_prompt(self, layer, q, k, v):
        """The prompt's attention output [n, Hq * D] of a policy that chooses what the prompt reads, or None. q and k are
        rotated."""
        return None

    def encode(self, layer, side, x):
        """What the cache stores of new keys or values x [Hkv, tokens, D]; side: "key" or "value"."""
        codec = self.spec.get("codec")
        return x if codec is None else codes_per_token(x, *CODECS[codec])

    def prompt(self, layer, prompt):
        """Kept positions per KV head."""
        return [torch.arange(prompt.n)] * self.model.kv_heads

    def rewritten(self, layer, prompt):
        """What the cache stores as the prompt's keys [Hkv, n, D] after `prompt`, where that is something else."""
        return None

    def finish_prompt(self, kept, n):
        """Kept positions [layer][kv_head] after the prompt's last layer."""
        return kept

    def finish_cache(self, keys, values):
        """Changes what the cache stores of the prompt, of all layers: [layer][Hkv, n, D] each."""

    def finish_step(self, layer, keys, values):
        """Changes what the cache stores [Hkv, t, D] after a step's attention of the layer."""

    def enter(self, layer, x, position):
        """The residual stream x [1, hidden] in front of a layer of a decode step."""

    def select(self, layer, q, k, kept):
        """Positions that this step's attention reads, per KV head, and pages where the policy thinks in pages.

        q [Hq, D] and k [Hkv, t, D] are rotated; kept holds the new token."""
        return kept, None

    def attend(self, layer, kv, q, keys, values):
        """Attention of a KV head's queries q [G, D] to what it reads: output [G, D] and probabilities of the tokens read."""
        return attend(q, keys, values)

    def clamped(self, keys, places, position):
        """The keys [t, D] of these text positions as the attention of the query at `position` reads them."""
        return keys

    def attended(self, layer, q, keys, kept, shares):
        """What this step's attention did, before `after`: shares [Hkv][G, len(kept)]; q and keys as in select."""

    def after(self, layer, kept, mass):
        """Kept positions after this step's attention; mass [Hkv][len(kept)] is the group-mean probability."""
        return kept


class Window(Full):
    def configure(self, spec):
        self.sinks = 0

    def trim(self, kept):
        if len(kept) <= self.tokens:
            return kept
        return torch.cat([kept[:self.sinks], kept[len(kept) - (self.tokens - self.sinks):]])

    def prompt(self, layer, prompt):
        return [self.trim(torch.arange(prompt.n))] * self.model.kv_heads

    def after(self, layer, kept, mass):
        return [self.trim(head) for head in kept]


class StreamingLlm(Window):
    def configure(self, spec):
        self.sinks = spec.get("sinks", 4)
        self.cache_relative = spec.get("positions", "cache_relative") == "cache_relative"


class Scored(Full):
    """Keeps the best-scored prompt tokens and the last `window`; nothing leaves while decoding."""

    def prompt(self, layer, prompt):
        if prompt.n <= self.tokens:
            return [torch.arange(prompt.n)] * self.model.kv_heads
        scores = self.score(prompt)
        counts = split_budget(self.budget, layer, self.model.layers, scores, self.window, self.spec.get("profile"))
        recent = torch.arange(prompt.n - self.window, prompt.n)
        return [torch.cat([top(head, count - self.window), recent]) for head, count in zip(scores, counts)]


class SnapKv(Scored):
    def configure(self, spec):
        self.window, self.kernel = spec.get("window", 32), spec.get("kernel", 7)
        self.pool, self.group = spec.get("pooling", "max"), spec.get("group", "mean")
        self.group_first = spec.get("group_first", False)
        if self.tokens <= self.window:
            raise ValueError(f"got budget {self.tokens}, wanted more than the window of {self.window}")

    def score(self, prompt):
        votes = prompt.last_rows.sum(1)[:, :prompt.n - self.window]  # [Hq, n - w]
        if self.group_first:
            votes = group_reduce(votes, self.model.kv_heads, self.group)
        pad = self.kernel // 2
        if self.pool == "max":
            votes = F.max_pool1d(votes[:, None], self.kernel, 1, pad)[:, 0]
        elif self.pool == "average":
            votes = F.avg_pool1d(votes[:, None], self.kernel, 1, pad)[:, 0]
        return votes if self.group_first else group_reduce(votes, self.model.kv_heads, self.group)


class Knorm(Scored):
    def score(self, prompt):
        return -prompt.k.norm(dim=-1)


class H2o(Full):
    def configure(self, spec):
        self.heavy = int(self.tokens * spec.get("heavy", 0.5))
        self.recent = self.tokens - self.heavy
        self.scores = {}

    def trim(self, kept, scores):
        old = len(kept) - self.recent
        slots = torch.cat([top(scores[:old], self.heavy), torch.arange(old, len(kept))])
        return kept[slots], scores[slots]

    def prompt(self, layer, prompt):
        scores = group_reduce(prompt.column_sums, self.model.kv_heads, "mean")
        return self.trim_all(layer, [torch.arange(prompt.n)] * self.model.kv_heads, list(scores))

    def after(self, layer, kept, mass):
        scores = [torch.cat([old, old.new_zeros(1)]) + new for old, new in zip(self.scores[layer], mass)]
        return self.trim_all(layer, kept, scores)

    def trim_all(self, layer, kept, scores):
        if len(kept[0]) > self.tokens:
            kept, scores = zip(*[self.trim(*head) for head in zip(kept, scores)])
        self.scores[layer] = list(scores)
        return list(kept)


class Quest(Full):
    def configure(self, spec):
        self.page, self.group = spec.get("page_size", 16), spec.get("group", "max")
        self.dense, self.last_page = spec.get("dense_layers", 2), spec.get("last_page", False)
        self.bounds, self.scale = spec.get("page_bounds", True), spec.get("scale", 1.0)
        self.min_pages = spec.get("min_pages", 3)

    def page_scores(self, q, k):
        """[Hkv, pages]; q [Hq, D], k [Hkv, t, D] with a partial last page."""
        pages = k.split(self.page, dim=1)
        q = q.reshape(self.model.kv_heads, self.model.group, 1, -1)  # [Hkv, G, 1, D]
        if self.bounds:
            low = torch.stack([page.amin(1) for page in pages], 1)[:, None]
            high = torch.stack([page.amax(1) for page in pages], 1)[:, None]
            score = torch.maximum(q * low, q * high).sum(-1)
        else:
            score = (q * torch.stack([page.mean(1) for page in pages], 1)[:, None]).sum(-1)
        score = score * self.scale
        if self.group == "softmax_mean":
            score = score.softmax(-1)
        rule = "mean" if self.group == "softmax_mean" else self.group
        return group_reduce(score.reshape(-1, len(pages)), self.model.kv_heads, rule)

    def select(self, layer, q, k, kept):
        length = k.shape[1]
        pages = -(-length // self.page)
        count = min(max(self.min_pages, self.tokens // self.page), pages)
        if layer < self.dense:
            return kept, None
        scores = self.page_scores(q, k)
        if self.last_page:
            scores[:, -1] = torch.inf
        chosen = [top(head, count) for head in scores]
        read = [torch.cat([torch.arange(page * self.page, min((page + 1) * self.page, length)) for page in head])
                for head in (head.tolist() for head in chosen)]
        return read, chosen


POLICIES = {"full": Full, "window": Window, "streaming_llm": StreamingLlm, "snapkv": SnapKv, "knorm": Knorm, "h2o": H2o,
            "quest": Quest}


def make(spec, model):
    if spec["name"] not in POLICIES:
        raise ValueError(f"got policy {spec['name']}, wanted one of {', '.join(POLICIES)}")
    return POLICIES[spec["name"]](spec, model)


CODECS = {"int8": (255, False), "int4": (15, False), "atom": (15, True)}  # greatest code, and whether a code is 0


def codes_per_token(x, most, whole_zero):
    """x [..., D] through codes from 0 to `most` with an fp16 scale (max - min) / most and an fp16 real zero per vector: the
    minimum, or the nearest multiple of the scale (Atom)."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    unit = (high - low) / most
    zero = -unit * (-low / unit).clamp(0, most).round() if whole_zero else low
    zero, scale = zero.half().to(x.dtype), unit.half().to(x.dtype)
    codes = torch.where(scale > 0, (x - zero) / scale, torch.zeros_like(x)).round().clamp(0, most)
    return codes * scale + zero
