"""The one Python reader of kvlab's result files (HDF5 schema version 1). It needs h5py, numpy and pandas.

>>> import kvlab_results as kr
>>> kr.summary("results/quickstart.h5")            # a DataFrame, one row per cell
>>> kr.summary("results/quickstart.h5", parameters=True)  # with one column per policy parameter
>>> kr.cell("results/quickstart.h5", "3f2a...")    # a dict: tables as DataFrames, arrays as numpy arrays
>>> kr.kept("results/mine.h5", "snapkv/tokens=64")[0][3][1]  # sample 0, layer 3, KV head 1: positions kept
>>> kr.tokens("results/mine.h5", "snapkv/tokens=64")[0].prompt  # the token ids that were prefilled
>>> with kr.open("results/mine.h5") as results:    # reads no array before it is asked for, and then the wanted part
...     results.kept("snapkv/tokens=64")[0][3][1]

A cell is named by its id, by the beginning of it, or by words that fit no other cell, joined by "/". A word is the
policy, the task or `seed=N`, whole or in part, or a parameter as `window=32`. kept, tokens and selected need
`metrics: [trace]`.

Without this file (text comes as bytes):
>>> pd.DataFrame(h5py.File("results/quickstart.h5")["summary"][:]).apply(
...     lambda c: c.str.decode("utf-8") if c.dtype == object else c)
"""

import json
from collections import namedtuple
from collections.abc import Mapping, Sequence

import h5py
import pandas as pd

SCHEMA_VERSION = 1


def _open(path):
    file = h5py.File(path, "r")
    version = file.attrs.get("schema_version")
    if version != SCHEMA_VERSION:
        file.close()
        raise ValueError(f"{path}: got schema version {version}, wanted {SCHEMA_VERSION}")
    return file


def _table(dataset):
    frame = pd.DataFrame(dataset[:])
    for name in dataset.dtype.names:
        if h5py.check_string_dtype(dataset.dtype[name]):
            frame[name] = frame[name].map(lambda v: v.decode() if isinstance(v, bytes) else v)
    frame.attrs["units"] = dict(zip(dataset.dtype.names, dataset.attrs["units"]))
    return frame


def info(path):
    """The root attributes: what ran, where, when and with which versions."""
    with _open(path) as file:
        return dict(file.attrs)


def summary(path, parameters=False):
    """/summary as a DataFrame; NaN or -1 = not measured; units in .attrs["units"].

    parameters: adds the columns of parameters() behind the others, as "params.NAME" where another column has the
    name.
    """
    with _open(path) as file:
        frame = _table(file["summary"])
    if not parameters:
        return frame
    more = _parameters(frame).rename(columns=lambda name: f"params.{name}" if name in frame else name)
    whole = frame.join(more, on="cell")
    whole.attrs = frame.attrs
    return whole


def _flat(params):
    """{"scorer": {"snapkv": {"window": 32}}, "budget": {"tokens": 64}} -> {"window": 32, "budget.tokens": 64}."""
    flat = {}

    def walk(value, path):
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                walk(inner, path + [key])
        else:  # a plugin without parameters is named with True
            own = len(path) > 2 and path[0] in ("policy", "scorer", "selector")
            flat[".".join(path[2:] if own else path)] = True if value in ({}, None) else value

    walk(json.loads(params or "{}"), [])
    flat.pop("", None)
    return flat


def _parameters(frame):
    rows = [_flat(params) for params in frame["params"]]
    names = sorted(set().union(*rows))
    return pd.DataFrame([[row.get(name) for name in names] for row in rows], columns=names, index=frame["cell"])


def parameters(path):
    """One row per cell id, one column per policy parameter in the words of an experiment file: "window",
    "budget.tokens", "codec.int8.keys". A parameter that a cell does not have is None or NaN."""
    return _parameters(summary(path))


def _fits(row, flat, word):
    """2: the word is one of the row's; 1: it is part of one; 0: neither."""
    name, equals, value = word.partition("=")
    if equals and name != "seed":
        texts = {n: str(v).lower() if isinstance(v, bool) else str(v) for n, v in flat.items()}
        return 2 * any(t == value and (n == name or n.endswith("." + name)) for n, t in texts.items())
    texts = [row.policy, row.task, f"seed={row.seed}"]
    return 2 if word in texts else int(any(word in text for text in texts[:2]))


