"""The plans that need least, where weights, gradients and state of the optimizer alone are too large.

Entry point: ``trace_smallest``. What is said of the least of them, and what else could be done, is ``explain``'s and
``ways_out``'s.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest

from snugfit.errors import BatchError, PlanError, UnsupportedError
from snugfit.planning.asides import Asides
from snugfit.planning.joint import JointSearch
from snugfit.planning.traced_plans import TracedPlan
from snugfit.plans import Plan, Segment

_NEAR = 2
"Times the smallest plan that a whole batch may need and still be smaller in another form."


def trace_smallest(joint: JointSearch, asides: Asides, families: Sequence[Plan]) -> None:
    """Trace what may need least: the smallest micro-batches, and the whole batch, plainly and with blocks recomputed.

    Args:
        joint: Names of the units, sizes, and what is given.
        asides: With every plan that was traced, the whole batch of each family among them.
        families: The whole batch of each.
    """
    blocks = tuple(Segment((name,)) for name in joint.names)
    forms = [(like, recompute) for like in families for recompute in dict.fromkeys((blocks, like.recompute))]

    def of_sizes(form: tuple[Plan, tuple[Segment, ...]], sizes: Sequence[int]) -> Callable[[], TracedPlan]:
        return partial(_of_least_update, joint, asides, *form, sizes)

    _trace_all(asides, [of_sizes(form, joint.sizes("")[::-1]) for form in forms])
    # In a single micro-batch no gradients lie beside forward.
    limit = _NEAR * min(one.memory.needed_bytes for one in asides.traced.values())
    near = [form for form in forms if asides.traced[form[0]].memory.needed_bytes < limit]
    _trace_all(asides, [of_sizes(form, (form[0].micro_batch_size,)) for form in near])


def _trace_all(asides: Asides, work: Sequence[Callable[[], TracedPlan]]) -> None:
    """Make traces of which none depends on another, two at once."""
    for here, beside in zip_longest(work[::2], work[1::2]):
        begun = None if beside is None else asides.begin(beside)
        here()
        if begun is not None:
            asides.join(begun)


def _of_least_update(
    joint: JointSearch, asides: Asides, like: Plan, recompute: tuple[Segment, ...], sizes: Sequence[int]
) -> TracedPlan:
    """A family's plan with the first of some micro-batch sizes that runs and the least update; else like itself."""
    updates = (like.optimizer_impl,) if "optimizer_impl" in joint.fixed else ("fused", "for-loop")
    for size in sizes:
        plan = replace(like, micro_batch_size=size, recompute=recompute)
        for update in updates:
            try:
                return asides.traced.of(replace(plan, optimizer_impl=update))
            except BatchError:  # BatchNorm of one sample
                break
            except (PlanError, UnsupportedError):  # the optimizer has no such form, or blocks cannot be recomputed
                continue
        else:
            break
    return asides.traced.of(like)
