#!/usr/bin/env python3
"""Tests judge.py with answers whose scores are worked out by hand. Usage: test_judge.py"""

import json
import subprocess
import sys
import unittest
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))
import judge  # noqa: E402

TESTS = "def check(f):\n    assert f(2) == 3\n\ncheck(next_one)\n"
RIGHT = "def next_one(n):\n    return n + 1\n"


def run(word, text):
    done = subprocess.run([sys.executable, FOLDER / "judge.py", *word], input=text, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


class Programs(unittest.TestCase):
    def test_code_up_to_the_fence_is_run_with_the_tests(self):
        self.assertEqual(judge.program(RIGHT + "```\nIt adds one.", [TESTS]), 1)
        self.assertEqual(judge.program(RIGHT.replace("+ 1", "+ 2") + "```", [TESTS]), 0)

    def test_a_block_of_the_answer(self):
        self.assertEqual(judge.program("```python\n" + RIGHT + "```\n", [TESTS]), 1)

    def test_any_reference_will_do(self):
        self.assertEqual(judge.program(RIGHT, ["assert False", TESTS]), 1)

    def test_an_early_end_passes_nothing(self):
        self.assertEqual(judge.program("import sys\nsys.exit(0)\n", [TESTS]), 0)
        self.assertEqual(judge.program("import os\nos._exit(0)\n", [TESTS]), 0)

    def test_text_is_no_program(self):
        self.assertEqual(judge.program("I do not know.", [TESTS]), 0)

    def test_a_loop_ends(self):
        before, judge.SECONDS = judge.SECONDS, 0.5
        try:
            self.assertEqual(judge.program("while True: pass\n", [TESTS]), 0)
        finally:
            judge.SECONDS = before


class Choices(unittest.TestCase):
    def test_the_letter_after_the_words(self):
        self.assertEqual(judge.choice_pro("A is wrong. The answer is (J).", ["J"]), 1)
        self.assertEqual(judge.choice_pro("the answer is C", ["C"]), 1)
        self.assertEqual(judge.choice_pro("The answer is (C). Or is it D", ["D"]), 0)

    def test_other_forms(self):
        self.assertEqual(judge.choice_pro("Answer: E", ["E"]), 1)
        self.assertEqual(judge.choice_pro("Not B, so I take F", ["F"]), 1)
        self.assertEqual(judge.choice_pro("no letter", ["A"]), 0)
        self.assertEqual(judge.choice_pro("", ["A"]), 0)


class Characters(unittest.TestCase):
    def test_shares_of_characters(self):
        self.assertEqual(judge.f1_characters("\u5f20\u4e09", ["\u5f20\u4e09"]), 1)
        # The full stop and spaces do not count.
        self.assertEqual(judge.f1_characters("\u5f20\u4e09\u3002", [" \u5f20 \u4e09"]), 1)
        self.assertAlmostEqual(judge.f1_characters("\u5f20\u4e09\u662f", ["\u5f20\u4e09"]), 0.8)  # precision 2/3, recall 1
        self.assertEqual(judge.f1_characters("\u674e", ["\u5f20\u4e09"]), 0)
        self.assertEqual(judge.f1_characters("", ["\u5f20"]), 0)
        self.assertEqual(judge.f1_characters("Ann", ["x", "ann"]), 1)


class Command(unittest.TestCase):
    def test_it_reads_an_object_and_prints_a_number(self):
        self.assertEqual(run(["choice_pro"], json.dumps({"answer": "answer is (B)", "references": ["B"], "record": {}})),
                         (0, "1.0\n"))

    def test_what_is_wrong_is_named(self):
        self.assertEqual(run(["choice"], "{}"),
                         (2, "judge.py: got choice, wanted one of: program, choice_pro, f1_characters\n"))
        self.assertEqual(run(["program"], "{}")[0], 2)
        self.assertIn("got no object with answer and references", run(["program"], "no")[1])


if __name__ == "__main__":
    unittest.main()