def find(path, cell):
    """The id of the one cell that `cell` names (see above). LookupError when none or several fit."""
    return _find(path, summary(path), cell)


def _find(path, rows, cell):
    if cell in set(rows["cell"]):
        return cell
    begins = [id for id in rows["cell"] if cell and id.startswith(cell)]
    if len(begins) == 1:
        return begins[0]
    found = [(row, _flat(row.params)) for row in rows.itertuples()]
    for word in cell.split("/"):
        fits = [_fits(row, flat, word) for row, flat in found]
        best = max(fits, default=0)
        found = [pair for pair, fit in zip(found, fits) if best and fit == best]
    if len(found) == 1:
        return found[0][0].cell
    listed = [row for row, _ in found] or list(rows.itertuples())
    lines = "".join(f"\n  {row.cell}  {row.policy} {row.params} {row.task} seed={row.seed}" for row in listed[:20])
    more = f"\n  and {len(listed) - 20} more" if len(listed) > 20 else ""
    count = f"{len(found)} cells that fit" if found else "no cell that fits"
    raise LookupError(f"{path}: got {count} {cell!r}, wanted one of{lines}{more}")


def warnings(path):
    """The warnings of all cells, each once, as {warning: [cell, ...]}."""
    found = {}
    for _, row in summary(path).iterrows():
        for line in row.get("warnings", "").splitlines():  # files of earlier versions have no such column
            found.setdefault(line, []).append(row["cell"])
    return found


class Cell(Mapping):
    """The pieces of one cell of an open file, by their path below /cells/<id>. A table is read when it is asked for. An
    array is an h5py.Dataset: array[begin:end] reads these entries, array[:] reads all. Valid while the file is open."""

    def __init__(self, group):
        self._group = group
        self._names = []
        group.visititems(lambda name, node: self._names.append(name) if isinstance(node, h5py.Dataset) else None)

    def __getitem__(self, name):
        if name not in self._names:
            raise KeyError(name)
        node = self._group[name]
        if node.dtype.names:
            return _table(node)
        return pd.DataFrame(node[:], columns=list(node.attrs["parts"])) if "parts" in node.attrs else node

    def __iter__(self):
        return iter(self._names)

    def __len__(self):
        return len(self._names)


class Kept(Sequence):
    """[sample][layer][kv_head] -> numpy array, read from the open file when the last index is given."""

    def __init__(self, values, offsets):
        self._values, self._offsets = values, offsets

    def __getitem__(self, index):
        if isinstance(index, slice):
            return Kept(self._values, self._offsets[index])
        at = self._offsets[index]
        return self._values[at[0] : at[1]] if at.ndim == 1 else Kept(self._values, at)

    def __len__(self):
        return len(self._offsets)


class Results:
    """An open result file. Close it, or use it in a `with`."""

    def __init__(self, path):
        self.path = path
        self._file = _open(path)
        self._rows = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._file.close()

    def info(self):
        return dict(self._file.attrs)

    def summary(self):
        if self._rows is None:
            self._rows = _table(self._file["summary"])
        return self._rows.copy()

    def cell(self, cell):
        """A Cell. Only the names of its pieces are read."""
        return Cell(self._file["cells"][_find(self.path, self.summary(), cell)])

    def kept(self, cell):
        """As kept() below, but a head's positions are read when it is indexed."""
        pieces = _with_trace(self.path, cell, self.cell(cell), "trace/kept_offsets")
        return Kept(pieces["trace/kept"], pieces["trace/kept_offsets"][:])


def open(path):
    """The file as Results, which read no more than what is asked for: for traces that do not fit in memory."""
    return Results(path)


def _read(piece):
    return piece[:] if isinstance(piece, h5py.Dataset) else piece


def cell(path, cell):
    """Everything about one cell by its path below /cells/<id>, e.g. "samples", "fidelity/kl", "trace/kept_offsets".

    Tables are DataFrames, arrays numpy arrays; step_parts is a DataFrame with one column per part. Pieces that were not
    measured are absent.
    """
    with open(path) as results:
        return {name: _read(piece) for name, piece in results.cell(cell).items()}


def _with_trace(path, id, pieces, piece):
    if piece not in pieces:
        raise LookupError(f"{path}: got cell {id!r} without {piece}, wanted a run with metrics: [trace]")
    return pieces


