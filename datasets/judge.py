#!/usr/bin/env python3
"""Scores an answer by LongBench's metrics of Chinese words, which need the dictionary of jieba. An experiment names one as
the command of its metric:

    metric: {judge: {command: python3 datasets/judge.py f1_zh}}

    f1_zh           qa_f1_zh_score of LongBench: multifieldqa_zh. Needs jieba (pip install jieba)
    rouge_l_zh      rouge_zh_score of LongBench: dureader and vcsum. Needs jieba and rouge (pip install jieba rouge==1.0.1)

It reads an object with answer, references and record from standard input and prints a number from 0 to 1. Without a package
it ends with 2, and there is no score. The metric f1_characters of kvlab needs neither, and gives other numbers.
"""

import collections
import importlib
import json
import logging
import string
import sys

# LongBench's metrics.py (MIT, copyright (c) 2023 THU-KEG & Zhipu AI) drops these beside the ASCII ones.
CHINESE_SIGNS = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏.")


class Missing(Exception):
    pass


def package(name):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Missing(f"got no package {name} ({error}), wanted one: pip install {name}") from error


def words(text):
    jieba = package("jieba")
    jieba.setLogLevel(logging.ERROR)
    return list(jieba.cut(text, cut_all=False))


def normalized(word):
    drop = set(string.punctuation + CHINESE_SIGNS)
    return "".join("".join(c for c in word.lower() if c not in drop).split())


def f1_zh(answer, reference):
    own, right = ([n for n in map(normalized, words(text)) if n] for text in (answer, reference))
    shared = sum((collections.Counter(own) & collections.Counter(right)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(own), shared / len(right)
    return 2 * precision * recall / (precision + recall)


def rouge_l_zh(answer, reference):
    rouge = package("rouge").Rouge()
    own, right = " ".join(words(answer)), " ".join(words(reference))
    try:
        return rouge.get_scores([own], [right], avg=True)["rouge-l"]["f"]
    except (ValueError, RecursionError):  # LongBench gives 0 where the package cannot count
        return 0.0


METRICS = {"f1_zh": f1_zh, "rouge_l_zh": rouge_l_zh}


def main(given):
    if len(given) != 1 or given[0] not in METRICS:
        print(f"judge.py: got {' '.join(given) or 'no word'}, wanted one of: {', '.join(METRICS)}", file=sys.stderr)
        return 2
    try:
        question = json.load(sys.stdin)
        answer, references = question["answer"], question["references"]
    except (ValueError, KeyError, TypeError) as error:
        print(f"judge.py: got no object with answer and references ({error})", file=sys.stderr)
        return 2
    try:
        print(max(METRICS[given[0]](answer, reference) for reference in references))
    except Missing as error:
        print(f"judge.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
