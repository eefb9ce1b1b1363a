"""LongBench v2 (Bai et al. 2025): 503 questions with four choices. The prompt is its prompts/0shot.txt: MIT licence, copyright
(c) 2023 THU-KEG & Zhipu AI.
"""

from common import DataError, DataSet, asked, choices, field, name_of, record

TEMPLATE = ("Please read the following text and answer the question below.\n\n<text>\n{context}\n</text>\n\n"
            "What is the correct answer to this question: {input}\nChoices:\n(A) {choice_A}\n(B) {choice_B}\n(C) {choice_C}\n"
            "(D) {choice_D}\n\nFormat your response as follows: \"The correct answer is (insert answer here)\".")
FILES = ("data.json", "data.jsonl")
CHOICES = ("choice_A", "choice_B", "choice_C", "choice_D")
ALL = "longbench_v2"
LENGTHS = ("short", "medium", "long")  # of the inputs, as the set names them; a task each
DIFFICULTIES = ("easy", "hard")  # likewise


def read(name, source, _options):
    for place, value in source.records(source.need(*FILES)):
        answer = field(value, "answer", place)
        if answer not in "ABCD" or len(answer) != 1:
            raise DataError(place, f"got the answer '{answer}', wanted A, B, C or D")
        length = field(value, "length", place)
        if length not in LENGTHS:
            raise DataError(place, f"got the length '{length}', wanted one of: {', '.join(LENGTHS)}")
        difficulty = field(value, "difficulty", place)
        if difficulty not in DIFFICULTIES:
            raise DataError(place, f"got the difficulty '{difficulty}', wanted one of: {', '.join(DIFFICULTIES)}")
        if name not in (ALL, length, difficulty):
            why = "other lengths" if name in LENGTHS else "other difficulties"
            source.left_out[why] = source.left_out.get(why, 0) + 1
            continue
        yield record(place, name_of(value, "_id", place), field(value, "question", place).strip(), [answer],
                     field(value, "context", place).strip(), **dict(zip(CHOICES, choices(value, CHOICES, place))),
                     **{key: field(value, key, place) for key in ("domain", "sub_domain", "difficulty", "length")})


SET = DataSet(
    name="longbench_v2", title="LongBench v2, 503 questions with four choices", paper="Bai et al. 2025, arXiv 2412.15204",
    source="https://huggingface.co/datasets/THUDM/LongBench-v2 (data.json, 465 MB)",
    version="prompt of github.com/THUDM/LongBench at 2e00731f8d0b", licence="Apache-2.0 as its page says; texts of many sources",
    prompt_source="LongBench prompts/0shot.txt (MIT)",
    wanted="data.json, an array of objects with _id, domain, sub_domain, difficulty, length, question, choice_A to choice_D, "
           "answer and context",
    tasks={task: asked(TEMPLATE, metric="longbench_v2_choice", max_new_tokens=128, truncate="middle", files=FILES)
           for task in (ALL, *LENGTHS, *DIFFICULTIES)},
    read=read, note="FreeKV and its rivals cut the inputs to 64K tokens: max_context: 65536.")
