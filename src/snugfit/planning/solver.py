"""Chooses how every unit of a chain runs: the fastest way for every budget, exact in bytes and nanoseconds.

Entry point: ``frontier``. One pass from the last unit to the first; see NOTE [Labels].
Plans that recompute within a recomputation are ``nested.py``'s.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from snugfit.planning.chain import NOTHING, Span, Unit
from snugfit.planning.labels import END, MOST, Frontier, Labels, Packing, best, sieved
from snugfit.planning.unit_runs import Kept, kept_by_policy, least_kept, policies_of, run_prices

# NOTE [Labels]
# 1. A label (need, cost) stands for one way to run the units from i on: the smallest budget that these units need
#    beyond the kept bytes of the units before them, and the time they take beside recomputing nothing.
# 2. A step in front of them makes (max(own need, kept + need), own cost + cost): two numbers are enough, because
#    everything that units before i do to the units from i on is to add their kept bytes.
# 3. A label that another one beats in both numbers cannot become part of a better plan, so it is dropped. Nothing
#    is rounded: the labels of unit 0 are the whole frontier of time against budget.
# 4. Ties: a cost is one integer whose high bits are the time, then the number of recomputed units, then the number
#    of segments. Such costs add up, and comparing them compares the three in this order.
# 5. No label remembers where it came from: a plan is read off by asking, unit by unit, which step explains its label.


class Step(NamedTuple):
    """One transition of the chain: a unit by one of its options, or several units as one segment."""

    span: Span
    need: int
    kept: int
    cost: int


def frontier(
    units: Sequence[Unit], *, floor_bytes: int = 0, runs: bool = True, budget_bytes: int | None = None
) -> Frontier:
    """Find the fastest way to run a chain of units for every budget at once.

    Among plans of equal time the one with fewer recomputed units is taken, then the one with fewer segments.

    Args:
        units: The chain, in the order of the forward.
        floor_bytes: What the step needs however the units run, such as the optimizer's update.
        runs: Whether consecutive units may be recomputed as one segment.
        budget_bytes: Leaves out what needs more than this; the part below is the same as without.

    Raises:
        PlanError: No unit, or times that are too long for exact integers.
    """
    longest = sum(unit.forward_ns + max(option.extra_ns for option in unit.options) for unit in units)
    packing = Packing.up_to(len(units), longest)
    limit = MOST if budget_bytes is None else budget_bytes
    kept_before = least_kept(units, runs=runs) if budget_bytes is not None else [0] * len(units)
    limits = [limit - kept for kept in kept_before]
    steps = _steps(units, packing, limits, runs=runs)
    labels = [END] * (len(units) + 1)
    for i in reversed(range(len(units))):
        found = [(step, labels[step.span.last + 1].behind(step.need, step.kept, step.cost)) for step in steps[i]]
        by_options = best([ways for step, ways in found if step.span.option])
        by_runs = [sieved(ways, by_options) for step, ways in found if not step.span.option]
        labels[i] = best([by_options, *by_runs]).up_to(limits[i])
    whole = labels[0].up_to(limit if floor_bytes <= limit else -1)
    return Frontier.of(whole, packing, floor_bytes, lambda need, cost: tuple(_spans(need, cost, steps, labels)))


def least_bytes(units: Sequence[Unit], *, floor_bytes: int = 0, runs: bool = True) -> int:
    """The smallest budget into which a chain of units fits: where its frontier begins."""
    least = [0] * (len(units) + 1)
    steps = _steps(units, Packing(0), [MOST] * len(units), runs=runs)
    for i in reversed(range(len(units))):
        least[i] = min(max(step.need, step.kept + least[step.span.last + 1]) for step in steps[i])
    return max(least[0], floor_bytes)


def _steps(
    units: Sequence[Unit], packing: Packing, limits: Sequence[int], *, runs: bool
) -> tuple[tuple[Step, ...], ...]:
    """Every way to go on from each unit: its options, then the runs of two and more units that begin with it.

    Args:
        units: The chain.
        packing: Of its costs.
        limits: By unit: runs that begin with it and need more are left out.
        runs: Whether there are any.
    """
    policies = {policy for unit in units for policy in policies_of(unit)} if runs else ()
    kept = {policy: kept_by_policy(units, policy) for policy in policies}
    return tuple(
        (*_by_options(unit, i, packing), *_by_runs(units, i, packing, kept, limits[i])) for i, unit in enumerate(units)
    )


def _by_options(unit: Unit, i: int, packing: Packing) -> Iterator[Step]:
    for option in unit.options:
        need = max(unit.forward_static_bytes + option.forward_bytes, unit.backward_static_bytes + option.backward_bytes)
        recomputed = int(option.name != NOTHING)
        cost = packing.cost(option.extra_ns, recomputed, recomputed)
        yield Step(Span(i, i, option.name), need, option.kept_bytes, cost)


def _by_runs(
    units: Sequence[Unit], i: int, packing: Packing, kept: Mapping[str | None, Kept], limit: int
) -> Iterator[Step]:
    for policy in policies_of(units[i]) if kept else ():
        for last, price in enumerate(run_prices(units, i, kept[policy], limit), start=i + 1):
            if price.need_bytes <= limit:
                cost = packing.cost(price.extra_ns, last - i + 1, 1)
                yield Step(Span(i, last, policy=policy), price.need_bytes, price.kept_bytes, cost)


def _spans(need: int, cost: int, steps: Sequence[Sequence[Step]], labels: Sequence[Labels]) -> Iterator[Span]:
    """How the units run, by the label of the whole chain: one step after the other explains what is left of it."""
    unit = 0
    while unit < len(steps):
        for step in steps[unit]:
            behind = labels[step.span.last + 1].need_of(cost - step.cost)
            if behind is not None and max(step.need, step.kept + behind) == need:
                break
        else:
            raise AssertionError("every label comes from a step")
        yield step.span
        need, cost, unit = behind, cost - step.cost, step.span.last + 1
