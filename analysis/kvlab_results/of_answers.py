"""Sections of a report about single answers: policies against the full cache, question by question. Its numbers are
those of `kvlab report` (core/result/compare_report.cpp)."""

import math

from kvlab_results import draw
from kvlab_results.data import title_of
from kvlab_results.differences import UNBOUNDED, ZERO_ONE, Compared, Comparison
from kvlab_results.page import Panel, Section, Table, number


def keeps_everything(row):
    """In the run's dtype and on its device: its parameters then name nothing but a page size."""
    return bool(len(row.good)) and not row.first.ablated and set(row.params) <= {"page_size"}


def _compare(inputs, block):
    """The block's rows against the first that keeps everything, or that of their own file; None without both."""
    fulls = {}
    for row in block.rows:
        if keeps_everything(row):
            fulls.setdefault(row.source, row)
    if not fulls:
        return None
    first = next(row for row in block.rows if keeps_everything(row))
    if "synthetic" in first.labels:
        return None
    references = {id(full): inputs.answers(full) for full in fulls.values()}
    out = Comparison()
    out.add(Compared(first, references[id(first)]))
    for row in block.rows:
        if keeps_everything(row):
            repeats = sorted(set(row.good.repeat))
            base = inputs.answers(row, repeat=repeats[0]) if len(repeats) > 1 else None
            for repeat in repeats[1:]:
                out.add_noise(inputs.answers(row, repeat=repeat), base)
        if row is first or not len(row.good):
            continue
        own = keeps_everything(row)
        full = first if own else fulls.get(row.source, first)
        out.add(Compared(row, inputs.answers(row), references[id(full)], own))
    return out.finish() if out.compared else None


def _short(value, digits=3):
    return f"{0.0 if abs(value) < 1e-12 else value:.{digits}g}"


def _p(value):
    return "-" if math.isnan(value) else "<1e-4" if value < 1e-4 else f"{value:.2g}"


def _difference(comparison, d):
    ends = "(-)" if math.isnan(d.low) else f"({_short(d.low, 2)} to {_short(d.high, 2)})"
    return f"{'~' * comparison.undetected(d)}{_short(d.mean)} {ends}"


def _texts(comparison, row, several):
    d, zero_one = row.difference, comparison.of(ZERO_ONE)
    out = [row.row.name, *several, row.row.budget or "-"]
    out += [_difference(comparison, d), _p(d.p)] if d else ["-", "-"]
    if comparison.policies > 1:
        out.append(_p(row.holm))
    counts = [d.lost, d.won, *([d.both, d.neither] if zero_one else [d.both + d.neither])] if d else []
    out += [str(n) for n in counts] or ["-"] * (4 if zero_one else 3)
    if not comparison.forced:
        lengths = d and row.paired.other_tokens > 0
        out.append(f"{row.paired.own_tokens / row.paired.other_tokens:.2f}" if lengths else "-")
        out.append(_short(sum(answer.cut for answer in row.own.values())))
        out.append(_short(sum(answer.looping for answer in row.own.values())))
    if comparison.policies > 1 and comparison.rows[0].rank:
        out.append("-" if row.noise else f"{row.rank.rank:g} ({row.rank.low}-{row.rank.high})")
    return out


def _header(comparison, several):
    out = ["policy", *["file"] * several, "budget", "nats/token" if comparison.forced else "difference", "p"]
    out += ["Holm"] * (comparison.policies > 1)
    out += ["lost", "won", *(["both", "neither"] if comparison.of(ZERO_ONE) else ["equal"])]
    out += ["length", "no end", "loops"] * (not comparison.forced)
    return out + ["rank"] * bool(comparison.policies > 1 and comparison.rows[0].rank)


def _count(n, word):
    return f"{n} {word}{'s' * (n != 1)}"


