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

    topic: str
    "What it is about, in a word or two: ``accumulation``, ``learning rate``."
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
    found = [*_on_steps(plan, memory, num_cards)]
    if num_cards > 1:
        found.append(_on_cards(plan, memory, num_cards, links.between(device) if link is None else link))
    found += _on_learning_rate(plan, reference_batch_size)
    if plan.accumulation_steps > CLIP_BEYOND and max_grad_norm is None:
        found.append(_on_clipping(plan))
    found += _on_noise(plan, noise_scale)
    found += _on_running_statistics(plan, model)
    return tuple(found)


def _on_steps(plan: Plan, memory: MemoryReport, cards: int) -> Iterator[Advice]:
    steps = plan.accumulation_steps
    if steps == 1:
        return
    # The last micro-batch, at whose forward's end this is read, may be a short one.
    saved = max(memory.at("forward end").get("saved", 0), memory.by_category.get("saved", 0))
    whole = saved * plan.samples_per_rank // plan.micro_batch_size
    between = [(CARD_STEPS, "to save synchronisations between cards")] if cards > 1 else []
    ranges = ((MEMORY_STEPS, "on a card short of memory"), *between, (LARGE_STEPS, "for very large batches"))
    usual = [f"{low}-{high} are usual {what}" for (low, high), what in ranges if low <= steps <= high]
    outside = "outside of the usual " + " and ".join(f"{low}-{high} {what}" for (low, high), what in ranges)
    yield Advice(
        "accumulation",
        f"{steps} steps ({', '.join(usual) or outside}): for backward a micro-batch keeps {sizes.text(saved)}, the "
        f"whole batch would keep about {sizes.text(whole)}",
        {"accumulation_steps": steps, "saved_bytes": saved, "saved_bytes_of_batch": whole},
    )
    if steps > CHECKPOINT_BEYOND and not plan.recompute:
        per_sample = saved / plan.micro_batch_size
        yield Advice(
            "checkpointing",
            f"usual beyond {CHECKPOINT_BEYOND} steps, to make micro-batches larger; here it would be slower, or would "
            f"not fit (for backward a sample keeps {sizes.text(round(per_sample))})",
            {"accumulation_steps": steps, "saved_bytes_per_sample": per_sample},
        )


def _on_cards(plan: Plan, memory: MemoryReport, cards: int, link: Link) -> Advice:
    held = memory.at("backward end")
    sharded = plan.shard == "fsdp"
    found = wire(plan, held.get("gradient", 0), held.get("parameter", 0), cards=cards, sharded=sharded)
    numbers = {
        "cards": cards,
        "wire_bytes_per_window": found.per_window,
        "wire_bytes_per_micro_step": found.per_micro_step,
        "seconds_per_window": link.seconds(found.per_window),
        "seconds_per_micro_step": link.seconds(found.per_micro_step),
        "gradient_bytes_per_window": found.gradients_per_window,
        "gradient_bytes_per_micro_step": found.gradients_per_micro_step,
    }
    how = "reduce-scattered and gathered" if sharded else "all-reduced in a ring"
    text = f"{cards} over {link.name}: each sends {sizes.text(found.per_window)} per update, {how}"
    text += f" ({numbers['seconds_per_window']:.2g} s)"
    if found.per_micro_step != found.per_window:
        text += f"; {sizes.text(found.per_micro_step)} ({numbers['seconds_per_micro_step']:.2g} s) if every micro-step "
        text += "synchronises"
    if found.gradients_per_window != found.gradients_per_micro_step:
        text += f"; for that its gradients take {sizes.text(found.gradients_per_micro_step)} instead of "
        text += sizes.text(found.gradients_per_window)
    return Advice("cards", text, numbers)


def _on_learning_rate(plan: Plan, reference: int | None) -> Iterator[Advice]:
    at = plan.micro_batch_size * plan.world_size if reference is None else reference
    factor = plan.batch_size / at
    if factor <= 1:
        return
    linear = learning_rate.scale(1.0, factor)
    root = learning_rate.scale(1.0, factor, rule="sqrt")
    beyond = f" and beyond {LINEAR_UP_TO} times" if factor > LINEAR_UP_TO else ""
    yield Advice(
        "learning rate",
        f"as it is if it was chosen for batches of {plan.batch_size}; if for batches of {at}, multiply it by "
        f"{linear:,.{3 if linear < 1000 else 4}g} (linear) or {root:.3g} (square root, usual with Adam{beyond})",
        {"factor": factor, "linear": linear, "sqrt": root, "reference_batch_size": at},
    )


def _on_clipping(plan: Plan) -> Advice:
    steps = plan.accumulation_steps
    return Advice(
        "clipping",
        f"max_grad_norm=1.0 is usual beyond {CLIP_BEYOND} steps; the mean that snugfit makes does not grow with them, "
        f"a sum that nobody divides would be {steps} times as large",
        {"accumulation_steps": steps, "max_grad_norm": 1.0},
    )


def _on_noise(plan: Plan, noise_scale: float | None) -> Iterator[Advice]:
    batch, steps = plan.batch_size, plan.accumulation_steps
    if steps > 1:
        part = plan.micro_batch_size * plan.world_size
        ratio = math.sqrt(batch / part)
        text = f"the gradient of {batch} samples has {ratio:.3g} times less noise than that of {part} alone"
        numbers = {"scatter_ratio": ratio}
        if steps > CHECKPOINT_BEYOND:
            text += f", and an epoch makes 1/{steps} of its updates: that changes results, cutting the batch does not"
            numbers["update_ratio"] = 1 / steps
        yield Advice("batch size", text, numbers)
    if noise_scale is not None and math.isfinite(noise_scale) and noise_scale > 0:
        updates, samples = 1 + noise_scale / batch, 1 + batch / noise_scale
        yield Advice(
            "noise scale",
            f"{noise_scale:.3g} samples were measured: a batch of {batch} takes {updates:.3g} times the fewest "
            f"updates and {samples:.3g} times the fewest samples",
            {"noise_scale": noise_scale, "updates": updates, "samples": samples},
        )


def _on_running_statistics(plan: Plan, model: nn.Module) -> Iterator[Advice]:
    coupled = norms.batch_coupled(model)
    steps, size = plan.accumulation_steps, plan.micro_batch_size
    if not coupled or steps == 1 or plan.norm_policy == "frozen":
        return
    ratio = math.sqrt(plan.samples_per_rank / size)
    text = f"{len(coupled)} layers see {size} samples instead of {plan.samples_per_rank}, and their means have "
    text += f"{ratio:.3g} times as much noise: not equal to the whole batch"
    numbers = {"samples": float(size), "scatter_ratio": ratio}
    momenta = {m.momentum for _, m in model.named_modules() if getattr(m, "running_mean", None) is not None}
    known = [momentum for momentum in momenta if isinstance(momentum, float) and 0 < momentum < 1]
    if plan.norm_policy == "micro" and len(known) == 1:
        same = 1 - (1 - known[0]) ** (1 / steps)
        text += (
            f"; running statistics move {steps} times per update: --norm-policy window puts that right, or momentum "
        )
        text += f"{same:.3g} instead of {known[0]:g}"
        numbers |= {"momentum": known[0], "momentum_per_micro_step": same}
    yield Advice("BatchNorm", text, numbers)
