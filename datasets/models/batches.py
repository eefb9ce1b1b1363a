"""Worker processes make training batches of the recall tasks, and a thread brings them to the device."""

import multiprocessing as mp
import queue
import random
import threading

import numpy as np
import torch

import recall_tasks

TASKS = [make.__name__ for make, _ in recall_tasks.TRAINING]


def draw_length(r, lengths):
    return r.choices(list(lengths), list(lengths.values()))[0]


def work(seed, text, schedule, stage, tokens, chat_open, mix, out):
    """Makes batches of the trainer's stage, for ever."""
    r = random.Random(seed)
    while True:
        n = draw_length(r, schedule[stage.value][1])
        samples = [recall_tasks.training_sample(r, text, n + 1, chat_open, mix) for _ in range(max(1, tokens // n))]
        out.put(
            (
                n,
                np.stack([s.ids for s in samples]).astype(np.uint16),
                np.stack([s.weight for s in samples]).astype(bool),
                np.array([TASKS.index(s.task) for s in samples]),
            )
        )


class Batches:
    """schedule: [(share of the time at which a stage ends, {length: weight of its batches})]. A batch has the length, ids
    [samples, length + 1], weight (whether the token is part of an answer) and the index of each sample's task."""

    tasks = TASKS

    def __init__(self, text, schedule, seed, workers, tokens, device, chat_open, mix):
        self.stage = mp.Value("i", 0)
        made = mp.Queue(maxsize=24)
        self.ready = queue.Queue(maxsize=4)
        self.kept = []  # batches of lengths that nobody has asked for yet
        self.processes = [
            mp.Process(
                target=work, args=(seed * 1000 + i, text, schedule, self.stage, tokens, chat_open, mix, made), daemon=True
            )
            for i in range(workers)
        ]
        for p in self.processes:
            p.start()

        def bring():
            while True:
                n, ids, weight, task = made.get()
                self.ready.put(
                    (n, torch.from_numpy(ids.astype(np.int64)).to(device), torch.from_numpy(weight).to(device), task)
                )

        threading.Thread(target=bring, daemon=True).start()

    def next(self, stage, length=None):
        """Returns a batch of that length, or of any length."""
        self.stage.value = stage
        for i, batch in enumerate(self.kept):
            if length in (None, batch[0]):
                return self.kept.pop(i)
        while True:
            batch = self.ready.get()
            if length in (None, batch[0]):
                return batch
            self.kept.append(batch)

    def stop(self):
        for p in self.processes:
            p.terminate()
