"""Sets of ways to run a part of a chain, of which none is worse than another in both memory and time.

Entry points: ``Labels`` with ``best``, ``Packing`` for costs that settle ties, and ``Frontier``, what solving gives.
What the labels mean is NOTE [Labels] in ``solver.py``; nothing here knows of units.
"""

import operator
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from snugfit.errors import PlanError
from snugfit.planning.chain import Solution, Span

Ints: TypeAlias = NDArray[np.int64]
MOST = int(np.iinfo(np.int64).max)
_BLOCK = 64
"Labels that are compared with rivals at once, by the best need and the best cost of any of them."


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """Pairs of a needed budget and a cost: needs ascend, costs descend."""

    needs: Ints
    costs: Ints

    @classmethod
    def of(cls, need: int, cost: int) -> "Labels":
        """The set of one label."""
        return cls(np.array([need]), np.array([cost]))

    def behind(self, need: int, kept: int, cost: int) -> "Labels":
        """These labels with a step in front of them that needs and costs something and leaves something alive."""
        moved = self.needs + kept
        start = max(int(moved.searchsorted(need, "right")) - 1, 0)  # the step's own need hides those below it
        return Labels(np.maximum(moved[start:], need), self.costs[start:] + cost)

    def need_of(self, cost: int) -> int | None:
        """What the label of this cost needs; None if there is no such label."""
        at = bisect_left(self.costs, -cost, key=operator.neg)
        return int(self.needs[at]) if at < len(self.costs) and self.costs[at] == cost else None

    def up_to(self, limit: int) -> "Labels":
        """The labels that need no more than this."""
        end = int(self.needs.searchsorted(limit, "right"))
        return Labels(self.needs[:end], self.costs[:end])


END = Labels.of(0, 0)
"Behind the last unit nothing is needed."


def best(found: Sequence[Labels]) -> Labels:
    """The labels of several sets that no other one beats in both numbers."""
    needs = np.concatenate([one.needs for one in found])
    costs = np.concatenate([one.costs for one in found])
    order = np.argsort(needs, kind="stable")  # the sets are sorted, which this kind makes use of
    needs, cheapest = needs[order], np.minimum.accumulate(costs[order])
    last_of_equal = np.append(needs[1:] != needs[:-1], True)[: len(needs)]
    needs, cheapest = needs[last_of_equal], cheapest[last_of_equal]
    falls = np.append(True, cheapest[1:] < cheapest[:-1])[: len(needs)]
    return Labels(needs[falls], cheapest[falls])


def sieved(found: Labels, rivals: Labels) -> Labels:
    """The labels without most of those that rivals beat, found block by block: far cheaper than one by one."""
    starts = np.arange(0, len(found.needs), _BLOCK)
    ends = np.minimum(starts + _BLOCK, len(found.needs)) - 1
    rival = rivals.needs.searchsorted(found.needs[starts], "right") - 1  # the cheapest that needs no more
    beaten = rival >= 0
    beaten[beaten] = rivals.costs[rival[beaten]] <= found.costs[ends[beaten]]
    stays = np.repeat(~beaten, ends - starts + 1)
    return Labels(found.needs[stays], found.costs[stays])


@dataclass(frozen=True, slots=True)
class Packing:
    """Time, recomputed units and segments as one integer that compares and adds like the three."""

    bits: int

    @classmethod
    def up_to(cls, count: int, longest_ns: int) -> "Packing":
        """Room for as many units and segments, and for as much time.

        Raises:
            PlanError: No unit, or a time that is too long.
        """
        packing = cls(count.bit_length())
        if count < 1 or packing.cost(longest_ns, count, count) > MOST:
            raise PlanError(
                "this chain of units cannot be planned",
                got=f"room for {count} units and {longest_ns} ns",
                expected="at least one unit, and times whose sum is exact in 64 bits",
                hint="cut the step into units, and give their times in nanoseconds",
            )
        return packing

    def cost(self, extra_ns: int, units: int = 0, segments: int = 0) -> int:
        """The three as one."""
        return (extra_ns << 2 * self.bits) + (units << self.bits) + segments

    def times(self, costs: Ints) -> Ints:
        """The time in costs, in ns."""
        return costs >> 2 * self.bits


@dataclass(frozen=True, slots=True, eq=False)
class Frontier:
    """The fastest plan of every budget."""

    needed_bytes: Ints
    "Budgets from which on another plan is the best, ascending."
    extra_ns: Ints
    "Time of that plan beside recomputing nothing, never ascending."
    _read: Callable[[int], tuple[Span, ...]]

    @classmethod
    def of(
        cls, labels: Labels, packing: Packing, floor_bytes: int, read: Callable[[int, int], tuple[Span, ...]]
    ) -> "Frontier":
        """The frontier of labels of whole plans, none of which needs less than a floor."""
        first = max(int(np.searchsorted(labels.needs, floor_bytes, "right")) - 1, 0)
        needs, costs = labels.needs[first:], labels.costs[first:]
        return cls(
            np.maximum(needs, floor_bytes), packing.times(costs), lambda at: read(int(needs[at]), int(costs[at]))
        )

    @property
    def points(self) -> tuple[tuple[int, int], ...]:
        """(needed_bytes, extra_ns) of every plan of the frontier, the smallest first."""
        return tuple(zip(self.needed_bytes.tolist(), self.extra_ns.tolist(), strict=True))

    def within(self, budget_bytes: int) -> Solution | None:
        """The fastest plan that fits into a budget; None if there is none."""
        index = int(np.searchsorted(self.needed_bytes, budget_bytes, "right")) - 1
        return None if index < 0 else self.solution(index)

    def solution(self, index: int) -> Solution:
        """The plan of one point, by its place in ``points``."""
        return Solution(int(self.needed_bytes[index]), int(self.extra_ns[index]), self._read(index))
