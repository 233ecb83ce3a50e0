"""The plans that need least, where weights, gradients and state of the optimizer alone are too large.

Entry point: ``trace_smallest``. What is said of the least of them, and what else could be done, is ``explain``'s and
``ways_out``'s.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product, zip_longest
from typing import TypeAlias

from snugfit.errors import BatchError, PlanError, UnsupportedError
from snugfit.planning.asides import Asides
from snugfit.planning.joint import JointSearch
from snugfit.planning.traced_plans import TracedPlan
from snugfit.plans import Plan, Segment

_NEAR = 2
"Times the smallest plan that a whole batch may need and still be smaller in another form."
_LITTLE = 0.05
"Share of weights, gradients and state up to which what a sample saves may be less than what recomputing it takes."

_Forms: TypeAlias = Sequence[tuple[Segment, ...]]


def trace_smallest(joint: JointSearch, asides: Asides, families: Sequence[Plan]) -> None:
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
