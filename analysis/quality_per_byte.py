"""Quality against bytes: one figure and one table of all policies of some result files.

    python3 analysis/quality_per_byte.py results/quality-recall.h5 [MORE.h5] -o quality.svg

A point is a policy with a budget. Its place is the mean share of the bare full cache's bytes that it holds on the device,
metadata included, its mean score over the tasks, and its mean divergence (KL) from the full cache. Points on the line
have no rival with fewer bytes and an equal score or KL. Without -o only the table is printed. The figure needs
matplotlib. Equal files give equal bytes.
"""

import argparse
import json
import re

import pandas as pd

import kvlab_results as kr

LEAST_KL = 1e-9  # the axis begins there; 0 is drawn there


def label(row):
    """The policy's name, with its budget where it has one."""
    budget = json.loads(row.params).get("budget", {}) if row.params else {}
    amount = next(iter(budget.values()), None) if isinstance(budget, dict) else None
    return row.policy if amount is None or amount == -1 else f"{row.policy} {amount:g}"


def points(paths):
    """A DataFrame with a row per policy and budget: name, share, score, kl, tasks, ablated."""
    cells = pd.concat([kr.summary(path) for path in paths], ignore_index=True)
    return means(cells[cells.status == "ok"])


def means(cells):
    cells = cells.assign(name=[label(row) for row in cells.itertuples()], share=1 / cells.compression)
    if cells.empty:
        raise SystemExit("got no finished cell, wanted some")
    wanted = cells.task.nunique()
    grouped = cells.groupby(["model", "name"], sort=False)
    frame = grouped.agg(share=("share", "mean"), score=("score", "mean"), kl=("kl", "mean"), tasks=("task", "nunique"),
                        ablated=("ablated", "first")).reset_index()
    if (frame.tasks != wanted).any():
        lacking = ", ".join(frame.name[frame.tasks != wanted])
        raise SystemExit(f"got policies that lack some of the {wanted} tasks, wanted means over the same ones: {lacking}")
    return frame.sort_values(["model", "share", "name"]).reset_index(drop=True)


def frontier(frame, column, better):
    """The rows that no row with as few bytes beats in `column`, by rising bytes."""
    rows, best = [], None
    for row in frame.sort_values("share").itertuples():
        value = getattr(row, column)
        if best is None or better(value, best):
            rows.append(row)
            best = value
    return rows


def packed(path):
    """Two decimals of a point, and no indents: the file is kept in the tree."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    with open(path, "w", encoding="utf-8") as file:
        file.write(re.sub(r"\s*\n\s*", "\n", re.sub(r"\b([1-9]\d*\.\d\d)\d+", r"\1", text)))


def draw(frame, path):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kvlab"
    from matplotlib import pyplot as plt

    models = list(frame.model.unique())
    figure, axes = plt.subplots(len(models), 2, figsize=(13, 6 * len(models)), squeeze=False)
    for (left, right), model in zip(axes, models):
        of = frame[frame.model == model]
        for axis, column, better in ((left, "score", lambda a, b: a > b), (right, "kl", lambda a, b: a < b)):
            shown = of.assign(kl=of.kl.clip(lower=LEAST_KL))
            best = frontier(shown, column, better)
            axis.plot([100 * r.share for r in best], [getattr(r, column) for r in best], color="0.7", zorder=1)
            for group, marker in ((shown[shown.ablated == ""], "o"), (shown[shown.ablated != ""], "x")):
                axis.scatter(100 * group.share, group[column], marker=marker, zorder=2)
            for row in shown.itertuples():
                axis.annotate(row.name, (100 * row.share, getattr(row, column)), fontsize=6, xytext=(3, 3),
                              textcoords="offset points")
            axis.set_xlabel("bytes on the device, % of the bare full cache")
            axis.set_title(model)
            axis.grid(alpha=0.3)
        left.set_ylabel("score, mean over tasks")
        right.set_ylabel("KL from the full cache, nats (0 is drawn at the axis)")
        right.set_yscale("log")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    packed(path)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("files", nargs="+", metavar="F.h5")
    parser.add_argument("-o", "--output", help="write the figure there, as SVG")
    args = parser.parse_args()
    frame = points(args.files)
    shown = frame.assign(share=(100 * frame.share).map("{:.1f}".format), score=frame.score.map("{:.3f}".format),
                         kl=frame.kl.map("{:.2g}".format))
    print(shown.rename(columns={"share": "bytes %"}).drop(columns=["tasks"]).to_string(index=False))
    if args.output:
        draw(frame, args.output)


if __name__ == "__main__":
    main()
