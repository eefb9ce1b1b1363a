"""One self-contained HTML page of result and profile files. Equal files give equal bytes."""

import os
import pathlib
from collections import namedtuple

import numpy as np

from kvlab_results import of_answers, of_cells, of_profiles, of_results, page, style
from kvlab_results.data import Inputs, ReportError, title_of
from kvlab_results.page import Section, Table, details, escape, number

# make(inputs) -> Section or None. needs: what makes it.
Kind = namedtuple("Kind", "title make needs")

KINDS = [
    Kind(
        "Against the full cache",
        of_answers.against,
        "two or more policies with metrics: [score], one of which keeps everything (full)",
    ),
    Kind(
        "Quality against bytes",
        of_results.quality,
        "two or more policies with metrics: [score, memory]; fidelity adds KL",
    ),
    Kind(
        "From random to oracle",
        of_results.ladder,
        "a policy called random and one called oracle, with equal budgets and metrics: [score]",
    ),
    Kind(
        "Needle in a haystack",
        of_results.needle,
        "a task with depths (niah, multikey, kv, passkey) and metrics: [score]; several contexts make it wide",
    ),
    Kind("Latency against context", of_results.latency, "metrics: [latency] at two or more contexts"),
    Kind("Memory against length", of_results.memory, "metrics: [memory] at two or more contexts"),
    Kind(
        "Throughput and batch",
        of_results.throughput,
        "metrics: [latency] with a workload of several rates or policies, or files of several values of batch",
    ),
    Kind("What a step spends its time on", of_cells.steps, "metrics: [latency] on a CPU, metrics: [parts] on a GPU"),
    Kind("Which tokens stay", of_cells.kept, "metrics: [trace] with a policy that drops tokens"),
    Kind(
        "Head overlap",
        of_profiles.overlap,
        "kvlab profile with head_stats; or two or more profile files of flexicache_heads or heterocache_heads",
    ),
    Kind("RCO curves", of_profiles.curves, "kvlab profile with flexicache_heads"),
    Kind("Role maps", of_profiles.roles, "kvlab profile with heterocache_heads or flexicache_heads"),
    Kind("Maps of heads", of_profiles.maps, "kvlab profile with any profiler"),
]

# Column of a table, its column of /summary, what it is divided by.
_PLAIN = [
    ("KL", "kl", 1),
    ("top-1", "top1", 1),
    ("mass", "mass", 1),
    ("device MB", "device_bytes_decode", 1e6),
    ("compr. ×", "compression", 1),
    ("ms/token", "tpot_ms_p50", 1),
    ("TTFT ms", "ttft_ms", 1),
    ("fired", "fired", 1),
]
_SERVED = [
    ("tokens/s", "tokens_per_s", 1),
    ("TTFT ms p50", "ttft_ms", 1),
    ("p95", "ttft_ms_p95", 1),
    ("ms/token mean", "tpot_ms_mean", 1),
    ("p50", "tpot_ms_p50", 1),
    ("p95", "tpot_ms_p95", 1),
    ("queue ms p50", "queue_ms_p50", 1),
    ("preempt.", "preemptions", 1),
    ("peak MB", "device_bytes_peak", 1e6),
    ("compr. ×", "compression", 1),
    ("fired", "fired", 1),
]


def _spread(row, column, scale=1):
    values = row.values(column)
    text = number(row.mean(column) / scale)
    return f"{text} ± {number(row.deviation(column) / scale, 2)}" if len(values) > 1 else text


def _score(inputs, row):
    if not len(row.good):
        return " and ".join(dict.fromkeys(row.bad.status))
    low, high = of_results.interval(inputs, row)
    text, single = _spread(row, "score"), len(row.good) == 1
    if np.isfinite(low):
        return f"{text} ({number(low)}-{number(high)})"
    return f"{text} (-)" if single and text != "-" else text


def _block_table(inputs, block):
    several, origin = inputs.files_of(block.rows)
    columns = [c for c in (_SERVED if block.workload else _PLAIN) if any(len(r.values(c[1])) for r in block.rows)]
    rows = []
    for row in block.rows:
        said = row.labels + [f"{bad.status}: {bad.error}" for bad in row.bad.itertuples()]
        rows.append(
            [
                row.name,
                *([inputs.files[row.source].name] if several else []),
                row.budget or "-",
                str(len(row.good)),
                _score(inputs, row),
                *(_spread(row, column, scale) for _, column, scale in columns),
                "; ".join(said) or "-",
            ]
        )
    header = [
        "policy",
        *(["file"] if several else []),
        "budget",
        "n",
        "score",
        *(name for name, *_ in columns),
        "labels",
    ]
    return Table(title_of(block), header, rows, 1 + several, (len(header) - 1,), under=origin)


