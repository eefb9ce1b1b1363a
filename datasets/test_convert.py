#!/usr/bin/env python3
"""Tests convert.py on the sources of fixtures.py, and kvlab on what it writes. KVLAB names the program.
Usage: test_convert.py
"""

import contextlib
import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import unittest
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common  # noqa: E402
import convert  # noqa: E402
import fixtures  # noqa: E402
import needles  # noqa: E402
import written  # noqa: E402

KVLAB = os.environ.get("KVLAB")


def content(value):
    if isinstance(value, list):
        value = "".join(json.dumps(v) + "\n" for v in value)
    return value if isinstance(value, bytes) else value.encode("utf-8")


def write(folder, files):
    for name, value in files.items():
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content(value))


def run(*words):
    """(exit code, what was printed) of convert.py."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = convert.main([str(w) for w in words])
    return code, out.getvalue()


def read(path):
    """(header, records) of a converted file."""
    lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n")[:-1]]
    return lines[0][written.HEADER], lines[1:]


def rendered(template, record):
    """The template with the record's fields, by Python's own formatting: a second opinion on {{ }} and {field}."""
    return template.format(**{k: "\n".join(v) if isinstance(v, list) else v for k, v in record.items()})


class Folder(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = Path(holder.name)
        self.source, self.out = self.folder / "source", self.folder / "out"

    def converted(self, name, *words, files=None, source=None):
        write(self.source, files or fixtures.SETS[name].files)
        return run(name, "--from", source or self.source, "--to", self.out, *fixtures.SETS[name].options, *words)


class Sets(Folder):
    def test_every_set_has_a_fixture_and_bad_input(self):
        sets = set(common.all_sets())
        self.assertEqual(sets, set(fixtures.SETS))
        self.assertEqual(sets, {bad[0] for bad in fixtures.BAD})

    def test_every_set_says_what_users_must_know(self):
        for name, dataset in common.all_sets().items():
            with self.subTest(name):
                self.assertEqual(dataset.name, name)
                for key in ("title", "paper", "source", "version", "licence", "prompt_source", "wanted"):
                    self.assertTrue(getattr(dataset, key).strip(), key)
                self.assertIn(dataset.source, convert.description(dataset))

    def test_records_and_headers(self):
        for name, fixture in fixtures.SETS.items():
            with self.subTest(name), tempfile.TemporaryDirectory() as folder:
                self.source, self.out = Path(folder) / "source", Path(folder) / "out"
                code, said = self.converted(name)
                self.assertEqual(code, 0, said)
                header, records = read(self.out / f"{fixture.task}.jsonl")
                self.assertEqual((header["set"], header["task"]), (name, fixture.task))
                self.assertEqual(header["records"], len(records))
                for key, value in fixture.header.items():
                    self.assertEqual(header[key], value, key)
                for record, wanted in zip(records, fixture.records):
                    self.assertEqual({k: record.get(k) for k in wanted}, wanted)
                    self.assertTrue(all(isinstance(record[k], str) for k in ("id", "context", "input")))
                whole = "".join(rendered(header[k], records[0]) for k in ("prompt", "question_text", "answer_opening"))
                if fixture.prompt:
                    self.assertEqual(whole, fixture.prompt)
                for record in records:  # no record is without a field of the template, nor without a reference
                    for key in ("prompt", "question_text", "answer_opening"):
                        rendered(header[key], record)
                    self.assertTrue(record[header["references"]])

    def test_bad_input_is_named_with_file_and_record(self):
        for name, path, change, message in fixtures.BAD:
            with self.subTest(f"{name}: {message}"), tempfile.TemporaryDirectory() as folder:
                self.source, self.out = Path(folder) / "source", Path(folder) / "out"
                files = {**fixtures.SETS[name].files, path: change(fixtures.SETS[name].files[path])}
                code, said = self.converted(name, files=files)
                self.assertEqual(code, 2, said)
                self.assertIn(message, said)
                self.assertIn("convert.py: ", said)
                self.assertEqual(list(self.out.glob(".*")), [])

    def test_a_missing_file_says_where_to_get_it(self):
        self.source.mkdir()
        for name, dataset in common.all_sets().items():
            with self.subTest(name):
                code, said = run(name, "--from", self.source, "--to", self.out)
                self.assertEqual(code, 2)
                self.assertIn(str(self.source), said)
                self.assertIn(dataset.source, said)
                self.assertIn(dataset.wanted, said)
        self.assertFalse(self.out.exists())

    def test_a_task_without_its_file(self):
        code, said = self.converted("longbench", "--task", "qasper")
        self.assertEqual(code, 2)
        self.assertIn("got no qasper.jsonl, wanted TASK.jsonl", said)
        code, said = self.converted("longbench", "--task", "quasper")
        self.assertEqual(code, 2)
        self.assertIn("got --task quasper, wanted one of: narrativeqa, qasper", said)
        code, said = self.converted("longbench")
        self.assertEqual(code, 0)
        self.assertIn("longbench: no file for narrativeqa, qasper", said)

    def test_a_file_that_is_there_twice(self):
        files = {"a/data.json": "[]", "b/data.json": "[]"}
        code, said = self.converted("longbench_v2", files=files)
        self.assertEqual(code, 2)
        self.assertIn("got data.json 2 times (a/data.json, b/data.json)", said)


class Details(Folder):
    def records(self, name, task, *words):
        code, said = self.converted(name, *words)
        self.assertEqual(code, 0, said)
        return read(self.out / f"{task}.jsonl")

    def test_longbench_classes_and_tasks_with_a_suffix(self):
        header, records = self.records("longbench", "trec")
        self.assertEqual(records[0]["all_classes"], ["Food", "Date"])
        self.assertFalse(header["chat"])
        self.assertFalse((self.out / "multifieldqa_en_e.jsonl").exists())

    def test_longbench_has_no_chat_template_for_six_tasks(self):
        tasks = common.load_set("longbench").tasks
        self.assertEqual({n for n, t in tasks.items() if not t.chat},
                         {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"})
        self.assertEqual((len(tasks), len(common.load_set("longbench_e").tasks)), (21, 13))
        self.assertEqual({t.truncate for t in tasks.values()}, {"middle"})

    def test_longbench_metrics_are_those_of_its_paper(self):
        groups = {"longbench_f1": "narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique", "f1_zh": "multifieldqa_zh",
                  "longbench_rouge": "gov_report qmsum multi_news", "rouge_l_zh": "dureader vcsum", "longbench_f1_first_line": "triviaqa",
                  "longbench_rouge_first_line": "samsum", "classification_first_line": "trec lsht", "count": "passage_count",
                  "retrieval": "passage_retrieval_en", "retrieval_zh": "passage_retrieval_zh", "code_sim": "lcc repobench-p"}
        self.assertEqual({name: task.metric for name, task in common.load_set("longbench").tasks.items()},
                         {name: metric for metric, names in groups.items() for name in names.split()})

    def test_a_question_begins_behind_its_context(self):
        for name in ("longbench", "longbench_v2", "leval", "infinitebench", "niah", "u_niah"):
            for task, made in common.load_set(name).tasks.items():
                with self.subTest(task):
                    self.assertTrue(made.prompt.endswith("{context}"))
                    self.assertNotIn("{context}", made.question_text)

    def test_longbench_v2_has_a_task_for_each_length(self):
        for task, ids in {"longbench_v2": ["v1", "v2", "v3"], "short": ["v1"], "medium": ["v2"], "long": ["v3"]}.items():
            with self.subTest(task):
                header, records = self.records("longbench_v2", task)
                self.assertEqual([record["id"] for record in records], ids)
                self.assertEqual(header["left_out"], {} if task == "longbench_v2" else {"other lengths": 2})

    def test_longbench_v2_has_a_task_for_each_difficulty(self):
        for task, ids in {"easy": ["v1", "v2"], "hard": ["v3"]}.items():
            with self.subTest(task):
                header, records = self.records("longbench_v2", task)
                self.assertEqual([record["id"] for record in records], ids)
                self.assertEqual(header["left_out"], {"other difficulties": 3 - len(ids)})

    def test_leval_parts_a_judgment_from_the_truth(self):
        _, records = self.records("leval", "sci_fi")
        self.assertEqual([(r["answers"], r["fact"]) for r in records], [(["True"], "False"), (["False"], "True")])

    def test_infinitebench_answers(self):
        wanted = {"longbook_qa_eng": ["Bob", "Ann"], "code_debug": ["B", "code of g"], "code_run": ["12"], "math_find": ["3"],
                  "math_calc": ["[1, 4, 8]"], "passkey": ["01234"]}
        for task, answers in wanted.items():
            with self.subTest(task):
                header, records = self.records("infinitebench", task)
                self.assertEqual(records[0]["answers"], answers)
                whole = rendered(header["prompt"] + header["question_text"], records[0])
                if task == "code_run":
                    self.assertTrue(whole.endswith("Please compute the exact value of func_3(-7). The value of func_3(-7) is"))
                if task == "math_find":
                    self.assertTrue(whole.startswith("What is the smallest number in the following list?\n\nAnn is keen.\n\n"))

    def test_a_record_is_named_by_a_text_or_an_integer(self):
        files = {"multifieldqa_en.jsonl": [fixtures.longbench(_id=7), fixtures.longbench(_id="8")]}
        self.assertEqual(self.converted("longbench", files=files)[0], 0)
        self.assertEqual([r["id"] for r in read(self.out / "multifieldqa_en.jsonl")[1]], ["7", "8"])

    def test_infinitebench_values_in_a_list_of_one_list(self):
        self.assertEqual(self.converted("infinitebench", files={"math_calc.jsonl": [{**fixtures.INFINITE, "answer": [[1, 3]]}]})[0], 0)
        self.assertEqual(read(self.out / "math_calc.jsonl")[1][0]["answers"], ["[1, 3]"])

    def test_files_that_no_task_reads_are_named(self):
        files = {**fixtures.SETS["ruler"].files, "other/vt.json": "{}\n", "README.md": "words"}
        code, said = self.converted("ruler", files=files)
        self.assertEqual(code, 0, said)
        self.assertIn("ruler: no task reads other/vt.json; wanted LENGTH/TASK.jsonl", said)
        self.assertNotIn("no task reads", self.converted("ruler", "--task", "qa_1", files=files)[1])

    def test_ruler_takes_the_opening_from_its_own_field_or_the_prompt(self):
        _, records = self.records("ruler", "niah_single_1_8192")
        self.assertEqual(records[0]["opening"], fixtures.RULER_OPENING)
        self.assertTrue(records[0]["input"].endswith("provided text?"))
        header, records = self.records("ruler", "qa_1")
        self.assertEqual(header["metric"], "string_match_part")
        self.assertEqual((records[0]["context"], records[0]["opening"]), ("Document 1:\nAnn sails.", " Answer:"))

    def test_gsm8k_without_worked_examples(self):
        _, records = self.records("gsm8k", "gsm8k", "--shots", "0")
        self.assertNotIn("1 + 1", records[0]["context"])
        code, said = self.converted("gsm8k", "--shots", "3")
        self.assertEqual(code, 2)
        self.assertIn("train.jsonl: got 2 records, wanted at least --shots 3", said)
        self.assertEqual(self.converted("gsm8k", "--shots", "-1")[0], 2)
        (self.source / "train.jsonl").unlink()
        code, said = run("gsm8k", "--from", self.source, "--to", self.out)
        self.assertEqual(code, 2)
        self.assertIn("got no train.jsonl, wanted", said)
        self.assertIn("--shots 0 asks without worked examples", said)

    def test_an_answer_to_aime_is_right_with_and_without_zeros(self):
        files = {"aime24.jsonl": [{"id": n, "problem": f"Find {n}.", "answer": text} for n, text in enumerate(("005", "25", "204", 0))]}
        self.assertEqual(self.converted("aime24", files=files)[0], 0)
        _, records = read(self.out / "aime24.jsonl")
        self.assertEqual([r["answers"] for r in records], [["005", "05", "5"], ["025", "25"], ["204"], ["0", "00", "000"]])

    def test_the_first_of_two_right_options_counts(self):
        book = {**fixtures.INFINITE, "options": ["Bob", "Ann", "Ann", "Dee"], "answer": ["Ann"]}
        self.converted("infinitebench", files={"longbook_choice_eng.jsonl": [book]})
        self.assertEqual(read(self.out / "longbook_choice_eng.jsonl")[1][0]["answers"], ["B", "Ann"])
        for question in ("Which is red, of these?", "Which is red?", "Red?", "Red is"):
            text = fixtures.GPQA.replace("leaf", "rose").replace("Which is red, of these?", question)
            self.converted("gpqa", files={"gpqa_diamond.csv": text})
            record = read(self.out / "gpqa_diamond.jsonl")[1][0]
            lines = record["choices"].split("\n")
            self.assertEqual(sum("rose" in line for line in lines), 2)
            first = next(line for line in lines if "rose" in line)
            self.assertEqual(record["answers"], [first[1]])

    def test_gpqa_order_follows_from_the_question_alone(self):
        def letters(text):
            self.converted("gpqa", files={"gpqa_diamond.csv": text})
            _, records = read(self.out / "gpqa_diamond.jsonl")
            for record in records:
                lines = record["choices"].split("\n")
                self.assertIn(f"({record['answers'][0]}) rose", lines)
                self.assertEqual(sorted(line[4:] for line in lines), ["leaf", "rose", "sea", "sky"])
            return [r["answers"][0] for r in records]
        head, row = fixtures.GPQA.split("\n")[:2]
        rows = [row.replace("red", f"red {i}").replace("r1", f"r{i}") for i in range(40)]
        found = letters("\n".join([head, *rows]))
        self.assertEqual(set(found), set("ABCD"))
        self.assertEqual(letters("\n".join([head, *reversed(rows)])), found[::-1])

    def test_mmlu_with_and_without_a_head_row(self):
        _, records = self.records("mmlu", "mmlu", "--shots", "2")
        self.assertIn("Which floats?\nA. iron\nB. cork\nC. lead\nD. gold\nAnswer: B\n\n", records[0]["context"])
        self.assertEqual(len(records), 2)
        code, said = self.converted("mmlu", "--shots", "3")
        self.assertEqual(code, 2)
        self.assertIn("got 2 examples of sea_life, wanted --shots 3", said)

    def test_the_tests_of_a_function_tell_right_from_wrong(self):
        for name, task in (("humaneval_plus", "humaneval_plus"), ("humaneval_plus", "humaneval"), ("mbpp_plus", "mbpp_plus"),
                           ("mbpp_plus", "mbpp")):
            with self.subTest(task), tempfile.TemporaryDirectory() as folder:
                self.source, self.out = Path(folder) / "source", Path(folder) / "out"
                _, records = self.records(name, task)
                exec("def one():\n    return 1\n" + records[0]["tests"][0], {})
                with self.assertRaises(AssertionError):
                    exec("def one():\n    return 2\n" + records[0]["tests"][0], {})

    def test_the_function_is_the_one_that_the_first_test_calls(self):
        entry_point = common.load_set("mbpp_plus").read.__globals__["entry_point"]
        code = "import math\nclass Pair(object):\n    def area(self):\n        return 1\ndef chain(a):\n  return a\n"
        self.assertEqual(entry_point(code, "assert set(chain([Pair(1)])) == set(area(2))"), "chain")
        self.assertEqual(entry_point(code, "assert math.isclose(chain (3), 1)"), "chain")
        self.assertEqual(entry_point("one = lambda: 1", "assert one() == 1"), "")

    def test_needles_lie_where_they_should(self):
        text = " ".join(f"Line {i} is here." for i in range(100))
        for depth in (0, 0.25, 0.5, 1):
            with self.subTest(depth):
                made = needles.hidden(text, ["Needle one.", "Needle two."], depth)
                self.assertEqual(made.replace("Needle one. ", "").replace(" Needle one.", "").replace("Needle two. ", "")
                                 .replace(" Needle two.", ""), text)
                first, second = made.index("Needle one.") / len(made), made.index("Needle two.") / len(made)
                self.assertAlmostEqual(first, depth, delta=0.03)
                self.assertAlmostEqual(second, (1 + depth) / 2, delta=0.03)
                self.assertRegex(made, r"(^|here\. )Needle one\. ")
                self.assertLess(first, second)

    def test_a_haystack_has_its_words_and_begins_again(self):
        self.assertEqual(needles.cut("one  two\nthree four", 3), "one  two\nthree")
        self.assertEqual(needles.cut("one two", 5).split(), "one two one two one".split())
        _, records = self.records("niah", "niah")
        for record in records:
            self.assertEqual(len(record["context"].split()), 60)
            self.assertEqual(record["context"].count("eat a sandwich"), 1)
            self.assertIn("First.", record["context"])
        self.assertEqual([r["depth"] for r in records], [0, 0.5, 1])
        code, said = self.converted("niah", "--words", "5")
        self.assertEqual(code, 2)
        self.assertIn("got --words 5, wanted more than the needles' 21 words", said)

    def test_u_niah_reads_yaml_where_pyyaml_is(self):
        text = ("shared: &shared\n  - \" Figs are one. \"\n  - Ham is two.\n"
                "pizza:\n  needles: *shared\n  question: Which are they?\n  true_answer: Figs and ham.\n")
        files = {"config/needle_cases.yaml": text, "b.txt": fixtures.BOOK}
        code, said = self.converted("u_niah", files=files)
        try:
            import yaml  # noqa: F401
        except ImportError:
            self.assertEqual(code, 2)
            self.assertIn("needle_cases.yaml: got a YAML file and no Python package yaml", said)
            return
        self.assertEqual(code, 0, said)
        _, records = read(self.out / "u_niah.jsonl")
        self.assertIn("Figs are one.", records[0]["context"])
        self.assertEqual(self.converted("u_niah", files={**files, "config/needle_cases.yaml": "a: [1"})[0], 2)

    def test_u_niah_takes_the_cases_that_are_asked_for(self):
        code, said = self.converted("u_niah", "--case", "pasta")
        self.assertEqual(code, 2)
        self.assertIn("got --case pasta, wanted one of: pizza", said)
        self.assertEqual(self.converted("u_niah", "--case", "pizza")[0], 0)


class Files(Folder):
    def test_equal_sources_give_equal_bytes_from_folder_and_archive(self):
        for name in fixtures.SETS:
            with self.subTest(name), tempfile.TemporaryDirectory() as folder:
                self.source, self.out = Path(folder) / "source", Path(folder) / "out"
                self.converted(name)
                first = {p.name: p.read_bytes() for p in self.out.iterdir()}
                archive = Path(folder) / "data.zip"
                with zipfile.ZipFile(archive, "w") as zipped:
                    for path, value in fixtures.SETS[name].files.items():
                        zipped.writestr(path, content(value))
                self.out = Path(folder) / "again"
                self.assertEqual(self.converted(name, source=archive)[0], 0)
                self.assertEqual({p.name: p.read_bytes() for p in self.out.iterdir()}, first)

    def test_a_packed_file_is_found_by_its_name(self):
        for name in ("longbench", "longbench_v2", "infinitebench", "ruler", "gsm8k", "gpqa", "mmlu"):
            with self.subTest(name), tempfile.TemporaryDirectory() as folder:
                self.source, self.out = Path(folder) / "source", Path(folder) / "out"
                self.converted(name)
                plain = {p.name: read(p)[1] for p in self.out.glob("*.jsonl")}
                packed = {f"{path}.gz": gzip.compress(content(value)) for path, value in fixtures.SETS[name].files.items()}
                self.source, self.out = Path(folder) / "packed", Path(folder) / "again"
                code, said = self.converted(name, files=packed)
                self.assertEqual(code, 0, said)
                self.assertEqual({p.name: read(p)[1] for p in self.out.glob("*.jsonl")}, plain)

    def test_hashes(self):
        self.converted("longbench")
        path = self.out / "multifieldqa_en.jsonl"
        header, _ = read(path)
        source = self.source / "data/multifieldqa_en.jsonl"
        self.assertEqual(header["from"], [{"file": "data/multifieldqa_en.jsonl",
                                           "sha256": hashlib.sha256(source.read_bytes()).hexdigest()}])
        body = path.read_bytes().split(b"\n", 1)[1]
        self.assertEqual(header["records_sha256"], hashlib.sha256(body).hexdigest())
        summary = (self.out / "dataset.yaml").read_text(encoding="utf-8")
        for made in self.out.glob("*.jsonl"):
            self.assertIn(f"{made.name}: {{bytes: {made.stat().st_size}, sha256: {hashlib.sha256(made.read_bytes()).hexdigest()}",
                          summary)

    def test_check_sees_a_changed_byte_and_a_lost_line(self):
        self.converted("longbench")
        path = self.out / "multifieldqa_en.jsonl"
        whole = path.read_bytes()
        self.assertEqual(run("check", path)[0], 0)
        for damaged, message in ((whole.replace(b"Bob", b"Bab", 1), "with SHA-256"),
                                 (whole[:whole.rindex(b"\n", 0, -1) + 1], "got 1 records"),
                                 (whole.split(b"\n", 1)[1], "got no header"), (b"", "got no header")):
            path.write_bytes(damaged)
            code, said = run("check", path)
            self.assertEqual(code, 2)
            self.assertIn(message, said)
        self.assertEqual(run("check", self.folder / "none.jsonl")[0], 2)

    def test_a_task_without_a_record_is_skipped_unless_it_is_asked_for(self):
        value = json.loads(fixtures.SETS["longbench_v2"].files["data.json"])[0]  # short and easy
        files = {"data.json": json.dumps([value])}
        code, said = self.converted("longbench_v2", files=files)
        self.assertEqual(code, 0, said)
        self.assertEqual({p.stem for p in self.out.glob("*.jsonl")}, {"longbench_v2", "short", "easy"})
        self.assertIn("longbench_v2 medium: not converted: ", said)
        self.assertIn("data.json: got no record for hard; 1 left out (other difficulties), wanted at least one", said)
        code, said = self.converted("longbench_v2", "--task", "short", "medium", files=files)
        self.assertEqual(code, 2, said)
        self.assertIn("convert.py: ", said)
        self.assertIn("got no record for medium; 1 left out (other lengths)", said)
        code, said = self.converted("aime24", files={"test.jsonl": [dict(fixtures.MATH, url="2023")]})
        self.assertEqual(code, 2, said)  # it has no other task

    def test_a_failure_leaves_the_old_file(self):
        self.converted("longbench")
        path = self.out / "multifieldqa_en.jsonl"
        old = path.read_bytes()
        files = {"data/multifieldqa_en.jsonl": [fixtures.longbench(input="New?"), fixtures.longbench(answers=[])]}
        code, said = self.converted("longbench", files=files)
        self.assertEqual(code, 2)
        self.assertIn("record 2", said)
        self.assertEqual(path.read_bytes(), old)
        self.assertEqual([p for p in self.out.iterdir() if p.name.startswith(".")], [])

    def test_a_full_disk_leaves_the_old_file(self):
        path = self.folder / "file"
        path.write_bytes(b"old")
        with self.assertRaises(OSError), written.Replacement(path) as file:
            file.write(b"ne")
            raise OSError(28, "No space left on device")
        self.assertEqual([(p.name, p.read_bytes()) for p in self.folder.iterdir()], [("file", b"old")])

    def test_source_files_are_never_replaced(self):
        files = {"multifieldqa_en.jsonl": [fixtures.longbench()]}
        write(self.source, files)
        before = (self.source / "multifieldqa_en.jsonl").read_bytes()
        code, said = run("longbench", "--from", self.source, "--to", self.source)
        self.assertEqual(code, 2)
        self.assertIn("multifieldqa_en.jsonl: got a file that convert.py did not write", said)
        self.assertEqual((self.source / "multifieldqa_en.jsonl").read_bytes(), before)
        self.out.mkdir()
        (self.out / "dataset.yaml").write_text("name: mine\n", encoding="utf-8")
        code, said = run("longbench", "--from", self.source, "--to", self.out)
        self.assertEqual(code, 2)
        self.assertEqual([p.name for p in self.out.iterdir()], ["dataset.yaml"])
        self.assertEqual((self.out / "dataset.yaml").read_text(encoding="utf-8"), "name: mine\n")

    def test_parquet_needs_pyarrow(self):
        code, said = self.converted("math500", files={"test.parquet": b"PAR1"})
        self.assertEqual(code, 2)
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            self.assertIn("test.parquet: got a Parquet file and no Python package pyarrow", said)
            return
        self.assertIn("test.parquet: got no Parquet data", said)
        parquet.write_table(pyarrow.Table.from_pylist([fixtures.MATH]), self.source / "test.parquet")
        self.assertEqual(run("math500", "--from", self.source, "--to", self.out)[0], 0)
        self.assertEqual(read(self.out / "math500.jsonl")[1][0]["answers"], ["\\frac{1}{1}"])

    def test_samples_are_what_their_headers_say(self):
        samples = sorted(common.FOLDER.glob("*/sample/*.jsonl"))
        self.assertTrue(samples)
        for path in samples:
            with self.subTest(path.parent.parent.name):
                self.assertGreater(written.checked(path), 0)
                self.assertLess(path.stat().st_size, 40000)
                self.assertIn("sample/", common.load_set(read(path)[0]["set"]).sample)

    def test_help_and_list(self):
        for words in (["--help"], ["longbench", "--help"], ["u_niah", "--help"]):
            with self.assertRaises(SystemExit) as end:
                run(*words)
            self.assertEqual(end.exception.code, 0)
        code, said = run("list")
        self.assertEqual(code, 0)
        for name in fixtures.SETS:
            self.assertIn(f"\n{name}: ", "\n" + said)


@unittest.skipUnless(KVLAB, "KVLAB names no program")
class WithKvlab(Folder):
    EXPERIMENT = ("model: {path: bundled/recall}\ntasks:\n  - {name: sample, task: jsonl, data: out/FILE, limit: 1REST}\n"
                  "policies: [full]\nmetrics: [score]\nbackend: cpu\n")

    def kvlab(self, word, file, rest="", *more):
        path = self.folder / "e.yaml"
        path.write_text(self.EXPERIMENT.replace("FILE", file).replace("REST", rest), encoding="utf-8")
        done = subprocess.run([KVLAB, word, path, *more], capture_output=True, text=True, cwd=self.folder, check=False)
        return done.returncode, done.stdout + done.stderr

    def test_a_converted_file_is_checked_and_run(self):
        self.converted("ruler")
        code, said = self.kvlab("run", "niah_single_1_4096.jsonl", ", max_new_tokens: 4", "-o", self.folder / "o.h5")
        self.assertEqual(code, 0, said)
        self.assertIn("sample full: ok", said)

    def test_a_changed_metric_and_a_lost_line_are_refused(self):
        self.converted("longbench")
        path = self.out / "multifieldqa_en.jsonl"
        self.assertEqual(self.kvlab("check", path.name)[0], 0)
        whole = path.read_text(encoding="utf-8")
        wrong = whole.replace('"metric": "longbench_f1"', '"metric": "longbench_f11"')
        self.assertNotEqual(wrong, whole)
        path.write_text(wrong, encoding="utf-8")
        code, said = self.kvlab("check", path.name)
        self.assertEqual(code, 2, said)
        self.assertIn("got metric 'longbench_f11'", said)
        self.assertIn("did you mean 'longbench_f1'", said)
        self.assertEqual(self.kvlab("check", path.name, ", metric: contains")[0], 0)
        path.write_text("\n".join(whole.split("\n")[:2]) + "\n", encoding="utf-8")
        code, said = self.kvlab("check", path.name)
        self.assertEqual(code, 2, said)
        self.assertIn("got 1 records, wanted the header's 2", said)

    def test_a_prompt_longer_than_allowed_is_named_or_cut(self):
        self.converted("niah", "--words", "3000")
        code, said = self.kvlab("check", "niah.jsonl", ", metric: rouge_l, max_context: 1024")
        self.assertEqual(code, 2, said)
        self.assertIn("record 1: got ", said)
        self.assertIn("wanted at most max_context: 1024", said)
        self.assertEqual(self.kvlab("check", "niah.jsonl", ", metric: rouge_l, max_context: 1024, truncate: middle")[0], 0)


if __name__ == "__main__":
    unittest.main()
