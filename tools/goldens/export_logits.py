#!/usr/bin/env python3
"""Writes core/test/golden/NAME_logits.{bin,json}: logits of transformers in f32.

Usage: export_logits.py NAME MODEL [--adapter FOLDER] [--sampled N] [--most N] [--out core/test/golden]
MODEL: a GGUF file, which is dequantized, or a Hugging Face folder. FOLDER: a PEFT adapter, which peft merges.
Format: README.md in this folder.
"""
import argparse
import hashlib
import json
import os
import struct

import numpy as np
import torch

import weights

SEED, TOP = 20240601, 8
TEXTS = ["english", "code", "unicode"]


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def load(args):
    """transformers' model, its tokenizer, and the weights' {file name: sha256}."""
    if os.path.isfile(args.model):
        tokenizer, files = weights.gguf_tokenizer(args.model), [args.model]
    else:
        from tokenizers import Tokenizer
        tokenizer = Tokenizer.from_file(os.path.join(args.model, "tokenizer.json"))
        files = [os.path.join(args.model, "model.safetensors")]
    model = weights.transformers_model(args.model)
    if args.adapter:
        from peft import PeftModel
        model = PeftModel.from_pretrained(model, args.adapter, torch_dtype=torch.float32).merge_and_unload().eval()
        files.append(os.path.join(args.adapter, "adapter_model.safetensors"))
    return model, tokenizer, {os.path.basename(f): sha256(f) for f in files}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("model")
    parser.add_argument("--adapter")
    parser.add_argument("--sampled", type=int, default=64, help="token ids beside the top ones")
    parser.add_argument("--most", type=int, default=1 << 30, help="tokens of a text")
    parser.add_argument("--out", default=os.path.join(os.path.dirname(__file__), "../../core/test/golden"))
    args = parser.parse_args()
    torch.manual_seed(SEED)
    model, tokenizer, files = load(args)
    vocab = model.config.vocab_size
    sampled = np.sort(np.random.default_rng(SEED).choice(vocab, args.sampled, replace=False)).astype("<i4")
    blob = b"KVGOLD01" + struct.pack("<6I", 1, SEED, vocab, args.sampled, TOP, len(TEXTS)) + sampled.tobytes()
    about = {"version": 1, "seed": SEED, "files": files, "sequences": []}
    for name in TEXTS:
        with open(os.path.join(args.out, "text", name + ".txt"), encoding="utf-8", newline="") as file:
            text = file.read()
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if tokenizer.decode(ids, skip_special_tokens=False) != text:
            raise SystemExit(f"{name}: the tokenizer does not give its text back")
        ids = ids[:args.most]
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
    out = os.path.join(args.out, args.name + "_logits")
    with open(out + ".bin", "wb") as file:
        file.write(blob)
    with open(out + ".json", "w") as file:
        lines = ",\n".join("    " + json.dumps(sequence) for sequence in about.pop("sequences"))
        file.write("{\n" + "".join(f"  {json.dumps(k)}: {json.dumps(v)},\n" for k, v in about.items()))
        file.write(f'  "sequences": [\n{lines}\n  ]\n}}\n')
    print(f"{len(blob)} bytes")


if __name__ == "__main__":
    main()