def _results(inputs):
    lead = (
        "A table per model, task and length. Brackets hold the 95 % interval over contexts like these. n counts the "
        "cells of a row; with several, numbers are mean ± standard deviation. - means not measured."
    )
    section = Section("results", "Results", lead, tables=[_block_table(inputs, block) for block in inputs.blocks])
    rows = [row for block in inputs.blocks for row in block.rows]
    used = dict.fromkeys((label, row.meaning(label)) for row in rows for label in row.all_labels)
    if used:
        items = "".join(f"<dt>{escape(label)}</dt><dd>{escape(meaning)}</dd>" for label, meaning in used)
        section.extra += f"<h3>Labels</h3><dl>{items}</dl>\n"
    warnings = {}
    for row in inputs.cells.itertuples():
        for line in row.warnings.splitlines():
            warnings.setdefault(line, []).append(row.cell)
    if warnings:
        items = "".join(
            f"<li>{escape(line)} ({len(cells)} of {len(inputs.cells)} cells: {escape(', '.join(cells[:3]))}"
            f"{' ...' if len(cells) > 3 else ''})</li>"
            for line, cells in warnings.items()
        )
        section.extra += f"<h3>Warnings</h3><ul>{items}</ul>\n"
    return section


_RAN = ["kvlab_version", "git_commit", "created_utc", "host", "cpu", "gpu", "backend", "threads", "command"]


def _sources(inputs):
    files = [(file.name, "results", file.info) for file in inputs.files]
    files += [(file.name, f"profile of {file.info.get('model', '')}", file.info) for file in inputs.profiles]
    rows = [[name, kind, *(str(info.get(key, "-")) for key in _RAN)] for name, kind, info in files]
    header = ["file", "kind", "kvlab", "commit", "created (UTC)", "host", "CPU", "GPU", "backend", "threads", "command"]
    section = Section(
        "sources",
        "What ran",
        "The files of this page, and what made them.",
        tables=[Table("Files", header, rows, len(header), (len(header) - 1,))],
    )
    for name, _, info in files:
        if info.get("experiment_yaml"):
            section.extra += details(f"experiment of {name}", info["experiment_yaml"])
    return section


def _missing(kinds):
    items = "".join(f"<li><b>{escape(kind.title)}</b>: {escape(kind.needs)}</li>" for kind in kinds)
    return f"<ul>{items}</ul>\n"


def build(paths):
    """The page's text. ReportError for files that cannot be read."""
    inputs = Inputs(paths)
    try:
        inputs.styles = style.styles(inputs.cells.policy)
        sections = [_results(inputs)] if inputs.files else []
        missing = []
        for kind in KINDS:
            section = kind.make(inputs)
            if section:
                sections.append(section)
            else:
                missing.append(kind)
        if missing:
            lead = "The given files do not hold what these figures show. This makes it:"
            sections.append(Section("missing", "What is not here, and how to get it", lead, extra=_missing(missing)))
        sections.append(_sources(inputs))
        names = ", ".join(file.name for file in [*inputs.files, *inputs.profiles])
        title = f"kvlab report: {names}"
        links = "".join(f'<li><a href="#{s.key}">{escape(s.title)}</a></li>' for s in sections)
        parts = [
            f'<header><h1>{escape(title)}</h1></header>\n<nav aria-label="sections"><ul>{links}</ul></nav>\n<main>\n'
        ]
        parts += [section.html(inputs.styles) for section in sections] + ["</main>\n"]
        return page.document(title, parts)
    finally:
        inputs.close()


def write(paths, out):
    """Writes the page to `out`: a file that ends with .html, or a folder, which gets index.html. Returns its path. It
    is there whole, or not at all."""
    out = pathlib.Path(out)
    path = out if out.suffix in (".html", ".htm") else out / "index.html"
    text = build(paths)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


__all__ = ["ReportError", "build", "write"]
