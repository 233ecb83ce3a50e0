"""What a window needs beyond tensor arithmetic, and what it says of itself: the seams of ``step``.

Entry points: ``Hooks`` and ``Outcome``. Who fills them in is ``runner``'s; a window under fake tensors, and one that is
run again under watch, get others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from snugfit.training import metrics
from snugfit.training.weighting import Number

First: TypeAlias = tuple[Tensor, Number]
"Norm of the mean gradient of a window's first micro-batch, and what that counts."
Observer: TypeAlias = Callable[[First | None, Tensor, Number], Mapping[str, Number]]
"(first micro-batch or None, norm of the window, its count) to metrics."


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a window needs beyond tensor arithmetic: values of tensors, and other ranks."""

    decide: Callable[[Tensor | None, Number], str | None]
    "(whether a gradient is not finite, count) to the reason to skip, or None; the flag is None for one loss's count."
    reduce_counts: Callable[[Sequence[Number]], Sequence[Number]]
    "Sums over all ranks; numbers stay numbers, tensors stay on their device."
    synchronises: Callable[[int, int], bool]
    "(i, n): whether ranks reduce gradients in micro-step i of n."
    snapshot: Callable[[], Any]
    "What a window changes before its update: random states and buffers."
    restore: Callable[[Any], None]
    "Undo a window that failed before its update."
    move: Callable[[Any], Any]
    "A micro-batch on the device."
    gather: Callable[[list[str]], Sequence[list[str]]] = metrics.alone
    "Names of metrics of every rank."
    begin_update: Callable[[], None] = _nothing
    "Told before the first optimizer steps: from here on a window cannot be taken back."


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a window did; tensors are 0-dimensional and detached."""

    loss: Tensor
    grad_norm: Tensor
    count: Number
    num_micro_batches: int
    reason: str | None
    "Why the update was skipped; None: it was done."
    metrics: Mapping[str, Number]
    reported_counts: tuple[Number, ...] | None
    "Count per rank of every loss that reports its own, for the next window's R; None: none does."
