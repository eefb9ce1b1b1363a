"""LongGenBench (Wu et al. 2024): diaries, menus, skyscrapers and city blocks in 52 to 300 entries. A judging model scores the
published answers. Here a reference is "N: text", what entry N must name, as the task long_generation checks by rule.
"""

from common import DataError, DataSet, Task, field, record

KINDS = ("checks_once", "checks_range", "checks_periodic")
BEYOND = "demands of entries beyond the last"
STARTED = "*** started ***\n"


def task_of(name, most):
    return Task(prompt="{input}", answer_opening="{opening}", metric="demands", max_new_tokens=most, chat=False, files=(name,),
                stop=("*** finished",))


TASKS = {"short": task_of("Dataset_short.json", 16384), "long": task_of("Dataset_long.json", 32768)}


def demands(value, place, left_out):
    """The references, by entry. One file demands something of a 53rd week: that is left out."""
    out = []
    for kind in KINDS:
        for entry, text in field(value, kind, place, dict, blank=True).items():
            if not entry.isdigit() or int(entry) < 1:
                raise DataError(place, f"got entry '{entry}' in '{kind}', wanted 1 to {value['number']}")
            if int(entry) > value["number"]:
                left_out[BEYOND] = left_out.get(BEYOND, 0) + 1
                continue
            if not isinstance(text, str) or not text.strip():
                raise DataError(place, f"got an empty demand for entry {entry} in '{kind}', wanted text")
            out.append((int(entry), text.strip()))
    return [f"{entry}: {text}" for entry, text in sorted(out)]


def read(name, source, _options):
    for number, (place, value) in enumerate(source.records(source.need(TASKS[name].files[0])), 1):
        prompt, prefix = field(value, "prompt", place), field(value, "prefix", place)
        field(value, "number", place, int)
        opening = STARTED + prefix
        if not prompt.endswith(opening):
            raise DataError(place, "got a prompt that does not end with '*** started ***' and its prefix")
        yield record(place, f"{name}-{number}", prompt.removesuffix(opening), demands(value, place, source.left_out), opening=opening,
                     type=field(value, "type", place), number=value["number"])


SET = DataSet(
    name="longgenbench", title="LongGenBench, answers of 16K and 32K tokens", paper="Wu et al. 2024, arXiv 2409.02076",
    source="https://github.com/mozhu621/LongGenBench (Dataset/Dataset_short.json, Dataset_long.json)",
    version="files at 62c0e869219c", licence="none stated", prompt_source="the files themselves",
    wanted="Dataset_short.json or Dataset_long.json, an array of objects with prompt, prefix, type, number, checks_once, "
           "checks_range and checks_periodic", tasks=TASKS, read=read,
    note="`demands` looks for the demand's text in its entry, in place of the published judge. The published run feeds the "
         "prompt without a chat template and draws answers at temperature 0.95: the key sampling does so.")
