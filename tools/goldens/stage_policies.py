"""Second stages over other methods, in plain torch, from the papers' method descriptions.

`pruner: {p, dense_layers}` of a policy's JSON takes a part of what the first method reads (Twilight). `rescorer: {first_stage,
epsilon}` ranks the first method's tokens anew when the prompt ends (CriticalKV).
"""
import math

import torch

import head_policies
import layer_policies
import policies
import retrieval_policies as retrieval


class TopP:
    """Joins a method that lists pages or tokens with the fewest of these that make up a share of a query head's weights."""
    lists_tokens = True

    def configure(self, spec):
        super().configure({**spec, "pruner": None})
        self.part, self.begins = spec["pruner"].get("p", 0.85), spec["pruner"].get("dense_layers", 2)

    def always_read(self, seen):
        """Positions that the first method's pins name."""
        return range(0)

    def select(self, layer, q, k, kept):
        first, _ = super().select(layer, q, k, kept)
        if layer < self.begins:
            return first, None
        seen, read = k.shape[1], []
        for kv, tokens in enumerate(first):
            keys, taken = retrieval.four_bits(k[kv, tokens]), {seen - 1, *self.always_read(seen)}
            for query in q[kv * self.model.group:(kv + 1) * self.model.group]:
                weights = (keys @ query / math.sqrt(len(query))).softmax(-1)
                taken |= set(tokens[retrieval.fewest(weights, self.part)].tolist())
            read.append(torch.tensor(sorted(taken)))
        return read, None


class PrunedQuest(TopP, policies.Quest):
    def always_read(self, seen):
        return range((seen - 1) // self.page * self.page, seen) if self.last_page else range(0)


class PrunedSparQ(TopP, head_policies.SparQ):
    pass


class PrunedFull(TopP, policies.Full):
    pass


def stages_of(spec):
    return spec["rescorer"].get("first_stage", 0.5), spec["rescorer"].get("epsilon", 1e-4)


def norms_of(model, layer, prompt):
    return layer_policies.projected_norms(prompt.v, model.w[f"model.layers.{layer}.self_attn.o_proj.weight"], model.group)


class RescoredSnapKv(policies.SnapKv):
    """Each head's own number, which the split finds by SnapKV's scores, is divided into two stages."""

    def prompt(self, layer, prompt):
        if prompt.n <= self.tokens:
            return super().prompt(layer, prompt)
        scores, recent = self.score(prompt), torch.arange(prompt.n - self.window, prompt.n)
        counts = policies.split_budget(self.budget, layer, self.model.layers, scores, self.window)
        norms = norms_of(self.model, layer, prompt)[:, :prompt.n - self.window]
        return [torch.cat([layer_policies.two_stages(score, norm, count - self.window, *stages_of(self.spec)), recent])
                for score, norm, count in zip(scores, norms, counts)]


class RescoredH2o(policies.H2o):
    """The prompt's cut has two stages. Steps go on by H2O's sums alone."""

    def prompt(self, layer, prompt):
        if prompt.n <= self.tokens:
            return super().prompt(layer, prompt)
        old, kept, scores = prompt.n - self.recent, [], []
        sums = policies.group_reduce(prompt.column_sums, self.model.kv_heads, "mean")
        for score, norm in zip(sums, norms_of(self.model, layer, prompt)):
            best = layer_policies.two_stages(score[:old], norm[:old], self.heavy, *stages_of(self.spec))
            kept.append(torch.cat([best, torch.arange(old, prompt.n)]))
            scores.append(score[kept[-1]])
        self.scores[layer] = scores
        return kept


policies.POLICIES.update({"quest+twilight": PrunedQuest, "sparq+twilight": PrunedSparQ, "full+twilight": PrunedFull,
                          "snapkv+criticalkv": RescoredSnapKv, "h2o+criticalkv": RescoredH2o})
