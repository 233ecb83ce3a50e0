"""The jobs, plans and models that several of the tests of ``diagnose`` share."""

import copy
import random

import numpy as np
import torch
from torch import nn

from snugfit import Engine, Job, Plan
from snugfit.training.diagnosing.diagnose import diagnose


class Maps(nn.Module):
    """Three 4x4 maps: 10 everywhere, 500 everywhere, +1 and -1 in turn (case C044)."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(3))
        with torch.no_grad():
            self.a.weight.fill_(10)
            self.b.weight.fill_(500)
            self.c.weight.copy_(torch.tensor([1.0, -1.0, 1.0, -1.0]).expand(4, 4))

    def forward(self, x):
        return self.c(self.b(self.a(x)))


class Operation(nn.Module):
    """One operation as a module of its own."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Around(nn.Module):
    """A linear layer, an operation, another linear layer."""

    def __init__(self, function, value=1.0):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), Operation(function), nn.Linear(4, 4)
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(4) * value)
            self.first.bias.zero_()

    def forward(self, x):
        return self.last(self.inner(self.first(x)))


def mean_output(model, micro_batch):
    return model(micro_batch).float().mean()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def job_of(model, loss=mean_output, batch=None, **options):
    return Job(lambda: copy.deepcopy(model), loss, sgd, torch.ones(4, 4) if batch is None else batch, **options)


def plan_of(micro_batch_size=2, batch_size=4, **fields):
    return Plan(batch_size=batch_size, micro_batch_size=micro_batch_size, **fields)


def found_in(model, loss=mean_output, batch=None, plan=None, steps=1, **options):
    return diagnose(job_of(model, loss, batch, **options), plan or plan_of(), "cpu", steps=steps)


def random_bits():
    return [
        torch.get_rng_state(),
        torch.tensor(random.getstate()[1]),
        torch.from_numpy(np.random.get_state()[1].astype(np.int64)),
    ]


def one_weight(value=1.0):
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(value)
    return model


def stepped(engine, batch, size):
    """The suspect of a window of an engine that has stepped before."""
    parts, counts = engine.prepare(batch, size)
    return engine.runner.suspect(parts, counts, engine.runner.hooks.snapshot())


class Noisy(nn.Module):
    """Dropout, BatchNorm and a linear layer: random states and buffers move."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.norm(self.linear(x)))


def engine_of(model, **options):
    return Engine(model, sgd(model), loss=mean_output, **options)
