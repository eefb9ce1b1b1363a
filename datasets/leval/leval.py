"""L-Eval (An et al. 2024): 20 tasks, many questions over each document. Its prompts are under GPL-3.0, so the wordings here are
our own, with the same demands. Records of one document are neighbours: `questions: N` asks N over one prompt.
"""

from common import DataError, DataSet, Task, field, record

LONG = "Below is a long document. Read it, then do what the instruction after it asks.\n\n{context}"
EXAM = ("Below is a long document. Read it, then answer the question after it. For a question with options, give only the letter "
        "of the one right option. For any other question, give the bare answer.\n\n{context}")
SEVERAL = ("Below is a long document. Read it, then answer the question after it. One or several options may be right. Give only "
           "their letters, like A or AB.\n\n{context}")
STORY = ("Below is a science fiction story. Judge the statement after it by the story, not by what you know of the world. Answer "
         "True or False.\n\n{context}")
EXAMPLES = ("Below are questions with worked answers. Answer the last question in the same way, and end with \"The answer is\" and "
            "the number.\n\n{context}")
CODE = "Below is a code base of functions with comments. Read it, then say what the call after it gives.\n\n{context}"
TALK = "Below is the record of a talk between a user and an assistant about many topics.\n\n{context}"
ASK = "\n\nInstruction: {input}\nAnswer:"
QUESTION = "\n\nQuestion: {input}\nAnswer:"

# name: (prompt, question, metric, what differs)
CLOSED = {
    "coursera": (SEVERAL, QUESTION, "leval_letters", ""),
    "quality": (EXAM, QUESTION, "leval_choice", ""),
    "topic_retrieval_longchat": (TALK, QUESTION, "leval_part", ""),
    "tpo": (EXAM, QUESTION, "leval_choice", ""),
    "gsm100": (EXAMPLES, "\n\n{input}", "leval_math", ""),
    "codeU": (CODE, QUESTION, "leval_code", ""),
    "sci_fi": (STORY, QUESTION, "leval_judgment",
               "L-Eval also asks for the truth outside of the story; that half is the field `fact`."),
}
F1 = ("financial_qa", "legal_contract_qa", "multidoc_qa", "narrative_qa", "natural_question", "scientific_qa")
ROUGE = ("gov_report_summ", "meeting_summ", "news_summ", "paper_assistant", "patent_summ", "review_summ", "tv_show_summ")
JUDGED = ("LLM", "human")  # values of `evaluation` whose answers a judge grades


def task_of(name, prompt, question, metric, note=""):
    return Task(prompt=prompt, question_text=question, metric=metric, max_new_tokens=512, truncate="middle", note=note,
                files=(f"{name}.jsonl",))


TASKS = {name: task_of(name, *rest) for name, rest in CLOSED.items()}
TASKS |= {name: task_of(name, LONG, ASK, "longbench_f1") for name in F1} | {name: task_of(name, LONG, ASK, "rouge_l") for name in ROUGE}
EVALUATION = {"longbench_f1": "f1", "rouge_l": "rouge"}  # metric -> L-Eval's word; the others are exams


def read(name, source, _options):
    task = TASKS[name]
    for place, value in source.records(source.need(f"{name}.jsonl")):
        evaluation, document = field(value, "evaluation", place), field(value, "input", place)
        questions, answers = field(value, "instructions", place, list), field(value, "outputs", place, list)
        if len(questions) != len(answers):
            raise DataError(place, f"got {len(questions)} instructions and {len(answers)} outputs, wanted as many")
        if evaluation in JUDGED:
            source.left_out["a judge grades them"] = source.left_out.get("a judge grades them", 0) + len(questions)
            continue
        if evaluation != EVALUATION.get(task.metric, "exam"):
            raise DataError(place, f"got evaluation: {evaluation}, wanted {EVALUATION.get(task.metric, 'exam')}, LLM or human")
        number = place.rsplit(" ", 1)[1]
        for i, (question, answer) in enumerate(zip(questions, answers), 1):
            more = {"source": value["source"]} if isinstance(value.get("source"), str) else {}
            if name == "sci_fi":
                answer, mark, fact = answer.partition("[fact:")
                if not mark:
                    raise DataError(place, f"got the output '{answer}', wanted True or False, then [fact: True] or [fact: False]")
                more["fact"] = fact.strip(" ]")
            yield record(f"{place}, question {i}", f"{name}-{number}-{i}", question.strip(), [answer.strip()], document, **more)


SET = DataSet(
    name="leval", title="L-Eval, 20 tasks", paper="An et al. 2024, arXiv 2307.11088",
    source="https://github.com/OpenLMLab/LEval (LEval-data) or https://huggingface.co/datasets/L4NLP/LEval",
    version="files of github.com/OpenLMLab/LEval at cd34b0502691",
    licence="GPL-3.0 for the collection; the documents have the terms of their own sets",
    prompt_source="our own wordings; L-Eval's are under GPL-3.0",
    wanted="TASK.jsonl, an object a line with instructions, outputs, input and evaluation",
    tasks=TASKS, read=read, note="Scores differ from published ones by the wording. ROUGE is ROUGE-L; L-Eval also has 1 and 2.")
