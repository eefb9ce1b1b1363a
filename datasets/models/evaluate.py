#!/usr/bin/env python3
"""Measures a recall model with transformers: the share of exact greedy answers from the full cache, and perplexity.

It needs no corpus. Facts are hidden in the repository's haystack text, a book that no model was trained on. Words and names
of that text are the keys. It prints a line per task and length; --out writes the same as JSON.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import recall_tasks

HERE = Path(__file__).resolve().parent


def load(a):
    if a.gguf:
        source, extra = a.gguf.parent, {"gguf_file": a.gguf.name}
    else:
        source, extra = a.model, {}
    tokenizer = AutoTokenizer.from_pretrained(source, **extra)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, **extra)
    if a.adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, a.adapter).merge_and_unload()
    return tokenizer, model.to(a.device).eval()


@torch.inference_mode()
def generate(model, prompts, longest, eos):
    """prompts of one length -> answer ids, each up to and with the first eos."""
    out = model(prompts, use_cache=True, logits_to_keep=1)
    ids = [out.logits[:, -1].argmax(-1)]
    ended = ids[0] == eos
    while len(ids) < longest and not ended.all():
        out = model(ids[-1][:, None], past_key_values=out.past_key_values, use_cache=True)
        ids.append(out.logits[:, -1].argmax(-1))
        ended |= ids[-1] == eos
    rows = torch.stack(ids, 1).tolist()
    return [row[: row.index(eos) + 1] if eos in row else row for row in rows]


def measure(model, text, name, length, samples, chat_open, chat, device, batch_tokens, eos):
    """-> share of whole answers right, share of answers that contain the reference, some of the wrong ones"""
    groups = {}
    for seed in range(samples):
        prompt, answer = recall_tasks.evaluation_sample(name, seed, text, length, chat_open, chat)
        groups.setdefault(len(prompt), []).append((prompt, answer))
    exact = contains = 0
    wrong = []
    for size, rows in groups.items():
        step = max(1, batch_tokens // size)
        for i in range(0, len(rows), step):
            part = rows[i : i + step]
            prompts = torch.tensor([p.tolist() for p, _ in part], device=device)
            for (prompt, answer), got in zip(part, generate(model, prompts, max(len(w) for _, w in part) + 4, eos)):
                said, wanted = (text.tokenizer.decode(x).strip() for x in (got, answer.tolist()))
                exact += said == wanted
                contains += wanted in said
                if said != wanted:
                    wrong.append((wanted, said))
    return exact / samples, contains / samples, wrong[:3]


@torch.inference_mode()
def perplexity(model, tokenizer, path, length, windows, device):
    """Perplexity over windows of `length` tokens, one after the other from the file's beginning, and the token count."""
    ids = tokenizer.encode(path.read_text("utf-8"), add_special_tokens=False)[: length * windows]
    total = count = 0
    for i in range(0, len(ids) - 1, length):
        x = torch.tensor([ids[i : i + length]], device=device)
        hidden = model.model(x).last_hidden_state[0]
        for j in range(0, x.shape[1] - 1, 2048):
            target = x[0, j + 1 : j + 2049]
            total += F.cross_entropy(model.lm_head(hidden[j : j + len(target)]).float(), target, reduction="sum").item()
            count += len(target)
    return math.exp(total / count), count


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, default=HERE / "recall", help="Hugging Face folder")
    p.add_argument("--gguf", type=Path, help="GGUF file instead of a folder")
    p.add_argument("--adapter", type=Path, help="PEFT folder, merged into the model")
    p.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    p.add_argument("--tasks", nargs="+", default=list(recall_tasks.EVALUATION), choices=list(recall_tasks.EVALUATION))
    p.add_argument("--samples", type=int, default=100)
    p.add_argument("--text", type=Path, default=HERE.parent / "niah" / "haystack.txt", help="what facts are hidden in")
    p.add_argument("--perplexity", type=Path, nargs="*", default=[], help="text files")
    p.add_argument("--chat", action="store_true", help="the model's chat template around every prompt")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--batch-tokens", type=int, default=1 << 20)
    p.add_argument("--show", action="store_true", help="print some wrong answers")
    p.add_argument("--out", type=Path)
    a = p.parse_args()
    tokenizer, model = load(a)
    text = recall_tasks.Text(tokenizer.backend_tokenizer, [a.text.read_text("utf-8")])
    eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "@"}], tokenize=False)
    chat_open = rendered[: rendered.index("@")]
    rows = []
    for path in a.perplexity:
        for length in (2048, 8192):
            value, count = perplexity(model, tokenizer, path, length, 8192 * 4 // length, a.device)
            rows.append(
                {"task": "perplexity", "text": path.name, "length": length, "tokens": count, "value": round(value, 3)}
            )
            print(f"perplexity {path.name} windows of {length}: {value:.3f} over {count} tokens", flush=True)
    for name in a.tasks:
        for length in a.lengths:
            begin = time.time()
            exact, contains, wrong = measure(
                model, text, name, length, a.samples, chat_open, a.chat, a.device, a.batch_tokens, eos
            )
            rows.append({"task": name, "length": length, "samples": a.samples, "exact": exact, "contains": contains})
            print(
                f"{name:24} {length:6} exact {exact:.3f} contains {contains:.3f}  {time.time() - begin:.1f} s",
                flush=True,
            )
            for wanted, said in wrong if a.show else ():
                print(f"    wanted {wanted!r}\n       got {said!r}")
    if a.out:
        a.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
