"""Modules that compute in another type than the model around them: fp32 islands, and the insides of bf16 models.

Entry points: ``keep_fp32``, offered as ``precision.keep_fp32``; ``install``, ``find`` and ``uninstall`` for weights
that are bf16 themselves. Functions that no module calls are left out.

NOTE [Stand-ins for forward]
1. A stand-in replaces ``forward`` of one module, so that it is in force wherever the module is run: also where a
   recomputed segment runs its modules without calling their hooks.
2. It lies below every other stand-in (an ``own`` attribute makes one), so that recomputation repeats it.
3. Loss functions that a bf16 model calls itself get fp32 inputs, by a mode of torch's for functions. Recomputation
   runs without the modes of the forward, so every module that may call one enters it where it is not on yet.
"""

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from snugfit.errors import PlanError, UnsupportedError, warn
from snugfit.jobs import check_module
from snugfit.training import splitting

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Kind:
    """What a stand-in does to a module."""

    name: str
    inputs: torch.dtype | None
    "The type that tensors handed in are cast to; None leaves them."
    of: tuple[torch.dtype, ...]
    "The types that are cast."
    without_autocast: bool
    "Whether the module runs outside of any autocast."
    follows_weights: bool = False
    "Whether inputs are cast only while the module's own parameters have that type."
    losses_in_fp32: bool = False
    "Whether loss functions that the module calls get fp32 inputs."
    watches_losses: bool = False
    "Whether a loss that comes out in half precision nevertheless is warned about."


_LOSSES = frozenset(
    function
    for name, function in vars(nn.functional).items()
    if name.endswith(("_loss", "cross_entropy", "_with_logits", "kl_div")) and name != "linear_cross_entropy"
)
"Loss functions, by the names that torch gives them; not the one that holds a matrix product."

_is_on: ContextVar[bool] = ContextVar("snugfit_losses_in_fp32", default=False)

ISLAND = Kind("island", torch.float32, HALF, without_autocast=True)
"Everything in fp32; what comes out stays so."


class Forward:
    """Stands in for ``forward`` of one module; an object, so that a deep copy of the model refers to the copy."""

    def __init__(self, module: nn.Module, kind: Kind, own: Callable[..., Any] | None) -> None:
        self.module, self.kind, self.own = module, kind, own
        self._has_warned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        if self.kind.inputs is not None and (not self.kind.follows_weights or self._has_its_type()):
            args, kwargs = self._cast(args), self._cast(kwargs)
        with self._context(args, kwargs):
            if self.own is not None:
                result = self.own(*args, **kwargs)
            else:
                result = type(self.module).forward(self.module, *args, **kwargs)
        if self.kind.watches_losses and not self._has_warned:
            self._watch_losses(result)
        return result

    def _has_its_type(self) -> bool:
        return any(parameter.dtype == self.kind.inputs for parameter in self.module.parameters())

    def _cast(self, values: Any) -> Any:
        """The values with their tensors cast; the very same object where there is nothing to cast."""
        changed = False

        def cast(tensor: Tensor) -> Tensor:
            nonlocal changed
            if tensor.dtype not in self.kind.of:
                return tensor
            changed = True
            return tensor.to(self.kind.inputs)

        def each(value: Any) -> Any:
            nonlocal changed
            if isinstance(value, PackedSequence):
                return value._replace(data=cast(value.data))
            outer, changed = changed, False
            made = splitting.map_tensors(cast, value)
            kept, changed = made if changed else value, outer or changed
            return kept

        if isinstance(values, dict):
            return {name: each(value) for name, value in values.items()}
        return tuple(each(value) for value in values)

    def _watch_losses(self, result: Any) -> None:
        values = result.values() if isinstance(result, Mapping) else result if isinstance(result, tuple) else [result]
        if any(isinstance(value, Tensor) and not value.dim() and value.dtype in HALF for value in values):
            self._has_warned = True
            warn(
                "the model returns a loss that it computed in bf16, on a grid of 0.4 % to 0.8 % of its value; compute "
                "it from logits.float(), or outside of the model, where it is fp32",
            )

    @contextmanager
    def _context(self, args: Any, kwargs: Any) -> Iterator[None]:
        with self._autocast(args, kwargs), self._losses():
            yield

    def _losses(self) -> AbstractContextManager[Any]:
        return _LossesInFp32() if self.kind.losses_in_fp32 and not _is_on.get() else nullcontext()

    def _autocast(self, args: Any, kwargs: Any) -> AbstractContextManager[Any]:
        if not self.kind.without_autocast:
            return nullcontext()
        tensors = (t for group in (self.module.parameters(), args, kwargs.values()) for t in group)
        first = next((t for t in tensors if isinstance(t, Tensor)), None)
        device = "cpu" if first is None else first.device.type
        return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


