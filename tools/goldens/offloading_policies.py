"""Policies of two tiers, in plain torch, from the papers' method descriptions.

A head reads pages that were chosen and fetched before, by the query of this step or of an earlier one.
"""
import torch

import policies
from policies import Full, group_reduce, top
from retrieval_policies import box_scores, pages_to_tokens


def page_bounds(q, keys, size):
    """q [G, D], keys [t, D]: [G, pages], the sum over dimensions of the greater of q * min and q * max of a page."""
    scores = []
    for page in keys.split(size):
        scores.append(torch.maximum(q * page.amin(0), q * page.amax(0)).sum(-1))
    return torch.stack(scores, -1)


class Fetching(Full):
    """Reads, beside the pages of first and newest tokens, those that were chosen last."""

    def start(self, spec):
        self.page, self.dense = spec.get("page_size", 16), spec.get("dense_layers", 0)
        self.group, self.scale = spec.get("group"), spec.get("scale", 1.0)
        self.first, self.last = 0, 0
        self.chosen = {}  # (layer, KV head): pages

    def of_group(self, x, kv):
        return x[kv * self.model.group:(kv + 1) * self.model.group]

    def reduced(self, scores):
        """[G, pages] -> [pages]"""
        if self.group == "softmax_mean":
            return group_reduce((scores * self.scale).softmax(-1), 1, "mean")[0]
        return group_reduce(scores, 1, self.group)[0]

    def pinned(self, seen):
        """Pages of the first and the newest tokens of a text of `seen` tokens, and the newest page."""
        newest = range(max(0, seen - max(1, self.last)) // self.page, (seen - 1) // self.page + 1)
        return {*range(-(-min(self.first, seen) // self.page)), *newest}

    def prompt(self, layer, prompt):
        for kv in range(self.model.kv_heads if layer >= self.dense else 0):
            self.choose(layer, kv, self.of_group(prompt.q, kv)[:, -1], prompt.k[kv])
        return super().prompt(layer, prompt)

    def read(self, layer, k):
        seen = k.shape[1]
        pages = [sorted(self.chosen[layer, kv] | self.pinned(seen)) for kv in range(self.model.kv_heads)]
        return [pages_to_tokens(head, self.page, seen) for head in pages], [torch.tensor(head) for head in pages]


class FreeKv(Fetching):
    """A step reads what the query of the step before chose. A head whose query turned chooses again before it reads."""

    def configure(self, spec):
        self.start({"dense_layers": 1, "group": "softmax_mean", **spec})
        self.first, self.last = spec.get("sinks", 512), spec.get("window", 512)
        self.speculates, self.corrects = spec.get("speculation", True), spec.get("correction", True)
        self.threshold = spec.get("threshold", 0.9)
        self.queries = {}  # of a layer: those of the step before

    def choose(self, layer, kv, q, keys):
        """The best pages between those that are read in any case."""
        always = self.pinned(len(keys))
        between = [page for page in range(-(-len(keys) // self.page)) if page not in always]
        best = []
        if between:
            if self.spec.get("summary", "min_max") == "centre_radius":
                scores = box_scores(q, keys.split(self.page), True)
            else:
                scores = page_bounds(q, keys, self.page)
            if self.spec.get("scores", "raw") == "scaled":
                scores = scores / q.shape[-1]**0.5
            scores = self.reduced(scores[:, between])
            best = top(scores, max(1, (self.tokens - self.first - self.last) // self.page)).tolist()
        self.chosen[layer, kv] = {between[i] for i in best}

    def turned(self, layer, q):
        """Of each KV head. The first step has no query before it, so all of its heads have turned."""
        if layer not in self.queries:
            return [True] * self.model.kv_heads
        if not self.corrects:
            return [False] * self.model.kv_heads
        cosine = torch.nn.functional.cosine_similarity(q, self.queries[layer], -1)
        return [self.of_group(cosine, kv).mean().item() < self.threshold for kv in range(self.model.kv_heads)]

    def select(self, layer, q, k, kept):
        if layer < self.dense:
            return kept, None
        for kv, turned in enumerate(self.turned(layer, q)):
            if turned or not self.speculates:
                self.choose(layer, kv, self.of_group(q, kv), k[kv])
        return self.read(layer, k)

    def attended(self, layer, q, keys, kept, shares):
        self.queries[layer] = q
        for kv in range(self.model.kv_heads if layer >= self.dense else 0):  # for the next step
            self.choose(layer, kv, self.of_group(q, kv), keys[kv])


class FlexiCache(Fetching):
    """Unstable heads choose in each step. The others choose every `rerank_every` steps, and their pages come after it."""

    def configure(self, spec):
        self.start({"group": "max", **spec})
        every, self.steps = spec.get("rerank_every", 16), {}  # decode steps of a layer
        self.last = every if spec.get("keep_new", True) else 0
        self.period = every if spec.get("stability_aware", True) else 1
        self.reranks, self.waits = spec.get("reranking", True), not spec.get("overlap", True)
        self.unstable = torch.zeros(self.model.layers, self.model.kv_heads, dtype=torch.bool)
        if spec.get("unstable_heads", True):
            self.unstable = torch.tensor(spec["profile"]["unstable"]) > 0

    def choose(self, layer, kv, q, keys):
        """The best of all pages, the partial one included."""
        count = max(1, (self.tokens - self.last) // self.page)
        self.chosen[layer, kv] = set(top(self.reduced(page_bounds(q, keys, self.page)), count).tolist())

    def due(self, layer):
        return self.reranks and self.steps.get(layer, 0) % self.period == 0

    def select(self, layer, q, k, kept):
        if layer < self.dense:
            return kept, None
        first = self.spec.get("first_query", "prompt") == "step" and not self.steps.get(layer, 0)
        for kv in range(self.model.kv_heads):
            if self.unstable[layer, kv] or (self.waits and self.due(layer)) or first:
                self.choose(layer, kv, self.of_group(q, kv), k[kv])
        return self.read(layer, k)

    def attended(self, layer, q, keys, kept, shares):
        if layer >= self.dense and not self.waits and self.due(layer):
            for kv in range(self.model.kv_heads):
                self.choose(layer, kv, self.of_group(q, kv), keys[kv])
        self.steps[layer] = self.steps.get(layer, 0) + 1


policies.POLICIES.update(freekv=FreeKv, flexicache=FlexiCache)
