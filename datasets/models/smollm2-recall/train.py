#!/usr/bin/env python3
"""Trains the recall adapter of SmolLM2-135M-Instruct: LoRA of rank 16 on all seven linear layers of a block, in the PEFT layout.

The base stays frozen (GGUF weights, dequantized). The adapter learns answers of recall problems (recall_tasks) by cross
entropy. On the text around them KL divergence holds the adapted model to the base, so that the language model stays the same.
On several GPUs: torchrun --standalone --nproc-per-node N train.py ...; every process has batches of its own.
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
from tokenizers import Tokenizer
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import options
import recall_tasks
from batches import Batches, draw_length
from gguf_tokenizer import gguf_tokenizer
from muon import Muon
from ranks import Ranks

RANK, ALPHA = 16, 32
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, FFN, EPS, THETA = 30, 576, 9, 3, 64, 1536, 1e-5, 100000.0
CHAT_OPEN = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\n"
SCHEDULE = [
    (0.28, {1024: 2, 2048: 4}),
    (0.52, {1024: 1, 2048: 2, 4096: 4}),
    (0.80, {1024: 1, 2048: 2, 4096: 3, 8192: 8}),
    (1.00, {2048: 1, 4096: 2, 8192: 9}),
]
MIX = (
    "records=5,ruler=6,key_lists=8,any_wording=5,numbered=3,ordered=8,key_value=3,variable_tracking=1.6,two_hops=3,copying=14,table=0.6,"
    "deliveries=1.5,common_words=1.5,frequent_words=1,plain=2.5"
)
QKV = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
MODULES = QKV + ["self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def norm(x, weight):
    return F.rms_norm(x.float(), (WIDTH,), weight, EPS).bfloat16()


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def linear(x, w, lora):
    y = F.linear(x, w)
    return y if lora is None else y + F.linear(F.linear(x, lora[0].bfloat16()), lora[1].bfloat16() * (ALPHA / RANK))


def before_attention(x, n, ws, loras, cos, sin):
    h = norm(x, n)
    q, k, v = (linear(h, w, lora).unflatten(-1, (-1, HEAD_DIM)) for w, lora in zip(ws, loras))
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def after_attention(x, a, n, ws, loras):
    x = x + linear(a, ws[0], loras[0])
    h = norm(x, n)
    return x + linear(F.silu(linear(h, ws[1], loras[1])) * linear(h, ws[2], loras[2]), ws[3], loras[3])


class Adapted(nn.Module):
    """The frozen base and its adapter; `hidden` runs either."""

    def __init__(self, base, compiled):
        super().__init__()
        self.base = {k: v.float() if "norm" in k else v.bfloat16() for k, v in base.items()}
        device = next(iter(base.values())).device
        self.lora = nn.ParameterDict()
        for i in range(LAYERS):
            for name in MODULES:
                rows, columns = base[f"model.layers.{i}.{name}.weight"].shape
                key = f"{i}/{name}".replace(".", "/")
                self.lora[key + "/A"] = nn.Parameter(torch.randn(RANK, columns, device=device) / math.sqrt(columns))
                self.lora[key + "/B"] = nn.Parameter(torch.zeros(rows, RANK, device=device))
        wrap = (lambda f: torch.compile(f, dynamic=False)) if compiled else lambda f: f
        self.before, self.after = wrap(before_attention), wrap(after_attention)
        angles = torch.arange(8192, device=device).float()[:, None] / THETA ** (
            torch.arange(0, HEAD_DIM, 2, device=device).float() / HEAD_DIM
        )
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def pick(self, i, names, adapted):
        ws = [self.base[f"model.layers.{i}.{name}.weight"] for name in names]
        keys = [f"{i}/{name}".replace(".", "/") for name in names]
        return ws, [(self.lora[k + "/A"], self.lora[k + "/B"]) if adapted else None for k in keys]

    def hidden(self, ids, adapted=True):
        batch, n = ids.shape
        cos, sin = (t[:n].repeat(batch, 1)[:, None] for t in (self.cos, self.sin))
        x = F.embedding(ids.flatten(), self.base["model.embed_tokens.weight"])
        for i in range(LAYERS):
            heads = self.before(
                x, self.base[f"model.layers.{i}.input_layernorm.weight"], *self.pick(i, QKV, adapted), cos, sin
            )
            q, k, v = (t.unflatten(0, (batch, n)).transpose(1, 2) for t in heads)
            a = (
                F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                .transpose(1, 2)
                .reshape(batch * n, -1)
            )
            x = self.after(
                x,
                a,
                self.base[f"model.layers.{i}.post_attention_layernorm.weight"],
                *self.pick(i, MODULES[3:], adapted),
            )
        return norm(x, self.base["model.norm.weight"])

    def logits(self, hidden):
        return F.linear(hidden, self.base["model.embed_tokens.weight"]).float()


def save(model, folder):
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for key, value in model.lora.items():
        path, side = key.rsplit("/", 1)
        tensors[f"base_model.model.model.layers.{path.replace('/', '.')}.lora_{side}.weight"] = (
            value.detach().bfloat16().cpu().contiguous()
        )
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
                "r": RANK,
                "lora_alpha": ALPHA,
                "lora_dropout": 0.0,
                "bias": "none",
                "fan_in_fan_out": False,
                "inference_mode": True,
                "target_modules": [m.split(".")[1] for m in MODULES],
            },
            indent=1,
        )
        + "\n"
    )


def main():
    p = options.parser(__doc__, seconds=1000, rate=1.5e-3, tokens=65536, changes=MIX)
    p.add_argument("--gguf", type=Path, required=True, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    p.add_argument("--tokenizer", type=Path, help="tokenizer.json of SmolLM2; the GGUF file's when left out")
    p.add_argument("--ratio", type=float, default=3.0, help="how much slower A learns than B (LoRA+, Hayou et al. 2024)")
    p.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    p.add_argument("--kl", type=float, default=5.0, help="weight of the KL divergence to the base")
    p.add_argument("--lm-weight", type=float, default=0.3, help="weight of the language model's loss on text")
    p.add_argument("--end-weight", type=float, default=1.5, help="weight of the token that ends an answer, beside its others")
    a = p.parse_args()

    ranks = Ranks(a.device)
    random.seed(a.seed), torch.manual_seed(a.seed)
    begin = time.time()
    tokenizer = Tokenizer.from_file(str(a.tokenizer)) if a.tokenizer else gguf_tokenizer(a.gguf)
    text = recall_tasks.Text(
        tokenizer, recall_tasks.read_documents(a.corpus / "corpus.jsonl.xz")[: a.documents]
    )
    seed = a.seed * ranks.world + ranks.rank
    end = text.tokenizer.token_to_id(recall_tasks.EOS)
    batches = Batches(text, SCHEDULE, seed, a.workers, a.tokens, ranks.device, CHAT_OPEN, a.mix)
    from transformers import AutoModelForCausalLM  # after the workers are forked

    ranks.connect()
    base = AutoModelForCausalLM.from_pretrained(a.gguf.parent, gguf_file=a.gguf.name, dtype=torch.bfloat16).state_dict()
    cuda = ranks.device.startswith("cuda")
    model = Adapted({k: v.to(ranks.device) for k, v in base.items()}, compiled=cuda)
    if a.init:
        for name, value in load_file(a.init / "adapter_model.safetensors").items():
            path, side = name.removeprefix("base_model.model.model.layers.").removesuffix(".weight").rsplit(".lora_", 1)
            model.lora[path.replace(".", "/") + "/" + side].data.copy_(value)
    parameters = list(model.parameters())
    ranks.same(parameters)
    if ranks.rank == 0:
        print(
            f"{sum(t.numel() for t in parameters) / 1e6:.2f} M parameters, {ranks.world} processes, corpus of {len(text.ids) / 1e6:.1f} M tokens, "
            f"ready after {time.time() - begin:.0f} s",
            flush=True,
        )
    sides = [[t for k, t in model.lora.items() if k.endswith(side)] for side in ("/A", "/B")]
    shares = (1 / a.ratio, 1.0)
    adam = torch.optim.AdamW([{"params": ts} for ts in sides], betas=(0.9, 0.98), weight_decay=0.0, fused=cuda)
    muons = [Muon(ts, decay=0.0) for ts in sides]
    a.out.mkdir(parents=True, exist_ok=True)
    log = open(a.out / "log.jsonl", "a") if ranks.rank == 0 else None
    lengths = random.Random(a.seed)  # all processes draw the same lengths, or all would wait for the longest
    start = since = saved = time.time()
    step = tokens = 0
    seen = {}
    while True:
        done = ranks.first(a.begin + (1 - a.begin) * (time.time() - start) / a.seconds)
        if done >= 1:
            break
        stage = next(i for i, (end, _) in enumerate(SCHEDULE) if done < end)
        n, ids, weight, task = batches.next(stage, draw_length(lengths, SCHEDULE[stage][1]))
        ids, targets, weight = ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), weight[:, 1:]
        rate = a.rate * min(1, (step + 1) / 100) * min(1.0, max(0.01, (1 - done) / 0.5))
        for group, share in zip(adam.param_groups, shares):
            group["lr"] = share * rate
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
            hidden = model.hidden(ids)
            places = weight.flatten().nonzero()[:, 0]
            logits = model.logits(hidden[places])
            each = (weight / weight.sum(1, keepdim=True).clamp(min=1).sqrt()).flatten()[places]
            each = torch.where(targets.flatten()[places] == end, a.end_weight * each, each)
            answers = (F.cross_entropy(logits, targets.flatten()[places], reduction="none") * each).sum() / each.sum()
            few = max(1, len(ids) // 4)
            with torch.no_grad():
                base_hidden = model.hidden(ids[:few], adapted=False)
            around = (~weight[:few]).flatten().nonzero()[:, 0]
            around = around[torch.randperm(len(around), device=ids.device)[:4096]]
            with torch.no_grad():
                wanted = model.logits(base_hidden[around]).log_softmax(-1)
            said = model.logits(hidden[around]).log_softmax(-1)
            kl = F.kl_div(said, wanted, log_target=True, reduction="batchmean")
            lm = F.nll_loss(said, targets.flatten()[around])
            (answers + a.kl * kl + a.lm_weight * lm).backward()
        ranks.mean([t.grad for t in parameters])
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        if a.optimizer == "muon":
            for muon, share in zip(muons, shares):
                muon.step(share * rate)
        else:
            adam.step()
        adam.zero_grad(set_to_none=True)
        step += 1
        tokens += ids.numel() * ranks.world
        if step % 10 == 0:  # whole samples right, by task
            right = torch.ones_like(weight).flatten()
            right[places] = logits.argmax(-1) == targets.flatten()[places]
            for i, e in zip(task, right.view_as(weight).all(1).tolist()):
                seen.setdefault(batches.tasks[i], []).append(e)
        if step % 200 == 0 and ranks.rank == 0:
            now = time.time()
            row = {
                "step": step,
                "seconds": round(now - start, 1),
                "length": n,
                "answers": round(answers.item(), 4),
                "kl": round(kl.item(), 4),
                "lm": round(lm.item(), 4),
                "tokens_per_second": round(tokens / (now - since)),
                "waiting": batches.ready.qsize(),
                "exact": {k: round(sum(v) / len(v), 3) for k, v in sorted(seen.items())},
            }
            log.write(json.dumps(row) + "\n"), log.flush()
            print(" ".join(f"{k} {v}" for k, v in row.items()), flush=True)
            since, tokens, seen = now, 0, {}
            if now - saved > 100:
                save(model, a.out / "checkpoint")
                saved = now
    batches.stop()
    if ranks.rank == 0:
        save(model, a.out)
        print(f"{step} steps in {time.time() - start:.0f} s; written to {a.out}", flush=True)
    ranks.close()


if __name__ == "__main__":
    main()
