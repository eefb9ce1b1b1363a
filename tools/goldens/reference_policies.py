#!/usr/bin/env python3
"""Runs a policy on a model with forced tokens and writes its kept positions, pages, mass, output error and logits.

Usage: reference_policies.py --model PATH --tokens FILE --prompt N --policy JSON --out FILE.npz [--f64]
FILE: token ids, whitespace-separated or a JSON list; the first N are the prompt, the others are forced one by one.
"""
import argparse
import json
import math
import re

import numpy as np
import torch

import llama
import policies
import coding_policies  # noqa: F401  (adds its policies)
import evicting_policies  # noqa: F401
import head_policies  # noqa: F401
import layer_policies  # noqa: F401
import offloading_policies  # noqa: F401
import profile_policies  # noqa: F401
import retrieval_policies  # noqa: F401
import sampling_policies  # noqa: F401
import scoring_policies  # noqa: F401
import stage_policies  # noqa: F401


class LayerCache:
    """All keys and values that a layer has seen, exact and as the codec stores them; policies index them by position."""

    def __init__(self, model, policy, layer):
        self.model, self.policy, self.layer, self.cache_relative = model, policy, layer, policy.cache_relative
        self.k = self.v = self.stored_k = self.stored_v = None  # [Hkv, t, D]; k rotated to its position

    def append(self, raw_k, v, begin):
        k = self.model.rotate(raw_k, torch.arange(begin, begin + raw_k.shape[1]))
        stored = [self.policy.encode(self.layer, side, x) for side, x in
                  (("key", raw_k if self.cache_relative else k), ("value", v))]
        fresh = (k, v, *stored)
        old = (self.k, self.v, self.stored_k, self.stored_v)
        self.k, self.v, self.stored_k, self.stored_v = (
            new if before is None else torch.cat([before, new], 1) for before, new in zip(old, fresh))

    @property
    def scored(self):
        """The keys that policies see: those that the cache holds, rotated to their positions."""
        return self.k if self.cache_relative else self.stored_k


class Run:
    """kept[step][layer][kv_head], step 0 = after the prompt; read and pages[decode step][layer][kv_head]; mass and
    output_error [decode step, layer]; logits [1 + decode steps, vocab], row 0 after the prompt."""

    def __init__(self):
        self.kept, self.read, self.pages, self.mass, self.output_error, self.logits = [], [], [], [], [], []
        self.prompt_pages = []  # [layer][chunk], of all KV heads
        self.decisions = []  # [layer][kv_head] lists of whole numbers: what else rounding may change


def run(model, spec, prompt, forced):
    policy, result = policies.make(spec, model), Run()
    policy.text = [*prompt, *forced]
    caches = [LayerCache(model, policy, layer) for layer in range(model.layers)]
    with torch.no_grad():
        kept = prefill(model, policy, caches, prompt, result)
        for step, token in enumerate(forced):
            decode(model, policy, caches, kept, len(prompt) + step, token, result)
    result.prompt_pages = [policy.prompt_pages.get(layer, []) for layer in range(model.layers)]
    result.decisions = [[policy.decisions.get((layer, kv), []) for kv in range(model.kv_heads)]
                        for layer in range(model.layers)]
    return result


def prefill(model, policy, caches, ids, result):
    n, x, kept = len(ids), model.embed(ids), []
    for layer, cache in enumerate(caches):
        q, raw_k, v = model.qkv(layer, x)
        q = model.rotate(q, torch.arange(n))
        cache.append(raw_k, v, 0)
        attended, sums, _ = model.prompt_attention(q, cache.k, v, policy.window, policy.prompt_masks(layer))
        rows = model.prompt_attention(q, cache.scored, v, policy.window)[2]
        chosen = policy.attend_in_prompt(layer, q, cache.scored, v)
        attended = attended if chosen is None else chosen
        of_layer = policies.Prompt(n, q, cache.scored, v, sums, rows)
        kept.append(policy.prompt(layer, of_layer))
        keys = policy.rewritten(layer, of_layer)
        if keys is not None:
            cache.stored_k = keys
        x = model.after_attention(layer, x, attended)
    kept = policy.finish_prompt(kept, n)
    for cache in caches:
        cache.stored_k, cache.stored_v = cache.stored_k.clone(), cache.stored_v.clone()
    policy.finish_cache([cache.stored_k for cache in caches], [cache.stored_v for cache in caches])
    result.kept.append([list(layer) for layer in kept])
    result.logits.append(model.logits(x[-1:])[0])
    return kept