class _LossesInFp32(TorchFunctionMode):
    """Casts what loss functions are given from half precision to fp32."""

    def __enter__(self) -> Any:
        self._token = _is_on.set(True)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        _is_on.reset(self._token)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LOSSES:
            args = tuple(_as_fp32(value) for value in args)
            kwargs = {name: _as_fp32(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


class Islands:
    """What ``keep_fp32`` did, and the way to undo it."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.covered: tuple[str, ...] = tuple(modules)
        "Names of the modules that run in fp32."
        self._modules = modules

    def remove(self) -> None:
        """Let the modules run as the model around them again; a second call does nothing."""
        for module in self._modules.values():
            uninstall(module, ISLAND)
        self._modules = {}


def keep_fp32(model: nn.Module, *patterns: str | type[nn.Module]) -> Islands:
    """Let modules of a model run in fp32, whatever precision the model around them has.

    Inputs are cast up, autocast is off inside, and what comes out stays fp32. For bf16-true call it before the model
    is built into an engine: the weights of these modules then stay fp32, also after ``remove``.

    Args:
        model: Changed in place; may be wrapped in DDP, names are those of the plain module.
        *patterns: Names such as ``"head"`` or ``"*.norm"``, or classes of modules. A list of modules stands for its
            members.

    Returns:
        Handle with ``covered`` and ``remove()``.

    Raises:
        PlanError: No model, a pattern that matches no module, or a module whose weights are not fp32; nothing is
            changed then.
        UnsupportedError: A scripted module.
    """
    check_module(model, "there is no model to keep parts of in fp32")
    plain: nn.Module = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    modules = {name: module for pattern in patterns for name, module in _matching(plain, pattern)}
    if not modules:
        raise PlanError(
            "no module is named that is to run in fp32",
            got="no pattern",
            expected="names such as 'head' or '*.norm', or classes of modules",
            hint='write keep_fp32(model, "head")',
        )
    half = [
        f"{name}.{own}" if name else own
        for name, module in modules.items()
        for own, parameter in module.named_parameters()
        if parameter.dtype in HALF
    ]
    if half:
        raise PlanError(
            "modules that are to run in fp32 have weights of half precision",
            got=", ".join(dict.fromkeys(half)),
            expected="torch.float32",
            hint="convert them first, model.get_submodule(name).float(); for bf16-true call keep_fp32 before build",
            parameters=tuple(dict.fromkeys(half)),
        )
    for module in modules.values():
        refuse_scripted(module, "keep_fp32")
    for module in modules.values():
        install(module, ISLAND)
    return Islands(modules)


def refuse_scripted(module: nn.Module, what: str) -> None:
    """Refuse a module whose forward is compiled, so that nothing can stand in for it.

    Raises:
        UnsupportedError: It comes from ``torch.jit``.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedError(
            f"{what} replaces the forward of a module, and that of a scripted one is compiled",
            got=f"{type(module).__name__} of {getattr(module, 'original_name', 'a module')}",
            expected="modules of Python",
            hint="give the model before torch.jit.script or torch.jit.trace, or use precision='bf16-mixed'",
        )


def install(module: nn.Module, kind: Kind) -> None:
    """Put a stand-in below all others of a module; one of that kind is left as it is."""
    if find(module, kind) is not None:
        return
    holder, own = _innermost(module)
    forward = Forward(module, kind, own)
    if holder is None:
        module.__dict__["forward"] = forward
    else:
        holder.own = forward


def find(module: nn.Module, kind: Kind) -> Forward | None:
    """The stand-in of a kind that a module has, if any."""
    return next((found for found in _stand_ins(module) if isinstance(found, Forward) and found.kind == kind), None)


def uninstall(module: nn.Module, kind: Kind) -> None:
    """Take the stand-in of a kind off a module, and leave all others."""
    forward = find(module, kind)
    if forward is None:
        return
    holder = next((found for found in _stand_ins(module) if found.own is forward), None)
    if holder is not None:
        holder.own = forward.own
    elif forward.own is not None:
        module.__dict__["forward"] = forward.own
    else:
        del module.__dict__["forward"]


def _as_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value


def _stand_ins(module: nn.Module) -> Iterator[Any]:
    """Whatever stands in for a module's forward, from the outermost in."""
    forward: Any = module.__dict__.get("forward")
    while hasattr(forward, "own"):
        yield forward
        forward = forward.own


def _innermost(module: nn.Module) -> tuple[Any, Any]:
    """The last stand-in, and what it calls: a function that somebody set, or None for the class's own forward."""
    holder, own = None, module.__dict__.get("forward")
    for holder in _stand_ins(module):
        own = holder.own
    return holder, own


def _matching(model: nn.Module, pattern: Any) -> list[tuple[str, nn.Module]]:
    if isinstance(pattern, str):
        found = [(n, m) for n, m in model.named_modules() if n == pattern or (n and fnmatch.fnmatchcase(n, pattern))]
    elif isinstance(pattern, type) and issubclass(pattern, nn.Module):
        found = [(name, module) for name, module in model.named_modules() if isinstance(module, pattern)]
    else:
        raise PlanError(
            "a module that is to run in fp32 is named by something else than a name or a class",
            got=repr(pattern),
            expected="a name such as 'head' or '*.norm', or a class of modules",
            hint='write keep_fp32(model, "head")',
        )
    if not found:
        names = [name for name, _ in model.named_modules() if name]
        raise PlanError(
            "a pattern matches no module that could run in fp32",
            got=repr(pattern) if isinstance(pattern, str) else pattern.__name__,
            expected=f"one of {len(names)} names such as {names[0] if names else 'none at all'}",
            hint="print([name for name, _ in model.named_modules()])",
        )
    return [pair for name, module in found for pair in _members(name, module)]


def _members(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """A module that can be called, or the members of one that only holds others."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        prefix = f"{name}." if name else ""
        return [pair for own, child in module.named_children() for pair in _members(f"{prefix}{own}", child)]
    return [(name, module)]
