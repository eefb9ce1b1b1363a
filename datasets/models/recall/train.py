#!/usr/bin/env python3
"""Trains the recall model: a Llama of 9 million parameters that answers from its whole context.

It starts from nothing and learns synthetic recall problems hidden in freely licensed text (recall_tasks, corpus.py). Lengths
grow with time: recall learned at 512 tokens in seconds carries over to 16K in minutes. Muon trains the matrices, AdamW the
rest. It writes the standard Hugging Face layout. The seed decides the data. The schedule follows the clock, so two runs differ
by the number of steps that fit into it.
"""

import json
import math
import random
import sys
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import options
import recall_tasks
from batches import Batches
from muon import Muon

SHAPE = dict(
    vocab_size=4096,
    hidden_size=256,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=768,
    rope_theta=500000.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=32768,
)
CHAT_OPEN = "<|im_start|>user\n"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# (share of the time at which the stage ends, {length: weight of its batches})
SCHEDULE = [
    (0.20, {512: 9, 1024: 1}),
    (0.32, {512: 2, 1024: 5, 2048: 2}),
    (0.46, {512: 1, 1024: 1, 2048: 5, 4096: 3}),
    (0.66, {512: 1, 1024: 1, 2048: 2, 4096: 4, 8192: 5}),
    (1.00, {512: 2, 1024: 3, 2048: 5, 4096: 5, 8192: 6, 16384: 6, 32768: 0.3}),
]


def train_tokenizer(documents):
    """Byte-level BPE with single digits, as SmolLM2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        documents,
        trainers.BpeTrainer(
            vocab_size=SHAPE["vocab_size"],
            show_progress=False,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return tokenizer


# ---- model ---------------------------------------------------------------------------------------------------------
# Everything but attention works on tokens in one row, whatever sequences they form, so it is compiled once for all lengths.


def norm(x, weight):
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), SHAPE["rms_norm_eps"])


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def before_attention(x, n, q, k, v, cos, sin):
    d, kv = SHAPE["head_dim"], SHAPE["num_key_value_heads"]
    y = F.linear(norm(x, n), torch.cat([q, k, v]).to(x.dtype)).unflatten(-1, (-1, d))
    heads = y.shape[1] - 2 * kv
    return rotate(y[:, :heads], cos, sin), rotate(y[:, heads : heads + kv], cos, sin), y[:, heads + kv :]


def after_attention(x, a, o, n, gate, up, down):
    x = x + F.linear(a, o.to(x.dtype))
    h = norm(x, n)
    return x + F.linear(F.silu(F.linear(h, gate.to(x.dtype))) * F.linear(h, up.to(x.dtype)), down.to(x.dtype))


def losses(x, n, embedding, targets, weight):
    logits = F.linear(norm(x, n), embedding.to(x.dtype)).float()
    ce = F.cross_entropy(logits, targets, reduction="none")
    answers = (ce * weight).sum() / weight.sum().clamp(min=1)
    return answers, ce.mean(), logits.argmax(-1) == targets


class Recall(nn.Module):
    """LlamaForCausalLM's computation and names ("/" replaces the dots, which a ParameterDict does not take)."""

    def __init__(self, compiled):
        super().__init__()
        h, d, ffn = SHAPE["hidden_size"], SHAPE["head_dim"], SHAPE["intermediate_size"]
        q, kv = SHAPE["num_attention_heads"] * d, SHAPE["num_key_value_heads"] * d
        new = lambda rows, columns, gain: nn.Parameter(torch.randn(rows, columns) * gain / math.sqrt(columns))
        self.embedding = nn.Parameter(torch.randn(SHAPE["vocab_size"], h) * 0.02)
        self.norm = nn.Parameter(torch.ones(h))
        self.layers = nn.ModuleList(
            nn.ParameterDict(
                {
                    "input_layernorm": nn.Parameter(torch.ones(h)),
                    "self_attn/q_proj": new(q, h, 1),
                    "self_attn/k_proj": new(kv, h, 1),
                    "self_attn/v_proj": new(kv, h, 1),
                    "self_attn/o_proj": new(h, q, 0.5),
                    "post_attention_layernorm": nn.Parameter(torch.ones(h)),
                    "mlp/gate_proj": new(ffn, h, 1),
                    "mlp/up_proj": new(ffn, h, 1),
                    "mlp/down_proj": new(h, ffn, 0.5),
                }
            )
            for _ in range(SHAPE["num_hidden_layers"])
        )
        wrap = torch.compile if compiled else lambda f: f
        self.before, self.after, self.losses = wrap(before_attention), wrap(after_attention), wrap(losses)
        half = torch.arange(0, d, 2).float() / d
        angles = torch.arange(SHAPE["max_position_embeddings"]).float()[:, None] / SHAPE["rope_theta"] ** half
        self.register_buffer("cos", angles.cos().bfloat16(), persistent=False)
        self.register_buffer("sin", angles.sin().bfloat16(), persistent=False)

    def forward(self, ids, targets, weight):
        batch, n = ids.shape
        cos, sin = (t[:n].repeat(batch, 1)[:, None] for t in (self.cos, self.sin))
        x = F.embedding(ids.flatten(), self.embedding).bfloat16()
        for p in self.layers:
            q, k, v = (
                t.unflatten(0, (batch, n)).transpose(1, 2)
                for t in self.before(
                    x,
                    p["input_layernorm"],
                    p["self_attn/q_proj"],
                    p["self_attn/k_proj"],
                    p["self_attn/v_proj"],
                    cos,
                    sin,
                )
            )
            a = (
                F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                .transpose(1, 2)
                .reshape(batch * n, -1)
            )
            x = self.after(
                x,
                a,
                p["self_attn/o_proj"],
                p["post_attention_layernorm"],
                p["mlp/gate_proj"],
                p["mlp/up_proj"],
                p["mlp/down_proj"],
            )
        return self.losses(x, self.norm, self.embedding, targets.flatten(), weight.flatten().float())

    def tensors(self):
        out = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        for i, p in enumerate(self.layers):
            out |= {f"model.layers.{i}.{name.replace('/', '.')}.weight": t for name, t in p.items()}
        return out


