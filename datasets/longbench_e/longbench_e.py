"""LongBench-E (Bai et al. 2024): 13 tasks of LongBench, with lengths spread evenly. The field `length` has the words."""

import dataclasses

from common import load_set

LONGBENCH = load_set("longbench")
NAMES = ("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec", "triviaqa", "samsum",
         "passage_count", "passage_retrieval_en", "lcc", "repobench-p")

SET = dataclasses.replace(
    LONGBENCH, name="longbench_e", title="LongBench-E, 13 tasks",
    wanted="TASK_e.jsonl, an object a line with _id, input, context, answers, all_classes and length",
    tasks={f"{name}_e": dataclasses.replace(LONGBENCH.tasks[name], files=(f"{name}_e.jsonl",)) for name in NAMES})
