"""Tiny sources of every set, for test_convert.py: our own invented texts in the published formats, no record of any set.

SETS: name -> Fixture. files: path in the source -> text, bytes, or a list of records (a line each). task: the one that is
looked at. records: what its records must be, in part. options: more words of the command line.
BAD: (set, path, change, message): what change(files[path]) makes of the source is refused with the message.
"""

import copy
import dataclasses
import gzip
import json


@dataclasses.dataclass
class Fixture:
    files: dict
    task: str
    records: list
    header: dict
    options: tuple = ()
    prompt: str = ""  # the first record's whole prompt: prompt, question and answer's first words


def longbench(**more):
    return {"input": "Who sails?", "context": "Ann sails. Bob walks.", "answers": ["Ann", "Ann Lee"], "length": 4, "dataset": "x",
            "language": "en", "all_classes": None, "_id": "a1", **more}


V2 = {"_id": "v1", "domain": "Lists", "sub_domain": "Boats", "difficulty": "easy", "length": "short", "question": " Who sails? ",
      "choice_A": "Ann", "choice_B": "Bob", "choice_C": " Cid", "choice_D": "Dee", "answer": "A", "context": "\nAnn sails.\n"}
LEVAL = {"input": "Ann sails. Bob walks.", "instructions": ["Who sails?", "Who walks?"], "outputs": ["Ann", "Bob"], "source": "x",
         "evaluation": "f1"}
INFINITE = {"id": 7, "context": "Ann is keen.", "input": "Who is keen?", "answer": ["Bob", "Ann"], "options": []}
RULER_TEXT = ("A special magic number is hidden.\nWhat is the special magic number for sea? is a line of the text.\nOne of the "
              "special magic numbers for sea is: 77.\nWhat is the special magic number for sea mentioned in the provided text?")
RULER_OPENING = " The special magic number for sea mentioned in the provided text is"
LONGGEN = {"prompt": "Build 3 floors. *** started ***\n#*# Floor 1:", "prefix": "#*# Floor 1:", "type": "Floor", "number": 3,
           "checks_once": {"2": "bakery"}, "checks_range": {}, "checks_periodic": {"1": "garden", "3": "garden", "4": "garden"}}
