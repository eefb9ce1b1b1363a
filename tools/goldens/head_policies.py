"""Policies of head classes and of layers, in plain torch, from the papers' method descriptions.

Classes come with the policy's JSON as the arrays of a profile: `profile: {name: [layer][kv_head]}`.
"""
import torch

import policies
from policies import Full


class HeadClasses(Full):
    """Heads that keep everything, and heads that keep `sinks` first tokens and `window` newest ones."""

    def configure(self, spec):
        self.sinks = spec.get("sinks", 4) if spec.get("attention_sinks", True) else 0
        self.everything = self.classes(spec)

    def prompt(self, layer, prompt):
        return self.cut(layer, [torch.arange(prompt.n)] * self.model.kv_heads, prompt.n)

    def after(self, layer, kept, mass):
        return self.cut(layer, kept, int(kept[0][-1]) + 1)

    def cut(self, layer, kept, seen):
        newest = seen - self.window_of(seen)
        return [head if self.everything[layer][kv] else head[(head < self.sinks) | (head >= newest)]
                for kv, head in enumerate(kept)]


def greatest(table, count):
    """Marks the `count` greatest numbers of [layer][kv_head]; of equal ones the first."""
    flat = torch.tensor(table, dtype=torch.float64).flatten()
    marks = torch.zeros(len(flat), dtype=torch.bool)
    marks[policies.top(flat, count)] = True
    return marks.reshape(len(table), -1)


class DuoAttention(HeadClasses):
    def classes(self, spec):
        gates = torch.tensor(spec["profile"]["gate"], dtype=torch.float64)
        noise = torch.arange(gates.numel(), dtype=torch.float64).flip(0).reshape(gates.shape) * 1e-9  # the first is ahead
        gates = gates.clamp(0, 1) + noise
        return gates >= torch.quantile(gates.flatten(), spec.get("sparsity", 0.5))

    def window_of(self, seen):
        return self.spec.get("window", 256)

    def prompt_masks(self, layer):
        if not self.spec.get("prompt_mask", True):
            return None
        return [(0, 0) if whole else (self.sinks, self.window_of(0)) for whole in self.everything[layer].tolist()]


class RazorAttention(HeadClasses):
    """What a head dropped is there as one more token: the mean of the keys and of the values, as many times as they were."""

    def configure(self, spec):
        super().configure(spec)
        self.compensates, self.gone, self.held = spec.get("compensation", True), {}, {}

    def classes(self, spec):
        of_heads = self.model.layers * self.model.kv_heads
        induction = greatest(spec["profile"]["induction"], int(spec.get("induction", 0.14) * of_heads + 0.5))
        return induction | greatest(spec["profile"]["echo"], int(spec.get("echo", 0.01) * of_heads + 0.5))

    def window_of(self, seen):
        return max(self.spec.get("window", 4000), int(self.spec.get("window_share", 0.2) * seen))

    def prompt(self, layer, prompt):
        if self.compensates:
            self.held = {kv: (prompt.k[kv], prompt.v[kv]) for kv in range(self.model.kv_heads)}
        return super().prompt(layer, prompt)

    def after(self, layer, kept, mass):
        return super().after(layer, kept, mass) if self.spec.get("while_decoding", True) else kept

    def cut(self, layer, kept, seen):
        stays = super().cut(layer, kept, seen)
        for kv, (before, left) in enumerate(zip(kept, stays) if self.compensates else ()):
            out = torch.tensor([position not in left for position in before.tolist()])
            if out.any():
                self.gone.setdefault((layer, kv), []).extend(zip(*(side[out] for side in self.held[kv])))
        return stays

    def attend(self, layer, kv, q, keys, values):
        self.held[kv] = keys, values
        if not self.compensates or (layer, kv) not in self.gone:
            return super().attend(layer, kv, q, keys, values)
        key, value = (torch.stack(side).mean(0, keepdim=True) for side in zip(*self.gone[layer, kv]))
        logits = q @ torch.cat([keys, key]).T / keys.shape[-1]**0.5
        if not self.spec.get("counts_once", False):
            logits[:, -1] += torch.tensor(float(len(self.gone[layer, kv]))).log()
        shares = logits.softmax(-1)
        return shares @ torch.cat([values, value]), shares[:, :-1]


