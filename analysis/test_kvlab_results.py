"""Tests the reader on a file made by hand and, where kvlab is built, on one that kvlab writes.

    python3 -m unittest discover analysis     # needs h5py, numpy and pandas

KVLAB names the command line to test with (default: build/release/bin/kvlab). Without one it skips those cases.
"""

import hashlib
import io
import json
import os
import pathlib
import subprocess
import tempfile
import tracemalloc
import unittest

import h5py
import numpy as np
import pandas as pd

import kvlab_results as kr

ROOT = pathlib.Path(__file__).resolve().parent.parent
KVLAB = pathlib.Path(os.environ.get("KVLAB", ROOT / "build/release/bin/kvlab"))
TEXT = h5py.string_dtype()


def table(group, name, columns):
    """A compound table out of {column: values}, units as kvlab writes them."""
    types = [(column, TEXT if isinstance(values[0], str) else np.int64) for column, values in columns.items()]
    rows = np.empty(len(next(iter(columns.values()))), types)
    for column, values in columns.items():
        rows[column] = values
    group.create_dataset(name, data=rows).attrs["units"] = [""] * len(columns)


def params(tokens, **more):
    return json.dumps({"scorer": {"snapkv": {"window": 32, **more}}, "budget": {"tokens": tokens}})


# Two samples, two layers of two KV heads.
KEPT = [[[[0, 1, 5], [2]], [[], [0, 7]]], [[[3], [3, 4]], [[1], []]]]
TOKENS = [([10, 11, 12], [13], [14, 15]), ([20, 21], [], [22])]
# (sample, token, layer, kv_head, pages): sample 0 feeds two tokens of a question, then one of its answer.
LISTS = [
    (0, 0, 1, 0, [0, 2]), (0, 0, 1, 1, [1]), (1, 1, 1, 0, [4]), (1, 1, 1, 1, []),
    (0, 0, 1, 0, [0]), (0, 0, 1, 1, [3]), (0, 1, 1, 0, [2, 3]), (0, 1, 1, 1, [0]),
]  # fmt: skip


def write_by_hand(path):
    with h5py.File(path, "w") as file:
        file.attrs["schema_version"] = 1
        table(file, "summary", {
            "cell": ["aa11", "aa22", "bb33", "cc44"],
            "policy": ["snapkv", "snapkv", "snapkv -pool", "full"],
            "params": [params(64), params(256, pool=True), params(64, seed=9), json.dumps({"codec": {"int8": {}}})],
            "task": ["niah", "niah", "niah", "text"],
            "seed": [1, 1, 1, 10],
            "ablated": ["", "", "pool", ""],
            "warnings": ["slow disk\nold driver", "", "old driver", ""],
        })  # fmt: skip
        for cell in ("aa22", "bb33", "cc44"):
            file.create_group(f"cells/{cell}")
        trace = file.create_group("cells/aa11/trace")
        heads = [head for sample in KEPT for layer in sample for head in layer]
        ends = np.cumsum([len(head) for head in heads])
        trace["kept"] = np.array([p for head in heads for p in head], np.int32)
        begins = ends - [len(head) for head in heads]
        trace["kept_offsets"] = np.stack([begins, ends], 1).reshape(2, 2, 2, 2)
        trace["tokens"] = np.array([t for sample in TOKENS for part in sample for t in part], np.int32)
        trace["token_offsets"] = np.array([[0, 3, 4, 6], [6, 8, 8, 9]])
        ends = np.cumsum([len(pages) for *_, pages in LISTS])
        trace["selected"] = np.array([page for *_, pages in LISTS for page in pages], np.int32)
        table(trace, "events", {
            **{name: [event[i] for event in LISTS] for i, name in enumerate(["sample", "token", "layer", "kv_head"])},
            "kind": ["select"] * len(LISTS),
            "begin": [end - len(event[-1]) for end, event in zip(ends, LISTS)],
            "count": [len(event[-1]) for event in LISTS],
        })  # fmt: skip


