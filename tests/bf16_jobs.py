"""The models, plans and settings that several of the tests of bf16 weights share."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from snugfit import Job, Plan, build

METHODS = ("master-weights", "stochastic-rounding", "nearest")
BF16 = torch.bfloat16


class Weights(nn.Module):
    """Weights of value 1 whose gradient is the input's mean."""

    def __init__(self, number=1):
        super().__init__()
        self.w = nn.Parameter(torch.ones(number))

    def forward(self, x):
        return (self.w * x).sum(-1)


def mean(model, micro_batch):
    return model(micro_batch).mean()


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, **options})


def plan(method="master-weights", **fields):
    values = {"batch_size": 4, "micro_batch_size": 2, "precision": "bf16-true", "bf16_update": method}
    return Plan(**{**values, **fields})


def made(model, loss, optimizer, method="master-weights", *, fields=None, **options):
    job = Job(model, loss, optimizer, None, **options)
    with expected_warning(method):
        return build(job, plan(method, **(fields or {})), device="cpu")


@contextmanager
def expected_warning(method):
    if method == "nearest":
        with pytest.warns(UserWarning, match="rounded away"):
            yield
    else:
        yield


def held(engine, optimizer=0):
    return [p for group in engine.optimizers[optimizer].param_groups for p in group["params"]]


def hundred_updates(method, number, gradient_dtype, **options):
    fields = {"gradient_dtype": gradient_dtype}
    engine = made(
        lambda: Weights(number), mean, lambda m: torch.optim.SGD(m.parameters(), **options), method, fields=fields
    )
    for _ in range(100):
        engine.step(torch.ones(4, number))
    return engine