class OmniKv(Full):
    """Filter layers choose tokens of the prompt for the layers behind them; generated tokens are always read."""
    lists_tokens = True

    def configure(self, spec):
        self.filters = [int(layer) for layer in spec.get("filter_layers", "2,8,18").split(",")]
        self.wait, self.score_by = spec.get("wait_layers", 1), spec.get("score_by", "last")
        self.shared = spec.get("shared_choice", True)
        self.last = spec.get("queries", 16) if self.score_by in ("uniform", "exp") else 0
        self.newest = {}  # of a layer: the newest queries [Hq, D], the oldest first

    def prompt(self, layer, prompt):
        self.n = prompt.n
        if self.last:
            self.newest[layer] = list(prompt.q.transpose(0, 1))
        return super().prompt(layer, prompt)

    def choose_by_newest(self, layer, q, k):
        """The last queries score the prompt before them. Where they are queries of the prompt, their tokens are read."""
        self.newest[layer] = self.newest[layer] + [q]
        seen, keys = k.shape[1], self.model.expand(k)
        before, scores = min(self.n, max(0, seen - self.last)), 0
        for age, query in enumerate(reversed(self.newest[layer][-self.last:])):
            logits = (keys[:, :before] @ query[:, :, None])[:, :, 0] / k.shape[-1]**0.5
            share = logits.softmax(-1).amax(0)
            scores = scores + (share * 0.5**age if self.score_by == "exp" else share)
        count = min(max(1, self.wanted() - (self.n - before)), before)
        return torch.cat([policies.top(scores, count), torch.arange(before, self.n)])

    def wanted(self):
        return self.tokens if self.tokens is not None else int(self.budget["ratio"] * self.n)

    def choose(self, layer, q, k):
        if self.last:
            return self.choose_by_newest(layer, q, k)
        logits = (q.reshape(self.model.kv_heads, self.model.group, -1) @ k[:, :self.n].transpose(1, 2))
        logits = logits.reshape(-1, self.n) / k.shape[-1]**0.5
        if self.score_by == "softmax_before_last":
            logits = logits.softmax(-1)
        return policies.top(logits.amax(0), max(1, min(self.wanted(), self.n)))

    def select(self, layer, q, k, kept):
        last = max((filter for filter in self.filters if filter <= layer), default=None)
        if layer == last:
            self.chosen = self.choose(layer, q, k)
        if last is None or layer <= last + self.wait:
            return kept, None
        chosen = self.chosen if self.shared or layer == last else self.choose(layer, q, k)
        return [torch.cat([chosen, head[head >= self.n]]) for head in kept], None


class SparQ(Full):
    """Scores keys by the largest components of the group's queries, sum |q|; s = q_r K_r / sqrt(D sum|q_r| / sum|q|).
    With mean_value_of_groups the mean of all values counts for the share that the scores give what is not read."""
    lists_tokens = True

    def configure(self, spec):
        self.sums, self.share = {}, {}

    def prompt(self, layer, prompt):
        self.sums[layer] = [prompt.v.double().sum(1), prompt.n]
        return super().prompt(layer, prompt)

    def attend(self, layer, kv, q, keys, values):
        output, probability = super().attend(layer, kv, q, keys, values)
        if not self.spec.get("mean_value_of_groups", False) or layer < self.spec.get("dense_layers", 0):
            return output, probability
        if kv == 0:
            self.sums[layer][1] += 1
        self.sums[layer][0][kv] += values[-1].double()  # the step's own
        mean, share = (self.sums[layer][0][kv] / self.sums[layer][1]).to(values.dtype), self.share[kv][:, None]
        return share * output + (1 - share) * mean, probability

    def select(self, layer, q, k, kept):
        if layer < self.spec.get("dense_layers", 0):
            return kept, None
        dim, read = k.shape[-1], []
        rank, local = self.spec.get("rank") or dim // 4, int(self.spec.get("local", 0.25) * (self.tokens - 1))
        for kv, head in enumerate(kept):
            queries = q[kv * self.model.group:(kv + 1) * self.model.group]
            largest = policies.top(queries.abs().sum(0), rank)
            large = queries[:, largest]
            scale = (dim * large.abs().sum(1) / queries.abs().sum(1)).sqrt()
            if not self.spec.get("norm_scale", True):
                scale = torch.ones_like(scale)
            each = large @ k[kv, :, largest].T / scale[:, None]
            score = each.sum(0)
            score[len(score) - local - 1:] = torch.inf
            read.append(head[policies.top(score, self.tokens)])
            self.share[kv] = each.softmax(-1)[:, read[-1]].sum(-1)
        return read, None


policies.POLICIES.update(duo_attention=DuoAttention, razor_attention=RazorAttention, omnikv=OmniKv, sparq=SparQ)