class ByHand(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.path = os.path.join(cls.folder.name, "r.h5")
        write_by_hand(cls.path)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def test_kept(self):
        kept = kr.kept(self.path, "aa11")
        self.assertEqual([[[head.tolist() for head in layer] for layer in sample] for sample in kept], KEPT)

    def test_kept_of_an_open_file(self):
        with kr.open(self.path) as results:
            kept = results.kept("aa11")
            self.assertEqual([[[head.tolist() for head in layer] for layer in sample] for sample in kept], KEPT)
            self.assertEqual(kept[1:][0][1][0].tolist(), KEPT[1][1][0])
            self.assertEqual(dict(results.info()), kr.info(self.path))
            for name, piece in kr.cell(self.path, "aa11").items():
                np.testing.assert_array_equal(piece, results.cell("aa11")[name])

    def test_tokens(self):
        self.assertEqual([tuple(part.tolist() for part in sample) for sample in kr.tokens(self.path, "aa11")], TOKENS)

    def test_selected(self):
        first, second = kr.selected(self.path, "aa11")
        self.assertEqual([step.token for step in first], [0, 0, 1])
        self.assertEqual([step.token for step in second], [1])
        for step in first + second:
            self.assertIsNone(step.pages[0])  # layer 0 read everything
        pages = [[head.tolist() for head in step.pages[1]] for step in first + second]
        self.assertEqual(pages, [[[0, 2], [1]], [[0], [3]], [[2, 3], [0]], [[4], []]])

    def test_warnings_name_their_cells(self):
        self.assertEqual(kr.warnings(self.path), {"slow disk": ["aa11"], "old driver": ["aa11", "bb33"]})

    def test_without_a_trace(self):
        for read in (kr.kept, kr.tokens, kr.selected):
            with self.assertRaisesRegex(LookupError, "aa22.*metrics: \\[trace\\]"):
                read(self.path, "aa22")

    def test_a_cell_by_id_or_a_unique_part(self):
        for words, id in {
            "aa11": "aa11", "b": "bb33", "full": "cc44", "text": "cc44", "seed=10": "cc44",
            "snapkv/tokens=64": "aa11", "snapkv/budget.tokens=256": "aa22", "pool=true": "aa22", "-pool": "bb33",
        }.items():  # fmt: skip
            self.assertEqual(kr.find(self.path, words), id, words)

    def test_a_part_that_is_not_unique(self):
        for words, message in {  # the message lists what there is
            "snapkv": "2 cells that fit 'snapkv'.*aa11.*aa22",
            "aa": "no cell that fits 'aa'.*aa11.*bb33",
            "seed=1": "3 cells that fit",
            "seed=0": "no cell that fits",
            "tokens=6": "no cell that fits",
            "": "4 cells that fit",
        }.items():
            with self.assertRaisesRegex(LookupError, "(?s)" + message):
                kr.find(self.path, words)

    def test_parameters_are_columns(self):
        frame = kr.parameters(self.path)
        self.assertEqual(list(frame.columns), ["budget.tokens", "codec.int8", "pool", "seed", "window"])
        self.assertEqual(frame["budget.tokens"].dropna().to_dict(), {"aa11": 64, "aa22": 256, "bb33": 64})
        self.assertTrue(frame.loc["cc44", "codec.int8"])
        whole = kr.summary(self.path, parameters=True)
        self.assertEqual(whole["params.seed"].dropna().tolist(), [9])  # `seed` is the cell's
        self.assertEqual(whole["seed"].tolist(), [1, 1, 1, 10])
        self.assertEqual(len(whole), 4)


class OfABigTrace(unittest.TestCase):
    """2^30 positions, 4 GB when they are read whole. Only those of the last head are in the file."""

    LENGTH = 1 << 30

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.path = os.path.join(cls.folder.name, "big.h5")
        write_by_hand(cls.path)
        with h5py.File(cls.path, "r+") as file:
            trace = file["cells/aa11/trace"]
            del trace["kept"], trace["kept_offsets"]
            kept = trace.create_dataset("kept", (cls.LENGTH,), np.int32, chunks=(1 << 16,))
            kept[-3:] = [4, 8, 9]
            ends = [[0, cls.LENGTH - 3], [cls.LENGTH - 3, cls.LENGTH]]
            trace["kept_offsets"] = np.array(ends).reshape(1, 1, 2, 2)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def test_it_is_read_in_parts(self):
        tracemalloc.start()
        with kr.open(self.path) as results:
            cell = results.cell("aa11")
            self.assertIn("trace/kept", list(cell))
            self.assertEqual(cell["trace/kept"].shape, (self.LENGTH,))
            self.assertEqual(cell["trace/kept"][-2:].tolist(), [8, 9])
            kept = results.kept("aa11")
            self.assertEqual([len(kept), len(kept[0]), len(kept[0][0])], [1, 1, 2])
            self.assertEqual(kept[0][0][1].tolist(), [4, 8, 9])
        self.assertEqual([tuple(part.tolist() for part in sample) for sample in kr.tokens(self.path, "aa11")], TOKENS)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        self.assertLess(peak, 16 << 20)

    def test_pieces_that_are_not_there(self):
        with kr.open(self.path) as results:
            with self.assertRaises(KeyError):
                results.cell("aa11")["trace"]  # a group, not a piece
            with self.assertRaisesRegex(LookupError, "aa22.*metrics: \\[trace\\]"):
                results.kept("aa22")


EXPERIMENT = """
model: {path: bundled/recall, dtype: f32}
tasks: [niah: {context: 256, samples: 2, depth: 1, question: decode, questions: 2}]
policies: [full, quest: {budget: {tokens: 48}}]
metrics: [score, trace]
"""


class Pairs(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = os.path.join(self.folder.name, "p.h5")
        with h5py.File(self.path, "w") as file:
            file.attrs["schema_version"] = 1
            table(file, "summary", {
                "cell": ["aa", "bb", "cc", "dd"], "model": ["m"] * 4, "policy": ["full", "snapkv", "quest", "old"],
                "params": ["{}"] * 4, "task": ["niah", "niah", "kv", "niah"], "seed": [1, 1, 1, 1],
            })  # fmt: skip
            for cell, samples, scores in (("aa", [0, 0, 1], [1, 1, 0]), ("bb", [1, 0, 0], [1, 0, 1]),
                                          ("cc", [0, 0, 1], [1, 1, 1]), ("dd", [-1, -1, -1], [1, 1, 1])):  # fmt: skip
                questions = [0, 0, 1] if cell == "bb" else [0, 1, 0]
                table(file.create_group(f"cells/{cell}"), "samples", {
                    "task_sample": samples, "question": questions, "score": scores,
                    "prompt_sha256": [f"{s} {q}" for s, q in zip(samples, questions)],
                })  # fmt: skip

    def tearDown(self):
        self.folder.cleanup()

    def test_questions_are_paired_whatever_their_order(self):
        frame = kr.paired(self.path, "snapkv", "full").sort_index()
        self.assertEqual([index[:2] for index in frame.index], [(0, 0), (0, 1), (1, 0)])
        self.assertEqual(list(frame.score_a), [0, 1, 1])
        self.assertEqual(list(frame.score_b), [1, 1, 0])
        self.assertEqual(list(frame.difference), [-1, 0, 1])

    def test_draws_of_a_question_are_one_row(self):
        with h5py.File(self.path, "a") as file:
            for cell, scores in (("aa", [1, 0, 1, 0]), ("bb", [0, 0, 1, 1])):
                del file[f"cells/{cell}"]
                table(file.create_group(f"cells/{cell}"), "samples", {
                    "task_sample": [0, 0, 1, 1], "question": [0] * 4, "draw": [0, 1, 0, 1], "score": scores,
                    "prompt_sha256": ["a", "a", "b", "b"], "output": ["w", "x", "y", "z"],
                })  # fmt: skip
        frame = kr.paired(self.path, "full", "snapkv").sort_index()
        self.assertEqual(list(frame.score_a), [0.5, 0.5])
        self.assertEqual(list(frame.difference), [0.5, -0.5])
        self.assertEqual(list(frame.output_a), ["w", "y"])

    def test_cells_of_other_questions_are_refused(self):
        with self.assertRaisesRegex(ValueError, "task 'kv' and 'niah'"):
            kr.paired(self.path, "quest", "full")
        with self.assertRaisesRegex(ValueError, "without the numbers of its questions"):
            kr.paired(self.path, "old", "full")


@unittest.skipUnless(KVLAB.exists(), f"no {KVLAB}")
class OfKvlab(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.path = os.path.join(cls.folder.name, "r.h5")
        experiment = os.path.join(cls.folder.name, "e.yaml")
        pathlib.Path(experiment).write_text(EXPERIMENT)
        subprocess.run([KVLAB, "run", experiment, "-o", cls.path], check=True, capture_output=True)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def test_tokens_are_those_of_the_hash(self):
        samples = kr.cell(self.path, "full")["samples"]
        tokens = kr.tokens(self.path, "full")
        self.assertEqual(list(zip(samples.task_sample, samples.question)), [(0, 0), (0, 1), (1, 0), (1, 1)])
        self.assertEqual(len(tokens), len(samples))
        for row, (prompt, fed, answer) in zip(samples.itertuples(), tokens):
            ids = np.concatenate([prompt, fed])
            self.assertEqual(hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest(), row.prompt_sha256)
            self.assertEqual(len(ids), row.prompt_tokens)
            self.assertEqual(len(answer), row.output_tokens)

    def test_the_full_cache_keeps_every_prompt_token(self):
        tokens = kr.tokens(self.path, "full")
        for sample, layers in enumerate(kr.kept(self.path, "full")):
            for positions in (head for heads in layers for head in heads):
                self.assertEqual(positions.tolist(), list(range(len(tokens[sample].prompt))))

    def test_every_step_of_a_selector_is_there(self):
        tokens = kr.tokens(self.path, "quest/tokens=48")
        for sample, steps in zip(tokens, kr.selected(self.path, "quest/tokens=48")):
            # A step for each token of the question, and one for each of the answer but its last.
            wanted = [0] * len(sample.fed) + list(range(1, len(sample.answer)))
            self.assertEqual([step.token for step in steps], wanted)
            for pages in (p for step in steps for layer in step.pages if layer for p in layer):
                self.assertLessEqual(len(pages), 48 // 16)

    def test_csv_has_the_same_parameters(self):
        text = subprocess.run([KVLAB, "report", self.path, "--format", "csv"], check=True, capture_output=True).stdout
        frame, csv = kr.parameters(self.path), pd.read_csv(io.BytesIO(text))
        self.assertEqual(list(csv.columns[-len(frame.columns) :]), list(frame.columns))
        for name in frame.columns:
            for one, other in zip(frame[name], csv[name]):
                self.assertTrue(one == other or (pd.isna(one) and pd.isna(other)), f"{name}: {one} {other}")


if __name__ == "__main__":
    unittest.main()
