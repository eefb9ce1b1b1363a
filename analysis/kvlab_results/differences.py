"""Paired differences of policies, question by question: the numbers of `kvlab report`, by the same draws.

core/result/paired.hpp and core/result/interval.hpp name the sources of all formulas. Draws begin with the same seed, so
intervals and ranks are those of the terminal's tables.
"""

import math
from collections import Counter, namedtuple
from functools import lru_cache
from statistics import NormalDist, median

import numpy as np

SEED = 20240607
RESAMPLES, RANK_RESAMPLES, SIGN_DRAWS = 5000, 2000, 20000
FEWEST_CONTEXTS, MOST_ENUMERATED, MOST_REACH, MOST_WORK = 6, 16, 1e5, 1e8
LEVEL, POWER = 0.05, 0.8
NORMAL = NormalDist()

ZERO_ONE, SHARE, UNBOUNDED = range(3)  # what is known of scores

# One question's answers under one policy. score and weight: of forced texts nats per token and tokens, else 1.
Answer = namedtuple("Answer", "score weight tokens cut looping forced output")
Pair = namedtuple("Pair", "context own other weight")
Difference = namedtuple(
    "Difference", "pairs contexts range mean low high error p mcnemar both neither lost won", defaults=[0] * 4
)
Rank = namedtuple("Rank", "rank low high")


def _mix(z):
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def draws(stream, count):
    """The first `count` numbers of kvlab::Random(SEED, stream): SplitMix64."""
    with np.errstate(over="ignore"):
        begin = _mix(np.array([SEED], np.uint64)) ^ _mix(~np.array([stream], np.uint64))
        return _mix(begin + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _sums(values, drawn):
    """values[drawn] added up along the second axis, one after the other as in C++."""
    out = np.zeros(len(drawn))
    for column in drawn.T:
        out += values[column]
    return out


def _beta_fraction(a, b, x):
    """Continued fraction of the incomplete beta function (Press et al. 2007, 6.4), by Lentz's method."""
    tiny, c, d = 1e-300, 1.0, 1 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > tiny else tiny)
    value = d
    for m in range(1, 1000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 + term * d
            c = 1 + term / c
            d, c = 1 / (d if abs(d) > tiny else tiny), c if abs(c) > tiny else tiny
            value *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return value


def _beta(a, b, x):
    """The regularized incomplete beta function."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(a, b, x) / a
    return 1 - front * _beta_fraction(b, a, 1 - x) / b


@lru_cache
def t_quantile(freedom):
    """Above it lies LEVEL / 2 of Student's t."""
    low, high = 0.0, 1e9
    for _ in range(200):
        middle = (low + high) / 2
        tail = _beta(freedom / 2, 0.5, freedom / (freedom + middle * middle)) / 2
        low, high = (middle, high) if tail > LEVEL / 2 else (low, middle)
    return high


def _freedom(residuals):
    """Degrees of freedom of a variance that these residuals estimate: n - 1 for normal ones (O'Neill 2014)."""
    n, squares, fourths = len(residuals), 0.0, 0.0
    largest = max(map(abs, residuals))
    if largest == 0:  # contexts that differ only by rounding
        return n - 1
    for r in residuals:
        squares, fourths = squares + (r / largest) ** 2, fourths + (r / largest) ** 4
    return 2 * n / (n * fourths / (squares * squares) - (n - 3) / (n - 1))


def outside(weights, residuals):
    """How many of the resamples lie outside of the interval, on either side (Hesterberg 2015, Kish 1965)."""
    total, squares = 0.0, 0.0
    for weight in weights:
        total, squares = total + weight, squares + weight * weight
    equal = max(2.0, total * total / squares)
    freedom = min(equal - 1, _freedom(residuals)) if residuals else equal - 1
    return int(NORMAL.cdf(-math.sqrt(equal / (equal - 1)) * t_quantile(freedom)) * RESAMPLES)


def _of_contexts(triples):
    """Sums of value and weight of each context, in the order of their numbers. triples: (context, value, weight)."""
    sums = {}
    for context, value, weight in triples:
        if math.isfinite(value) and weight > 0:
            before = sums.get(context, (0.0, 0.0))
            sums[context] = (before[0] + value, before[1] + weight)
    return [sums[context] for context in sorted(sums)]


def _bootstrap(contexts, padded=False):
    values, weights = (np.array(side, float) for side in zip(*contexts))
    n = len(values)
    drawn = (draws(n, RESAMPLES * n) % np.uint64(n)).astype(np.intp).reshape(RESAMPLES, n)
    ratios = np.sort(_sums(values, drawn) / _sums(weights, drawn))
    value, weight = (sum(side) for side in zip(*contexts))
    rank = outside(weights, [] if padded else [v - value / weight * w for v, w in contexts])
    return ratios[rank], ratios[RESAMPLES - 1 - rank]


def _highest_difference(won, lost, n):
    """The upper end of Tango's score interval (1998) of (won - lost) / n."""
    z = NORMAL.inv_cdf(1 - LEVEL / 2)

    def holds(x):
        a, b, c = 2 * n, (2 * n - won + lost) * x - won - lost, -lost * x * (1 - x)
        share = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)
        return (won - lost - n * x) ** 2 <= z * z * n * (2 * share + x * (1 - x))

    low, high = (won - lost) / n, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def interval(triples, scores):
    """95 % interval of sum(value) / sum(weight), or (NaN, NaN). scores: what is known of the scores behind it."""
    contexts = _of_contexts(triples)
    if len(contexts) < 2:
        return math.nan, math.nan
    if scores == ZERO_ONE and len(contexts) >= FEWEST_CONTEXTS and all(w == 1 for _, w in contexts):
        n, won, lost = len(contexts), *(sum(v == sign for v, _ in contexts) for sign in (1, -1))
        return -_highest_difference(lost, won, n), _highest_difference(won, lost, n)
    value, weight = contexts[0]
    alike = all(v * weight == value * w for v, w in contexts)
    enough = len(contexts) >= FEWEST_CONTEXTS and not alike
    padded = scores == ZERO_ONE or (scores == SHARE and not enough)
    if not enough and not padded:
        return math.nan, math.nan
    return _bootstrap(contexts + [(1.0, 1.0), (-1.0, 1.0)] * padded, padded)


