"""Reads a Llama-family model (GGUF file or Hugging Face folder) into f32 torch tensors with Hugging Face names.

The readers here share nothing with the C++ ones: GGUF goes through gguf-py's dequantizer, folders through safetensors.
"""
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "datasets" / "models"))
from gguf_tokenizer import gguf_tokenizer  # noqa: F401  (for those who import this module)

GGUF_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}


def load(path):
    """path: a .gguf file or a folder with config.json. Returns (config dict in HF's words, {HF name: f32 tensor})."""
    return load_gguf(path) if os.path.isfile(path) else load_hf(path)


def load_hf(folder):
    from safetensors.torch import load_file
    with open(os.path.join(folder, "config.json")) as file:
        config = json.load(file)
    tensors = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(".safetensors"):
            tensors.update(load_file(os.path.join(folder, name)))
    return config, {name: tensor.float() for name, tensor in tensors.items()}


def unpermute(weight, heads):
    """GGUF's llama layout stores a head's Q/K rows interleaved (2i, 2i+1); HF pairs row i with row i + D/2."""
    rows = weight.shape[0]
    pairs = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def load_gguf(path):
    import gguf
    reader = gguf.GGUFReader(path)

    def field(key, default=None):
        found = reader.fields.get(key)
        return default if found is None else found.contents()

    if field("general.architecture") != "llama":
        raise ValueError(f"got architecture {field('general.architecture')}, wanted llama: {path}")
    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "hidden_size": field("llama.embedding_length"), "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"), "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": field("llama.rope.dimension_count"),
        "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"), "rope_theta": field("llama.rope.freq_base"),
        "max_position_embeddings": field("llama.context_length"),
        "vocab_size": len(reader.fields["tokenizer.ggml.tokens"].data), "tie_word_embeddings": True,
    }
    tensors = {}
    for entry in reader.tensors:
        values = gguf.quants.dequantize(entry.data, entry.tensor_type).astype(np.float32)
        values = torch.from_numpy(np.ascontiguousarray(values)).reshape([int(n) for n in reversed(entry.shape)])
        parts = entry.name.split(".")
        if parts[0] == "blk":
            if parts[2] in ("attn_q", "attn_k"):
                values = unpermute(values, heads if parts[2] == "attn_q" else kv_heads)
            name = f"model.layers.{parts[1]}.{GGUF_NAMES[parts[2]]}.{parts[3]}"
        else:
            name = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
                    "output.weight": "lm_head.weight"}[entry.name]
        tensors[name] = values
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    return config, tensors


def transformers_model(path):
    """The same weights in transformers' own implementation, f32 and eager attention."""
    import transformers
    if os.path.isfile(path):
        config, tensors = load_gguf(path)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, attn_implementation="eager"))
        if config["tie_word_embeddings"]:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        model.load_state_dict(tensors, strict=True)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32,
                                                                  attn_implementation="eager")
    return model.float().eval()
