"""Policies that draw a random sample, in plain torch, from the papers' method descriptions.

Random numbers are those of kvlab: SplitMix64, started as README.md says. What the policies do with them is the papers'.
"""
import math

import torch

import policies
from evicting_policies import Random, numbers
from policies import Full


def unit(random):
    """The next number in [0, 1), of 53 bits."""
    return (random.next() >> 11) * 2.0**-53


# --- hashes --------------------------------------------------------------------------------------------------------

LAYERS_OF_PLANES = 16  # that share their planes


def planes(seed, stream, dim, bits, tables):
    """Gaussian numbers [dim, bits, tables] in f32, two from each pair of uniform ones (Box and Muller)."""
    random, drawn = Random(seed, stream), []
    while len(drawn) < dim * bits * tables:
        radius = math.sqrt(-2 * math.log(1 - unit(random)))
        turn = 2 * math.pi * unit(random)
        drawn += [radius * math.cos(turn), radius * math.sin(turn)]
    return torch.tensor(drawn[:dim * bits * tables], dtype=torch.float32).reshape(dim, bits, tables)


def bits_of(x, normals):
    """x [n, D]: [n, bits, tables], on which side of each plane a vector lies."""
    return torch.einsum("nd,dbt->nbt", x.double(), normals.double()) > 0


def chance(cosine, bits, tables, least):
    """That `least` tables or more have the same code for two vectors of this cosine."""
    of_table = (1 - cosine.double().clamp(-1, 1).acos() / math.pi)**bits
    missed = torch.zeros_like(of_table)
    for hits in range(least):
        missed += math.comb(tables, hits) * of_table**hits * (1 - of_table)**(tables - hits)
    return 1 - missed


class MagicPig(Full):
    """Each query head samples keys of the prompt, and attention divides by the chance that a key had."""
    lists_tokens = True

    def configure(self, spec):
        self.bits, self.tables, self.least = spec.get("bits", 10), spec.get("tables", 150), spec.get("collisions", 2)
        self.sinks, self.window, self.seed = spec.get("sinks", 4), spec.get("window", 64), spec.get("seed", 0)
        full = spec.get("full_layers", "0,16,32,48")
        self.full = {int(layer) for layer in full.split(",")} if full else set()
        self.corrects = spec.get("correction", True)
        self.planes, self.keys, self.codes, self.bias = {}, {}, {}, {}

    def prompt(self, layer, prompt):
        self.first, self.end = min(self.sinks, prompt.n), max(min(self.sinks, prompt.n), prompt.n - self.window)
        for kv in range(self.model.kv_heads if self.samples(layer) else 0):
            stream = layer // LAYERS_OF_PLANES * self.model.kv_heads + kv
            if stream not in self.planes:
                self.planes[stream] = planes(self.seed, stream, prompt.k.shape[-1], self.bits, self.tables)
            keys = prompt.k[kv, self.first:self.end]
            self.keys[layer, kv] = centred = keys - keys.mean(0)
            self.codes[layer, kv] = bits_of(centred, self.planes[stream])
        return super().prompt(layer, prompt)

    def samples(self, layer):
        return self.bits > 0 and layer not in self.full

    def select(self, layer, q, k, kept):
        if not self.samples(layer):
            return kept, None
        seen, read = k.shape[1], []
        for kv in range(self.model.kv_heads):
            stream = layer // LAYERS_OF_PLANES * self.model.kv_heads + kv
            bias = torch.zeros(self.model.group, seen, dtype=torch.float64)
            for member, query in enumerate(q[kv * self.model.group:(kv + 1) * self.model.group]):
                same = (self.codes[layer, kv] == bits_of(query[None], self.planes[stream])).all(1).sum(1)
                cosine = torch.nn.functional.cosine_similarity(self.keys[layer, kv].double(), query[None].double(), -1)
                had = chance(cosine, self.bits, self.tables, self.least) + 1e-4
                drawn = same >= self.least
                log_weight = -had.log() if self.corrects else torch.zeros_like(had)
                bias[member, self.first:self.end] = torch.where(drawn, log_weight, -math.inf)
                self.decisions.setdefault((layer, kv), []).append(drawn.nonzero()[:, 0].tolist())
            read.append((bias > -math.inf).any(0).nonzero()[:, 0])
            self.bias[layer, kv] = bias[:, read[-1]]
        return read, None

    def attend(self, layer, kv, q, keys, values):
        if not self.samples(layer):
            return super().attend(layer, kv, q, keys, values)
        logits = q @ keys.T / math.sqrt(keys.shape[-1]) + self.bias[layer, kv].to(q.dtype)
        return logits.softmax(-1) @ values, logits.softmax(-1)


