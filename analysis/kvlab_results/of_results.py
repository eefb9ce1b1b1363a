"""Sections of a report about whole cells. Each function takes Inputs and returns a Section, or None where the files do
not hold what it shows."""

import re

import numpy as np
import pandas as pd

from kvlab_results import differences, draw, experiment
from kvlab_results.data import title_of
from kvlab_results.page import Panel, Section, Table, number


def _notes(rows):
    """What the marks of these rows do not say: labels, and cells that are not there."""
    found = {}
    for row in rows:
        for label in row.caution(times=True):
            found.setdefault(label, []).append(row.label)
        if len(row.bad):
            statuses = " and ".join(dict.fromkeys(row.bad.status))
            found.setdefault(statuses, []).append(
                f"{row.label} ({len(row.bad)} of {len(row.bad) + len(row.good)} cells)"
            )
    every = {row.label for row in rows}
    said = {label: dict.fromkeys(names) for label, names in found.items()}
    return [
        f"{label}: {'every row' if len(every) > 1 and set(names) == every else ', '.join(names)}"
        for label, names in said.items()
    ]


def _drawn(inputs, row):
    return inputs.styles[row.policy]


def _labels(row):
    return ", ".join(row.labels) or "-"


def interval(inputs, row, column="score"):
    """(low, high): of a score its 95 % interval over the contexts of all its cells; else of several cells mean ±
    standard deviation. NaN = none."""
    several = len(row.values(column)) > 1
    if column == "score":
        return inputs.pooled_interval(row) if several else (row.mean("score_lo"), row.mean("score_hi"))
    mean, spread = row.mean(column), row.deviation(column) if several else np.nan
    return mean - spread, mean + spread


def _section(key, title, lead, panels, rows, times=False):
    if not panels:
        return None
    hollow = any(row.caution(times) for row in rows)
    return Section(key, title, lead, panels, policies=[row.policy for row in rows], hollow=hollow)


def _lines(inputs, axes, rows, x, y):
    """Joins the budgets of one policy of one file, which differ in nothing else."""
    groups = {}
    for row in rows:
        groups.setdefault((row.source, row.policy, row.name, row.first.ablated), []).append(row)
    for own in groups.values():
        own = sorted(own, key=x)
        draw.line(axes, [x(r) for r in own], [y(r) for r in own], _drawn(inputs, own[0]))


def _several_budgets(rows):
    """The policies whose budget has to stand beside their marks."""
    budgets = {}
    for row in rows:
        budgets.setdefault(row.policy, set()).add(row.budget)
    return {policy for policy, found in budgets.items() if len(found) > 1}


def _share(row):
    return 100 / row.mean("compression")


def _bytes_panel(inputs, block, column, rows):
    perplexity = column == "score" and any(row.mean("score") > 1 for row in rows)
    name = {"score": "perplexity (lower is better)" if perplexity else "score", "kl": "KL from the full cache, nats"}[
        column
    ]

    def picture(axes):
        least = min((row.mean("kl") for row in rows if row.mean("kl") > 0), default=1)

        def y(row):
            return row.mean(column) if column == "score" else max(row.mean(column), least / 3)

        _lines(inputs, axes, rows, _share, y)
        several = _several_budgets(rows)
        for row in rows:
            draw.mark(axes, _share(row), y(row), _drawn(inputs, row), row.caution(), *interval(inputs, row, column))
        if column == "kl":
            draw.log_axis(axes)
        elif not perplexity:
            axes.set_ylim(-0.03, 1.03)
        draw.frame(axes, "device bytes, % of the bare full cache", name)
        draw.names(axes, [(_share(row), y(row), row.budget) for row in rows if row.policy in several])

    numbers = [
        [row.label, number(_share(row)), number(row.mean(column)), *map(number, interval(inputs, row, column)), _labels(row)]
        for row in rows
    ]
    notes = _notes(block.rows)
    zeros = [row.label for row in rows if column == "kl" and row.mean("kl") == 0]
    if zeros:
        notes.append(f"KL is 0 and lies at the lower edge: {', '.join(zeros)}")
    title = f"{title_of(block)}: {'score' if column == 'score' else 'KL'}"
    return Panel(title, picture, Table(title, ["policy", "bytes %", name, "low", "high", "labels"], numbers), notes)


def quality(inputs):
    panels, shown = [], []
    for block in inputs.blocks:
        for column in ("score", "kl"):
            rows = [row for row in block.rows if np.isfinite(row.mean(column)) and row.mean("compression") > 0]
            if len(rows) > 1 and (column == "score" or any(row.mean("kl") > 0 for row in rows)):
                panels.append(_bytes_panel(inputs, block, column, rows))
                shown += rows
    lead = (
        "What is left of the answers for the bytes that a policy holds on the device, metadata included, mean over "
        "decode steps. Bars are 95 % intervals of scores over contexts like these; of KL, where seeds or repeats made "
        "several cells, mean ± standard deviation. A line joins the budgets of one policy."
    )
    return _section("quality", "Quality against bytes", lead, panels, shown)


