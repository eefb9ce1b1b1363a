#!/usr/bin/env python3
"""Compares the cells of a kvlab result file (text task, f32) with the reference policies on the same tokens.

Usage: compare_results.py RESULT.h5 --model PATH (--text FILE | --tokens FILE) --prefix N --forced M [--cell SUBSTRING]
       [--starts 0,4096] [--steps K] [--policy JSON]
Sample i begins at token starts[i]. N tokens are the prompt and the next M are scored: the first by the prompt's logits, the
others by M - 1 decode steps. --steps compares only the first K of those steps (0: kept positions only). --policy replaces
the policy that the cell's parameters name.
"""
import argparse
import json
import math
import os

import h5py
import numpy as np
import torch

import llama
import reference_policies as reference
import weights

ALIASES = {"pool": "pooling", "kernel_size": "kernel", "alpha": "floor", "rope": "positions", "regime": "positions",
           "n_sink": "sinks", "bounds": "page_bounds", "group_rule": "group"}
KNOWN = {"budget", "window", "kernel", "pooling", "group", "heavy", "sinks", "positions", "page_size", "dense_layers",
         "last_page", "page_bounds", "scale", "min_pages", "codec"}


def text(value):
    return value.decode() if isinstance(value, bytes) else str(value)


def flat(params):
    """kvlab's {role: {name: {parameters}}, budget: {split: {name: {...}}}, ...} as one level of names."""
    out = {}
    for key, value in params.items():
        if key in ("scorer", "selector") and isinstance(value, dict):
            (out["name"], own), = value.items()
            out.update(own)
        elif key == "codec" and isinstance(value, dict):
            out["codec"], = value
        elif key == "budget" and isinstance(value.get("split"), dict):
            (split, own), = value["split"].items()
            out["budget"] = {**value, "split": split, **own}
        else:
            out[key] = value
    return out


def specification(name, params):
    """A cell's policy and resolved parameters in the reference's words."""
    params = flat(params)
    spec = {"name": params.pop("name", name.split(":")[0])}
    for key, value in params.items():
        head, _, tail = key.partition(".")
        if head == "budget" and tail:
            spec.setdefault("budget", {})[ALIASES.get(tail, tail)] = value
        elif key == "budget" and isinstance(value, dict):
            spec.setdefault("budget", {}).update({ALIASES.get(k, k): v for k, v in value.items()})
        elif ALIASES.get(key, key) in KNOWN:
            spec[ALIASES.get(key, key)] = value
        else:
            print(f"    not part of the comparison: {key} = {json.dumps(value)}")
    split = spec.get("budget", {}).get("split")
    if isinstance(split, dict):  # {adakv: {floor: 0.2}}
        (spec["budget"]["split"], more), = split.items()
        spec["budget"].update(more or {})
    return spec


def token_ids(args):
    if args.tokens:
        return reference.read_tokens(args.tokens)
    with open(args.text, encoding="utf-8", newline="") as file:
        content = file.read()
    if os.path.isfile(args.model):
        return weights.gguf_tokenizer(args.model).encode(content, add_special_tokens=False).ids
    from tokenizers import Tokenizer
    path = os.path.join(args.model, "tokenizer.json")
    return Tokenizer.from_file(path).encode(content, add_special_tokens=False).ids


def perplexity(model, ids, prefix):
    """Perplexity of ids[prefix:] with the full cache; each token is predicted from all tokens before it."""
    with torch.no_grad():
        hidden, total = model.hidden(ids)[prefix - 1:-1], 0.0
        for rows, targets in zip(hidden.split(256), torch.tensor(ids[prefix:]).split(256)):
            total += torch.nn.functional.cross_entropy(model.logits(rows).double(), targets, reduction="sum").item()
    return math.exp(total / (len(ids) - prefix))


def score(logits, targets):
    """Perplexity of the targets under logits [n, vocab]."""
    return math.exp(torch.nn.functional.cross_entropy(logits.double(), torch.tensor(targets)).item())


def compare_kept(cell, sample, kept):
    """Prints how the cell's kept positions agree, and every layer that differs."""
    if "trace/kept" not in cell:
        return print("    no trace/kept in this cell")
    values, offsets = cell["trace/kept"][()], cell["trace/kept_offsets"][sample]
    if offsets.shape[:2] != (len(kept), len(kept[0])):
        return print(f"    kept: got {offsets.shape[0]} layers x {offsets.shape[1]} KV heads, "
                     f"wanted {len(kept)} x {len(kept[0])}")
    same, overlaps, odd = 0, [], []
    for layer, heads in enumerate(kept):
        wrong = []
        for head, wanted in enumerate(heads):
            begin, end = offsets[layer, head]
            got, wanted = values[begin:end].tolist(), wanted.tolist()
            union = set(got) | set(wanted)
            overlap = len(set(got) & set(wanted)) / len(union) if union else 1.0
            overlaps.append(overlap)
            same += got == wanted
            if got != wanted:
                wrong.append(f"head {head}: {len(got)} kept, {len(wanted)} wanted, overlap {overlap:.4f}")
        if wrong:
            odd.append(f"      layer {layer}: " + "; ".join(wrong))
    print(f"    kept: {same} of {len(overlaps)} (layer, head) exactly equal, overlap mean {np.mean(overlaps):.5f}, "
          f"minimum {min(overlaps):.5f}")
    print("\n".join(odd), end="\n" if odd else "")


