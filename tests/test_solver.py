"""The solver finds the fastest plan of every budget, to the byte and to the nanosecond."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chains import even_chain, every_plan, least_budget, least_time, outcomes, pareto, random_chain, simulate
from snugfit import PlanError
from snugfit.planning import solver
from snugfit.planning.chain import NOTHING, Option, Span, Unit
from snugfit.planning.unit_runs import kept_by_policy, policies_of, run_prices

CHAINS = st.builds(
    random_chain,
    st.integers(0, 10**6),
    units=st.integers(1, 12),
    options=st.integers(1, 5),
    most=st.sampled_from([3, 40, 10**9]),
    borders=st.sampled_from([0.0, 0.8, 1.0]),
)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("runs", [True, False])
def test_the_frontier_is_that_of_all_plans_named_one_by_one(seed, runs):
    units = random_chain(seed, units=5, most=(4, 40)[seed % 2])
    everything = [simulate(units, plan) for plan in every_plan(units, runs=runs)]
    assert pareto(solver.frontier(units, runs=runs).points) == pareto(everything)


@pytest.mark.parametrize("seed", range(8))
def test_the_frontier_of_twelve_units_is_that_of_all_plans(seed):
    units = random_chain(seed, units=12, options=2)
    peaks, extras = outcomes(units)
    order = np.lexsort((extras, peaks))
    peaks, extras = peaks[order], extras[order]
    first = np.append(True, extras[1:] < np.minimum.accumulate(extras)[:-1])
    assert pareto(solver.frontier(units).points) == list(
        zip(peaks[first].tolist(), extras[first].tolist(), strict=True)
    )


@pytest.mark.parametrize("seed", range(8))
def test_highs_finds_neither_a_faster_nor_a_smaller_plan(seed):
    units = random_chain(seed, units=16, options=4, most=1000)
    points = pareto(solver.frontier(units).points)
    assert least_time(units, points[0][0] - 1) is None
    for needed, extra in points[:: max(len(points) // 3, 1)]:
        assert least_time(units, needed) == extra
        assert least_budget(units, extra) == needed


@given(CHAINS, st.integers(0, 100))
def test_every_plan_needs_and_takes_what_it_says(units, floor):
    found = solver.frontier(units, floor_bytes=floor)
    for index in range(0, len(found.points), max(len(found.points) // 10, 1)):
        solution = found.solution(index)
        assert (solution.needed_bytes, solution.extra_ns) == simulate(units, solution.choices, floor)
        assert [span.first for span in solution.choices] == [0, *(span.last + 1 for span in solution.choices[:-1])]
        assert solution.choices[-1].last == len(units) - 1


@given(CHAINS)
def test_a_larger_budget_is_never_slower(units):
    found = solver.frontier(units)
    needs, times = zip(*found.points, strict=True)
    assert all(a < b for a, b in itertools.pairwise(needs))
    assert all(a >= b for a, b in itertools.pairwise(times))
    assert times[-1] == min(0, *times)
    assert found.within(needs[0] - 1) is None
    for need, time in found.points:
        assert found.within(need).extra_ns == time


@given(CHAINS, st.floats(0, 1))
def test_a_budget_leaves_the_part_of_the_frontier_below_it_as_it_is(units, share):
    points = solver.frontier(units).points
    budget = round(points[0][0] - 1 + share * (points[-1][0] - points[0][0] + 1))
    below = tuple(point for point in points if point[0] <= budget)
    assert solver.frontier(units, budget_bytes=budget).points == below


@given(CHAINS)
def test_the_least_bytes_are_where_the_frontier_begins(units):
    assert solver.least_bytes(units) == solver.frontier(units).points[0][0]
    assert solver.least_bytes(units, runs=False) == solver.frontier(units, runs=False).points[0][0]
    assert solver.least_bytes(units, floor_bytes=10**12) == 10**12


def test_a_floor_above_the_budget_leaves_nothing():
    units = even_chain(4)
    assert solver.frontier(units, floor_bytes=100, budget_bytes=99).points == ()
    assert solver.frontier(units, floor_bytes=100, budget_bytes=100).points == ((100, 0),)


def test_runs_of_units_reach_below_every_boundary_kept():
    """48 units that save 8, boundary 1: unit by unit 47 + 8; in runs, those with m bytes left hold m // 8 units."""
    units = even_chain(48)
    assert solver.least_bytes(units, runs=False) == 47 + 8
    budget = next(b for b in itertools.count() if sum((b - kept) // 8 for kept in range(b)) >= 48)
    assert solver.least_bytes(units) == budget == 31


def test_a_run_does_not_cross_a_border_that_does_not_join():
    units = random_chain(3, units=8, borders=0.0)
    spans = [
        span for k in range(len(solver.frontier(units).points)) for span in solver.frontier(units).solution(k).choices
    ]
    assert all(span.option for span in spans)


def option(name, kept, extra):
    return Option(name=name, kept_bytes=kept, forward_bytes=0, backward_bytes=kept, extra_ns=extra)


def unit(*options, joins_next=True):
    return Unit(
        options=options,
        input_bytes=1,
        forward_static_bytes=0,
        backward_static_bytes=0,
        forward_ns=5,
        joins_next=joins_next,
    )


def test_of_equally_fast_plans_the_one_that_recomputes_fewer_units_is_taken():
    free = unit(option(NOTHING, 10, 0), option("free", 10, 0))
    assert solver.frontier([free]).within(10).choices == (Span(0, 0, NOTHING),)
    small = unit(option(NOTHING, 10, 0), option("less", 5, 3), joins_next=False)
    large = unit(option(NOTHING, 20, 0), option("less", 10, 6), joins_next=False)
    found = solver.frontier([large, small, small]).within(30)  # 10 bytes less: the large one, or both small ones
    assert found.extra_ns == 6
    assert [span.option for span in found.choices] == ["less", NOTHING, NOTHING]


def test_a_chain_without_units_is_refused():
    with pytest.raises(PlanError, match="cannot be planned"):
        solver.frontier([])


def test_times_that_do_not_fit_into_exact_integers_are_refused():
    with pytest.raises(PlanError, match="cannot be planned"):
        solver.frontier([unit(option(NOTHING, 1, 0), option("slow", 0, 2**62))])


@pytest.mark.parametrize("seed", range(20))
def test_prices_of_runs_up_to_a_limit_are_the_first_of_all_and_leave_out_none_within_it(seed):
    units = random_chain(seed, units=8, borders=1.0)
    for first in range(len(units)):
        for policy in policies_of(units[first]):
            kept = kept_by_policy(units, policy)
            every = list(run_prices(units, first, kept))
            for limit in {price.need_bytes + more for price in every for more in (-1, 0)}:
                found = list(run_prices(units, first, kept, limit))
                assert found == every[: len(found)]
                assert all(price.need_bytes > limit for price in every[len(found) :])
