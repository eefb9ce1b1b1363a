"""Sections about the heads of a model: arrays of profile files."""

import numpy as np

from kvlab_results import draw
from kvlab_results.page import Panel, Section, Table, number


def classes_of(array):
    """The classes that a unit names: "role of a KV head, one of anchor, pivot"; [] for an array of numbers."""
    _, found, names = array.unit.rpartition(", one of ")
    return names.split(", ") if found and array.values.ndim == 2 else []


def is_set(array):
    """Is it a set of heads: zeros and ones, by layer and head?"""
    return array.values.ndim == 2 and not classes_of(array) and bool(np.isin(array.values, (0, 1)).all())


def set_of(arrays):
    """(name, array) of a profiler's set of heads, the first by name; None without one."""
    return next(((name, array) for name, array in sorted(arrays.items()) if is_set(array)), None)


def _all(inputs):
    for file in inputs.profiles:
        for profiler, arrays in sorted(file.profilers.items()):
            for name, array in sorted(arrays.items()):
                yield file, profiler, name, array


def _title(file, profiler, name):
    return f"{file.info.get('model', '')}, {file.name}: {profiler} {name}"


def overlap(inputs):
    panels = [*_set_overlaps(inputs), *_head_similarities(inputs)]
    lead = (
        "How much heads have in common: sets of heads of profiles of one model (the share of the row's heads that the "
        "column's file has too), and the heads of a layer among each other."
    )
    return Section("overlap", "Head overlap", lead, panels) if panels else None


def _set_overlaps(inputs):
    groups = {}
    for file, profiler, name, array in _all(inputs):
        if is_set(array):
            key = (file.info.get("model_fingerprint", ""), array.values.shape, profiler, name)
            groups.setdefault(key, []).append((file, array.values.astype(float)))
    for (_, _, profiler, name), sets in groups.items():
        if len(sets) < 2:
            continue
        names = [file.name for file, _ in sets]
        with np.errstate(invalid="ignore"):
            share = np.array([[(a * b).sum() / a.sum() if a.sum() else np.nan for _, b in sets] for _, a in sets])
        by_chance = [b.mean() for _, b in sets]

        def picture(axes, share=share, names=names):
            draw.heat(axes, share, 0, 1, "share", show=len(names) <= 8)
            labels = [draw.short(n, 18) for n in names]
            axes.set_xticks(range(len(names)), labels, rotation=30, ha="right")
            axes.set_yticks(range(len(names)), labels)

        title = f"{sets[0][0].info.get('model', '')}: {profiler} {name}"
        rows = [[n, *(number(float(v), 3) for v in of)] for n, of in zip(names, share)]
        rows.append(["by chance", *(number(float(v), 3) for v in by_chance)])
        yield Panel(title, picture, Table(title, ["heads of", *names], rows), height=1.6 + 0.22 * len(names))


