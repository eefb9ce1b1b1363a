"""Recall problems built to an exact token length: what both models are trained on and what evaluate.py measures.

A generator makes a Problem (facts, and turns of question and answer); `assemble` hides its facts in text of the corpus and
returns exactly `length` tokens with the places of the answers. Everything is drawn from one random.Random, so a seed names
a sample. Public formats: RULER (Hsieh et al. 2024), InfiniteBench (Zhang et al. 2024); the other wordings are ours.
"""

from .evaluation import EVALUATION, evaluation_sample
from .text import Text, read_documents
from .training import EOS, TRAINING, training_sample

__all__ = ["EOS", "EVALUATION", "TRAINING", "Text", "evaluation_sample", "read_documents", "training_sample"]
