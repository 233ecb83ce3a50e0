"""What lives from one window to the next, and how it is saved and loaded.

Entry points: ``Progress``, ``collect`` and ``load``. A state holds tensors and built-in values only, so that
``torch.load`` needs no more than ``weights_only``. Writing files is left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import nn

from snugfit.errors import PlanError
from snugfit.training import random_states, updates
from snugfit.training.precision import Scaler
from snugfit.training.weighting import Number


@dataclass(slots=True)
class Progress:
    """Counters of a run; a skipped window moves none but ``skipped_in_a_row``."""

    steps: int = 0
    micro_steps: int = 0
    samples: int = 0
    skipped_in_a_row: int = 0
    reference: tuple[Number | None, ...] | None = None
    "R of the losses that report their own counts, from the windows before; None: there was none yet."
    micro_batch_size: int | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """The objects whose states belong to a run."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    schedulers: Sequence[Any]
    scaler: Scaler | None
    device: torch.device


def collect(parts: Parts, progress: Progress, with_model: bool) -> dict[str, Any]:
    """Everything that the next windows depend on."""
    state = {
        "optimizers": [optimizer.state_dict() for optimizer in parts.optimizers],
        "weights": [updates.of(optimizer).state_dict() for optimizer in parts.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in parts.schedulers],
        "scaler": None if parts.scaler is None else parts.scaler.state_dict(),
        "progress": asdict(progress),
        "random": random_states.saved(parts.device),
    }
    return {"model": parts.model.state_dict(), **state} if with_model else state


def load(parts: Parts, progress: Progress, state: Mapping[str, Any]) -> None:
    """Set what ``collect`` read, random states included.

    Raises:
        PlanError: The state is of another number of optimizers or schedulers, or of other master weights; nothing is
            changed then.
    """
    for name, ours in (("optimizers", parts.optimizers), ("schedulers", parts.schedulers)):
        if len(state[name]) != len(ours):
            raise PlanError(
                f"a saved state has another number of {name}",
                got=f"{len(state[name])} saved, {len(ours)} here",
                expected="the same",
                hint="build the engine as it was built when the state was saved",
            )
    trained = [updates.of(optimizer) for optimizer in parts.optimizers]
    weights = state.get("weights", [{}] * len(trained))
    for update, saved in zip(trained, weights, strict=True):
        update.check_state(saved)
    if "model" in state:
        parts.model.load_state_dict(state["model"])
    for update, saved in zip(trained, weights, strict=True):
        update.load_state_dict(saved)
    torch.clear_autocast_cache()  # casts of the old weights, where the caller's own autocast is open
    for optimizer, saved in zip(parts.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    for scheduler, saved in zip(parts.schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(saved)
    if parts.scaler is not None and state["scaler"] is not None:
        parts.scaler.load_state_dict(state["scaler"])
    for field in fields(progress):
        setattr(progress, field.name, state["progress"][field.name])
    random_states.restore(state["random"], parts.device)
