#!/usr/bin/env python3
"""Writes core/test/golden/policies/kvpress.json: what kvpress itself keeps of prompts to datasets/models/recall.

Usage: kvpress_cases.py [core/test/golden]
Format: README.md in this folder. Each prompt begins at the first token of text/english.txt at which no head's choice depends
on rounding: f32, f64 and weights off by 1e-5 agree.
"""
import copy
import json
import logging
import os
import sys

import torch
from kvpress import (AdaKVPress, CriticalKVPress, ExpectedAttentionPress, KeyDiffPress, KnormPress, ObservedAttentionPress,
                     SnapKVPress, TOVAPress)
from transformers import DynamicCache, LlamaForCausalLM

PROMPT, KEPT = 120, 24
DROPPED = 1 - (KEPT + 0.5) / PROMPT  # kvpress rounds the rest down
BUDGET = {"tokens": KEPT}
SNAPKV = {"name": "snapkv", "budget": BUDGET, "window": 8, "kernel": 5, "pooling": "average"}
MINIMUM = {**BUDGET, "split": "adakv", "floor": 0.2, "floor_is": "minimum"}


def snapkv():
    return SnapKVPress(DROPPED, window_size=8, kernel_size=5)


# Our policy, and the press. The names of the policies' entries are those of plugins/*/*.yaml.
CASES = {
    "KnormPress": ({"name": "knorm", "budget": BUDGET}, lambda: KnormPress(DROPPED)),
    "SnapKVPress": (SNAPKV, snapkv),
    "ObservedAttentionPress": ({"name": "h2o", "budget": BUDGET, "heavy": 1.0, "mean": True, "every": 0},
                               lambda: ObservedAttentionPress(DROPPED)),
    "TOVAPress": ({"name": "tova", "budget": BUDGET, "keep_last": True, "every": 0}, lambda: TOVAPress(DROPPED)),
    "KeyDiffPress": ({"name": "keydiff", "budget": BUDGET}, lambda: KeyDiffPress(DROPPED)),
    "ExpectedAttentionPress": ({"name": "expected_attention", "budget": BUDGET},
                               lambda: ExpectedAttentionPress(DROPPED, epsilon=0.0)),
    # Its votes are means over the window and ours are sums, so its epsilon counts 8 times.
    "CriticalKVPress(SnapKVPress)": ({**SNAPKV, "name": "criticalkv", "window_in_first_stage": True, "epsilon": 8e-4},
                                     lambda: CriticalKVPress(snapkv())),
    "AdaKVPress(SnapKVPress)": ({**SNAPKV, "budget": MINIMUM}, lambda: AdaKVPress(snapkv())),
    "AdaKVPress(KnormPress)": ({"name": "knorm", "budget": MINIMUM}, lambda: AdaKVPress(KnormPress(DROPPED))),
}


def keys_of(cache):
    return [layer.keys[0] for layer in cache.layers]  # [Hkv, n, D]


def kept(model, press, ids):
    """Positions [layer][KV head], ascending: those whose keys are left, or which the press does not mask."""
    model.set_attn_implementation("eager" if isinstance(press, ObservedAttentionPress) else "sdpa")
    whole, cache = DynamicCache(), DynamicCache()
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    with torch.no_grad():
        model(torch.tensor([ids]), past_key_values=whole)
        with press(model):
            model(torch.tensor([ids]), past_key_values=cache)
    positions = []
    for layer, (every, left) in enumerate(zip(keys_of(whole), keys_of(cache))):
        masked = model.model.layers[layer].self_attn.masked_key_indices
        if masked is not None:
            stays = torch.ones(every.shape[:2], dtype=torch.bool)
            stays[masked[1], masked[2]] = False
        else:
            stays = (every[:, :, None] == left[:, None]).all(-1).any(-1)
            assert (stays.sum(-1) == left.shape[1]).all()
        positions.append([head.nonzero()[:, 0].tolist() for head in stays])
    return positions


def perturbed(model, seed):
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter *= 1 + 1e-5 * torch.randn(parameter.shape, generator=generator)
    return other


def main():
    from export_policies import packed
    logging.disable(logging.WARNING)
    golden = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), "../../core/test/golden")
    with open(os.path.join(golden, "recall_logits.json")) as file:
        english = json.load(file)["sequences"][0]["ids"]
    model = LlamaForCausalLM.from_pretrained(os.path.join(golden, "../../../datasets/models/recall"), dtype=torch.float32).eval()
    others = [copy.deepcopy(model).double(), perturbed(model, 0)]
    cases = []
    for name, (spec, press) in CASES.items():
        for start in range(0, len(english) - PROMPT, 4):
            ids = english[start:start + PROMPT]
            mine = kept(model, press(), ids)
            if all(kept(other, press(), ids) == mine for other in others):
                break
        else:
            raise SystemExit(f"{name}: no text without a near tie")
        cases.append({"name": name, "policy": spec, "start": start, "kept": mine})
        print(f"{name}: from token {start}, {sum(len(head) for layer in mine for head in layer)} tokens")
    with open(os.path.join(golden, "policies/kvpress.json"), "w") as file:
        lines = ",\n".join("  " + json.dumps(packed(case), separators=(",", ":")) for case in cases)
        file.write(f'{{"version": 1, "model": "../../../datasets/models/recall", "tokens": {PROMPT},\n "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
