"""U-NIAH (Gao et al. 2026): up to dozens of needles in books. Its repository states no licence, so needles and questions are read
from the user's copy of it, and the frame of the prompt is our own.
"""

import json

import needles
from common import DataError, DataSet, Task, field

FILES = ("needle_cases.yaml", "needle_cases.json")


def parsed(source, name):
    text = source.text(name)
    if name.endswith(".json"):
        try:
            return json.loads(text)
        except ValueError as error:
            raise DataError(source.place(name), f"got text that is no JSON ({error})") from None
    try:
        import yaml
    except ImportError:
        raise DataError(source.place(name), "got a YAML file and no Python package yaml, wanted PyYAML (pip install pyyaml), or "
                        "the same as needle_cases.json") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise DataError(source.place(name), f"got text that is no YAML ({error})") from None


def cases_of(source):
    """(place, name, needles, question, answer) of each case. Lists that cases share are no cases."""
    name = source.need(*FILES)
    values = parsed(source, name)
    if not isinstance(values, dict):
        raise DataError(source.place(name), "got no map of cases")
    for case, value in values.items():
        place = source.place(name, case)
        if isinstance(value, dict):
            yield (place, case, field(value, "needles", place, list), field(value, "question", place),
                   field(value, "true_answer", place))
        elif not isinstance(value, list):
            raise DataError(place, f"got {type(value).__name__}, wanted a case (an object) or needles that cases share (a list)")


def read(_name, source, given):
    needles.check(given)
    cases = list(cases_of(source))
    for case in given.case or ():
        if case not in [c[1] for c in cases]:
            raise DataError(source.path, f"got --case {case}, wanted one of: {', '.join(c[1] for c in cases)}")
    yield from needles.read([c for c in cases if not given.case or c[1] in given.case], source, given)


def options(parser):
    needles.options(parser)
    parser.add_argument("--case", nargs="+", metavar="NAME", help="these cases; without it, all")


SET = DataSet(
    name="u_niah", title="U-NIAH, several needles in books", paper="Gao et al. 2026, ACM TOIS 44(3)",
    source="https://github.com/Tongji-KGLLM/U-NIAH (config/needle_cases.yaml and needlehaystack/evaluators/Gutenburg)",
    version="format at a680caea5f80", licence="none stated for needles and questions; the books are Project Gutenberg's",
    prompt_source="our own wording",
    wanted="needle_cases.yaml or .json, a map of cases with needles, question and true_answer, and .txt files",
    tasks={"u_niah": Task(prompt="Read the text, then answer the question after it by the text alone.\n\n{context}",
                          question_text="\n\nQuestion: {input}\nAnswer:", metric="rouge_1", max_new_tokens=512, files=FILES)},
    read=read, options=options, note="The published judge is a language model; HeteroCache reports ROUGE-1.")
