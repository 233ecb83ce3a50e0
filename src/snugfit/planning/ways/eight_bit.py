"""Adam's moments in 8 bits, as torchao keeps them: a quarter of fp32 state, one line of change.

Entry points: ``row``, and ``with_8bit_optimizer`` for the job. Left out: 4-bit and fp8 state, and
optimizers other than Adam and AdamW, for which torchao has none.

NOTE [What torchao's 8-bit state takes] (torchao/optim/subclass_8bit.py and adam.py of 0.18)
1. A moment of n elements has n bytes of codes, one fp32 scale for each block of 256 elements, and a table of 256 fp32
   values of its own. Moments of fewer than 4,096 elements, or that blocks do not divide, stay as the weight is.
2. The update is compiled and made for one parameter after another. Inductor's code of it allocates two fp32 arrays as
   large as the parameter, and the scales of both moments (read from its C++ code, torch 2.13).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from snugfit.errors import UnsupportedError
from snugfit.jobs import Job
from snugfit.memory.events import Work
from snugfit.memory.traces import Trace
from snugfit.planning import cost
from snugfit.planning.ways import by_hand, recorded_step, rows
from snugfit.planning.ways.recorded_step import RecordedStep, made
from snugfit.planning.ways.rewriting import Rewriting
from snugfit.planning.ways.rows import Case, WayOut
from snugfit.plans import Plan
from snugfit.training import buckets

NAMES: dict[type, str] = {torch.optim.Adam: "Adam8bit", torch.optim.AdamW: "AdamW8bit"}
"Torch's optimizers to those of torchao.optim."

_BLOCK, _TABLE_BYTES, _LEAST = 256, 256 * 4, 4096
_KEPT = ("lr", "betas", "eps", "weight_decay", "amsgrad")
_UPDATE_BYTES = 32
"Read and written per element: fp32 weight, gradient, two arrays of Inductor's, codes of two moments."


def moment_bytes(numel: int, itemsize: int) -> tuple[int, ...]:
    """Bytes of the storages that hold one moment; see the NOTE.

    Args:
        numel: Elements of the parameter.
        itemsize: Of what the optimizer holds.

    Example:
        >>> moment_bytes(1_048_576, 4)
        (1048576, 16384, 1024)
        >>> moment_bytes(1000, 4)
        (4000,)
    """
    if numel < _LEAST or numel % _BLOCK:
        return (numel * itemsize,)
    return numel, numel // _BLOCK * 4, _TABLE_BYTES


def with_8bit_optimizer(job: Job) -> Job:
    """The job with torchao's 8-bit forms of its optimizers, options and groups as they are.

    Raises:
        UnsupportedError: When the optimizer is made: torchao is missing, or has no form of that optimizer.
    """
    return replace(job, optimizer=lambda model: _converted(job.optimizer(model)))


def row(case: Case) -> WayOut:
    """The row of this way."""
    step, trace = case.changed(lambda gradient: gradient + 2, needs, is_planned_again=True)
    if not can_convert(step):
        return rows.unknown(
            case, "8bit-optimizer", f"torchao has no 8-bit form of {rows.optimizer_of(step)} as it is used here"
        )
    phases = step.seconds()
    name = NAMES[step.optimizers[0].kind]
    is_there, lacking = rows.installed("torchao")
    plan = replace(step.plan, optimizer_impl="as-given")
    code = [f"from torchao.optim import {name}", f"optimizer = {name}({_arguments(case, plan)})"]
    found = rows.row(
        case,
        "8bit-optimizer",
        trace,
        change=f"{name} of torchao keeps Adam's moments in 8 bits{rows.and_bfloat16(case, step)}",
        code="\n".join(code),
        by_hand=by_hand.lines(case, plan, code, is_exact=True),
        seconds=sum(phases.values()) - phases.get("optimizer", 0.0) + update_seconds(step),
        plan=plan,
        missing="" if is_there else "torchao",
        job=with_8bit_optimizer(case.job) if is_there else None,
        notes=(*lacking, "its update is compiled: torch.compile must work", "moments are rounded in blocks of 256"),
    )
    if found.fits and found.job is not None and not case.is_planned_next:
        recorded_step.record(found.job, plan, case.device, case.model)  # what is named can be planned
    return replace(found, optimizer=name)


def _arguments(case: Case, plan: Plan) -> str:
    """What torchao's optimizer is called with: the job's options, and the rounding of the plan."""
    parameters = "groups" if case.loop.arguments.startswith("groups") else "model.parameters()"
    rounding = ", bf16_stochastic_round=True" if plan.precision == "bf16-true" else ""
    return f"{parameters}{by_hand.options(case)}{rounding}"


def can_convert(step: RecordedStep) -> bool:
    """Whether torchao has a form of all optimizers of a job."""
    return all(group.kind in NAMES and not group.options.get("maximize") for group in step.optimizers)


def needs(step: RecordedStep) -> Trace:
    """The step with its optimizer's state in 8 bits."""
    changed = Rewriting(step.trace.recording)
    for index, _ in [*changed.born(phase="optimizer")]:
        changed.remove(index)
    state_itemsize = 4 if step.plan.precision == "bf16-true" else step.weight_itemsize
    num_moments = 3 if any(group.options.get("amsgrad") for group in step.optimizers) else 2
    largest = max(weight.numel for weight in step.trained)
    transient = [4 * largest, 4 * largest, 4 * largest // _BLOCK, 4 * largest // _BLOCK]
    if step.plan.precision == "bf16-true":  # fp32 copies of a bucket's weights and gradients, see training/buckets
        bucket = min(4 * sum(weight.numel for weight in step.trained), max(4 * largest, buckets.BUCKET_BYTES))
        transient += [bucket, bucket]
    first, (begin, end) = step.trace.recording.marks[0][0], step.update
    for num_bytes in _state(step, num_moments, state_itemsize):
        changed.add(made(num_bytes, "optimizer", "optimizer", "OptimState8bit"), first)
    for num_bytes in transient:
        changed.add(made(num_bytes, "temporary", "optimizer", "single_param_adam"), begin, end)
    sentence = (
        "8-bit state is counted from torchao's layout: a byte per element, an fp32 scale per 256, a table of 1 KiB"
    )
    return step.with_recording(changed.done(), sentence)


def update_seconds(step: RecordedStep) -> float:
    """Modelled time of the update."""
    kernels = [Work("single_param_adam", "optimizer", "float32", 0, _UPDATE_BYTES * w.numel) for w in step.trained]
    return cost.step_time(kernels, step.device)


def _state(step: RecordedStep, num_moments: int, itemsize: int) -> Iterator[int]:
    for weight in step.trained:
        for _ in range(num_moments):
            yield from moment_bytes(weight.numel, itemsize)


def _converted(made: Any) -> Any:
    if isinstance(made, (list, tuple)):
        return [_of(optimizer) for optimizer in made]
    return _of(made)


def _of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    name = NAMES.get(type(optimizer))
    if name is None or any(group.get("maximize") for group in optimizer.param_groups):
        raise UnsupportedError(
            f"there is no 8-bit form of {type(optimizer).__name__} with these options",
            got=f"{type(optimizer).__module__}.{type(optimizer).__name__}",
            expected="torch.optim.Adam or AdamW, which minimise",
            hint="use one of them, or another way out",
        )
    groups = [{key: group[key] for key in ("params", *_KEPT) if key in group} for group in optimizer.param_groups]
    return _torchao(name)(groups)


def _torchao(name: str) -> Callable[..., torch.optim.Optimizer]:
    try:
        with rows.quiet_imports():
            from torchao import optim
    except ImportError as error:
        raise UnsupportedError(
            "8-bit optimizers need torchao",
            got=str(error),
            expected="torchao, an optional extra of snugfit",
            hint='pip install "snugfit[torchao]"',
            library="torchao",
        ) from error
    found: Callable[..., torch.optim.Optimizer] = getattr(optim, name)
    return found