def _head_similarities(inputs):
    """Arrays [layer, head, head], whose layers are laid out as tiles."""
    for file, profiler, name, array in _all(inputs):
        values = array.values
        if (
            values.ndim != 3
            or values.shape[1] != values.shape[2]
            or ", by " in array.unit
            or values.shape[1] < 2
            or not np.isfinite(values).any()
        ):
            continue
        layers, heads, _ = values.shape
        across = int(np.ceil(np.sqrt(layers)))
        down = -(-layers // across)
        tiles = np.full((down * (heads + 1), across * (heads + 1)), np.nan)
        for layer, matrix in enumerate(values):
            row, column = (layer // across) * (heads + 1), (layer % across) * (heads + 1)
            tiles[row : row + heads, column : column + heads] = matrix

        def picture(axes, tiles=tiles, heads=heads, across=across, array=array):
            draw.heat(axes, tiles, min(0, float(np.nanmin(tiles))), float(np.nanmax(tiles)), array.unit)
            middle = (heads - 1) / 2
            axes.set_xticks([middle + i * (heads + 1) for i in range(across)], [f"+{i}" for i in range(across)])
            down = range(tiles.shape[0] // (heads + 1))
            axes.set_yticks([middle + i * (heads + 1) for i in down], [str(i * across) for i in down])
            axes.set_ylabel("layer")

        title = _title(file, profiler, name)
        rows = [
            [f"{layer}, {head}", *(number(float(v), 3) for v in values[layer, head])]
            for layer in range(layers)
            for head in range(heads)
        ]
        table = Table(f"{title}: {array.unit}", ["layer, head", *(f"head {h}" for h in range(heads))], rows)
        yield Panel(title, picture, table, ["A tile is a layer: its heads across and down."], min(2 + 0.35 * down, 4.5))


def curves(inputs):
    panels = []
    for file, profiler, name, array in _all(inputs):
        if array.values.ndim != 3 or ", by " not in array.unit:
            continue
        unit, _, by = array.unit.rpartition(", by ")
        found = set_of(file.profilers[profiler])
        if found and found[1].values.shape == array.values.shape[:2]:
            inside = found[1].values == 1
            groups = {found[0]: array.values[inside], "other heads": array.values[~inside]}
        else:
            groups = {"all heads": array.values.reshape(-1, array.values.shape[2])}
        groups = {n: v for n, v in groups.items() if len(v) and np.isfinite(v).any(axis=0).all()}
        if groups:
            panels.append(_curves_panel(_title(file, profiler, name), groups, unit, by))
    if not panels:
        return None
    if any("RCO" not in panel.notes[0] for panel in panels):
        return Section("rco", "Curves", "What profilers measured, mean of heads. The band holds half of them.", panels)
    lead = (
        "How long a head's best pages stay its best: rank-change overlap with an earlier step, mean of heads. 0 is "
        "chance. The band holds half of the heads."
    )
    return Section("rco", "RCO curves", lead, panels)


def _curves_panel(title, groups, unit, by):
    marks = [draw.style.Style(draw.style.COLOURS[i], m, "") for i, m in ((6, "^"), (0, "o"))]

    def picture(axes):
        for (name, values), its in zip(groups.items(), marks):
            x = np.arange(1, values.shape[1] + 1)
            axes.fill_between(
                x, *np.nanquantile(values, [0.25, 0.75], axis=0), color=its.colour, alpha=0.18, linewidth=0
            )
            means = np.nanmean(values, axis=0)
            axes.plot(x, means, its.mark, color=its.colour, linestyle="-", label=name)
        axes.xaxis.set_major_locator(draw.MaxNLocator(integer=True))
        axes.legend(frameon=False, fontsize=draw.style.SMALL)
        draw.frame(axes, by, "overlap" if "RCO" in unit else unit.split(" ")[0])

    steps = next(iter(groups.values())).shape[1]
    rows = [
        [str(step + 1), *(number(float(np.nanmean(v[:, step])), 3) for v in groups.values())] for step in range(steps)
    ]
    table = Table(f"{title}: {unit}", [by, *(f"{n} ({len(v)})" for n, v in groups.items())], rows)
    return Panel(title, picture, table, [unit])


def roles(inputs):
    panels = []
    for file, profiler, name, array in _all(inputs):
        names = classes_of(array) or (["other heads", name] if is_set(array) else [])
        if not names:
            continue
        if classes_of(array):
            letters = [n[:1] for n in names]
            colours = [draw.style.COLOURS[i % len(draw.style.COLOURS)] for i in range(len(names))]
        else:
            letters, colours = ["", "•"], [draw.style.STEPS[1], draw.style.COLOURS[1]]

        def picture(axes, array=array, letters=letters, colours=colours):
            draw.classes(axes, array.values, letters, colours)

        counts = [[names[i], str(int((array.values == i).sum()))] for i in range(len(names))]
        title = _title(file, profiler, name)
        note = ", ".join(f"{letter or 'blank'} = {n}" for n, letter in zip(names, letters))
        panels.append(
            Panel(
                title,
                picture,
                Table(f"{title}: heads", ["class", "heads"], counts),
                [note],
                draw.map_height(len(array.values)),
            )
        )
    lead = "The class of each KV head, by layer: roles, and sets of heads that a profiler tells apart."
    return Section("roles", "Role maps", lead, panels) if panels else None


def _layers(inputs):
    """Arrays [layer], a bar each."""
    for file, profiler, name, array in _all(inputs):
        values = array.values
        if values.ndim != 1 or not array.unit.endswith(", by layer") or not np.isfinite(values).any():
            continue

        def picture(axes, values=values, unit=array.unit):
            axes.bar(np.arange(len(values)), values, color=draw.style.COLOURS[0])
            draw.frame(axes, "layer", unit.split(",")[0])

        title = _title(file, profiler, name)
        rows = [[str(layer), number(float(v), 3)] for layer, v in enumerate(values)]
        yield Panel(title, picture, Table(f"{title}: {array.unit}", ["layer", "value"], rows), [array.unit])


def _attention(inputs):
    """Arrays [layer, head, row, column] of shares, the mean over the heads."""
    for file, profiler, name, array in _all(inputs):
        unit, found, by = array.unit.rpartition(", by ")
        if array.values.ndim != 4 or not found or not np.isfinite(array.values).any():
            continue
        there = np.isfinite(array.values).any(axis=(0, 1))
        mean = np.full(there.shape, np.nan)
        count = np.isfinite(array.values).sum(axis=(0, 1))
        mean[there] = np.nansum(array.values, axis=(0, 1))[there] / count[there]
        mean = mean[there.any(axis=1)][:, there.any(axis=0)]
        orders = np.where(np.isfinite(mean), np.log10(np.maximum(np.nan_to_num(mean), 1e-4)), np.nan)

        def picture(axes, orders=orders, by=by):
            draw.heat(axes, orders, -4, 0, "log10 of the share")
            axes.set_xlabel(by)
            axes.set_ylabel("rows of steps")

        title = _title(file, profiler, name)
        rows = [[str(row), *(number(float(v), 2) for v in values)] for row, values in enumerate(mean)]
        table = Table(f"{title}: {unit}", ["row", *map(str, range(mean.shape[1]))], rows)
        yield Panel(title, picture, table, [array.unit, "mean of all heads"], 4)


def maps(inputs):
    panels = [*_layers(inputs), *_attention(inputs)]
    for file, profiler, name, array in _all(inputs):
        values = array.values
        if values.ndim != 2 or classes_of(array) or is_set(array) or not np.isfinite(values).any():
            continue
        low, high = float(np.nanmin(values)), float(np.nanmax(values))

        def picture(axes, values=values, low=low, high=high):
            draw.heat(axes, values, low, high, "")
            draw.whole_numbers(axes, "head")

        title = _title(file, profiler, name)
        panels.append(
            Panel(
                title,
                picture,
                draw.map_table(f"{title}: {array.unit}", values),
                [array.unit],
                draw.map_height(len(values)),
            )
        )
    lead = "What profilers measured of each head, by layer."
    return Section("maps", "Maps of heads", lead, panels) if panels else None
