#!/usr/bin/env python3
"""Writes core/test/golden/policies/<model>.json: what every policy keeps, reads, covers and predicts on tiny models.

Usage: export_policies.py [core/test/golden]
Format: README.md in this folder. Token seeds are searched until no selection depends on rounding.
"""
import json
import os
import sys

import numpy as np
import torch

import llama
import reference_policies as reference

PROMPT, FORCED, VOCAB = 80, 24, 320
LOGIT_IDS = list(range(0, VOCAB, 5))
BUDGET = {"tokens": 24}
SNAPKV = {"name": "snapkv", "budget": BUDGET, "window": 8, "kernel": 7, "pooling": "max", "group": "mean"}
QUEST = {"name": "quest", "budget": BUDGET, "page_size": 4, "group": "max", "dense_layers": 1, "last_page": False,
         "page_bounds": True, "scale": 1.0, "min_pages": 3}
CASES = {
    "full": {"name": "full"},
    "full_int8": {"name": "full", "codec": "int8"},
    "window": {"name": "window", "budget": BUDGET},
    "streaming_llm": {"name": "streaming_llm", "budget": BUDGET, "sinks": 4, "positions": "cache_relative"},
    "streaming_llm_original": {"name": "streaming_llm", "budget": BUDGET, "sinks": 4, "positions": "original"},
    "snapkv": SNAPKV,
    "snapkv_average": {**SNAPKV, "pooling": "average"},
    "snapkv_not_full": {**SNAPKV, "budget": {"tokens": 90}},
    "snapkv_pyramid": {**SNAPKV, "budget": {"tokens": 24, "split": "pyramid", "beta": 4}},
    "snapkv_adakv": {**SNAPKV, "budget": {"tokens": 24, "split": "adakv", "floor": 0.2}},
    "snapkv_int8": {**SNAPKV, "codec": "int8"},
    "h2o": {"name": "h2o", "budget": BUDGET, "heavy": 0.5},
    "knorm": {"name": "knorm", "budget": BUDGET},
    "quest": QUEST,
    "quest_mean": {**QUEST, "group": "mean"},
    "quest_sum": {**QUEST, "group": "sum"},
    "quest_softmax_mean": {**QUEST, "group": "softmax_mean"},
    "quest_last_page": {**QUEST, "last_page": True},
    "quest_mean_key": {**QUEST, "page_bounds": False},
}


def selections(result):
    pages = [[[] if layer is None else [head.tolist() for head in layer] for layer in step] for step in result.pages]
    kept = [[[head.tolist() for head in layer] for layer in step] for step in result.kept]
    return kept, pages


def perturbed(model, seed):
    """The model with weights off by 1e-5: ten times what f32 arithmetic in another order can do."""
    other, generator = llama.Llama.__new__(llama.Llama), torch.Generator().manual_seed(seed)
    other.__dict__.update(model.__dict__)
    other.w = {name: w * (1 + 1e-5 * torch.randn(w.shape, generator=generator)) for name, w in model.w.items()}
    return other


def rounded(values, digits=7):
    return [float(f"{value:.{digits}g}") for value in values]


def export(path):
    model, exact = llama.Llama(path), llama.Llama(path, torch.float64)
    for seed in range(100):
        ids = np.random.default_rng(seed).integers(2, VOCAB, PROMPT + FORCED).tolist()
        prompt, forced, cases = ids[:PROMPT], ids[PROMPT:], []
        for name, spec in CASES.items():
            result = reference.run(model, spec, prompt, forced)
            kept, pages = selections(result)
            others = [exact] + [perturbed(model, number) for number in range(2)]
            if any(selections(reference.run(other, spec, prompt, forced)) != (kept, pages) for other in others):
                print(f"  seed {seed}: {name} depends on rounding")
                break
            logits = torch.stack(result.logits)
            cases.append({"name": name, "policy": spec, "kept_prompt": kept[0], "kept_end": kept[-1],
                          "pages": pages if any(any(step) for step in pages) else [],
                          "mass": [rounded(step) for step in result.mass],
                          "output_error": [rounded(step) for step in result.output_error],
                          "max_abs": rounded(logits.abs().amax(-1).tolist()),
                          "logits": [rounded(step) for step in logits[:, LOGIT_IDS].tolist()]})
        else:
            return {"version": 1, "model": "tiny/" + os.path.basename(path), "seed": seed, "prompt": prompt,
                    "forced": forced, "logit_ids": LOGIT_IDS, "cases": cases}
    raise SystemExit("no seed without a near tie")


def main():
    golden = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), "../../core/test/golden")
    os.makedirs(os.path.join(golden, "policies"), exist_ok=True)
    for name in ("llama-gqa3", "llama-gqa4-rope3"):
        document = export(os.path.join(golden, "tiny", name))
        out = os.path.join(golden, "policies", name + ".json")
        with open(out, "w") as file:
            cases = ",\n".join("  " + json.dumps(case, separators=(",", ":")) for case in document.pop("cases"))
            file.write("{" + "".join(f"{json.dumps(k)}: {json.dumps(v)},\n " for k, v in document.items()))
            file.write(f'"cases": [\n{cases}\n]}}\n')
        seed = document["seed"]
        print(f"{name}: seed {seed}, {os.path.getsize(out)} bytes")
        for case in json.load(open(out))["cases"]:
            print(f"  {case['name']}: mass {np.mean(case['mass'], 0).round(3)}, error {np.mean(case['output_error']):.3f}")


if __name__ == "__main__":
    main()
