"""Whether two windows have the same gradient and the same loss, and how far they are apart.

Entry points: ``errors``, ``loss_error``, ``coarsest`` and ``TOLERANCES``. Running windows is ``comparison``'s.

NOTE [What is compared in which type]
1. Whether a split is exact is a question of weights, not of precision: it is asked in float64, where a wrong weight
   stands out from rounding by ten orders of magnitude. Half precision would hide it or call rounding a fault.
2. Where a model does not run in float64 it is asked in float32, and where it does not run in that either (quantised
   weights), in the plan's own precision. The tolerance is that of the coarsest type which took part, be it in the
   gradient's sum alone: a weight that stays float32 has one of float32.
3. An error is relative to the gradient of its module, or to a small share of the whole gradient where that is larger:
   some gradients are 0 (biases of keys in attention, biases before a normalisation) and hold nothing but rounding.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far two gradients may be apart, and why."""

    relative: float
    floor: float
    "Share of the whole gradient's norm below which a module's gradient is taken for rounding."
    reason: str


PARTLY_FLOAT32 = Tolerance(1e-5, 1e-3, "float64, with parts that the model computes in float32 by itself")
TOLERANCES = {
    torch.float64: Tolerance(1e-7, 1e-5, "float64: sums in another order move the 15th digit, wrong weights the first"),
    torch.float32: Tolerance(1e-3, 1e-3, "float32: sums in another order move the 7th digit, more where they cancel"),
    torch.bfloat16: Tolerance(0.1, 1e-2, "bfloat16 keeps 8 bits: a fault smaller than this is not seen"),
    torch.float16: Tolerance(0.02, 1e-2, "float16 keeps 11 bits: a fault smaller than this is not seen"),
}


def coarsest(types: Iterable[torch.dtype]) -> torch.dtype:
    """The type of fewest digits; float64 where there is none."""
    return max(types, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)


def errors(
    reference: Mapping[str, Tensor], other: Mapping[str, Tensor], floor: float
) -> tuple[float, dict[str, float]]:
    """Relative error of a gradient as a whole and of every module, worst first.

    Args:
        reference: Name of a parameter to its gradient; one that is missing is 0.
        other: The gradients that are compared with it.
        floor: See ``Tolerance``.
    """
    squares: dict[str, list[float]] = {}
    for name in dict.fromkeys([*reference, *other]):
        first, second = reference.get(name), other.get(name)
        row = squares.setdefault(name.rpartition(".")[0], [0.0, 0.0, 0.0])
        given = first if first is not None else second
        assert given is not None
        first = torch.zeros_like(given) if first is None else first
        second = torch.zeros_like(given) if second is None else second
        row[0] += float((second - first).square().sum())
        row[1] += float(first.square().sum())
        row[2] += float(second.square().sum())
    total = max(sum(row[1] for row in squares.values()), 0.0) ** 0.5
    others = sum(row[2] for row in squares.values()) ** 0.5
    scale = max(total, others if total == 0 else 0.0)
    by_module = {name: _ratio(row[0] ** 0.5, max(row[1] ** 0.5, floor * scale)) for name, row in squares.items()}
    overall = _ratio(sum(row[0] for row in squares.values()) ** 0.5, scale)
    return overall, dict(sorted(by_module.items(), key=lambda item: -_rank(item[1])))


def loss_error(reference: float, other: float) -> float:
    """Relative error of a loss."""
    return _ratio(abs(other - reference), max(abs(reference), abs(other)))


def _ratio(difference: float, scale: float) -> float:
    if difference == 0:
        return 0.0
    return difference / scale if scale else float("inf")


def _rank(error: float) -> float:
    return float("inf") if error != error else error
