"""Weights, gradients and state spread over k cards by FSDP2: each holds 1/k of them, and one unit as a whole.

Entry point: ``row``, for the least number of cards that will do. snugfit's engine does not
wrap in FSDP2; the lines for a script of one's own are ``CODE``. Left out: NCCL's own buffers.

NOTE [What one card holds] (torch/distributed/fsdp/_fully_shard of torch 2.13)
1. A parameter is cut along dim 0 into k parts of ceil(dim0 / k) rows; its gradient and its state likewise.
2. Each repeated block is a unit; the rest is the root, which is gathered from the first forward to the end of backward.
3. Gathered at a time are the unit that runs, the one that is fetched ahead, and the flat buffer that one arrives in.
   In backward there are the unit's gradients, and what is reduced: flat in the type of reduction, for this unit and the
   one before.
4. Every micro-step gathers twice (forward and backward) and reduces once, so that no unsharded gradient stays.
"""

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from snugfit import sizes
from snugfit.errors import PlanError
from snugfit.memory.traces import Trace
from snugfit.planning import links
from snugfit.planning.ways import by_hand, rows
from snugfit.planning.ways.recorded_step import RecordedStep, Weight, made
from snugfit.planning.ways.rewriting import Rewriting
from snugfit.planning.ways.rows import Case, WayOut
from snugfit.plans import Plan
from snugfit.training import checkpointing

CODE = """\
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
policy = MixedPrecisionPolicy(
    param_dtype=torch.{compute}, reduce_dtype=torch.float32
)
for block in {blocks}:
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = {optimizer}"""

_COMPUTE = {"32-true": "float32", "16-mixed": "float16", "bf16-mixed": "bfloat16", "bf16-true": "bfloat16"}
MOST = 1024
"Cards, beyond which another way is better."

_REDUCE_ITEMSIZE = 4
_CAUTION = 0.8
"How much of the cards that a division gives are skipped at once."
_SHARDED = ("parameter", "gradient", "optimizer")


def row(case: Case) -> WayOut:
    """The row of this way."""
    if case.device.kind == "cpu":
        return rows.unknown(case, "fsdp", "it is worked out for cards only")
    most = min(MOST, case.plan.batch_size)
    if most < 2:
        return rows.unknown(case, "fsdp", "a batch of one sample cannot be shared by cards: take a larger one")
    step = case.fast_step()  # no casts of all weights are kept here: it takes no more than fp32
    num_cards, trace = smallest(step, case.budget_bytes, case.model, most)
    plan = spread(step.plan, num_cards)
    link = links.between(case.device)
    code = CODE.format(
        compute=_COMPUTE[step.plan.precision],
        blocks=_container(case.model),
        optimizer=f"{case.loop.optimizer}({case.loop.arguments})" if case.loop.optimizer else "...  # as before",
    )
    change = f"weights, gradients and state are spread over {num_cards} cards by FSDP2{rows.and_bfloat16(case, step)}"
    too_much = "what is not spread, activations and gathered units, is too large by itself, or the batch too small"
    total, added = seconds(step, plan)
    sent = wire_bytes(step, plan)
    return rows.row(
        case,
        "fsdp",
        trace,
        change=change,
        code=code,
        by_hand=by_hand.lines(case, plan, code.splitlines()),
        seconds=total,
        plan=plan,
        cards=num_cards,
        notes=(
            *(() if case.holds(step, trace) else (too_much,)),
            f"each card sends {sizes.text(sent)} per update over {link.name}, which adds {added:.2f} s",
            f"{num_cards} cards in all, each with its own part of the batch",
        ),
    )


def _container(model: nn.Module) -> str:
    """The list of repeated blocks, as it is written in a script."""
    names = _blocks(model)
    return f"model.{names[0].rpartition('.')[0]}" if names else "[]"


def _blocks(model: nn.Module) -> list[str]:
    """Names of the repeated blocks; none where the model is one unit."""
    try:
        return [segment.modules[0] for segment in checkpointing.blocks(model)]
    except PlanError:
        return []


