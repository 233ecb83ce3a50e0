"""What is taken for values that a trace cannot know, where one assumption is sound; each has a sentence to its name.

Entry points: ``of``, ``is_kept``. Numbers are finite, and routing is balanced: what a router picks of what it has
learnt is spread evenly over the experts. What torch's own code checks of its arguments holds. Any other unknown value
that decides about a step is refused.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

FINITE = "numbers that the step tests for being finite are finite: no update is skipped"
BALANCED = "routing is balanced: topk, argmax and sort over computed numbers pick every candidate equally often"

CHECKED = "what torch's own functions check of the values they are given holds: nothing is raised"

COMPARED = (
    "numbers that an optimizer or its closure compares are above its tolerances, and fall by 1 from each that is read "
    "to the next: a line search takes its first step, and no test for convergence ends the iterations early"
)

HIGH = 1 << 20
"""The first number that an optimizer reads, far above any tolerance. Those that follow differ by much more than LBFGS's
``tolerance_change``, by which it would end its iterations (torch/optim/lbfgs.py)."""

_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_.default"


def of(
    func: Any, args: Sequence[Any], result: Any, *, in_update: bool
) -> Iterator[tuple[Tensor, Callable[[], Tensor], str]]:
    """Tensors of an operation's result whose values are assumed: tensor, a function that makes them, the sentence.

    Args:
        func: Operation that has run on fake tensors, not all of whose values are known.
        args: Its arguments.
        result: Its fake result.
        in_update: Whether an optimizer is making an update.
    """
    name = func.__name__
    if name in _PICKS:
        picked = result if isinstance(result, Tensor) else result[-1]
        if picked.dtype == torch.int64 and args[0].dim():
            dim = _dimension(name, args)
            yield picked, _balanced(picked, dim, args[0].numel() if dim is None else args[0].shape[dim]), BALANCED
    answer = _finite(name, args)
    if answer is not None:
        yield result, _filled(result, answer), FINITE
    elif name in _CHECKS and _is_asked_by_torch():
        yield result, _filled(result, _CHECKS[name]), CHECKED
    elif in_update and name.partition(".")[0] in _COMPARISONS and result.numel() == 1:
        other = args[1] if isinstance(args[1], (int, float)) else None
        # Of two unknown numbers: the slope after a step and before it (_strong_wolfe in torch/optim/lbfgs.py).
        is_accepted = name == "le.Tensor"
        yield result, _filled(result, is_accepted or compared(name.partition(".")[0], other)), COMPARED


def compared(comparison: str, other: object) -> bool:
    """How an unknown number of an optimizer compares: it is above every positive tolerance, and below no other.

    A line search or a test for convergence then goes on to its last iteration, which needs the most memory.

    Args:
        comparison: ``lt le gt ge eq ne``.
        other: What it is compared with.
    """
    if comparison in ("gt", "ge"):
        return isinstance(other, (int, float)) and other > 0
    return comparison == "ne"


def writes_found_inf(func: Any) -> bool:
    """Whether an operation writes down if gradients are finite."""
    return bool(func.__name__ == _UNSCALE)


def is_kept(args: Sequence[Any], tensor: Tensor) -> bool:
    """Whether a tensor written by such an operation keeps its value: the flag does, gradients do not."""
    return tensor is args[1]


def _is_asked_by_torch() -> bool:
    """Whether code of torch's that checks what it is given asks for an operation, and no other code in between.

    A distribution that draws until enough is accepted asks as well, and is answered by nobody.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name in _CHECKING or name.startswith("torch.distributions.") or name.partition(".")[0] not in _PASSED:
            return name in _CHECKING
        frame = frame.f_back
    return False


_CHECKS = {"all.default": True, "_is_all_true.default": True, "any.default": False}
"What code of torch's that checks its arguments goes on with."
_CHECKING = ("torch.distributions.constraints", "torch.distributions.distribution", "torch.nn.functional")
_PASSED = ("snugfit", "torch")
"Packages whose frames lie between an operation and who asks for it."
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_PICKS = ("topk.default", "argmax.default", "sort.default", "sort.stable", "max.dim", "multinomial.default")


def _dimension(name: str, args: Sequence[Any]) -> int | None:
    if name == "topk.default":
        return args[2] if len(args) > 2 else -1
    if name in ("sort.stable", "multinomial.default"):
        return -1
    if name == "sort.default":
        return args[1] if len(args) > 1 else -1
    return args[1] if len(args) > 1 else None


def _finite(name: str, args: Sequence[Any]) -> bool | None:
    if name in ("isnan.default", "isinf.default", "isneginf.default", "isposinf.default"):
        return False
    if name in ("ne.Scalar", "eq.Scalar") and isinstance(args[1], float) and math.isinf(args[1]):
        return name == "ne.Scalar"
    if name in ("ne.Tensor", "eq.Tensor") and args[0] is args[1]:
        return name == "eq.Tensor"
    return None


def _balanced(picked: Tensor, dim: int | None, num_candidates: int) -> Callable[[], Tensor]:
    """Every row of a pick begins where the one before ended, so that all candidates come up equally often."""
    size, stride = tuple(picked.shape), picked.stride()

    def make() -> Tensor:
        indices = torch.empty_strided(size, stride, dtype=torch.int64, device="cpu")
        rows = indices.movedim(dim, -1) if dim is not None and indices.dim() == len(size) and size else indices
        rows.copy_((torch.arange(indices.numel(), device="cpu") % max(num_candidates, 1)).reshape(rows.shape))
        return indices

    return make


def _filled(result: Tensor, answer: bool) -> Callable[[], Tensor]:
    size, stride, dtype = tuple(result.shape), result.stride(), result.dtype
    return lambda: torch.empty_strided(size, stride, dtype=dtype, device="cpu").fill_(answer)