def _under(comparison):
    """What a reader needs below the table."""
    lines = [
        "too few contexts to detect a difference (power 80 %, two-sided 5 %)"
        if math.isnan(comparison.smallest)
        else f"smallest difference that this table can detect: {_short(comparison.smallest)} (power about 80 %, "
        "two-sided 5 %); ~ and grey: smaller, with p from 0.05"
    ]
    noise = comparison.noise
    if noise["comparisons"]:
        lines.append(
            f"noise floor, full against full in {_count(noise['comparisons'], 'comparison')}: a difference of "
            f"{_short(noise['most'])} at most, {noise['flipped']} of {noise['pairs']} answers flipped, "
            f"{noise['other_text']} other texts"
        )
    lines += [f"{row.row.label}: keeps everything as well, its difference is noise" for row in comparison.rows if row.noise]
    lines += [
        f"{row.row.label}: only {row.difference.pairs} of the questions are paired"
        for row in comparison.rows
        if row.difference and row.difference.pairs < comparison.pairs
    ]
    test = "McNemar's exact test" if comparison.mcnemar else "sign flips of contexts"
    return lines + [f"p: of no difference, two-sided, {test}"]


def _table(inputs, comparison, title):
    several, origin = inputs.files_of([r.row for r in comparison.rows])
    rows = [_texts(comparison, r, [inputs.files[r.row.source].name] * several) for r in comparison.rows]
    faint = [i for i, r in enumerate(comparison.rows) if r.difference and comparison.undetected(r.difference)]
    return Table(title, _header(comparison, several), rows, 1 + several, faint=faint, under=[*_under(comparison), *origin])


def _panel(inputs, comparison, title):
    rows = [row for row in comparison.rows if row.difference][::-1]
    smallest, name = comparison.smallest, "nats per token" if comparison.forced else "score"

    def picture(axes):
        if not math.isnan(smallest):
            axes.axvspan(-smallest, smallest, color=draw.style.GRID, linewidth=0)
        axes.axvline(0, color=draw.style.MUTED, linewidth=0.8)
        for place, row in enumerate(rows):
            d = row.difference
            its = inputs.styles[row.row.policy]
            draw.mark(axes, d.mean, place, its, row.row.caution(), d.low, d.high, vertical=False)
        axes.set_yticks(range(len(rows)), [draw.short(row.row.label) for row in rows])
        axes.set_ylim(-0.6, len(rows) - 0.4)
        if comparison.of(UNBOUNDED - 1):
            axes.set_xlim(-1.05, max(0.3, *(row.difference.high for row in rows), *(row.difference.mean for row in rows)))
        draw.frame(axes, f"{name}, difference", "")

    numbers = [[r.row.label, *(number(v, 3) for v in r.difference[3:6])] for r in rows[::-1]]
    table = Table(f"{title}: differences", ["policy", "difference", "low", "high"], numbers)
    return Panel(title, picture, table, [], 1.2 + 0.22 * len(rows))


def against(inputs):
    panels, tables, shown = [], [], []
    for block in inputs.blocks:
        comparison = _compare(inputs, block)
        if comparison is None:
            continue
        first = comparison.rows[0].row
        file = f"{inputs.files[first.source].name}:" if len(inputs.files) > 1 else ""
        title = f"{title_of(block)}, against {file}{first.name}"
        counts = f"{_count(comparison.pairs, 'question')} in {_count(comparison.contexts, 'context')}"
        panels.append(_panel(inputs, comparison, title))
        tables.append(_table(inputs, comparison, f"{title}: {counts}"))
        shown += [row.row for row in comparison.rows if row.difference]
    if not panels:
        return None
    lead = (
        "Each policy's score minus that of the policy that keeps everything, on the same questions; for texts, nats per "
        "token, where above 0 is worse. Bars and brackets are 95 % intervals, Tango's for answers right or wrong "
        "(one to each of 6 contexts or more), else by a bootstrap over contexts. Holm is p, "
        "adjusted for all rows. lost and won: questions with a lower or a higher score; no end: answers that the limit "
        "of length ended; loops: that end in a phrase three times in a row; length: tokens by the full cache's. A rank "
        "is by score, with its 95 % interval, which is too narrow where policies are nearly equal. Grey in a figure: "
        "differences that its table cannot detect."
    )
    hollow = any(row.caution() for row in shown)
    return Section("against", "Against the full cache", lead, panels, tables, [row.policy for row in shown], hollow)
