"""A plain torch Llama-family model in parts, so that a policy can act between QKV and attention.

Shapes of one sequence: x [T, hidden], q [Hq, T, D], k and v [Hkv, T, D]. Query head h reads KV head h // G.
"""
import math

import torch

import weights


class Llama:
    def __init__(self, path, dtype=torch.float32):
        config, tensors = weights.load(path)
        self.path, self.config, self.dtype = path, config, dtype
        self.w = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        self.layers, self.heads = config["num_hidden_layers"], config["num_attention_heads"]
        self.kv_heads = config.get("num_key_value_heads") or self.heads
        self.group = self.heads // self.kv_heads
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.heads
        self.eps = config["rms_norm_eps"]
        windowed = config["model_type"] == "mistral" or config.get("use_sliding_window")
        self.sliding_window = config.get("sliding_window") if windowed else None
        self.inv_freq = self._inverse_frequencies()

    def _inverse_frequencies(self):
        theta, half = self.config.get("rope_theta", 10000.0), self.head_dim // 2
        freq = 1.0 / (theta ** (torch.arange(half, dtype=torch.float64) * 2 / self.head_dim))
        scaling = self.config.get("rope_scaling")
        if not scaling:
            return freq
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind != "llama3":
            raise ValueError(f"got rope scaling {kind}, wanted llama3 or none")
        factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = original * freq / (2 * math.pi)  # rotations over the original context
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        return freq / factor * (1 - smooth) + freq * smooth

    def _norm(self, x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.w[name]

    def _linear(self, x, name):
        y = x @ self.w[name + ".weight"].T
        return y + self.w[name + ".bias"] if name + ".bias" in self.w else y

    def embed(self, ids):
        return self.w["model.embed_tokens.weight"][torch.tensor(list(ids), dtype=torch.long)]

    def qkv(self, layer, x):
        """q, k, v before RoPE (after the QK norm where the model has one)."""
        prefix = f"model.layers.{layer}."
        x = self._norm(x, prefix + "input_layernorm.weight")
        out = []
        for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            y = self._linear(x, f"{prefix}self_attn.{name}_proj").reshape(-1, heads, self.head_dim)
            norm = f"{prefix}self_attn.{name}_norm.weight"
            out.append((self._norm(y, norm) if norm in self.w else y).transpose(0, 1))
        return out

    def rotate(self, x, positions):
        """x [H, T, D] turned to integer positions [T] or [H, T]; pairs (i, i + D/2)."""
        positions = torch.as_tensor(positions)
        if self.dtype == torch.float64:
            angle = positions[..., None].double() * self.inv_freq
        else:  # as other implementations do: f32 frequencies times f32 positions
            angle = positions[..., None].float() * self.inv_freq.float()
        cos, sin = angle.cos().to(self.dtype), angle.sin().to(self.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def expand(self, kv):
        """[Hkv, ...] -> [Hq, ...]"""
        return kv.repeat_interleave(self.group, 0)

    def prompt_attention(self, q, k, v, last=0, masks=None):
        """Causal attention of a whole prompt (rotated q, k), 256 query rows at a time. masks: (sinks, window) of each
        KV head, whose tokens see the first `sinks` tokens and the newest `window`; (0, 0) = all.

        Returns the output [T, Hq * D], the column sums of the probabilities [Hq, T] and their last rows [Hq, last, T].
        """
        n, k, v = q.shape[1], self.expand(k), self.expand(v)
        out, sums, tail = [], torch.zeros(self.heads, n, dtype=torch.float64), []
        for begin in range(0, n, 256):
            row, column = torch.arange(begin, min(begin + 256, n))[:, None], torch.arange(n)[None]
            visible = column <= row
            if self.sliding_window:
                visible &= column > row - self.sliding_window
            if masks:
                sinks, window = (torch.tensor(x).repeat_interleave(self.group)[:, None, None] for x in zip(*masks))
                visible = visible & ((window == 0) | (column < sinks) | (row - column < window))
            score = q[:, begin:begin + 256] @ k.transpose(1, 2) / math.sqrt(self.head_dim)
            probability = score.masked_fill(~visible, -math.inf).softmax(-1)
            out.append(probability @ v)
            sums += probability.sum(1, dtype=torch.float64)
            tail.append(probability[:, (row >= n - last).squeeze(1)])
        out = torch.cat(out, 1).transpose(0, 1).reshape(n, -1)
        return out, sums.to(self.dtype), torch.cat(tail, 1)

    def after_attention(self, layer, x, attended):
        """Residual stream after the output projection and the MLP; attended [T, Hq * D]."""
        prefix = f"model.layers.{layer}."
        x = x + self._linear(attended, prefix + "self_attn.o_proj")
        y = self._norm(x, prefix + "post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(self._linear(y, prefix + "mlp.gate_proj"))
        return x + self._linear(gate * self._linear(y, prefix + "mlp.up_proj"), prefix + "mlp.down_proj")

    def logits(self, x):
        head = self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"])
        return self._norm(x, "model.norm.weight") @ head.T

    def hidden(self, ids):
        """Residual stream [T, hidden] after the last layer, with the full cache."""
        x, positions = self.embed(ids), torch.arange(len(ids))
        for layer in range(self.layers):
            q, k, v = self.qkv(layer, x)
            attended, _, _ = self.prompt_attention(self.rotate(q, positions), self.rotate(k, positions), v)
            x = self.after_attention(layer, x, attended)
        return x

    def forward(self, ids):
        """Logits [T, vocab] of a whole sequence with the full cache."""
        return self.logits(self.hidden(ids))
