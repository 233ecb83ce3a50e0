"""What a plan means in a training script: the few lines that change, with snugfit and in plain PyTorch.

Entry point: ``script``. It says in code what the fields of a plan say, around what the user's own loop does;
recomputation by hand is ``recomputed_by_hand``'s. How a script loads data is left out.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from snugfit.planning import recomputed_by_hand
from snugfit.planning.own_loop import UNKNOWN_COUNT, OwnLoop
from snugfit.plans import Plan, cut

_FILE = "plan.json"
_LOOP = 4
"Indentation of a loop's body."
_MIXED = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}


@dataclass(frozen=True, slots=True)
class Script:
    """The lines of a training script that a plan comes to; what is to be known of a line stands above it."""

    snugfit: tuple[str, ...]
    "With an engine, which does what the plan says."
    pytorch: tuple[str, ...]
    "The same by hand."

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
        >>> loop = OwnLoop(form="tensor", count=("len(", ")"))
        >>> lines = script(Plan(batch_size=32, micro_batch_size=12), "cpu", loop).pytorch
        >>> print(*lines[-7:], sep=chr(10))
        # for each batch: 32 samples as 2 x 12 + 8
        for micro in batch.split(12):
            # the mean of micro, by its share of all samples
            loss = loss_fn(model, micro) * len(micro) / len(batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    known = loop or OwnLoop()
    return Script(tuple(_with_snugfit(plan, known, plan_file)), tuple(_in_pytorch(plan, kind, known, plan_file)))


def _with_snugfit(plan: Plan, loop: OwnLoop, plan_file: str | None) -> Iterator[str]:
    is_built = plan.precision == "bf16-true"
    if plan.optimizer_impl != "as-given" and not is_built:  # build sets it, an engine does not
        yield from _optimizer(plan, loop)
    yield from _loaded(plan_file)
    if is_built:
        yield f"# or: snugfit train JOB --plan {plan_file or _FILE}"
        yield "engine = snugfit.build(job, plan)"
    else:
        yield from _ranks(plan)
        if plan.world_size == 1:
            yield "# or: engine = snugfit.build(job, plan)"
        yield from _engine(loop)
    parts = f"as {cut(plan)}" if plan.accumulation_steps > 1 else "at once"
    yield f"# for each batch: {plan.samples_per_rank} samples {parts}"
    yield "result = engine.step(batch)"


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
    if once:
        yield "# once, where model and optimizer are made"
        yield from once
    how = "at once" if plan.accumulation_steps == 1 else f"as {cut(plan)}"
    yield f"# for each batch: {plan.samples_per_rank} samples {how}"
    yield from _loop(plan, kind, loop)


def _once(plan: Plan, kind: str, loop: OwnLoop, plan_file: str | None) -> Iterator[str]:
    if _is_reduced_once(plan):
        yield "import contextlib"
    if plan.precision == "bf16-true":
        yield "# snugfit also keeps sums and updates exact, this does not"
        yield "model.to(torch.bfloat16)"
    if plan.recompute:
        if recomputed_by_hand.reason_against(plan.recompute):
            yield from _loaded(plan_file)
        yield from recomputed_by_hand.lines(plan.recompute, kind, loop)
    if plan.norm_policy == "frozen":
        yield "# BatchNorm: its statistics stay as they are"
        yield "snugfit.norms.freeze(model)"
    elif plan.norm_policy == "window":
        yield "# BatchNorm: its statistics move once per batch"
        yield "moved = snugfit.norms.window_statistics(model)"
    if plan.optimizer_impl != "as-given":
        yield from _optimizer(plan, loop)
    if plan.loss_chunks > 1:
        chunks = f"chunks={plan.loss_chunks}"
        yield f"# in loss_fn: snugfit.chunked_cross_entropy(hidden, weight, labels, {chunks})"
    if plan.precision == "16-mixed":
        yield f'scaler = torch.amp.GradScaler("{kind}")'
    yield from _ranks(plan)
    if plan.world_size > 1 and loop.counted != "samples":
        yield f"# exact where all ranks have as many {_counted(loop)}; snugfit weights them"


def _loop(plan: Plan, kind: str, loop: OwnLoop) -> Iterator[str]:
    """Forward, backward and update of one batch."""
    is_cut = plan.accumulation_steps > 1
    body = list(_micro_step(plan, kind, loop))
    if is_cut:
        yield from _cutting(plan, loop, kind)
        if _is_reduced_once(plan):
            yield "    # DDP: gradients are reduced in the last one"
            yield "    with contextlib.nullcontext() if part is parts[-1] else model.no_sync():"
            body = [f"    {line}" for line in body]
        body = [f"    {line}" for line in body]
    yield from body
    yield from _update(plan, loop)


def _cutting(plan: Plan, loop: OwnLoop, kind: str) -> Iterator[str]:
    """The head of the loop over micro-batches, which come to the device one by one."""
    size = plan.micro_batch_size
    moved = '.to("cuda")' if kind == "cuda" else ""
    form = "other" if loop.has_split else loop.form
    cutter = "split" if loop.has_split else "snugfit.split"
    parts = {
        "tensor": f"batch.split({size})",
        "dict": f"zip(*(t.split({size}) for t in batch.values()))",
        "other": f"{cutter}(batch, {size})",
    }.get(form, f"zip(*(t.split({size}) for t in batch))")
    made = {
        "tensor": f"part{moved}",
        "dict": f"{{k: t{moved} for k, t in zip(batch, part)}}" if moved else "dict(zip(batch, part))",
        "tuple": f"tuple(t{moved} for t in part)" if moved else "part",
        "list": f"[t{moved} for t in part]",
    }.get(form, "part")
    is_listed = _is_reduced_once(plan)
    is_made = form in ("dict", "list") or (bool(moved) and form != "other")
    name = "part" if is_made or is_listed else "micro"
    if is_listed:
        yield f"parts = list({parts})"
    yield f"for {name} in {'parts' if is_listed else parts}:"
    if form == "other" and moved:
        yield "    # bring the tensors of micro to the card here"
    if is_made or is_listed:
        yield f"    micro = {made}"


def _is_reduced_once(plan: Plan) -> bool:
    """Whether DDP must be kept from reducing gradients in every micro-step."""
    return plan.world_size > 1 and plan.accumulation_steps > 1 and plan.sync == "window"


def _micro_step(plan: Plan, kind: str, loop: OwnLoop) -> Iterator[str]:
    """Forward and backward of one micro-batch, or of the whole batch."""
    mixed = _MIXED.get(plan.precision)
    pad = ""
    if mixed is not None:
        yield f'with torch.autocast("{kind}", torch.{mixed}):'
        pad = "    "
    if plan.accumulation_steps > 1:
        before, behind = loop.count
        if loop.count == UNKNOWN_COUNT:
            yield f"{pad}# num_samples: how many samples a batch holds"
        yield f"{pad}# the mean of micro, by its share of all {_counted(loop)}"
        part, whole = f"{before}micro{behind}", f"{before}batch{behind}"
        line = f"{pad}loss = loss_fn(model, micro) * {part} / {whole}"
        if len(line) <= recomputed_by_hand.WIDTH - _LOOP:
            yield line
        else:
            yield f"{pad}part_of_batch = {part}"
            yield f"{pad}whole_batch = {whole}"
            yield f"{pad}loss = loss_fn(model, micro) * part_of_batch / whole_batch"
    else:
        yield f"{pad}loss = loss_fn(model, batch)"
    yield "scaler.scale(loss).backward()" if mixed == "float16" else "loss.backward()"


def _counted(loop: OwnLoop) -> str:
    return "that the job's count counts" if loop.counted == "count" else loop.counted


def _update(plan: Plan, loop: OwnLoop) -> Iterator[str]:
    is_scaled = plan.precision == "16-mixed"
    if loop.max_grad_norm is not None:
        if is_scaled:
            yield "scaler.unscale_(optimizer)"
        yield f"torch.nn.utils.clip_grad_norm_(model.parameters(), {loop.max_grad_norm!r})"
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
