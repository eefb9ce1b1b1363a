"""InfiniteBench (Zhang et al. 2024): 12 tasks. The prompts are those of its src/prompt.py for open models, and the longest
answers those of src/eval_utils.py: MIT licence, copyright (c) 2023 OpenBMB.
"""

import json
import re

from common import DataError, DataSet, asked, field, letter, name_of, record

HIDDEN = "There is an important info hidden inside a lot of irrelevant text. Find it{}. I will quiz you about the important " \
         "information there.\n\n{{context}}\n\n{{input}}\n\n{}"
OPTIONS = "A. {option_A}\nB. {option_B}\nC. {option_C}\nD. {option_D}\n\n"
MASK = ("Below is a dialogue script where one random occurrence of a character name is replaced with \"$$MASK$$\", and you should "
        "try to guess who that character is.\n\n{context}\n\nThe name that has been replaced with $$MASK$$ is likely")
CALC = ("Let us calculate the intermediate values of an expression.\n\nExpression: 1 + 3 + 4\nValues: [1, 4, 8]\n\nExpression: "
        "8 - 3 + 2 - 4\nValues: [8, 5, 7, 3]\n\nExpression: {context}\nValues:")

# name: (template, longest answer, metric, what differs)
TABLE = {
    "passkey": (HIDDEN.format(" and memorize them", "The pass key is"), 6, "first_integer", ""),
    "number_string": (HIDDEN.format("", "The sequence of digits is"), 12, "first_integer", ""),
    "kv_retrieval": ("Extract the value corresponding to the specified key in the JSON object below.\n\n{context}\n\n{input}", 50,
                     "word", ""),
    "longbook_sum_eng": ("Summarize the book below.\n\n{context}\n\nSummary:", 1200, "rouge_lsum", ""),
    "longbook_qa_eng": ("Read the book and answer the question. Be very concise in your answer.\n\n{context}\n\nQuestion: {input}\n"
                        "Answer:", 40, "longbench_f1", ""),
    "longbook_qa_chn": ("阅读以下书籍然后回答问题。\n\n{context}\n\n问题：{input}\n答案：", 40, "f1_characters", ""),
    "longbook_choice_eng": ("Read the book and answer the question.\n\n{context}\n\nQuestion: {input}\n" + OPTIONS +
                            "The letter of the correct answer is", 40, "infinitebench_choice", ""),
    "longdialogue_qa_eng": (MASK, 40, "infinitebench_name", ""),
    "math_find": ("{prompt}\n\n{context}\n\n{input}", 3, "first_number", ""),
    "math_calc": (CALC, 30000, "leading_numbers", ""),
    "code_run": ("There is a function called {func} in the following Python code.\n\n{context}\n\nPlease compute the exact value of "
                 "{func_call}. The value of {func_call} is", 5, "last_integer", ""),
    "code_debug": ("Following is a Python code where exactly one of the functions/methods has a deliberate error that makes it "
                   "crash.\n\n{context}\n\nOptions:\n" + OPTIONS + "The correct option is:", 5, "infinitebench_option", ""),
}
FOUR = ("longbook_choice_eng", "code_debug")


def task_of(name):
    template, most, metric, note = TABLE[name]
    return asked(template, metric=metric, max_new_tokens=most, chat=False, truncate="middle", note=note, files=(f"{name}.jsonl",))


def right_letter(answers, options, place):
    """The letter of the right option. The files give its text, or its text and the letter. If an option is there twice,
    the first one counts, as in src/eval_utils.py."""
    if answers[0] in options:
        return letter(options.index(answers[0]))
    given = [a for a in answers if a in ("A", "B", "C", "D")]
    if len(given) != 1:
        raise DataError(place, f"got the answer {answers}, wanted one of the options")
    return given[0]


def more_fields(name, value, place):
    """The fields that a task's template has beside context and input."""
    if name in FOUR:
        options = field(value, "options", place, list)
        if len(options) != 4:
            raise DataError(place, f"got {len(options)} options, wanted 4")
        return {f"option_{letter(i)}": option for i, option in enumerate(options)}
    if name == "code_run":
        call = re.search(r"func_\d+\(-?\d+\)", field(value, "input", place))
        if not call:
            raise DataError(place, "got no call like func_1(-2) in 'input'")
        return {"func": call[0].split("(")[0], "func_call": call[0]}
    if name == "math_find":
        kind = re.search(r"The \w+ number", field(value, "input", place))
        if not kind:
            raise DataError(place, "got no words like 'The largest number' in 'input'")
        return {"prompt": f"What is {kind[0].lower()} in the following list?"}
    return {}


def read(name, source, _options):
    for place, value in source.records(source.need(f"{name}.jsonl")):
        answers = value.get("answer")
        if name == "math_calc" and isinstance(answers, list) and len(answers) == 1 and isinstance(answers[0], list):
            answers = answers[0]
        answers = field({"answer": answers if isinstance(answers, list) else [answers]}, "answer", place, list)
        more = more_fields(name, value, place)
        if name in FOUR:
            letter = right_letter(answers, field(value, "options", place, list), place)
            answers = [letter, *(a for a in answers if a != letter)]
        if name == "math_calc":
            if not all(re.fullmatch(r"-?[0-9]+", a) for a in answers):
                raise DataError(place, f"got the answer {answers}, wanted integers")
            answers = [json.dumps([int(a) for a in answers])]
        context = value.get("context", value.get("content"))
        yield record(place, name_of(value, "id", place), field(value, "input", place, blank=True), answers,
                     field({"context": context}, "context", place), **more)


SET = DataSet(
    name="infinitebench", title="InfiniteBench, 12 tasks", paper="Zhang et al. 2024, arXiv 2402.13718",
    source="https://huggingface.co/datasets/xinrongzhang2022/InfiniteBench",
    version="prompts and limits of github.com/OpenBMB/InfiniteBench at 88b3daa6989d",
    licence="MIT (repository), Apache-2.0 (Hugging Face page) for the collection; the books have their own terms",
    prompt_source="src/prompt.py, the templates for YaRN-Mistral, and src/eval_utils.py (MIT)",
    wanted="TASK.jsonl, an object a line with id, context, input, answer and options",
    tasks={name: task_of(name) for name in TABLE}, read=read)