def _depth_scores(inputs, row, block):
    """{depth in %: [score, ...]} of a row's cells, from the questions about the first fact."""
    found = {}
    for _, cell in row.good.iterrows():
        file = inputs.files[cell.source]
        samples = file.results.cell(cell["cell"]).get("samples")
        if samples is None or not {"task_sample", "question"} <= set(samples.columns):
            return {}
        depths = experiment.depths(str(file.info.get("experiment_yaml", "")), block.task, samples.task_sample.nunique())
        if not depths:
            return {}
        per_depth = samples.task_sample.nunique() // depths
        first = samples[(samples.question == 0) & samples.score.notna()]
        for sample, score in zip(first.task_sample, first.score):
            percent = 100 * (sample // per_depth) / (depths - 1) if depths > 1 else 50
            found.setdefault(round(percent, 1), []).append(score)
    return found


def _series(blocks):
    """Blocks that differ in their context alone: {(model, task, workload): {row's identity: [(block, row), ...]}}"""
    found = {}
    for block in blocks:
        of = found.setdefault((block.model, block.task, block.workload), {})
        for row in block.rows:
            labels = " ".join(label for label in row.labels if label != "disturbed")
            key = (row.source, row.policy, row.first.params, row.first.ablated, labels, row.first.again)
            of.setdefault(key, []).append((block, row))
    return found


def needle(inputs):
    panels = []
    for (model, task, _), series in _series(inputs.blocks).items():
        found = []  # (rows, {context: {depth: scores}}) of each policy
        for pairs in series.values():
            scores = {block.context: _depth_scores(inputs, row, block) for block, row in pairs if len(row.good)}
            scores = {context: of for context, of in sorted(scores.items()) if of}
            if scores:
                found.append(([row for _, row in pairs], scores))
        contexts = {context for _, scores in found for context in scores}
        if len(contexts) > 1:
            for rows, scores in found:
                label = rows[0].label if len({row.budget for row in rows}) == 1 else rows[0].name
                columns = [(f"{context:.0f}", of) for context, of in scores.items()]
                panels.append(_needle_panel(f"{model}, {task}, {label}", rows, columns, "context, tokens"))
        elif sum(len(of) for _, scores in found for of in scores.values()) > 1:
            columns = [(rows[0].label, next(iter(scores.values()))) for rows, scores in found]
            title = f"{model}, {task}, context {contexts.pop():.0f}"
            panels.append(_needle_panel(title, [row for rows, _ in found for row in rows], columns, ""))
    lead = (
        "The mean score of questions about a fact, by its depth in the text and by the length of the prompt; with a "
        "single length, by policy. 0 % is the beginning."
    )
    return _section("needle", "Needle in a haystack", lead, panels, [])


def _needle_panel(title, rows, columns, name):
    """columns: [(its label, {depth in %: scores})]; name: of their axis, empty where they are policies."""
    depths = sorted({depth for _, found in columns for depth in found})
    means = np.array([[np.mean(found[d]) if d in found else np.nan for _, found in columns] for d in depths])

    def picture(axes):
        draw.heat(axes, means, 0, 1, "score", show=len(columns) <= 8)
        turned = {} if name and len(columns) <= 6 else {"rotation": 60, "ha": "right", "rotation_mode": "anchor"}
        axes.set_xticks(range(len(columns)), [draw.short(label, 18) for label, _ in columns], **turned)
        axes.set_yticks(range(len(depths)), [f"{d:g}" for d in depths])
        axes.set_xlabel(name)
        axes.set_ylabel("depth, %")

    numbers = [[f"{d:g} %", *(number(float(v)) for v in of)] for d, of in zip(depths, means)]
    counts = sorted({len(values) for _, found in columns for values in found.values()})
    count = " to ".join(str(c) for c in dict.fromkeys((counts[0], counts[-1])))
    notes = [f"answers behind each number: {count}", *_notes(rows)]
    table = Table(title, ["depth", *(f"context {label}" if name else label for label, _ in columns)], numbers)
    return Panel(title, picture, table, notes, min((1.6 if name else 2.3) + 0.22 * len(depths), 4))


def _against_context(inputs, column, unit, what, above=None, scale=1, times=True):
    """Panels of `column` by context, one per model and task, and their rows."""
    panels, shown = [], []
    for (model, task, workload), series in _series(inputs.blocks).items():
        series = [
            [(block.context, row) for block, row in pairs if np.isfinite(row.mean(column))] for pairs in series.values()
        ]
        contexts = {context for pairs in series for context, _ in pairs}
        if workload or len(contexts) < 2:
            continue

        def picture(axes, series=series, contexts=contexts):
            several = _several_budgets([row for pairs in series for _, row in pairs])
            for pairs in (sorted(pairs, key=lambda p: p[0]) for pairs in series if pairs):
                its = _drawn(inputs, pairs[0][1])
                draw.line(axes, [c for c, _ in pairs], [row.mean(column) / scale for _, row in pairs], its)
                for context, row in pairs:
                    y = row.mean(column) / scale
                    low, high = interval(inputs, row, column)
                    if above and len(row.values(column)) == 1:
                        low, high = row.mean(column), row.mean(above)
                    draw.mark(axes, context, y, its, row.caution(times), low / scale, high / scale)
            draw.context_axis(axes, contexts)
            axes.set_ylim(bottom=0)
            draw.frame(axes, "context, tokens", unit)
            ends = [max(pairs, key=lambda p: p[0]) for pairs in series if pairs]
            ends = [(c, row.mean(column) / scale, row.budget) for c, row in ends if row.policy in several]
            draw.names(axes, ends)

        pairs = [pair for of in series for pair in of]
        title = f"{model}, {task}: {what}"
        columns = ["policy", "context", unit] + ([f"{unit}, p95"] if above else []) + ["labels"]
        numbers = [
            [row.label, f"{context:.0f}", number(row.mean(column) / scale)]
            + ([number(row.mean(above) / scale)] if above else [])
            + [_labels(row)]
            for context, row in pairs
        ]
        rows = [row for _, row in pairs]
        panels.append(Panel(title, picture, Table(title, columns, numbers), _notes(rows)))
        shown += rows
    return panels, shown


def latency(inputs):
    steps, rows = _against_context(inputs, "tpot_ms_p50", "ms per token", "time per token", "tpot_ms_p95")
    first, more = _against_context(inputs, "ttft_ms", "ms to the first token", "time to the first token")
    lead = (
        "Medians. A bar over a token's time goes up to the 95th percentile; where seeds or repeats made several "
        "cells, mean ± standard deviation."
    )
    return _section("latency", "Latency against context", lead, steps + first, rows + more, times=True)


def memory(inputs):
    panels, rows = _against_context(
        inputs, "device_bytes_decode", "MB on the device", "bytes on the device", scale=1e6, times=False
    )
    lead = "The KV cache's bytes on the device, metadata included, mean over decode steps."
    return _section("memory", "Memory against length", lead, panels, rows)


def _at_once(samples):
    """Mean number of requests that were let in and not done, over the time in which there were any; NaN = not
    measured."""
    if not {"arrival_ms", "queue_ms", "end_ms"} <= set(samples.columns):
        return np.nan
    begin, end = samples.arrival_ms + samples.queue_ms, samples.end_ms
    held = (end - begin).sum()
    changes = sorted([(t, 1) for t in begin.dropna()] + [(t, -1) for t in end.dropna()])
    busy, running = 0.0, 0
    for (t, change), (following, _) in zip(changes, changes[1:]):
        running += change
        busy += (following - t) * (running > 0)
    return held / busy if busy > 0 else np.nan


def throughput(inputs):
    panels, shown = [], []
    groups = {}
    for block in inputs.blocks:
        groups.setdefault((block.model, block.task, bool(block.workload)), []).append(block)
    for (model, task, workload), blocks in groups.items():
        points = []
        for block in blocks:
            for row in (row for row in block.rows if np.isfinite(row.mean("tokens_per_s"))):
                text = str(inputs.files[row.source].info.get("experiment_yaml", ""))
                batch = (
                    _at_once(inputs.cell(row).get("samples", pd.DataFrame())) if workload else experiment.batch(text)
                )
                if batch is not None and np.isfinite(batch):
                    points.append((batch, row, block))
        batches = {batch for batch, _, _ in points}
        if len(batches) < 2:
            continue

        def picture(axes, points=points, workload=workload):
            for batch, row, _ in points:
                draw.mark(
                    axes,
                    batch,
                    row.mean("tokens_per_s"),
                    _drawn(inputs, row),
                    row.caution(times=True),
                    *interval(inputs, row, "tokens_per_s"),
                )
            axes.set_ylim(bottom=0)
            axes.set_xlim(left=0)
            draw.frame(axes, "requests at once, mean" if workload else "batch", "tokens per second")

        title = f"{model}, {task}: throughput"
        numbers = [
            [
                row.label,
                block.workload or f"context {block.context:.0f}",
                number(float(batch)),
                number(row.mean("tokens_per_s")),
                number(row.mean("preemptions")),
                _labels(row),
            ]
            for batch, row, block in points
        ]
        columns = ["policy", "workload or context", "at once", "tokens per second", "preemptions", "labels"]
        panels.append(Panel(title, picture, Table(title, columns, numbers, 2), _notes([row for _, row, _ in points])))
        shown += [row for _, row, _ in points]
    lead = (
        "Tokens per second by the sequences that were under way together. With a workload this is the mean number of "
        "requests that had been let in and were not done, preempted ones included, and the rate is over the whole "
        "time. Without one it is the experiment's batch, and the rate is of decode steps."
    )
    return _section("throughput", "Throughput and batch", lead, panels, shown, times=True)


def _is(row, word):
    """Is the plugin of the row's policy called `word`, or the policy `word` with or without words behind it?"""
    plugins = []
    for role in ("policy", "scorer", "selector"):
        of = row.params.get(role)
        plugins += list(of) if isinstance(of, dict) else [of]
    return word in plugins or bool(re.match(rf"{word}(\b|_)", row.policy))


def _knows(row):
    return _is(row, "oracle") or _is(row, "oracle_evict")


def ladder(inputs):
    panels, shown = [], []
    for block in inputs.blocks:
        scored = [row for row in block.rows if np.isfinite(row.mean("score"))]
        if any(row.mean("score") > 1 for row in scored):  # perplexity
            continue
        for budget in dict.fromkeys(row.budget for row in scored if _knows(row)):
            rungs = [row for row in scored if row.budget in (budget, "")]
            floors = [row for row in rungs if _is(row, "random")]
            known = {row.way for row in rungs if _knows(row)}
            # Each way has an oracle of its own.
            for way in ("eviction", "selection") if {"eviction", "selection"} <= known else ("",):
                here = [row for row in rungs if not way or _is(row, "random") or row.way in (way, "")]
                if floors:
                    panels.append(_ladder_panel(inputs, block, budget, way, here, floors))
                    shown += here
    lead = (
        "Policies of one budget between the one that chooses at random and the one that knows. The way is 0 % for "
        "random and 100 % for the oracle, by the means. A place is the same over the questions that all three answered, "
        "with its 95 % interval over contexts; it is - where random and the oracle cannot be told apart."
    )
    return _section("ladder", "From random to oracle", lead, panels, shown)


def _places(inputs, rungs, draws):
    """The texts of places between random, whose draws count as one policy, and the oracle: {id of a row: text}."""
    oracle = next(row for row in rungs if _knows(row))
    draws = [row for row in draws if row.policy == draws[0].policy]
    between = [row for row in rungs if row is not oracle and row not in draws and row.budget]
    low, high = inputs.answers(*draws), inputs.answers(oracle)
    *places, ends = differences.places_between(low, high, [*(inputs.answers(row) for row in between), high])
    if not np.isfinite(ends.place):
        return {}
    texts = {id(oracle): "1", **{id(row): "0" for row in draws}}
    for row, p in zip(between, places):
        bounds = f"({_end(p.low)} to {_end(p.high)})" if not np.isnan(p.low) else "(-)"
        texts[id(row)] = f"{_end(p.place, 3)} {bounds}" if np.isfinite(p.place) else "-"
    return texts


def _end(value, digits=2):
    return f"{0.0 if abs(value) < 1e-12 else value:.{digits}g}"


def _ladder_panel(inputs, block, budget, way, rungs, draws):
    rungs = sorted(rungs, key=lambda row: row.mean("score"))
    floor = np.mean([row.mean("score") for row in draws])
    top = max(row.mean("score") for row in rungs if _knows(row))
    places = _places(inputs, [row for row in block.rows if row in rungs], draws)

    def picture(axes):
        for end in (floor, top):
            axes.axvline(end, color=draw.style.MUTED, linewidth=0.8, linestyle=(0, (3, 3)))
        for place, row in enumerate(rungs):
            low, high = interval(inputs, row)
            draw.mark(axes, row.mean("score"), place, _drawn(inputs, row), row.caution(), low, high, vertical=False)
        axes.set_yticks(range(len(rungs)), [draw.short(row.name) for row in rungs])
        axes.set_xlim(-0.03, 1.03)
        axes.set_ylim(-0.6, len(rungs) - 0.4)
        draw.frame(axes, "score", "")

    def share(row):
        return number(100 * (row.mean("score") - floor) / (top - floor) if top != floor else np.nan, 3)

    title = f"{title_of(block)}, budget {budget or '-'}" + (way and f", {way}")
    numbers = [
        [row.label, number(row.mean("score")), *map(number, interval(inputs, row)), share(row)]
        + [places.get(id(row), "-"), _labels(row)]
        for row in reversed(rungs)
    ]
    table = Table(title, ["policy", "score", "low", "high", "way %", "place", "labels"], numbers)
    return Panel(title, picture, table, _notes(block.rows), 1.2 + 0.22 * len(rungs))
