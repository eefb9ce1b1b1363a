#!/usr/bin/env python3
"""Writes core/test/golden/tiny/: random-weight models of every family in the Hugging Face layout, with golden logits.

Usage: make_tiny_models.py [core/test/golden]
Format: README.md in this folder.
"""
import json
import os
import shutil
import struct
import sys

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import llama
import weights

VOCAB, TOKENS = 320, 96
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
# name: (type, hidden, FFN, layers, query heads, KV heads, head_dim, stored dtype, shards, more config)
VARIANTS = {
    "llama-mha": ("llama", 64, 96, 2, 4, 4, 16, torch.bfloat16, 1, {"tie_word_embeddings": False}),
    "llama-gqa3": ("llama", 48, 96, 3, 6, 2, 16, torch.float32, 1, {"tie_word_embeddings": True}),
    "llama-gqa4-rope3": ("llama", 64, 96, 2, 8, 2, 16, torch.bfloat16, 1,
                         {"tie_word_embeddings": False, "rope_theta": 500000.0, "rope_scaling": LLAMA3}),
    "llama-mqa7": ("llama", 56, 80, 2, 7, 1, 16, torch.bfloat16, 1, {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", 64, 96, 2, 4, 2, 16, torch.bfloat16, 1,
              {"tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 32,
               "rope_theta": 1000000.0, "rms_norm_eps": 1e-6}),
    "qwen3": ("qwen3", 48, 96, 2, 4, 2, 32, torch.bfloat16, 1,
              {"tie_word_embeddings": True, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6}),
    "mistral-window32": ("mistral", 64, 96, 2, 4, 2, 16, torch.bfloat16, 2,
                         {"tie_word_embeddings": False, "sliding_window": 32}),
}
CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}


def make_config(kind, hidden, ffn, layers, heads, kv_heads, head_dim, dtype, more):
    config = {"architectures": [CLASSES[kind] + "ForCausalLM"], "model_type": kind, "vocab_size": VOCAB,
              "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
              "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
              "max_position_embeddings": 512, "rope_theta": 10000.0, "rope_scaling": None, "rms_norm_eps": 1e-5,
              "hidden_act": "silu", "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1,
              "torch_dtype": str(dtype).removeprefix("torch.")}
    return {**config, **more}


def make_weights(config, generator):
    """Attention logits of a standard deviation of about 2, so that heads differ; everything else keeps unit variance."""
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    wide, narrow = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def normal(*shape, std):
        return torch.randn(*shape, generator=generator) * std

    def norm(size, scale=1.0):
        return scale * (0.6 + 0.8 * torch.rand(size, generator=generator))

    tensors = {"model.embed_tokens.weight": normal(VOCAB, hidden, std=0.5), "model.norm.weight": norm(hidden)}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(VOCAB, hidden, std=0.5)
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        tensors |= {
            p + "input_layernorm.weight": norm(hidden), p + "post_attention_layernorm.weight": norm(hidden),
            p + "self_attn.q_proj.weight": normal(wide, hidden, std=1.4 / hidden**0.5),
            p + "self_attn.k_proj.weight": normal(narrow, hidden, std=1.4 / hidden**0.5),
            p + "self_attn.v_proj.weight": normal(narrow, hidden, std=1.0 / hidden**0.5),
            p + "self_attn.o_proj.weight": normal(hidden, wide, std=1.0 / wide**0.5),
            p + "mlp.gate_proj.weight": normal(ffn, hidden, std=1.5 / hidden**0.5),
            p + "mlp.up_proj.weight": normal(ffn, hidden, std=1.0 / hidden**0.5),
            p + "mlp.down_proj.weight": normal(hidden, ffn, std=1.0 / ffn**0.5)}
        if config["model_type"] == "qwen2":
            for name, size in (("q", wide), ("k", narrow), ("v", narrow)):
                tensors[f"{p}self_attn.{name}_proj.bias"] = normal(size, std=0.5)
        if config["model_type"] == "qwen3":
            for name in "qk":
                tensors[f"{p}self_attn.{name}_norm.weight"] = norm(head_dim, 1.4)
    return tensors


def make_tokenizer(text):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return tokenizer


def save_weights(folder, tensors, dtype, shards):
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        return save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    names, where = sorted(tensors), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * len(names) // shards:(shard + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in part}, os.path.join(folder, file), metadata={"format": "pt"})
        where |= {name: file for name in part}
    total = sum(tensor.nbytes for tensor in tensors.values())
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": where}, file, indent=1)


def main():
    golden = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), "../../core/test/golden")
    out = os.path.join(golden, "tiny")
    shutil.rmtree(out, ignore_errors=True)
    os.makedirs(out)
    texts = {}
    for name in ("english", "code", "unicode"):
        with open(os.path.join(golden, "text", name + ".txt"), encoding="utf-8", newline="") as file:
            texts[name] = file.read()
    tokenizer = make_tokenizer(texts["english"])
    assert tokenizer.get_vocab_size() == VOCAB
    cases = ["", " ", "the", " the  the", "Bretton's 1234", "\n\n\t x", texts["code"], texts["unicode"],
             texts["english"][:600]]
    with open(os.path.join(out, "tokenizer_cases.json"), "w") as file:
        json.dump([{"text": text, "ids": tokenizer.encode(text).ids} for text in cases], file)
    for number, (name, (kind, hidden, ffn, layers, heads, kv, dim, dtype, shards, more)) in enumerate(VARIANTS.items()):
        folder = os.path.join(out, name)
        os.makedirs(folder)
        config = make_config(kind, hidden, ffn, layers, heads, kv, dim, dtype, more)
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(config, file, indent=1)
        save_weights(folder, make_weights(config, torch.Generator().manual_seed(100 + number)), dtype, shards)
        tokenizer.save(os.path.join(folder, "tokenizer.json"), pretty=False)
        with open(os.path.join(folder, "tokenizer_config.json"), "w") as file:
            json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|eos|>",
                       "add_bos_token": False}, file)
        ids = np.random.default_rng(number).integers(2, VOCAB, TOKENS)
        with torch.no_grad():
            logits = weights.transformers_model(folder)(torch.from_numpy(ids)[None]).logits[0]
            ours = llama.Llama(folder).forward(ids)
            exact = llama.Llama(folder, torch.float64).forward(ids)
        error = max(((other - logits).abs().amax(-1) / logits.abs().amax(-1)).max().item() for other in (ours, exact))
        print(f"{name}: max |logit| {logits.abs().max():.2f}, std {logits.std():.2f}, transformers to ours {error:.1e}")
        assert error < 1e-4, "the two Python implementations disagree"
        with open(os.path.join(folder, "logits.bin"), "wb") as file:
            file.write(b"KVTINY01" + struct.pack("<3I", 1, TOKENS, VOCAB) + ids.astype("<i4").tobytes()
                       + logits.numpy().astype("<f4").tobytes())


if __name__ == "__main__":
    main()
