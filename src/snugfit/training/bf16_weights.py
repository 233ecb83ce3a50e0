"""Converts a model to bf16 weights, apart from what needs fp32, so that it can be called as before.

Entry points: ``convert``, ``attach`` and ``release``. How such weights are updated is ``updates``'s.

NOTE [A model of bf16 weights]
1. The model as a whole runs outside of autocast; its loss is computed inside of it (bf16), as under bf16-mixed: so
   cross-entropy and its like are fp32, at the price of an fp32 copy of the scores while they run. Loss functions of
   torch that the model calls itself get fp32 inputs too. What it computes by hand cannot be reached: a model that
   returns a bf16 scalar is warned about.
2. A module with bf16 parameters of its own casts what it is given, and nothing else is cast: times, positions and
   targets stay exact, and what an fp32 island returns can be used.
3. Modules with running statistics stay fp32 as a whole: kernels of normalisation take bf16 inputs beside fp32
   parameters. Buffers that are saved are converted; others stay, for they are constants such as rotary frequencies,
   in which 8 bits are not enough.
"""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from snugfit.errors import PlanError, UnsupportedError
from snugfit.plans import Plan
from snugfit.training import islands, updates

_READ_THEIR_MEMBERS = (nn.TransformerEncoderLayer,)
"Use parameters of their members without calling these."

_FLOATS = (torch.float32, torch.float64, torch.float16)
_INSIDE = islands.Kind("bf16 model", None, (), without_autocast=True, losses_in_fp32=True, watches_losses=True)
"The model as a whole: out of the autocast that its loss is computed in."
_LOW = islands.Kind(
    "bf16 module", torch.bfloat16, _FLOATS, without_autocast=False, follows_weights=True, losses_in_fp32=True
)
"A module with bf16 parameters of its own: what it is given takes their type."
_OTHER = islands.Kind("module of a bf16 model", None, (), without_autocast=False, losses_in_fp32=True)
"A module of the user's without parameters of its own: it may compute a loss."


def convert(model: nn.Module, plan: Plan) -> None:
    """Convert what needs no master weights, in place: best before the model is moved and its optimizer made.

    Parameters stay the same objects. Islands (``precision.keep_fp32``) stay fp32, and so do modules with running
    statistics, parameters included, and buffers that are not saved. Converting again changes nothing.

    Args:
        model: In full precision, or converted already.
        plan: Its ``bf16_update`` and ``gradient_dtype``.

    Raises:
        PlanError: A parameter is shared between an fp32 island and a module that is not one.
        UnsupportedError: This torch lacks ``Tensor.grad_dtype``.
    """
    if not hasattr(Tensor, "grad_dtype"):
        raise UnsupportedError(
            "bf16-true needs gradients of another type than their weights",
            got=f"torch {torch.__version__}, without Tensor.grad_dtype",
            expected="a torch that has it (2.13 does)",
            hint='upgrade torch, or use precision="bf16-mixed"',
        )
    full = _full_precision(model)
    _refuse_shared(model, full)
    _convert(model, full, plan.gradient_dtype, with_trained=plan.bf16_update != "master-weights")


def attach(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], plan: Plan) -> None:
    """Convert the rest, and set the optimizers up for a model of bf16 weights.

    Args:
        model: On its device, after ``convert``.
        optimizers: Made over it; their groups hold master weights or stand-ins afterwards.
        plan: As for ``convert``.

    Raises:
        UnsupportedError: An optimizer cannot be driven so.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                "LBFGS looks at all parameters at once and cannot update bf16 weights",
                got=type(optimizer).__name__,
                expected="an optimizer that treats parameters one by one",
                hint='use torch.optim.AdamW, or precision="32-true"',
            )
    method = plan.bf16_update
    originals = _convert(model, _full_precision(model), plan.gradient_dtype, with_trained=True)
    for optimizer in optimizers:
        updates.attach(optimizer, method, originals)
    if method == "nearest":
        rates = [r for o in optimizers for g in o.param_groups if isinstance(r := g.get("lr"), (int, float))]
        warnings.warn(
            'bf16_update="nearest": bf16 weights lie 2^-8 to 2^-7 of their value apart, so that an update below 2^-9 '
            f"(0.2 %) of a weight is rounded away; at a learning rate of {max(rates, default=0.0):g} Adam moves no "
            f"weight above {max(rates, default=0.0) * 2**9:g}; use master-weights or stochastic-rounding",
            stacklevel=4,
        )


def release(model: nn.Module) -> None:
    """Take the stand-ins off a model of bf16 weights, whose gradients then have their type again."""
    for module in model.modules():
        for kind in (_INSIDE, _LOW, _OTHER):
            islands.uninstall(module, kind)
        for parameter in module.parameters(recurse=False):
            if parameter.dtype == torch.bfloat16:
                parameter.grad_dtype = torch.bfloat16


def _convert(model: nn.Module, full: set[int], gradient_dtype: str, *, with_trained: bool) -> dict[int, Tensor]:
    """Convert what is not to stay; what trained weights were before, by the id of the parameter."""
    originals: dict[int, Tensor] = {}
    islands.install(model, _INSIDE)
    for module in model.modules():
        if id(module) in full:
            continue
        own = list(module.parameters(recurse=False))
        for parameter in own:
            if parameter.dtype in _FLOATS and (with_trained or not parameter.requires_grad):
                if parameter.requires_grad:
                    originals[id(parameter)] = parameter.data
                parameter.data = parameter.data.to(torch.bfloat16)
            if parameter.dtype == torch.bfloat16:
                parameter.grad_dtype = torch.float32 if gradient_dtype == "float32" else torch.bfloat16
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.dtype in _FLOATS and name not in module._non_persistent_buffers_set:
                module._buffers[name] = buffer.to(torch.bfloat16)
        if isinstance(module, _READ_THEIR_MEMBERS) or any(parameter.dtype == torch.bfloat16 for parameter in own):
            islands.install(module, _LOW)
        elif not type(module).__module__.startswith("torch.nn."):
            islands.install(module, _OTHER)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return originals


def _full_precision(model: nn.Module) -> set[int]:
    """Ids of the modules that stay fp32."""
    inside = (m.modules() for m in model.modules() if islands.find(m, islands.ISLAND) is not None)
    # kernels of normalisation take bf16 inputs with fp32 parameters and statistics beside them
    running = (m for m in model.modules() if isinstance(getattr(m, "running_mean", None), Tensor))
    return {id(module) for modules in (*inside, running) for module in modules}


def _refuse_shared(model: nn.Module, full: set[int]) -> None:
    owners: dict[int, str] = {}
    for name, module in model.named_modules():
        if id(module) in full:
            owners |= {id(p): f"{name}.{own}" for own, p in module.named_parameters(recurse=False)}
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if id(module) not in full and id(parameter) in owners:
                raise PlanError(
                    "a parameter is shared between an fp32 island and a module of bf16 weights",
                    got=f"{owners[id(parameter)]} is {name}.{own}",
                    expected="all modules that share a parameter inside of the island, or none",
                    hint=f"add {name!r} to keep_fp32",
                    module=name,
                )
