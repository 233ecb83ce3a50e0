"""Why a plan is as it is, and why there is none: the sentences that ``plan`` prints.

Entry points: ``reasons``, ``notes`` and ``infeasible``. They read what a search met and decide nothing.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace

from torch import nn

from snugfit import sizes
from snugfit.errors import InfeasibleError
from snugfit.hardware import Device
from snugfit.memory.reporting.advice import OF_CROSS_ENTROPY
from snugfit.memory.reports import MemoryReport
from snugfit.planning import cost, options, units, ways_out
from snugfit.planning.chain import NOTHING
from snugfit.planning.joint import JointSearch
from snugfit.planning.ladder import ACCUMULATION, MIXED_PRECISION, Rung
from snugfit.planning.ways_out import WayOut
from snugfit.plans import Plan
from snugfit.training import norms

_STATIC = ("parameter", "buffer", "gradient", "optimizer")
_MUCH_OF_PEAK = 0.2
"Share of the peak from which on the loss is worth changing."
_MUCH_FASTER = 0.9
"Of the time of the full batch in full precision, for which a precision is worth more memory."
_ALL_OF_IT = 0.999
"Of the FLOPs of the whole batch, below which micro-batches leave some out: those of one sample are as many in any."
_NAMED_LAYERS = 2
"Layers that a reason names; a ResNet has 53 of a kind."


def reasons(
    plan: Plan,
    memory: MemoryReport,
    fixed: Collection[str],
    budget_bytes: int,
    precision: options.Option,
    model: nn.Module,
    joint: JointSearch | None,
    traced: Mapping[Plan, MemoryReport],
) -> dict[str, str]:
    """A sentence for each field of the chosen plan that the search decided or was given.

    Args:
        plan: The chosen plan.
        memory: What it needs.
        fixed: Fields that were given.
        budget_bytes: For peak, context and margin.
        precision: The lower precision that was looked at.
        model: The job's model.
        joint: What other sizes would need; None where nothing had to be searched.
        traced: What plans need that were traced by themselves.
    """
    coupled = norms.batch_coupled(model)
    found = {field.name: "given" for field in fields(Plan) if field.name in fixed}
    found["batch_size"] = "as asked for; the search never changes it"
    found["world_size"] = "given"
    used = f"{sizes.text(memory.needed_bytes)} of {sizes.text(budget_bytes)} with context and margin"
    found.setdefault("micro_batch_size", _micro_batch(plan, used, budget_bytes, joint))
    lower = plan.precision == precision.value
    found.setdefault("precision", precision.reason if lower else "fp32 is the fastest that fits")
    found.setdefault("recompute", _recompute(plan, model, budget_bytes, joint, traced))
    own = (
        "it stays as the job makes it: no other form of its update was worth a change"
        if plan.optimizer_impl == "as-given"
        else "its update takes less time or memory"
    )
    found.setdefault("optimizer_impl", own)
    if plan.world_size > 1:
        steps = plan.accumulation_steps
        more = f"; in every micro-step they would be sent {steps} times, and take no less memory" if steps > 1 else ""
        found.setdefault("sync", f"gradients are reduced once per update{more}")
    if plan.loss_chunks > 1:
        chunks = f"the loss is computed in {plan.loss_chunks} parts: their logits are never all there"
        found.setdefault("loss_chunks", chunks)
    if coupled:
        found.setdefault("norm_policy", _norms(plan, coupled))
    return found


def _norms(plan: Plan, coupled: Sequence[str]) -> str:
    if plan.accumulation_steps == 1 or plan.norm_policy == "frozen":
        return "no BatchNorm layer is affected"
    layers = norms.listed(coupled, _NAMED_LAYERS)
    return f"{layers} normalise micro-batches instead of the batch: not equivalent to the full batch"


def _micro_batch(plan: Plan, used: str, budget_bytes: int, joint: JointSearch | None) -> str:
    if plan.accumulation_steps == 1:
        return f"the whole batch fits: {used}"
    steps = plan.accumulation_steps - 1
    larger = replace(plan, micro_batch_size=-(-plan.samples_per_rank // steps), recompute=())
    if joint is None:
        return f"the fastest size that fits: {used}"
    needed = joint.least_needed(larger)
    beyond = f"{larger.micro_batch_size} needs {sizes.text(needed)} at least, with everything recomputed"
    if needed <= budget_bytes:
        beyond = f"{larger.micro_batch_size} would fit with more recomputation, which costs more time than it gains"
    return f"the fastest size that fits: {used}; {beyond}"


def _recompute(
    plan: Plan, model: nn.Module, budget_bytes: int, joint: JointSearch | None, traced: Mapping[Plan, MemoryReport]
) -> str:
    if not plan.recompute:
        return f"micro-batches of {plan.micro_batch_size} fit without: recomputing would only cost time"
    if joint is None:
        return f"{options.describe(plan.recompute)}"
    chain = joint.chain(plan)
    plain = joint.choice(plan, chain, chain.all_by(NOTHING), 0)
    known = traced.get(plain.plan) or traced.get(replace(plain.plan, optimizer_impl=joint.first.optimizer_impl))
    without = joint.needed_bytes(plain) if known is None else known.needed_bytes
    named = len(units.named(model))
    return (
        f"{options.describe(plan.recompute)} of {named} units (its blocks or layers), the cheapest choice that fits; "
        f"without it micro-batches of {plan.micro_batch_size} need {sizes.text(without)} of {sizes.text(budget_bytes)}"
    )


def pays_with(plan: Plan, flops: int, first: Plan, first_flops: int) -> str:
    """What a plan costs beside the full batch in full precision."""
    costs = []
    if plan.precision != first.precision:
        costs.append("precision")
    if plan.accumulation_steps > 1:
        costs.append(f"{plan.accumulation_steps} smaller micro-batches")
    if (plan.recompute or plan.loss_chunks > first.loss_chunks) and first_flops:
        costs.append(f"{max(flops / first_flops - 1, 0):.0%} more computation")
    return ", ".join(costs) or "nothing"


def notes(ladder: Sequence[Rung], chosen: Plan, joint: JointSearch, offloaded_bytes: int) -> tuple[str, ...]:
    """Where the usual order of the techniques is not the best one here, and how sure the times are."""
    device, left_out = joint.device, joint.left_out
    found = [left_out] if left_out else _faster_precision(ladder, chosen, device, joint.budget_bytes)
    by_name = {rung.name: rung for rung in ladder}
    mixed, plain = by_name.get(MIXED_PRECISION), ladder[0]
    if mixed is not None and mixed.memory.peak_reserved_bytes > plain.memory.peak_reserved_bytes:
        more = mixed.memory.peak_reserved_bytes - plain.memory.peak_reserved_bytes
        cause = "autocast keeps a cast copy of the weights"
        if more > mixed.memory.by_category.get("parameter", 0):  # a copy in half the bytes cannot be the cause
            cause = "what autocast runs in fp32, normalisation above all, keeps its input in both types"
        found.append(f"mixed precision needs {sizes.text(more)} more than fp32 here: {cause}")
    accumulated = by_name.get(ACCUMULATION)
    last = ladder[-1]
    larger = accumulated is not None and chosen.micro_batch_size > accumulated.plan.micro_batch_size
    if accumulated is not None and accumulated.fits and chosen.recompute and larger and last.plan == chosen:
        faster = 1 - last.step_time_s / accumulated.step_time_s
        found.append(
            f"accumulation alone fits, but with recomputation micro-batches can hold {chosen.micro_batch_size} samples "
            f"instead of {accumulated.plan.micro_batch_size}: {faster:.1%} less time"
        )
    if accumulated is not None and accumulated.memory.peak_reserved_bytes > ladder[0].memory.peak_reserved_bytes:
        found.append("accumulation raises the peak here: gradients stay alive while the next micro-batch runs")
    whole = [rung for rung in ladder if rung.fits and rung.plan.accumulation_steps == 1]
    if chosen.accumulation_steps > 1 and whole and norms.batch_coupled(joint.model):
        fastest = min(whole, key=lambda rung: rung.step_time_s)
        own = next((rung for rung in ladder if rung.plan == chosen), last)
        slower = fastest.step_time_s / own.step_time_s - 1
        found.append(
            f"BatchNorm sees micro-batches of {chosen.micro_batch_size}; in the rung {fastest.name!r} it would see the "
            f"whole batch, for {slower:.0%} more time: fix micro_batch_size={fastest.plan.micro_batch_size}"
        )
    found += _coupled(ladder) if chosen.accumulation_steps > 1 else []
    if joint.compares_classes and (chosen.accumulation_steps > 1 or chosen.recompute):  # else the memory is there
        own = next((rung for rung in ladder if rung.plan == chosen), last)
        found += _on_class_scores("the peak", own.memory) or _on_class_scores("the full batch's peak", plain.memory)
    if offloaded_bytes:
        found.append(
            f"{sizes.text(offloaded_bytes)} of what backward needs lie in the host's memory meanwhile, pinned; their "
            "copies are taken to run beside the computation, which no card has measured yet"
        )
    if device.kind == "cpu":
        found.append(
            "the budget is for tensors, what kernels need beside them, and a margin; Python, torch and the workers of "
            "a DataLoader take theirs besides (train --memory-cap counts those in)"
        )
    found.append(_on_times(device))
    return tuple(found)


def _coupled(ladder: Sequence[Rung]) -> list[str]:
    """That a cut changes the loss, where micro-batches together compute less than the whole batch at once."""
    whole = ladder[0]
    if whole.plan.accumulation_steps > 1:
        return []
    for rung in ladder:
        cut = replace(rung.plan, micro_batch_size=whole.plan.micro_batch_size, precision=whole.plan.precision)
        if cut == whole.plan and rung.flops < _ALL_OF_IT * whole.flops:
            less = 1 - rung.flops / whole.flops
            return [
                f"micro-batches of {rung.plan.micro_batch_size} together compute {less:.1%} less "
                "than the whole batch at once: where samples are compared with each other, as in contrastive losses, a "
                "smaller micro-batch is another loss; snugfit check says whether it is"
            ]
    return []


def _faster_precision(ladder: Sequence[Rung], chosen: Plan, device: Device, budget_bytes: int) -> list[str]:
    """What is missing for a precision that is much faster, where none of its plans fits."""
    mixed = next((rung for rung in ladder if rung.name == MIXED_PRECISION), None)
    if mixed is None or mixed.plan.precision == chosen.precision:
        return []
    alike = [rung for rung in ladder if rung.plan.precision == mixed.plan.precision]
    share = mixed.step_time_s / ladder[0].step_time_s
    if share > _MUCH_FASTER or any(rung.fits for rung in alike):
        return []
    needed = min(rung.memory.needed_bytes for rung in alike)
    lower = " or, with another result, weights in bf16 (precision bf16-true, bf16_update nearest)"
    return [
        f"{options.short(mixed.plan.precision)} would take {share:.2f} of the time of fp32, but its rungs need "
        f"{sizes.text(needed)} of {sizes.text(budget_bytes)} or more: more memory pays"
        + (lower if device.fast_bfloat16 else "")
    ]


def _on_times(device: Device) -> str:
    uncertainty = f"{cost.uncertainty(device):.0%} either way"
    if device.rates is None:
        basis = " for this CPU, which nobody calibrated (snugfit calibrate does)" if device.kind == "cpu" else ""
        return f"step times are modelled{basis}, {uncertainty}; ratios between plans are surer"
    return (
        f"step times are modelled from measured rates, {uncertainty} while the device does nothing else, and more "
        "under load; ratios between plans are surer"
    )


def _on_class_scores(what: str, memory: MemoryReport) -> list[str]:
    """What a cross entropy that is not computed in chunks holds at a peak, where that is much of it."""
    num_bytes = sum(holder.num_bytes for holder in memory.holders if holder.op in OF_CROSS_ENTROPY)
    share = num_bytes / max(memory.peak_allocated_bytes, 1)
    if share < _MUCH_OF_PEAK:
        return []
    return [
        f"class scores within the loss are {sizes.text(num_bytes)} of {what}, {share:.0%}: with "
        "snugfit.chunked_cross_entropy(hidden, head.weight, labels, chunks=None) in place of the last layer and its "
        "loss the plan chooses how few are alive at once, for one more forward of that layer; hidden is what goes into "
        "it, and the labels are yours to shift (docs/checkpointing.md has the lines for transformers)"
    ]


def infeasible(plan: Plan, memory: MemoryReport, joint: JointSearch, ways: Sequence[WayOut]) -> InfeasibleError:
    """The error that says what the plan that needs least needs, what is too large, and the ways out."""
    budget_bytes = joint.budget_bytes
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
        total, and_beside = f"{sizes.text(static)} ({alone})", ""
        if static <= budget_bytes:
            total, and_beside = sizes.text(static + beside), f" with the {sizes.text(beside)} of context and margin"
            alone += f"; together {sizes.text(static)}"
            total = f"{total} ({alone})"
        hint = f"these tensors alone exceed it{and_beside}, at any micro-batch size: {total}; use an optimizer with "
        hint += "less state, freeze weights, or take a larger device"
    else:
        hint = "use an optimizer with less state, shorter inputs, or a larger device"
    hints = [
        *_unitless(budget_bytes),
        hint,
        *([joint.left_out] if joint.left_out else []),
        *(_on_class_scores("the peak", memory) if joint.compares_classes else []),
        *ways_out.sentences(ways),
    ]
    return InfeasibleError(
        f"no plan fits the budget of {sizes.text(budget_bytes)} on {joint.device.name}",
        got=f"the smallest candidate needs {sizes.text(memory.needed_bytes)} "
        f"(micro-batches of {plan.micro_batch_size}, {options.short(plan.precision)}, "
        f"{options.describe(plan.recompute)} recomputed):\n            {held}; "
        f"context {sizes.text(memory.context_bytes)}, margin {sizes.text(memory.margin_bytes)}{_meanings(memory)}",
        expected=f"peak reserved, context and margin together <= {sizes.text(budget_bytes)}",
        hint="\n      ".join(hints),
        ways=tuple(ways),
        smallest=memory,
        plan=plan,
        budget_bytes=budget_bytes,
        static_bytes=static,
    )


_MEANINGS = {
    "saved": "what forward keeps for backward",
    "temporary": "results that are used at once and not kept",
    "workspace": "what kernels need while they run",
}


def _meanings(memory: MemoryReport) -> str:
    """What the names of a peak's parts mean, of those that are not plain words."""
    found = [f"{name}: {meaning}" for name, meaning in _MEANINGS.items() if memory.by_category.get(name)]
    return f"\n            ({'; '.join(found)})" if found else ""


def _unitless(budget_bytes: int) -> list[str]:
    """What to say of a budget that nobody can mean: a number whose unit was forgotten."""
    if budget_bytes >= sizes.MIB:
        return []
    return [f'a number without a unit is bytes: did you mean "{budget_bytes}MiB" or "{budget_bytes}GiB"?']
