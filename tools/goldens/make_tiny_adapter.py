#!/usr/bin/env python3
"""Writes core/test/golden/tiny/llama-gqa3/adapter/: a random PEFT adapter and transformers + peft's logits with it.

Usage: make_tiny_adapter.py [core/test/golden]     (after make_tiny_models.py; needs peft)
Format of logits.bin: README.md in this folder.
"""
import os
import shutil
import struct
import sys

import numpy as np
import torch
from peft import LoraConfig, get_peft_model

import weights

TOKENS = 64
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main():
    golden = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), "../../core/test/golden")
    base = os.path.join(golden, "tiny", "llama-gqa3")
    out = os.path.join(base, "adapter")
    shutil.rmtree(out, ignore_errors=True)
    plain = weights.transformers_model(base)
    vocab = plain.config.vocab_size
    ids = np.random.default_rng(77).integers(2, vocab, TOKENS)
    with torch.no_grad():
        before = plain(torch.from_numpy(ids)[None]).logits[0]
    model = get_peft_model(plain, LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, lora_dropout=0.0, bias="none",
                                             task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:  # as large as the weights: a wrong scale or a swapped matrix must show
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.4 if "lora_A" in name else 0.1))
        logits = model.eval()(torch.from_numpy(ids)[None]).logits[0]
    change = (logits - before).abs().max() / before.abs().max()
    print(f"the adapter changes logits by {change:.2f} of their largest")
    assert change > 0.2
    model.peft_config["default"].base_model_name_or_path = "llama-gqa3"
    model.save_pretrained(out)
    for name in os.listdir(out):
        if name not in ("adapter_config.json", "adapter_model.safetensors"):
            os.remove(os.path.join(out, name))
    with open(os.path.join(out, "logits.bin"), "wb") as file:
        file.write(b"KVTINY01" + struct.pack("<3I", 1, TOKENS, vocab) + ids.astype("<i4").tobytes()
                   + logits.numpy().astype("<f4").tobytes())


if __name__ == "__main__":
    main()
