#!/usr/bin/env python3
"""Compares a replay with live runs of the same policies: compare.py LIVE.h5 REPLAY.h5 (needs h5py).

Prints a row per policy, the largest differences of mass, and how alike three orders of the policies are: by replayed
mass, by live mass and by live KL."""
import itertools
import json
import sys

import h5py


def cells(path):
    """The rows of /summary that ended well, by policy, parameters, task and seed, and their fidelity arrays."""
    out = {}
    with h5py.File(path) as file:
        for row in file["summary"]:
            text = {k: row[k].decode() if isinstance(row[k], bytes) else row[k] for k in row.dtype.names}
            if text["status"] != "ok":
                sys.exit(f"{path}: {text['policy']}: {text['error']}")
            group = file[f"cells/{text['cell']}/fidelity"]
            arrays = {name: group[name][()] for name in ("mass", "page_recall")}
            out[text["policy"], text["params"], text["task"], text["seed"]] = text, arrays
    return out


def ranks(values):
    """Ranks from 1; equal values share their mean rank."""
    return [1 + sum(v < x for v in values) + (sum(v == x for v in values) - 1) / 2 for x in values]


def spearman(a, b):
    a, b = ranks(a), ranks(b)
    mean = (len(a) + 1) / 2
    norm = (sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)) ** 0.5
    return sum((x - mean) * (y - mean) for x, y in zip(a, b)) / norm


def kendall(a, b):
    """Tau-b, and the pairs of places that the two lists order otherwise."""
    same, other, tied_a, tied_b, pairs = 0, [], 0, 0, 0
    for i, j in itertools.combinations(range(len(a)), 2):
        x, y = a[i] - a[j], b[i] - b[j]
        pairs, tied_a, tied_b = pairs + 1, tied_a + (x == 0), tied_b + (y == 0)
        same += x * y > 0
        if x * y < 0:
            other.append((i, j))
    return (same - len(other)) / ((pairs - tied_a) * (pairs - tied_b)) ** 0.5, other


def largest(live, replay, layers):
    """The largest difference of two arrays [token, layer] in those layers; a token without a decode step has NaN."""
    return max(abs(x - y) for a, b in zip(live, replay) for x, y in list(zip(a, b))[layers] if x == x)


def budget(params):
    amount = json.loads(params).get("budget", {})
    return str(amount.get("tokens", amount.get("ratio", "-")))


def main(live_path, replay_path):
    live, replay = cells(live_path), cells(replay_path)
    if live.keys() != replay.keys():
        sys.exit("got files with other policies, tasks or seeds, wanted the same in both")
    names = [f"{key[0]} {budget(key[1])}" for key in live]
    print(f"{'policy':26} {'mass, replay':>12} {'live':>8} {'recall, replay':>14} {'KL, live':>10} {'layer 0':>9} "
          f"{'all layers':>10}")
    for key, name in zip(live, names):
        (l, la), (r, ra) = live[key], replay[key]
        first = largest(la["mass"], ra["mass"], slice(0, 1))
        every = largest(la["mass"], ra["mass"], slice(None))
        print(f"{name:26} {r['mass']:12.4f} {l['mass']:8.4f} {r['page_recall']:14.4f} {l['kl']:10.3g} {first:9.1e} "
              f"{every:10.1e}")
    replayed = [replay[key][0]["mass"] for key in live]
    lively = [live[key][0]["mass"] for key in live]
    near = [-live[key][0]["kl"] for key in live]
    for what, a, b in (("replayed mass and live mass", replayed, lively), ("replayed mass and live KL", replayed, near),
                       ("live mass and live KL", lively, near)):
        tau, other = kendall(a, b)
        pairs = len(a) * (len(a) - 1) // 2
        print(f"{what}: Spearman {spearman(a, b):.3f}, Kendall {tau:.3f}, {len(other)} of {pairs} pairs otherwise")
        if what == "replayed mass and live KL":
            for i, j in other:
                print(f"  {names[i]} (mass {a[i]:.3f}, KL {-b[i]:.2g}), {names[j]} ({a[j]:.3f}, {-b[j]:.2g})")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
