"""An optimizer for matrices, which both training scripts can use."""

import math

import torch


class Muon:
    """Momentum orthogonalised by Newton-Schulz (Jordan et al. 2024), scaled to AdamW's step (Liu et al. 2025).

    Matrices of one shape are stepped together."""

    def __init__(self, parameters, decay=0.1, momentum=0.95):
        shapes = {}
        for p in parameters:
            shapes.setdefault(p.shape, []).append(p)
        self.groups = [(ps, torch.zeros(len(ps), *shape, device=ps[0].device)) for shape, ps in shapes.items()]
        self.decay, self.momentum = decay, momentum

    @torch.no_grad()
    def step(self, rate):
        for parameters, buffer in self.groups:
            g = torch.stack([p.grad for p in parameters])
            buffer.lerp_(g, 1 - self.momentum)
            x = g.lerp(buffer, self.momentum).bfloat16()
            tall = x.shape[1] > x.shape[2]
            if tall:
                x = x.mT
            x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
            for _ in range(5):
                a = x @ x.mT
                x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
            if tall:
                x = x.mT
            scale = 0.2 * math.sqrt(max(x.shape[1:]))
            torch._foreach_mul_(parameters, 1 - rate * self.decay)
            torch._foreach_add_(parameters, list((-rate * scale * x).float().unbind()))
