"""CriticalKV, MiniCache, and divisions of a budget over layers (ZigZagKV, CAKE), in plain torch, from the papers' method descriptions.

A division needs the prompt's numbers of all layers, so its policy prunes nothing until `finish_prompt`.
"""
import math

import torch

import policies
from evicting_policies import Cake
from policies import Full, SnapKv, top


class CriticalKv(SnapKv):
    """Half of the budget by SnapKV's scores, the other half by (score + epsilon) times the L1 norm of the projected value."""

    def configure(self, spec):
        super().configure(spec)
        self.epsilon, self.first_stage = spec.get("epsilon", 1e-4), spec.get("first_stage", 0.5)

    def prompt(self, layer, prompt):
        if prompt.n <= self.tokens:
            return [torch.arange(prompt.n)] * self.model.kv_heads
        base, recent = self.tokens - self.window, torch.arange(prompt.n - self.window, prompt.n)
        weight = self.model.w[f"model.layers.{layer}.self_attn.o_proj.weight"]  # [hidden, Hq * D]
        norms = projected_norms(prompt.v, weight, self.model.group)[:, :prompt.n - self.window]
        return [torch.cat([two_stages(score, norm, base, self.first_stage, self.epsilon), recent])
                for score, norm in zip(self.score(prompt), norms)]


def projected_norms(values, weight, group):
    """values [Hkv, n, D], weight [hidden, Hq * D]: [Hkv, n], the mean over the group of || W_h v ||_1."""
    kv_heads, n, dim = values.shape
    heads = weight.reshape(weight.shape[0], kv_heads, group, dim)
    return torch.stack([torch.stack([(values[kv] @ heads[:, kv, g].T).abs().sum(-1) for g in range(group)]).mean(0)
                        for kv in range(kv_heads)])


def two_stages(score, norm, count, share, epsilon):
    """Ascending indices of `count` tokens. trunc(count * share) of them have the best scores."""
    sure = top(score, int(count * share))
    second = (score + epsilon) * norm
    second[sure] = math.inf
    return top(second, count)


class OverLayers:
    """Joins a policy with scores of each layer and a division over layers; the division gives one count per layer."""

    def hold(self, layer, scores, number):
        self.held = getattr(self, "held", {})
        self.held[layer] = (scores, number)

    def finish_prompt(self, kept, n):
        if not getattr(self, "held", None):
            return kept
        layers = sorted(self.held)
        counts = self.divide([self.held[layer][1] for layer in layers], n)
        recent = torch.arange(n - self.window, n)
        return [[torch.cat([top(head, count - self.window), recent])
                 for head, count in zip(self.held[layer][0], self.of_heads(layer, total, n))]
                for layer, total in zip(layers, counts)]

    def of_heads(self, layer, count, n):
        """A layer's tokens for each head, of `count` on average."""
        return [count] * self.model.kv_heads


class ZigZagKv(OverLayers, SnapKv):
    """Layers get tokens in proportion to how many of them hold `mass` of the attention, beyond a floor for each layer.
    With window_counts the window's tokens have the head's highest score and 1 more, of means over the window's queries."""

    def configure(self, spec):
        super().configure(spec)
        self.mass, self.floor = spec.get("mass", 0.9), spec.get("floor", 0.2)
        self.needs = {}  # of a layer: of each head

    def prompt(self, layer, prompt):
        if prompt.n > self.tokens:
            scores = self.score(prompt)
            means = scores / self.window
            if self.spec.get("window_counts", False):
                highest = means.amax(-1, keepdim=True)
                means = torch.cat([means, (highest + 1).expand(-1, self.window)], 1)
            needs = tokens_of_mass(means, self.mass).double()
            self.needs[layer] = needs.tolist()
            self.hold(layer, scores, needs.mean().item())
        return [torch.arange(prompt.n)] * self.model.kv_heads

    def divide(self, needs, n):
        return zigzag_budgets(needs, self.tokens, self.floor * self.tokens, self.window, n)

    def of_heads(self, layer, count, n):
        if not self.spec.get("each_head", False):
            return super().of_heads(layer, count, n)
        return zigzag_budgets(self.needs[layer], count, 0, self.window, n)


def tokens_of_mass(scores, mass):
    """[heads, n] -> [heads]: the fewest tokens whose scores add up to `mass` of all."""
    ordered = scores.double().sort(-1, descending=True).values.cumsum(-1)
    return (ordered < mass * ordered[:, -1:]).sum(-1) + 1


def zigzag_budgets(needs, mean, floor, least, most):
    """Whole tokens of each layer that add up to layers * mean, each from `least` to `most`."""
    layers, total = len(needs), sum(needs)
    share = [need / total if total > 0 else 1 / layers for need in needs]
    return whole([floor + (mean - floor) * layers * part for part in share], layers * mean, least, most)


