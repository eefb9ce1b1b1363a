"""The processes of a torchrun that train one model together; without torchrun a single one."""

import os

import torch
import torch.distributed as dist


class Ranks:
    def __init__(self, device):
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if device == "cuda" else device

    def connect(self):
        """Must follow all forks."""
        cuda = self.device.startswith("cuda")
        if cuda:
            torch.cuda.set_device(self.device)
        if self.world > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")

    def same(self, tensors):
        """Gives all processes the first one's values."""
        if self.world > 1:
            for t in tensors:
                dist.broadcast(t.data, 0)

    def first(self, number):
        """Returns the first process's number. It goes from host to host, so that no process waits for a GPU."""
        if self.world == 1:
            return number
        box = torch.tensor([number], dtype=torch.float64)
        dist.broadcast(box, 0)
        return box.item()

    def mean(self, tensors):
        """Replaces each tensor by its mean over the processes, in one transfer for all tensors."""
        if self.world == 1:
            return
        flat = torch.cat([t.flatten() for t in tensors])
        dist.all_reduce(flat)
        flat /= self.world
        parts = flat.split([t.numel() for t in tensors])
        torch._foreach_copy_(tensors, [p.view_as(t) for p, t in zip(parts, tensors)])

    def close(self):
        if self.world > 1:
            dist.destroy_process_group()
