"""What a report reads: cells of result files, grouped as `kvlab report` groups them, and arrays of profile files."""

import json
import pathlib
from collections import namedtuple

import h5py
import numpy as np
import pandas as pd

import kvlab_results as kr
from kvlab_results import differences

# What the labels of core/result/report.cpp mean. A cell with one of CAUTION has hollow marks in figures.
LABELS = {
    "injected": "the selection follows a recorded or made-up trace, not this model's attention",
    "functional": "stored values are changed as the method would change them; bytes and times are those of the full-width cache and of what the method keeps beside it",
    "oracle": "knows what no method can know in time, never timed",
    "synthetic": "random weights: times and bytes count, scores and fidelity say nothing",
    "sampled": "answers are drawn; the score is the mean over draws",
    "replayed": "a recording gave each step the full cache's queries, keys and values; no text was generated",
    "graph": "decode steps are launched as CUDA graphs",
    "disturbed": "other processes took cores that this cell needed: its times are too long",
    "events": "events lie between the parts of steps, and no two parts of the main stream overlap, which costs time",
    "eager": "steps are launched kernel by kernel with events between their parts, which costs time",
}
# Of an oracle, by the way in which its policy saves (Row.way).
ORACLES = {
    "eviction": "keeps what the full cache's recorded answer attends to: a reference, no bound, never timed",
    "selection": "chooses by the true attention of the step that reads: a bound, never timed",
}
CAUTION = {"injected", "functional", "oracle", "synthetic", "disturbed"}

# Columns of /summary that a report reads. Files of earlier versions lack some.
_TEXT = ["cell", "model", "policy", "params", "ablated", "task", "workload", "status", "error", "labels", "warnings"]
_NUMBERS = [
    "context_tokens",
    "budget_tokens",
    "budget_bytes",
    "seed",
    "repeat",
    "samples",
    "score",
    "score_lo",
    "score_hi",
    "kl",
    "top1",
    "mass",
    "device_bytes_peak",
    "host_bytes_peak",
    "device_bytes_decode",
    "compression",
    "fired",
    "ttft_ms",
    "tpot_ms_p50",
    "tpot_ms_p95",
    "tpot_ms_mean",
    "tokens_per_s",
    "ttft_ms_p95",
    "queue_ms_p50",
    "preemptions",
]


class ReportError(Exception):
    """Something is wrong with what was given."""


ResultFile = namedtuple("ResultFile", "name results info")
# profilers: {profiler: {array: Array}}
ProfileFile = namedtuple("ProfileFile", "name info profilers")
Array = namedtuple("Array", "values unit")


def split_labels(text):
    return text.replace(",", " ").split()


class Row:
    """Seeds and repeats of one policy with one set of parameters."""

    def __init__(self, cells, name):
        self.good, self.bad = cells[cells.status == "ok"], cells[cells.status != "ok"]
        self.first = (self.good if len(self.good) else self.bad).iloc[0]
        self.policy = self.first.policy
        self.source = self.first.source
        self.name = name  # with the parameters in which it differs from rows of the same policy
        params = json.loads(self.first.params or "{}")
        self.params = params if isinstance(params, dict) else {}

    def values(self, column):
        return self.good[column].dropna()

    def mean(self, column):
        values = self.values(column)
        return values.mean() if len(values) else np.nan

    def deviation(self, column):
        """The sample standard deviation; NaN for fewer than two cells."""
        return self.values(column).std(ddof=1)

    @property
    def labels(self):
        """In the order of the first cell that has each."""
        return list(dict.fromkeys(label for text in self.good.labels for label in split_labels(text)))

    @property
    def all_labels(self):
        """Those of failed cells, too."""
        return list(dict.fromkeys(label for of in (self.good, self.bad) for t in of.labels for label in split_labels(t)))

    def caution(self, times=False):
        """The labels that make the row's marks hollow. times: `disturbed` too, which makes times too long."""
        return [label for label in self.labels if label in CAUTION and (times or label != "disturbed")]

    @property
    def way(self):
        """How its policy saves: "eviction" or "selection"; "" where its parameters do not tell."""
        return "eviction" if self.params.get("scorer") else "selection" if self.params.get("selector") else ""

    def meaning(self, label):
        """What a label says of this row."""
        return ORACLES.get(self.way, LABELS["oracle"]) if label == "oracle" else LABELS.get(label, "-")

    @property
    def budget(self):
        if self.first.budget_bytes >= 0:
            return f"{self.first.budget_bytes / 1e6:.4g} MB"
        tokens = self.mean("budget_tokens")
        return f"{tokens:.4g}" if tokens >= 0 else ""

    @property
    def label(self):
        """Name and budget, for a figure."""
        return f"{self.name} {self.budget}".strip()


Block = namedtuple("Block", "model task context workload rows")


def title_of(block, context=True):
    parts = [block.model, block.task]
    if context and block.context >= 0:
        parts.append(f"context {block.context:.0f}")
    return ", ".join(parts + [block.workload] * bool(block.workload))


def _varying(params, others):
    """The parameters in which `params` differs from `others`, as text. A budget has a column of its own."""
    flats = [kr._flat(other) for other in others]
    own = kr._flat(params)
    names = sorted(n for n in set().union(*flats, own) if not n.startswith("budget."))
    return " ".join(f"{n}={own[n]}" for n in names if n in own and any(f.get(n) != own[n] for f in flats))


def _key(cell):
    return tuple(cell[c] for c in ("source", "policy", "params", "ablated", "identity"))


