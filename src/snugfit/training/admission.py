"""What an engine accepts: every refusal before the first window, each by the name of what cannot be driven.

Entry point: ``check``. Nothing is changed here; the ranges of single options are ``jobs``'s.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from snugfit.errors import PlanError, UnsupportedError, warn
from snugfit.jobs import Job, check_module
from snugfit.plans import Plan
from snugfit.training import closures, gradients, precision, updates, wide_sums

_FILL = 'build it on the device; or give it room with model.to_empty(device="cuda"), and load or initialise its weights'
_NOT_YET = {
    "shard": ("none", "pass a model that is wrapped in DDP to snugfit.Engine"),
}


def check(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    plan: Plan | None,
    precision_name: str,
    nonfinite: str,
) -> None:
    """Refuse what would train wrongly or fail late.

    Raises:
        PlanError: No parameters, an optimizer over another model, half-precision weights under fp16.
        UnsupportedError: Something that is not driven exactly.
    """
    check_parameters(model)
    check_has_values(model, _FILL)
    if plan is not None:
        check_plan(plan)
    precision.check_name(precision_name)
    _check_optimizers(model, optimizers)
    Membership(model, optimizers).warn()
    closures.check(optimizers, precision_name)
    _check_model(model)
    gradients.check_sparse_modules(model, optimizers)
    if precision_name == "bf16-true":
        _check_bf16(model, optimizers)
    elif precision_name != "16-mixed":
        wide_sums.warn_of_half_weights(model, optimizers, precision_name)
    if precision_name == "16-mixed":
        precision.refuse_half_weights(model)
        if nonfinite == "ignore":
            raise PlanError(
                "fp16 training needs to know whether a gradient is finite",
                got='precision="16-mixed", nonfinite="ignore"',
                expected='nonfinite="skip" or "raise": the loss scale is found by overflowing',
                hint='use nonfinite="skip", or precision="bf16-mixed"',
            )


def check_job(job: object) -> None:
    """Refuse what is no job, and a job whose module has no weights yet.

    Raises:
        PlanError: Something else, or parameters on the device ``meta``.
    """
    if not isinstance(job, Job):
        is_function = callable(job) and not isinstance(job, (nn.Module, type))
        raise PlanError(
            "this is not a job",
            got=type(job).__name__,
            expected="snugfit.Job",
            hint="call the function, and pass the job that it returns"
            if is_function
            else "pass snugfit.Job(model, loss, optimizer, batch)",
        )
    if isinstance(job.model, nn.Module):
        hint = "pass a function that builds it: Job(lambda: MyModel(), ...); planning then allocates nothing either"
        check_has_values(job.model, hint)


def check_has_values(model: nn.Module, hint: str) -> None:
    """Refuse a model whose weights are not there yet.

    Args:
        model: That is to be trained.
        hint: What to do then.

    Raises:
        PlanError: Parameters on the device ``meta``.
    """
    empty = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    if empty:
        raise PlanError(
            "the model lies on the device meta, where nothing holds data: it cannot be trained",
            got=f"{len(empty)} parameters on meta, the first is {empty[0]}",
            expected="weights with values, or a function that makes them",
            hint=hint,
        )


def check_is_plan(plan: object) -> None:
    """Refuse what is no plan.

    Raises:
        PlanError: Something else, with the way from it to a plan.
    """
    if isinstance(plan, Plan):
        return
    hint = "pass the plan itself: snugfit.plan(...).plan"
    if isinstance(plan, dict):
        hint = "read it: snugfit.Plan.from_dict(values)"
    elif isinstance(plan, (str, os.PathLike)):
        hint = 'load the file: snugfit.Plan.load("plan.json")'
    raise PlanError("this is not a plan", got=type(plan).__name__, expected="snugfit.Plan", hint=hint)


def check_parameters(model: nn.Module) -> None:
    """Refuse a model in which there is nothing to train.

    Raises:
        PlanError: No model, or no parameters.
    """
    check_module(model, "there is no model to train")
    if next(model.parameters(), None) is None:
        raise PlanError(
            "the model has no parameters",
            got=type(model).__name__,
            expected="something to train",
            hint="register layers as attributes, or in nn.ModuleList instead of a list",
        )


def check_made_for(model: nn.Module, optimizers: Sequence[Any]) -> None:
    """Refuse an optimizer that a job did not make for the model that it was handed.

    Raises:
        PlanError: None at all, or one that holds none of the model's parameters: an optimizer that was there before.
    """
    if not optimizers:
        raise PlanError(
            "Job.optimizer returned no optimizer: nothing would be trained",
            got="an empty sequence",
            expected="a torch.optim.Optimizer, or a sequence of them",
            hint="write optimizer=lambda model: torch.optim.AdamW(model.parameters())",
        )
    ours = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        held = [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]
        if held and not any(id(parameter) in ours for parameter in held):
            name = type(optimizer).__name__
            raise PlanError(
                "Job.optimizer returned an optimizer that does not hold the model's parameters",
                got=f"{name} over {len(held)} parameters, none of them of the model that Job.optimizer was called with",
                expected="an optimizer made anew for the model that is handed in, which in a trace is a stand-in",
                hint=f"write optimizer=lambda model: {name}(model.parameters(), ...), not an optimizer that exists",
            )


def check_plan(plan: Plan) -> None:
    """Refuse what a plan may say but nothing carries out yet.

    Raises:
        UnsupportedError: Names the field.
    """
    for name, (supported, hint) in _NOT_YET.items():
        value = getattr(plan, name)
        if value != supported:
            raise UnsupportedError(
                f"Plan.{name}={value!r} is not supported yet",
                got=f"{name}={value!r}",
                expected=f"{name}={supported!r}",
                hint=hint,
                op=name,
            )


def size_and_precision(plan: Plan | None, micro_batch_size: int | None, name: str) -> tuple[int | None, str]:
    """Micro-batch size and precision, of the plan if there is one.

    Raises:
        PlanError: A size below 1, or an argument that contradicts the plan.
    """
    is_size = isinstance(micro_batch_size, int) and not isinstance(micro_batch_size, bool) and micro_batch_size >= 1
    if micro_batch_size is not None and not is_size:
        raise PlanError(
            "micro_batch_size must be a whole number of at least 1",
            got=f"micro_batch_size={micro_batch_size!r}",
            expected=">= 1, or None",
            hint="pass micro_batch_size=1 or more",
        )
    if plan is None:
        return micro_batch_size, name
    check_is_plan(plan)
    given = {"micro_batch_size": micro_batch_size, "precision": None if name in ("32-true", "auto") else name}
    for field, value in given.items():
        if value is not None and value != getattr(plan, field):
            raise PlanError(
                f"{field} contradicts the plan",
                got=f"{field}={value!r}, plan.{field}={getattr(plan, field)!r}",
                expected="one of them",
                hint=f"leave {field} out, or change the plan with dataclasses.replace",
            )
    return plan.micro_batch_size, plan.precision


def warn_of_lone_ranks(is_wrapped: bool, world_size: int) -> None:
    """Warn where several processes run but nothing reduces their gradients."""
    if world_size > 1 and not is_wrapped:
        warn(
            f"{world_size} processes run, but the model is not wrapped in DDP: each trains a model of its own; wrap it "
            "in torch.nn.parallel.DistributedDataParallel",
        )


def precision_on_its_device(name: str, model: nn.Module) -> tuple[str, str]:
    """The precision that a model is trained in where it lies, ``"auto"`` resolved, and the reason.

    Raises:
        PlanError: An unknown precision, or one that the device does not have.
    """
    check_parameters(model)
    device = next(model.parameters()).device
    found, reason = precision.resolve(name, device)
    precision.warn_of_emulation(found, device)
    return found, reason


class Membership:
    """Which parameters of optimizers are the model's, and notices when some are replaced.

    Parameters of an optimizer that the model does not hold are allowed (a loss may have its own), and so are trainable
    ones that no optimizer holds; both together mean that an optimizer was made for other weights.

    Args:
        model: As it is now.
        optimizers: Over its parameters.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._model, self._optimizers = model, optimizers
        self._foreign, self._left_out = self._look()

    def warn(self) -> None:
        """Warn, at set-up, where an optimizer seems to hold what the model no longer does."""
        if self._foreign and self._left_out:
            warn(
                f"{len(self._foreign)} parameters of the optimizer are not the model's, and {len(self._left_out)} "
                f"trainable ones of the model are in no optimizer, the first is {next(iter(self._left_out.values()))}: "
                "if a part of the model was replaced (a new head, resize_token_embeddings), make the optimizer "
                "afterwards; else freeze what is not trained with requires_grad_(False)",
            )

    def check(self) -> None:
        """Refuse a model whose parameters were replaced since.

        Raises:
            PlanError: An optimizer still holds what the model held before, and nothing holds what it holds now.
        """
        foreign, left_out = self._look()
        replaced = foreign - self._foreign
        new = [name for one, name in left_out.items() if one not in self._left_out]
        if replaced and new:
            raise PlanError(
                f"the parameter {new[0]} was replaced after its optimizer was made, and would not be trained",
                got=f"{len(replaced)} parameters of optimizers that the model does not hold any more, {len(new)} new "
                "ones in none",
                expected="optimizers over the model's parameters as they are now",
                hint="replace parts of a model before its optimizer is made, or make a new optimizer and engine",
                names=tuple(new),
            )
        self._foreign, self._left_out = foreign, left_out

    def _look(self) -> tuple[set[int], dict[int, str]]:
        held = {id(p) for optimizer in self._optimizers for p in updates.of(optimizer).parameters}
        left_out = {}
        is_wrapped = isinstance(self._model, nn.parallel.DistributedDataParallel)
        for name, parameter in self._model.named_parameters():
            if id(parameter) in held:
                held.remove(id(parameter))
            elif parameter.requires_grad:
                left_out[id(parameter)] = name.removeprefix("module.") if is_wrapped else name
        return held, left_out