# --- sketches ------------------------------------------------------------------------------------------------------

class Sketch:
    """What stands for the tokens that left a KV head: clusters of keys, and values that were drawn by their size."""

    def __init__(self, radius, clusters, samples, values):
        self.radius, self.most, self.samples, self.slots = radius, clusters, samples, values
        self.clusters = []  # [centre, number of keys, sampled keys]
        self.drawn, self.mu = [None] * values, 0.0  # (key, value)

    def add(self, key, value, draws):
        """draws: numbers in [0, 1), of the samples of a cluster and then of the values. Returns what was decided."""
        key, value = key.double(), value.double()
        away = [(key - centre).norm().item() for centre, _, _ in self.clusters]
        nearest = away.index(min(away)) if away else None
        if nearest is None or (away[nearest] > self.radius and len(away) < self.most):
            nearest = len(away)
            self.clusters.append([key, 0, [key] * self.samples])
        cluster = self.clusters[nearest]
        cluster[1] += 1
        taken = [i for i in range(self.samples) if draws[i] < 1 / cluster[1]]
        for i in taken:
            cluster[2][i] = key
        self.mu += value.square().sum().item()
        drawn = [j for j in range(self.slots) if draws[self.samples + j] * self.mu < value.square().sum().item()]
        for j in drawn:
            self.drawn[j] = key, value
        return [nearest, *taken, -1, *drawn]

    def estimates(self, q):
        """q [G, D]: logarithms of the parts of the denominator [G, parts], and of the numerator with its values."""
        keys = [(key, count / self.samples) for _, count, sampled in self.clusters for key in sampled]
        values = [(key, value, self.mu / self.slots / value.square().sum()) for key, value in filter(None, self.drawn)]

        def logits(key, weight):
            return q.double() @ key / math.sqrt(len(key)) + math.log(weight)
        return (torch.stack([logits(key, weight) for key, weight in keys], -1) if keys else q.new_zeros(len(q), 0).double(),
                [(logits(key, weight), value) for key, value, weight in values])


class SubGen(Full):
    """Sinks and a window are exact. A sketch estimates the two sums of the softmax over the tokens that left."""

    def configure(self, spec):
        self.of_sketch = [spec.get(*of) for of in (("radius", 10.0), ("clusters", 64), ("samples", 4), ("values", 256))]
        self.sinks, self.near, self.seed = spec.get("sinks", 4), spec.get("window", 256), spec.get("seed", 0)
        self.sketches, self.heads, self.held = spec.get("sketch", True), {}, {}

    def draws(self, layer, kv, position):
        sequence = Random(self.seed, 0).next()
        of_token = numbers(numbers(Random(sequence, layer).next(), kv), position)
        count = self.of_sketch[2] + self.of_sketch[3]
        return [(numbers(of_token, i) >> 32) / 2.0**32 for i in range(count)]

    def prompt(self, layer, prompt):
        kept = []
        for kv in range(self.model.kv_heads):
            self.heads[layer, kv] = Sketch(*self.of_sketch)
            kept.append(self.cut(layer, kv, torch.arange(prompt.n), prompt.k[kv], prompt.v[kv]))
        return kept

    def cut(self, layer, kv, kept, keys, values):
        """keys and values [kept, D]. What leaves joins the sketch, the first in the text first."""
        stays = (kept < self.sinks) | (kept > int(kept[-1]) - self.near)
        for i in (~stays).nonzero()[:, 0].tolist():
            decided = self.heads[layer, kv].add(keys[i], values[i], self.draws(layer, kv, int(kept[i])))
            self.decisions.setdefault((layer, kv), []).append(decided)
        return kept[stays]

    def attend(self, layer, kv, q, keys, values):
        self.held[layer, kv] = keys, values
        exact = (q @ keys.T / math.sqrt(keys.shape[-1])).double()
        below, above = self.heads[layer, kv].estimates(q) if self.sketches else (exact.new_zeros(len(q), 0), [])
        most = torch.cat([exact, below, *(logits[:, None] for logits, _ in above)], 1).amax(1, keepdim=True)
        shares = (exact - most).exp()
        numerator = shares @ values.double()
        for logits, value in above:
            numerator = numerator + (logits[:, None] - most).exp() * value
        denominator = shares.sum(1, keepdim=True) + (below - most).exp().sum(1, keepdim=True)
        return (numerator / denominator).to(q.dtype), (shares / denominator).to(q.dtype)

    def after(self, layer, kept, mass):
        return [self.cut(layer, kv, head, *self.held[layer, kv]) for kv, head in enumerate(kept)]


policies.POLICIES.update(magicpig=MagicPig, subgen=SubGen)
