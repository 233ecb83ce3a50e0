"""What a plan means in a training script: the few lines that change, with snugfit and in plain PyTorch.

Entry point: ``script``. It says in code what the fields of a plan say, around what the user's own loop does;
recomputation by hand is ``recomputed_by_hand``'s. How a script loads data is left out.
"""

import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from snugfit.planning import recomputed_by_hand
from snugfit.planning.own_loop import UNKNOWN_COUNT, OwnLoop
from snugfit.plans import Plan, cut

_FILE = "plan.json"
_INDENT = 4
_MIXED = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}


@dataclass(frozen=True, slots=True)
class Script:
    """The lines of a training script that a plan comes to; what is to be known of a line stands above it."""

    snugfit: tuple[str, ...]
    "With an engine, which does what the plan says."
    pytorch: tuple[str, ...]
    "The same by hand."

    @property
    def by_hand(self) -> str:
        """A heading of the lines by hand."""
        needs_it = any(line.startswith("import snugfit") for line in self.pytorch)
        return "or without it, as far as plain PyTorch goes" if needs_it else "or without it"

    def to_dict(self) -> dict[str, list[str]]:
        """The lines, ready for JSON."""
        return {"snugfit": list(self.snugfit), "pytorch": list(self.pytorch)}


def script(plan: Plan, kind: str, loop: OwnLoop | None = None, plan_file: str | None = None) -> Script:
    """The lines of a script that a plan comes to.

    Args:
        plan: As chosen.
        kind: Of the device: ``"cuda"`` or ``"cpu"``.
        loop: What the loop does beside it; None: nothing is known.
        plan_file: Where the plan was saved; None: it was not.

    Example:
        >>> loop = OwnLoop(form="tensor", count=("len(", ")"), samples=("len(", ")"))
        >>> lines = script(Plan(batch_size=32, micro_batch_size=12), "cpu", loop).pytorch
        >>> print(*lines, sep=chr(10))
        # for each batch: 32 samples as 2 x 12 + 8
        # replaces your lines of zero_grad, loss, backward and step
        loss = 0.0  # becomes the mean of the batch, as you log it
        for start in range(0, len(batch), 12):
            micro = batch[start : start + 12]
            # the mean of micro, by its share of all samples
            share = loss_fn(model, micro) * len(micro) / len(batch)
            share.backward()
            loss += share.detach()
        optimizer.step()
        optimizer.zero_grad()
    """
    known = loop or OwnLoop()
    with_engine, by_hand = _with_snugfit(plan, known, plan_file), _in_pytorch(plan, kind, known, plan_file)
    return Script(tuple(_importing(with_engine)), tuple(_importing(by_hand)))


def _importing(code: Iterable[str]) -> Iterator[str]:
    """Code with the imports of the two packages that it names, in front of it."""
    lines = list(code)
    used = [line for line in lines if not line.lstrip().startswith("#")]
    for package in ("snugfit", "torch"):
        if any(re.search(rf"(?<![\w.]){package}\.", line) for line in used if not line.startswith("from ")):
            yield f"import {package}"
    yield from lines


def _with_snugfit(plan: Plan, loop: OwnLoop, plan_file: str | None) -> Iterator[str]:
    is_built = plan.precision == "bf16-true"
    yield "# once, where model and optimizer are made"
    if plan.optimizer_impl != "as-given" and not is_built:  # build sets it, an engine does not
        yield from _optimizer(plan, loop)
    yield from _loaded(plan_file)
    if is_built:
        yield "# job: what your function job() returns"
        yield f"# or: snugfit train JOB --plan {plan_file or _FILE}"
        yield "engine = snugfit.build(job, plan)"
    else:
        yield from _ranks(plan)
        if plan.world_size == 1:
            yield "# or, with your job() as job: engine = snugfit.build(job, plan)"
        yield from _engine(loop)
    yield from _of_each_batch(plan, loop)
    yield "result = engine.step(batch)"
    yield "loss = result.loss  # the mean of the batch, as you log it"


