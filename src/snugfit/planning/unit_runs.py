"""What it costs to recompute consecutive units of a chain as one segment.

Entry point: ``run_prices``. A run keeps the input of its first unit only; in backward its units run once more and
keep everything, beside what is alive during the backward of the last one. Segments within segments are ``nested.py``'s.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from snugfit.planning.chain import Unit


@dataclass(frozen=True, slots=True)
class RunPrice:
    """What a run needs and costs by itself; what it keeps is its input."""

    need_bytes: int
    "Absolute, beyond the kept bytes of the units before the run."
    extra_ns: int


def run_prices(units: Sequence[Unit], first: int) -> Iterator[RunPrice]:
    """Prices of the runs of two, three, ... units that begin with a unit, as far as borders can be crossed."""
    again = backward_need = kept = elapsed = 0
    statics = [unit.forward_static_bytes for unit in units]
    for last, forward_need in enumerate(forward_needs(units, first, statics), start=first):
        unit, plain = units[last], units[last].plain
        again = max(again, kept + unit.input_bytes + plain.forward_bytes)
        backward_need = max(backward_need, unit.backward_static_bytes + kept + plain.backward_bytes)
        if last > first:
            running_again = unit.backward_static_bytes + again
            yield RunPrice(max(forward_need, backward_need, running_again), elapsed + unit.forward_ns - unit.tail_ns)
        kept, elapsed = kept + plain.kept_bytes, elapsed + unit.forward_ns


def forward_needs(units: Sequence[Unit], first: int, statics: Sequence[int]) -> Iterator[int]:
    """Needs of a forward that keeps nothing but the first input: over one, two, ... units from the first on.

    Args:
        units: The chain.
        first: Where the forward begins.
        statics: What else is alive while each unit of the chain runs, its input included.
    """
    need = kept = 0
    for unit, static in zip(units[first:], statics[first:], strict=True):
        need = max(need, static + kept + unit.plain.forward_bytes)
        yield need
        if not unit.joins_next:
            return
        kept = units[first].input_bytes


def least_kept(units: Sequence[Unit], *, runs: bool = True) -> list[int]:
    """The fewest bytes that the units before each one, and at last before the end, can keep alive."""
    least = [0]
    joined = 0  # where the stretch of units began that a segment may run through
    for last, unit in enumerate(units):
        by_option = least[last] + min(option.kept_bytes for option in unit.options)
        by_run = [least[first] + units[first].input_bytes for first in range(joined, last) if runs]
        least.append(min([by_option, *by_run]))
        joined = joined if unit.joins_next else last + 1
    return least