def _belongs(cell, group):
    """As `kvlab report` has it: the same seed and repeat twice, and budgets that are more than 5 % apart, mean two
    configurations. Failed cells may have no measured budget, and equal bytes may be other tokens for each seed."""
    first = next((other for other in group if other.status == "ok"), group[0])
    own, known = cell.budget_tokens, first.budget_tokens
    bytes_ = [-1 if np.isnan(c.budget_bytes) else c.budget_bytes for c in (cell, first)]
    near = own == known or (np.isnan(own) and np.isnan(known)) or abs(own - known) <= 0.05 * abs(known)
    if _key(cell) != _key(first) or bytes_[0] != bytes_[1]:
        return False
    if bytes_[0] < 0 and cell.status == first.status == "ok" and not near:
        return False
    return all((cell.seed, cell.repeat) != (other.seed, other.repeat) for other in group)


def _groups(cells):
    """The cells of each row, which differ in seed and repeat alone: [[index, ...], ...]"""
    groups = []
    for _, cell in cells.iterrows():
        group = next((group for group in groups if _belongs(cell, group)), None)
        if group is None:
            groups.append(group := [])
        group.append(cell)
    return [[cell.name for cell in group] for group in groups]


def blocks_of(cells):
    """Blocks in the order of the file, with their rows."""
    cells = cells.assign(identity=[" ".join(n for n in split_labels(t) if n != "disturbed") for t in cells.labels])
    blocks = []
    for key, of in cells.groupby(["model", "task", "context_tokens", "workload"], sort=False, dropna=False):
        model, task, context, workload = key
        params = {policy: list(group.params) for policy, group in of.groupby("policy", sort=False)}
        rows = []
        for own in _groups(of):
            group = of.loc[own].assign(again=sum(_key(row.first) == _key(of.loc[own[0]]) for row in rows))
            first = group.iloc[0]
            rows.append(Row(group, f"{first.policy} {_varying(first.params, params[first.policy])}".strip()))
        blocks.append(Block(model, task, context, workload, rows))
    return blocks


def _names(paths):
    """The files' names without folders, so that a report does not depend on where they lie. Equal names get their
    folder's in front, and numbers where that is not enough."""
    names, seen = [], {}
    stems = [pathlib.Path(path).stem for path in paths]
    for path, stem in zip(map(pathlib.Path, paths), stems):
        if stems.count(stem) > 1 and path.parent.name:
            stem = f"{path.parent.name}/{stem}"
        seen[stem] = seen.get(stem, 0) + 1
        names.append(stem if seen[stem] == 1 else f"{stem} ({seen[stem]})")
    return names


def _profile(file):
    found = {}
    for profiler, group in file["profilers"].items():
        arrays = {n: d for n, d in group.items() if isinstance(d, h5py.Dataset) and not d.dtype.names}
        found[profiler] = {name: Array(data[:], data.attrs.get("units", "")) for name, data in arrays.items()}
    return found


class Inputs:
    """The files of a report. A trace or a ledger is read when a figure needs it."""

    def __init__(self, paths):
        self.files, self.profiles, self._pooled = [], [], {}
        frames = []
        for path, name in zip(paths, _names(paths)):
            try:
                self._add(path, name, frames)
            except (OSError, KeyError, ValueError) as error:
                self.close()
                raise ReportError(f"{path}: got no readable file ({error}), wanted one that kvlab wrote") from error
        self.cells = (
            pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=_TEXT + _NUMBERS + ["source"])
        )
        self.blocks = blocks_of(self.cells) if frames else []

    def _add(self, path, name, frames):
        with h5py.File(path, "r") as file:
            if file.attrs.get("kind") == "profile":
                self.profiles.append(ProfileFile(name, dict(file.attrs), _profile(file)))
                return
        results = kr.open(path)
        self.files.append(ResultFile(name, results, results.info()))
        frame = results.summary()
        for column in _TEXT:
            frame[column] = frame[column] if column in frame else ""
        for column in _NUMBERS:
            frame[column] = frame[column].astype(float) if column in frame else np.nan
            if column not in ("context_tokens", "seed", "repeat", "kl", "score", "score_lo", "score_hi"):
                frame[column] = frame[column].where(frame[column] != -1)  # not measured
        for params in frame.params:
            json.loads(params or "{}")  # refuses what is none
        frames.append(frame[_TEXT + _NUMBERS].assign(source=len(self.files) - 1))

    def close(self):
        for file in self.files:
            file.results.close()

    def files_of(self, rows):
        """For a table of these rows: whether they come from several files, and the line below it that names the only one
        of several files."""
        names = dict.fromkeys(self.files[row.source].name for row in rows)
        return len(names) > 1, [f"file: {name}" for name in names] if len(names) == 1 < len(self.files) else []

    def cell(self, row):
        """The pieces of the row's first cell."""
        return self.files[row.source].results.cell(row.first.cell)

    def answers(self, *rows, repeat=None):
        """Of the rows' cells (of one repeat alone): {question: differences.Answer}."""
        cells = [c for row in rows for c in row.good.itertuples() if repeat is None or c.repeat == repeat]
        samples = [(c.seed, self.files[c.source].results.cell(c.cell).get("samples")) for c in cells]
        return differences.answers_of(samples)

    def pooled_interval(self, row):
        """The 95 % interval of the score of all the row's cells, over their contexts."""
        if id(row) not in self._pooled:
            self._pooled[id(row)] = differences.pooled_interval(self.answers(row))
        return self._pooled[id(row)]
