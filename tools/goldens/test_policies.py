#!/usr/bin/env python3
"""Tests the reference policies by vectors from the methods' descriptions and by properties. Usage: test_policies.py"""
import math
import os
from types import SimpleNamespace

import torch

import coding_policies as coding
import evicting_policies
import layer_policies
import llama
import offloading_policies as offloading
import policies
import profile_policies as profiled
import reference_policies as reference
import retrieval_policies as retrieval
import sampling_policies as sampling
import scoring_policies as scoring

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


def test_cake():
    rows = torch.tensor([[[.6, .2], [.2, .6]]])
    cake = policies.make({"name": "cake", "window": 2, "kernel": 1}, model())
    assert torch.allclose(cake.score(rows), torch.tensor([[16.4, 16.4]]))
    # A row that all queries like, one that half of them like, one that one of them likes.
    rows = torch.tensor([[[.3, .4, .0, .0], [.3, .0, .0, .4]]])
    spec = {"name": "cake", "budget": {"tokens": 3}, "window": 2, "kernel": 1}
    for gamma, expected in ((200.0, [1, 2, 3]), (0.0, [0, 2, 3])):
        policy = policies.make({**spec, "gamma": gamma}, model())
        assert lists(policy.prompt(0, prompt(4, last_rows=rows))) == [expected]
    policy.attended(0, None, None, None, [torch.tensor([[.1, .5, .3, .1]])])
    assert lists(policy.after(0, [torch.tensor([0, 2, 3, 4])], [None])) == [[2, 3, 4]]


def test_scissorhands():
    rows = torch.tensor([[[.5, .1, .3, .1, 0, 0], [.4, .1, .1, .2, .2, 0], [.3, .05, .25, .1, .1, .2]]])
    spec = {"name": "scissorhands", "budget": {"tokens": 4}, "window": 3, "recent": 2, "drop": 2}
    policy = policies.make(spec, model())
    assert lists(policy.prompt(0, prompt(6, last_rows=rows))) == [[0, 2, 4, 5]]
    assert [row.tolist() for _, row in policy.rows[0, 0]] == [[0, 1, 0, 1], [0, 1, 1, 0, 0], [0, 1, 0, 1, 1, 0]]
    kept = [torch.tensor([0, 2, 4, 5, 6])]
    policy.attended(0, None, None, kept, [torch.tensor([[.1, .1, .5, .2, .1]])])
    assert lists(policy.after(0, kept, [None])) == [[0, 2, 4, 5, 6]]  # two at once
    kept = [torch.tensor([0, 2, 4, 5, 6, 7])]
    policy.attended(0, None, None, kept, [torch.tensor([[.1, .1, .4, .2, .1, .1]])])
    # The last three rows found tokens 0 and 2 unimportant twice, 4 and 6 once, the others never or protected.
    assert lists(policy.after(0, kept, [None])) == [[4, 5, 6, 7]]


def test_raas():
    policy = policies.make({"name": "raas_tokens", "budget": {"tokens": 4}}, model())
    policy.stamp[0, 0] = {0: 7, 1: 3, 2: 9, 3: 3, 4: 40}
    assert lists(policy.after(0, [torch.arange(5)], [None])) == [[0, 2, 3, 4]]
    policy.stamp[0, 0], policy.steps[0] = {0: 5, 1: 6, 2: 7, 3: 8}, 11
    policy.attended(0, None, None, [torch.arange(4)], [torch.tensor([[.6, .39995, .00005, 0]])])
    assert policy.stamp[0, 0] == {0: 12, 1: 12, 2: 7, 3: 8}
    policy = policies.make({"name": "raas_tokens", "budget": {"tokens": 3}}, model())  # the prompt fits, so it stays
    assert lists(policy.prompt(0, prompt(2))) == [[0, 1]]
    policy.attended(0, None, None, [torch.arange(3)], [torch.tensor([[0, 0, 1.]])])
    policy.attended(0, None, None, [torch.arange(4)], [torch.tensor([[0, 0, 1., 0]])])
    assert lists(policy.after(0, [torch.arange(4)], [None])) == [[0, 1, 3]]


