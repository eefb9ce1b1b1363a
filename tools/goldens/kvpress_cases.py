#!/usr/bin/env python3
"""Writes core/test/golden/policies/kvpress.json: what kvpress itself keeps of prompts to datasets/models/recall.

Usage: kvpress_cases.py [core/test/golden [CASE ...]]
With names of cases it writes these alone anew, and leaves the others in the file as they are.
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
                     PyramidKVPress, SnapKVPress, StreamingLLMPress, TOVAPress)
from transformers import DynamicCache, LlamaForCausalLM

PROMPT, KEPT = 120, 24
DROPPED = 1 - (KEPT + 0.5) / PROMPT  # kvpress rounds the rest down
LONG, KEPT_OF_LONG = 200, 88  # for presses of a window of 64, kvpress's default
DROPPED_OF_LONG = 1 - (KEPT_OF_LONG + 0.5) / LONG
BUDGET = {"tokens": KEPT}
SNAPKV = {"name": "snapkv", "budget": BUDGET, "window": 8, "kernel": 5, "pooling": "average"}
SNAPKV_64 = {**SNAPKV, "budget": {"tokens": KEPT_OF_LONG}, "window": 64}
MINIMUM = {**BUDGET, "split": "adakv", "floor": 0.2, "floor_is": "minimum"}


def snapkv():
    return SnapKVPress(DROPPED, window_size=8, kernel_size=5)


def snapkv_64():
    return SnapKVPress(DROPPED_OF_LONG)


# Our policy, the press, and the prompt's tokens where they are others. The names of the policies' entries are those of plugins/*/*.yaml.
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
    "StreamingLLMPress": ({"name": "streaming_llm", "budget": BUDGET, "sinks": 4, "positions": "original"},
                          lambda: StreamingLLMPress(DROPPED, n_sink=4)),
    "PyramidKVPress": ({**SNAPKV, "budget": {"tokens": 40, "split": "pyramid", "beta": 4, "window_inside": True}},
                       lambda: PyramidKVPress(1 - 40 / PROMPT, window_size=8, kernel_size=5, beta=4)),
    "SnapKVPress, window 64": (SNAPKV_64, snapkv_64, LONG),
    "AdaKVPress(SnapKVPress, window 64)": ({**SNAPKV_64, "budget": {**MINIMUM, "tokens": KEPT_OF_LONG}},
                                           lambda: AdaKVPress(snapkv_64()), LONG),
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
    file_path, only, former = os.path.join(golden, "policies/kvpress.json"), sys.argv[2:], {}
    if only:
        with open(file_path) as file:
            former = {case["name"]: case for case in json.load(file)["cases"]}
    cases = []
    for name, (spec, press, *of_prompt) in CASES.items():
        if only and name not in only:
            cases.append(former[name])
            continue
        tokens = of_prompt[0] if of_prompt else PROMPT
        for start in range(0, len(english) - tokens, 4):
            ids = english[start:start + tokens]
            mine = kept(model, press(), ids)
            if all(kept(other, press(), ids) == mine for other in others):
                break
        else:
            raise SystemExit(f"{name}: no text without a near tie")
        cases.append({"name": name, "policy": spec, "start": start, **({"tokens": tokens} if of_prompt else {}), "kept": mine})
        print(f"{name}: from token {start}, {sum(len(head) for layer in mine for head in layer)} tokens")
    with open(file_path, "w") as file:
        lines = ",\n".join("  " + json.dumps(packed(case), separators=(",", ":")) for case in cases)
        file.write(f'{{"version": 1, "model": "../../../datasets/models/recall", "tokens": {PROMPT},\n "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
