"""Sections about the inside of cells: parts of steps, and the tokens that were kept."""

import numpy as np

from kvlab_results import draw
from kvlab_results.data import title_of
from kvlab_results.of_results import _labels, _notes
from kvlab_results.page import Panel, Section, Table, number, swatches

BINS = 32


def steps(inputs):
    panels, names = [], []
    for block in inputs.blocks:
        rows = []
        for row in (row for row in block.rows if len(row.good)):
            pieces = inputs.cell(row)
            if "step_parts" in pieces and len(pieces["step_parts"]):
                rows.append((row, _middle_steps(pieces["step_parts"])))
        if rows:
            names = list(dict.fromkeys([*names, *(name for _, means in rows for name in means.index)]))
            panels.append(_steps_panel(block, rows, names))
    if not panels:
        return None
    lead = (
        "Milliseconds of an engine step in each of its parts, in a row's first cell. It is the mean over the middle "
        "half of the steps by their time: steps that hold a prompt are slower. On a GPU the parts are times between "
        "events, and such rows carry the label events."
    )
    count = len(draw.style.SERIES)
    legend = swatches(names, [f"s{i % count}" if i < count else "muted" for i in range(len(names))])
    return Section("steps", "What a step spends its time on", lead, panels, above=legend)


def _middle_steps(parts):
    """The mean of each part over the half of the steps that is neither the fastest nor the slowest quarter. Steps that
    hold a prompt are among the slowest."""
    order = parts.sum(axis=1).sort_values(kind="stable").index
    quarter = len(order) // 4
    return parts.loc[order[quarter : len(order) - quarter]].mean()


def _steps_panel(block, rows, names):
    names = list(names)

    def picture(axes):
        for place, (_, means) in enumerate(rows):
            left = 0.0
            for i, name in enumerate(names):
                width = float(means.get(name, 0))
                colour = draw.style.COLOURS[i] if i < len(draw.style.COLOURS) else draw.style.MUTED
                axes.barh(place, width, 0.62, left, color=colour, edgecolor=draw.style.SURFACE, linewidth=0.6)
                left += width
        axes.set_yticks(range(len(rows)), [draw.short(row.label) for row, _ in rows])
        axes.invert_yaxis()
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        axes.set_xlabel("ms per step")

    title = title_of(block)
    numbers = [
        [row.label, *(number(float(means.get(n, np.nan))) for n in names), number(float(means.sum())), _labels(row)]
        for row, means in rows
    ]
    table = Table(title, ["policy", *names, "sum", "labels"], numbers)
    return Panel(title, picture, table, _notes(block.rows), 1.0 + 0.26 * len(rows))


def _kept_share(kept, prompt):
    """[layer, bin]: share of (KV head, position) pairs that are kept; and the number of kept tokens [layer, head]."""
    bins = min(BINS, prompt)
    edges = np.linspace(0, prompt, bins + 1).round().astype(int)
    share, counts = [], []
    for layer in kept:
        heads = [np.asarray(head) for head in layer]
        found = np.histogram(np.concatenate(heads), edges)[0]
        share.append(found / (np.diff(edges) * len(heads)))
        counts.append([len(head) for head in heads])
    return np.array(share), np.array(counts)


def kept(inputs):
    panels, whole, pictured = [], {}, set()
    for block in inputs.blocks:
        for row in (row for row in block.rows if len(row.good)):
            pieces = inputs.cell(row)
            if not {"trace/kept_offsets", "trace/kept", "trace/token_offsets"} <= set(pieces):
                continue
            begin, fed = pieces["trace/token_offsets"][0][:2]
            prompt = int(fed - begin)
            if prompt <= 0:
                continue
            share, counts = _kept_share(inputs.files[row.source].results.kept(row.first.cell)[0], prompt)
            if (counts == prompt).all():
                whole.setdefault(row.label, []).append(title_of(block))
            else:
                panels.append(_kept_panel(block, row, share, counts, prompt))
                pictured.add(row.label)
    if not panels:
        return None
    lead = (
        f"The share of KV heads that still hold a position after the first sample's prompt, by layer, in {BINS} parts "
        "of the prompt."
    )
    section = Section("kept", "Which tokens stay", lead, panels)
    if whole:
        # Titles only where the same policy has pictures of other blocks.
        names = [f"{n} ({', '.join(titles)})" if n in pictured else n for n, titles in whole.items()]
        section.lead += f" Nothing was dropped, so there is no picture: {'; '.join(names)}."
    return section


def _kept_panel(block, row, share, counts, prompt):
    def picture(axes):
        draw.heat(axes, share, 0, 1, "share of heads")
        bins = share.shape[1]
        axes.set_xticks(np.linspace(-0.5, bins - 0.5, 5), [f"{prompt * part / 4:.0f}" for part in range(5)])
        axes.set_xlabel("position in the prompt")
        axes.set_ylabel("layer")

    title = f"{title_of(block)}, {row.label}"
    table = draw.map_table(f"{title}: tokens kept of {prompt}", counts.astype(float))
    return Panel(title, picture, table, _notes([row]), draw.map_height(len(share)))