def compare_selected(cell, sample, pages):
    """Selected pages per decode step; the cell's first traced token is the first step."""
    if "trace/events" not in cell or not any(layer is not None for step in pages for layer in step):
        return
    events = cell["trace/events"][()]
    kinds = events["kind"]
    codes = h5py.check_enum_dtype(events.dtype["kind"])
    is_select = (kinds == codes["select"]) if codes else np.array([text(kind) == "select" for kind in kinds])
    events, values = events[is_select & (events["sample"] == sample)], cell["trace/selected"][()]
    if len(events) == 0:
        return print("    no select events in this cell")
    first, overlaps, same = events["token"].min(), [], 0
    for event in events:
        step = int(event["token"] - first)
        wanted = pages[step][event["layer"]] if step < len(pages) else None
        if wanted is None:
            continue
        got = set(values[event["begin"]:event["begin"] + event["count"]].tolist())
        wanted = set(wanted[event["kv_head"]].tolist())
        overlaps.append(len(got & wanted) / len(got | wanted))
        same += got == wanted
    if overlaps:
        print(f"    selected: {same} of {len(overlaps)} (step, layer, head) equal, overlap mean {np.mean(overlaps):.5f}")


def compare_rows(cell, name, rows, wanted):
    """A fidelity data set [token, ...] against the reference's decode steps (token 0 came from the prompt)."""
    if "fidelity/" + name not in cell:
        return print(f"    no fidelity/{name} in this cell")
    got, wanted = cell["fidelity/" + name][rows][1:1 + len(wanted)], np.asarray(wanted)
    if got.shape != wanted.shape:
        return print(f"    {name}: got shape {got.shape}, wanted {wanted.shape}")
    gap = np.abs(got - wanted)
    print(f"    {name}: mean {np.nanmean(got):.6f}, reference {wanted.mean():.6f}, largest difference {np.nanmax(gap):.2e}, "
          f"{np.isnan(got).sum()} not measured")
    if got.ndim == 2:
        print("      per layer, theirs/ours: "
              + " ".join(f"{a:.4f}/{b:.4f}" for a, b in zip(np.nanmean(got, 0), wanted.mean(0))))


def compare_cell(file, row, args, model, tokens, full_runs):
    params = json.loads(text(row["params"]) or "{}")
    print(f"{text(row['cell'])} {text(row['policy'])} {json.dumps(params)}")
    spec = json.loads(args.policy) if args.policy else specification(text(row["policy"]), params)
    print(f"    reference: {json.dumps(spec)}")
    cell, steps = file["cells"][text(row["cell"])], args.forced - 1 if args.steps is None else args.steps
    counts = cell["token_offsets"][()] if "token_offsets" in cell else None
    for sample, start in enumerate(args.starts):
        prompt = tokens[start:start + args.prefix]
        forced = tokens[start + args.prefix:start + args.prefix + args.forced]
        if sample not in full_runs:
            full_runs[sample] = reference.run(model, {"name": "full"}, prompt, forced[:steps])
        result = full_runs[sample] if spec == {"name": "full"} else reference.run(model, spec, prompt, forced[:steps])
        compare_kept(cell, sample, result.kept[0])
        if steps:
            begin = int(counts[sample]) if counts is not None else sample * args.forced
            rows = slice(begin, begin + args.forced)
            compare_selected(cell, sample, result.pages)
            logits, full = torch.stack(result.logits), torch.stack(full_runs[sample].logits)
            compare_rows(cell, "mass", rows, result.mass)
            compare_rows(cell, "output_error", rows, result.output_error)
            compare_rows(cell, "kl", rows, reference.kl_divergence(full, logits)[1:].numpy())
            compare_rows(cell, "top1", rows, (full.argmax(-1) == logits.argmax(-1))[1:].float().numpy())
            if steps == args.forced - 1:
                got = cell["samples"][sample]["score"]
                print(f"    perplexity: {got:.5f}, reference {score(logits, forced):.5f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result")
    parser.add_argument("--model", required=True)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text")
    source.add_argument("--tokens")
    parser.add_argument("--prefix", type=int, required=True)
    parser.add_argument("--forced", type=int, required=True)
    parser.add_argument("--starts", type=lambda s: [int(part) for part in s.split(",")], default=[0])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--cell", default="", help="only cells whose policy or id contains this")
    parser.add_argument("--policy", help="reference policy as JSON instead of the cell's parameters")
    args = parser.parse_args()
    model, tokens = llama.Llama(args.model), token_ids(args)
    needed = max(args.starts) + args.prefix + args.forced
    if len(tokens) < needed:
        raise SystemExit(f"got {len(tokens)} tokens, wanted {needed}")
    for sample, start in enumerate(args.starts):
        ids = tokens[start:start + args.prefix + args.forced]
        print(f"sample {sample}: perplexity with the full cache {perplexity(model, ids, args.prefix):.5f}")
    full_runs = {}
    with h5py.File(args.result) as file:
        for row in file["summary"][()]:
            if args.cell not in text(row["policy"]) and args.cell not in text(row["cell"]):
                continue
            if text(row["status"]) == "ok":
                compare_cell(file, row, args, model, tokens, full_runs)
            else:
                print(f"{text(row['cell'])} {text(row['policy'])}: {text(row['status'])}, skipped")


if __name__ == "__main__":
    main()
