"""Makes an engine out of a job and a plan: the one place that knows in which order everything is made.

Entry points: ``build``, and ``construct`` below it, which also runs under fake tensors. The order: model, recompute,
bf16 weights, device, optimizer, its master weights, scheduler, engine. Wrapping in DDP or FSDP is left out.
"""

import copy
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from snugfit import hardware
from snugfit.errors import DeviceMemoryError, PlanError, SnugfitError, UnsupportedError
from snugfit.jobs import Job
from snugfit.plans import Plan
from snugfit.training import (
    admission,
    bf16_weights,
    checkpointing,
    distributed,
    failures,
    fingerprint,
    recovery,
    windows,
)
from snugfit.training.engine import Engine
from snugfit.training.example import example_batch as example_batch

_IMPLEMENTATIONS = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}


_FORMS = {
    "optimizer": "(model) -> torch.optim.Optimizer, or a sequence of them, over the model's parameters",
    "scheduler": "(optimizer) -> scheduler, which gets what Job.optimizer returned",
}


def build(job: Job, plan: Plan, device: str | hardware.Device = "auto") -> Engine:
    """Make the engine that runs a job as a plan says, on a device of this machine.

    A module given as ``job.model`` is changed and moved in place.

    Args:
        job: What is trained.
        plan: How.
        device: ``"auto"`` (the present accelerator, else the CPU), ``"cpu"``, or a name whose kind is present.

    Raises:
        PlanError: The plan contradicts the job, the ranks or this machine; or the model cannot be built.
        UnsupportedError: The plan asks for something that is not built yet.
        DeviceMemoryError: The model does not fit.
    """
    admission.check_job(job)
    admission.check_is_plan(plan)
    target = present(device)
    if plan.world_size != distributed.world_size():
        raise PlanError(
            "the plan is for another number of ranks",
            got=f"world_size={plan.world_size} in the plan, {distributed.world_size()} running",
            expected="the same",
            hint=f"plan with world_size={distributed.world_size()}, or start with torchrun",
        )
    return construct(job, plan, target.torch_device)


def present(device: str | hardware.Device) -> hardware.Device:
    """Resolve a device that is to be trained on.

    Raises:
        PlanError: Unknown, or not in this machine.
    """
    target = hardware.resolve(device)
    if target.kind == "cuda" and not torch.cuda.is_available():
        raise PlanError(
            "training needs a device that is present",
            got=f"device={target.name!r}, and no CUDA device on this machine",
            expected='"auto" or "cpu"',
            hint="use estimate or plan for other devices",
        )
    return target


def construct(job: Job, plan: Plan, device: torch.device) -> Engine:
    """Make the engine of a job and a plan on a torch device, reading no tensor value.

    Raises:
        PlanError: See ``build``.
        UnsupportedError: See ``build``.
        DeviceMemoryError: See ``build``.
    """
    admission.check_plan(plan)
    model = build_model(job)
    admission.check_has_values(model, "let Job.model build it without torch.device('meta')")
    fingerprint.check(plan, model)
    if plan.recompute:
        checkpointing.apply(model, plan.recompute)
    if plan.precision == "bf16-true":
        bf16_weights.convert(model, plan)
    model = _moved(model, device)
    made = _made_by("optimizer", job.optimizer, model)
    optimizers = list(made) if isinstance(made, (list, tuple)) else [made]
    admission.check_made_for(model, optimizers)
    set_implementation(optimizers, plan.optimizer_impl)
    if plan.precision == "bf16-true":
        bf16_weights.attach(model, optimizers, plan)
    return Engine(
        model,
        optimizers,
        plan,  # applies the segments once more, which only takes them over
        loss=job.loss,
        count=job.count,
        precision=plan.precision,
        scheduler=None if job.scheduler is None else _made_by("scheduler", job.scheduler, made),
        max_grad_norm=job.max_grad_norm,
        loss_scale=job.loss_scale,
        max_skipped_windows=job.max_skipped_windows,
        nonfinite=job.nonfinite,
        split=job.split,
    )