GSM = {"question": "Ann has 1,200 eggs and sells 100. How many stay?", "answer": "1,200 less 100 is <<1200-100=1100>>1,100.\n#### 1,100"}
GSM_SHOT = {"question": "What is 1 + 1?", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"}
MATH = {"problem": "Let $\\{x\\}$ hold 1. Find $x$.", "solution": "It is 1.", "answer": "\\frac{1}{1}", "subject": "Algebra",
        "level": 2, "unique_id": "test/a.json"}
AIME = [{"id": 1, "problem": "Find 20 + 5.", "answer": "025", "url": "https://x/2024_AIME_I_Problems/Problem_1"},
        {"id": 2, "problem": "Find 20 + 6.", "answer": "026", "url": "https://x/2023_AIME_I_Problems/Problem_1"}]
GPQA = ('Record ID,Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3,High-level domain\n'
        'r1,"Which is red, of these?",rose,leaf,sky,sea,Colours\n')
MMLU = {"test/sea_life_test.csv": '"Which swims, and\nhow?",fish,"bird, or so",stone,tree,A\nWhich flies?,fish,bird,stone,tree,B\n',
        "dev/sea_life_dev.csv": "question,choice0,choice1,choice2,choice3,answer\nWhich dives?,seal,cat,dog,hen,0\nWhich floats?,"
                                "iron,cork,lead,gold,1\n"}
PRO = {"question_id": 5, "question": "Which swims?", "options": ["fish", "bird", "N/A"], "answer": "A", "answer_index": 0,
       "cot_content": "", "category": "sea", "src": "x"}
PRO_SHOT = {**PRO, "question_id": 1, "question": "Which flies?", "answer": "B",
            "cot_content": "A: Let's think step by step. Birds do. The answer is (B)."}
HUMAN = {"task_id": "HumanEval/0", "prompt": "\ndef one():\n    \"\"\"Returns {1}.\"\"\"\n", "entry_point": "one",
         "canonical_solution": "    return 1\n", "test": "def check(candidate):\n    assert candidate() == 1\n\n"}
MBPP = {"task_id": 2, "code": "def one():\n  return 1", "prompt": "Write a function that returns 1.", "test_imports": ["import math"],
        "test_list": ["assert one() == 1", "assert one() < 2"], "test": "import math\nassert one() == 1\n"}
BOOK = "Ann sailed out. " * 50
CASES = {"pizza": {"needles": [" Figs are one. ", "Ham is two."], "question": "Which are they?", "true_answer": "Figs and ham."},
         "shared": [" A needle of several cases. "]}

SETS = {
    "longbench": Fixture(
        {"data/multifieldqa_en.jsonl": [longbench(), longbench(_id="a2", input="Who walks?", answers=["Bob"])],
         "data/multifieldqa_en_e.jsonl": [longbench(_id="e1")],
         "data/trec.jsonl": [longbench(_id="t1", all_classes=["Food", "Date"], answers=["Food"])]},
        "multifieldqa_en",
        [{"id": "a1", "input": "Who sails?", "context": "Ann sails. Bob walks.", "answers": ["Ann", "Ann Lee"], "length": 4},
         {"id": "a2", "answers": ["Bob"]}],
        {"metric": "longbench_f1", "max_new_tokens": 64, "chat": True, "truncate": "middle", "records": 2},
        prompt="Read the following text and answer briefly.\n\nAnn sails. Bob walks.\n\nNow, answer the following question based on "
               "the above text, only give me the answer and do not output any other words.\n\nQuestion: Who sails?\nAnswer:"),
    "longbench_e": Fixture(
        {"samsum_e.jsonl": [longbench(_id="e1")], "samsum.jsonl": [longbench(_id="no")]}, "samsum_e",
        [{"id": "e1"}], {"metric": "longbench_rouge_first_line", "max_new_tokens": 128, "chat": False, "stop": ["\n"], "set": "longbench_e"},
        prompt="Summarize the dialogue into a few short sentences. The following are some examples.\n\nAnn sails. Bob walks.\n\n"
               "Who sails?"),
    "longbench_v2": Fixture(
        {"data.json": json.dumps([V2, {**V2, "_id": "v2", "length": "medium"}, {**V2, "_id": "v3", "length": "long",
                                                                                            "difficulty": "hard"}])}, "longbench_v2",
        [{"id": "v1", "input": "Who sails?", "context": "Ann sails.", "answers": ["A"], "choice_C": "Cid", "difficulty": "easy"}],
        {"metric": "longbench_v2_choice", "max_new_tokens": 128, "chat": True},
        prompt="Please read the following text and answer the question below.\n\n<text>\nAnn sails.\n</text>\n\nWhat is the correct "
               "answer to this question: Who sails?\nChoices:\n(A) Ann\n(B) Bob\n(C) Cid\n(D) Dee\n\nFormat your response as "
               "follows: \"The correct answer is (insert answer here)\"."),
    "leval": Fixture(
        {"Open-ended-tasks/financial_qa.jsonl": [LEVAL, {**LEVAL, "evaluation": "LLM"}],
         "Closed-ended-tasks/sci_fi.jsonl": [{**LEVAL, "evaluation": "exam", "outputs": ["True [fact: False]", "False [fact: True]"]}],
         "Closed-ended-tasks/tpo.jsonl": [{**LEVAL, "evaluation": "exam", "outputs": ["A", "B"]}]},
        "financial_qa",
        [{"id": "financial_qa-1-1", "input": "Who sails?", "answers": ["Ann"], "context": "Ann sails. Bob walks.", "source": "x"},
         {"id": "financial_qa-1-2", "input": "Who walks?", "answers": ["Bob"]}],
        {"metric": "longbench_f1", "max_new_tokens": 512, "records": 2, "left_out": {"a judge grades them": 2}}),
    "infinitebench": Fixture(
        {"longbook_choice_eng.jsonl": [{**INFINITE, "options": ["Bob", "Cid", "Ann", "Dee"], "answer": ["Ann"]}],
         "longbook_qa_eng.jsonl": [INFINITE],
         "code_debug.jsonl": [{**INFINITE, "options": ["f", "g", "h", "i"], "answer": ["code of g", "B"]}],
         "code_run.jsonl": [{**INFINITE, "input": "Please give me the value of func_3(-7).", "answer": [12]}],
         "math_find.jsonl": [{**INFINITE, "input": "The smallest number is?", "answer": [3]}],
         "math_calc.jsonl": [{**INFINITE, "answer": [1, 4, 8]}],
         "passkey.jsonl": [{**INFINITE, "answer": "01234"}]},
        "longbook_choice_eng", [{"id": "7", "answers": ["C", "Ann"], "option_D": "Dee"}],
        {"metric": "infinitebench_choice", "max_new_tokens": 40, "chat": False},
        prompt="Read the book and answer the question.\n\nAnn is keen.\n\nQuestion: Who is keen?\nA. Bob\nB. Cid\nC. Ann\nD. Dee\n\nThe "
               "letter of the correct answer is"),
    "ruler": Fixture(
        {"4096/data/niah_single_1/validation.jsonl": [{"index": 3, "input": RULER_TEXT + RULER_OPENING, "outputs": ["77"], "length": 60}],
         "RULER_8192_niah_single_1.jsonl": [{"index": 0, "input": RULER_TEXT, "answer_prefix": RULER_OPENING, "outputs": ["77"],
                                             "length": 61}],
         "qa_1.jsonl": [{"index": 0, "outputs": ["Ann", "Ann Lee"], "length": 9, "input": "Document 1:\nAnn sails.\n\nAnswer the question "
                         "based on the given documents. Be brief.\n\nQuestion: Who sails? Answer:"}]},
        "niah_single_1_4096",
        [{"id": "3", "answers": ["77"], "opening": RULER_OPENING, "length": 60, "context": RULER_TEXT[:RULER_TEXT.rindex("\n")],
          "input": "\nWhat is the special magic number for sea mentioned in the provided text?"}],
        {"metric": "string_match_all", "max_new_tokens": 128, "chat": True, "truncate": "none"}, prompt=RULER_TEXT + RULER_OPENING),
    "longgenbench": Fixture(
        {"Dataset_short.json": json.dumps([LONGGEN])}, "short",
        [{"id": "short-1", "answers": ["1: garden", "2: bakery", "3: garden"], "type": "Floor", "number": 3}],
        {"metric": "demands", "max_new_tokens": 16384, "chat": False, "left_out": {"demands of entries beyond the last": 1}},
        prompt=LONGGEN["prompt"]),
    "gsm8k": Fixture(
        {"test.jsonl": [GSM], "train.jsonl": [GSM_SHOT, GSM]}, "gsm8k", [{"id": "test-1", "answers": ["1100"], "shots": 1}],
        {"metric": "gsm8k", "chat": True}, ("--shots", "1"),
        prompt="Answer the last question as the others are answered. End with #### and the number.\n\nQuestion: What is 1 + 1?\nAnswer: "
               "1 + 1 = 2\n#### 2\n\nQuestion: Ann has 1,200 eggs and sells 100. How many stay?\nAnswer:"),
    "math500": Fixture(
        {"test.jsonl": [MATH]}, "math500", [{"id": "test/a.json", "answers": ["\\frac{1}{1}"], "level": 2, "subject": "Algebra"}],
        {"metric": "boxed", "max_new_tokens": 16384},
        prompt="Let $\\{x\\}$ hold 1. Find $x$.\nPlease reason step by step, and put your final answer within \\boxed{}."),
    "aime24": Fixture({"aime24.jsonl": AIME}, "aime24", [{"id": "1", "answers": ["025", "25"]}],
                      {"metric": "boxed", "records": 1, "left_out": {"other years": 1}}),
    "gpqa": Fixture({"gpqa_diamond.csv": GPQA}, "gpqa_diamond", [{"id": "r1", "input": "Which is red, of these?", "domain": "Colours"}],
                    {"metric": "gpqa_choice", "max_new_tokens": 16384}),
    "mmlu": Fixture(
        MMLU, "mmlu", [{"id": "sea_life-1", "answers": ["A"], "subject": "sea_life"}, {"id": "sea_life-2", "answers": ["B"]}],
        {"metric": "choice", "chat": False}, ("--shots", "1"),
        prompt="The following are multiple choice questions (with answers) about sea life.\n\nWhich dives?\nA. seal\nB. cat\nC. dog\nD. "
               "hen\nAnswer: A\n\nWhich swims, and\nhow?\nA. fish\nB. bird, or so\nC. stone\nD. tree\nAnswer:"),
    "mmlu_pro": Fixture(
        {"test.jsonl": [PRO], "validation.jsonl": [PRO_SHOT, {**PRO_SHOT, "category": "air"}]}, "mmlu_pro",
        [{"id": "5", "answers": ["A"], "category": "sea"}], {"metric": "choice_pro"}, ("--shots", "1"),
        prompt="The following are multiple choice questions (with answers) about sea. Think step by step and then finish your answer "
               "with \"the answer is (X)\" where X is the correct letter choice.\n\n\nQuestion:\nWhich flies?\nOptions:\nA. fish\nB. "
               "bird\nAnswer: Let's think step by step. Birds do. The answer is (B).\n\nQuestion:\nWhich swims?\nOptions:\nA. fish\nB. "
               "bird\nAnswer: Let's think step by step."),
    "humaneval_plus": Fixture(
        {"test.jsonl": [HUMAN], "HumanEval.jsonl.gz": gzip.compress(json.dumps(HUMAN).encode(), mtime=0)}, "humaneval_plus",
        [{"id": "HumanEval/0", "tests": ["def check(candidate):\n    assert candidate() == 1\n\ncheck(one)\n"], "entry_point": "one"}],
        {"metric": "unit_tests", "references": "tests", "max_new_tokens": 768, "stop": ["\n```", "\nif __name__", "\ndef main(", "\nprint("]},
        prompt="Please provide a self-contained Python script that solves the following problem in a markdown code block:\n```python\n"
               "def one():\n    \"\"\"Returns {1}.\"\"\"\n```\nBelow is a Python script with a self-contained function that solves the "
               "problem and passes corresponding tests:\n```python\n"),
    "mbpp_plus": Fixture(
        {"test.jsonl": [MBPP], "mbpp_sanitized_test.jsonl": [{k: v for k, v in MBPP.items() if k != "test"}]}, "mbpp_plus",
        [{"id": "2", "input": '"""\nWrite a function that returns 1.\nassert one() == 1\n"""',
          "entry_point": "one", "tests": ["import math\nassert one() == 1\n"]}], {"metric": "unit_tests", "references": "tests"}),
    "niah": Fixture({"essays/b.txt": BOOK, "essays/a.txt": "First. ", "README.txt": "no"}, "niah", [{"id": "sandwich-60-0"}],
                    {"metric": "rouge_1", "max_new_tokens": 50, "records": 3}, ("--words", "60", "--depths", "3")),
    "u_niah": Fixture({"needle_cases.json": json.dumps(CASES), "b.txt": BOOK}, "u_niah",
                      [{"id": "pizza-60-0", "input": "Which are they?", "answers": ["Figs and ham."], "words": 60, "depth": 0.0}],
                      {"metric": "rouge_1", "records": 2}, ("--words", "60", "--depths", "2")),
}


def without(name):
    def change(values):
        return [{k: v for k, v in value.items() if k != name} for value in values]
    return change


def having(**more):
    return lambda values: [{**copy.deepcopy(value), **more} for value in values]


def text(old, new):
    return lambda content: content.replace(old, new)


BAD = [
    ("longbench", "data/multifieldqa_en.jsonl", without("answers"), "multifieldqa_en.jsonl: record 1: got no field 'answers'"),
    ("longbench", "data/multifieldqa_en.jsonl", having(answers=[]), "record 1: got an empty 'answers'"),
    ("longbench", "data/multifieldqa_en.jsonl", having(answers=["Ann", " "]), "record 1: got an empty answer, wanted a reference"),
    ("longbench", "data/multifieldqa_en.jsonl", having(answers="Ann"), "record 1: got str in 'answers', wanted a list of texts"),
    ("longbench", "data/multifieldqa_en.jsonl", having(answers=[{"text": "Ann"}]), "got something else than texts in 'answers'"),
    ("longbench", "data/multifieldqa_en.jsonl", having(context=" "), "record 1: got an empty 'context'"),
    ("longbench", "data/multifieldqa_en.jsonl", having(context=None), "record 1: got NoneType in 'context', wanted text"),
    ("longbench", "data/multifieldqa_en.jsonl", having(input="\ud800"), "record a1: got text that is no Unicode"),
    ("longbench", "data/multifieldqa_en.jsonl", lambda _: '{"input": 1}\n\n{"input"', "multifieldqa_en.jsonl: record 1: got no field"),
    ("longbench", "data/multifieldqa_en.jsonl", lambda v: json.dumps(v[0]) + "\n\n{\"input\"", "multifieldqa_en.jsonl:3: got text that is no"),
    ("longbench", "data/multifieldqa_en.jsonl", lambda _: "5\n", "record 1: got JSON that is no object"),
    ("longbench", "data/multifieldqa_en.jsonl", lambda _: " \n", "multifieldqa_en.jsonl: got no records"),
    ("longbench", "data/multifieldqa_en.jsonl", lambda v: json.dumps(v[0]).encode() + b"\n\xff\xfe", "en.jsonl:2: got bytes that are no"),
    ("longbench", "data/multifieldqa_en.jsonl", lambda _: b"\xff\xfe", "en.jsonl:1: got bytes that are no UTF-8"),
    ("longbench", "data/multifieldqa_en.jsonl", lambda _: "version https://git-lfs.github.com/spec/v1\n", "got a Git LFS pointer"),
    ("longbench", "data/multifieldqa_en.jsonl", having(_id="a1"), "longbench multifieldqa_en: record 2: got the id 'a1' of an earlier"),
    ("longbench", "data/multifieldqa_en.jsonl", having(_id=True), "record 1: got bool in '_id', wanted text"),
    ("longbench", "data/multifieldqa_en.jsonl", having(answers=[float("nan")]), "en.jsonl:1: got text that is no JSON (NaN is no number"),
    ("longbench", "data/multifieldqa_en.jsonl", lambda v: json.dumps(v[0]).replace('["Ann"', '[1e999, "Ann"'), "else than texts in 'answers'"),
    ("longbench", "data/trec.jsonl", having(all_classes=None), "trec.jsonl: record 1: got no 'all_classes'"),
    ("longbench_e", "samsum_e.jsonl", without("_id"), "samsum_e.jsonl: record 1: got no field '_id'"),
    ("longbench_v2", "data.json", text('"answer": "A"', '"answer": "E"'), "data.json: record 1: got the answer 'E', wanted A, B, C or D"),
    ("longbench_v2", "data.json", text("choice_D", "choice_E"), "record 1: got no field 'choice_D'"),
    ("longbench_v2", "data.json", text('"short"', '"tiny"'), "record 1: got the length 'tiny', wanted one of: short, medium, long"),
    ("longbench_v2", "data.json", text('"hard"', '"harder"'), "record 3: got the difficulty 'harder', wanted one of: easy, hard"),
    ("longbench_v2", "data.json", text("[{", '{"a": {'), "data.json: got text that is no JSON"),
    ("leval", "Open-ended-tasks/financial_qa.jsonl", having(outputs=["Ann"]), "record 1: got 2 instructions and 1 outputs"),
    ("leval", "Open-ended-tasks/financial_qa.jsonl", having(outputs=["Ann", ""]), "record 1, question 2: got an empty answer"),
    ("leval", "Open-ended-tasks/financial_qa.jsonl", having(evaluation="rouge"), "record 1: got evaluation: rouge, wanted f1"),
    ("leval", "Closed-ended-tasks/sci_fi.jsonl", having(outputs=["True", "False"]), "record 1: got the output 'True'"),
    ("infinitebench", "longbook_choice_eng.jsonl", having(answer=["Zoe"]), "record 1: got the answer ['Zoe'], wanted one of the options"),
    ("infinitebench", "longbook_choice_eng.jsonl", having(options=["Ann"]), "record 1: got 1 options, wanted 4"),
    ("infinitebench", "code_run.jsonl", having(input="Run it."), "code_run.jsonl: record 1: got no call like func_1(-2)"),
    ("infinitebench", "math_calc.jsonl", having(answer=["x"]), "math_calc.jsonl: record 1: got the answer ['x'], wanted integers"),
    ("infinitebench", "math_calc.jsonl", having(answer=[[1], [2]]), "record 1: got something else than texts in 'answer'"),
    ("infinitebench", "math_find.jsonl", having(input="Find it."), "record 1: got no words like 'The largest number'"),
    ("infinitebench", "longbook_qa_eng.jsonl", having(answer=None), "record 1: got something else than texts in 'answer'"),
    ("ruler", "4096/data/niah_single_1/validation.jsonl", having(input="Only noise."), "record 1: got no question of niah_single_1"),
    ("ruler", "4096/data/niah_single_1/validation.jsonl", having(outputs=[]), "record 1: got an empty 'outputs'"),
    ("longgenbench", "Dataset_short.json", text("*** started", "*** begun"), "record 1: got a prompt that does not end with"),
    ("longgenbench", "Dataset_short.json", text('"bakery"', '""'), "record 1: got an empty demand for entry 2 in 'checks_once'"),
    ("longgenbench", "Dataset_short.json", text('"2": "bak', '"two": "bak'), "record 1: got entry 'two' in 'checks_once'"),
    ("gsm8k", "test.jsonl", having(answer="It is 5."), "test.jsonl: record 1: got an answer that does not end with ####"),
    ("gsm8k", "train.jsonl", lambda v: v[:0] + [{"question": "", "answer": "#### 2"}], "train.jsonl: record 1: got an empty 'question'"),
    ("math500", "test.jsonl", having(answer=""), "test.jsonl: record 1: got an empty 'answer'"),
    ("aime24", "aime24.jsonl", having(url=7), "aime24.jsonl: record 1: got int in 'url', wanted text"),
    ("aime24", "aime24.jsonl", lambda _: [AIME[1]], "aime24.jsonl: got no record for aime24; 1 left out (other years)"),
    ("aime24", "aime24.jsonl", having(answer="x"), "aime24.jsonl: record 1: got the answer 'x', wanted an integer from 0 to 999"),
    ("gpqa", "gpqa_diamond.csv", text("rose", " "), "gpqa_diamond.csv: record 1: got an empty 'Correct Answer'"),
    ("gpqa", "gpqa_diamond.csv", text(",Colours", ""), "gpqa_diamond.csv: record 1: got 6 columns, wanted 7"),
    ("gpqa", "gpqa_diamond.csv", text("Question,", "Query,"), "record 1: got no field 'Question', wanted one of: Record ID, Query"),
    ("mmlu", "test/sea_life_test.csv", text("tree,B", "tree,E"), "sea_life_test.csv: record 2: got the answer 'E'"),
    ("mmlu", "test/sea_life_test.csv", text("tree,B", "tree"), "sea_life_test.csv: record 2: got 5 columns, wanted 6"),
    ("mmlu", "dev/sea_life_dev.csv", text("seal", ""), "sea_life_dev.csv: record 1: got an empty column"),
    ("mmlu_pro", "test.jsonl", having(answer="C"), "test.jsonl: record 1: got the answer 'C', wanted A to B"),
    ("mmlu_pro", "validation.jsonl", having(category="air"), "test.jsonl: record 1: got 0 examples of sea, wanted --shots 1"),
    ("humaneval_plus", "test.jsonl", lambda v: [{**without("test")(v)[0], "plus_input": []}], "record 1: got EvalPlus's own release"),
    ("humaneval_plus", "HumanEval.jsonl.gz", lambda v: v[:20], "HumanEval.jsonl.gz: got no gzip data"),
    ("mbpp_plus", "test.jsonl", having(test_list=[]), "test.jsonl: record 1: got an empty 'test_list'"),
    ("niah", "essays/b.txt", lambda _: b"\xff", "b.txt:1: got bytes that are no UTF-8"),
    ("u_niah", "needle_cases.json", text('"question"', '"ask"'), "needle_cases.json: record pizza: got no field 'question'"),
    ("u_niah", "needle_cases.json", lambda _: '{"pizza": 3}', "needle_cases.json: record pizza: got int, wanted a case"),
    ("u_niah", "needle_cases.json", lambda _: '{"shared": ["x"]}', "needle_cases.json: got no record for u_niah"),
    ("u_niah", "needle_cases.json", lambda _: "[]", "needle_cases.json: got no map of cases"),
]
