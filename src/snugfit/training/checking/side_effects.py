"""What a forward leaves behind besides its result: attributes, buffers, and what hooks and functions keep outside.

Entry points: ``state`` and ``outside``, which are compared between a run with recomputation and one without. A value
that two equal runs leave different is not compared.
"""

import inspect
import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor, nn

from snugfit.training.checking import reached

_DEPTH = 3
_OF_TORCH = set(nn.Module().__dict__) | {"forward"}
_MAX_ELEMENTS = 2**20
_MAX_ITEMS = 1000


def state(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Copies of the plain values among attributes, buffers and frozen parameters: (module, name) to value."""
    found: dict[tuple[str, str], Any] = {}
    for name, module in model.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            found[name, key] = _plain(buffer, 0)
        for key, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                found[name, key] = _plain(parameter, 0)
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
    """Numbers, sizes and tensors that the code of a model can write to outside of its modules.

    What is reached: what the methods of the modules' classes, their hooks and the functions that these call name (in
    their closures, defaults and modules), attributes of the classes, and objects in all of these. Such things are not
    copied with the model, so their changes in two runs are compared instead of their values.
    """
    found: dict[tuple[str, str], Any] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        for title, value in reached.by_module(module):
            if id(value) not in seen or isinstance(value, (int, float)):
                seen.add(id(value))
                for path, measured in _measured(value, title, 0):
                    found[name, path] = measured
    return found


def change(before: Mapping[tuple[str, str], Any], after: Mapping[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
    """What one run added to what lies outside, without what stayed or is new, which the size of its container shows."""
    found = {}
    for key, value in after.items():
        old = before.get(key)
        if getattr(old, "shape", None) != getattr(value, "shape", None):
            found[key] = value
        elif old is not None and not same(old, value, exactly=True):
            found[key] = value - old
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


def same_values(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors hold the same values, NaN in the same places."""
    if first.layout != torch.strided or first.is_quantized or first.is_nested:
        return True  # not looked at
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return bool(((first == second) | ((first != first) & (second != second))).all())


def _plain(value: Any, depth: int) -> Any:
    """A copy of a value out of numbers, text, tensors and containers of them; None for anything else."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_complex() or value.is_quantized:
            return None
        if value.numel() <= _MAX_ELEMENTS:
            return value.detach().to("cpu", copy=True)
        is_float = value.is_floating_point()
        return float(value.detach().sum(dtype=torch.float64 if is_float else None))  # stands for its values
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


def _measured(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """The numbers, sizes and tensors in a value, each with where it is."""
    if isinstance(value, bool):
        return
    if isinstance(value, (int, float)):
        yield path, float(value)
    elif isinstance(value, Tensor):
        if 0 < value.numel() <= _MAX_ELEMENTS and value.layout == torch.strided and not value.is_complex():
            yield path, value.detach().to("cpu", torch.float64, copy=True)
    elif isinstance(value, itertools.count):
        yield path, float(re.findall(r"-?[0-9.]+", repr(value))[0])
    elif isinstance(value, (type, nn.Module, str, bytes)) or callable(value) or inspect.ismodule(value):
        return
    elif isinstance(value, (Mapping, Sized)):
        yield path, float(len(value))
        items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
        if depth < _DEPTH and len(value) <= _MAX_ITEMS:
            for key, item in list(items):
                yield from _measured(item, f"{path}[{key!r}]", depth + 1)
    elif depth < _DEPTH and hasattr(value, "__dict__"):
        for key, item in list(vars(value).items()):
            yield from _measured(item, f"{path}.{key}", depth + 1)