def test_raas_pages():
    spec = {"name": "raas", "page_size": 2, "budget": {"tokens": 9}, "threshold": 0.1}
    policy = policies.make({**spec, "page_size": 1, "budget": {"tokens": 5}}, model())
    pages, stamp = [[4], [5], [6], [7], [8]], [7, 3, 9, 3, 40]
    assert policy.evict(pages, stamp).tolist() == [4, 6, 7, 8] and stamp == [7, 9, 3, 40]  # of equal stamps the first
    # Bounds ln 6, ln 3, 0 and 0 of one query head are shares 6, 3, 1 and 1 of 11; of the other the second page has all.
    keys = torch.tensor([[math.log(6), 0], [-9, -9], [math.log(3), -9], [0, 99], [0, 0], [-1, 0], [0, 0.]])
    policy = policies.make({**spec, "stamps": True, "threshold": 0.05}, model(group=2))
    shares = policy.shares(torch.tensor([[1., 0], [0, 1]]), keys, [[0, 1], [2, 3], [4, 5], [6]])
    assert torch.allclose(shares, torch.tensor([3 / 11, (3 / 11 + 1) / 2, 1 / 22, 1 / 22]))
    policy.pages[0, 0], policy.stamp[0, 0], policy.now[0] = [[0, 1], [2, 3], [4, 5]], [5, math.inf, 7], 11
    policy.attended(0, torch.tensor([[1., 0], [0, 1]]), keys[None], [torch.arange(7)], None)
    assert policy.stamp[0, 0] == [12, math.inf, 7, 12]  # the new page has a stamp, though its share is too small
    assert lists(policy.after(0, [torch.arange(7)], None)) == [list(range(7))]  # the last page is not full
    policy.pages[0, 0][-1].append(7)
    assert lists(policy.after(0, [torch.arange(8)], None)) == [[0, 1, 2, 3, 6, 7]]
    # 6 tokens fit and stay, 7 do not and are as others, 8 are cut to the last query's best.
    rows = torch.tensor([.2, .01, .3, .02, .1, .2, .07, .1])
    for n, kept, stamp in ((6, range(6), math.inf), (7, range(7), 0), (8, [0, 2, 4, 5, 6, 7], 0)):
        policy = policies.make({**spec, "budget": {"tokens": 8}, "window": 1}, model())
        assert lists(policy.prompt(0, prompt(n, last_rows=rows[None, None, :n]))) == [list(kept)]
        assert policy.stamp[0, 0] == [stamp] * -(-len(kept) // 2)
    policy = policies.make({**spec, "sinks": 1, "window": 1, "budget": {"tokens": 8}, "dense_layers": 1}, model())
    assert policy.evict([[0, 1], [2, 3], [4, 5], [6, 7]], [0, 8, 9, 1]).tolist() == [0, 1, 4, 5, 6, 7]
    assert lists(policy.prompt(0, prompt(20))) == [list(range(20))]


def test_morphkv():
    # The method's example, one callback earlier: the newest query is that of the newest token.
    policy = policies.make({"name": "morphkv", "budget": {"tokens": 3}, "window": 1}, model())
    policy.queries[0] = [torch.tensor([[1.]])]
    assert policy.decide(0, 0, torch.tensor([[2.], [0], [1], [9]])).tolist() == [0, 2, 3]
    # Two queries: (2, 0, 1) gives shares .67 .09 .24, and (0, 1.6, 0) gives .14 .71 .14.
    policy.recent, policy.tokens = 2, 3
    policy.queries[0] = [torch.tensor([[1., 0]]), torch.tensor([[0, 1.]])]
    keys = torch.tensor([[2., 0], [0, 1.6], [1, 0], [9, 9], [9, 9]]) * 2**.5
    assert policy.decide(0, 0, keys).tolist() == [1, 3, 4]
    policy.fusion = "sum"
    assert policy.decide(0, 0, keys).tolist() == [0, 3, 4]


def test_keyformer():
    logits = torch.tensor([0, 0, math.log(2), 0, 0])
    policy = policies.make({"name": "keyformer", "budget": {"tokens": 4}, "recent": 50, "noise": False}, model())
    for tau, shares, total in ((1, [1 / 6, 1 / 6, 1 / 3, 1 / 6, 1 / 6], [1.3667, .6667, 1.2333, .2667, .1667]),
                               (2, [.1847, .1847, .2612, .1847, .1847], [1.3847, .6847, 1.1612, .2847, .1847])):
        got = policy.shares(0, 4, 0, logits, torch.arange(5), tau)
        assert torch.allclose(got, torch.tensor(shares), atol=5e-5)
        policy.score[0, 0] = torch.tensor([1.2, .5, .9, .1, 0]) + got
        assert torch.allclose(policy.score[0, 0], torch.tensor(total), atol=1e-4)
        assert policy.best(0, 0, torch.arange(5), None).tolist() == [0, 2, 3, 4]
    # Of 100 prompt tokens 60 stay: 18 recent ones, and 42 by their scores.
    policy = policies.make({"name": "keyformer", "budget": {"tokens": 60}, "noise": False}, model())
    policy.score[0, 0] = torch.arange(100.).flip(0)
    assert policy.best(0, 0, torch.arange(100), None).tolist() == list(range(42)) + list(range(82, 100))
    # Gumbel noise has the mean 0.5772 and the variance pi^2 / 6.
    policy = policies.make({"name": "keyformer", "budget": {"tokens": 4}}, model())
    noise = policy.noise(0, 3, 0, torch.arange(4096), torch.float64)
    assert abs(noise.mean() - .5772) < .06 and abs(noise.var() - math.pi**2 / 6) < .15
    assert not torch.equal(noise, policy.noise(1, 3, 0, torch.arange(4096), torch.float64))
    assert torch.equal(noise[7:9], policy.noise(0, 3, 0, torch.tensor([7, 8]), torch.float64))  # positions, not places
    fresh, one = (policies.make({"name": "keyformer", "budget": {"tokens": 4}, "fresh_noise": fresh}, model())
                  for fresh in (True, False))
    noises = [[p.noise(0, query, 0, torch.arange(9), torch.float64) for query in (0, 5)] for p in (fresh, one)]
    assert torch.equal(noises[0][0], noises[1][0]) and torch.equal(*noises[1]) and not torch.equal(*noises[0])


def test_criticalkv():
    score, norm = torch.tensor([.5, .3, .15, .05]), torch.tensor([1., 1, 4, 10])
    assert layer_policies.two_stages(score, norm, 2, .5, 1e-4).tolist() == [0, 2]
    assert layer_policies.two_stages(score, norm, 2, 1, 1e-4).tolist() == [0, 1]
    assert layer_policies.two_stages(score, norm, 2, 0, 1e-4).tolist() == [2, 3]
    # Two query heads of one KV head: W_0 v = (3, -1) and W_1 v = (2, 2), so the norms are 4 and 4; then 2 and 6.
    weight = torch.tensor([[1., 1, 2, 0], [1, -1, 0, 2]])
    assert layer_policies.projected_norms(torch.tensor([[[1., 2], [-1, 1], [3, 0]]]), weight, 2).tolist() == [[5, 3, 6]]


def test_second_stages():
    # The card's scores and sizes, and a pinned token at the end. W has one row, so a value's size is its own.
    spec = {"name": "h2o+criticalkv", "budget": {"tokens": 3}, "heavy": 0.7, "rescorer": {}}
    one = model()
    one.w = {"model.layers.0.self_attn.o_proj.weight": torch.ones(1, 1)}
    values, sums = torch.tensor([[[1.], [1], [4], [10], [1]]]), torch.tensor([[.5, .3, .15, .05, 9]])
    policy = policies.make(spec, one)
    assert lists(policy.prompt(0, prompt(5, v=values, column_sums=sums))) == [[0, 2, 4]]
    assert torch.equal(policy.scores[0][0], sums[0, [0, 2, 4]])
    # A query of 1 gives tokens 1 and 3 of all four the weights .2 and .8 of what quest reads of them.
    spec = {"name": "quest+twilight", "page_size": 1, "budget": {"tokens": 2}, "min_pages": 1, "dense_layers": 0,
            "pruner": {"p": 0.7, "dense_layers": 0}}
    keys = torch.tensor([[[0.], [1], [-9], [1 + math.log(4)], [-9]]])
    read, pages = policies.make(spec, model()).select(0, torch.ones(1, 1), keys, None)
    assert lists(read) == [[3, 4]] and pages is None
    spec["pruner"]["p"] = 0.9
    assert lists(policies.make(spec, model()).select(0, torch.ones(1, 1), keys, None)[0]) == [[1, 3, 4]]
    spec["pruner"]["dense_layers"] = 1
    assert lists(policies.make(spec, model()).select(0, torch.ones(1, 1), keys, None)[0]) == [[1, 3]]


def test_zigzag():
    assert layer_policies.tokens_of_mass(torch.tensor([[.5, .3, .15, .05], [1., 0, 0, 0]]), .9).tolist() == [3, 1]
    assert layer_policies.zigzag_budgets([10, 20, 30, 40], 100, 20, 1, 1000) == [52, 84, 116, 148]
    # Of 148 tokens the last layer has room for 120. Its 28 go to the others, and the third has room for 4.
    assert layer_policies.zigzag_budgets([10, 20, 30, 40], 100, 20, 1, 120) == [64, 96, 120, 120]
    assert layer_policies.zigzag_budgets([0, 0], 10, 2, 1, 100) == [10, 10]
    assert sum(layer_policies.zigzag_budgets([1, 1, 1], 33, 0, 1, 100)) == 99
    # Two queries before a window of two: means .5, .3, .15 and .05. The window's tokens have 1.5 of 4 each.
    rows = torch.tensor([[.5, .3, .15, .05, 0, 0]] * 2)[None]
    for mass, counts, need in ((.9, False, 3), (.9, True, 4), (.87, True, 3), (.7, True, 2)):
        spec = {"name": "zigzagkv", "budget": {"tokens": 4}, "window": 2, "pooling": "none", "mass": mass, "window_counts": counts}
        policy = policies.make(spec, model())
        policy.prompt(0, prompt(6, last_rows=rows))
        assert policy.held[0][1] == need, (mass, counts, policy.held[0][1])


def test_cake_budgets():
    rows = torch.tensor([[[.6, .2], [.2, .6]]])
    assert abs(layer_policies.cake_preference(rows, 1, 1) - .2011) < 5e-5
    assert abs(layer_policies.cake_preference(rows, 1.6, .4) - .01181) < 5e-6
    assert layer_policies.cake_budgets([1, 3], 100, 60) == [40, 60]
    assert layer_policies.cake_budgets([1, 1, 1], 100, 60) == [34, 33, 33]
    assert layer_policies.cake_budgets([0, 0], 100, 60) == [50, 50]


def test_layers_share():
    tiny = llama.Llama(os.path.join(TINY, "llama-gqa3"))
    ids = torch.randint(2, 320, (60,), generator=torch.Generator().manual_seed(3)).tolist()
    for name in ("criticalkv", "zigzagkv", "cake_over_layers"):
        spec = {"name": name, "budget": {"tokens": 16}, "window": 4, "every": 0}
        kept = reference.run(tiny, spec, ids[:48], ids[48:]).kept[0]
        counts = [len(layer[0]) for layer in kept]
        assert sum(counts) == 16 * tiny.layers, (name, counts)
        assert name == "zigzagkv" or (name == "criticalkv") == (len(set(counts)) == 1), (name, counts)


def test_newest_of_equals():
    scores = torch.tensor([1., 2, 1, 2, 1])
    assert evicting_policies.top_newest(scores, 1).tolist() == [3]
    assert evicting_policies.top_newest(scores, 3).tolist() == [1, 3, 4]


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


def test_duo_attention():
    spec = {"name": "duo_attention", "profile": {"gate": [[.9, .1, .5, .5]]}}
    assert policies.make(spec, model(4)).everything.tolist() == [[True, False, True, False]]
    kept = policies.make({**spec, "sinks": 64, "window": 256}, model(4)).prompt(0, prompt(1000))
    assert [len(head) for head in kept] == [1000, 320, 1000, 320]
    gates = {"gate": [[.1, .2, .4, .8, .9]]}
    for sparsity, heads in ((.25, 4), (.3, 3), (.5, 3), (.9, 1)):
        marks = policies.make({**spec, "profile": gates, "sparsity": sparsity}, model(5)).everything
        assert marks.tolist() == [[False] * (5 - heads) + [True] * heads]


def test_razor_attention():
    rising = [list(range(8 * layer, 8 * layer + 8)) for layer in range(32)]
    falling = [[256 - score for score in row] for row in rising]
    spec = {"name": "razor_attention", "profile": {"induction": rising, "echo": falling}}
    marks = policies.make(spec, model(8, layers=32)).everything
    assert marks.flatten().nonzero()[:, 0].tolist() == [0, 1, 2] + list(range(220, 256))
    # The card's case without the compensation token: 2 sinks and 4 newest tokens of 10.
    small = {**spec, "compensation": False, "sinks": 2, "window": 4, "window_share": 0, "induction": 0, "echo": 0,
             "profile": {"induction": [[0]], "echo": [[0]]}}
    assert lists(policies.make(small, model()).prompt(0, prompt(10))) == [[0, 1, 6, 7, 8, 9]]
    assert lists(policies.make({**small, "window_share": .6}, model()).prompt(0, prompt(10))) == [[0, 1, 4, 5, 6, 7, 8, 9]]


def test_omnikv():
    for score_by, first, wanted in (("last", (1, 5, 2, 0), [0, 1]), ("softmax_before_last", (1, 5, 2, 0), [0, 1]),
                                    ("last", (1, 20, 18, 0), [1, 2]), ("softmax_before_last", (1, 20, 18, 0), [0, 1])):
        spec = {"name": "omnikv", "budget": {"tokens": 2}, "filter_layers": "0", "wait_layers": 0, "score_by": score_by}
        policy = policies.make(spec, model(2))
        policy.prompt(0, prompt(4))
        keys = torch.tensor([[*first, 99], [4, 1, 3, 0, 99]]).reshape(2, 5, 1).float()
        kept = [torch.arange(5)] * 2
        assert policy.select(0, torch.ones(2, 1), keys, kept) == (kept, None)
        assert lists(policy.select(1, torch.ones(2, 1), keys, kept)[0]) == [[*wanted, 4]] * 2
    # The window of two has the query before the step's, and so token 3. Both heads of that query give .02, .03 and .95.
    keys = torch.tensor([[1., 5, 2, 0, 0], [4, 1, 3, 0, 0]])
    before = torch.tensor([.02, .03, .95, 1, 1]).log().expand(2, -1)
    step, earlier = torch.tensor([[2**.5, 0.]] * 2), torch.tensor([[0., 2**.5]] * 2)
    for score_by, wanted in (("uniform", [2, 3, 4]), ("exp", [1, 3, 4])):
        spec = {"name": "omnikv", "budget": {"tokens": 2}, "filter_layers": "0", "wait_layers": 0, "score_by": score_by, "queries": 2}
        policy = policies.make(spec, SimpleNamespace(kv_heads=2, group=1, layers=2, expand=lambda k: k))
        policy.prompt(0, prompt(4, q=torch.stack([torch.full((2, 2), 9.), torch.full((2, 2), 9.), step, earlier], 1)))
        both = torch.stack([keys, before], -1)
        policy.select(0, step, both, kept)
        assert lists(policy.select(1, step, both, kept)[0]) == [wanted] * 2


def test_sparq():
    spec = {"name": "sparq", "budget": {"tokens": 2}, "rank": 2, "local": 0}
    keys = torch.tensor([[[1., 0, 0, 0], [0, -2, 0, 0], [-1, 0, 4, 0]]])
    query, kept = torch.tensor([[2., -1, .5, 0]]), [torch.arange(3)]
    assert lists(policies.make({**spec, "budget": {"tokens": 3}}, model()).select(0, query, keys, kept)[0]) == [[0, 1, 2]]
    # The step's own token, the last, is always read. Of the equal others the first is.
    assert lists(policies.make(spec, model()).select(0, query, keys, kept)[0]) == [[0, 2]]
    # The sizes of the group add up to 2, 1, 3 and 0, so component 2 decides.
    both = torch.tensor([[2., -1, .5, 0], [0., 0, 2.5, 0]])
    scores = policies.make({**spec, "rank": 1}, model(1, 2))
    assert lists(scores.select(0, both, torch.cat([keys, torch.zeros(1, 1, 4)], 1), [torch.arange(4)])[0]) == [[2, 3]]


def test_arkvale():
    keys, q = torch.tensor([[1., -2], [3, 0], [5, 4], [-1, 2]]), torch.tensor([[1., -1]])
    for mean_radius, score in ((True, 5), (False, 7)):
        assert retrieval.box_scores(q, [keys], mean_radius).tolist() == [[score]]
    # The card's pages 1 to 7: the best two come, and the two lowest of those that may leave go.
    scores = dict(zip(range(1, 8), (9, 1, 2, 7, 3, 8, 0)))
    best = {1 + i for i in policies.top(torch.tensor(list(scores.values())), 2).tolist()}
    assert best == {1, 6}
    assert retrieval.resident_after({0, 3, 4, 5, 8, 9}, best | {0, 8, 9}, scores, 6) == {0, 1, 4, 6, 8, 9}


def test_twilight():
    weights = torch.tensor([.5, .2, .15, .1, .05], dtype=torch.float64)
    for share, expected in ((.8, [0, 1, 2]), (.6, [0, 1]), (.5, [0])):
        assert retrieval.fewest(weights, share).tolist() == expected
    assert retrieval.fewest(torch.tensor([.5, 0, .5]), 1).tolist() == [0, 2]
    assert torch.allclose(retrieval.four_bits(torch.tensor([-1.5, .13, 1.5])), torch.tensor([-1.5, .1, 1.5]))
    assert retrieval.four_bits(torch.tensor([2., 2, 2])).tolist() == [2, 2, 2]


def test_clusterkv():
    scores, members = torch.tensor([.6, 1.0, .1]), [[1, 4], [2, 3, 6], [5]]
    assert retrieval.whole_clusters(scores, members, 4) == [1, 2, 3, 6]  # and token 0, which is a sink
    assert retrieval.whole_clusters(scores, members, 2) == [2, 3] and retrieval.whole_clusters(scores, members, 0) == []
    # By cosine, length is nothing for the labels, but it is for the means.
    keys = torch.tensor([[1., 0], [9, 1], [0, 1], [.2, 4]])
    centroids, of_key = retrieval.k_means(keys, [0, 2], 3)
    assert of_key.tolist() == [0, 0, 1, 1] and torch.allclose(centroids, torch.tensor([[5, .5], [.1, 2.5]]).double())
    assert retrieval.k_means(keys, [0, 0], 0)[1].tolist() == [0, 0, 0, 0]
    assert retrieval.k_means(keys, [0, 0], 1)[0][1].tolist() == [1, 0]  # no key was nearest to it
    for seed in range(20):
        drawn = retrieval.first_keys(3, 10, seed, 1)
        assert len(set(drawn)) == 3 and drawn == sorted(drawn) and drawn[-1] < 10
    assert retrieval.first_keys(4, 4, 0, 0) == [0, 1, 2, 3]


def test_squeezed_attention():
    shares = retrieval.cluster_shares(torch.tensor([0, math.log(3)], dtype=torch.float64), torch.tensor([3., 1]).double())
    assert torch.allclose(shares, torch.tensor([1 / 6, 1 / 2]).double())
    policy = policies.make({"name": "squeezed_attention", "window": 1}, model())
    policy.heads[0, 0] = head = retrieval.Clusters(0)
    head.centroids, head.members, head.end = torch.tensor([[0.], [math.log(3)]]).double(), [[0, 2, 3], [1]], 4
    for threshold, expected in ((.3, [1, 4, 5]), (.1, [0, 1, 2, 3, 4, 5])):
        policy.threshold = threshold
        assert lists(policy.select(0, torch.tensor([[1.]]), torch.zeros(1, 6, 1), None)[0]) == [expected]


    policy.coarse[0, 0], policy.low = (retrieval.Clusters(4), torch.tensor([0, 1])), .3
    policy.coarse[0, 0][0].centroids, policy.coarse[0, 0][0].members = head.centroids, head.members
    policy.threshold = .4  # of two coarse clusters with shares 1/6 and 1/2 the second stays, and its token has all
    assert lists(policy.select(0, torch.tensor([[1.]]), torch.zeros(1, 6, 1), None)[0]) == [[1, 4, 5]]
    policy.threshold = 1
    assert lists(policy.select(0, torch.tensor([[1.]]), torch.zeros(1, 6, 1), None)[0]) == [[4, 5]]


def test_lserve():
    assert retrieval.group_scores(torch.tensor([1., 9, 5, 6]), 2).tolist() == [9, 6]
    spec = {"name": "lserve", "page_size": 2, "parts": 2, "tokens": 8, "choose_every": 2, "profile": {"gate": [[1., 0]]}}
    policy = policies.make(spec, model(kv_heads=2))
    keys = torch.zeros(2, 13, 1)
    keys[:, 3] = 1
    held = [torch.arange(13), torch.tensor([0, 1, 2, 3, 10, 11, 12])]
    read, pages = policy.select(0, torch.ones(2, 1), keys, held)
    assert lists(read) == [[0, 1, 2, 3, 12], [0, 1, 2, 3, 10, 11, 12]] and lists(pages) == [[0, 1, 6], [0, 1, 2, 3]]
    keys[:, 5] = 2  # the next step does not choose
    assert lists(policy.select(0, torch.ones(2, 1), torch.cat([keys, keys[:, :1]], 1), held)[1])[0] == [0, 1, 6]
    assert policy.choose(torch.ones(1, 1), keys[0]) == [2, 3, 6]
    assert policy.choose(torch.ones(1, 1), keys[0, :9]) == [0, 1, 2, 3, 4]


def test_infllm():
    keys = torch.tensor([[7., 7], [1, 0], [7, 7], [0, 1]])
    assert retrieval.representative(keys, torch.tensor([.1, .9, .3, .8]), 2).tolist() == [.5, .5]
    spec = {"name": "infllm", "page_size": 2, "block": 2, "sinks": 1, "window": 1, "top": 1, "clamped_scores": False}
    turned = SimpleNamespace(kv_heads=1, group=1, heads=1, layers=1, expand=lambda keys: keys)
    policy = policies.make(spec, turned)
    policy.vectors[0] = [torch.tensor([[.5, .5]]), torch.tensor([[.9, -1]])]
    read, pages = policy.select(0, torch.tensor([[2., 0]]), torch.zeros(1, 7, 2), None)
    assert lists(pages) == [[0, 2, 3]] and lists(read) == [[0, 1, 4, 5, 6]]
    turns = []
    policy.model.rotate = lambda keys, places: (turns.append(places.tolist()), keys)[1]
    policy.clamped(torch.zeros(4, 2), torch.tensor([0, 1, 4, 6]), 6)  # a window of 1: no further than 1
    assert turns == [[5, 4, 1, 0]]


def test_infllm_prompt():
    """A window of 4 and chunks of 4: the first reads itself; the third reads one of the blocks that left the window, 0-1 or 2-3."""
    spec = {"name": "infllm", "page_size": 2, "block": 2, "sinks": 0, "window": 4, "top": 1, "clamped_scores": False,
            "positions": "original", "prompt_chunk": 4, "representatives": 1}
    keys = torch.tensor([[1., 0], [1, 0], [0, 1], [0, 1], [0, 0], [0, 0], [0, 0], [0, 0], [0, 0], [0, 0], [0, 0], [0, 0]])
    queries, values = torch.tensor([[0., 0]] * 8 + [[-1, 0], [0, 3], [0, 3], [-9, 0]]), torch.eye(12)
    one = SimpleNamespace(kv_heads=1, group=1, heads=1, layers=1, expand=lambda keys: keys)
    policy = policies.make(spec, one)
    out = policy.attend_in_prompt(0, queries[None], keys[None], values[None])
    # Text 8 has blocks 0 and 1. The mean query of the third chunk, (-2.5, 1.5), likes block 1.
    assert policy.prompt_pages[0] == [[], [0, 1, 2, 3], [1, 2, 3, 4, 5]]
    assert len(policy.vectors[0]) == 4
    assert torch.allclose(out[5], torch.tensor([1 / 6] * 6 + [0] * 6))  # what came later is not there
    assert out[8, :2].tolist() == [0, 0] and abs(out[8, 2:9].sum() - 1) < 1e-6 and out[8, 9:].tolist() == [0, 0, 0]
    # While it is among the newest four, token 4 gets 1/5, 1/6, 1/7 and 1/8. Token 0 got 1, 1/2, 1/3 and 1/4.
    assert torch.allclose(policy.mass[0][0, [0, 4]], torch.tensor([25 / 12, 1 / 5 + 1 / 6 + 1 / 7 + 1 / 8]))
    whole = policies.make({**spec, "window": 12}, one)
    assert whole.attend_in_prompt(0, queries[None], keys[None], values[None])[11, 0] > 0
    assert whole.prompt_pages[0] == [[], [], []]
    assert policies.make({**spec, "prompt_retrieval": False}, one).attend_in_prompt(0, None, None, None) is None


def test_infinigen():
    scores = torch.tensor([[9, 6.2, 5.1, 4.9, 1], [3, 2.9, 2.5, -1.5, -.5]])
    assert retrieval.near_greatest(scores, 4) == 3
    policy = policies.make({"name": "infinigen", "dense_layers": 1}, model(kv_heads=2))
    policy.channels[1], policy.guessed[1] = [torch.tensor([0])] * 2, torch.ones(2, 1)
    keys = torch.cat([scores, torch.zeros(2, 1)], 1)[..., None]
    assert lists(policy.select(1, torch.ones(2, 1), keys, None)[0]) == [[0, 1, 2, 5]] * 2
    tiny, ids = llama.Llama(os.path.join(TINY, "llama-gqa3"), torch.float64), list(range(2, 62))
    matrices = retrieval.skewing_matrices(tiny, ids)
    assert len(matrices) == tiny.layers * tiny.kv_heads
    q = tiny.rotate(tiny.qkv(0, tiny.embed(ids))[0], torch.arange(60))[:tiny.group].reshape(-1, tiny.head_dim)
    turned = matrices[0, 0]
    assert torch.allclose(turned @ turned.T, torch.eye(tiny.head_dim, dtype=torch.float64), atol=1e-9)
    products = (q @ turned).T @ (q @ turned)  # columns at right angles to each other, the longest first
    assert torch.allclose(products, products.diag().diag(), atol=1e-8) and (products.diag().diff() <= 0).all()


def test_shadowkv():
    chunks = torch.tensor([[[1., 0], [0, 1]], [[1, 0], [1, .1]]])
    assert retrieval.outlier_chunks(chunks, 1) == [0] and retrieval.outlier_chunks(chunks, 9) == [0, 1]
    x = torch.tensor([[2., 0, 0], [0, 1, 0], [0, 0, .5]])
    assert torch.allclose(retrieval.low_rank(x, 2), torch.diag(torch.tensor([2., 1, 0])), atol=1e-6)
    policy = policies.make({"name": "shadowkv", "budget": {"tokens": 416}}, model())
    policy.prompt(0, prompt(8195, k=torch.randn(1, 8195, 2, generator=torch.Generator().manual_seed(0))))
    assert policy.landmarks[0].shape[1] == 1020 and 8195 - policy.end == 35


def test_think():
    assert retrieval.channels_that_stay(torch.tensor([4, 1, .25, 0]), torch.tensor([.1, 1, 4, 9]), .5).tolist() == [1, 2]
    policy = policies.make({"name": "think", "ratio": .5, "window": 1, "recent": 1}, model())
    keys = policy.rewritten(0, prompt(2, q=torch.tensor([[[9., 9], [1, 2]]]), k=torch.ones(1, 2, 2)))
    assert keys.tolist() == [[[0, 1], [1, 1]]]


def test_fastgen():
    rows = torch.tensor([[1., 0, 0, 0, 0], [.6, .4, 0, 0, 0], [.5, .3, .2, 0, 0], [.4, .1, .4, .1, 0], [.3, .1, .2, .2, .2]])
    folder = os.path.join(TINY, "llama-gqa3")
    spec = {"name": "fastgen", "sinks": 0, "local": False}
    for recovery, rule, expected in ((.5, 0, [0]), (.6, 1, [0, 3]), (.95, 2, [0, 1, 2, 3]), (.97, 4, [0, 1, 2, 3, 4])):
        policy = policies.make({**spec, "recovery": recovery}, SimpleNamespace(kv_heads=1, group=1, path=folder))
        policy.special, policy.punctuation, policy.text = {7}, {8}, [7, 1, 1, 8, 1]
        assert lists(policy.prompt(0, prompt(5, last_rows=rows[None]))) == [expected]
        assert policy.rule[0, 0] == rule
    for kept, share in (({0}, .56), ({0, 3}, .62), ({0, 1, 2, 3}, .96)):
        marks = torch.tensor([[p in kept for p in range(5)]])
        assert abs(retrieval.recovered(rows[None], marks) - share) < 1e-6
    # Another head of the group looks at all tokens alike: 2.28 / 5 fall on token 0, and 2.73 / 5 on {0, 3}.
    both = torch.stack([rows, torch.ones(5, 5).tril() / torch.arange(1, 6)[:, None]])
    for group, rule in (("mean", 0), ("min", 1)):
        policy = policies.make({**spec, "recovery": .5, "group": group}, SimpleNamespace(kv_heads=1, group=2, path=folder))
        policy.special, policy.punctuation, policy.text = {7}, {8}, [7, 1, 1, 8, 1]
        policy.prompt(0, prompt(5, last_rows=both))
        assert policy.rule[0, 0] == rule
    kinds = retrieval.token_kinds(folder)
    assert kinds["special"] == {0, 1} and {2, 13, 15} <= kinds["punctuation"] and 17 not in kinds["punctuation"]


def test_freekv():
    spec = {"name": "freekv", "sinks": 512, "window": 512, "budget": {"tokens": 2048}, "page_size": 32}
    policy = policies.make(spec, model())
    assert len(policy.pinned(8192)) == 32
    keys = torch.randn(8192, 2, generator=torch.Generator().manual_seed(0))
    policy.choose(0, 0, torch.ones(1, 2), keys)
    assert len(policy.chosen[0, 0]) == 32 and not policy.chosen[0, 0] & policy.pinned(8192)
    for scores, expected in (([[10, 9, 0], [0, 9.5, 10.5]], {"softmax_mean": [0, 2], "mean": [1, 2], "max": [0, 2]}),
                             ([[40, 20, 0], [0, 2, 3]], {"softmax_mean": [0, 2], "mean": [0, 1], "max": [0, 1]})):
        for policy.group, pages in expected.items():
            assert policies.top(policy.reduced(torch.tensor(scores, dtype=torch.float64)), 2).tolist() == pages
    for more in ({"threshold": 0.8}, {"threshold": -1}, {"correction": False}):
        policy = policies.make({"name": "freekv", **more}, model(group=2))
        assert policy.turned(1, torch.ones(2, 2)) == [True]
        policy.queries[1] = torch.tensor([[1., 0], [1, 0]])
        assert policy.turned(1, torch.tensor([[0., 1], [0, 1]])) == [more == {"threshold": 0.8}]
    policy = policies.make({"name": "freekv", "threshold": 0.8}, model(group=2))
    for second, turned in ((.6, True), (.72, False)):
        policy.queries[1] = torch.tensor([[1., 0], [1, 0]])
        assert policy.turned(1, torch.tensor([[.9, (1 - .9**2)**.5], [second, (1 - second**2)**.5]])) == [turned]


def test_flexicache():
    assert offloading.page_bounds(torch.tensor([[1., -1]]), torch.tensor([[-1., 4], [5, -2]]), 2).tolist() == [[7]]
    spec = {"name": "flexicache", "budget": {"tokens": 4}, "page_size": 2, "rerank_every": 2, "keep_new": False,
            "profile": {"unstable": [[0, 1]]}}
    keys = torch.tensor([[0., 5], [0, 4], [3, 0], [2, 0], [1, 1], [1, 1], [0, 0]]).expand(2, 7, 2)
    policy = policies.make(spec, model(kv_heads=2))
    policy.prompt(0, prompt(6, q=torch.tensor([[[0., 1]]] * 2), k=keys[:, :6]))
    turned = torch.tensor([[1., 0]] * 2)
    assert lists(policy.select(0, turned, keys, None)[1]) == [[0, 2, 3], [1, 2, 3]]  # the stable head reads the old ones
    policy.attended(0, turned, keys, None, None)
    assert lists(policy.select(0, -turned, keys, None)[1]) == [[1, 2, 3], [0, 3]]  # the step is not due
    waits = policies.make({**spec, "overlap": False}, model(kv_heads=2))
    assert lists(waits.select(0, turned, keys, None)[1]) == [[1, 2, 3]] * 2


def test_magicpig():
    def chance(degrees, bits, tables):
        return sampling.chance(torch.tensor(math.cos(math.radians(degrees))), bits, tables, 2).item()
    assert abs(chance(90, 1, 2) - .25) < 1e-6 and abs(chance(60, 10, 150) - .7356) < 1e-4 and chance(30, 10, 150) > .9999
    normals = torch.tensor([sampling.planes(seed, 0, 16, 4, 8).std().item() for seed in range(50)])
    assert abs(normals.mean() - 1) < .01
    x, y = torch.randn(2, 200, 16, generator=torch.Generator().manual_seed(1))
    same = torch.stack([(sampling.bits_of(x, planes) == sampling.bits_of(y, planes)).all(1)
                        for planes in (sampling.planes(seed, 0, 16, 2, 40) for seed in range(20))]).float().mean((0, 2))
    expected = sampling.chance(torch.cosine_similarity(x, y), 2, 1, 1)
    assert abs((same - expected).mean()) < .005 and (same - expected).abs().max() < .1


def test_subgen():
    sketch = sampling.Sketch(1, 4, 1, 2)
    assert sketch.add(torch.zeros(1), torch.tensor([1.]), [0, 0, 0]) == [0, 0, -1, 0, 1]
    assert sketch.add(torch.zeros(1), torch.tensor([3.]), [.6, .95, .85]) == [0, -1, 1]
    policy = policies.make({"name": "subgen", "samples": 1, "values": 2}, model())
    policy.heads[0, 0] = sketch
    nothing = torch.zeros(0, 1)
    assert abs(policy.attend(0, 0, torch.zeros(1, 1), nothing, nothing)[0].item() - 10 / 3) < 1e-6
    both = policy.attend(0, 0, torch.zeros(1, 1), torch.zeros(1, 1), torch.tensor([[7.]]))[0].item()  # and an exact token
    assert abs(both - (20 / 3 + 7) / 3) < 1e-6
    assert sketch.add(torch.tensor([2.]), torch.zeros(1), [0, 0, 0]) == [1, 0, -1]  # a value of zeros is never drawn
    assert [cluster[1] for cluster in sketch.clusters] == [2, 1]


def test_tova():
    rows = torch.tensor([[.5, .1, .2, .2], [.1, .1, .6, .2]])
    tova = policies.make({"name": "tova", "budget": {"tokens": 3}}, model(kv_heads=2))
    assert lists(tova.prompt(0, prompt(4, last_rows=rows[:, None]))) == [[0, 2, 3]] * 2
    for keep_last, expected in ((False, [0, 1, 2]), (True, [0, 2, 3])):
        tova = policies.make({"name": "tova", "budget": {"tokens": 3}, "keep_last": keep_last}, model())
        tova.attended(0, None, None, None, [torch.tensor([[.3, .1, .55, .05]])])
        assert lists(tova.after(0, [torch.arange(4)], [None])) == [expected]


def test_keydiff():
    keys = torch.tensor([[[2., 0], [1, 0], [0, 1], [3, 0]]])  # the anchor is (3, 1) / 4
    assert lists(policies.make({"name": "keydiff", "budget": {"tokens": 2}}, model()).prompt(0, prompt(4, k=keys))) == [[0, 2]]


def test_expected_attention():
    tiny = llama.Llama(os.path.join(TINY, "llama-gqa3"), torch.float64)
    rotation = scoring.mean_rotation(tiny, 16, 100, 3)
    x, positions = torch.randn(1, 1, 16).double(), torch.tensor([100, 101, 102])
    assert torch.allclose(rotation @ x[0, 0], tiny.rotate(x.expand(1, 3, 16), positions)[0].mean(0))
    # The queries (1, +-sqrt(2)) have the mean (1, 0) and the variance 2 along the second axis.
    fixed = SimpleNamespace(kv_heads=1, dtype=torch.float64, rotate=lambda x, positions: x, expand=lambda keys: keys)
    q, k = torch.tensor([[[1., 2**.5], [1, -2**.5]]]), torch.tensor([[[1., 0], [0, 1]]])
    v = torch.tensor([[[1., 0], [0, 2]]])
    for more, expected in (({}, [.5516, .8968]), ({"values": False}, [.5516, .4484]),
                           ({"values": False, "covariance": False}, torch.tensor([.5**.5, 0]).softmax(0).tolist())):
        policy = policies.make({"name": "expected_attention", "sinks": 0, **more}, fixed)
        assert torch.allclose(policy.score(q, k, v, 2)[0], torch.tensor(expected).double(), atol=1e-4)


def test_oracle():
    policy = policies.make({"name": "oracle", "page_size": 2, "budget": {"tokens": 2}, "min_pages": 1, "dense_layers": 0},
                           SimpleNamespace(kv_heads=1, group=1, expand=lambda keys: keys))
    keys = torch.tensor([[[3.], [0], [2.9], [2.9], [3.2]]])
    assert lists(policy.select(0, torch.ones(1, 1), keys, None)[1]) == [[1]]


def test_oracle_evict():
    policy = policies.make({"name": "oracle_evict", "budget": {"tokens": 2}}, model())
    policy.future = [torch.tensor([[[.1, .2, .6, .1, 0], [.5, .1, .1, .1, .2]]])]  # of two decode steps, at positions 3 and 4
    assert lists(policy.prompt(0, prompt(3))) == [[0, 2]]  # sums .6, .3, .7
    assert lists(policy.after(0, [torch.tensor([0, 2, 3])], [None])) == [[0, 3]]  # .5, .1 and the newer .1 of what is to come
    assert lists(policy.after(0, [torch.tensor([0, 3, 4])], [None])) == [[3, 4]]  # nothing is: the newest
    pinned = policies.make({"name": "oracle_evict", "budget": {"tokens": 2}, "sinks": 1, "every": 0}, model())
    pinned.future = [torch.tensor([[[.0, .2, .6]]])]
    assert lists(pinned.prompt(0, prompt(3))) == [[0, 2]]
    tiny = llama.Llama(os.path.join(TINY, "llama-gqa3"))
    ids = torch.randint(2, 320, (20,), generator=torch.Generator().manual_seed(5)).tolist()
    everything = policies.make({"name": "oracle_evict", "budget": {"tokens": 20}}, tiny)
    everything.text = ids
    everything.look_ahead(15)
    assert [rows.shape for rows in everything.future] == [(tiny.kv_heads, 5, 20)] * tiny.layers
    assert torch.allclose(everything.future[-1].sum(-1), torch.ones(tiny.kv_heads, 5), atol=1e-5)


def test_kvquant():
    def coder(**spec):
        fixed = SimpleNamespace(kv_heads=2, group=1, layers=1, rotate=lambda x, positions: x)
        return policies.make({"name": "kvquant", "bits": 2, **spec}, fixed)
    book = [[-2., -1, 1, 2, -1, 0, .5, 1] + [0.] * 24]  # levels of 2 bits after Q-Norm, then the entries
    profile = {"key_lower": [[0., 0]], "key_upper": [[4., 2]], "key_codebook": book, "value_codebook": book}
    keys, values = torch.tensor([[[.6], [5]], [[1.3], [-1]]]), torch.tensor([[[0.], [3]], [[4], [3]]])
    for more, expected in (({}, [[-2., 5], [2, -1]]),  # -.7 and .3 of the reach are next to -1 and .5; the levels -2 and 1
                           ({"q_norm": False}, [[0., 5], [1.5, -1]]), ({"outliers": False}, [[-2., 6], [2, -1]]),
                           ({"dense_tokens": 1}, [[.6, 5], [1.3, -1]])):
        k, v = keys.clone(), values.clone()
        coder(profile=profile, **more).finish_cache([k], [v])
        assert torch.allclose(k[:, :, 0], torch.tensor(expected)), (more, k)
    # Without a profile a token's keys share thresholds, here 0 and 4 (outliers off), and entries are -1, -1/3, 1/3 and 1.
    k, v = torch.tensor([[[0., 1.2]], [[2.9, 4]]]), torch.tensor([[[0., 1]], [[2, 3]]])
    coder(calibration=False, outliers=False).finish_cache([k], [v])
    assert torch.allclose(k.flatten(), torch.tensor([0., 4 / 3, 8 / 3, 4])) and torch.allclose(v.flatten(), torch.tensor([0., 1, 2, 3]))
    # Of these 4 numbers a share of .5 has the thresholds .9 and 2.25: those beyond stay.
    policy = coder(calibration=False, outlier_share=.5)
    k = torch.tensor([[[0., 1.2]], [[2, 3]]])
    policy.finish_cache([k], [k.clone()])
    assert torch.allclose(k.flatten(), torch.tensor([0., 1.35, 1.8, 3])) and policy.decisions[0, 1][0] == [2, -1]
    tiny = llama.Llama(os.path.join(TINY, "llama-gqa3"))
    of_text = coding.calibrated(tiny, list(range(2, 100)), .1, True)
    assert {name: [len(row) for row in rows] for name, rows in of_text.items()} == {
        "key_lower": [tiny.kv_heads * tiny.head_dim] * tiny.layers, "key_upper": [tiny.kv_heads * tiny.head_dim] * tiny.layers,
        "key_codebook": [32] * tiny.layers, "value_codebook": [32] * tiny.layers, "outlier_share": [1]}
    assert all(row[4:8] == sorted(row[4:8]) and abs(row[0]) > abs(row[4]) for row in of_text["key_codebook"])


def test_heterocache():
    roles = [[2, 1, 3, 3, 3, 3, 3, 3]]
    spec = {"name": "heterocache", "budget": {"tokens": 500},
            "profile": {"role": roles, "pivot_of": [[-1, -1] + [0] * 6], "stable": [[1, 1, .9, .8, .6, .5, .5, .4]]}}
    policy = policies.make(spec, model(kv_heads=8))
    tokens, base = policy.divide(1000)
    assert base == 333 and tokens.tolist() == [[1000, 1000, 210, 237, 316, 379, 379, 474]]
    pooled = policies.make({**spec, "kernel": 3}, model()).pooled(torch.tensor([[.6, 0, 0, .3], [0, .3, .3, 0]]))
    assert torch.allclose(pooled, torch.tensor([.2, .2, .2, .1]))
    pivot = {"role": [[2, 3]], "pivot_of": [[-1, 0]], "stable": [[1, 1]]}
    for threshold, drifts, beside in ((.5, False, False), (.6, True, False), (.6, True, True)):
        policy = policies.make({**spec, "profile": pivot, "threshold": threshold, "asynchrony": beside}, model(kv_heads=2))
        policy.n, policy.of_base, policy.own[0, 1] = 8, 4, 2
        policy.base[0, 0], policy.overlaps[0, 0], policy.steps[0] = {1, 2, 3, 4}, [1., .5, .25, .25], 4
        policy.scores = {0: torch.tensor([.1, .6, .7, .8, .2, .0, .0, .9])}  # 3 of 4 are among the best
        kept = policy.after(0, [torch.arange(9), torch.tensor([1, 2, 8])], None)
        if beside:
            assert lists(kept)[1] == [1, 2, 8]
            policy.scores = {}
            kept = policy.after(0, kept, None)
        assert lists(kept)[1] == ([3, 7, 8] if drifts else [1, 2, 8])


def test_minicache():
    former, own = layer_policies.shared_direction(torch.tensor([[0., 3]]), torch.tensor([[2., 0]]), .6, 0)
    assert torch.allclose(own, torch.tensor([[1.6180, 1.1756]]), atol=1e-4)
    assert torch.allclose(former, torch.tensor([[2.4271, 1.7634]]), atol=1e-4)
    a, b = torch.tensor([[1., 0], [0, 1]]), torch.tensor([[1., .1], [1, 0]])
    former, own = layer_policies.shared_direction(a, b, .6, .5)
    assert former[1].tolist() == [0, 1] and own[1].tolist() == [1, 0] and not torch.equal(own[0], b[0])


def test_compensation():
    spec = {"name": "razor_attention", "sinks": 2, "window": 4, "window_share": 0.0, "induction": 0, "echo": 0,
            "profile": {"induction": [[0.]], "echo": [[0.]]}}
    policy = policies.make(spec, model())
    values = torch.arange(10.)[None, :, None]
    assert lists(policy.prompt(0, prompt(10, k=torch.zeros(1, 10, 1), v=values))) == [[0, 1, 6, 7, 8, 9]]
    # All keys are alike, so four tokens with their mean give what they would have given themselves.
    held = torch.zeros(6, 1), values[0, [0, 1, 6, 7, 8, 9]]
    assert abs(policy.attend(0, 0, torch.ones(1, 1), *held)[0].item() - 4.5) < 1e-6


def test_budgets():
    def pyramid(n, layer):
        return policies.split_budget({"tokens": 128, "split": "pyramid"}, layer, 32, torch.zeros(1, n - 8), 8)[0]
    assert (pyramid(1000, 0), pyramid(1000, 31), sum(pyramid(1000, layer) for layer in range(32))) == (242, 25, 4272)
    assert {pyramid(200, layer) for layer in range(32)} == {128}
    scores = torch.tensor([[.9, .8, .7, .6, .5, .4], [.35, .2, .1, .05, .01, .001]])
    for floor, expected in ((.5, [5, 3]), (.2, [5, 2])):
        assert policies.split_budget({"tokens": 4, "split": "adakv", "floor": floor}, 0, 1, scores, 0) == expected
    spec = {"tokens": 4, "split": "adakv", "floor": 0.2, "exact_total": True}  # 4.8 and 1.6
    assert policies.split_budget(spec, 0, 1, scores, 0) == [6, 2]
    spec = {"tokens": 128, "split": "pyramid", "exact_total": True}
    kept = [policies.split_budget(spec, layer, 32, torch.zeros(1, 992), 8)[0] for layer in range(32)]
    assert kept[0] == 242 and kept[31] == 14 and sum(kept) == 32 * 128


def test_head_profile():
    def tokens(weights, each, n, floor, pins=0):
        spec, counts = {"tokens": each, "split": "head_profile", "weights": "gate", "floor": floor}, []
        rows = [weights[:2], weights[2:]]
        for layer in range(2):
            counts += policies.split_budget(spec, layer, 2, torch.zeros(2, n - pins), pins, {"gate": rows})
        return counts
    # 20 of each 100 stay, and 320 more go by tenths.
    assert tokens([1, 2, 3, 4], 100, 1000, .2) == [52, 84, 116, 148]
    # Of 148 tokens the last head has room for 120, then the third of 130 for 120. 120 more give the others 40 and 80.
    assert tokens([1, 2, 3, 4], 100, 120, .2) == [60, 100, 120, 120]
    assert tokens([2, 2, 1, 1], 7, 100, 0) == [9, 9, 5, 5]  # the largest remainders, of equal ones the first
    assert tokens([1, 0, 0, 0], 10, 19, 0) == [19, 7, 7, 7]
    assert tokens([1, 2, 3, 4], 108, 1000, .2, pins=8) == [60, 92, 124, 156]
    policy = policies.make({"name": "knorm", "budget": {"tokens": 2, "split": "head_profile", "weights": "gate", "floor": 0},
                            "profile": {"gate": [[3, 1]]}}, model(kv_heads=2))
    assert lists(policy.prompt(0, prompt(4, k=torch.tensor([[[1.], [5], [2], [.5]]] * 2)))) == [[0, 2, 3], [3]]


def test_int8():
    x = torch.tensor([[-1., 0, .33, 2], [3., 3, 3, 3]])
    decoded = policies.codes_per_token(x, *policies.CODECS["int8"])
    assert (decoded - x).abs().max() <= 3 / 255 / 2 + 1e-3 and decoded[1].tolist() == [3.0] * 4
    decoded = policies.codes_per_token(x[:1], *policies.CODECS["int4"])  # units of .2 from -1 on
    assert (decoded - torch.tensor([[-1, 0, .4, 2]])).abs().max() < 2e-3
    decoded = policies.codes_per_token(torch.tensor([[-1., .05, 2.75]]), *policies.CODECS["atom"])  # units of .25 from -1
    assert decoded.tolist() == [[-1, 0, 2.75]]


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
