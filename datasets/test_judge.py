#!/usr/bin/env python3
"""Tests judge.py with answers whose scores are worked out by hand. Usage: test_judge.py"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import types
import unittest
from pathlib import Path
from unittest import mock

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))
import judge  # noqa: E402


def missing(*names):
    return [name for name in names if importlib.util.find_spec(name) is None]


def pairs(text, cut_all):
    """Words of two characters, in place of jieba's."""
    assert not cut_all
    return (text[i : i + 2] for i in range(0, len(text), 2))


def run(word, text, **variables):
    done = subprocess.run([sys.executable, FOLDER / "judge.py", *word], input=text, capture_output=True, text=True, check=False,
                          env={**os.environ, **variables})
    return done.returncode, done.stdout + done.stderr


class Words(unittest.TestCase):
    def test_shares_of_words(self):
        with mock.patch.dict(sys.modules, {"jieba": types.SimpleNamespace(cut=pairs, setLogLevel=lambda _level: None)}):
            self.assertEqual(judge.f1_zh("张三李四", "张三李四"), 1)
            self.assertAlmostEqual(judge.f1_zh("张三李四王五", "李四王五"), 0.8)  # precision 2/3, recall 1
            self.assertEqual(judge.f1_zh("张三", "三张"), 0)  # words, not characters
            self.assertEqual(judge.f1_zh("张三。 Ab", "张三aB"), 1)  # signs and case do not count
            self.assertEqual(judge.f1_zh("。，", "。，"), 0)
            self.assertEqual(judge.f1_zh("", "张三"), 0)

    @unittest.skipIf(missing("jieba"), "jieba is not here")
    def test_words_of_jieba(self):
        # jieba's own example: 我/来到/北京/清华大学
        self.assertEqual(judge.words("我来到北京清华大学"), ["我", "来到", "北京", "清华大学"])
        self.assertAlmostEqual(judge.f1_zh("我来到北京", "北京清华大学"), 0.4)  # 1 of 3 and 1 of 2

    @unittest.skipIf(missing("jieba", "rouge"), "jieba or rouge is not here")
    def test_rouge_of_words(self):
        # The longest common subsequence has 1 of 3 and of 2 words; rouge adds 1e-8 below its fraction.
        self.assertAlmostEqual(judge.rouge_l_zh("我来到北京", "北京清华大学"), 0.4, places=6)
        self.assertEqual(judge.rouge_l_zh("", "北京"), 0)


class Command(unittest.TestCase):
    QUESTION = json.dumps({"answer": "北京", "references": ["x", "北京"], "record": {}})

    def test_without_a_package_there_is_no_score(self):
        with tempfile.TemporaryDirectory() as folder:
            for name in ("jieba", "rouge"):
                (Path(folder) / f"{name}.py").write_text("raise ImportError('not here')\n")
            for word, name in (("f1_zh", "jieba"), ("rouge_l_zh", "rouge")):
                self.assertEqual(run([word], self.QUESTION, PYTHONPATH=folder),
                                 (2, f"judge.py: got no package {name} (not here), wanted one: pip install {name}\n"))

    @unittest.skipIf(missing("jieba"), "jieba is not here")
    def test_it_reads_an_object_and_prints_a_number(self):
        self.assertEqual(run(["f1_zh"], self.QUESTION), (0, "1.0\n"))

    def test_what_is_wrong_is_named(self):
        self.assertEqual(run(["choice"], "{}"), (2, "judge.py: got choice, wanted one of: f1_zh, rouge_l_zh\n"))
        self.assertEqual(run(["f1_zh"], "{}")[0], 2)
        self.assertIn("got no object with answer and references", run(["f1_zh"], "no")[1])


if __name__ == "__main__":
    unittest.main()