def shard_bytes(shape: tuple[int, ...], itemsize: int, num_cards: int) -> int:
    """Bytes of one card's part of a parameter, padding included.

    Example:
        >>> shard_bytes((10, 4), 4, 4)
        48
    """
    if not shape:
        return itemsize
    rows = -(-shape[0] // num_cards)
    numel = rows
    for size in shape[1:]:
        numel *= size
    return numel * itemsize


def spread(plan: Plan, num_cards: int) -> Plan:
    """The plan for that many cards, each of which runs at least one sample."""
    size = min(plan.micro_batch_size, -(-plan.batch_size // num_cards))
    uneven = plan.uneven or plan.batch_size % num_cards != 0
    return replace(plan, world_size=num_cards, shard="fsdp", micro_batch_size=size, uneven=uneven, sync="micro")


def needs(step: RecordedStep, num_cards: int, model: nn.Module) -> Trace:
    """What one of k cards needs, which runs micro-batches of the same size."""
    changed = Rewriting(step.trace.recording)
    shapes = {(weight.module, weight.numel): weight.shape for weight in step.weights}
    for index, birth in [*changed.born()]:
        if birth.category in _SHARDED or birth.phase == "optimizer":
            changed.resize(index, _shard(birth.module, birth.num_bytes, shapes, num_cards))
        elif birth.category == "autocast":  # FSDP2 gathers in the type of computation
            changed.remove(index)
    forward, backward = gathered_bytes(step, model)
    start, (end, _) = step.trace.recording.marks[0][0], step.update
    changed.add(made(forward, "parameter", "forward", "all-gather"), start, end)
    changed.add(made(backward, "gradient", "backward", "reduce-scatter"), start, end)
    sentence = "FSDP2 gathers the root, two units and a flat buffer, and reduces two units: counted all the time"
    return step.with_recording(changed.done(), sentence, "NCCL's own buffers are not counted")


def gathered_bytes(step: RecordedStep, model: nn.Module) -> tuple[int, int]:
    """Bytes that are whole on a card: gathered weights, and gradients with what is reduced; see the NOTE."""
    compute = step.compute_itemsize
    (root, unit), (trained_root, trained_unit) = units(step.weights, model), units(step.trained, model)
    reduced = (trained_root + trained_unit) * compute + 2 * max(trained_root, trained_unit) * _REDUCE_ITEMSIZE
    return (root + 3 * unit) * compute, reduced


def units(weights: Iterable[Weight], model: nn.Module) -> tuple[int, int]:
    """Elements of the root and of the largest repeated block."""
    names = _blocks(model)
    sums = dict.fromkeys(names, 0)
    root = 0
    for weight in weights:
        owner = next((name for name in names if weight.name.startswith(f"{name}.")), None)
        if owner is None:
            root += weight.numel
        else:
            sums[owner] += weight.numel
    return root, max(sums.values(), default=0)


def smallest(step: RecordedStep, budget_bytes: int, model: nn.Module, most: int) -> tuple[int, Trace]:
    """The least number of cards on which the step fits, and the step there; else ``most``."""
    num_cards = min(most, max(2, step.plan.world_size))
    too_few = num_cards - 1
    while True:
        trace = needs(step, num_cards, model)
        needed = step.needed_bytes(trace)
        if needed <= budget_bytes or num_cards >= most:
            break
        too_few = num_cards
        num_cards = min(most, max(num_cards + 1, _floor(step, num_cards, needed, budget_bytes)))
    while needed <= budget_bytes and num_cards - too_few > 1:  # the jump may have been too far
        middle = (num_cards + too_few) // 2
        fewer = needs(step, middle, model)
        if step.needed_bytes(fewer) <= budget_bytes:
            num_cards, trace = middle, fewer
        else:
            too_few = middle
    return num_cards, trace


def _floor(step: RecordedStep, num_cards: int, needed: int, budget_bytes: int) -> int:
    """Cards below which it cannot fit, if all that is sharded shrinks and the rest stays."""
    itemsizes = step.weight_itemsize + step.gradient_itemsize + 2 * 4
    whole = itemsizes * sum(weight.numel for weight in step.trained)
    rest = max(needed - whole // num_cards, 0)
    return MOST if rest >= budget_bytes else int(whole * _CAUTION / (budget_bytes - rest))


def wire_bytes(step: RecordedStep, plan: Plan) -> int:
    """Bytes that one card sends in an update: two gathers and a reduction in every micro-step, (k - 1) / k of each."""
    gathered, reduced = (sum(weight.numel for weight in weights) for weights in (step.weights, step.trained))
    part = (plan.world_size - 1) / plan.world_size
    per_micro_step = part * (gathered * 2 * step.compute_itemsize + reduced * _REDUCE_ITEMSIZE)
    return round(per_micro_step * plan.accumulation_steps)


def seconds(step: RecordedStep, plan: Plan) -> tuple[float, float]:
    """Modelled time of an update on k cards, and how much of it is sending that no computation hides."""
    phases = step.seconds()
    computing = (sum(phases.values()) - phases.get("optimizer", 0.0)) / step.plan.accumulation_steps
    computing *= plan.accumulation_steps
    sending = links.between(step.device).seconds(wire_bytes(step, plan))
    added = max(sending - computing, 0.0)
    return computing + phases.get("optimizer", 0.0) / plan.world_size + added, added


def _shard(module: str, num_bytes: int, shapes: dict[tuple[str, int], tuple[int, ...]], num_cards: int) -> int:
    for itemsize in (4, 2, 1, 8):
        shape = shapes.get((module, num_bytes // itemsize))
        if shape is not None:
            return shard_bytes(shape, itemsize, num_cards)
    return -(-num_bytes // num_cards)
