"""MATH500 (Lightman et al. 2023, from Hendrycks et al. 2021): competition mathematics. The demand after the problem is the one
that DeepSeek-R1's page recommends, which FreeKV follows.
"""

from common import DataSet, Task, field, record

FILES = ("test.jsonl", "math500.jsonl", "test.parquet")
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{{}}."


def read(_name, source, _options):
    for number, (place, value) in enumerate(source.records(source.need(*FILES)), 1):
        id = value["unique_id"] if isinstance(value.get("unique_id"), str) else f"test-{number}"
        yield record(place, id, field(value, "problem", place), [field(value, "answer", place)],
                     subject=field(value, "subject", place), level=field(value, "level", place, int))


SET = DataSet(
    name="math500", title="MATH500, 500 problems", paper="Lightman et al. 2023, arXiv 2305.20050",
    source="https://github.com/openai/prm800k (math_splits/test.jsonl) or https://huggingface.co/datasets/HuggingFaceH4/MATH-500",
    version="500 problems", licence="MIT",
    prompt_source="the demand that https://github.com/deepseek-ai/DeepSeek-R1 recommends (MIT)",
    wanted="test.jsonl, an object a line with problem, answer, subject, level and perhaps unique_id",
    tasks={"math500": Task(prompt="{input}" + BOXED, metric="boxed", max_new_tokens=16384,
                           files=FILES)},
    read=read, note="FreeKV takes 50 problems (limit: 50, shuffle: true) and draws 8 answers each at temperature 0.6: the key sampling does so.",
    sample="sample/, 4 problems (MIT)")