def _ratio_variance(contexts):
    n = len(contexts)
    value, weight = (sum(side) for side in zip(*contexts))
    squares = sum((v - value / weight * w) ** 2 for v, w in contexts)
    return n / (n - 1) * squares / (weight * weight)


def clustered_error(triples):
    contexts = _of_contexts(triples)
    return math.nan if len(contexts) < 2 else math.sqrt(_ratio_variance(contexts))


def _wilson(share, n):
    z = NORMAL.inv_cdf(1 - LEVEL / 2)
    middle, half = share + z * z / n / 2, z * math.sqrt((share * (1 - share) + z * z / n / 4) / n)
    low, high = ((middle + sign * half) / (1 + z * z / n) for sign in (-1, 1))
    return 0.0 if share <= 0 else low, 1.0 if share >= 1 else high


def _effective(contexts):
    """How many independent 0/1 scores count as much as these? (Korn and Graubard 1998)"""
    n = len(contexts)
    value, weight = (sum(side) for side in zip(*contexts))
    share = value / weight
    if weight == n or share in (0, 1):
        return n
    effect = _ratio_variance(contexts) / (share * (1 - share) / weight)
    few = (NORMAL.inv_cdf(1 - LEVEL / 2) / t_quantile(n - 1)) ** 2
    return min(max(few * weight / effect, n), weight) if effect > 0 else weight


def score_interval(triples, forced=False):
    """95 % interval of a policy's score. forced: values are nats of `weight` tokens, and the score a perplexity."""
    triples = [t for t in triples if math.isfinite(t[1])]
    contexts = _of_contexts(triples)
    if len(contexts) < 2:
        return math.nan, math.nan
    value, weight = contexts[0]
    enough = len(contexts) >= FEWEST_CONTEXTS and any(v * weight != value * w for v, w in contexts)
    if forced:
        return tuple(map(math.exp, _bootstrap(contexts))) if enough else (math.nan, math.nan)
    mean = sum(v for v, _ in contexts) / sum(w for _, w in contexts)
    scores = [v for _, v, _ in triples]
    if all(s in (0, 1) for s in scores):
        return _wilson(mean, _effective(contexts))
    if enough:
        return _bootstrap(contexts)
    return _wilson(mean, len(contexts)) if all(0 <= s <= 1 for s in scores) else (math.nan, math.nan)