def _made_by(name: str, function: Callable[[Any], Any], argument: Any) -> Any:
    """What a function of the job makes; what torch refuses in it, or no result, is an error by the function's name."""
    try:
        made = function(argument)
    except (TypeError, ValueError) as error:
        if isinstance(error, SnugfitError) or failures.raised_in(error) not in ("snugfit", "torch"):
            raise  # the user's own
        raise PlanError(
            f"Job.{name} raised {type(error).__name__}",
            got=str(error).strip().partition("\n")[0] or "no message",
            expected=_FORMS[name],
            hint=f"call job.{name} by itself to see where it fails",
        ) from error
    if made is None:
        raise PlanError(
            f"Job.{name} returned nothing",
            got="None",
            expected=_FORMS[name],
            hint=f"return the {name} from the function",
        )
    return made


def build_model(job: Job) -> nn.Module:
    """The job's module, built if it is given as a function.

    Raises:
        PlanError: The function raises, or what it returns is no module or has no parameters.
        DeviceMemoryError: Memory ran out.
    """
    if isinstance(job.model, nn.Module):
        model: Any = job.model
    else:
        try:
            model = job.model()
        except SnugfitError:
            raise
        except Exception as error:
            if _is_wrapping(error):
                raise PlanError(
                    "the function that builds the model wraps it in DistributedDataParallel, and that failed",
                    got=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
                    expected="a function that returns the plain model, or a wrapped module as Job.model itself",
                    hint='return the plain model, and say shard="ddp" and world_size where a plan is made',
                ) from error
            kind = DeviceMemoryError if recovery.is_out_of_memory(error) else PlanError
            raise kind(
                f"the model raised {type(error).__name__} while it was built",
                got=f"{type(error).__name__}: {error}",
                expected="a module",
                hint="call job.model() by itself to see where it fails",
            ) from error
    if not isinstance(model, nn.Module):
        raise PlanError(
            "Job.model did not return a module",
            got=type(model).__name__,
            expected="torch.nn.Module",
            hint="return the model from the function",
        )
    admission.check_parameters(model)
    return model


def _is_wrapping(error: Exception) -> bool:
    """Whether an error came up inside of DDP while it was made."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(isinstance(frame.f_locals.get("self"), nn.parallel.DistributedDataParallel) for frame in frames)


def prepare(job: Job, batch: Any, micro_batch_size: int) -> tuple[windows.MicroBatches, list[float]]:
    """Cut a batch of the job on the host and count its micro-batches, as the engine does.

    Raises:
        BatchError: The batch cannot be cut or counted.
    """
    return windows.prepare(batch, micro_batch_size, job.count, job.split)


def set_implementation(optimizers: Sequence[torch.optim.Optimizer], implementation: str) -> None:
    """Choose between an optimizer's for-loop, foreach and fused forms; ``"as-given"`` leaves it.

    Raises:
        PlanError: An optimizer has no such choice.
    """
    if implementation == "as-given":
        return
    for optimizer in optimizers:
        for name, value in _IMPLEMENTATIONS[implementation].items():
            if name not in optimizer.defaults:
                if not value:
                    continue
                raise PlanError(
                    f"{type(optimizer).__name__} has no {implementation} implementation",
                    got=f"optimizer_impl={implementation!r}",
                    expected=f"an optimizer that takes {name}=True, such as torch.optim.AdamW",
                    hint='use optimizer_impl="as-given"',
                )
            optimizer.defaults[name] = value
            for group in optimizer.param_groups:
                group[name] = value


def copied(module: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A copy of a module that shares nothing with it.

    Args:
        module: Not changed.
        memo: See ``copy.deepcopy``; what else is copied with it then refers to the copies.

    Raises:
        UnsupportedError: It cannot be copied.
    """
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # whatever the user's classes raise
        if recovery.is_out_of_memory(error):
            raise
        raise UnsupportedError(
            "the model cannot be copied, and running it would change it",
            got=f"{type(module).__name__}: {type(error).__name__}: {error}",
            expected="a module that copy.deepcopy copies",
            hint="keep results of a forward, locks and open files out of the module's attributes, or pass a function "
            "that builds it: Job(lambda: MyModel(), ...)",
        ) from error


def _moved(model: nn.Module, device: torch.device) -> nn.Module:
    try:
        return model.to(device)
    except Exception as error:
        if not recovery.is_out_of_memory(error):
            raise
        raise DeviceMemoryError(
            "the model does not fit on the device",
            got=f"{type(error).__name__}: {error}",
            expected="memory for all parameters and buffers",
            hint="`snugfit estimate` says what needs how much",
        ) from error
