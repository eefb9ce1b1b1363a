#!/usr/bin/env python3
"""Values that the tests of paired statistics want. Usage: paired.py [FOLDER | --check]

It shares no code with the C++. Tests are sums of exact fractions; where scipy is installed, its binomtest and
permutation_test must agree. Connor's formula is solved with the standard library's normal distribution.
"""
import itertools
import json
import math
import os
import sys
from fractions import Fraction
from statistics import NormalDist

try:
    from scipy import stats
except ImportError:
    stats = None

TABLES = [(0, 1), (1, 0), (6, 0), (5, 0), (6, 1), (3, 3), (12, 4), (40, 21), (100, 130)]  # lost, won
SUMS = [[3, 1, -2], [2, 2, 2, -1, 4, -3], [0.5, 0.25, -0.125], [0.3, 0.1, 0.7, 0.2, -0.4, 0.9, 0.05],
        [round(0.05 + 0.1 * ((7 * i) % 11) - 0.3, 3) for i in range(20)]]
PAIRED = [(7, 1, 21), (1, 0, 44), (0, 14, 100), (3, 5, 20), (40, 21, 300), (2, 2, 6)]  # lost, won, pairs
NEEDED = [(30, 0), (30, 0.1), (100, 0), (100, 0.1), (500, 0.02), (8, 0)]  # pairs, churn


def mcnemar(lost, won):
    n = lost + won
    tail = sum(Fraction(math.comb(n, k), 2**n) for k in range(min(lost, won) + 1))
    return min(Fraction(1), 2 * tail)


def sign_flips(sums):
    """The distribution of the total over all signs, in exact fractions."""
    exact = [Fraction(str(s)) for s in sums]
    chance = {Fraction(0): Fraction(1)}
    for s, sign in itertools.groupby(exact):
        for _ in sign:
            after = {}
            for total, p in chance.items():
                for t in (total + s, total - s):
                    after[t] = after.get(t, 0) + p / 2
            chance = after
    return sum(p for total, p in chance.items() if abs(total) >= abs(sum(exact)))


def detectable(n, churn):
    a, b = NormalDist().inv_cdf(0.975), NormalDist().inv_cdf(0.8)
    low, high = 0.0, 1.0 - churn
    for _ in range(200):
        x = (low + high) / 2
        enough = n * x**2 >= (a * math.sqrt(x + churn) + b * math.sqrt(x + churn - x * x)) ** 2
        low, high = (low, x) if enough else (x, high)
    return high


def likeliest(f, low, high):
    """Where a concave function is greatest."""
    for _ in range(200):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        low, high = (a, high) if f(a) < f(b) else (low, b)
    return (low + high) / 2


def score_interval(lost, won, n):
    """Differences x that a score test of 5 % keeps (Tango 1998). The share of losses is found by its likelihood, with x given."""
    z = NormalDist().inv_cdf(0.975)

    def kept(x):
        def likelihood(share):
            terms = [(won, share + x), (lost, share), (n - won - lost, 1 - 2 * share - x)]
            return sum(count * math.log(p) if p > 0 else -math.inf for count, p in terms if count)

        share = likeliest(likelihood, max(0.0, -x), (1 - x) / 2)
        return abs(won - lost - n * x) <= z * math.sqrt(n * (2 * share + x - x * x))

    def end(beyond):
        inside = (won - lost) / n
        for _ in range(60):
            x = (inside + beyond) / 2
            inside, beyond = (x, beyond) if kept(x) else (inside, x)
        return inside

    return end(-1.0), end(1.0)


def agree_with_scipy():
    for lost, won in TABLES:
        assert math.isclose(stats.binomtest(lost, lost + won).pvalue, mcnemar(lost, won), rel_tol=1e-9), (lost, won)
    for sums in SUMS[:4]:
        p = stats.permutation_test((sums,), lambda x: sum(x), permutation_type="samples", n_resamples=math.inf).pvalue
        assert math.isclose(p, sign_flips(sums), rel_tol=1e-9), sums


def text():
    if stats:
        agree_with_scipy()
    return json.dumps({
        "mcnemar": [{"lost": lost, "won": won, "p": float(mcnemar(lost, won))} for lost, won in TABLES],
        "sign_flips": [{"sums": sums, "p": float(sign_flips(sums))} for sums in SUMS],
        "score_intervals": [dict(zip(("lost", "won", "pairs", "low", "high"), (*t, *(round(e, 9) for e in score_interval(*t)))))
                            for t in PAIRED],
        "detectable": [{"n": n, "churn": churn, "x": detectable(n, churn)} for n, churn in NEEDED],
    }, indent=1) + "\n"  # fmt: skip


def main():
    root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../core/test/golden")
    check = sys.argv[1:] == ["--check"]
    path = os.path.join(root if check or len(sys.argv) < 2 else sys.argv[1], "paired.json")
    if check:
        with open(path, encoding="utf-8") as file:
            sys.exit(0 if file.read() == text() else f"{path} is not what paired.py writes")
    with open(path, "w", encoding="utf-8") as file:
        file.write(text())


if __name__ == "__main__":
    main()
