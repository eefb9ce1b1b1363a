"""Compares the golden scores of metrics.json with the public scorers' own files, out of checkouts of yours.

    python tools/goldens/metrics.py --against DIR     DIR: a folder with checkouts of the repositories below, or some of them

Of a file only imports, functions and classes run; what it imports and is not installed is left out. A case counts where the
scorer gives a number. Where it ends with an exception, kvlab has a score of its own, and the case is only counted.
"""

import __future__

import ast
import contextlib
import io
import json
import types
from pathlib import Path


def run(path, space):
    """Adds the functions and classes of a Python file, by name."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)):
            code = compile(ast.Module([node], []), path, "exec", __future__.annotations.compiler_flag)
            with contextlib.suppress(ImportError, NameError, AttributeError):
                exec(code, space)


def best(name):
    return lambda f, case: max(f[name](case["answer"], r) for r in case["references"])


def first_lines(name):
    """LongBench's eval.py gives some sets' first line to the scorer."""
    def score(f, case):
        cut = case.get("params", {}).get("first_line")
        answer = case["answer"].lstrip("\n").split("\n")[0] if cut else case["answer"]
        return max(f[name](answer, r, **case.get("record", {})) for r in case["references"])

    return score


def code_sim(f, case):
    import fuzzywuzzy.fuzz

    ratio = "difflib" if fuzzywuzzy.fuzz.SequenceMatcher.__module__ == "difflib" else "levenshtein"
    return best("code_sim_score")(f, case) if case.get("params", {}).get("ratio") == ratio else None


def infinite(task, label):
    return lambda f, case: f[f"get_score_one_{task}"](case["answer"], label(case["references"]), "")


def boxed(f, case):
    from metrics import last_box

    def truth(reference):
        own = last_box(reference)
        return reference if own is None else own

    return max(f["is_equiv"](last_box(case["answer"]), truth(r)) for r in case["references"])


def mmlu_pro(f, case):
    levels = ["l2"] if f["extract_answer"].__code__.co_argcount == 2 else []
    return (f["extract_answer"](case["answer"], *levels) or "G") in case["references"]  # G: random.seed(12345)


def gpqa(f, case):
    return f["AnswerPredictor"].parse_sampled_answer(case["answer"]) in case["references"]


def leval(task, own, right):
    def score(f, case):
        f["args"] = types.SimpleNamespace(pred_file=task)
        return f["exact_match_score"](own(f, case["answer"], case["references"][0]), right(f, case["references"][0]))

    return score


def options(task):
    return leval(task, lambda f, answer, _: f["process_output_mc"](answer), lambda f, reference: f["process_gt_mc"](reference))


def fact(text):
    """The half of an answer to sci_fi that kvlab does not ask for."""
    return text if "[fact:" in text.lower() else text + "[fact: true]"


# (the files' names, a function that tells them from others of the name, metric -> score of a case)
SCORERS = {
    "LongBench": (["metrics.py"], "code_sim_score", {
        "longbench_f1": first_lines("qa_f1_score"), "longbench_rouge": first_lines("rouge_score"),
        "classification": first_lines("classification_score"), "count": best("count_score"), "retrieval": best("retrieval_score"),
        "retrieval_zh": best("retrieval_zh_score"), "code_sim": code_sim}),
    "InfiniteBench": (["compute_scores.py"], "get_score_one_code_debug", {
        "first_integer": infinite("passkey", lambda r: r[0]), "word": infinite("kv_retrieval", lambda r: r[0]),
        "infinitebench_name": infinite("longdialogue_qa_eng", list), "infinitebench_choice": infinite("longbook_choice_eng", list),
        "f1_characters": infinite("longbook_qa_chn", list), "leading_numbers": infinite("math_calc", lambda r: json.loads(r[0])),
        "first_number": infinite("math_find", lambda r: json.loads(r[0])), "last_integer": infinite("code_run", lambda r: int(r[0])),
        "infinitebench_option": infinite("code_debug", lambda r: [r[1], r[0]])}),
    "MATH": (["math_equivalence.py"], "is_equiv", {"boxed": boxed}),
    "MMLU-Pro": (["compute_accuracy.py"], "extract_answer", {"choice_pro": mmlu_pro}),
    "GPQA": (["run_baseline.py"], "parse_sampled_answer", {"gpqa_choice": gpqa}),
    "L-Eval": (["auto_eval.py", "em.py"], "process_output_mc", {
        "leval_choice": options("quality"), "leval_letters": options("coursera"),
        "leval_math": leval("gsm100", lambda f, a, _: f["process_math"](a), lambda f, r: f["process_math"](r)),
        "leval_code": leval("codeU", lambda f, a, r: f["process_output_code"](a, r), lambda f, r: f["process_gt_code"](r)),
        "leval_judgment": leval("sci_fi", lambda f, a, _: f["process_output_judge"](fact(a))[0],
                                lambda f, r: f["process_gt_judge"](fact(r))[0]),
        "leval_part": leval("topic_retrieval_longchat", lambda f, a, _: a, lambda f, r: r)}),
}  # fmt: skip


def functions(folder, names, mark):
    """(the first file, the functions of all); None where they are not below the folder."""
    for path in sorted(Path(folder).rglob(names[0])):
        if f"def {mark}(" in path.read_text(encoding="utf-8", errors="replace"):
            space = {"__name__": path.stem}
            for name in reversed(names):
                run(path.with_name(name), space)
            return path, space
    return None, {}


def compare(cases, folder):
    """Prints what each metric's cases come to. Returns whether none differs, and one was compared."""
    same, found = True, 0
    for title, (names, mark, metrics) in SCORERS.items():
        path, space = functions(folder, names, mark)
        print(f"{title}: {path or 'no ' + ' and '.join(names)}")
        for metric, score in metrics.items() if path else ():
            equal = ended = left_out = 0
            for case in cases[metric]:
                try:
                    with contextlib.redirect_stdout(io.StringIO()):
                        public = score(space, case)
                except (ValueError, IndexError, ZeroDivisionError):
                    ended += 1
                    continue
                if public is None:
                    left_out += 1
                elif public == case["score"]:
                    equal += 1
                else:
                    same = False
                    print(f"  {metric}: got {case['score']}, the scorer gives {float(public)}: {json.dumps(case)}")
            found += equal
            print(f"  {metric}: {equal} of {len(cases[metric])} equal" + f", the scorer ends in {ended}" * bool(ended)
                  + f", {left_out} of the other ratio" * bool(left_out))
    return same and found > 0