def decode(model, policy, caches, kept, position, token, result):
    x, masses, errors, reads, pages = model.embed([token]), [], [], [], []
    new = torch.tensor([position])
    for layer, cache in enumerate(caches):
        policy.enter(layer, x, position)
        raw_q, raw_k, v = model.qkv(layer, x)
        cache.append(raw_k, v, position)
        q = model.rotate(raw_q, new)[:, 0]
        kept[layer] = [torch.cat([head, new]) for head in kept[layer]]
        read, chosen = policy.select(layer, q, cache.scored, kept[layer])
        if model.sliding_window:
            read = [head[head > position - model.sliding_window] for head in read]
        attended, true, covered, shares = [], [], [], []
        for kv in range(model.kv_heads):
            heads = slice(kv * model.group, (kv + 1) * model.group)
            keys, values = cache.stored_k[kv, read[kv]], cache.stored_v[kv, read[kv]]
            query = q[heads]
            keys = policy.clamped(keys, read[kv], position)
            if policy.cache_relative:
                keys = model.rotate(keys[None], torch.arange(len(keys)))[0]
                query = model.rotate(raw_q[heads], torch.tensor([len(keys) - 1]))[:, 0]
            output, probability = policy.attend(layer, kv, query, keys, values)
            visible = slice(max(0, position + 1 - (model.sliding_window or position + 1)), None)
            true_output, true_probability = policies.attend(q[heads], cache.k[kv, visible], cache.v[kv, visible])
            attended.append(output)
            true.append(true_output)
            covered.append(true_probability[:, read[kv] - visible.start].sum(-1))
            share = torch.zeros(model.group, len(kept[layer][kv]), dtype=q.dtype)  # kept but not read: no probability
            share[:, torch.searchsorted(kept[layer][kv], read[kv])] = probability
            shares.append(share)
        attended, true = torch.cat(attended), torch.cat(true)
        masses.append(torch.cat(covered).mean().item())
        errors.append(((attended - true).norm() / true.norm()).item())
        reads.append(read)
        pages.append(chosen)
        policy.attended(layer, q, cache.scored, kept[layer], shares)
        kept[layer] = policy.after(layer, kept[layer], [head.sum(0) / model.group for head in shares])
        policy.finish_step(layer, cache.stored_k, cache.stored_v)
        x = model.after_attention(layer, x, attended.reshape(1, -1))
    result.kept.append([list(layer) for layer in kept])
    result.read.append(reads)
    result.pages.append(pages)
    result.mass.append(masses)
    result.output_error.append(errors)
    result.logits.append(model.logits(x)[0])


def flatten(lists):
    """Nested [a][b][c] index tensors (None = nothing) to flat i32 values and i64 begin/end [a, b, c, 2]."""
    values, offsets, begin = [], [], 0
    heads = max((len(head) for a in lists for head in a if head is not None), default=0)
    for a in lists:
        for b in a:
            for c in (b if b is not None else [[]] * heads):
                values.extend(int(value) for value in c)
                offsets.append((begin, len(values)))
                begin = len(values)
    shape = (len(lists), len(lists[0]) if lists else 0, heads, 2)
    return np.array(values, np.int32), np.array(offsets, np.int64).reshape(shape)


def kl_divergence(full, other):
    """KL(full || other) per row of logits, in nats, in f64."""
    p, q = full.double().log_softmax(-1), other.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def read_tokens(path):
    with open(path) as file:
        return [int(token) for token in re.findall(r"\d+", file.read())]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="GGUF file or Hugging Face folder")
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--prompt", type=int, required=True, help="number of prompt tokens")
    parser.add_argument("--policy", required=True, help="JSON, or a file that holds it")
    parser.add_argument("--out", required=True)
    parser.add_argument("--f64", action="store_true")
    args = parser.parse_args()
    spec = json.loads(args.policy if args.policy.lstrip().startswith("{") else open(args.policy).read())
    model = llama.Llama(args.model, torch.float64 if args.f64 else torch.float32)
    tokens = read_tokens(args.tokens)
    result = run(model, spec, tokens[:args.prompt], tokens[args.prompt:])
    kept, kept_offsets = flatten(result.kept)
    pages, page_offsets = flatten(result.pages)
    np.savez_compressed(args.out, policy=json.dumps(spec), kept=kept, kept_offsets=kept_offsets, pages=pages,
                        page_offsets=page_offsets, mass=np.array(result.mass, np.float32),
                        output_error=np.array(result.output_error, np.float32),
                        logits=torch.stack(result.logits).float().numpy())
    print(f"{spec['name']}: kept {[len(head) for head in result.kept[-1][-1]]} in the last layer, "
          f"mean mass {np.mean(result.mass) if result.mass else math.nan:.4f}")


if __name__ == "__main__":
    main()
