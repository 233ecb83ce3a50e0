"""A job whose objects are copies, so that running it leaves the user's own as they are, bit for bit.

Entry point: ``on_copies``. A module is copied, and with it an optimizer or a scheduler that was there before and
belongs to it; what a function builds anew is taken as it is. Left out: objects that only the loss knows.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from snugfit.jobs import Job
from snugfit.training import build


def on_copies(job: Job) -> Job:
    """The job with a copy of each object of the user's that a run would change.

    Each time the job is built it starts from the module as it is then. A function is taken to build its module anew.
    """
    if not isinstance(job.model, nn.Module):
        return job
    given = job.model
    copied: dict[int, Any] = {}
    "Of the latest build: by the identity of the user's object its copy."

    def model() -> nn.Module:
        copied.clear()
        return build.copied(given, copied)

    def optimizer(model: nn.Module) -> Any:
        made = job.optimizer(model)
        return copy.deepcopy(made, copied) if _holds(made, given) else made

    scheduler: Callable[[Any], Any] | None = None
    if job.scheduler is not None:
        make_scheduler = job.scheduler

        def scheduler(made: Any) -> Any:
            found = make_scheduler(made)
            return copy.deepcopy(found, copied) if _holds(getattr(found, "optimizer", None), given) else found

    return replace(job, model=model, optimizer=optimizer, scheduler=scheduler)


def _holds(made: Any, module: nn.Module) -> bool:
    """Whether an optimizer, or one of some, updates parameters of a module."""
    theirs = {id(parameter) for parameter in module.parameters()}
    optimizers = made if isinstance(made, Sequence) else [made]
    return any(
        id(parameter) in theirs
        for optimizer in optimizers
        if isinstance(optimizer, torch.optim.Optimizer)
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
