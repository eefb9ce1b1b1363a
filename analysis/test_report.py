"""Tests of the HTML report, on the committed files of testdata and experiments and on files made by hand. in_browser
has those that need Chromium.

    python3 test_report.py     # needs h5py, numpy, pandas, matplotlib and PyYAML
"""

import functools
import html.parser
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import h5py
import numpy as np
import pandas as pd

import kvlab_results as kr

HERE = pathlib.Path(__file__).resolve().parent
LACKING = [name for name in ("matplotlib", "yaml") if importlib.util.find_spec(name) is None]
if LACKING:
    print(f"skipped: no {', '.join(LACKING)}")
    sys.exit(0)

from kvlab_results import data, differences, draw, experiment, of_cells, of_results, report, style  # noqa: E402

DATA = HERE / "testdata"
SMALL, TRACE, SERVED, SYNTHETIC, HEADS = (DATA / f"{n}.h5" for n in ("small", "trace", "served", "synthetic", "heads"))
UNSTABLE = HERE.parent / "experiments/retrieval/heads.h5"
ROLES = HERE.parent / "experiments/quality/heads.h5"
ALL = [SMALL, TRACE, SERVED, SYNTHETIC, HEADS, UNSTABLE, ROLES]
VOID = {"meta", "br", "img", "input", "hr", "link"}
EVIL = '<script>document.title="x"</script>&"\'$\\frac{1}{'


@functools.lru_cache
def whole():
    return report.build(ALL)


