"""LongBench (Bai et al. 2024): 21 tasks. The prompts are those of its config/dataset2prompt.json, spelling included, and the
longest answers those of dataset2maxlen.json: MIT licence, copyright (c) 2023 THU-KEG & Zhipu AI.
"""

from common import DataError, DataSet, asked, field, name_of, record

PASSAGES = ("Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
            "The following are given passages.\n{context}\n\n"
            "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
            "Question: {input}\nAnswer:")
QASPER = ("as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based "
          "on the information in the article, write \"unanswerable\". If the question is a yes/no question, answer \"yes\", "
          "\"no\", or \"unanswerable\". Do not provide any explanation.\n\n")
WORDS = ("The published score splits Chinese into words with jieba, which kvlab does not have. With jieba in Python: "
         "metric: {{judge: {{command: python3 datasets/judge.py {}}}}}")
FIRST_LINE = "The published score reads the answer's first line."
NEWLINE = "A line end stops the answer, and the metric reads the first line."

# name: (template, longest answer, metric, the rest of Task)
TABLE = {
    "narrativeqa": (
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question asconcisely "
        "as you can, using a single phrase if possible. Do not provide any explanation.\n\nStory: {context}\n\nNow, answer the "
        "question based on the story asconcisely as you can, using a single phrase if possible. Do not provide any "
        "explanation.\n\nQuestion: {input}\n\nAnswer:", 128, "longbench_f1", {}),
    "qasper": ("You are given a scientific article and a question. Answer the question " + QASPER +
               "Article: {context}\n\n Answer the question based on the above article " + QASPER +
               "Question: {input}\n\nAnswer:", 128, "longbench_f1", {}),
    "multifieldqa_en": (
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the above text, "
        "only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:", 64, "longbench_f1", {}),
    "multifieldqa_zh": (
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。\n\n"
        "问题：{input}\n回答：", 64, "f1_zh", {"note": WORDS.format("f1_zh")}),
    "hotpotqa": (PASSAGES, 32, "longbench_f1", {}),
    "2wikimqa": (PASSAGES, 32, "longbench_f1", {}),
    "musique": (PASSAGES, 32, "longbench_f1", {}),
    "dureader": ("请基于给定的文章回答下述问题。\n\n文章：{context}\n\n请基于上述文章回答下面的问题。\n\n问题：{input}\n回答：",
                 128, "rouge_l_zh", {"note": WORDS.format("rouge_l_zh")}),
    "gov_report": ("You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n{context}"
                   "\n\nNow, write a one-page summary of the report.\n\nSummary:", 512, "longbench_rouge", {}),
    "qmsum": ("You are given a meeting transcript and a query containing a question or instruction. Answer the query in one or "
              "more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above meeting transcript in one "
              "or more sentences.\n\nQuery: {input}\nAnswer:", 512, "longbench_rouge", {}),
    "multi_news": ("You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\nNow, "
                   "write a one-page summary of all the news.\n\nSummary:", 512, "longbench_rouge", {}),
    "vcsum": ("下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n会议总结：", 512, "rouge_l_zh",
              {"note": WORDS.format("rouge_l_zh")}),
    "trec": ("Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}", 64,
             "classification_first_line", {"chat": False, "note": FIRST_LINE}),
    "triviaqa": ("Answer the question based on the given passage. Only give me the answer and do not output any other words. The "
                 "following are some examples.\n\n{context}\n\n{input}", 32, "longbench_f1_first_line",
                 {"chat": False, "note": FIRST_LINE}),
    "samsum": ("Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}", 128,
               "longbench_rouge_first_line", {"chat": False, "stop": ("\n",), "note": NEWLINE}),
    "lsht": ("请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}", 64, "classification_first_line",
             {"chat": False, "note": FIRST_LINE}),
    "passage_count": (
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read these "
        "paragraphs and determine how many unique paragraphs there are after removing duplicates. In other words, how many "
        "non-repeating paragraphs are there in total?\n\n{context}\n\nPlease enter the final count of unique paragraphs after "
        "removing duplicates. The output format should only contain the number, such as 1, 2, 3, and so on.\n\nThe final answer "
        "is: ", 32, "count", {}),
    "passage_retrieval_en": (
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract is from."
        "\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph that the abstract "
        "is from. The answer format must be like \"Paragraph 1\", \"Paragraph 2\", etc.\n\nThe answer is: ", 32, "retrieval", {}),
    "passage_retrieval_zh": (
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n下面是一个摘要\n\n{input}\n\n"
        "请输入摘要所属段落的编号。答案格式必须是\"段落1\"，\"段落2\"等格式\n\n答案是：", 32, "retrieval_zh", {}),
    "lcc": ("Please complete the code given below. \n{context}Next line of code:\n", 64, "code_sim", {"chat": False}),
    "repobench-p": ("Please complete the code given below. \n{context}{input}Next line of code:\n", 64, "code_sim",
                    {"chat": False}),
}


TASKS = {name: asked(template, metric=metric, max_new_tokens=most, truncate="middle", files=(f"{name}.jsonl",), **more)
         for name, (template, most, metric, more) in TABLE.items()}


def read(name, source, _options):
    """The records of one file. LongBench writes null for no classes."""
    for place, value in source.records(source.need(f"{name}.jsonl")):
        classes = field(value, "all_classes", place, list) if value.get("all_classes") is not None else []
        if name.removesuffix("_e") in ("trec", "lsht") and not classes:
            raise DataError(place, "got no 'all_classes', wanted the classes of a classification")
        more = {"all_classes": classes} if classes else {}
        if isinstance(value.get("length"), int):
            more["length"] = value["length"]
        yield record(place, name_of(value, "_id", place), field(value, "input", place, blank=True),
                     field(value, "answers", place, list), field(value, "context", place), **more)


SET = DataSet(
    name="longbench", title="LongBench, 21 tasks", paper="Bai et al. 2024, arXiv 2308.14508",
    source="https://huggingface.co/datasets/THUDM/LongBench (data.zip)",
    version="prompts and limits of github.com/THUDM/LongBench at 2e00731f8d0b",
    licence="MIT for the collection; each task's texts have the terms of their own set",
    prompt_source="LongBench/config/dataset2prompt.json and dataset2maxlen.json (MIT)",
    wanted="TASK.jsonl, an object a line with _id, input, context, answers, all_classes and length",
    tasks=TASKS, read=read,
    note="The published run cuts prompt and template together; kvlab's max_context counts the longest answer too.")
