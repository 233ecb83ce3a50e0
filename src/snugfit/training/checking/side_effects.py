"""What a forward leaves behind besides its result: attributes, buffers, and what hooks and functions keep outside.

Entry points: ``state`` and ``outside``, which are compared between a run with recomputation and one without. A value
that two equal runs leave different is not compared.
"""

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor, nn

_DEPTH = 3
_OF_TORCH = set(nn.Module().__dict__) | {"forward"}
_MAX_ELEMENTS = 2**20


def state(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Copies of the plain values among attributes and buffers: (module, name) to value."""
    found: dict[tuple[str, str], Any] = {}
    for name, module in model.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            found[name, key] = _plain(buffer, 0)
        for key, value in vars(module).items():
            if key not in _OF_TORCH:
                plain = _plain(value, 0)
                if plain is not None:
                    found[name, key] = plain
    return found


def differing(
    first: Mapping[tuple[str, str], Any], again: Mapping[tuple[str, str], Any], other: Mapping[tuple[str, str], Any]
) -> list[tuple[str, str]]:
    """Keys whose value two equal runs leave the same and another run leaves different."""
    keys = dict.fromkeys([*again, *other])
    return [key for key in keys if same(first.get(key), again.get(key)) and not same(again.get(key), other.get(key))]


def outside(model: nn.Module) -> dict[tuple[str, str], Any]:
    """What the functions of a model (forwards and hooks) can write to outside of it: sizes, numbers, tensors.

    Such things are not copied with the model, so their changes in two runs are compared instead of their values.
    """
    found: dict[tuple[str, str], Any] = {}
    for name, module in model.named_modules():
        functions: list[tuple[str, Any]] = [("forward", type(module).forward)]
        for kind in ("_forward_hooks", "_forward_pre_hooks"):
            functions += [(_title(hook), hook) for hook in getattr(module, kind, {}).values()]
        for title, function in functions:
            if (getattr(function, "__module__", None) or "").partition(".")[0] in ("torch", "snugfit"):
                continue
            for key, value in _reachable(function):
                measured = _measured(value)
                if measured is not None:
                    found[name, f"{key} of {title}"] = measured
    return found


def change(before: Mapping[tuple[str, str], Any], after: Mapping[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
    """What one run added to what lies outside."""
    found = {}
    for key, value in after.items():
        old = before.get(key, 0.0)
        fits = not isinstance(value, Tensor) or (isinstance(old, Tensor) and old.shape == value.shape)
        found[key] = value - old if fits and isinstance(value, Tensor) == isinstance(old, Tensor) else value
    return found


def same(first: Any, second: Any, *, exactly: bool = False) -> bool:
    """Whether two plain values are equal; numbers and tensors up to rounding, unless exactly."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if exactly:
            return torch.equal(first, second)
        return first.shape == second.shape and torch.allclose(
            first.double(), second.double(), rtol=1e-5, atol=1e-7, equal_nan=True
        )
    if isinstance(first, float) and isinstance(second, float):
        return first == second or (first != first and second != second) or math.isclose(first, second, rel_tol=1e-5)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(same(a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same(value, second[key]) for key, value in first.items())
    return type(first) is type(second) and bool(first == second)


def _plain(value: Any, depth: int) -> Any:
    """A copy of a value out of numbers, text, tensors and containers of them; None for anything else."""
    if isinstance(value, Tensor):
        strided = value.layout == torch.strided and value.numel() <= _MAX_ELEMENTS and not value.is_complex()
        return value.detach().to("cpu", copy=True) if strided else None
    if isinstance(value, (bool, int, float, str)):
        return float(value) if isinstance(value, (int, float)) else value
    if depth == _DEPTH or isinstance(value, (nn.Module, type)) or callable(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in list(value.items())}
    if isinstance(value, Collection) and not isinstance(value, (bytes, bytearray)):
        return [_plain(item, depth + 1) for item in iter(value)]
    own = getattr(value, "__dict__", None)
    return None if own is None else _plain(own, depth + 1)


def _reachable(function: Any) -> Iterator[tuple[str, Any]]:
    """Names and values that a function reads from its closure, its module, and the object it is bound to."""
    bound = getattr(function, "__self__", None)
    if bound is not None and not isinstance(bound, (nn.Module, type)):
        yield from vars(bound).items() if hasattr(bound, "__dict__") else [(type(bound).__name__, bound)]
    plain: Callable[..., Any] = getattr(function, "func", function)
    plain = getattr(plain, "__func__", plain)
    for value in getattr(function, "args", ()):
        yield "an argument", value
    if inspect.isfunction(plain):
        for name, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        for name in plain.__code__.co_names:
            if name in plain.__globals__:
                yield name, plain.__globals__[name]
        for name, value in zip(plain.__code__.co_varnames, plain.__defaults__ or (), strict=False):
            yield name, value
    elif hasattr(function, "__dict__") and not isinstance(function, type):
        yield from vars(function).items()


def _measured(value: Any) -> Any:
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, Tensor):
        return value.detach().to("cpu", torch.float64, copy=True) if 0 < value.numel() <= _MAX_ELEMENTS else None
    if isinstance(value, (type, nn.Module, str, bytes)) or callable(value) or inspect.ismodule(value):
        return None
    if isinstance(value, dict):
        numbers = [item for item in value.values() if isinstance(item, (int, float))]
        return float(len(value)) + math.fsum(numbers) * 1e-3
    return float(len(value)) if isinstance(value, Sized) else None


def _title(hook: Any) -> str:
    return f"the hook {getattr(hook, '__qualname__', type(hook).__name__)}"