def _of_each_batch(plan: Plan, loop: OwnLoop) -> Iterator[str]:
    """What is said above the lines that run for each batch."""
    parts = f"as {cut(plan)}" if plan.accumulation_steps > 1 else "at once"
    yield f"# for each batch: {plan.samples_per_rank} samples {parts}"
    if loop.shown and loop.form != "tensor":
        yield f"# batch: {loop.shown}, as in your job"
    steps = ["zero_grad", "loss", "backward"]
    steps += ["clip_grad_norm_"] if loop.max_grad_norm is not None else []
    steps += ["step", "scheduler.step"] if loop.has_scheduler else ["step"]
    replaced = f"# replaces your lines of {', '.join(steps[:-1])} and {steps[-1]}"
    yield from textwrap.wrap(replaced, recomputed_by_hand.WIDTH, subsequent_indent="# ")


def _loaded(plan_file: str | None) -> Iterator[str]:
    if plan_file is None:
        yield f"# the file: snugfit plan ... -o {_FILE}"
    yield f"plan = snugfit.Plan.load({json.dumps(plan_file or _FILE)})"


def _ranks(plan: Plan) -> Iterator[str]:
    """What several ranks take that no line says."""
    if plan.world_size > 1:
        wrapper = "fully_shard" if plan.shard == "fsdp" else "DistributedDataParallel"
        yield f"# started by torchrun on {plan.world_size} ranks; now wrap model in {wrapper}"


def _engine(loop: OwnLoop) -> Iterator[str]:
    """The call that makes an engine, with what the user's loop did besides."""
    more = {
        "count": loop.count_argument,
        "max_grad_norm": "" if loop.max_grad_norm is None else f"{loop.max_grad_norm!r}",
        "scheduler": "scheduler" if loop.has_scheduler else "",
        "split": "split" if loop.has_split else "",
    }
    given = [f"{name}={value}" for name, value in more.items() if value]
    if not given:
        yield "engine = snugfit.Engine(model, optimizer, plan, loss=loss_fn)"
        return
    yield "engine = snugfit.Engine("
    yield "    model, optimizer, plan, loss=loss_fn,"
    yield f"    {', '.join(given)},"
    yield ")"


def _in_pytorch(plan: Plan, kind: str, loop: OwnLoop, plan_file: str | None) -> Iterator[str]:
    once = list(_once(plan, kind, loop, plan_file))
    yield from _imports(plan)
    if once:
        yield "# once, where model and optimizer are made"
        yield from once
    yield from _of_each_batch(plan, loop)
    yield from _loop(plan, kind, loop)


def _imports(plan: Plan) -> Iterator[str]:
    """What is imported beside ``torch`` and ``snugfit``."""
    found = [*recomputed_by_hand.imports(plan.recompute)]
    if plan.loss_chunks > 1 and recomputed_by_hand.CHECKPOINT not in found:
        found.append(recomputed_by_hand.CHECKPOINT)
    if _is_reduced_once(plan):
        yield "import contextlib"
    yield from found


def _once(plan: Plan, kind: str, loop: OwnLoop, plan_file: str | None) -> Iterator[str]:
    if plan.precision == "bf16-true":
        yield "# snugfit also keeps sums and updates exact, this does not; float inputs have"
        yield "# to come as bfloat16"
        yield "model.to(torch.bfloat16)"
    if plan.recompute:
        if recomputed_by_hand.reason_against(plan.recompute):
            yield from _loaded(plan_file)
        yield from recomputed_by_hand.lines(plan.recompute, kind, loop)
    yield from _norms(plan)
    if plan.optimizer_impl != "as-given":
        yield from _optimizer(plan, loop)
    if plan.loss_chunks > 1:
        yield from _CHUNKED_LOSS.format(chunks=plan.loss_chunks).splitlines()
    if plan.precision == "16-mixed":
        yield f'scaler = torch.amp.GradScaler("{kind}")'
    yield from _ranks(plan)
    if plan.world_size > 1 and loop.counted != "samples":
        yield f"# exact where all ranks have as many {_counted(loop)}; snugfit weights them"
    if plan.accumulation_steps > 1 and loop.form == "nested" and not loop.has_split:
        moved = '.to("cuda")' if kind == "cuda" else ""
        yield from _PART.format(moved=moved).splitlines()