def whole(exact, total, least, most):
    """Rounds down, within the bounds. What is left goes to layers with room, evenly, by the largest remainders first."""
    counts = [min(max(int(x), least), most) for x in exact]
    order = sorted(range(len(exact)), key=lambda i: (int(exact[i]) - exact[i], i))
    while sum(counts) != total:
        step = 1 if sum(counts) < total else -1
        room = [i for i in (order if step > 0 else order[::-1]) if least <= counts[i] + step <= most]
        for i in room[:abs(total - sum(counts))]:
            counts[i] += step
        if not room:
            break
    return counts


class CakeOverLayers(OverLayers, Cake):
    """CAKE's scores, and layers that get tokens by dispersion ** (1 / tau1) * shift ** (1 / tau2) of their attention."""

    def configure(self, spec):
        super().configure(spec)
        self.taus = spec.get("tau1", 1.0), spec.get("tau2", 1.0)

    def prompt(self, layer, prompt):
        if prompt.n > self.tokens:
            rows = prompt.last_rows[:, :, :prompt.n - self.window]
            self.hold(layer, self.score(rows), cake_preference(rows, *self.taus))
        return [torch.arange(prompt.n)] * self.model.kv_heads

    def divide(self, preferences, n):
        base = cake_budgets(preferences, (self.tokens - self.window) * len(preferences), n - self.window)
        return [tokens + self.window for tokens in base]


def cake_preference(rows, tau1, tau2):
    """rows [Hq, w, n - w], not renormalised."""
    rows = rows.double()
    dispersion = -(rows * (rows + 1e-10).log()).sum().item()
    return dispersion**(1 / tau1) * rows.var(1, unbiased=True).sum().item()**(1 / tau2)


def cake_budgets(preferences, total, most):
    """Tokens of each layer beside the window: truncated, at most `most`; the excess is spread evenly over other layers."""
    whole_sum = sum(preferences)
    share = [p / whole_sum if whole_sum > 0 else 1 / len(preferences) for p in preferences]
    counts = [min(int(part * total), most) for part in share]
    excess = sum(int(part * total) for part in share) - sum(counts)
    while excess > 0:
        room = [i for i, count in enumerate(counts) if count < most]
        if not room:
            return counts
        each, more = divmod(excess, len(room))
        excess = 0
        for place, i in enumerate(room):
            counts[i] += each + (place < more)
            excess += max(0, counts[i] - most)
            counts[i] = min(counts[i], most)
    missing, i = min(total, most * len(counts)) - sum(counts), 0  # of truncation
    while missing > 0:
        if counts[i % len(counts)] < most:
            counts[i % len(counts)] += 1
            missing -= 1
        i += 1
    return counts


class MiniCache(Full):
    """Pairs of layers share the direction of a token's key, and of its value; lengths stay each layer's own."""

    def configure(self, spec):
        self.t, self.exact, self.retained = spec.get("t", 0.6), spec.get("exact", 0.05), spec.get("retained", "threshold")
        self.begin = min(int(self.model.layers * spec.get("start", 0.5)), self.model.layers - 2)

    def finish_cache(self, keys, values):
        for layer in range(self.begin, self.model.layers - 1, 2):
            for side in keys, values:
                for kv in range(self.model.kv_heads):
                    former, own = shared_direction(side[layer][kv], side[layer + 1][kv], self.t, self.exact, self.retained)
                    side[layer][kv], side[layer + 1][kv] = former, own


def shared_direction(former, own, t, exact, retained="count"):
    """former and own [n, D] of two layers: with one direction, but for the tokens of most different ones. These are
    ceil(exact * n) ones (count), or all in the upper share `exact` of the range of angles (threshold)."""
    a, b = former.double(), own.double()
    u, v = (x / x.norm(dim=1, keepdim=True) for x in (a, b))
    angle = (u * v).sum(1).clamp(-1, 1).acos()
    direction = (((1 - t) * angle).sin()[:, None] * u + (t * angle).sin()[:, None] * v) / angle.sin()[:, None]
    direction = direction / direction.norm(dim=1, keepdim=True)
    stays = torch.zeros(len(a), dtype=torch.bool)
    if retained == "count":
        stays[top(angle, math.ceil(exact * len(a)))] = True
    else:
        stays = angle > angle.min() + (angle.max() - angle.min()) * (1 - exact)
    merged = [torch.where(stays[:, None], x, direction * x.norm(dim=1, keepdim=True)) for x in (a, b)]
    return merged[0].to(former.dtype), merged[1].to(own.dtype)


policies.POLICIES.update(minicache=MiniCache, criticalkv=CriticalKv, zigzagkv=ZigZagKv, cake_over_layers=CakeOverLayers)
