"""What a plan means in a training script: the few lines that change, with snugfit and in plain PyTorch.

Entry point: ``script``. It says in code what the fields of a plan say; how the script loads data, and changes of the
job itself, are left out.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from snugfit.plans import Plan, Segment


class Line(NamedTuple):
    """A line of code and what is to be known about it."""

    code: str
    comment: str = ""

    def __str__(self) -> str:
        return f"{self.code}  # {self.comment}" if self.comment else self.code


@dataclass(frozen=True, slots=True)
class Script:
    """The lines of a training script that a plan comes to."""

    snugfit: tuple[Line, ...]
    "With an engine, which does what the plan says."
    pytorch: tuple[Line, ...]
    "The same by hand."

    def to_dict(self) -> dict[str, list[str]]:
        """The lines as text, ready for JSON."""
        return {"snugfit": [str(line) for line in self.snugfit], "pytorch": [str(line) for line in self.pytorch]}


def script(plan: Plan, kind: str) -> Script:
    """The lines of a script that a plan comes to.

    Args:
        plan: As chosen.
        kind: Of the device: ``"cuda"`` or ``"cpu"``.

    Example:
        >>> lines = script(Plan(batch_size=32, micro_batch_size=12), "cpu").pytorch
        >>> lines[0].comment
        '2 x 12 + 8 samples; or tensor.split(12)'
    """
    return Script(tuple(_with_snugfit(plan)), tuple(_in_pytorch(plan, kind)))


def cut(plan: Plan) -> str:
    """How the samples of one rank are cut, ``"2 x 43 + 42"``."""
    full, tail = divmod(plan.samples_per_rank, plan.micro_batch_size)
    return f"{full} x {plan.micro_batch_size}" + (f" + {tail}" if tail else "")


def _with_snugfit(plan: Plan) -> Iterator[Line]:
    if plan.optimizer_impl != "as-given" and plan.precision != "bf16-true":  # build sets it, an engine does not
        yield Line(_implementation(plan), "pass it to the optimizer yourself")
    yield Line('plan = snugfit.Plan.load("plan.json")', "kept by -o plan.json")
    if plan.precision == "bf16-true":
        yield Line("engine = snugfit.build(job, plan)", "or: snugfit train JOB --plan plan.json")
    else:
        yield Line("engine = snugfit.Engine(model, optimizer, plan, loss=loss_fn)", "or: snugfit.build(job, plan)")
    parts = f"as {cut(plan)}" if plan.accumulation_steps > 1 else "at once"
    yield Line("result = engine.step(batch)", f"{plan.samples_per_rank} samples {parts}")


def _in_pytorch(plan: Plan, kind: str) -> Iterator[Line]:
    if plan.precision == "bf16-true":
        yield Line("model.to(torch.bfloat16)", "build also keeps sums and updates exact")
    if plan.optimizer_impl != "as-given":
        yield Line(_implementation(plan), "pass it to the optimizer")
    if plan.recompute:
        yield from _recomputed(plan.recompute)
    if plan.loss_chunks > 1:
        chunks = f"chunks={plan.loss_chunks}"
        yield Line(f"snugfit.chunked_cross_entropy(hidden, weight, labels, {chunks})", "the loss, from the last layer")
    if plan.norm_policy != "micro":
        is_frozen = plan.norm_policy == "frozen"
        code = "snugfit.norms.freeze(model)" if is_frozen else "moved = snugfit.norms.window_statistics(model)"
        yield Line(code, "BatchNorm" if is_frozen else "BatchNorm: moved.update() after each batch")
    yield from _loop(plan, kind)


def _loop(plan: Plan, kind: str) -> Iterator[Line]:
    """Forward, backward and update of one batch."""
    share, size = plan.samples_per_rank, plan.micro_batch_size
    is_cut = plan.accumulation_steps > 1
    pad = "    " if is_cut else ""
    if is_cut:
        by_hand = f"tensor.split({size})" if share % size else f"a DataLoader of {size}"
        yield Line(f"for micro in snugfit.split(batch, {size}):", f"{cut(plan)} samples; or {by_hand}")
    if plan.world_size > 1 and is_cut and plan.sync == "window":
        yield Line(f"{pad}with model.no_sync(): ...", "DDP: around the rest, except in the last")
    mixed = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}.get(plan.precision)
    inner = pad
    if mixed is not None:
        yield Line(f'{pad}with torch.autocast("{kind}", torch.{mixed}):', "forward and loss only")
        inner += "    "
    if is_cut:
        yield Line(f"{inner}loss = loss_fn(model, micro) * n / {share}", "n: samples of micro; or both in tokens")
    else:
        yield Line(f"{inner}loss = loss_fn(model, batch)", f"all {share} samples at once")
    scaled = mixed == "float16"
    backward = f"{pad}scaler.scale(loss).backward()" if scaled else f"{pad}loss.backward()"
    yield Line(backward, "scaler = torch.amp.GradScaler()" if scaled else "")
    update = "scaler.step(optimizer); scaler.update()" if scaled else "optimizer.step()"
    yield Line(f"{update}; optimizer.zero_grad()", f"once per {share} samples" if is_cut else "")


def _implementation(plan: Plan) -> str:
    return "foreach=False, fused=False" if plan.optimizer_impl == "for-loop" else f"{plan.optimizer_impl}=True"


def _recomputed(segments: tuple[Segment, ...]) -> Iterator[Line]:
    yield Line("snugfit.checkpointing.apply(model, plan.recompute)", "or by hand, where the model calls them:")
    for policy, count in Counter(segment.policy for segment in segments).items():
        first = next(segment.modules[0] for segment in segments if segment.policy == policy)
        yield Line(f"    {_BY_HAND.get(policy, _SELECTIVE)}", f"{count} {policy}: {first}{' ...' if count > 1 else ''}")


_SELECTIVE = "checkpoint(module, x, context_fn=...)"
_BY_HAND = {
    "full": "checkpoint(module, x, use_reentrant=False)",
    "offload": "with save_on_cpu(pin_memory=True): module(x)",
}
"Of torch.utils.checkpoint and torch.autograd.graph."
