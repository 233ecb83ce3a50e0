"""Which model a plan was made for: a short text of its class, its parameters and their shapes.

Entry points: ``of`` and ``check``. Values, types and devices of weights do not matter, for a plan changes them; the
data and what is recomputed are left out, and the optimizer too, but where the plan rests on a change of it.
"""

import hashlib
from collections.abc import Mapping, Sequence

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from snugfit.errors import PlanError
from snugfit.plans import Plan
from snugfit.training import checkpointing

_PARTS = ("class", "parameters", "elements", "trainable", "shapes")
_OPTIMIZER = "optimizer"
"A part that only plans have which rest on one."


def of(model: nn.Module, optimizer: str = "") -> str:
    """The fingerprint of a model, wrapped or compiled or not.

    Args:
        model: Whose parameters have shapes.
        optimizer: Class of the optimizer on which the plan rests; empty: any will do.

    Example:
        >>> of(nn.Linear(3, 4)).rpartition(" ")[0]
        'class=Linear parameters=2 elements=16 trainable=2'
    """
    plain = checkpointing.unwrapped(model)
    while isinstance(inner := getattr(plain, "_orig_mod", None), nn.Module):  # torch.compile's
        plain = checkpointing.unwrapped(inner)
    named = {name.replace("_orig_mod.", ""): parameter for name, parameter in plain.named_parameters()}
    _refuse_shapeless(named)
    shapes = "\n".join(f"{name} {tuple(parameter.shape)}" for name, parameter in sorted(named.items()))
    values = (
        type(plain).__name__,
        len(named),
        sum(parameter.numel() for parameter in named.values()),
        sum(parameter.requires_grad for parameter in named.values()),
        hashlib.sha256(shapes.encode()).hexdigest()[:16],
    )
    text = " ".join(f"{name}={value}" for name, value in zip(_PARTS, values, strict=True))
    return f"{text} {_OPTIMIZER}={optimizer}" if optimizer else text


def _refuse_shapeless(named: Mapping[str, nn.Parameter]) -> None:
    """Refuse a lazy module that has not run yet: of its parameters nobody knows the shapes.

    Raises:
        PlanError: Names the first of them.
    """
    unknown = [name for name, parameter in named.items() if is_lazy(parameter)]
    if unknown:
        raise PlanError(
            "the model has lazy parameters, whose shapes are known only when it has run once",
            got=f"{len(unknown)} uninitialized parameters, the first is {unknown[0]}",
            expected="parameters with shapes",
            hint="run the model once on a batch before it is given to the job, or write the sizes out: nn.Linear(8, 3)",
        )


def check(plan: Plan, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> None:
    """Refuse a plan for another model or one that rests on another optimizer; without a fingerprint it is for any.

    Args:
        plan: That is to be run.
        model: Of the job.
        optimizers: Of the job; none: they are not looked at.

    Raises:
        PlanError: Says what differs.
    """
    if plan.fingerprint is None:
        return
    planned, here = _read(plan.fingerprint), _read(of(model))
    differing = [name for name in _PARTS if planned.get(name) != here[name]]
    if differing:
        raise PlanError(
            f"the plan was made for another model: {', '.join(differing)} differ",
            got=", ".join(f"{name} {here[name]}" for name in differing),
            expected=", ".join(f"{name} {planned.get(name, 'unknown')}" for name in differing) + ", as in the plan",
            hint="plan again for this model; if the plan came with 'the job must change', change the model in job() as "
            "its lines say; or run the plan anyway with dataclasses.replace(plan, fingerprint=None)",
            differing=tuple(differing),
        )
    wanted, made = planned.get(_OPTIMIZER), [type(optimizer).__name__ for optimizer in optimizers]
    if wanted and made and wanted not in made:
        raise PlanError(
            "the plan rests on another optimizer, with less state",
            got=f"optimizer {', '.join(made)}",
            expected=f"{wanted}, as in the plan",
            hint=f"make it {wanted} in the function of job() that makes the optimizer, as the lines under 'the job "
            "must change' say; or run the plan anyway with dataclasses.replace(plan, fingerprint=None)",
            differing=(_OPTIMIZER,),
        )


def _read(fingerprint: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in fingerprint.split())
    return {name: value for name, _, value in pairs}
