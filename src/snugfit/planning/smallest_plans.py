"""When nothing fits: the plans that need least, and the error about the least of them.

Entry points: ``without_plan``, and ``of_large_weights`` where weights, gradients and state of the optimizer alone are
too large. What is said is ``explain``'s, and what else could be done ``ways_out``'s.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product, zip_longest
from typing import TypeAlias

from snugfit.errors import BatchError, InfeasibleError, PlanError, UnsupportedError
from snugfit.planning import explain, ways_out
from snugfit.planning.asides import Asides
from snugfit.planning.joint import JointSearch
from snugfit.planning.traced_plans import TracedPlan
from snugfit.planning.traces import Traces
from snugfit.planning.ways_out import WayOut
from snugfit.plans import Plan, Segment

_NEAR = 2
"Times the smallest plan that a whole batch may need and still be smaller in another form."
_LITTLE = 0.05
"Share of weights, gradients and state up to which what a sample saves may be less than what recomputing it takes."

_Forms: TypeAlias = Sequence[tuple[Segment, ...]]


def without_plan(joint: JointSearch, traced: Traces, allow: Collection[str]) -> InfeasibleError:
    """The error, about what needed least of all that was traced.

    Args:
        joint: The job and its budget.
        traced: Every plan that was traced.
        allow: Changes of the job that are wanted; none: all are worked out.
    """
    least = min(traced.values(), key=lambda one: one.memory.needed_bytes)
    traced.progress("ways out")
    return _error(joint, least, _ways(joint, least.plan, allow, lambda: least.step_time_s))


def of_large_weights(
    joint: JointSearch, asides: Asides, families: Sequence[Plan], allow: Collection[str]
) -> InfeasibleError:
    """The error where what is there in every plan does not fit.

    If a change is allowed that does and that snugfit makes, nobody asks what would have needed least: only what most
    likely does is traced.

    Args:
        joint: The job, its budget, names of the units, sizes, and what is given.
        asides: With every plan that was traced, the whole batch of each family among them.
        families: The whole batch of each.
        allow: Changes of the job that are wanted.
    """
    made = [name for name in allow if name in ways_out.RUN]
    if made:
        asides.traced.progress("ways out")
        likely = _likely(joint, min((asides.traced[like] for like in families), key=_in_every_plan).plan)
        begun = asides.begin(lambda: asides.traced.of(likely))
        with suppress(PlanError, UnsupportedError, BatchError):  # it does not run, as those below may
            ways = _ways(joint, likely, made, lambda: asides.join(begun).step_time_s)
            if any(way.fits and way.executed_by_snugfit for way in ways):
                return _error(joint, asides.traced[likely], ways)
    _trace_smallest(joint, asides, families)
    return without_plan(joint, asides.traced, allow)


def _ways(joint: JointSearch, plan: Plan, allow: Collection[str], seconds: Callable[[], float]) -> tuple[WayOut, ...]:
    return ways_out.ways_out(
        joint.job,
        plan,
        joint.device,
        joint.budget_bytes,
        allow=allow or None,
        seconds=seconds,
        model=joint.model,
        is_planned_next=bool(allow),
        runs_in_half=not joint.left_out or plan.precision != "32-true",
        is_precision_given="precision" in joint.fixed,
    )


def _error(joint: JointSearch, least: TracedPlan, ways: Sequence[WayOut]) -> InfeasibleError:
    return explain.infeasible(least.plan, least.memory, joint, ways)


def _likely(joint: JointSearch, like: Plan) -> Plan:
    """What most likely needs least of a family: the smallest micro-batches, with blocks recomputed."""
    given = "optimizer_impl" in joint.fixed
    return replace(
        like,
        micro_batch_size=joint.sizes("")[-1],
        recompute=tuple(Segment((name,)) for name in joint.names) or like.recompute,
        optimizer_impl=like.optimizer_impl if given else "fused",
    )


def _trace_smallest(joint: JointSearch, asides: Asides, families: Sequence[Plan]) -> None:
    """Trace what may need least: the smallest micro-batches, and the whole batch, plainly or with blocks recomputed.

    Args:
        joint: Names of the units, sizes, and what is given.
        asides: With every plan that was traced, the whole batch of each family among them.
        families: The whole batch of each.
    """
    blocks = tuple(Segment((name,)) for name in joint.names)
    chosen: list[tuple[Plan, _Forms]] = []
    for like in families:
        forms = tuple(dict.fromkeys((blocks, like.recompute)))
        saves_little = _saved_by_a_sample(asides.traced[like]) < _LITTLE * asides.traced[like].memory.static_bytes
        chosen += [(like, (form,)) for form in forms] if saves_little else [(like, forms)]

    def least(like: Plan, forms: _Forms, sizes: Sequence[int]) -> Callable[[], TracedPlan]:
        return partial(_of_least_update, joint, asides, like, forms, sizes)

    _trace_all(asides, [least(like, forms, joint.sizes("")[::-1]) for like, forms in chosen])
    # In a single micro-batch no gradients lie beside forward.
    limit = _NEAR * min(one.memory.needed_bytes for one in asides.traced.values())
    near = [(like, forms) for like, forms in chosen if asides.traced[like].memory.needed_bytes < limit]
    _trace_all(asides, [least(like, forms, (like.micro_batch_size,)) for like, forms in near])


def _in_every_plan(whole: TracedPlan) -> int:
    """Bytes that are there however small the micro-batches are, the casts that autocast remembers among them."""
    return whole.memory.static_bytes + whole.memory.at("forward end").get("autocast", 0)


def _saved_by_a_sample(whole: TracedPlan) -> float:
    return whole.memory.phases.get("forward end", {}).get("saved", 0) / whole.plan.micro_batch_size


def _trace_all(asides: Asides, work: Sequence[Callable[[], TracedPlan]]) -> None:
    """Make traces of which none depends on another, two at once."""
    for here, beside in zip_longest(work[::2], work[1::2]):
        begun = None if beside is None else asides.begin(beside)
        here()
        if begun is not None:
            asides.join(begun)


def _of_least_update(joint: JointSearch, asides: Asides, like: Plan, forms: _Forms, sizes: Sequence[int]) -> TracedPlan:
    """A family's plan in the first of some forms and sizes that runs, with the least update; else like itself."""
    updates = (like.optimizer_impl,) if "optimizer_impl" in joint.fixed else ("fused", "for-loop")
    for size in sizes:
        try:
            for recompute, update in product(forms, updates):
                plan = replace(like, micro_batch_size=size, recompute=recompute, optimizer_impl=update)
                with suppress(PlanError, UnsupportedError):  # blocks cannot be recomputed, or there is no such update
                    return asides.traced.of(plan)
        except BatchError:  # BatchNorm of one sample
            continue
        break
    return asides.traced.of(like)
