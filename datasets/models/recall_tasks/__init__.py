"""Recall problems built to an exact token length. Both models train on them, and evaluate.py measures them.

A generator makes a Problem (facts, and turns of question and answer). `assemble` hides its facts in text of the corpus and
returns exactly `length` tokens with the places of the answers. All draws come from one random.Random, so a seed names a
sample. Public formats: RULER (Hsieh et al. 2024), InfiniteBench (Zhang et al. 2024); the other wordings are ours.
"""

from .evaluation import EVALUATION, evaluation_sample
from .text import Text, read_documents
from .training import EOS, TRAINING, training_sample

__all__ = ["EOS", "EVALUATION", "TRAINING", "Text", "evaluation_sample", "read_documents", "training_sample"]
