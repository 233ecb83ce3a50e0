"""Why a plan is as it is, and why there is none: the sentences that ``plan`` prints.

Entry points: ``reasons`` and ``infeasible``. They read the candidates of a search and decide nothing.
"""

from collections.abc import Collection
from dataclasses import fields, replace

from torch import nn

from snugfit import hardware, sizes
from snugfit.errors import InfeasibleError
from snugfit.planning import options
from snugfit.planning.ladder import Candidate
from snugfit.plans import Plan
from snugfit.training import norms

_STATIC = ("parameter", "buffer", "gradient", "optimizer")


def reasons(
    chosen: Candidate,
    considered: Collection[Candidate],
    fixed: Collection[str],
    budget_bytes: int,
    precision: options.Option,
    model: nn.Module,
) -> dict[str, str]:
    """A sentence for each field of the chosen plan that the search decided or was given."""
    plan, memory = chosen.plan, chosen.memory
    coupled = norms.batch_coupled(model)
    found = {field.name: "given" for field in fields(Plan) if field.name in fixed}
    found["batch_size"] = "given; never changed"
    found["world_size"] = "given"
    used = f"{sizes.text(memory.needed_bytes)} of {sizes.text(budget_bytes)} with context and margin"
    if plan.accumulation_steps == 1:
        found.setdefault("micro_batch_size", f"the whole batch fits: {used}")
    else:
        larger = [c for c in considered if _differs_in_size(c.plan, plan) and not c.fits]
        next_up = min(larger, key=lambda c: c.plan.micro_batch_size, default=None)
        beyond = (
            f"; {next_up.plan.micro_batch_size} would need {sizes.text(next_up.memory.needed_bytes)}" if next_up else ""
        )
        found.setdefault("micro_batch_size", f"the fastest size that fits: {used}{beyond}")
    found.setdefault(
        "precision", precision.reason if plan.precision == precision.value else "fp32 is the fastest that fits"
    )
    if plan.recompute:
        saved = [c for c in considered if not c.plan.recompute and c.plan.precision == plan.precision]
        faster = min((c.memory.needed_bytes for c in saved), default=0)
        why = "without it nothing fits" if saved and faster > budget_bytes else "with it larger micro-batches fit"
        found.setdefault("recompute", f"{len(plan.recompute)} blocks keep only their inputs: {why}")
    else:
        found.setdefault("recompute", "not needed: recomputing would only cost time")
    found.setdefault("optimizer_impl", "the job's own choice is kept")
    found.setdefault(
        "norm_policy",
        f"{norms.listed(coupled)} normalise micro-batches instead of the batch: not equivalent to the full batch"
        if coupled and plan.accumulation_steps > 1 and plan.norm_policy != "frozen"
        else "no BatchNorm layer is affected",
    )
    return found


def infeasible(smallest: Candidate, budget_bytes: int, device: hardware.Device) -> InfeasibleError:
    """The error that says what the smallest candidate needs, what is too large, and the way out."""
    memory, plan = smallest.memory, smallest.plan
    held = ", ".join(f"{category} {sizes.text(size)}" for category, size in memory.by_category.items())
    static = memory.static_bytes
    beside = memory.context_bytes + memory.margin_bytes
    if static <= budget_bytes and beside >= budget_bytes:
        hint = f"context and margin alone take {sizes.text(beside)}: no job fits a smaller budget; give a larger one"
    elif static + beside > budget_bytes:
        at_end = memory.at("backward end")
        alone = ", ".join(
            f"{category} {sizes.text(at_end.get(category, 0))}" for category in _STATIC if at_end.get(category)
        )
        hint = f"these tensors alone exceed it, at any micro-batch size: {alone}; use an optimizer with less state, "
        hint += "freeze weights, or take a larger device"
    else:
        hint = "use an optimizer with less state, shorter inputs, or a larger device"
    return InfeasibleError(
        f"no plan fits the budget of {sizes.text(budget_bytes)} on {device.name}",
        got=f"the smallest candidate needs {sizes.text(memory.needed_bytes)} "
        f"(micro_batch_size={plan.micro_batch_size}, precision={plan.precision}, "
        f"recompute={options.describe(plan.recompute)}): {held}; "
        f"context {sizes.text(memory.context_bytes)}, margin {sizes.text(memory.margin_bytes)}",
        expected=f"peak reserved, context and margin together <= {sizes.text(budget_bytes)}",
        hint=hint,
        smallest=memory,
        plan=plan,
        budget_bytes=budget_bytes,
        static_bytes=static,
    )


def _differs_in_size(a: Plan, b: Plan) -> bool:
    return replace(a, micro_batch_size=1) == replace(b, micro_batch_size=1) and a.micro_batch_size > b.micro_batch_size
