"""What a larger batch and more cards mean for this plan, in numbers: bytes on the wire, rates, noise, statistics.

Entry points: ``advice`` for a plan, ``wire`` for the synchronisation of k cards. Every number follows from the plan,
its memory and what was measured; only what applies is said. Left out: whether a model learns better or worse.

NOTE [Where the numbers come from]
1. A ring all-reduce of n bytes over k cards sends 2 (k - 1) / k n from each (Patarasuk and Yuan 2009); a
   reduce-scatter or an all-gather half of that.
2. With noise scale N, a batch of B takes 1 + N / B of the fewest updates and 1 + B / N of the fewest samples
   (McCandlish et al. 2018, equation 2.7 and what follows).
3. A running statistic that moves by a share m in each of K micro-steps has moved by 1 - (1 - m)^K after them.
4. A mean over B samples scatters sqrt(B / b) times less than one over b of them.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from snugfit import sizes
from snugfit.hardware import Device
from snugfit.memory.reports import MemoryReport
from snugfit.planning import links
from snugfit.planning.links import Link
from snugfit.plans import Plan
from snugfit.training import learning_rate, norms

MEMORY_STEPS, CARD_STEPS, LARGE_STEPS = (2, 8), (4, 16), (32, 128)
"Accumulation steps that are usual on one card short of memory, between cards, and for very large batches."

CLIP_BEYOND, CHECKPOINT_BEYOND = 8, 16
"Accumulation steps beyond which clipping, and checkpointing beside accumulation, are the usual advice."

LINEAR_UP_TO = 8
"Factor of the batch size up to which a rate is usually scaled linearly, beyond by the square root."


@dataclass(frozen=True, slots=True)
class Advice:
    """One sentence about a plan, with the numbers in it."""

    claim: str
    "The common advice that it makes concrete, such as ``T3`` of ``docs/claims.md``."
    text: str
    numbers: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """What one of k cards sends in an update, and what its gradients take, by when it synchronises."""

    per_window: int
    "Bytes, gradients reduced once per window."
    per_micro_step: int
    "Bytes, gradients reduced in every micro-step."
    gradients_per_window: int
    "Bytes of gradients that stay on a card between micro-steps if they are reduced once per window."
    gradients_per_micro_step: int
    "The same if they are reduced in every micro-step."


def wire(plan: Plan, gradient_bytes: int, parameter_bytes: int, *, cards: int, sharded: bool) -> Wire:
    """Bytes on the wire and gradients of one card.

    Args:
        plan: Its accumulation steps count.
        gradient_bytes: Of all gradients of one copy of the model.
        parameter_bytes: Of what is gathered, in the type that it is sent in.
        cards: That share a batch.
        sharded: By FSDP2, which gathers weights twice in each micro-step; else all-reduced by DDP.

    Example:
        >>> plan = Plan(batch_size=32, micro_batch_size=2, world_size=4)
        >>> found = wire(plan, 1000, 1000, cards=4, sharded=False)
        >>> found.per_window, found.per_micro_step
        (1500, 6000)
    """
    part = (cards - 1) / cards
    steps = max(1, math.ceil(plan.batch_size / cards / plan.micro_batch_size))
    if not sharded:
        once = round(2 * part * gradient_bytes)
        return Wire(
            per_window=once,
            per_micro_step=once * steps,
            gradients_per_window=gradient_bytes,
            gradients_per_micro_step=gradient_bytes,
        )
    gathered, reduced = 2 * part * parameter_bytes * steps, part * gradient_bytes
    return Wire(
        per_window=round(gathered + reduced),
        per_micro_step=round(gathered + reduced * steps),
        gradients_per_window=gradient_bytes,
        gradients_per_micro_step=-(-gradient_bytes // cards),
    )


def advice(
    plan: Plan,
    memory: MemoryReport,
    device: Device,
    model: nn.Module,
    *,
    cards: int | None = None,
    link: Link | None = None,
    max_grad_norm: float | None = None,
    reference_batch_size: int | None = None,
    noise_scale: float | None = None,
) -> tuple[Advice, ...]:
    """What applies to a plan of the usual advice on accumulation, many cards, rates and noise.

    Args:
        plan: As chosen.
        memory: Its report.
        device: What it is planned for.
        model: The job's model, data or not: looked through for layers that depend on the batch.
        cards: That share a batch; None means the plan's.
        link: Between them; None means the usual one of that device.
        max_grad_norm: The job's limit.
        reference_batch_size: That the learning rate was found at; None means one micro-batch on every card.
        noise_scale: The metric ``gradient_noise_scale`` of a run, in samples; None: not measured.
    """
    num_cards = plan.world_size if cards is None else cards
    found = [*_on_steps(plan, memory)]
    if num_cards > 1:
        found += _on_cards(plan, memory, num_cards, links.between(device) if link is None else link)
    found += _on_learning_rate(plan, reference_batch_size)
    if plan.accumulation_steps > CLIP_BEYOND and max_grad_norm is None:
        found.append(_on_clipping(plan))
    found += _on_noise(plan, noise_scale)
    found += _on_running_statistics(plan, model)
    return tuple(found)


def _on_steps(plan: Plan, memory: MemoryReport) -> Iterator[Advice]:
    steps = plan.accumulation_steps
    if steps == 1:
        return
    # The last micro-batch, at whose forward's end this is read, may be a short one.
    saved = max(memory.at("forward end").get("saved", 0), memory.by_category.get("saved", 0))
    whole = saved * plan.samples_per_rank // plan.micro_batch_size
    ranges = (
        (MEMORY_STEPS, f"what one card short of memory takes ({MEMORY_STEPS[0]}-{MEMORY_STEPS[1]})"),
        (CARD_STEPS, f"what saves synchronisations between cards ({CARD_STEPS[0]}-{CARD_STEPS[1]})"),
        (LARGE_STEPS, f"for very large batches ({LARGE_STEPS[0]}-{LARGE_STEPS[1]})"),
    )
    usual = [text for (low, high), text in ranges if low <= steps <= high]
    yield Advice(
        "T3",
        f"{steps} accumulation steps: {' and '.join(usual) or 'outside of the usual ranges 2-8, 4-16 and 32-128'}; a "
        f"micro-batch keeps {sizes.text(saved)} for backward, the whole batch at once would keep about "
        f"{sizes.text(whole)}",
        {"accumulation_steps": steps, "saved_bytes": saved, "saved_bytes_of_batch": whole},
    )
    if steps > CHECKPOINT_BEYOND and not plan.recompute:
        per_sample = saved / plan.micro_batch_size
        yield Advice(
            "T19",
            f"beyond {CHECKPOINT_BEYOND} steps checkpointing is usual; here larger micro-batches with it are not "
            "faster or do not fit: each sample keeps "
            f"{sizes.text(round(per_sample))}, which is what bounds the micro-batch",
            {"accumulation_steps": steps, "saved_bytes_per_sample": per_sample},
        )
    if steps > CHECKPOINT_BEYOND:
        yield Advice(
            "F13",
            f"the number of steps changes no result at this batch size; but an epoch makes 1/{steps} of the updates of "
            f"batches of {plan.batch_size // steps}",
            {"accumulation_steps": steps, "update_ratio": 1 / steps},
        )


def _on_cards(plan: Plan, memory: MemoryReport, cards: int, link: Link) -> Iterator[Advice]:
    held = memory.at("backward end")
    gradients, parameters = held.get("gradient", 0), held.get("parameter", 0)
    sharded = plan.shard == "fsdp"
    found = wire(plan, gradients, parameters, cards=cards, sharded=sharded)
    how = "reduce-scattered and gathered" if sharded else "all-reduced in a ring"
    numbers = {
        "cards": cards,
        "wire_bytes_per_window": found.per_window,
        "wire_bytes_per_micro_step": found.per_micro_step,
        "seconds_per_window": link.seconds(found.per_window),
        "seconds_per_micro_step": link.seconds(found.per_micro_step),
        "gradient_bytes_per_window": found.gradients_per_window,
        "gradient_bytes_per_micro_step": found.gradients_per_micro_step,
    }
    text = f"{cards} cards over {link.name}: each sends {sizes.text(found.per_window)} per update, {how}"
    text += f" ({numbers['seconds_per_window']:.2g} s"
    if found.per_micro_step == found.per_window:
        yield Advice("T3", f"{text})", numbers)
        return
    text += (
        f"), and {sizes.text(found.per_micro_step)} ({numbers['seconds_per_micro_step']:.2g} s) if every micro-step "
    )
    text += "synchronises"
    if found.gradients_per_window != found.gradients_per_micro_step:
        text += f"; for that its gradients take {sizes.text(found.gradients_per_micro_step)} instead of "
        text += sizes.text(found.gradients_per_window)
    yield Advice("T3", text, numbers)


def _on_learning_rate(plan: Plan, reference: int | None) -> Iterator[Advice]:
    at = plan.micro_batch_size * plan.world_size if reference is None else reference
    factor = plan.batch_size / at
    if factor <= 1:
        return
    linear = learning_rate.scale(1.0, factor)
    root = learning_rate.scale(1.0, factor, rule="sqrt")
    usual = "linear" if factor <= LINEAR_UP_TO else "sqrt"
    yield Advice(
        "T5",
        f"the learning rate stays if it was chosen for batch size {plan.batch_size}; one found at {at} is for a batch "
        f"{factor:,.4g} times smaller: the linear rule multiplies it by {linear:,.4g}, the square root by {root:.3g}; "
        f"usual here is {usual!r} (linear up to {LINEAR_UP_TO}, with Adam the root)",
        {"factor": factor, "linear": linear, "sqrt": root, "reference_batch_size": at},
    )


def _on_clipping(plan: Plan) -> Advice:
    steps = plan.accumulation_steps
    return Advice(
        "T6",
        f"{steps} steps, more than {CLIP_BEYOND}, and no max_grad_norm: 1.0 is usual; the mean that snugfit makes does "
        f"not grow with the steps, a sum without the division would be {steps} times as large",
        {"accumulation_steps": steps, "max_grad_norm": 1.0},
    )


def _on_noise(plan: Plan, noise_scale: float | None) -> Iterator[Advice]:
    batch = plan.batch_size
    if plan.accumulation_steps > 1:
        part = plan.micro_batch_size * plan.world_size
        ratio = math.sqrt(batch / part)
        yield Advice(
            "F14",
            f"the gradient of {batch} samples scatters {ratio:.3g} times less than that of {part} (one micro-step)",
            {"scatter_ratio": ratio},
        )
    if noise_scale is not None and math.isfinite(noise_scale) and noise_scale > 0:
        updates, samples = 1 + noise_scale / batch, 1 + batch / noise_scale
        yield Advice(
            "F14",
            f"measured noise scale {noise_scale:.3g} samples: a batch of {batch} takes {updates:.3g} times the fewest "
            f"updates and {samples:.3g} times the fewest samples",
            {"noise_scale": noise_scale, "updates": updates, "samples": samples},
        )


def _on_running_statistics(plan: Plan, model: nn.Module) -> Iterator[Advice]:
    coupled = norms.batch_coupled(model)
    steps, size = plan.accumulation_steps, plan.micro_batch_size
    if not coupled or steps == 1 or plan.norm_policy == "frozen":
        return
    yield Advice(
        "T8",
        f"{len(coupled)} BatchNorm layers see {size} samples instead of {plan.samples_per_rank}: their means scatter "
        f"{math.sqrt(plan.samples_per_rank / size):.3g} times as much; not equal to the whole batch",
        {"samples": size, "scatter_ratio": math.sqrt(plan.samples_per_rank / size)},
    )
    momenta = {m.momentum for _, m in model.named_modules() if getattr(m, "running_mean", None) is not None}
    known = [momentum for momentum in momenta if isinstance(momentum, float) and 0 < momentum < 1]
    if plan.norm_policy == "micro" and len(known) == 1:
        kept, same = known[0], 1 - (1 - known[0]) ** (1 / steps)
        yield Advice(
            "F11",
            f"running statistics move {steps} times per update: momentum {same:.3g} instead of {kept:g} moves them as "
            f"far (weight of the old value {1 - same:.4g}); norm_policy='window' does it without",
            {"momentum": kept, "momentum_per_micro_step": same},
        )
