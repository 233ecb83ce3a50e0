"""Learning-rate schedulers under the engine: one step per update, and nobody else's.

Entry points: ``accepted`` and ``Positions``. Making schedulers is torch's; scaling rates is ``learning_rate``'s.
"""

from collections.abc import Iterable
from typing import Any

import torch

from snugfit.errors import PlanError, UnsupportedError


def accepted(scheduler: Any) -> tuple[Any, ...]:
    """The schedulers as a tuple.

    Raises:
        PlanError: Not a scheduler.
        UnsupportedError: One that is stepped by a metric, which an update does not know.
    """
    found = () if scheduler is None else tuple(scheduler) if isinstance(scheduler, (list, tuple)) else (scheduler,)
    for one in found:
        if isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise UnsupportedError(
                "ReduceLROnPlateau is stepped by a metric, not once per update",
                got=type(one).__name__,
                expected="a scheduler whose step() takes no argument",
                hint="leave it out of the engine and call its step(metric) after each evaluation",
            )
        if isinstance(one, type) or not callable(getattr(one, "step", None)):
            raise PlanError(
                "this is not a learning-rate scheduler",
                got=f"scheduler={one!r}",
                expected="an object with step(), or a sequence of them",
                hint="pass torch.optim.lr_scheduler.LambdaLR(optimizer, ...), or leave scheduler out",
            )
    return found


class Positions:
    """Where the schedulers stood after the engine's last update, to notice when somebody else steps them."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}

    def note(self, schedulers: Iterable[Any]) -> None:
        """Take where they stand now as right."""
        self._seen = {id(one): getattr(one, "last_epoch", None) for one in schedulers}

    def check(self, schedulers: Iterable[Any]) -> None:
        """Refuse schedulers that moved on since ``note``; one that is new, or was set back, is taken as it stands.

        Raises:
            PlanError: The loop steps a scheduler that the engine steps as well.
        """
        for one in schedulers:
            position, seen = getattr(one, "last_epoch", None), self._seen.get(id(one))
            if position is not None and seen is not None and position > seen:
                raise PlanError(
                    "a scheduler was stepped outside of the engine",
                    got=f"{type(one).__name__} at {position}, which the engine left at {seen}",
                    expected="one step per update, made by the engine",
                    hint="remove scheduler.step() from the loop, or leave scheduler out of the engine",
                )
