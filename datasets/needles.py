"""Sentences hidden in a text: what niah and u_niah share. Lengths are in words, since a converter knows no tokenizer; the task
niah makes prompts with an exact number of the model's own tokens.
"""

import itertools
import re

from common import DataError, record


def options(parser):
    parser.add_argument("--words", type=int, nargs="+", default=[3000, 6000, 12000], metavar="N",
                        help="lengths of the context; an English word is about 1.3 tokens (default: 3000 6000 12000)")
    parser.add_argument("--depths", type=int, default=11, metavar="N",
                        help="depths of the first needle, evenly from 0 to 100 %% (default: 11)")


def haystack(source):
    """The text files of the source in the order of their names, without those that are about the source."""
    names = [n for n in source.matching(r"[^/]+\.txt") if not re.match(r"(LICEN|READ|SOURCE)", n.rsplit("/", 1)[-1], re.I)]
    if not names:
        raise DataError(source.path, f"got no text file, wanted {source.wanted}")
    text = "\n\n".join(filter(None, (source.text(n).strip() for n in names)))
    if not text:
        raise DataError(source.path, "got text files without text")
    return text


def words_in(text):
    return len(text.split())


def cut(text, words):
    """The first `words` words. A text that is too short begins again."""
    if (there := words_in(text)) < words:
        text = "\n\n".join([text] * -(-words // there))
    last = next(itertools.islice(re.finditer(r"\S+", text), words - 1, None))
    return text[:last.end()]


def hidden(text, needles, depth):
    """The text with the needles in it, each behind a sentence. The first lies at `depth`, from 0 to 1, and the others evenly
    between it and the end (LLMTest_NeedleInAHaystack's rule for several needles).
    """
    ends = [0] + [m.end() for m in re.finditer(r"[.!?][\"'”’)]*\s+", text)]
    pieces, begin = [], 0
    for i, needle in enumerate(needles):
        at = (depth + (1 - depth) * i / len(needles)) * len(text)
        place = len(text) if at >= len(text) else max(e for e in ends if e <= at)
        pieces += [text[begin:place].strip(), needle.strip()]
        begin = place
    return " ".join(filter(None, [*pieces, text[begin:].strip()]))


def read(cases, source, given):
    """The records of all cases, lengths and depths. cases: (place, name, needles, question, answer)."""
    text = haystack(source)
    for place, name, needles, question, answer in cases:
        taken = sum(map(words_in, needles))
        for words in given.words:
            if words <= taken:
                raise DataError(place, f"got --words {words}, wanted more than the needles' {taken} words")
            cut_text = cut(text, words - taken)
            for i in range(given.depths):
                depth = i / (given.depths - 1) if given.depths > 1 else 0.5
                yield record(place, f"{name}-{words}-{round(depth * 100)}", question, [answer],
                             hidden(cut_text, needles, depth), words=words, depth=round(depth, 4))


def check(given):
    if given.depths < 1 or min(given.words) < 1:
        raise DataError("", f"got --words {min(given.words)} --depths {given.depths}, wanted at least 1 of each")
