"""Tests of quality_per_byte.py on cells made by hand."""

import importlib.util
from pathlib import Path
import tempfile
import unittest

import pandas as pd

import quality_per_byte as q


def cells(rows):
    columns = ["policy", "params", "task", "compression", "score", "kl", "ablated"]
    return pd.DataFrame(rows, columns=columns).assign(model="m")


MADE = cells([
    ("full", "", "a", 1.0, 1.0, 0.0, ""),
    ("full", "", "b", 1.0, 0.5, 0.0, ""),
    ("k8v4", "", "a", 4.0, 1.0, 0.1, ""),
    ("k8v4", "", "b", 2.0, 0.5, 0.3, ""),
    ("snapkv", '{"budget": {"tokens": 256}}', "a", 2.0, 0.25, 1.0, ""),
    ("snapkv", '{"budget": {"tokens": 256}}', "b", 2.0, 0.25, 2.0, ""),
    ("leankv-rest", "", "a", 8.0, 0.5, 0.4, "rest"),
    ("leankv-rest", "", "b", 8.0, 0.0, 0.4, "rest"),
])


class Means(unittest.TestCase):
    def test_over_tasks(self):
        frame = q.means(MADE).set_index("name")
        self.assertEqual(list(frame.index), ["leankv-rest", "k8v4", "snapkv 256", "full"])
        self.assertEqual(frame.share["k8v4"], 0.375)
        self.assertEqual(frame.score["k8v4"], 0.75)
        self.assertAlmostEqual(frame.kl["k8v4"], 0.2)

    def test_a_policy_that_lacks_a_task_is_refused(self):
        with self.assertRaisesRegex(SystemExit, "lack some of the 2 tasks.*: full"):
            q.means(MADE.drop(index=0))

    def test_frontier(self):
        frame = q.means(MADE)
        self.assertEqual([r.name for r in q.frontier(frame, "score", lambda a, b: a > b)], ["leankv-rest", "k8v4"])
        self.assertEqual([r.name for r in q.frontier(frame, "kl", lambda a, b: a < b)], ["leankv-rest", "k8v4", "full"])

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "no matplotlib")
    def test_equal_cells_give_equal_figures(self):
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / name for name in ("a.svg", "b.svg")]
            for path in paths:
                q.draw(q.means(MADE), path)
            self.assertEqual(paths[0].read_bytes(), paths[1].read_bytes())
            self.assertIn(b"<!-- snapkv 256 -->", paths[0].read_bytes())


if __name__ == "__main__":
    unittest.main()