def pooled_interval(answers):
    """That of all answers of a policy's cells, over their contexts."""
    contexts = Contexts()
    contexts.add(answers)
    triples = [(contexts.of(question), a.score * a.weight, a.weight) for question, a in answers.items()]
    return score_interval(triples, any(a.forced for a in answers.values()))


def sign_flip_p(sums):
    """Of no difference: each context's sum may as well have the other sign. McNemar's exact test for -1, 0 and 1."""
    sums = [s for s in sums if s != 0]
    if not sums:
        return 1.0
    observed, reach = sum(sums), sum(abs(s) for s in sums)
    if all(s == math.floor(s) for s in sums) and reach <= MOST_REACH and reach * len(sums) <= MOST_WORK:
        zero = int(reach)
        chance = np.zeros(2 * zero + 1)
        chance[zero] = 1
        for step in (int(abs(s)) for s in sums):
            halves = chance / 2
            chance = np.zeros_like(chance)
            chance[: len(chance) - step] += halves[step:]
            chance[step:] += halves[: len(halves) - step]
        far = int(abs(observed))
        totals = np.abs(np.arange(-zero, zero + 1))
        return min(1.0, float(chance[totals >= far].sum()))
    slack = 1e-9 * reach
    if len(sums) <= MOST_ENUMERATED:
        choices = np.arange(1 << len(sums))
        total = sum(np.where(choices >> i & 1, s, -s) for i, s in enumerate(sums))
        return float(np.mean(np.abs(total) >= abs(observed) - slack))
    words = -(-len(sums) // 64)
    bits = draws(len(sums), SIGN_DRAWS * words).reshape(SIGN_DRAWS, words)
    total = np.zeros(SIGN_DRAWS)
    for i, s in enumerate(sums):
        total += np.where(bits[:, i // 64] >> np.uint64(i % 64) & np.uint64(1), s, -s)
    return (1 + int(np.sum(np.abs(total) >= abs(observed) - slack))) / (1 + SIGN_DRAWS)


def range_of(pairs):
    scores = [s for p in pairs for s in (p.own, p.other)]
    if any(p.weight != 1 for p in pairs):
        return UNBOUNDED
    if all(s in (0, 1) for s in scores):
        return ZERO_ONE
    return SHARE if all(0 <= s <= 1 for s in scores) else UNBOUNDED


def difference_of(pairs):
    """own - other of these pairs."""
    pairs = [p for p in pairs if math.isfinite(p.own) and math.isfinite(p.other) and p.weight > 0]
    scores = range_of(pairs)
    triples = [(p.context, p.own - p.other, p.weight) for p in pairs]
    sums, counts = {}, Counter()
    for p, (context, d, _) in zip(pairs, triples):
        sums[context] = sums.get(context, 0.0) + d
        counts["lost" if d < 0 else "won" if d > 0 else "neither" if p.own == 0 else "both"] += 1
    return Difference(
        len(pairs),
        len(sums),
        scores,
        sum(d for _, d, _ in triples) / sum(w for *_, w in triples) if pairs else math.nan,
        *interval(triples, scores),
        clustered_error(triples),
        sign_flip_p([sums[context] for context in sorted(sums)]) if pairs else math.nan,
        scores == ZERO_ONE and len(pairs) == len(sums),
        **counts,
    )


Place = namedtuple("Place", "place low high span span_low span_high")


def place_of(rungs):
    """Where a policy stands between two others (core/result/place.hpp). rungs: (context, own, low, high, weight) of the
    questions that all three answered. The place is NaN unless the interval of high - low lies above 0."""
    rungs = [r for r in rungs if all(map(math.isfinite, r[1:4])) and r[4] > 0]
    if not rungs:
        return Place(*[math.nan] * 6)
    pairs = [Pair(c, high, low, weight) for c, _, low, high, weight in rungs]
    ends = interval([(p.context, p.own - p.other, p.weight) for p in pairs], range_of(pairs))
    sums = {}
    for context, own, low, high, weight in rungs:
        before = sums.get(context, (0.0, 0.0, 0.0))
        sums[context] = (before[0] + own - low, before[1] + high - low, before[2] + weight)
    contexts = [sums[context] for context in sorted(sums)]
    above, span, weight = (sum(side) for side in zip(*contexts))
    if not ends[0] > 0:
        return Place(math.nan, math.nan, math.nan, span / weight, *ends)
    scores = range_of(pairs + [Pair(c, own, low, w) for c, own, low, _, w in rungs])
    return Place(above / span, *_place_interval(contexts, above, span, scores), span / weight, *ends)


def _place_interval(contexts, above, span, scores):
    def same(one, other):
        return abs(one - other) <= 1e-12 * (abs(one) + abs(other))

    enough = len(contexts) >= FEWEST_CONTEXTS and not all(same(a * span, above * s) for a, s, _ in contexts)
    padded = scores == ZERO_ONE or (scores == SHARE and not enough)
    if not enough and not padded:
        return math.nan, math.nan
    residuals = [] if padded else [a - above / span * s for a, s, _ in contexts]
    contexts = contexts + [(1.0, 0.0, 1.0), (-1.0, 0.0, 1.0)] * padded
    n = len(contexts)
    above, span, weights = (np.array(side) for side in zip(*contexts))
    drawn = (draws(n, RESAMPLES * n) % np.uint64(n)).astype(np.intp).reshape(RESAMPLES, n)
    above, span = _sums(above, drawn), _sums(span, drawn)
    ratios = np.sort(above[span > 0] / span[span > 0])
    beyond = outside(weights, residuals) - (RESAMPLES - len(ratios))  # resamples without a ratio lie beyond both ends
    return (ratios[beyond], ratios[len(ratios) - 1 - beyond]) if beyond >= 0 else (-math.inf, math.inf)


def holm(p):
    """Holm's adjustment; NaN stays NaN."""
    order = sorted((i for i, value in enumerate(p) if not math.isnan(value)), key=lambda i: p[i])
    out, most = [math.nan] * len(p), 0.0
    for place, i in enumerate(order):
        most = max(most, min(1.0, p[i] * (len(order) - place)))
        out[i] = most
    return out


def detectable_share(n, churn):
    """Connor's formula; NaN if there is none."""
    a, b = NORMAL.inv_cdf(1 - LEVEL / 2), NORMAL.inv_cdf(POWER)

    def needed(x):
        return ((a * math.sqrt(x + churn) + b * math.sqrt(x + churn - x * x)) / x) ** 2

    low, high = 0.0, max(0.0, 1 - churn)
    if n < FEWEST_CONTEXTS or high == 0 or needed(high) > n:
        return math.nan
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if needed(middle) > n else (low, middle)
    return high


def detectable_mean(error):
    return (NORMAL.inv_cdf(1 - LEVEL / 2) + NORMAL.inv_cdf(POWER)) * error


def ranks_of(values, weights, lower_is_better):
    """values[policy][context]: sums of scores over contexts of these weights. A Rank for each policy."""
    values, weights = np.array(values, float), np.array(weights, float)
    n = len(weights)
    drawn = (draws(n, RANK_RESAMPLES * n) % np.uint64(n)).astype(np.intp).reshape(RANK_RESAMPLES, n)
    drawn = np.vstack([np.arange(n), drawn])  # the first row: all contexts once
    weight = _sums(weights, drawn)
    means = np.array([_sums(own, drawn) / weight for own in values])
    out = []
    for own in means:
        same = np.abs(means - own) <= 1e-12 * np.abs(own)
        better = (~same & (means < own if lower_is_better else means > own)).sum(axis=0)
        equal = same.sum(axis=0)
        beyond = int(LEVEL / 2 * RANK_RESAMPLES)
        best, worst = np.sort(better[1:]), np.sort((better + equal - 1)[1:])
        ends = int(best[beyond]) + 1, int(worst[RANK_RESAMPLES - 1 - beyond]) + 1
        out.append(Rank(better[0] + (equal[0] + 1) / 2, *ends))
    return out


def _words(text):
    """Words between spaces; a sign of a script without spaces is a word of its own."""
    words, open_ = [], False
    for sign in text:
        alone = ord(sign) >= 0x2E80
        if sign in " \t\n\v\f\r":
            open_ = False
        elif open_ and not alone:
            words[-1] += sign
        else:
            words.append(sign)
            open_ = not alone
    return words


def ends_in_loop(text, cut):
    """Does it end in a phrase of two words or more, three times in a row?"""
    words = _words(text)[::-1]
    words = words[1:] if cut else words
    for period in range(2, len(words) // 3 + 1):
        if words[: 2 * period] == words[period : 3 * period]:
            return True
    return False


def answers_of(cells):
    """{(seed, task_sample, question, prompt): Answer}, of cells of one policy: [(seed, samples), ...]. Repeats of a
    question are one observation, their mean. Empty for files that do not tell questions apart."""
    found = {}
    for seed, samples in cells:
        if samples is None or not {"task_sample", "question", "prompt_sha256", "score"} <= set(samples.columns):
            continue
        blank = {"stop": "", "output": "", "output_tokens": 0}
        columns = [samples[c].tolist() if c in samples else [of] * len(samples) for c, of in blank.items()]
        keys = zip(samples.task_sample, samples.question, samples.prompt_sha256)
        for (sample, question, prompt), score, stop, output, tokens in zip(keys, samples.score, *columns):
            if sample >= 0:
                key = (int(seed), int(sample), int(question), prompt)
                found.setdefault(key, []).append((float(score), stop, output, int(tokens)))
    out = {}
    for key in sorted(found):
        rows = found[key]
        forced = rows[0][1] == "forced"
        scores = [_nats(score) if stop == "forced" else score for score, stop, *_ in rows]
        cuts = [stop == "length" for _, stop, *_ in rows]
        loops = [not forced and ends_in_loop(output, cut) for (_, _, output, _), cut in zip(rows, cuts)]
        tokens = [row[3] for row in rows]
        weight = float(tokens[-1]) if forced else 1.0
        out[key] = Answer(*map(_mean, [scores]), weight, *map(_mean, [tokens, cuts, loops]), forced, rows[0][2])
    return out


def _nats(perplexity):
    return math.log(perplexity) if perplexity > 0 else -math.inf if perplexity == 0 else math.nan


def _mean(values):
    """As C++ adds them up: one value after the other."""
    mean = 0.0
    for count, value in enumerate(values, 1):
        mean += (value - mean) / count
    return mean


class Contexts:
    """Numbers of contexts: questions of a seed's sample share one, and so do samples with a prompt in common."""

    def __init__(self):
        self._nodes, self._parents = {}, []

    def _root(self, key):
        if key not in self._nodes:
            self._nodes[key] = len(self._parents)
            self._parents.append(len(self._parents))
        node = self._nodes[key]
        while self._parents[node] != node:
            node = self._parents[node]
        return node

    def add(self, answers):
        for seed, sample, _, prompt in answers:
            root = self._root((seed, sample))
            if prompt:
                self._parents[self._root(prompt)] = root

    def of(self, question):
        return self._root(question[:2])


def places_between(low, high, owns):
    """The Place of each of `owns` between two policies, question by question. All are answers; higher scores are
    better, and of texts fewer nats."""
    contexts = Contexts()
    for answers in (low, *owns, high):
        contexts.add(answers)

    def value(answer):
        return -answer.score * answer.weight if answer.forced else answer.score

    def rungs(own):
        there = [q for q in own if q in low and q in high]
        return [(contexts.of(q), *(value(of[q]) for of in (own, low, high)), own[q].weight) for q in there]

    return [place_of(rungs(own)) for own in owns]


Paired = namedtuple("Paired", "pairs other_text own_tokens other_tokens")


def paired(own, other, contexts):
    pairs, other_text, tokens = [], 0, [0.0, 0.0]
    for question, a in own.items():
        b = other.get(question)
        if b is None or not math.isfinite(a.score) or not math.isfinite(b.score):
            continue
        pairs.append(Pair(contexts.of(question), a.score * a.weight, b.score * b.weight, a.weight))
        other_text += a.output != b.output
        if not a.forced:
            tokens = [tokens[0] + a.tokens, tokens[1] + b.tokens]
    return Paired(pairs, other_text, *tokens)


class Compared:
    """A row of a comparison. other: the answers that it is set against; None for the row that others are set against.
    noise: it keeps everything, too."""

    def __init__(self, row, own, other=None, noise=False):
        self.row, self.own, self.other, self.noise = row, own, other, noise
        self.paired = self.difference = self.rank = None
        self.holm = math.nan


class Comparison:
    """Rows against one that keeps everything. Add them in the order of the table, then `finish`."""

    def __init__(self):
        self._contexts, self.rows = Contexts(), []
        self.compared = self.policies = 0
        self.forced, self.mcnemar = False, True
        self.noise = {"comparisons": 0, "pairs": 0, "flipped": 0, "other_text": 0, "most": 0.0, "error": 0.0, "churn": 0.0}

    def _pair(self, row):
        self._contexts.add(row.own)
        self._contexts.add(row.other)
        row.paired = paired(row.own, row.other, self._contexts)
        row.difference = difference_of(row.paired.pairs)

    def add(self, row):
        self.forced |= any(answer.forced for answer in row.own.values())
        if row.other is not None:
            self._pair(row)
            if not row.difference.pairs:
                return
            self.compared += 1
            if row.noise:
                self._count(row)
            else:
                self.policies += 1
            self.mcnemar &= row.difference.mcnemar
        self.rows.append(row)

    def add_noise(self, own, other):
        row = Compared(None, own, other, True)
        self._pair(row)
        if row.difference.pairs:
            self._count(row)

    def _count(self, row):
        d, noise = row.difference, self.noise
        noise["comparisons"] += 1
        noise["pairs"] += d.pairs
        noise["flipped"] += d.lost + d.won
        noise["other_text"] += row.paired.other_text
        noise["most"] = max(noise["most"], abs(d.mean))
        noise["error"] = max(noise["error"], 0.0 if math.isnan(d.error) else d.error)
        noise["churn"] = max(noise["churn"], (d.lost + d.won) / d.pairs)

    def of(self, scores):
        return all(row.difference.range <= scores for row in self.rows if row.difference)

    def _of_policies(self):
        return [row for row in self.rows if row.difference and not row.noise]

    def _detectable(self):
        own = self._of_policies()
        errors = [row.difference.error for row in own if row.difference.error > 1e-12]
        contexts = max((row.difference.contexts for row in self.rows if row.difference), default=0)
        alone = self.of(ZERO_ONE) and self.mcnemar
        smallest = math.nan
        if alone or (not errors and self.of(SHARE)):
            flips = sum(2 * min(row.difference.lost, row.difference.won) / row.difference.pairs for row in own)
            churn = max(self.noise["churn"], flips / len(own)) if own else self.noise["churn"]
            smallest = detectable_share(contexts, churn if alone else 0)
        elif errors:
            smallest = detectable_mean(max(median(errors), self.noise["error"]))
        return smallest if math.isnan(smallest) else max(smallest, self.noise["most"])

    def _set_ranks(self):
        """Of the questions that all policies answered."""
        ranked = [row for row in self.rows if not row.noise]
        places, weights, values = {}, [], [[] for _ in ranked]
        for question, first in ranked[0].own.items():
            if not all(question in row.own and math.isfinite(row.own[question].score) for row in ranked):
                continue
            place = places.setdefault(self._contexts.of(question), len(weights))
            if place == len(weights):
                weights.append(0.0)
                for own in values:
                    own.append(0.0)
            weights[place] += first.weight
            for own, row in zip(values, ranked):
                own[place] += row.own[question].score * first.weight
        if len(weights) > 1:
            for row, rank in zip(ranked, ranks_of(values, weights, self.forced)):
                row.rank = rank

    def finish(self):
        """Sets what depends on all rows: Holm's p, ranks, `pairs`, `contexts` and `smallest`."""
        adjusted = holm([row.difference.p if row.difference and not row.noise else math.nan for row in self.rows])
        for row, p in zip(self.rows, adjusted):
            row.holm = p
        self.pairs = max((row.difference.pairs for row in self.rows if row.difference), default=0)
        self.contexts = max((row.difference.contexts for row in self.rows if row.difference), default=0)
        if self.policies > 1:
            self._set_ranks()
        self.smallest = self._detectable()
        return self

    def undetected(self, difference):
        """Neither large enough for this table nor, by its own test, told from none."""
        return abs(difference.mean) < self.smallest and not difference.p < LEVEL
