"""What the tests of mixed precision share."""

import torch

from snugfit import Engine

BF16 = torch.bfloat16
PRECISIONS = ("32-true", "16-mixed", "bf16-mixed")


def make(model, loss, optimizer=None, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0) if optimizer is None else optimizer
    return Engine(model, optimizer, loss=loss, **settings)
