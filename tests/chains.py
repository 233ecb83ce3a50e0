"""Chains of units for the tests of the solvers, and slow, obvious ways to find what they must find.

``simulate`` walks a plan forward and backward with a list of what is alive; ``every_plan`` and ``every_nested_plan``
name all plans there are; ``least_time`` and ``least_budget`` ask HiGHS. None of them knows of labels or dominance.
"""

import random

import numpy as np

from snugfit.planning.chain import NOTHING, KeptInRun, Option, Span, Unit


def random_chain(seed, *, units=6, options=3, most=40, borders=0.8):
    """Sizes and times below ``most``, so that ties are frequent."""
    draw = random.Random(seed)

    def option(name, kept, extra):
        return Option(
            name=name,
            kept_bytes=kept,
            forward_bytes=kept + draw.randrange(most),
            backward_bytes=kept + draw.randrange(most),
            extra_ns=extra,
        )

    def unit():
        kept, forward_ns = draw.randrange(most), draw.randrange(1, most)
        others = [option(f"way-{k}", draw.randrange(kept + 1), draw.randrange(most)) for k in range(options - 1)]
        return Unit(
            options=(option(NOTHING, kept, 0), *others),
            input_bytes=draw.randrange(max(most // 4, 1)),
            forward_static_bytes=draw.randrange(most),
            backward_static_bytes=draw.randrange(most),
            forward_ns=forward_ns,
            joins_next=draw.random() < borders,
            tail_ns=draw.randrange(forward_ns),
            in_runs=tuple(
                KeptInRun(policy, draw.randrange(most), draw.randrange(most), draw.randrange(most))
                for policy in ("some", "more")
                if draw.random() < borders
            ),
        )

    return tuple(unit() for _ in range(units))


def even_chain(units, *, kept=8, boundary=1):
    """The same unit again and again: it saves ``kept``, of which its input is ``boundary``; its forward takes 1 ns."""
    plain = Option(name=NOTHING, kept_bytes=kept, forward_bytes=0, backward_bytes=kept, extra_ns=0)
    full = Option(name="full", kept_bytes=boundary, forward_bytes=0, backward_bytes=kept, extra_ns=1)
    unit = Unit(
        options=(plain, full),
        input_bytes=boundary,
        forward_static_bytes=0,
        backward_static_bytes=0,
        forward_ns=1,
        joins_next=True,
    )
    return (unit,) * units


def simulate(units, spans, floor_bytes=0):
    """(peak, extra time) of a plan, by running it: forward, then backward, with all that is kept in a list."""
    held, peak, extra = [], floor_bytes, 0

    def option_of(span):
        return next(one for one in units[span.first].options if one.name == span.option)

    def result_of(span, k):
        return next(way for way in units[k].in_runs if way.policy == span.policy)

    def note(size):
        nonlocal peak
        peak = max(peak, sum(held) + size)

    def forward(span, statics):
        unit = units[span.first]
        if span.option is not None:
            note(statics[span.first] + option_of(span).forward_bytes)
            held.append(option_of(span).kept_bytes)
            return
        note(statics[span.first] + unit.plain.forward_bytes)
        held.append(unit.input_bytes)
        for k in range(span.first, span.last + 1):
            if k > span.first:
                note(statics[k] + units[k].plain.forward_bytes)
            if span.policy:
                held.append(result_of(span, k).kept_bytes)

    def backward(span):
        nonlocal extra
        results = [held.pop() for _ in range(span.first, span.last + 1) if span.policy]
        held.pop()
        if span.option is not None:
            note(units[span.first].backward_static_bytes + option_of(span).backward_bytes)
            extra += option_of(span).extra_ns
            return
        inner = span.inner or [Span(k, k, NOTHING) for k in range(span.first, span.last + 1)]
        for part in inner:  # what is kept of the parts that are still to be repeated is there, this one's included
            more = sum(results)
            forward(part, [units[span.last].backward_static_bytes + unit.input_bytes + more for unit in units])
            results = results[:-1]
        if span.policy:
            extra += sum(result_of(span, k).again_ns for k in range(span.first, span.last))
            extra += result_of(span, span.last).last_ns
        else:
            extra += sum(unit.forward_ns for unit in units[span.first : span.last + 1]) - units[span.last].tail_ns
        for part in reversed(inner):
            backward(part)

    for span in spans:
        forward(span, [unit.forward_static_bytes for unit in units])
    for span in reversed(spans):
        backward(span)
    return peak, extra


def steps_from(units, first, *, runs=True, policies=True):
    """Every span that can begin with a unit."""
    yield from (Span(first, first, option.name) for option in units[first].options)
    for policy in (None, *(way.policy for way in units[first].in_runs if policies)):
        last = first
        while runs and units[last].joins_next and last + 1 < len(units):
            last += 1
            if policy and all(way.policy != policy for way in units[last].in_runs):
                break
            yield Span(first, last, policy=policy)


def every_plan(units, first=0, *, runs=True):
    if first == len(units):
        yield ()
        return
    for span in steps_from(units, first, runs=runs):
        yield from ((span, *rest) for rest in every_plan(units, span.last + 1, runs=runs))


def every_nested_plan(units, first=0, last=None):
    """Also those whose segments are recomputed in segments; within one, only another ends before its last unit."""
    end = len(units) if last is None else last + 1
    if first == end:
        yield ()
        return
    for span in steps_from(units, first, policies=False):
        if span.last >= end or (span.option is None and last is not None and span.last == last):
            continue
        ways = [span] if span.option else [Span(first, span.last, None, inner) for inner in _inner(units, span)]
        for rest in every_nested_plan(units, span.last + 1, last):
            yield from ((way, *rest) for way in ways)


def _inner(units, span):
    return list(every_nested_plan(units, span.first, span.last))


def outcomes(units):
    """(peak, extra time) of every plan of one level, as two arrays: for chains with too many plans to name."""
    kept, peaks, extras = ({0: np.zeros(1, np.int64)} for _ in range(3))
    for first in range(len(units)):
        for span in steps_from(units, first):
            peak, extra = simulate(units, [span])
            own = kept_by(units, span)
            after = span.last + 1
            for table, values in (
                (kept, kept[first] + own),
                (peaks, np.maximum(peaks[first], kept[first] + peak)),
                (extras, extras[first] + extra),
            ):
                table[after] = np.concatenate([table.get(after, values[:0]), values])
    return peaks[len(units)], extras[len(units)]


def kept_by(units, span):
    """What a span keeps alive until its backward."""
    first, *_ = inside = units[span.first : span.last + 1]
    if span.option:
        return next(option.kept_bytes for option in first.options if option.name == span.option)
    return first.input_bytes + sum(
        way.kept_bytes for unit in inside for way in unit.in_runs if span.policy and way.policy == span.policy
    )


def pareto(pairs):
    """The pairs that no other one beats, the smallest need first."""
    kept = []
    for need, extra in sorted(set(pairs)):
        if not kept or extra < kept[-1][1]:
            kept.append((need, extra))
    return kept


def least_time(units, budget_bytes):
    """The least extra time of any plan of one level within a budget, by HiGHS; None: no plan fits."""
    return _solved(units, budget_bytes=budget_bytes)


def least_budget(units, extra_ns):
    """The least budget of any plan of one level within a time, by HiGHS; None: no plan is as fast."""
    return _solved(units, extra_ns=extra_ns)


def _solved(units, *, budget_bytes=None, extra_ns=None):
    """One binary per span, a path of spans through the chain, and one row per unit: what is kept and needed there."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    spans = [span for first in range(len(units)) for span in steps_from(units, first)]
    prices = [simulate(units, [span]) for span in spans]
    path, need = np.zeros((len(units), len(spans) + 1)), np.zeros((len(units), len(spans) + 1))
    for k, (span, (peak, _)) in enumerate(zip(spans, prices, strict=True)):
        path[span.first : span.last + 1, k] = 1
        need[span.first, k] += peak
        need[span.last + 1 :, k] += kept_by(units, span)
    need[:, -1] = -1  # the last variable is the budget
    times = np.array([*(extra for _, extra in prices), 0])
    budget = np.eye(len(spans) + 1)[-1]
    highest = np.inf if budget_bytes is None else budget_bytes
    rows = [LinearConstraint(path, 1, 1), LinearConstraint(need, -np.inf, 0), LinearConstraint(budget, 0, highest)]
    if extra_ns is not None:
        rows.append(LinearConstraint(times, 0, extra_ns))
    bounds = Bounds(np.zeros(len(spans) + 1), np.array([*(1 for _ in spans), np.inf]))
    integral = np.array([*(1 for _ in spans), 0])
    cost = times if extra_ns is None else budget
    found = milp(cost, constraints=rows, bounds=bounds, integrality=integral, options={"mip_rel_gap": 0})
    return None if found.x is None else round(found.fun)
