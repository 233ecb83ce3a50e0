"""Runs a window again, from its beginning and without its update, and leaves everything as it was.

Entry points: ``Suspect``, ``kept`` and ``run``. It is ``step``'s own window that runs, with other hooks; what is
looked for in it is ``probes``'s. Ranks run by themselves: nothing here waits for another one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from snugfit.training import precision, recovery
from snugfit.training.diagnosing.probes import Enough, Watch
from snugfit.training.hooks import Outcome
from snugfit.training.step import run_window
from snugfit.training.weighting import Number

DIAGNOSED = "diagnosed"


@dataclass(frozen=True, slots=True)
class Suspect:
    """A window that went wrong, and what is needed to run it again."""

    micro_batches: Sequence[Any]
    counts: Sequence[float | None]
    loss: Callable[[Any, Any], Any]
    model: nn.Module
    "The plain module, without DDP around it."
    settings: Mapping[str, Any]
    "Of ``step.Window``."
    precision: str
    device: torch.device
    opened: Callable[[], AbstractContextManager[None]]
    "The engine's own context of a window, which takes normalisation statistics back."
    restore: Callable[[], None]
    "Sets random states and buffers to the window's beginning."
    rank: int = 0
    step: int = 0
    "Updates done before the window."

    @property
    def loss_scale(self) -> float | None:
        """Factor of the window's losses; None without fp16."""
        scale: float | None = self.settings["loss_scale"]
        return scale


@contextmanager
def kept(suspect: Suspect) -> Iterator[Callable[[], None]]:
    """Yield the way back to the window's beginning; afterwards buffers and random states are what they were before.

    Weights and optimizer state need no copy, for nothing updates them.
    """
    snapshots = recovery.Snapshots(suspect.model, suspect.device)
    before = snapshots.take()
    try:
        suspect.restore()
        beginnings = recovery.Snapshots(suspect.model, suspect.device)
        beginning = beginnings.take()
        yield lambda: beginnings.restore(beginning)
    finally:
        snapshots.restore(before)


def run(
    suspect: Suspect,
    beginning: Callable[[], None],
    *,
    loss_scale: float | None,
    precision_name: str,
    watch: Watch | None = None,
    look: Callable[[], None] | None = None,
) -> bool:
    """Run the window once from its beginning; return whether its gradient and its loss are finite.

    Args:
        suspect: The window.
        beginning: What ``kept`` yielded.
        loss_scale: Factor of its losses, or None.
        precision_name: ``"32-true"``, ``"16-mixed"`` and so on.
        watch: Looks at each operation; ends the run behind the first micro-batch that fails.
        look: Called when the gradients of the whole window are there, unscaled.
    """
    found: list[bool] = []

    def decide(found_inf: Tensor | None, count: Number) -> str | None:
        if isinstance(count, Tensor) and bool(count == 0):
            return "empty"
        if found_inf is None:
            return None
        found.append(bool(found_inf))
        if watch is not None:
            watch.end()
        if look is not None:
            look()
        return DIAGNOSED

    hooks = suspect.settings["hooks"]
    places = iter([i for i, count in enumerate(suspect.counts) if count != 0])

    def move(micro_batch: Any) -> Any:
        if watch is None:
            return hooks.move(micro_batch)
        watch.begin(next(places))
        return watch.moved(hooks.move(micro_batch))

    settings = {
        **suspect.settings,
        "model": suspect.model,
        "hooks": replace(hooks, decide=decide, reduce_counts=list, move=move),
        "ranks": 1,
        "autocast": _autocast(suspect, precision_name),
        "loss_scale": loss_scale,
        "observer": None,
    }
    beginning()
    outcome: Outcome | None = None
    try:
        loss = suspect.loss if watch is None else watch.loss
        # torch's own search for NaN would end the run that is to be watched
        with suspect.opened(), torch.autograd.set_detect_anomaly(False):
            outcome = run_window(suspect.micro_batches, suspect.counts, loss=loss, **settings)
    except Enough:
        return False
    if outcome.reason != DIAGNOSED:
        return True
    return not found[0] and bool(torch.isfinite(outcome.loss))


def _autocast(suspect: Suspect, name: str) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: precision.autocast(name, suspect.device)
