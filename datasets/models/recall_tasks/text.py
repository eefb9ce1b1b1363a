"""Text of the corpus as tokens."""

import json
import lzma
import re
from collections import Counter

import numpy as np

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


class Text:
    """The corpus as tokens, with the places where sentences begin, and words for keys and values."""

    def __init__(self, tokenizer, documents):
        self.tokenizer = tokenizer
        sentences = [s for d in documents for s in split_sentences(d)]
        encoded = tokenizer.encode_batch_fast(sentences, add_special_tokens=False)
        lengths = np.array([len(e.ids) for e in encoded])
        self.ids = np.concatenate([np.array(e.ids, dtype=np.int32) for e in encoded])
        self.starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        noise = self.encode("\n" + NOISE)
        self.noise_ids = np.tile(np.array(noise, dtype=np.int32), 40000 // len(noise))
        self.noise_starts = np.arange(0, len(self.noise_ids), len(noise))
        everything = "\n".join(documents)
        common = Counter(re.findall(r"\b[a-z]{4,9}\b", everything)).most_common(13000)
        self.words = [w for w, _ in common][min(300, len(common) // 10) : 12300]
        names = Counter(re.findall(r"(?<=[a-z,] )[A-Z][a-z]{3,8}\b", everything)).most_common(1300)
        self.names = [w for w, _ in names][min(40, len(names) // 10) : 1040]

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def region(self, r, length):
        """The (first, last) sentence of a part of the corpus of about so many tokens."""
        begin = r.randrange(max(1, len(self.ids) - length))
        return tuple(int(x) for x in np.searchsorted(self.starts, (begin, begin + length)))

    def apart(self, r, length):
        """Two parts of the corpus as (first, last) sentence. Text of up to `length` tokens begins in the first part; the
        second part shares nothing with that text."""
        first = int(np.searchsorted(self.starts, r.randrange(max(1, len(self.ids) - length))))
        before = (0, int(np.searchsorted(self.starts, self.starts[first] - length // 8)))
        after = (int(np.searchsorted(self.starts, self.starts[first] + length)), len(self.starts) - 1)
        return (first, first + 1), max(before, after, key=lambda part: part[1] - part[0])

    def hay(self, r, length, noise=False, region=None):
        """`length` tokens, and the places in them where a sentence begins. They begin in the region, or anywhere."""
        ids, starts = (self.noise_ids, self.noise_starts) if noise else (self.ids, self.starts)
        if length <= 0:
            return ids[:0], [0]
        last = max(1, int(np.searchsorted(starts, len(ids) - length - 1)))
        first, last = (min(region[0], last - 1), min(max(region), last)) if region and not noise else (0, last)
        begin = starts[r.randrange(first, max(first + 1, last))]
        inside = starts[np.searchsorted(starts, begin) : np.searchsorted(starts, begin + length)] - begin
        return ids[begin : begin + length], inside.tolist()


def split_sentences(document):
    """Pieces that begin with a blank or a line end, so that they can be encoded one by one."""
    pieces = re.findall(r"[ \n]?[^\n]+?(?:[.!?][\"')]*(?= )|(?=\n)|$)", document)
    return [p if p[0] in " \n" else "\n" + p for p in pieces]


def read_documents(path):
    with lzma.open(path, "rt") as lines:
        return [json.loads(line)["text"] for line in lines]
