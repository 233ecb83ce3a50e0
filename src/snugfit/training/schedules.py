"""Learning-rate schedulers under the engine: one step per update, and nobody else's.

Entry points: ``accepted``, ``states``, ``load`` and ``Positions``. Making schedulers is torch's, scaling rates
``learning_rate``'s.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from snugfit.errors import PlanError, UnsupportedError


def accepted(scheduler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[Any, ...]:
    """The schedulers of some optimizers as a tuple.

    Raises:
        PlanError: Not a scheduler, or one of another optimizer.
        UnsupportedError: One whose step needs a metric, or another argument that an update does not have.
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
        is_optimizer = hasattr(one, "param_groups")  # whose step() would be an update
        if isinstance(one, type) or is_optimizer or not callable(getattr(one, "step", None)):
            raise PlanError(
                "this is not a learning-rate scheduler",
                got=f"scheduler={one!r}",
                expected="an object with step(), or a sequence of them",
                hint="pass torch.optim.lr_scheduler.LambdaLR(optimizer, ...), or leave scheduler out",
            )
        theirs = getattr(one, "optimizer", None)
        if isinstance(theirs, torch.optim.Optimizer) and not any(theirs is optimizer for optimizer in optimizers):
            raise PlanError(
                "a scheduler belongs to another optimizer than the engine's",
                got=f"{type(one).__name__} of another {type(theirs).__name__}",
                expected="a scheduler of the optimizer that is stepped",
                hint="make it of that optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, ...)",
            )
        if needed := _needed_arguments(one.step):
            raise UnsupportedError(
                f"{type(one).__name__}.step() needs an argument, which an update does not have",
                got=f"step({', '.join(needed)})",
                expected="a scheduler whose step() takes no argument",
                hint="give the engine an object whose step() passes the number of updates on, or leave it out and call "
                "its step in the loop",
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
                    got=f"{type(one).__name__} at {position}, which this engine left at {seen}",
                    expected="one step per update, made by one engine",
                    hint="remove scheduler.step() from the loop, or leave scheduler out; of several "
                    "engines only one may hold it",
                )


def states(schedulers: Iterable[Any]) -> list[Any]:
    """What schedulers say of themselves, to be saved.

    Raises:
        PlanError: One that says nothing.
    """
    for one in schedulers:
        if not callable(getattr(one, "state_dict", None)) or not callable(getattr(one, "load_state_dict", None)):
            raise PlanError(
                f"the scheduler {type(one).__name__} cannot be saved",
                got="an object without state_dict() and load_state_dict()",
                expected="both, for a run that is to be resumed",
                hint=f"give {type(one).__name__} both, or leave it out of the engine and call its step in the loop",
            )
    return [one.state_dict() for one in schedulers]


def load(scheduler: Any, saved: Any) -> None:
    """Let a scheduler go on from what it said of itself.

    Raises:
        PlanError: That was another kind of scheduler.
    """
    own = scheduler.state_dict()
    if isinstance(own, Mapping):
        unknown, missing = _entries(saved) - _entries(own), _entries(own) - _entries(saved)
        is_placed = "last_epoch" not in own or isinstance(saved.get("last_epoch"), int)
        if (unknown and missing) or not is_placed:
            raise PlanError(
                "a saved state has another scheduler",
                got=f"one with {', '.join(sorted(_entries(saved))) or 'nothing'}",
                expected=f"that of {type(scheduler).__name__}, with {', '.join(sorted(_entries(own)))}",
                hint="build the engine as it was built when the state was saved",
            )
    scheduler.load_state_dict(saved)


def _entries(state: Mapping[Any, Any]) -> set[str]:
    return {str(name) for name in state if not str(name).startswith("_")}


def _needed_arguments(step: Any) -> list[str]:
    """Arguments without which a function cannot be called; none where that cannot be told."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
