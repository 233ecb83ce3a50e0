"""Optimizers that evaluate the loss themselves (L-BFGS): each evaluation is the whole window, run again.

Entry points: ``needed``, ``check`` before the first window, and ``run_window``. The arithmetic of a window is
``step``'s; loops that are written by hand cannot be run again and are refused.

NOTE [One update, many evaluations]
1. Every call of the closure runs all micro-batches with the random states and buffers of the window's beginning, leaves
   the averaged and clipped gradient in ``.grad`` and returns the mean loss over all ranks. What the window reports
   (loss, norm, metrics) is the first evaluation's, before anything moved. Afterwards buffers are as if the last one
   had run alone.
2. The first evaluation decides whether the window is skipped. Later ones are handed to the optimizer as they are, for
   a line search may step back from values that are not finite. If there were any, the window is run once more where
   the optimizer has come to, and skipped if that is not finite either; under ``nonfinite="raise"`` they raise.
3. A window that is skipped or raises leaves weights and optimizer state as they were: both are copied before (the
   history of L-BFGS by reference, as it is only added to), and so are those of an optimizer that it holds (SAM).
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from snugfit.errors import PlanError, UnsupportedError
from snugfit.training import precision, recovery
from snugfit.training.hooks import Outcome
from snugfit.training.step import Window

_HISTORY = ("old_dirs", "old_stps", "ro")
"State of L-BFGS whose tensors are never written to."


class _SkippedError(Exception):
    """Ends an optimizer's update at its first evaluation; never leaves this file."""


def needed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's ``step`` cannot be called without a closure."""
    try:
        _, *parameters = inspect.signature(type(optimizer).step).parameters.values()
    except (TypeError, ValueError):
        return False
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return bool(required)


def check(optimizers: Sequence[torch.optim.Optimizer], precision_name: str) -> None:
    """Refuse, at set-up, what cannot be evaluated again and again.

    Raises:
        UnsupportedError: A closure beside another optimizer, under a loss scale or with bf16 weights.
    """
    closures = [type(optimizer).__name__ for optimizer in optimizers if needed(optimizer)]
    if not closures:
        return
    if len(optimizers) > 1:
        raise UnsupportedError(
            f"{closures[0]} evaluates the loss several times in one update, which no other optimizer can take part in",
            got=", ".join(type(optimizer).__name__ for optimizer in optimizers),
            expected="one optimizer, if its step() takes a closure",
            hint=f"give all parameters to {closures[0]}, or use torch.optim.AdamW for all of them",
        )
    if precision_name in ("16-mixed", "bf16-true"):
        reason = (
            "a loss scale is judged once per update, but each evaluation may overflow by itself"
            if precision_name == "16-mixed"
            else "a line search compares losses that bf16 weights round away"
        )
        raise UnsupportedError(
            f"{closures[0]} evaluates the loss several times in one update, which does not go with {precision_name}",
            got=f"precision={precision_name!r}: {reason}",
            expected='precision="32-true"',
            hint='use precision="32-true", or torch.optim.AdamW',
        )


def refuse_by_hand(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse a loop by hand.

    Raises:
        UnsupportedError: An optimizer needs a closure.
    """
    for optimizer in filter(needed, optimizers):
        raise UnsupportedError(
            f"{type(optimizer).__name__} runs a window several times, and a loop by hand runs once",
            got="engine.window",
            expected="an optimizer whose step() takes no closure",
            hint="give the engine a loss function and call engine.step or engine.step_window",
        )


def run_window(
    micro_batches: Sequence[Any],
    counts: Sequence[float | None],
    *,
    loss: Callable[[Any, Any], Any],
    restart: Callable[[], None] = lambda: None,
    **settings: Any,
) -> Outcome:
    """Run one window whose optimizer evaluates the loss by a closure; see ``step.run_window`` and the NOTE.

    Args:
        micro_batches: As they are on the host; moved again in every evaluation.
        counts: Count of each; None where only the loss knows.
        loss: ``(model, micro_batch)`` to a loss.
        restart: Called before the window is run again, to forget what the last evaluation left elsewhere.
        **settings: See ``step.Window``; one optimizer.

    Raises:
        PlanError: See ``step.run_window``.
    """
    (optimizer,) = settings["optimizers"]
    decide = settings["hooks"].decide
    settings = {**settings, "observer": None}
    kept = _Kept(optimizer)
    snapshots = recovery.Snapshots(settings["model"], kept.parameters[0].device)
    beginning = snapshots.take()
    first: list[Outcome] = []
    finite: list[Tensor] = []
    open_windows: list[Window] = []

    def closure() -> Tensor:
        if first:
            snapshots.restore(beginning)
            restart()
        while open_windows:
            open_windows.pop().__exit__()
        window = Window(counts, **settings)
        open_windows.append(window.__enter__())
        window.micro_steps(micro_batches, loss)
        outcome = window.average()
        if not first:
            first.append(replace(outcome, reason=window.decide(outcome)))
            if first[0].reason is not None:
                raise _SkippedError
        finite.append(torch.isfinite(outcome.loss) & torch.isfinite(outcome.grad_norm))
        window.clip(outcome.grad_norm)
        return outcome.loss

    reason = None
    try:
        with precision.without_autocast(settings["device_type"]):
            optimizer.step(torch.enable_grad()(closure))
        if not first:
            raise PlanError(
                f"{type(optimizer).__name__}.step did not call its closure",
                got="no evaluation of the loss",
                expected="at least one call in every update",
                hint="make closure an optional argument of step() if it is not used",
            )
        finite.append(torch.isfinite(precision.total_norm([parameter.detach() for parameter in kept.parameters])))
        reason = decide(~torch.stack(finite).all(), first[0].count)
        if reason is not None:
            finite[:-1] = []
            closure()
            reason = decide(~torch.stack(finite).all(), first[0].count)
    except _SkippedError:
        reason = first[0].reason
    except BaseException:
        kept.put_back()
        raise
    finally:
        while open_windows:
            open_windows.pop().__exit__()
    if reason is not None:
        kept.put_back()
    return replace(first[0], reason=reason)


class _Kept:
    """Weights and state of an optimizer before its update, and the way back."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        inside = (value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer))
        self._optimizers = [optimizer, *inside]
        self.parameters: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
        self._weights = [parameter.detach().clone() for parameter in self.parameters]
        self._states = [_state_of(one) for one in self._optimizers]
        self._options = [
            [{name: copy.deepcopy(value) for name, value in group.items() if name != "params"} for group in groups]
            for groups in (one.param_groups for one in self._optimizers)
        ]

    def put_back(self) -> None:
        """Set weights, state and options to what they were."""
        with torch.no_grad():
            for parameter, weight in zip(self.parameters, self._weights, strict=True):
                parameter.copy_(weight)
        for optimizer, state, options in zip(self._optimizers, self._states, self._options, strict=True):
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, given in zip(optimizer.param_groups, options, strict=True):
                group.update(given)


def _state_of(optimizer: torch.optim.Optimizer) -> dict[Any, dict[str, Any]]:
    is_lbfgs = isinstance(optimizer, torch.optim.LBFGS)
    return {
        parameter: {
            name: list(value) if is_lbfgs and name in _HISTORY and value is not None else copy.deepcopy(value)
            for name, value in values.items()
        }
        for parameter, values in optimizer.state.items()
    }
