"""Converts a model to bf16 weights, apart from what needs fp32, so that it can be called as before.

Entry points: ``convert``, ``attach`` and ``hold``. How such weights are updated is ``updates``'s.

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

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from snugfit.errors import PlanError, UnsupportedError, warn
from snugfit.plans import Plan
from snugfit.training import buckets, islands, updates
from snugfit.training.holders import Holders, let_go

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
        UnsupportedError: This torch lacks ``Tensor.grad_dtype``; a scripted module, or one that cannot be bf16.
    """
    if not hasattr(Tensor, "grad_dtype"):
        raise UnsupportedError(
            "bf16-true needs gradients of another type than their weights",
            got=f"torch {torch.__version__}, without Tensor.grad_dtype",
            expected="a torch that has it (2.13 does)",
            hint='upgrade torch, or use precision="bf16-mixed"',
        )
    for module in model.modules():
        islands.refuse_scripted(module, "bf16-true")
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
        PlanError: Two optimizers train the same parameter.
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
    _refuse_overlap(model, optimizers)
    method = plan.bf16_update
    originals = _convert(model, _full_precision(model), plan.gradient_dtype, with_trained=True)
    for optimizer in optimizers:
        updates.attach(optimizer, method, originals)
        _warn_of_whole_copies(optimizer, plan)
    if method == "nearest":
        rates = [r for o in optimizers for g in o.param_groups if isinstance(r := g.get("lr"), (int, float))]
        warn(
            'bf16_update="nearest": bf16 weights lie 2^-8 to 2^-7 of their value apart, so that an update below 2^-9 '
            f"(0.2 %) of a weight is rounded away; at a learning rate of {max(rates, default=0.0):g} Adam moves no "
            f"weight above {max(rates, default=0.0) * 2**9:g}; use master-weights or stochastic-rounding",
        )


class Held:
    """Handle of ``hold``; a copy holds what is copied with it."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._model, self._optimizers = model, tuple(optimizers)
        self._note()

    def release(self) -> None:
        """Give a plain bf16 module back, and optimizers that hold its parameters, for a plain loop to train.

        Master weights are gone then, and moments have the type of the weights. What another handle still holds stays;
        a second call does nothing.
        """
        optimizers, self._optimizers = self._optimizers, ()
        things: list[Any] = [*optimizers, self._model]
        are_free = let_go(self, [_held.setdefault(thing, Holders()) for thing in things])
        for optimizer, is_free in zip(optimizers, are_free, strict=False):
            if is_free:
                updates.detach(optimizer)
        if are_free[-1]:
            _take_off(self._model)

    def _note(self) -> None:
        for thing in (*self._optimizers, self._model):
            _held.setdefault(thing, Holders()).add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._note()


_held: WeakKeyDictionary[Any, Holders] = WeakKeyDictionary()
"The handles of models and of optimizers."


def hold(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Held:
    """Keep a model of bf16 weights and its optimizers as they are, until ``release``.

    Args:
        model: Converted.
        optimizers: Attached.
    """
    return Held(model, optimizers)


def _take_off(model: nn.Module) -> None:
    """Take the stand-ins off a model of bf16 weights, whose gradients then have their type again."""
    for module in model.modules():
        for kind in (_INSIDE, _LOW, _OTHER):
            islands.uninstall(module, kind)
        for parameter in module.parameters(recurse=False):
            if parameter.dtype == torch.bfloat16:
                parameter.grad = None
                parameter.grad_dtype = torch.bfloat16


def _refuse_overlap(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    seen: dict[int, str] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        mine = [p for group in optimizer.param_groups for p in group["params"]]
        twice = [p for p in mine if id(p) in seen]
        if twice:
            raise PlanError(
                "two optimizers train the same bf16 weights, and only the first would get their gradients",
                got=f"{names.get(id(twice[0]), 'a parameter')} and {len(twice) - 1} more, in {seen[id(twice[0])]} and "
                f"in {kind}",
                expected="each parameter in one optimizer under precision='bf16-true'",
                hint="give each optimizer parameters of its own, or use precision='bf16-mixed'",
                names=tuple(names.get(id(p), "") for p in twice),
            )
        seen |= {id(p): kind for p in mine}


def _warn_of_whole_copies(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Say what it costs that an optimizer may not be stepped for some parameters after others."""
    method = plan.bf16_update
    if buckets.takes_parameters_one_by_one(optimizer, method):
        return
    size = sum(4 * parameter.numel() for parameter in updates.of(optimizer).parameters if parameter.requires_grad)
    copies = [
        *(["weights"] if method == "stochastic-rounding" else []),
        *(["gradients"] if plan.gradient_dtype == "parameter" and method != "nearest" else []),
    ]
    if copies and size > buckets.BUCKET_BYTES:
        warn(
            f"{type(optimizer).__name__} is not known to treat each parameter by itself, so bf16-true steps it once "
            f"for all: fp32 copies of all {' and '.join(copies)}, {size * len(copies) / 2**30:.2g} GiB, live during "
            "its step; use an optimizer of torch.optim, or bf16_update='master-weights' with gradient_dtype='float32'",
        )


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
    for module in model.modules():  # now that what others are made from is converted too
        if id(module) in full:
            continue
        if isinstance(module, _READ_THEIR_MEMBERS) or any(p.dtype == torch.bfloat16 for p in _used(module)):
            islands.install(module, _LOW)
        elif not type(module).__module__.startswith("torch.nn."):
            islands.install(module, _OTHER)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return originals


def _used(module: nn.Module) -> Iterator[Tensor]:
    """What a module computes with: its own parameters, and those that its own are made from."""
    yield from module.parameters(recurse=False)
    if parametrize.is_parametrized(module):
        yield from module.parametrizations.parameters()  # type: ignore[union-attr]


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
