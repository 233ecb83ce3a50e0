"""Metrics that losses bring along: a sum and a count by name, over the micro-batches and ranks of a window.

Entry point: ``Metrics``, of one window. Losses themselves are ``losses``'s; messages among ranks are ``distributed``'s.

NOTE [Names among ranks]
A rank may have no metric of a name in a window that another rank has: nothing of that kind was in its micro-batches.
Sums of different names must not meet in one message. So a number made of the names goes along with what ranks send each
other anyway, and only where that differs do they tell each other their names.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from snugfit.errors import PlanError
from snugfit.training.weighting import Number, Reduce

_DIGEST_RANGE = 2**20  # its square, summed over any number of ranks, is exact in float64


class Metrics:
    """The metrics of one window.

    Args:
        ranks: Number of ranks that bring some.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._sums: dict[str, tuple[Number, Number]] = {}

    def add(self, metrics: Mapping[str, tuple[Any, Any]]) -> None:
        """Add what a loss of a micro-batch brings.

        Raises:
            PlanError: Not names of pairs of numbers.
        """
        if not isinstance(metrics, Mapping):
            raise _unusable(type(metrics).__name__)
        for name, pair in metrics.items():
            is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2 and all(map(_is_number, pair))
            if not isinstance(name, str) or not is_pair:
                raise _unusable(f"{name!r}: {pair!r}")
            total, count = (v.detach().reshape(()) if isinstance(v, Tensor) else float(v) for v in pair)
            sums = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (sums[0] + total, sums[1] + count)

    def digest(self) -> list[float]:
        """Numbers that tell, once they are summed over all ranks, whether these have metrics of the same names."""
        if self._ranks == 1:
            return []
        number = float(zlib.crc32("\n".join(sorted(self._sums)).encode()) % _DIGEST_RANGE)
        return [number, number * number]

    def agree(self, summed: Sequence[float], gather: Callable[[list[str]], Sequence[list[str]]]) -> None:
        """Take over the names that other ranks have, which count nothing here.

        Args:
            summed: ``digest`` over all ranks.
            gather: The names of every rank.
        """
        if summed and self._ranks * int(summed[1]) != int(summed[0]) ** 2:  # Cauchy and Schwarz
            for names in gather(sorted(self._sums)):
                for name in names:
                    self._sums.setdefault(name, (0.0, 0.0))

    def means(self, reduce: Reduce) -> dict[str, Number]:
        """Every sum divided by its count, over all ranks; NaN where nothing was counted.

        Args:
            reduce: Sums over all ranks.
        """
        names = sorted(self._sums)
        sums = reduce([number for name in names for number in self._sums[name]]) if names else []
        return {name: _ratio(total, count) for name, total, count in zip(names, sums[::2], sums[1::2], strict=True)}


def alone(names: list[str]) -> Sequence[list[str]]:
    """What ``gather`` returns to a rank that is alone."""
    return [names]


def _ratio(total: Number, count: Number) -> Number:
    return math.nan if not isinstance(count, Tensor) and count == 0 else total / count


def _is_number(value: object) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)


def _unusable(got: str) -> PlanError:
    return PlanError(
        "Loss.metrics does not say what is to be averaged",
        got=got,
        expected="a mapping of name to (sum, count), both numbers or 0-dimensional tensors",
        hint='return snugfit.Loss(total, count, metrics={"accuracy": (hits.sum(), count)})',
    )
