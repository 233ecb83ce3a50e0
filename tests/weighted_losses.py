"""The classifier and the optimizer that the tests of losses share, and the gradients of the full batch."""

import torch
from torch import nn

from models import WIDTH
from snugfit import Engine

CLASSES = 4


class Keep(torch.optim.SGD):
    """Plain SGD that keeps the gradients of every step."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.0)
        self.seen = []

    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.seen.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters])
        super().step()


class Classifier(nn.Module):
    """A trunk and two heads, in float64."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.head, self.gate = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 3)
        self.double()

    def forward(self, x):
        hidden = torch.tanh(self.trunk(x))
        return self.head(hidden), self.gate(hidden)


def cut(batch, sizes):
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        {key: value[start : start + size] for key, value in batch.items()}
        for start, size in zip(starts, sizes, strict=True)
    ]


def relative_error(found, wanted):
    difference = torch.stack([(a - b).norm() for a, b in zip(found, wanted, strict=True)]).norm()
    return float(difference / torch.stack([b.norm() for b in wanted]).norm())


def batch_of(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(size, WIDTH, dtype=torch.float64, generator=generator),
        "labels": torch.randint(CLASSES, (size,), generator=generator),
        "weight": torch.rand(size, dtype=torch.float64, generator=generator) * 10,
        "mask": torch.randint(2, (size,), generator=generator).double(),
    }


def step_of(model, loss, micro_batches, counts=None, **settings):
    """Gradients of one window, through the engine, and its result."""
    keep = Keep(model)
    engine = Engine(model, keep, loss=loss, count=counts or "samples", **settings)
    result = engine.step_window(micro_batches)
    return (keep.seen[-1] if keep.seen else None), result, engine


def full_gradients(model, value):
    return torch.autograd.grad(value, list(model.parameters()), allow_unused=True, materialize_grads=True)