# ---- files ---------------------------------------------------------------------------------------------------------


def save(model, tokenizer, folder):
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {k: v.detach().bfloat16().cpu().contiguous() for k, v in model.tensors().items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    ends = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
    config = (
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "rope_scaling": None,
            "use_cache": True,
        }
        | SHAPE
        | ends
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(ends | {"do_sample": False}, indent=2) + "\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|endoftext|>",
                "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>",
                "add_bos_token": False,
                "clean_up_tokenization_spaces": False,
                "model_max_length": SHAPE["max_position_embeddings"],
                "chat_template": CHAT_TEMPLATE,
            },
            indent=2,
        )
        + "\n"
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def main():
    p = options.parser(__doc__, seconds=1200, rate=3e-3, tokens=131072)
    p.add_argument("--tokenizer", type=Path, help="tokenizer.json; trained on the corpus when not given")
    p.add_argument("--lm-weight", type=float, default=0.3, help="weight of the loss on all text beside that on answers")
    a = p.parse_args()

    random.seed(a.seed), torch.manual_seed(a.seed)
    begin = time.time()
    documents = recall_tasks.read_documents(a.corpus / "corpus.jsonl.xz")[: a.documents]
    tokenizer = Tokenizer.from_file(str(a.tokenizer)) if a.tokenizer else train_tokenizer(documents)
    text = recall_tasks.Text(tokenizer, documents)
    batches = Batches(text, SCHEDULE, a.seed, a.workers, a.tokens, a.device, CHAT_OPEN, a.mix)
    cuda = a.device.startswith("cuda")
    model = Recall(compiled=cuda).to(a.device)
    if a.init:
        for name, value in load_file(a.init / "model.safetensors").items():
            model.tensors()[name].data.copy_(value)
    parameters = list(model.parameters())
    print(
        f"{sum(t.numel() for t in parameters) / 1e6:.2f} M parameters, corpus of {len(text.ids) / 1e6:.1f} M tokens, ready after {time.time() - begin:.0f} s",
        flush=True,
    )
    matrices = [t for layer in model.layers for t in layer.values() if t.dim() == 2]
    others = [t for t in parameters if t.dim() == 1]
    muon = Muon(matrices)
    adam = torch.optim.AdamW(
        [{"params": [model.embedding]}, {"params": others}], betas=(0.9, 0.95), weight_decay=0.0, fused=cuda
    )

    a.out.mkdir(parents=True, exist_ok=True)
    log = open(a.out / "log.jsonl", "a")
    start = since = saved = time.time()
    step = tokens = 0
    seen = {}
    while True:
        done = a.begin + (1 - a.begin) * (time.time() - start) / a.seconds
        if done >= 1:
            break
        n, ids, weight, task = batches.next(next(i for i, (end, _) in enumerate(SCHEDULE) if done < end))
        rate = a.rate * min(1, (step + 1) / 200) * min(1.0, max(0.02, (1 - done) / 0.4))
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
            answers, lm, right = model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), weight[:, 1:])
            (answers + a.lm_weight * lm).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()
        muon.step(rate)
        for t in parameters:
            t.grad = None
        step += 1
        tokens += ids.shape[0] * n
        if step % 20 == 0:  # whole samples right, by task
            exact = (right.view(ids.shape[0], n) | ~weight[:, 1:]).all(1).tolist()
            for i, e in zip(task, exact):
                seen.setdefault(batches.tasks[i], []).append(e)
        if step % 200 == 0:
            now = time.time()
            row = {
                "step": step,
                "seconds": round(now - start, 1),
                "length": n,
                "answers": round(answers.item(), 4),
                "lm": round(lm.item(), 4),
                "rate": round(rate, 6),
                "tokens_per_second": round(tokens / (now - since)),
                "waiting": batches.ready.qsize(),
                "exact": {k: round(sum(v) / len(v), 3) for k, v in sorted(seen.items())},
            }
            log.write(json.dumps(row) + "\n"), log.flush()
            print(" ".join(f"{k} {v}" for k, v in row.items()), flush=True)
            since, tokens, seen = now, 0, {}
            if now - saved > 60:
                save(model, tokenizer, a.out / "checkpoint")
                saved = now
    save(model, tokenizer, a.out)
    batches.stop()
    print(f"{step} steps in {time.time() - start:.0f} s; written to {a.out}", flush=True)


if __name__ == "__main__":
    main()
