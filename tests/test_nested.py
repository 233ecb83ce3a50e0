"""Segments within segments: below the least memory of one level, plans that need and take what they say."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chains import even_chain, every_nested_plan, pareto, random_chain, simulate
from snugfit.planning import nested, solver

CHAINS = st.builds(
    random_chain,
    st.integers(0, 10**6),
    units=st.integers(1, 14),
    options=st.integers(1, 3),
    most=st.sampled_from([3, 40, 10**9]),
    borders=st.sampled_from([0.0, 0.8, 1.0]),
)


@pytest.mark.parametrize("seed", range(20))
def test_the_frontier_is_that_of_all_trees_named_one_by_one(seed):
    units = random_chain(seed, units=4 + seed % 2, options=2, borders=0.9)
    everything = [simulate(units, plan) for plan in every_nested_plan(units)]
    assert pareto(nested.frontier(units, budget_bytes=10**6).points) == pareto(everything)


@settings(max_examples=30)
@given(CHAINS, st.integers(0, 100))
def test_every_nested_plan_needs_and_takes_what_it_says(units, floor):
    found = nested.frontier(units, floor_bytes=floor)
    assert len(found.points) > 0
    for index in range(0, len(found.points), 5):
        solution = found.solution(index)
        assert (solution.needed_bytes, solution.extra_ns) == simulate(units, solution.choices, floor)
        assert [span.first for span in solution.choices] == [0, *(span.last + 1 for span in solution.choices[:-1])]


@settings(max_examples=30)
@given(CHAINS)
def test_more_memory_is_never_slower_and_less_than_one_level_needs_is_enough(units):
    found = nested.frontier(units)
    assert list(found.points) == sorted(found.points)
    assert found.extra_ns.tolist() == sorted(found.extra_ns.tolist(), reverse=True)
    assert found.points[0][0] <= solver.least_bytes(units) >= found.points[-1][0]


def test_the_least_memory_of_an_even_chain_does_not_grow_with_its_depth():
    """One boundary and one unit's tensors are enough, if every backward runs the forward again from the start."""
    for units in (3, 12, 40):
        found = nested.frontier(even_chain(units))
        assert found.points[0] == (1 + 8, units * (units - 1) // 2)


def test_a_budget_below_the_least_memory_leaves_nothing():
    assert nested.frontier(even_chain(6), budget_bytes=8).points == ()
    assert nested.frontier(even_chain(6), floor_bytes=20, budget_bytes=19).points == ()


def test_segments_lie_within_segments():
    deepest = nested.frontier(even_chain(4)).solution(0).choices
    assert deepest[0].first == 0
    assert deepest[0].last == 2
    assert deepest[0].inner[0].last == 1
