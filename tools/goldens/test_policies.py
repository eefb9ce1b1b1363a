#!/usr/bin/env python3
"""Tests the reference policies by vectors from the methods' descriptions and by properties. Usage: test_policies.py"""
import os
from types import SimpleNamespace

import torch

import llama
import policies
import reference_policies as reference

TINY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../core/test/golden/tiny")


def model(kv_heads=1, group=1, layers=1):
    return SimpleNamespace(kv_heads=kv_heads, group=group, layers=layers)


def lists(kept):
    return [head.tolist() for head in kept]


def prompt(n, **more):
    return policies.Prompt(**{**dict(n=n, q=None, k=None, v=None, column_sums=None, last_rows=None), **more})


def test_snapkv():
    votes = torch.tensor([.5, 0, 0, .3, .3, 0, 0, 0])  # the last entry is the window
    for pooling, expected in (("average", [3, 4, 7]), ("max", [0, 1, 7]), ("none", [0, 3, 7])):
        spec = {"name": "snapkv", "budget": {"tokens": 3}, "window": 1, "kernel": 3, "pooling": pooling}
        assert lists(policies.make(spec, model()).prompt(0, prompt(8, last_rows=votes[None, None]))) == [expected]


def test_h2o():
    policy = policies.make({"name": "h2o", "budget": {"tokens": 4}}, model())
    kept = policy.prompt(0, prompt(5, column_sums=torch.tensor([[2.8, .9, .8, .3, .2]])))
    assert lists(kept) == [[0, 1, 3, 4]]
    kept = policy.after(0, [torch.tensor([0, 1, 3, 4, 5])], [torch.tensor([.05, .05, .7, .1, .1])])
    assert lists(kept) == [[0, 3, 4, 5]]
    assert torch.allclose(policy.scores[0][0], torch.tensor([2.85, 1.0, .3, .1]))


def test_knorm():
    keys = torch.tensor([[[1.], [5.], [2.], [.5]]])
    assert lists(policies.make({"name": "knorm", "budget": {"tokens": 2}}, model()).prompt(0, prompt(4, k=keys))) == [[0, 3]]


def test_streaming_and_window():
    streaming = policies.make({"name": "streaming_llm", "budget": {"tokens": 5}, "sinks": 2}, model())
    assert lists(streaming.prompt(0, prompt(8))) == [[0, 1, 5, 6, 7]]
    assert lists(streaming.after(0, [torch.tensor([0, 1, 5, 6, 7, 8])], None)) == [[0, 1, 6, 7, 8]]
    window = policies.make({"name": "window", "budget": {"tokens": 4}}, model())
    assert lists(window.prompt(0, prompt(7))) == [[3, 4, 5, 6]]
    assert lists(window.after(0, [torch.tensor([3, 4, 5, 6, 7])], None)) == [[4, 5, 6, 7]]


def test_quest():
    quest = policies.make({"name": "quest", "budget": {"tokens": 64}, "page_size": 4}, model())
    keys = torch.tensor([[[1., -2], [3, 0], [5, 4], [-1, 2]]])
    for query, bound in (((1., -1.), 7), ((-1., -1.), 3), ((0., 0.), 0)):
        assert quest.page_scores(torch.tensor([query]), keys).tolist() == [[bound]]
    scores = torch.tensor([[5., 1, 9, 2, 3, 8, 4, 7, 6, 0]])
    for budget, last_page, expected in ((64, False, [2, 5, 7, 8]), (64, True, [2, 5, 7, 9]), (32, False, [2, 5, 7])):
        spec = {"name": "quest", "budget": {"tokens": budget}, "dense_layers": 0, "last_page": last_page}
        quest = policies.make(spec, model())
        quest.page_scores = lambda q, k: scores.clone()
        assert lists(quest.select(0, None, torch.zeros(1, 150, 2), None)[1]) == [expected]


def test_budgets():
    def pyramid(n, layer):
        return policies.split_budget({"tokens": 128, "split": "pyramid"}, layer, 32, torch.zeros(1, n - 8), 8)[0]
    assert (pyramid(1000, 0), pyramid(1000, 31), sum(pyramid(1000, layer) for layer in range(32))) == (242, 25, 4272)
    assert {pyramid(200, layer) for layer in range(32)} == {128}
    scores = torch.tensor([[.9, .8, .7, .6, .5, .4], [.35, .2, .1, .05, .01, .001]])
    for floor, expected in ((.5, [5, 3]), (.2, [5, 2])):
        assert policies.split_budget({"tokens": 4, "split": "adakv", "floor": floor}, 0, 1, scores, 0) == expected


def test_int8():
    x = torch.tensor([[-1., 0, .33, 2], [3., 3, 3, 3]])
    decoded = policies.int8_per_token(x)
    assert (decoded - x).abs().max() <= 3 / 255 / 2 + 1e-3 and decoded[1].tolist() == [3.0] * 4


def test_runs():
    """Full equals the plain forward pass; a budget of everything equals full; mass is 1 exactly where all is read."""
    generator = torch.Generator().manual_seed(3)
    for variant in ("llama-gqa3", "mistral-window32", "llama-gqa4-rope3"):
        tiny = llama.Llama(os.path.join(TINY, variant))
        ids = torch.randint(2, 320, (60,), generator=generator).tolist()
        full = reference.run(tiny, {"name": "full"}, ids[:48], ids[48:])
        exact = tiny.forward(ids)[47:]
        assert (torch.stack(full.logits) - exact).abs().max() < 1e-4 * exact.abs().max()
        for name in ("window", "streaming_llm", "snapkv", "knorm", "h2o", "quest"):
            spec = {"name": name, "budget": {"tokens": 64}, "dense_layers": 0, "window": 8}
            everything = reference.run(tiny, spec, ids[:48], ids[48:])
            gap = (torch.stack(everything.logits) - exact).abs().max() / exact.abs().max()
            assert gap < 1e-4, (variant, name, gap)
            assert min(map(min, everything.mass)) > 1 - 1e-5 and everything.kept[-1][0][0].tolist() == list(range(60))
            spec["budget"] = {"tokens": 16}
            small = reference.run(tiny, {**spec, "page_size": 4}, ids[:48], ids[48:])
            evicts = name in ("window", "streaming_llm", "h2o")
            assert len(small.kept[0][0][0]) == (48 if name == "quest" else 16)
            assert len(small.kept[-1][1][0]) == (60 if name == "quest" else 16 if evicts else 28)
            assert max(map(max, small.mass)) <= 1 + 1e-5
            moved = reference.kl_divergence(torch.stack(full.logits), torch.stack(small.logits))
            assert moved[0] == 0 and (moved[1:] > 0).all() and (moved > -1e-9).all()
        coded = reference.run(tiny, {"name": "full", "codec": "int8"}, ids[:48], ids[48:])
        moved = reference.kl_divergence(torch.stack(full.logits), torch.stack(coded.logits))
        assert 0 < moved[1:].max() < 0.05, moved


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print("ok", name)