class Page(html.parser.HTMLParser):
    """A page's elements, and the texts of its tables: {caption: [[cell, ...], ...]}, the header first."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.wrong, self.tables, self.text, self._cell = [], [], [], {}, [], None
        self.all_tables = []
        self.feed(text)
        self.wrong += self.open
        self.text = "".join(self.text)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag in VOID:
            return
        self.open.append(tag)
        if tag == "table":
            self._rows = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("th", "td", "caption"):
            self._cell = ""

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)
        if tag in ("th", "td"):
            self._rows[-1].append(self._cell)
        elif tag == "caption":
            self._caption = self._cell
        elif tag == "table":
            self.tables.setdefault(self._caption, self._rows)
            self.all_tables.append(self._rows)

    def handle_data(self, text):
        self.text.append(text)
        if self._cell is not None:
            self._cell += text

    def all(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]

    @property
    def sections(self):
        return [attrs["id"] for attrs in self.all("section")]


def write_by_hand(path, rows, cells=None, info=None):
    """A result file with these rows of /summary, each a dict, and pieces of cells: {id: {path: DataFrame or array}}."""
    blank = {
        "model": "m",
        "params": "",
        "ablated": "",
        "task": "t",
        "workload": "",
        "status": "ok",
        "error": "",
        "labels": "",
        "warnings": "",
        "context_tokens": 64,
        "budget_tokens": np.nan,
        "budget_bytes": -1,
        "seed": 0,
        "repeat": 0,
    }
    frame = pd.DataFrame([{"cell": f"c{i}", **blank, **row} for i, row in enumerate(rows)])
    with h5py.File(path, "w") as file:
        file.attrs["schema_version"] = 1
        for key, value in (info or {}).items():
            file.attrs[key] = value

        def add(group, name, frame):
            types_ = [
                (c, h5py.string_dtype() if pd.api.types.is_string_dtype(frame[c]) else frame[c].dtype)
                for c in frame.columns
            ]
            table = np.empty(len(frame), types_)
            for column in frame.columns:
                table[column] = frame[column]
            group.create_dataset(name, data=table).attrs["units"] = [""] * len(frame.columns)

        add(file, "summary", frame)
        for cell in frame.cell:
            group = file.create_group(f"cells/{cell}")
            for name, piece in (cells or {}).get(cell, {}).items():
                if isinstance(piece, pd.DataFrame):
                    add(group, name, piece)
                else:
                    group[name] = piece
    return path


def budget(plugin, tokens):
    return json.dumps({"scorer": {plugin: {}}, "budget": {"tokens": tokens}})


def inputs_of(*paths):
    inputs = data.Inputs(paths)
    inputs.styles = style.styles(inputs.cells.policy)
    return inputs


class WithFolder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)


def evil(folder):
    """The page of a file whose every text is EVIL."""
    rows = [
        {
            "policy": EVIL + str(i),
            "task": EVIL,
            "model": EVIL,
            "score": 0.5,
            "compression": 2.0 + i,
            "labels": EVIL,
            "warnings": EVIL,
            "error": EVIL,
            "params": json.dumps({"policy": {EVIL: {EVIL: EVIL}}}),
        }
        for i in range(2)
    ]
    parts = {f"c{i}": {"step_parts": np.ones((4, 2), np.float32)} for i in range(2)}
    path = write_by_hand(folder / "e.h5", rows, parts, {"experiment_yaml": f"# {EVIL}", "command": EVIL})
    with h5py.File(path, "r+") as file:
        for i in range(2):
            file[f"cells/c{i}/step_parts"].attrs["parts"] = [EVIL, "b"]
    return report.build([path])


class Whole(WithFolder):
    """The page of all committed files."""

    @classmethod
    def setUpClass(cls):
        cls.html = whole()
        cls.page = Page(cls.html)

    def test_every_figure_but_the_ladder_is_there(self):
        wanted = [
            "results",
            "against",
            "quality",
            "needle",
            "latency",
            "memory",
            "throughput",
            "steps",
            "kept",
            "overlap",
            "rco",
            "roles",
            "maps",
            "missing",
            "sources",
        ]
        self.assertEqual(self.page.sections, wanted)
        self.assertEqual([a["href"] for a in self.page.all("a")], [f"#{key}" for key in wanted])

    def test_equal_files_give_equal_bytes_wherever_they_lie(self):
        moved = [self.folder / path.parent.name / path.name for path in ALL]
        for old, new in zip(ALL, moved):
            new.parent.mkdir(exist_ok=True)
            shutil.copy(old, new)
        command = [sys.executable, "-B", HERE / "kvlab_results", "report", *moved, "-o", self.folder / "page.html"]
        settings = self.folder / "matplotlibrc"
        settings.write_text("font.size: 20\nsvg.fonttype: path\nlines.linewidth: 9\n")
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "MATPLOTLIBRC": str(settings)})
        self.assertEqual((self.folder / "page.html").read_text(), self.html)

    def test_it_is_one_file_without_scripts(self):
        self.assertEqual(self.page.wrong, [])
        self.assertEqual(self.page.all("script") + self.page.all("link") + self.page.all("img"), [])
        for tag, attrs in self.page.elements:
            for key, value in attrs.items():
                self.assertFalse(key.startswith("on"), (tag, key))
                if key in ("src", "href", "xlink:href"):
                    self.assertTrue(value.startswith("#"), (tag, value))
        self.assertNotRegex(self.html, r"url\((?!#)|@import")

    def test_ids_are_unique_and_every_reference_leads_to_one(self):
        ids = [attrs["id"] for _, attrs in self.page.elements if "id" in attrs]
        self.assertEqual(len(ids), len(set(ids)))
        used = re.findall(r'(?:href="#|url\(#|labelledby=")([^")]+)', self.html)
        self.assertGreater(len(used), 100)
        self.assertEqual(set(used) - set(ids), set())

    def test_tables_and_figures_say_what_they_are(self):
        self.assertGreater(len(self.page.all("table")), 20)
        self.assertEqual(len(self.page.all("caption")), len(self.page.all("table")))
        self.assertTrue(all(attrs.get("scope") in ("col", "row") for attrs in self.page.all("th")))
        for caption, rows in self.page.tables.items():
            self.assertEqual({len(row) for row in rows}, {len(rows[0])}, caption)
        pictures = [attrs for attrs in self.page.all("svg") if attrs.get("role") == "img"]
        self.assertEqual(len(pictures), len(self.page.all("figure")))
        self.assertEqual(len(self.page.all("figure")), len(self.page.all("figcaption")))

    def test_no_stand_in_colour_is_left(self):
        self.assertNotRegex(self.html, "#0b0[bcd][0-9a-f]{2}|#000000|black")
        defined = set(re.findall(r"--([a-z0-9]+):", self.html))
        self.assertEqual(set(re.findall(r"var\(--([a-z0-9]+)\)", self.html)) - defined, set())

    def test_labels_are_with_the_data(self):
        for title, rows in self.page.tables.items():
            if title.startswith("synthetic/tiny, random_prompts, context"):
                labels = {row[0]: row[-1] for row in rows[1:]}
                self.assertIn("synthetic", labels["full"])
                self.assertIn("injected", labels["quest"])
        self.assertIn("random weights: times and bytes count", self.page.text)
        self.assertRegex(self.page.text, "injected: quest")


class Content(WithFolder):
    """What the page says, worked out from the files in another way."""

    def test_the_table_has_the_cells_numbers(self):
        page = Page(report.build([SMALL]))
        for cell in kr.summary(SMALL).itertuples():
            rows = page.tables[f"bundled/recall, niah, context {cell.context_tokens}"]
            tokens = "-" if np.isnan(cell.budget_tokens) else f"{cell.budget_tokens:.4g}"
            found = [dict(zip(rows[0], row)) for row in rows[1:] if row[0] == cell.policy and row[1] == tokens]
            self.assertEqual(len(found), 1, cell)
            self.assertEqual(found[0]["KL"], f"{cell.kl:.4g}")
            self.assertEqual(found[0]["device MB"], f"{cell.device_bytes_decode / 1e6:.4g}")
            self.assertEqual(found[0]["score"], f"{cell.score:.4g} ({cell.score_lo:.4g}-{cell.score_hi:.4g})")

    def test_a_table_of_one_file_has_no_column_for_it(self):
        def page(second_task):
            paths = [
                write_by_hand(self.folder / f"{name}.h5", [{"policy": "full", "score": 0.5, "task": task}])
                for name, task in (("one", "t"), ("two", second_task))
            ]
            return Page(report.build(paths))

        apart = page("u")
        for task, file in (("t", "one"), ("u", "two")):
            self.assertEqual(apart.tables[f"m, {task}, context 64"][0][:2], ["policy", "budget"])
            self.assertIn(f"file: {file}", apart.text)
        together = page("t")
        rows = together.tables["m, t, context 64"]
        self.assertEqual([row[1] for row in rows], ["file", "one", "two"])
        self.assertNotIn("file: one", together.text)
        alone = Page(report.build([self.folder / "one.h5"]))
        self.assertNotIn("file: one", alone.text)

    def test_needle_numbers_are_the_samples_scores(self):
        page = Page(report.build([SMALL]))
        summary = kr.summary(SMALL)
        for name, policy, tokens in (("full", "full", None), ("snapkv 32", "snapkv", 32), ("window 64", "window", 64)):
            rows = page.tables[f"bundled/recall, niah, {name}"]
            self.assertEqual([row[0] for row in rows], ["depth", "0 %", "50 %", "100 %"])
            self.assertEqual(rows[0][1:], ["context 192", "context 256"])
            for column, context in enumerate((192, 256), 1):
                cell = summary[(summary.policy == policy) & (summary.context_tokens == context)]
                cell = cell[cell.budget_tokens == tokens] if tokens else cell
                scores = kr.cell(SMALL, cell.cell.iloc[0])["samples"].sort_values("task_sample").score
                self.assertEqual([row[column] for row in rows[1:]], [f"{s:.4g}" for s in scores])

    def test_kept_shares_are_those_of_the_trace(self):
        kept, tokens = kr.kept(TRACE, "snapkv")[0], kr.tokens(TRACE, "snapkv")[0]
        length = len(tokens.prompt)
        share, counts = of_cells._kept_share(kept, length)
        self.assertEqual(counts.tolist(), [[len(head) for head in layer] for layer in kept])
        edges = [round(length * i / 32) for i in range(33)]
        for layer, heads in enumerate(kept):
            for part, (begin, end) in enumerate(zip(edges, edges[1:])):
                there = sum(begin <= position < end for head in heads for position in head)
                self.assertAlmostEqual(share[layer, part], there / (end - begin) / len(heads))
        self.assertIn("kept", Page(report.build([TRACE])).sections)

    def test_a_figure_that_the_files_do_not_hold_is_named_with_its_key(self):
        page = Page(report.build([TRACE]))
        self.assertEqual(page.sections, ["results", "kept", "missing", "sources"])
        for words in ("kvlab profile with heterocache_heads", "metrics: [latency] at two or more contexts"):
            self.assertIn(words, page.text)
        self.assertNotIn("metrics: [trace] with", page.text)
        self.assertEqual(Page(report.build([ROLES])).sections, ["roles", "maps", "missing", "sources"])

    def test_similarities_of_a_layers_heads(self):
        values = data.Inputs([HEADS]).profiles[0].profilers["head_stats"]["similarity"].values
        self.assertTrue(np.isfinite(values).any())
        page = Page(report.build([HEADS]))
        rows = page.tables["bundled/recall, heads: head_stats similarity: share of the top pages"]
        self.assertEqual(len(rows), 1 + values.shape[0] * values.shape[1])
        layer, head = 2, 3
        row = rows[1 + layer * values.shape[1] + head]
        self.assertEqual(row, [f"{layer}, {head}", *(f"{v:.3g}" for v in values[layer, head])])

    def test_arrays_without_a_number_have_no_picture(self):
        path = self.folder / "p.h5"
        with h5py.File(path, "w") as file:
            file.attrs.update({"kind": "profile", "model": "m", "model_fingerprint": "f"})
            for name, shape, unit in (
                ("map", (2, 4), "nats"),
                ("same", (2, 4, 4), "share"),
                ("curve", (2, 4, 3), "x, by y"),
            ):
                array = np.full(shape, np.nan, np.float32)
                file.create_dataset(f"profilers/p/{name}", data=array).attrs["units"] = unit
        self.assertEqual(Page(report.build([path])).sections, ["missing", "sources"])

    def test_layers_and_maps_of_attention(self):
        path = self.folder / "p.h5"
        with h5py.File(path, "w") as file:
            file.attrs.update({"kind": "profile", "model": "m", "model_fingerprint": "f"})
            share = np.full((1, 2, 3, 2), np.nan, np.float32)
            share[0, 0, :2] = [[0.5, 0.25], [1, 0]]
            share[0, 1, :2] = [[0.25, np.nan], [1, 0]]
            for name, array, unit in (
                ("critical", np.array([4, 2], np.float32), "tokens, by layer"),
                ("attention", share, "share, by 4 steps and 4 tokens"),
                ("decades", np.array([[[0.5, 0.5], [1, 0]]], np.float32), "share of tokens, by N"),
            ):
                file.create_dataset(f"profilers/p/{name}", data=array).attrs["units"] = unit
        page = Page(report.build([path]))
        self.assertEqual(page.sections, ["rco", "maps", "missing", "sources"])
        self.assertIn("Curves", page.text)
        self.assertEqual(page.tables["m, p: p critical: tokens, by layer"][1:], [["0", "4"], ["1", "2"]])
        rows = page.tables["m, p: p attention: share"]
        self.assertEqual(rows[1:], [["0", "0.38", "0.25"], ["1", "1", "0"]])  # 0.375; the third row has no step

    def test_overlap_of_sets(self):
        """Of 4 and 2 heads 1 is common: 1/4 and 1/2. Chance is the share of all 8 heads."""
        paths = []
        for name, heads in (("a", [1, 1, 1, 1, 0, 0, 0, 0]), ("b", [0, 0, 0, 1, 1, 0, 0, 0])):
            paths.append(self.folder / f"{name}.h5")
            with h5py.File(paths[-1], "w") as file:
                file.attrs.update({"kind": "profile", "model": "m", "model_fingerprint": "f"})
                array = np.array(heads, np.float32).reshape(2, 4)
                file.create_dataset("profilers/p/set", data=array).attrs["units"] = "1 = in it"
        rows = Page(report.build(paths)).tables["m: p set"]
        self.assertEqual(
            rows, [["heads of", "a", "b"], ["a", "1", "0.25"], ["b", "0.5", "1"], ["by chance", "0.5", "0.25"]]
        )

    def test_curves_are_means_inside_and_outside_of_the_set(self):
        file = data.Inputs([UNSTABLE]).profiles[0]
        arrays = file.profilers["flexicache_heads"]
        inside = arrays["unstable"].values == 1
        wanted = arrays["rank_change_overlap"].values[inside].mean(axis=0)
        rows = next(v for k, v in Page(report.build([UNSTABLE])).tables.items() if "rank_change_overlap" in k)
        self.assertEqual([row[1] for row in rows[1:]], [f"{v:.3g}" for v in wanted])
        self.assertIn(f"unstable ({inside.sum()})", rows[0][1])

    def test_roles_are_counted(self):
        values = data.Inputs([ROLES]).profiles[0].profilers["heterocache_heads"]["role"].values
        rows = next(v for k, v in Page(report.build([ROLES])).tables.items() if "heterocache_heads role: heads" in k)
        self.assertEqual([row[0] for row in rows[1:]], ["anchor", "volatile", "pivot", "satellite"])
        self.assertEqual([int(row[1]) for row in rows[1:]], [int((values == i).sum()) for i in range(4)])

    def test_the_ladder(self):
        rows = [
            {
                "policy": name,
                "params": budget(plugin, 64),
                "budget_tokens": 64.0,
                "score": score,
                "score_lo": 0.0,
                "score_hi": 1.0,
            }
            for name, plugin, score in (("random", "random", 0.2), ("snapkv", "snapkv", 0.5), ("best", "oracle", 0.8))
        ]
        rows += [
            {"policy": "full", "score": 1.0},
            {"policy": "other", "params": budget("other", 32), "budget_tokens": 32.0, "score": 0.1},
        ]
        page = Page(report.build([write_by_hand(self.folder / "l.h5", rows)]))
        self.assertIn("ladder", page.sections)
        table = page.tables["m, t, context 64, budget 64"]
        self.assertEqual(
            [(row[0], row[4]) for row in table[1:]],
            [("full", "133"), ("best 64", "100"), ("snapkv 64", "50"), ("random 64", "0")],
        )
        without = [row for row in rows if row["policy"] != "random"]
        self.assertNotIn("ladder", Page(report.build([write_by_hand(self.folder / "w.h5", without)])).sections)

    def test_each_way_has_a_ladder_of_its_own(self):
        made = (
            ("random", "scorer", "random", 0.2),
            ("snapkv", "scorer", "snapkv", 0.3),
            ("foresees", "scorer", "oracle_evict", 0.6),
            ("quest", "selector", "quest", 0.7),
            ("oracle", "selector", "oracle", 1.0),
        )
        rows = [
            {
                "policy": name,
                "params": json.dumps({role: {plugin: {}}, "budget": {"tokens": 64}}),
                "budget_tokens": 64.0,
                "score": score,
                "labels": "oracle" * plugin.startswith("oracle"),
            }
            for name, role, plugin, score in made
        ]
        page = Page(report.build([write_by_hand(self.folder / "l.h5", rows)]))
        tables = page.tables
        found = {
            way: [(row[0], row[4]) for row in tables[f"m, t, context 64, budget 64, {way}"][1:]]
            for way in ("eviction", "selection")
        }
        self.assertEqual(found["eviction"], [("foresees 64", "100"), ("snapkv 64", "25"), ("random 64", "0")])
        self.assertEqual(found["selection"], [("oracle 64", "100"), ("quest 64", "62.5"), ("random 64", "0")])
        self.assertRegex(page.text, r"oracle\s*keeps what the full cache's recorded answer attends to: a reference, no bound")
        self.assertRegex(page.text, r"oracle\s*chooses by the true attention of the step that reads: a bound, never timed")
        self.assertNotIn("knows what no method", page.text)
        del rows[2]  # the oracle that evicts
        page = Page(report.build([write_by_hand(self.folder / "s.h5", rows)]))
        self.assertNotIn("a reference, no bound", page.text)

    def test_seeds_are_one_row_with_a_deviation(self):
        rows = [
            {"policy": "p", "score": s, "seed": i, "tpot_ms_p50": 2.0, "labels": "disturbed" * (i == 1)}
            for i, s in enumerate((0.25, 0.75))
        ]
        rows += [{"policy": "p", "score": 0.5, "labels": "synthetic"}]  # another label: another row
        table = Page(report.build([write_by_hand(self.folder / "s.h5", rows)])).tables["m, t, context 64"]
        found = [dict(zip(table[0], row)) for row in table[1:]]
        self.assertEqual(
            [(r["n"], r["score"], r["labels"]) for r in found],
            [("2", "0.5 ± 0.35", "disturbed"), ("1", "0.5 (-)", "synthetic")],
        )

    def test_budgets_that_differ_are_rows_of_their_own(self):
        rows = [
            {"policy": "p", "seed": i, "budget_tokens": tokens, "score": 0.5, "budget_bytes": size}
            for i, (tokens, size) in enumerate(((100.0, -1), (104.0, -1), (120.0, -1), (50.0, 9e6), (80.0, 9e6)))
        ] + [{"policy": "p", "seed": 7, "status": "oom"}]
        page = Page(report.build([write_by_hand(self.folder / "b.h5", rows)]))
        found = [row[1:3] for row in page.tables["m, t, context 64"][1:]]
        self.assertEqual(found, [["102", "2"], ["120", "1"], ["9 MB", "2"]])

    def test_cells_that_did_not_end_are_named(self):
        rows = [
            {"policy": "a", "score": 0.5, "compression": 2.0},
            {"policy": "b", "score": 0.25, "compression": 4.0},
            {"policy": "c", "status": "oom", "error": "no room"},
            {"policy": "d", "status": "failed", "error": "bad number", "warnings": "slow disk"},
        ]
        page = Page(report.build([write_by_hand(self.folder / "f.h5", rows)]))
        table = page.tables["m, t, context 64"]
        self.assertEqual([row[0] for row in table[1:]], ["a", "b", "c", "d"])
        self.assertEqual([row[-1] for row in table[3:]], ["oom: no room", "failed: bad number"])
        self.assertIn("oom: c (1 of 1 cells)", page.text)  # below the figure
        self.assertIn("slow disk (1 of 4 cells: c3)", page.text)

    def test_a_marked_cell_is_hollow(self):
        rows = [
            {"policy": p, "score": 0.5, "compression": 2.0, "labels": labels}
            for p, labels in (("a", ""), ("b", "synthetic"))
        ]
        text = report.build([write_by_hand(self.folder / "h.h5", rows)])
        picture = text[text.index("<figure>") : text.index("</figure>")]
        marks = re.findall(r'<use [^>]*style="fill: var\(--(\w+)\); stroke: var\(--(\w+)\)', picture)
        self.assertIn(("s0", "s0"), marks)
        self.assertIn(("surface", "s1"), marks)
        self.assertNotIn(("s1", "s1"), marks)
        self.assertIn("hollow: read its labels first", text)

    def test_odd_text_of_files_is_written_out(self):
        """Control characters, a turn of the direction of writing, a name that is wider than a picture."""
        rows = [
            {"policy": name, "score": 0.5, "compression": 2.0, "error": "\x07"}
            for name in ("a\x1b[2Jb\u202ec", "w" * 300)
        ]
        parts = {f"c{i}": {"step_parts": np.ones((4, 1), np.float32)} for i in range(2)}
        path = write_by_hand(self.folder / "o.h5", rows, parts)
        with h5py.File(path, "r+") as file:
            for i in range(2):
                file[f"cells/c{i}/step_parts"].attrs["parts"] = ["gemm"]
        page = Page(report.build([path]))
        self.assertIn("a\\x1b[2Jb\\u202ec", page.text)
        self.assertNotRegex(page.text, "[\x07\x1b\u202e]")
        self.assertIn("w" * 300, page.text)
        self.assertIn("steps", page.sections)

    def test_parameters_that_are_no_json_are_refused(self):
        path = write_by_hand(self.folder / "j.h5", [{"policy": "a", "params": "{"}])
        with self.assertRaisesRegex(data.ReportError, "j.h5: got no readable file"):
            report.build([path])

    def test_disturbed_cells_are_hollow_in_figures_of_times_alone(self):
        rows = [
            {
                "policy": "a",
                "score": 0.5,
                "compression": 2.0,
                "context_tokens": c,
                "ttft_ms": 1.0,
                "labels": "disturbed",
            }
            for c in (64, 128)
        ] + [{"policy": "b", "score": 0.5, "compression": 2.0, "context_tokens": 64}]
        text = report.build([write_by_hand(self.folder / "d.h5", rows)])
        for section, fill in (("quality", "s0"), ("latency", "surface")):
            begin = text.index(f'<section id="{section}"')
            picture = text[text.index("<figure>", begin) : text.index("</figure>", begin)]
            self.assertIn(
                (fill, "s0"), re.findall(r'<use [^>]*style="fill: var\(--(\w+)\); stroke: var\(--(\w+)\)', picture)
            )
        self.assertIn("disturbed: a", Page(text).text)  # the score's figure says it, too

    def test_needles_of_one_length_stand_side_by_side(self):
        samples = {
            f"c{i}": {"samples": pd.DataFrame({"task_sample": [0, 1], "question": [0, 0], "score": scores})}
            for i, scores in enumerate(([1.0, 0.0], [0.5, 0.25]))
        }
        rows = [{"policy": p, "task": "niah"} for p in ("a", "b")]
        info = {"experiment_yaml": "tasks: [niah: {depth: 2}]"}
        page = Page(report.build([write_by_hand(self.folder / "n.h5", rows, samples, info)]))
        wanted = [["depth", "a", "b"], ["0 %", "1", "0.5"], ["100 %", "0", "0.25"]]
        self.assertEqual(page.tables["m, niah, context 64"][:1], [["policy", "budget", "n", "score", "labels"]])
        self.assertIn(wanted, page.all_tables)

    def test_text_of_files_does_nothing(self):
        text = evil(self.folder)
        page = Page(text)
        self.assertEqual((page.wrong, page.all("script")), ([], []))
        self.assertGreater(page.text.count(EVIL), 10)
        self.assertIn("steps", page.sections)


class Differences(WithFolder):
    """Tests and intervals against exact fractions, and against scipy where it is installed."""

    GOLDEN = json.loads((HERE.parent / "core/test/golden/paired.json").read_text())

    def pairs(self, both, lost, won, neither):
        kinds = ((both, 1, 1), (lost, 0, 1), (won, 1, 0), (neither, 0, 0))
        scores = [(own, other) for count, own, other in kinds for _ in range(count)]
        return [differences.Pair(i, own, other, 1) for i, (own, other) in enumerate(scores)]

    def test_p_and_interval_are_those_of_exact_fractions_and_likelihoods(self):
        for known in self.GOLDEN["mcnemar"]:
            found = differences.difference_of(self.pairs(3, known["lost"], known["won"], 2))
            self.assertTrue(found.mcnemar)
            self.assertAlmostEqual(found.p, known["p"], 12)
            self.assertEqual((found.both, found.lost, found.won, found.neither), (3, known["lost"], known["won"], 2))
        for known in self.GOLDEN["sign_flips"]:  # the last one is drawn
            self.assertAlmostEqual(differences.sign_flip_p(known["sums"]), known["p"], 3 if len(known["sums"]) > 16 else 12)
        for known in self.GOLDEN["detectable"]:
            self.assertAlmostEqual(differences.detectable_share(known["n"], known["churn"]), known["x"], 9)
        for known in self.GOLDEN["score_intervals"]:
            lost, won = known["lost"], known["won"]
            found = differences.difference_of(self.pairs(1, lost, won, known["pairs"] - lost - won - 1))
            self.assertAlmostEqual(found.low, known["low"], 6)
            self.assertAlmostEqual(found.high, known["high"], 6)

    def test_draws_are_those_of_splitmix(self):
        """Worked out with whole numbers of any length."""
        whole = (1 << 64) - 1

        def mix(z):
            z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & whole
            z = (z ^ z >> 27) * 0x94D049BB133111EB & whole
            return z ^ z >> 31

        state = mix(differences.SEED) ^ mix(~7 & whole)
        wanted = [mix(state + (i + 1) * 0x9E3779B97F4A7C15 & whole) for i in range(5)]
        self.assertEqual(differences.draws(7, 5).tolist(), wanted)

    @unittest.skipUnless(importlib.util.find_spec("scipy"), "no scipy")
    def test_scipy_agrees(self):
        from scipy import stats

        for freedom in (1, 2, 3.7, 9, 80.5, 1e4):
            self.assertAlmostEqual(differences.t_quantile(freedom) / stats.t.ppf(0.975, freedom), 1, 9)
        for lost, won in ((0, 6), (3, 9), (30, 12)):
            wanted = stats.binomtest(lost, lost + won).pvalue
            self.assertAlmostEqual(differences.difference_of(self.pairs(1, lost, won, 1)).p, wanted, 12)
        for right, n in ((0, 9), (3, 9), (20, 20), (71, 100)):
            wanted = stats.binomtest(right, n).proportion_ci(method="wilson")
            found = differences.score_interval([(i, float(i < right), 1) for i in range(n)])
            np.testing.assert_allclose(found, (wanted.low, wanted.high), atol=1e-9)
        values = np.random.default_rng(5).normal(1, 2, 40)
        found = differences.interval([(i, v, 1) for i, v in enumerate(values)], differences.UNBOUNDED)
        level = 1 - 2 * differences.outside([1] * 40, list(values - values.mean())) / differences.RESAMPLES
        wanted = stats.bootstrap(
            (values,), np.mean, n_resamples=20000, confidence_level=level, method="percentile", random_state=1
        ).confidence_interval
        np.testing.assert_allclose(found, (wanted.low, wanted.high), atol=0.05)  # of 0.32, the standard error

    def test_intervals_hold_the_truth_in_95_of_100_cases(self):
        """Scores with known differences: -0.1 of 0/1 scores that are one context's three questions, and 0.05 of
        others. A share of 1000 has a standard error of 0.7 %."""
        draw_ = np.random.default_rng(11)

        def right_or_wrong():
            level = draw_.integers(0, 2, (40, 1)) * np.ones((1, 3))  # a context is easy or hard
            flips = draw_.random((40, 3))
            lost, won = flips < 0.2, flips > 0.9
            return np.where(lost, 0, np.where(won, 1, level)), np.where(lost, 1, np.where(won, 0, level)), -0.1

        def shares():
            base = draw_.uniform(0.2, 0.7, (40, 1)) * np.ones((1, 3))
            return base + 0.05 + draw_.uniform(-0.15, 0.15, (40, 3)), base + draw_.uniform(-0.05, 0.05, (40, 3)), 0.05

        for made in (right_or_wrong, shares):
            held = 0
            for _ in range(1000):
                own, other, truth = made()
                pairs = [differences.Pair(i // 3, *p, 1) for i, p in enumerate(zip(own.flat, other.flat))]
                triples = [(p.context, p.own - p.other, 1) for p in pairs]
                low, high = differences.interval(triples, differences.range_of(pairs))
                held += low <= truth <= high
            self.assertTrue(930 <= held <= 970, (made.__name__, held))

    def test_a_rank_counts_the_better_ones(self):
        ranks = differences.ranks_of([[4, 4, 4], [1, 1, 1], [1, 1, 1]], [1, 1, 1], False)
        self.assertEqual(ranks, [(1, 1, 1), (2.5, 2, 3), (2.5, 2, 3)])
        self.assertEqual([r.rank for r in differences.ranks_of([[4, 4], [1, 1]], [1, 1], True)], [2, 1])

    def test_a_place_lies_between_random_and_the_oracle(self):
        low, high = [0.1, 0.3, 0.2, 0.1, 0.4, 0.2, 0.3, 0.1], [0.9, 0.8, 1.0, 0.7, 0.9, 0.8, 0.9, 1.0]
        for share in (0, 0.25, 1):
            own = [a + share * (b - a) for a, b in zip(low, high)]
            found = differences.place_of([(i, *scores, 1) for i, scores in enumerate(zip(own, low, high))])
            self.assertAlmostEqual(found.place, share)
            self.assertAlmostEqual(found.span, 5.3 / 8)
        # All contexts are alike, so two more of +1 and -1 give the interval a width, as a difference's has.
        self.assertTrue(found.low < 1 < found.high)
        self.assertTrue(np.isnan(differences.place_of([(0, 0.5, 0, 1, 1), (1, 0.5, 0, 1, 1)]).place))  # two contexts
        self.assertTrue(np.isnan(differences.place_of([]).place))
        answers = {
            (0, i, 0, str(i)): differences.Answer(float(s), 1.0, 4.0, 0.0, 0.0, False, "") for i, s in enumerate(own)
        }
        without = {q: a._replace(score=0.0) for q, a in answers.items()}
        half = {q: a._replace(score=a.score / 2) for q, a in answers.items()}
        self.assertAlmostEqual(differences.places_between(without, answers, [half])[0].place, 0.5)
        nats = {q: a._replace(forced=True, score=1 + a.score, weight=3.0) for q, a in half.items()}
        best = {q: a._replace(score=1.0) for q, a in nats.items()}
        worst = {q: a._replace(score=1 + 2 * (a.score - 1)) for q, a in nats.items()}
        self.assertAlmostEqual(differences.places_between(worst, best, [nats])[0].place, 0.5)  # fewer nats are better

    def test_answers_that_loop(self):
        for text, cut, wanted in (
            ("a b a b a b", False, True),
            ("a b a b a", False, False),
            ("x a b a b a b", False, True),
            ("a b a b a b a", True, True),  # the last word may be half of one
            ("a a a", False, False),
            ("\u4e00\u4e8c\u4e00\u4e8c\u4e00\u4e8c", False, True),
        ):
            self.assertEqual(differences.ends_in_loop(text, cut), wanted, text)

    def test_repeats_are_one_answer_and_prompts_in_common_one_context(self):
        samples = pd.DataFrame(
            {
                "task_sample": [0, 0, 1],
                "question": [0, 0, 0],
                "prompt_sha256": ["a", "a", "b"],
                "score": [1.0, 0.0, 1.0],
                "stop": ["length", "eos", "eos"],
            }
        )
        answers = differences.answers_of([(0, samples), (1, samples.assign(task_sample=5))])
        self.assertEqual(answers[0, 0, 0, "a"].score, 0.5)
        self.assertEqual(answers[0, 0, 0, "a"].cut, 0.5)
        contexts = differences.Contexts()
        contexts.add(answers)
        self.assertEqual(contexts.of((0, 0, 0, "a")), contexts.of((1, 5, 0, "a")))
        self.assertEqual(contexts.of((0, 1, 0, "b")), contexts.of((0, 0, 0, "a")))  # both are (1, 5)'s
        self.assertEqual(differences.answers_of([(0, samples.drop(columns="prompt_sha256"))]), {})

    def test_the_page_shows_what_the_samples_say(self):
        """niah at 192 of small.h5: by hand, from its samples."""
        page = Page(report.build([SMALL]))
        rows = page.tables["bundled/recall, niah, context 192, against full: 3 questions in 3 contexts"]
        table = [dict(zip(rows[0], row)) for row in rows[1:]]
        self.assertEqual([row["policy"] for row in table], ["full", "snapkv", "snapkv", "window"])
        summary = kr.summary(SMALL)
        of = summary[summary.context_tokens == 192].set_index("policy").cell
        both = kr.paired(SMALL, of["window"], of["full"])
        self.assertTrue(table[3]["difference"].startswith(f"{both.difference.mean():.3g} ("))
        self.assertEqual(table[3]["lost"], str((both.difference < 0).sum()))
        self.assertEqual(table[3]["both"], str(((both.score_a == 1) & (both.score_b == 1)).sum()))
        self.assertEqual(table[3]["length"], f"{both.output_tokens_a.sum() / both.output_tokens_b.sum():.2f}")
        self.assertIn("too few contexts to detect a difference", page.text)

    def test_noise_and_grey(self):
        """A second full differs in 1 of 20 answers; one method does as badly, another loses them all."""

        def samples(wrong):
            return {
                "samples": pd.DataFrame(
                    {
                        "task_sample": range(20),
                        "question": 0,
                        "prompt_sha256": [f"p{i}" for i in range(20)],
                        "score": [float(i not in wrong) for i in range(20)],
                        "output": [str(i in wrong) for i in range(20)],
                        "output_tokens": 4,
                        "stop": "eos",
                    }
                )
            }

        rows = [{"policy": "full"}, {"policy": "again"}]
        rows += [{"policy": p, "params": budget(p, 8), "budget_tokens": 8.0} for p in ("near", "far")]
        cells = {f"c{i}": samples(wrong) for i, wrong in enumerate(((), {3}, {5}, set(range(20))))}
        text = report.build([write_by_hand(self.folder / "n.h5", rows, cells)])
        page = Page(text)
        table = page.tables["m, t, context 64, against full: 20 questions in 20 contexts"]
        found = {row[0]: dict(zip(table[0], row)) for row in table[1:]}
        self.assertTrue(found["near"]["difference"].startswith("~-0.05 ("))
        self.assertTrue(found["far"]["difference"].startswith("-1 ("))
        self.assertEqual(found["far"]["p"], "<1e-4")  # 2 ** -19
        self.assertEqual([found[p]["rank"] for p in ("again", "far")], ["-", "3 (3-3)"])
        self.assertEqual(re.findall(r'<tr class="faint"><th[^>]*>(\w+)<', text), ["again", "near"])
        self.assertIn("a difference of 0.05 at most, 1 of 20 answers flipped, 1 other texts", page.text)
        self.assertIn("again: keeps everything as well, its difference is noise", page.text)
        without = write_by_hand(self.folder / "s.h5", [{**row, "labels": "synthetic"} for row in rows], cells)
        self.assertNotIn("against", Page(report.build([without])).sections)


class Parts(unittest.TestCase):
    def test_depths_of_an_experiment(self):
        for text, samples, wanted in (
            ("tasks: [niah]", 5, 5),
            ("tasks: [niah: {depth: 3, samples: 2}]", 6, 3),
            ("tasks: [niah: {depth: 3, samples: 2}]", 5, None),  # another number of samples: not these depths
            ("tasks: [niah: {depth: [2, 5]}]", 5, 5),
            ("tasks: [niah: {depth: [2, 4], samples: [2, 1]}]", 4, None),  # 2 x 2 or 4 x 1
            ("tasks: [{name: far, task: niah, depth: 4}]", 4, None),  # the label is not niah
            ("tasks: [niah: {ask: 1}]", 5, None),  # the question is about another needle
            ("tasks: [niah: {depth: 2}]\nsweep: {niah.depth: [3]}", 3, 3),
            ("tasks: [niah: {depth: 2}]\n# --set niah.depth=7\n", 7, 7),
            ("tasks: [niah: {depth: 2}]\n# --set tasks.niah.depth=[3, 7]\n# --set niah.samples=2\n", 14, 7),
            ("tasks: [niah: {depth: 2}]\n# --set niah.depth=7\n# overrides:\n# --set niah.samples=1\n", 2, 2),
            ("# --set niah.depth=7\ntasks: [niah: {depth: 2}]", 2, 2),  # a comment of the author
            ("tasks: [text: {depth: 2}]", 2, None),
            (": [", 5, None),
            ("", 5, None),
        ):
            self.assertEqual(experiment.depths(text, "niah question=decode", samples), wanted, text)
        self.assertEqual(experiment.depths("tasks: [{name: far, task: niah, depth: 4}]", "far", 4), 4)

    def test_batch_of_an_experiment(self):
        self.assertEqual([experiment.batch(t) for t in ("batch: 8", "a: 1", "batch: 8\n# --set batch=2\n")], [8, 1, 2])

    def test_tasks_with_depths_are_those_of_the_plugins(self):
        plugins = json.loads((HERE.parent / "plugins/plugins.json").read_text())
        plugins = plugins["plugins"] if isinstance(plugins, dict) else plugins
        found = {p["name"]: q["default"] for p in plugins for q in p.get("params", []) if q["name"] == "depth"}
        self.assertEqual(experiment.DEPTHS, found)

    def test_requests_at_once(self):
        """One from 0 to 4, one from 2 to 6, none until 10, one until 12: 10 request-ms in 8 ms."""
        samples = pd.DataFrame(
            {"arrival_ms": [0.0, 1.0, 10.0], "queue_ms": [0.0, 1.0, 0.0], "end_ms": [4.0, 6.0, 12.0]}
        )
        self.assertAlmostEqual(of_results._at_once(samples), 10 / 8)
        self.assertTrue(np.isnan(of_results._at_once(samples * np.nan)))

    def test_steps_that_hold_a_prompt_do_not_count(self):
        parts = pd.DataFrame({"gemm": [1.0, 100.0, 2.0, 3.0], "other": [1.0, 100.0, 2.0, 3.0]})
        self.assertEqual(of_cells._middle_steps(parts).tolist(), [2.5, 2.5])

    def test_rows_of_one_policy_show_what_differs(self):
        params = [
            json.dumps({"scorer": {"snapkv": {"window": w, "kernel": 5}}, "budget": {"tokens": w}}) for w in (8, 16)
        ]
        self.assertEqual([data._varying(p, params) for p in params], ["window=8", "window=16"])
        self.assertEqual(data._varying(params[0], params[:1]), "")

    def test_styles_are_different(self):
        styles = style.styles(["a", "full", *map(str, range(50)), "a"])
        self.assertEqual(styles["full"].variable, "ink")
        self.assertEqual(len({(its.variable, its.mark) for its in styles.values()}), len(styles))
        self.assertEqual(styles["a"], style.styles(["full", "a"])["a"])


# Machado, Oliveira and Fernandes 2009: linear RGB as people without red or green cones see it.
SEEN = [
    np.eye(3),
    np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
]


def linear(colour):
    values = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    """WCAG 2.1."""
    low, high = sorted(linear(c) @ [0.2126, 0.7152, 0.0722] for c in (one, other))
    return (high + 0.05) / (low + 0.05)


def oklab(rgb):
    """Ottosson 2020."""
    lms = np.array(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ]
    ) @ np.clip(rgb, 0, 1)
    return np.array(
        [
            [0.2104542553, 0.7936177850, -0.0040720468],
            [1.9779984951, -2.4285922050, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.8086757660],
        ]
    ) @ np.cbrt(lms)


class Colours(unittest.TestCase):
    def test_text_is_readable(self):
        for mode in (0, 1):
            for name in ("ink", "muted", "link"):
                for ground in ("surface", "raised"):
                    self.assertGreater(contrast(style.PAGE[name][mode], style.PAGE[ground][mode]), 4.5, (name, ground))
            norm = draw._norm(0, 1)
            for i, colour in enumerate(style.RAMP):
                text = {style.INK: "ink", style.SURFACE: "surface"}[
                    draw._text_colour(norm, (i + 0.5) / len(style.RAMP))
                ]
                self.assertGreater(contrast(style.PAGE[text][mode], colour[mode]), 4.5, (mode, i))

    def test_series_stand_out_and_differ_for_colour_blind_eyes(self):
        for mode in (0, 1):
            for i, colour in enumerate(style.SERIES):
                self.assertGreater(contrast(colour[mode], style.PAGE["surface"][mode]), 3)
                for other in style.SERIES[:i]:
                    for seen in SEEN:
                        apart = oklab(seen @ linear(colour[mode])) - oklab(seen @ linear(other[mode]))
                        self.assertGreater(np.linalg.norm(apart), 0.095, (mode, colour, other))

    def test_the_ramp_rises(self):
        for mode in (0, 1):
            steps = [contrast(colour[mode], style.PAGE["surface"][mode]) for colour in style.RAMP]
            self.assertTrue(all(low * 1.05 < high for low, high in zip(steps, steps[1:])), steps)


class CommandLine(WithFolder):
    def run_it(self, *words, options=("-B",)):
        command = [sys.executable, *options, HERE / "kvlab_results", *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.folder)
        return done.returncode, done.stdout, done.stderr

    def test_a_folder_gets_an_index(self):
        self.assertEqual(self.run_it("report", ROLES, "-o", "page"), (0, "page/index.html\n", ""))
        self.assertEqual([p.name for p in (self.folder / "page").iterdir()], ["index.html"])

    def test_as_a_module(self):
        command = [sys.executable, "-B", "-m", "kvlab_results", "report", ROLES, "-o", self.folder / "p.html"]
        subprocess.run(command, check=True, capture_output=True, cwd=HERE)
        self.assertEqual((self.folder / "p.html").read_text(), report.build([ROLES]))

    def test_files_that_are_none(self):
        (self.folder / "text.h5").write_text("no HDF5")
        with h5py.File(self.folder / "foreign.h5", "w") as file:
            file["x"] = 1
        cut = SMALL.read_bytes()
        (self.folder / "cut.h5").write_bytes(cut[: len(cut) // 2])
        for name in ("none.h5", "text.h5", "foreign.h5", "cut.h5"):
            code, out, said = self.run_it("report", SMALL, name, "-o", "page")
            self.assertEqual((code, out), (2, ""), name)
            self.assertRegex(said, f"^error: {name}: got no readable file .*wanted one that kvlab wrote\n$")
        self.assertFalse((self.folder / "page").exists())

    def test_missing_packages_are_named(self):
        for words in (("report", SMALL, "-o", "page"), ("packages",)):
            code, out, said = self.run_it(*words, options=("-B", "-S"))  # -S: nothing that is installed
            self.assertEqual(code, 3)
            self.assertRegex(out + said, "got no h5py.*apt-get install python3-h5py .*pip install h5py .*PyYAML")
        self.assertEqual(self.run_it("packages"), (0, "all there\n", ""))

    @unittest.skipUnless(importlib.util.find_spec("pip") and importlib.util.find_spec("wheel"), "no pip or wheel")
    def test_pip_installs_it(self):
        shutil.copytree(HERE, self.folder / "analysis", ignore=shutil.ignore_patterns("__pycache__", "testdata"))
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "--quiet",
            "--target",
            self.folder / "site",
            self.folder / "analysis",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        environment = {**os.environ, "PYTHONPATH": str(self.folder / "site")}
        command = [sys.executable, "-B", "-m", "kvlab_results", "report", ROLES, "-o", self.folder / "p.html"]
        subprocess.run(command, check=True, capture_output=True, cwd=self.folder, env=environment)
        self.assertEqual((self.folder / "p.html").read_text(), report.build([ROLES]))


if __name__ == "__main__":
    unittest.main()
