"""Plans below the least memory of one level: segments that are recomputed in segments, to any depth.

Entry point: ``frontier``, an interval dynamic program over the labels of ``solver.py``; see NOTE [Nesting].
Executed as nested ``snugfit.Segment``. One level alone is solved exactly, and faster, by ``solver.py``.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from snugfit.planning import solver
from snugfit.planning.chain import NOTHING, Span, Unit
from snugfit.planning.labels import Frontier, Ints, Labels, Packing, best
from snugfit.planning.unit_runs import forward_needs, kept_by_policy, least_kept

# NOTE [Nesting]
# 1. When the segment that ends with unit j is recomputed, its units run once more as a list of parts: a unit by an
#    option, or several as a segment of their own, which keeps its input only until backward reaches it.
# 2. Meanwhile the statics are those of j's backward, the gradient of its output included. So the ways to run
#    units i..j of such a list depend on i and j alone, not on where the segment began: one set of labels per (i, j).
# 3. A list costs the forward of each of its parts. Recomputation stops when the last tensor that backward needs is
#    there, so the last unit goes without its tail. A last part that is a segment would not run in the list at all,
#    which comes to the same as its own parts in its place: lists of a segment never end with one.
# 4. At most ``_MOST_LABELS`` labels are kept per (i, j): the least need, the least cost and an even choice between.
#    Each is a plan that needs exactly the bytes it says, and the least memory of all is always found.

_MOST_LABELS = 64
_NO_LABEL = 1 << 46
"The need in places of a table that hold no label; above all needs."


class _Intervals:
    """Tables of the labels of every interval of a chain, filled from the shortest to the longest.

    Those at ``[first, last]`` are ways to run these units again in a segment that ends with last; with the number of
    units for last they are ways to run the rest of the step from first on.
    """

    def __init__(self, units: Sequence[Unit], packing: Packing) -> None:
        self.units, self.packing, self.count = units, packing, len(units)
        self.elapsed = np.array([0, *accumulate(unit.forward_ns for unit in units)])
        self.inputs = [unit.input_bytes for unit in units]
        statics = [unit.forward_static_bytes for unit in units]
        kept = kept_by_policy(units, None)
        self.forward = [np.array(list(forward_needs(units, first, statics, kept))) for first in range(self.count)]
        self.again = [np.array(list(forward_needs(units, first, self.inputs, kept))) for first in range(self.count)]
        shape = self.count + 1, self.count + 1, _MOST_LABELS
        self.needs, self.costs = np.full(shape, _NO_LABEL), np.zeros(shape, np.int64)
        ends = np.arange(self.count)
        self.needs[ends + 1, ends, 0] = self.needs[self.count, self.count, 0] = 0  # nothing is left, nothing needed

    def labels(self, first: int, last: int) -> Labels:
        """What is known of an interval."""
        known = int(np.searchsorted(self.needs[first, last], _NO_LABEL))
        return Labels(self.needs[first, last, :known], self.costs[first, last, :known])

    def solve(self, first: int, last: int, limit: int) -> None:
        """Note the ways of an interval; those within it must be known."""
        rest = self.labels(first + 1, last)
        by_options = [rest.behind(need, kept, cost) for _, need, kept, cost in self._options(first, last)]
        found = best([*by_options, self._segments_first(first, last, limit)]).up_to(limit)
        if len(found.needs):
            places = np.unique(np.arange(_MOST_LABELS) * (len(found.needs) - 1) // (_MOST_LABELS - 1))
            self.needs[first, last, : len(places)] = found.needs[places]
            self.costs[first, last, : len(places)] = found.costs[places]

    def read(self, first: int, last: int, need: int, cost: int) -> tuple[Span, ...]:
        """The list of an interval that a label stands for."""
        if first == self.count or first > last:
            return ()
        for name, own, kept, own_cost in self._options(first, last):
            behind = self.labels(first + 1, last).need_of(cost - own_cost)
            if behind is not None and max(own, kept + behind) == need:
                return Span(first, first, name), *self.read(first + 1, last, behind, cost - own_cost)
        ends, needs, costs = self._segments(first, last)
        for end, own, own_cost in zip(ends.tolist(), needs.tolist(), costs.tolist(), strict=True):
            again, rest = self.labels(first, end), self.labels(end + 1, last)
            if not len(rest.costs):
                continue
            left = cost - own_cost - again.costs
            at = np.minimum(np.searchsorted(-rest.costs, -left), len(rest.costs) - 1)
            behind = self.inputs[first] + rest.needs[at]
            explains = (rest.costs[at] == left) & (np.maximum(np.maximum(own, again.needs), behind) == need)
            for k in np.flatnonzero(explains)[:1].tolist():
                parts = self.read(first, end, int(again.needs[k]), int(again.costs[k]))
                parts = () if all(part.option == NOTHING for part in parts) else parts
                following = self.read(end + 1, last, int(rest.needs[at[k]]), int(left[k]))
                return Span(first, end, inner=parts), *following
        raise AssertionError("every label comes from an option or a segment")

    def _options(self, first: int, last: int) -> Iterator[tuple[str, int, int, int]]:
        """Name, need, kept bytes and cost of every option that a list of the interval can begin with."""
        unit = self.units[first]
        if last == self.count:
            static, again = unit.forward_static_bytes, 0
        else:
            static = self.units[last].backward_static_bytes + unit.input_bytes
            again = unit.forward_ns - (unit.tail_ns if first == last else 0)
        for option in unit.options:
            need = max(static + option.forward_bytes, unit.backward_static_bytes + option.backward_bytes)
            cost = self.packing.cost(option.extra_ns + again, segments=int(option.name != NOTHING))
            yield option.name, need, option.kept_bytes, cost

    def _segments(self, first: int, last: int) -> tuple[Ints, Ints, Ints]:
        """Last unit, need of the forward and its cost of every segment that a list of the interval can begin with."""
        segment, ns = self.packing.cost(0, segments=1), self.packing.cost(1)
        if last == self.count:
            needs = self.forward[first][1:]
            return np.arange(first + 1, first + 1 + len(needs)), needs, np.full(len(needs), segment)
        needs = self.again[first][1 : last - first] + self.units[last].backward_static_bytes
        ends = np.arange(first + 1, first + 1 + len(needs))
        return ends, needs, (self.elapsed[ends + 1] - self.elapsed[first]) * ns + segment

    def _segments_first(self, first: int, last: int, limit: int) -> Labels:
        """The labels of lists that begin with a segment: each way to recompute it with each way to go on."""
        ends, forward, cost = (one[:, None] for one in self._segments(first, last))
        own, own_costs = np.maximum(self.needs[first, ends[:, 0]], forward), self.costs[first, ends[:, 0]] + cost
        rest = self.needs[ends[:, 0] + 1, last] + self.inputs[first]
        rest_costs = self.costs[ends[:, 0] + 1, last]
        beside_own, beside_rest = _beside(own, rest), _beside(rest, own)
        needs = np.concatenate([own, rest])
        costs = np.concatenate(
            [
                own_costs + np.take_along_axis(rest_costs, beside_own, 1),
                rest_costs + np.take_along_axis(own_costs, beside_rest, 1),
            ]
        )
        fits = (np.concatenate([beside_own, beside_rest]) >= 0) & (needs <= limit)
        return Labels(needs[fits], costs[fits])


def frontier(units: Sequence[Unit], *, floor_bytes: int = 0, budget_bytes: int | None = None) -> Frontier:
    """Find fast ways to run a chain of units in little memory, segments within segments among them.

    Args:
        units: The chain, in the order of the forward.
        floor_bytes: What the step needs however the units run, such as the optimizer's update.
        budget_bytes: Leaves out what needs more than this; None: more than the least memory of one level.

    Returns:
        Begins with the plan of least memory; NOTE [Nesting], 4 says what lies between it and the fastest.

    Raises:
        PlanError: No unit, or times that are too long for exact integers.
    """
    count = len(units)
    longest = sum(unit.forward_ns + max(option.extra_ns for option in unit.options) for unit in units)
    intervals = _Intervals(units, Packing.up_to(2 * count, count * longest))
    limit = solver.least_bytes(units, floor_bytes=floor_bytes) if budget_bytes is None else budget_bytes
    kept_before = least_kept(units)
    joined = 0  # where the stretch of units began that a segment may run through
    for last, unit in enumerate(units):
        for first in reversed(range(joined, last + 1)):
            intervals.solve(first, last, limit - kept_before[first])
        joined = joined if unit.joins_next else last + 1
    for first in reversed(range(count)):
        intervals.solve(first, count, limit - kept_before[first])
    whole = intervals.labels(0, count).up_to(limit if floor_bytes <= limit else -1)
    return Frontier.of(whole, intervals.packing, floor_bytes, lambda need, cost: intervals.read(0, count, need, cost))


def _beside(needs: Ints, others: Ints) -> Ints:
    """Row by row, where in the other row the last need is that is no larger; -1: nowhere. Rows ascend."""
    rows = np.arange(len(needs))[:, None]
    apart = rows * 4 * _NO_LABEL  # so that one search finds its way in all rows
    found: Ints = np.searchsorted((others + apart).ravel(), (needs + apart).ravel(), "right").reshape(needs.shape)
    before: Ints = np.maximum(found - 1 - rows * others.shape[1], -1)
    return before
