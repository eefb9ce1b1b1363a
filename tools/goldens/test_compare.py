#!/usr/bin/env python3
"""Tests compare_results.py on a result file of the reference itself, intact and damaged. Usage: test_compare.py"""
import json
import os
import subprocess
import sys
import tempfile

import h5py
import numpy as np
import torch

import compare_results
import llama
import reference_policies as reference

HERE = os.path.dirname(os.path.abspath(__file__))
MODEL = os.path.join(HERE, "../../core/test/golden/tiny/llama-gqa3")
PREFIX, FORCED = 60, 9
SPECS = {"snapkv": {"budget": {"tokens": 24}, "window": 8}, "streaming_llm": {"budget": {"tokens": 24}},
         "quest": {"budget": {"tokens": 16}, "page_size": 4, "dense_layers": 1}}


def write(path, ids, damage):
    model, string = llama.Llama(MODEL), h5py.string_dtype()
    prompt, forced = ids[:PREFIX], ids[PREFIX:]
    full = torch.stack(reference.run(model, {"name": "full"}, prompt, forced[:-1]).logits)
    rows = []
    with h5py.File(path, "w") as file:
        for name, params in SPECS.items():
            result = reference.run(model, {"name": name, **params}, prompt, forced[:-1])
            rows.append((name, name, json.dumps(params), "ok"))
            cell, logits = file.create_group("cells/" + name), torch.stack(result.logits)
            values, offsets = reference.flatten([result.kept[0]])
            values[0] += damage
            cell["trace/kept"], cell["trace/kept_offsets"] = values, offsets
            ones = np.ones((1, model.layers), np.float32)
            cell["fidelity/mass"] = np.concatenate([ones, np.float32(result.mass)])
            cell["fidelity/output_error"] = np.concatenate([0 * ones, np.float32(result.output_error)])
            cell["fidelity/kl"] = reference.kl_divergence(full, logits).numpy().astype(np.float32)
            cell["fidelity/top1"] = (full.argmax(-1) == logits.argmax(-1)).float().numpy()
            cell["token_offsets"] = np.array([0, FORCED])
            sample = np.zeros(1, [("score", "f4")])
            sample["score"] = compare_results.score(logits, forced)
            cell["samples"] = sample
            events, selected = [], []
            for step, layers in enumerate(result.pages):
                for layer, heads in enumerate(layers):
                    for head, pages in enumerate(heads or []):
                        events.append((0, step + 1, layer, head, "select", len(selected), len(pages)))
                        selected += pages.tolist()
            fields = [(key, "i4") for key in ("sample", "token", "layer", "kv_head")]
            fields += [("kind", string), ("begin", "i8"), ("count", "i8")]
            cell["trace/events"] = np.array(events, fields)
            cell["trace/selected"] = np.array(selected, np.int32)
        file["summary"] = np.array(rows, [(key, string) for key in ("cell", "policy", "params", "status")])


def main():
    ids = np.random.default_rng(5).integers(2, 320, PREFIX + FORCED).tolist()
    with tempfile.TemporaryDirectory() as folder:
        tokens, result = os.path.join(folder, "ids.txt"), os.path.join(folder, "r.h5")
        with open(tokens, "w") as file:
            file.write(" ".join(map(str, ids)))
        for damage, equal in ((0, "6 of 6"), (1, "5 of 6")):
            write(result, ids, damage)
            out = subprocess.run([sys.executable, os.path.join(HERE, "compare_results.py"), result, "--model", MODEL, "--tokens",
                                  tokens, "--prefix", str(PREFIX), "--forced", str(FORCED)],
                                 check=True, capture_output=True, text=True).stdout
            assert out.count(f"kept: {equal} (layer, head) exactly equal") == 3, out
            assert out.count("selected: 32 of 32") == 1 and "wanted" not in out.replace("kept, 24 wanted", "").replace(
                "kept, 60 wanted", ""), out
            assert all(float(line.split("largest difference ")[1].split(",")[0]) < 1e-6
                       for line in out.splitlines() if "largest difference" in line), out
    print(out + "ok")


if __name__ == "__main__":
    main()
