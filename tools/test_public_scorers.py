#!/usr/bin/env python3
"""Tests goldens/public_scorers.py on scorers made here. Usage: test_public_scorers.py"""

import contextlib
import io
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "goldens"))
import public_scorers  # noqa: E402

SCORER = """
import no_such_package
client = no_such_package.Client()
class AnswerPredictor:
    def ask(self, table: no_such_package.Table): pass
    @staticmethod
    def parse_sampled_answer(answer):
        return {"end": []}.get(answer, answer)[0]
"""
CASES = [{"answer": "A", "references": ["A"], "score": 1.0}, {"answer": "B", "references": ["A"], "score": 0.0}]


class Compared(unittest.TestCase):
    def compared(self, cases, source=SCORER):
        out = io.StringIO()
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(out):
            (Path(folder) / "baselines").mkdir()
            (Path(folder) / "baselines/run_baseline.py").write_text(source, encoding="utf-8")
            return public_scorers.compare({"gpqa_choice": cases}, folder), out.getvalue()

    def test_equal_scores_of_a_file_whose_packages_are_not_there(self):
        same, said = self.compared(CASES)
        self.assertTrue(same, said)
        self.assertIn("gpqa_choice: 2 of 2 equal", said)
        self.assertIn("L-Eval: no auto_eval.py and em.py", said)

    def test_a_score_that_differs_is_named(self):
        same, said = self.compared([*CASES, {"answer": "A", "references": ["A"], "score": 0.25}])
        self.assertFalse(same)
        self.assertIn('got 0.25, the scorer gives 1.0: {"answer": "A"', said)

    def test_a_scorer_that_ends_is_counted(self):
        same, said = self.compared([*CASES, {"answer": "end", "references": ["A"], "score": 0.0}])
        self.assertTrue(same, said)
        self.assertIn("2 of 3 equal, the scorer ends in 1", said)

    def test_nothing_to_compare_is_no_success(self):
        self.assertFalse(self.compared(CASES, "")[0])


if __name__ == "__main__":
    unittest.main()
