"""The gradient noise scale: at what batch size a larger one stops paying, estimated from the windows of a run.

Entry point: ``track``. It looks at one more norm per window, that of the first micro-batch's gradient, and waits for
no device. Choosing a batch size from it is left to the reader of the metric.

NOTE [Two batch sizes, two norms]
1. The mean gradient over B counted units has E|G_B|^2 = |G|^2 + S / B: G the true gradient, S the trace of the
   covariance of a unit's gradient (McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1).
2. From b units of the first micro-batch and B of the window, without bias:
   |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b) and S = (|G_b|^2 - |G_B|^2) / (1/b - 1/B).
3. A ratio of noisy numbers is biased, so both are smoothed over windows and divided only then: S / |G|^2. While few
   windows are smoothed the ratio scatters widely and may be negative.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from snugfit.errors import PlanError
from snugfit.training.hooks import First
from snugfit.training.weighting import Number, as_float

if TYPE_CHECKING:
    from snugfit.training.engine import Engine

METRIC = "gradient_noise_scale"


def track(engine: "Engine", decay: float = 0.95) -> "Tracker":
    """Add the metric ``gradient_noise_scale`` to the results of an engine's windows.

    A 0-dimensional tensor on the model's device, in units of what the engine counts (samples, tokens, a weight). NaN
    until the first estimate. Windows of one micro-batch, of several denominators, that make no update, or that reduce
    every micro-step bring none, and the last value stays. On several ranks each reports its own, from its own first
    micro-batch. Not part of the engine's saved state; with an optimizer that takes a closure there is no metric.

    Args:
        engine: Whose windows are watched.
        decay: What is kept of the smoothed numbers in each window; windows averaged are about 1 / (1 - decay).

    Returns:
        Handle; ``.remove()`` ends it.

    Raises:
        PlanError: A decay outside of its range, or the engine is tracked already.
    """
    if isinstance(decay, bool) or not (isinstance(decay, (int, float)) and 0 <= decay < 1):
        raise PlanError(
            "decay is outside of its range",
            got=f"decay={decay!r}",
            expected="at least 0, below 1",
            hint="leave it out for 0.95",
        )
    if not hasattr(engine, "runner"):
        raise PlanError(
            "gradient noise is tracked in the windows of an engine",
            got=type(engine).__name__,
            expected="a snugfit.Engine",
            hint="make it first: engine = snugfit.Engine(model, optimizer, loss=loss)",
        )
    if engine.runner.observer is not None:
        raise PlanError(
            "the gradient noise of this engine is tracked already",
            got="a second handle",
            expected="one at a time",
            hint="call .remove() on the first",
        )
    tracker = Tracker(engine, decay)
    engine.runner.observer = tracker.observe
    return tracker


class Tracker:
    """Smooths what windows say about the gradient noise; made by ``track``."""

    def __init__(self, engine: "Engine", decay: float) -> None:
        self._engine: Engine | None = engine
        self._decay = decay
        self._noise: Tensor | None = None
        self._signal: Tensor | None = None

    def observe(self, first: First | None, norm: Tensor, count: Number) -> Mapping[str, Number]:
        """Learn from one window, and return the metric.

        Args:
            first: Norm of the first micro-batch's mean gradient and its count; None where the window says nothing.
            norm: Of the window's mean gradient.
            count: Of the window.
        """
        if first is not None and (isinstance(count, Tensor) or count > first[1]):
            small, part = as_float(first[0]).square(), first[1]
            large = as_float(norm).square()
            self._smooth("_signal", (count * large - part * small) / (count - part), count > part)
            self._smooth("_noise", (small - large) / (1 / part - 1 / count), count > part)
        if self._signal is None or self._noise is None:
            return {METRIC: torch.full_like(norm, math.nan)}
        return {METRIC: (self._noise / self._signal).to(norm.dtype)}

    def remove(self) -> None:
        """Leave the metric out from now on; doing so again changes nothing."""
        if self._engine is not None:
            self._engine.runner.observer = None
            self._engine = None

    def _smooth(self, name: str, value: Tensor, is_estimate: bool | Tensor) -> None:
        """Mix a value into a smoothed number, where it is one: what a device counted may be in one micro-batch only."""
        before = getattr(self, name)
        if before is None:  # the weights of a start at 0 are the same in both numbers, and fall out of their ratio
            before = torch.zeros_like(value)
        mixed = torch.lerp(value, before, self._decay)
        setattr(self, name, torch.where(is_estimate, mixed, before) if isinstance(is_estimate, Tensor) else mixed)