def _check_bf16(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    bare = [type(optimizer).__name__ for optimizer in optimizers if not updates.of(optimizer).is_attached]
    if bare:
        raise UnsupportedError(
            "bf16-true replaces parameters, and an optimizer that was made before would update nothing of them",
            got=f"precision='bf16-true' and a given optimizer: {', '.join(bare)}",
            expected="an engine that makes model and optimizer in this order",
            hint="use snugfit.build(job, plan), or precision='bf16-mixed'",
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise UnsupportedError(
            "DDP reduces gradients in the type of their weights, which loses what bf16-true keeps in fp32",
            got="precision='bf16-true' and a model in DDP",
            expected="one process",
            hint="use precision='bf16-mixed'",
        )


def _check_optimizers(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    if not optimizers:
        raise PlanError(
            "there is no optimizer: nothing would be trained",
            got="an empty sequence",
            expected="a torch.optim.Optimizer, or a sequence of them",
            hint="pass torch.optim.AdamW(model.parameters())",
        )
    ours = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if not hasattr(optimizer, "param_groups"):
            raise PlanError(
                "this is not an optimizer",
                got=name,
                expected="a torch.optim.Optimizer",
                hint="pass torch.optim.AdamW(model.parameters())",
            )
        parameters = updates.of(optimizer).parameters
        if parameters and not any(id(parameter) in ours for parameter in parameters):
            raise PlanError(
                "an optimizer holds no parameter of the model",
                got=f"{name} over {len(parameters)} other parameters",
                expected="parameters of the model as it is now",
                hint="make the optimizer after the model is moved, converted or replaced",
            )


def _check_model(model: nn.Module) -> None:
    if isinstance(model, nn.parallel.DistributedDataParallel) and model.static_graph:
        raise UnsupportedError(
            "DDP with static_graph=True fixes its reductions in the first micro-step",
            got="static_graph=True",
            expected="static_graph=False",
            hint="wrap the model without static_graph",
        )
    if isinstance(getattr(model, "_orig_mod", None), nn.parallel.DistributedDataParallel):
        raise UnsupportedError(
            "torch.compile around DDP hides from the engine when ranks reduce gradients",
            got="torch.compile(DistributedDataParallel(model))",
            expected="a compiled module inside of DDP",
            hint="wrap the compiled module: DistributedDataParallel(torch.compile(model))",
        )
    if any(kind.__name__ == "FSDPModule" for kind in type(model).__mro__):
        raise UnsupportedError(
            "FSDP2 is not supported yet",
            got=type(model).__name__,
            expected="a plain module, or one in DDP",
            hint="wrap the model in DistributedDataParallel instead",
        )
    # a window copies buffers before the first forward would make them
    lazy = [name for name, buffer in model.named_buffers() if is_lazy(buffer)]
    if lazy:
        raise UnsupportedError(
            "the model has lazy buffers, whose shapes are known only when it has run once",
            got=f"{len(lazy)} uninitialized buffers, the first is {lazy[0]}",
            expected="buffers with shapes",
            hint="run the model once before, on one sample",
            module=lazy[0].rpartition(".")[0],
        )
    for name, parameter in model.named_parameters():
        updates = getattr(parameter, "_in_backward_optimizers", None)
        if updates or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UnsupportedError(
                "the model updates itself during backward, before a window is complete",
                got=f"a hook after the gradient of {name}",
                expected="parameters without post-accumulate-grad hooks",
                hint="remove the hook, and give the engine an ordinary optimizer",
                module=name,
            )