def _norms(plan: Plan) -> Iterator[str]:
    if plan.norm_policy == "frozen":
        yield "# BatchNorm: its statistics stay as they are; again after each model.train()"
        yield "for layer in model.modules():"
        yield '    if getattr(layer, "running_mean", None) is not None:'
        yield "        layer.eval()"
    elif plan.norm_policy == "window":
        yield "# BatchNorm, only with snugfit: its statistics move once per batch"
        yield "moved = snugfit.norms.window_statistics(model)"


_CHUNKED_LOSS = """\
# in loss_fn, in place of snugfit.chunked_cross_entropy
def chunked_cross_entropy(hidden, weight, labels):
    rows, classes = hidden.flatten(0, -2), labels.flatten()
    total = 0.0
    for some, theirs in zip(rows.chunk({chunks}), classes.chunk({chunks})):
        part = checkpoint(summed, some, weight, theirs, use_reentrant=False)
        total = total + part
    return total / (classes != -100).sum()
def summed(rows, weight, classes):
    cross_entropy = torch.nn.functional.cross_entropy
    return cross_entropy(rows @ weight.T, classes, reduction="sum")"""

_PART = """\
# the samples of a batch from start to stop
def part(value, start, stop):
    if isinstance(value, torch.Tensor):
        return (value[start:stop] if value.dim() else value){moved}
    if hasattr(value, "items"):
        parts = {{k: part(v, start, stop) for k, v in value.items()}}
        return type(value)(parts)
    if isinstance(value, (list, tuple)):
        parts = [part(v, start, stop) for v in value]
        if hasattr(value, "_fields"):
            return type(value)(*parts)
        return type(value)(parts)
    return value"""


def _loop(plan: Plan, kind: str, loop: OwnLoop) -> Iterator[str]:
    """Forward, backward and update of one batch."""
    if plan.accumulation_steps == 1:
        yield from _forward(plan, kind, ["loss = loss_fn(model, batch)"])
        yield _backward(plan, "loss")
    else:
        yield "loss = 0.0  # becomes the mean of the batch, as you log it"
        yield from _cutting(plan, loop, kind)
        body = [*_forward(plan, kind, list(_share(loop))), _backward(plan, "share")]
        if _is_reduced_once(plan):
            yield "    # DDP: gradients are reduced in the last one"
            yield "    with contextlib.nullcontext() if is_last else model.no_sync():"
            body = _indented(body)
        yield from _indented(body)
        yield "    loss += share.detach()"
    yield from _update(plan, loop)


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _cutting(plan: Plan, loop: OwnLoop, kind: str) -> Iterator[str]:
    """The head of the loop over micro-batches, which come to the device one by one."""
    size = plan.micro_batch_size
    moved = '.to("cuda")' if kind == "cuda" else ""
    piece = f"[start : start + {size}]{moved}"
    made = {
        "tensor": f"batch{piece}",
        "dict": f"{{k: t{piece} for k, t in batch.items()}}",
        "tuple": f"tuple(t{piece} for t in batch)",
        "list": f"[t{piece} for t in batch]",
        "nested": f"part(batch, start, start + {size})",
    }.get("other" if loop.has_split else loop.form)
    if made is None:
        yield from _cut_by_a_function(plan, loop, bool(moved))
        return
    before, behind = loop.samples
    yield f"for start in range(0, {before}batch{behind}, {size}):"
    yield f"    micro = {made}"
    if _is_reduced_once(plan):
        yield f"    is_last = start + {size} >= {before}batch{behind}"


