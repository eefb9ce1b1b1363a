"""Kinds of pictures that several sections share."""

import numpy as np
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from kvlab_results import page, style

plain = FuncFormatter(lambda value, _: f"{value:g}")


def mark(axes, x, y, its, hollow, below=None, above=None, vertical=True):
    """A mark with its interval, if it has one."""
    if below is not None and np.isfinite([below, above]).all():
        ends = ([x, x], [below, above]) if vertical else ([below, above], [y, y])
        axes.plot(*ends, color=its.colour, linewidth=1, zorder=2)
    axes.plot([x], [y], its.mark, color=its.colour, markerfacecolor=style.SURFACE if hollow else its.colour, zorder=3)


def names(axes, texts):
    """Small texts beside marks: [(x, y, text)]. One that would cover another is left out: equal texts often meet, and
    the table has all. Call it when the axes have their limits."""
    placed = []
    to_axes = axes.transData + axes.transAxes.inverted()
    for x, y, text in texts:
        across, up = to_axes.transform((x, y))
        left = across > 0.85
        begin = across - 0.03 * len(text) - 0.02 if left else across + 0.02
        box = (begin, up, begin + 0.03 * len(text), up + 0.09)
        if text and not any(a < box[2] and box[0] < c and b < box[3] and box[1] < d for a, b, c, d in placed):
            placed.append(box)
            axes.annotate(
                text,
                (x, y),
                xytext=(-4 if left else 4, 3),
                ha="right" if left else "left",
                textcoords="offset points",
                fontsize=style.SMALL,
                color=style.MUTED,
            )


def short(text, most=26):
    """For a label of an axis. The table below a picture has the whole text."""
    return text if len(text) <= most else text[: most - 1] + "…"


def line(axes, x, y, its):
    axes.plot(x, y, color=its.colour, linewidth=1.2, zorder=1)


def frame(axes, x, y):
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid()


def context_axis(axes, contexts):
    """Lengths as they are, on a logarithmic axis."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted(contexts)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(plain)
    if len(contexts) > 5:
        axes.tick_params(axis="x", labelrotation=45)


def log_axis(axes):
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(numticks=6))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(plain)


def _norm(low, high):
    if not high > low:
        high = low + 1
    return BoundaryNorm(np.linspace(low, high, len(style.RAMP) + 1), len(style.RAMP))


def _text_colour(norm, value):
    return style.INK if norm(value) < 5 else style.SURFACE


def heat(axes, values, low, high, unit, show=False):
    """values[row, column] from low to high; row 0 is on top. NaN stays empty. show: the numbers in the cells."""
    values = np.ma.masked_invalid(np.asarray(values, float))
    norm = _norm(low, high)
    rows, columns = values.shape
    mesh = axes.pcolormesh(
        np.arange(columns + 1) - 0.5,
        np.arange(rows + 1) - 0.5,
        values,
        cmap=style.SEQUENTIAL,
        norm=norm,
        edgecolors="face",
        linewidth=0.3,
    )
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    if show:
        for (row, column), value in np.ndenumerate(values):
            if not np.ma.is_masked(value):
                axes.text(
                    column, row, f"{value:.2g}", ha="center", va="center", fontsize=style.SMALL, color=_text_colour(norm, value)
                )
    bar = axes.figure.colorbar(
        mesh,
        ax=axes,
        label=unit,
        shrink=0.9,
        ticks=[low, (low + norm.boundaries[-1]) / 2, norm.boundaries[-1]],
        format=FuncFormatter(lambda v, _: f"{v:.3g}"),
    )
    bar.outline.set_visible(False)


def classes(axes, values, letters, colours):
    """values[row, column]: a class's index. Each cell has its colour and its letter."""
    values = np.asarray(values, float)
    known = np.ma.masked_where(~((values >= 0) & (values < len(letters))), values)
    rows, columns = values.shape
    axes.pcolormesh(
        np.arange(columns + 1) - 0.5,
        np.arange(rows + 1) - 0.5,
        known,
        vmin=-0.5,
        vmax=len(colours) - 0.5,
        cmap=ListedColormap(colours),
        edgecolors=style.SURFACE,
        linewidth=0.8,
    )
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    if columns <= 16:
        for (row, column), value in np.ndenumerate(known):
            if not np.ma.is_masked(value):
                axes.text(column, row, letters[int(value)], ha="center", va="center", fontsize=style.SMALL, color=style.SURFACE)
    whole_numbers(axes, "KV head")


def whole_numbers(axes, heads):
    axes.set_xlabel(heads)
    axes.set_ylabel("layer")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, nbins=10))


def map_height(rows):
    return min(2.2 + 0.09 * rows, 6)


def map_table(title, values):
    """Layers down, heads across."""
    values = np.asarray(values)
    rows = [[str(layer), *(page.number(float(v)) for v in row)] for layer, row in enumerate(values)]
    return page.Table(title, ["layer", *(f"head {h}" for h in range(values.shape[1]))], rows)