def _traced(path, id, *wanted):
    """The wanted pieces, read whole. The first one must be there."""
    with open(path) as results:
        pieces = _with_trace(path, id, results.cell(id), wanted[0])
        return {name: _read(pieces[name]) for name in wanted if name in pieces}


def kept(path, cell):
    """The text positions kept after each prompt, ascending: [sample][layer][kv_head] -> numpy array.

    A later turn has the positions that the cache held before its question.
    """
    trace = _traced(path, cell, "trace/kept_offsets", "trace/kept")
    values = trace["trace/kept"]
    return [[[values[begin:end] for begin, end in heads] for heads in layers] for layers in trace["trace/kept_offsets"]]


# Token ids as numpy arrays. prompt: prefilled tokens. fed: tokens fed one by one after it, a later turn's whole
# conversation included. answer: its tokens with the end-of-sequence token.
Tokens = namedtuple("Tokens", "prompt fed answer")


def tokens(path, cell):
    """The token ids of every sample, as the model was fed them: [sample] -> Tokens."""
    trace = _traced(path, cell, "trace/token_offsets", "trace/tokens")
    ids = trace["trace/tokens"]
    return [Tokens(ids[a:b], ids[b:c], ids[c:d]) for a, b, c, d in trace["trace/token_offsets"]]


# A decode step. token: place in the answer of the token that the step led to; 0 while a question is fed.
# pages: [layer][kv_head] -> numpy array, None for a layer that read everything.
Step = namedtuple("Step", "token pages")


def selected(path, cell):
    """The pages that attention read: [sample][step] -> Step. Steps without a list of pages are left out."""
    trace = _traced(path, cell, "trace/kept_offsets", "trace/events", "trace/selected")
    samples, layers, heads, _ = trace["trace/kept_offsets"].shape
    out = [[] for _ in range(samples)]
    if "trace/events" not in trace:
        return out
    last = {}  # by sample: place of its newest list
    for event in trace["trace/events"].itertuples():
        if event.kind != "select":
            continue
        place = (event.layer, event.kv_head)
        steps = out[event.sample]
        if not steps or steps[-1].token != event.token or place <= last[event.sample]:
            steps.append(Step(event.token, [None] * layers))
        last[event.sample] = place
        pages = steps[-1].pages
        pages[event.layer] = pages[event.layer] or [None] * heads
        pages[event.layer][event.kv_head] = trace["trace/selected"][event.begin : event.begin + event.count]
    return out


def paired(path, a, b):
    """The questions that both cells answered, a row each, to compare the two question by question.

    The index is (task_sample, question, prompt_sha256); rows of one task_sample share a context. The other columns of
    `samples` come twice, as "score_a" and "score_b". `difference` is score_a - score_b. ValueError for cells of several
    tasks, models or seeds, whose questions are not the same, for files that do not tell questions apart, and for workloads that ask one
    several times. Draws of a question (the key `sampling`) are one row, their mean; texts are those of the first.
    """
    rows = summary(path).set_index("cell")
    ids = [find(path, name) for name in (a, b)]
    for column in ("model", "task", "seed"):
        values = [rows.loc[id].get(column) for id in ids]
        if values[0] != values[1]:
            raise ValueError(f"{path}: got cells of {column} {values[0]!r} and {values[1]!r}, wanted the same")
    keys = ["task_sample", "question", "prompt_sha256"]
    sides = []
    for id in ids:
        samples = cell(path, id).get("samples")
        if samples is None or not set(keys) <= set(samples) or (samples["task_sample"] < 0).any():
            raise ValueError(f"{path}: got cell {id!r} without the numbers of its questions, wanted those of its samples")
        if "draw" in samples and (samples["draw"] >= 0).any():
            rule = {c: "mean" if pd.api.types.is_numeric_dtype(samples[c]) else "first" for c in samples if c not in keys}
            samples = samples.drop_duplicates([*keys, "draw"]).groupby(keys, sort=False).agg(rule).reset_index()
        if samples.duplicated(keys).any():
            raise ValueError(f"{path}: got cell {id!r} with several answers to a question, wanted one")
        sides.append(samples.set_index(keys))
    both = sides[0].merge(sides[1], left_index=True, right_index=True, suffixes=("_a", "_b"))
    both["difference"] = both["score_a"] - both["score_b"]
    return both
