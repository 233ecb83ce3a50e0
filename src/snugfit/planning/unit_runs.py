"""What it costs to recompute consecutive units of a chain as one segment.

Entry point: ``run_prices``, of what ``kept_by_policy`` gives. A run keeps the input of its first unit, and the results
that its policy names; in backward its units run once more and keep everything, beside what is alive during the backward
of the last one. Segments within segments are ``nested.py``'s.

NOTE [Results that a run keeps]
1. They stay from the forward of their unit to its repetition, in which they are handed out: a unit that is repeated has
   the results of the units behind it beside it, and what those before it save.
2. The operations that made them are spared. In the last unit nothing is repeated behind the last tensor that backward
   needs, where one of them may lie: what a unit runs again at the end of a run is a number of its own.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from snugfit.planning.chain import KeptInRun, Unit
from snugfit.planning.labels import MOST


class RunPrice(NamedTuple):
    """What a run needs and costs by itself."""

    need_bytes: int
    "Absolute, beyond the kept bytes of the units before the run."
    kept_bytes: int
    "Its input, and the results that its policy keeps."
    extra_ns: int


Kept: TypeAlias = Sequence[KeptInRun | None]
"What each unit of a chain keeps in runs of a policy; None where it has none of that name."


def run_prices(units: Sequence[Unit], first: int, kept: Kept, limit: int = MOST) -> Iterator[RunPrice]:
    """Prices of the runs of two, three, ... units that begin with a unit, as far as borders can be crossed.

    Args:
        units: The chain.
        first: Where the runs begin.
        kept: What ``kept_by_policy`` gave for the policy of their segments.
        limit: The runs end where all longer ones need more than this.
    """
    again = backward_need = saved = elapsed = results = 0
    statics = [unit.forward_static_bytes for unit in units]
    for last, forward_need in enumerate(forward_needs(units, first, statics, kept), start=first):
        unit, plain, own = units[last], units[last].plain, kept[last]
        assert own is not None, "the forward ends there"
        # See NOTE [Results that a run keeps], 1.
        again = max(again + own.kept_bytes, saved + unit.input_bytes + plain.forward_bytes + own.kept_bytes)
        backward_need = max(backward_need, unit.backward_static_bytes + saved + plain.backward_bytes)
        results += own.kept_bytes
        if max(forward_need, backward_need) > limit:  # neither is less in a longer run
            return
        if last > first:
            need = max(forward_need, backward_need, unit.backward_static_bytes + again)
            yield RunPrice(need, units[first].input_bytes + results, elapsed + own.last_ns)
        saved, elapsed = saved + plain.kept_bytes, elapsed + own.again_ns


def forward_needs(units: Sequence[Unit], first: int, statics: Sequence[int], kept: Kept) -> Iterator[int]:
    """Needs of the forward of a run: over one, two, ... units from the first on.

    Args:
        units: The chain.
        first: Where the forward begins.
        statics: What else is alive while each unit of the chain runs, its input included.
        kept: See ``run_prices``.
    """
    need = before = 0
    for last in range(first, len(units)):
        unit, own = units[last], kept[last]
        if own is None:
            return
        need = max(need, statics[last] + before + unit.plain.forward_bytes)
        yield need
        if not unit.joins_next:
            return
        before = max(before, units[first].input_bytes) + own.kept_bytes


def policies_of(unit: Unit) -> tuple[str | None, ...]:
    """The policies of runs that may begin with a unit, that of keeping the input alone first."""
    return None, *(way.policy for way in unit.in_runs)


def kept_by_policy(units: Sequence[Unit], policy: str | None) -> Kept:
    """What each unit keeps in a run of a policy; without one nothing."""
    if policy is None:
        return [KeptInRun("", 0, unit.forward_ns, unit.forward_ns - unit.tail_ns) for unit in units]
    return [next((way for way in unit.in_runs if way.policy == policy), None) for unit in units]


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
