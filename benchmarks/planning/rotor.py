"""A rotor-style plan of a chain: the dynamic program over (memory slots, first, last) with persistent checkpoints.

Entry point: ``rotor``. Written from the recursion of Beaumont et al. (2019): keep a stage's tensors, or keep its input
only, run on to some later stage and come back; memory in equal slots, rounded up, as its implementations do.
"""

from collections.abc import Sequence
from functools import cache
from math import ceil, inf

from snugfit.planning.chain import NOTHING, Span, Unit

SLOTS = 500


def rotor(units: Sequence[Unit], budget_bytes: int) -> tuple[Span, ...] | None:
    """Its plan within a budget; None: nothing fits."""
    slot = budget_bytes / SLOTS
    elapsed = [0]
    for unit in units:
        elapsed.append(elapsed[-1] + unit.forward_ns)

    def slots(size: int) -> int:
        return ceil(size / slot)

    @cache
    def solve(first: int, last: int, left: int, outer: int) -> tuple[float, int]:
        """(extra time, where the segment that begins the list ends; first: it keeps its tensors)."""
        if first > last:
            return 0, first
        unit, plain = units[first], units[first].plain
        static = unit.forward_static_bytes if outer < 0 else units[outer].backward_static_bytes + unit.input_bytes
        best, choice = inf, first
        need = max(static + plain.forward_bytes, unit.backward_static_bytes + plain.backward_bytes)
        if slots(need) <= left:
            best = solve(first + 1, last, left - slots(plain.kept_bytes), outer)[0]
        for end in range(first, last if outer >= 0 else last + 1):
            if end > first and not units[end - 1].joins_next:
                break
            if not unit.joins_next and end == first:
                continue
            again = elapsed[end + 1] - elapsed[first] - units[end].tail_ns
            behind = solve(end + 1, last, left - slots(unit.input_bytes), outer)[0]
            if again + behind < best:
                total = again + behind + solve(first, end, left, end)[0]
                if total < best:
                    best, choice = total, -end - 1
        return best, choice

    def read(first: int, last: int, left: int, outer: int) -> tuple[Span, ...]:
        if first > last:
            return ()
        choice = solve(first, last, left, outer)[1]
        if choice >= 0:
            kept = slots(units[first].plain.kept_bytes)
            return Span(first, first, NOTHING), *read(first + 1, last, left - kept, outer)
        end = -choice - 1
        rest = read(end + 1, last, left - slots(units[first].input_bytes), outer)
        return Span(first, end, None, read(first, end, left, end)), *rest

    if solve(0, len(units) - 1, SLOTS, -1)[0] == inf:
        return None
    return read(0, len(units) - 1, SLOTS, -1)