def _cut_by_a_function(plan: Plan, loop: OwnLoop, is_moved: bool) -> Iterator[str]:
    """The head of the loop where a function of the user's cuts batches."""
    name = "split" if loop.has_split else "cut"
    if not loop.has_split:
        yield f"# cut: a function of yours that gives a batch in parts of {plan.micro_batch_size} samples"
    parts = f"{name}(batch, {plan.micro_batch_size})"
    if _is_reduced_once(plan):
        yield f"parts = list({parts})"
    yield f"for micro in {'parts' if _is_reduced_once(plan) else parts}:"
    if is_moved:
        yield "    # bring the tensors of micro to the card here"
    if _is_reduced_once(plan):
        yield "    is_last = micro is parts[-1]"


def _is_reduced_once(plan: Plan) -> bool:
    """Whether DDP must be kept from reducing gradients in every micro-step."""
    return plan.world_size > 1 and plan.accumulation_steps > 1 and plan.sync == "window"


def _forward(plan: Plan, kind: str, lines: list[str]) -> Iterator[str]:
    """The lines that compute a loss, in the precision of the plan."""
    mixed = _MIXED.get(plan.precision)
    if mixed is not None:
        yield f'with torch.autocast("{kind}", torch.{mixed}):'
    yield from lines if mixed is None else _indented(lines)


def _share(loop: OwnLoop) -> Iterator[str]:
    """What a micro-batch adds to the mean of its batch."""
    before, behind = loop.count
    if loop.count == UNKNOWN_COUNT:
        yield "# num_samples: how many samples a batch holds"
    yield f"# the mean of micro, by its share of all {_counted(loop)}"
    part, whole = f"{before}micro{behind}", f"{before}batch{behind}"
    line = f"share = loss_fn(model, micro) * {part} / {whole}"
    if len(line) <= recomputed_by_hand.WIDTH - 2 * _INDENT:
        yield line
    else:
        yield f"part_of_batch = {part}"
        yield f"whole_batch = {whole}"
        yield "share = loss_fn(model, micro) * part_of_batch / whole_batch"


def _backward(plan: Plan, loss: str) -> str:
    return f"scaler.scale({loss}).backward()" if plan.precision == "16-mixed" else f"{loss}.backward()"


def _counted(loop: OwnLoop) -> str:
    return "that the job's count counts" if loop.counted == "count" else loop.counted


def _update(plan: Plan, loop: OwnLoop) -> Iterator[str]:
    is_scaled = plan.precision == "16-mixed"
    if loop.max_grad_norm is not None:
        if is_scaled:
            yield "scaler.unscale_(optimizer)"
        clipped = f"torch.nn.utils.clip_grad_norm_(model.parameters(), {loop.max_grad_norm!r})"
        yield f"grad_norm = {clipped}"
    yield "scaler.step(optimizer)" if is_scaled else "optimizer.step()"
    if is_scaled:
        yield "scaler.update()"
    if loop.has_scheduler:
        yield "scheduler.step()"
    yield "optimizer.zero_grad()"
    if plan.norm_policy == "window":
        yield "moved.update()"


def _optimizer(plan: Plan, loop: OwnLoop) -> Iterator[str]:
    form = "foreach=False, fused=False" if plan.optimizer_impl == "for-loop" else f"{plan.optimizer_impl}=True"
    if not loop.optimizer:
        yield f"# make your optimizer with {form}"
        return
    if loop.arguments.startswith("groups"):
        yield "# groups: the parameter groups that your script makes"
    line = f"optimizer = {loop.optimizer}({loop.arguments}, {form})"
    if len(line) <= recomputed_by_hand.WIDTH:
        yield line
        return
    yield f"optimizer = {loop.optimizer}("
    yield f"    {loop.arguments},"
    yield f"    {form},"
    yield ")"
