"""Options that both training scripts have."""

import argparse
import os
from pathlib import Path

import torch

import recall_tasks


def mix(changes):
    """'copying=4,ordered=5' -> the training mix with these weights changed, as [(generator, weight)]."""
    weights = {make.__name__: (make, w) for make, w in recall_tasks.TRAINING}
    for change in filter(None, changes.split(",")):
        name, _, weight = change.partition("=")
        if name not in weights:
            raise argparse.ArgumentTypeError(f"got task '{name}', wanted one of {', '.join(weights)}")
        weights[name] = (weights[name][0], float(weight))
    return list(weights.values())


def parser(description, *, seconds, rate, tokens, changes=""):
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--corpus", type=Path, required=True, help="folder that corpus.py wrote")
    p.add_argument("--out", type=Path, required=True, help="folder that is written")
    p.add_argument("--init", type=Path, help="folder that an earlier run wrote, to go on from")
    p.add_argument("--seconds", type=float, default=seconds, help="training time, without the start")
    p.add_argument("--begin", type=float, default=0.0, help="share of the schedule to begin at")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--rate", type=float, default=rate, help="highest learning rate")
    p.add_argument("--tokens", type=int, default=tokens, help="tokens in a batch (of each process)")
    p.add_argument("--mix", type=mix, default=mix(changes), metavar="TASK=WEIGHT,...", help="weights of tasks, beside those of recall_tasks.TRAINING")
    p.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="processes that make batches")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--documents", type=int, help="use only so many documents (for a try)")
    return p
