#!/usr/bin/env python3
"""Writes core/test/golden/smollm2_logits.{bin,json}: what transformers computes from the dequantized GGUF in f32.

Usage: export_smollm2.py MODEL.gguf [core/test/golden]
Format: README.md in this folder.
"""
import hashlib
import json
import os
import struct
import sys

import numpy as np
import torch

import weights

SEED, SAMPLED, TOP = 20240601, 64, 8
TEXTS = ["english", "code", "unicode"]


def main():
    path = sys.argv[1]
    out = sys.argv[2] if len(sys.argv) > 2 else os.path.join(os.path.dirname(__file__), "../../core/test/golden")
    torch.manual_seed(SEED)
    tokenizer = weights.gguf_tokenizer(path)
    model = weights.transformers_model(path)
    vocab = model.config.vocab_size
    sampled = np.sort(np.random.default_rng(SEED).choice(vocab, SAMPLED, replace=False)).astype("<i4")
    blob = b"KVGOLD01" + struct.pack("<6I", 1, SEED, vocab, SAMPLED, TOP, len(TEXTS)) + sampled.tobytes()
    about = {"version": 1, "seed": SEED, "gguf_sha256": hashlib.sha256(open(path, "rb").read()).hexdigest(),
             "sequences": []}
    for name in TEXTS:
        with open(os.path.join(out, "text", name + ".txt"), encoding="utf-8", newline="") as file:
            text = file.read()
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if tokenizer.decode(ids, skip_special_tokens=False) != text:
            raise SystemExit(f"{name}: the tokenizer does not give its text back")
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        top = torch.topk(logits, TOP, dim=-1)
        blob += struct.pack("<I", len(ids)) + np.array(ids, "<i4").tobytes()
        blob += logits.abs().amax(-1).numpy().astype("<f4").tobytes()
        blob += logits[:, torch.from_numpy(sampled).long()].numpy().astype("<f4").tobytes()
        blob += top.indices.numpy().astype("<i4").tobytes() + top.values.numpy().astype("<f4").tobytes()
        nll = torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(ids[1:])).item()
        about["sequences"].append({"name": name, "text": f"text/{name}.txt", "tokens": len(ids),
                                   "sha256": hashlib.sha256(text.encode()).hexdigest(), "ids": ids,
                                   "mean_nll": nll, "perplexity": float(np.exp(nll))})
        print(f"{name}: {len(ids)} tokens, perplexity {np.exp(nll):.4f}, last top-1 {top.indices[-1, 0].item()}")
    with open(os.path.join(out, "smollm2_logits.bin"), "wb") as file:
        file.write(blob)
    with open(os.path.join(out, "smollm2_logits.json"), "w") as file:
        lines = ",\n".join("    " + json.dumps(sequence) for sequence in about.pop("sequences"))
        file.write("{\n" + "".join(f"  {json.dumps(k)}: {json.dumps(v)},\n" for k, v in about.items()))
        file.write(f'  "sequences": [\n{lines}\n  ]\n}}\n')
    print(f"{len(blob)} bytes")


if __name__ == "__main__":
    main()
