"""What the code of a model can reach besides its modules: closures, globals, class attributes, generators.

Entry points: ``by_module``, ``by_function`` and ``Generators``. What changed in it is ``side_effects``'s.
"""

import inspect
import random
import sys
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import nn

_NOT_THEIRS = {"torch", "snugfit", "numpy", "transformers", "builtins", "__future__"}


def by_module(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and values that the class of a module and its hooks reach, by functions called one level deep."""
    for kind in type(module).__mro__:
        if not _is_theirs(kind):
            continue
        for key, value in list(vars(kind).items()):
            plain = getattr(value, "__func__", value)
            if inspect.isfunction(plain):
                if key == "__init__":
                    continue  # not run by a forward
                for name, one in by_function(plain, depth=1):
                    yield f"{name} of {key}", one
            elif not key.startswith("__") and not hasattr(value, "__get__"):
                yield f"{kind.__name__}.{key}", value
    for place in ("_forward_hooks", "_forward_pre_hooks"):
        for hook in getattr(module, place, {}).values():
            if _is_theirs(hook):
                for name, one in by_function(hook, depth=1):
                    yield f"{name} of the hook {getattr(hook, '__qualname__', type(hook).__name__)}", one


def by_function(function: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Names and values that a function reads from its closure, its module, and the object it is bound to.

    Args:
        function: Or anything that is called.
        depth: How many calls to other functions are followed.
    """
    bound = getattr(function, "__self__", None)
    if bound is not None and not isinstance(bound, (nn.Module, type)):
        yield from list(vars(bound).items()) if hasattr(bound, "__dict__") else [(type(bound).__name__, bound)]
    plain: Any = getattr(function, "func", function)
    plain = getattr(plain, "__func__", plain)
    for value in getattr(function, "args", ()):
        yield "an argument", value
    if not inspect.isfunction(plain):
        if hasattr(function, "__dict__") and not isinstance(function, type):
            yield from list(vars(function).items())
        return
    for name, value in _named(plain):
        if inspect.isfunction(value):
            if depth and _is_theirs(value):
                yield from by_function(value, depth - 1)
        elif isinstance(value, type):
            if _is_theirs(value):
                yield from ((f"{name}.{key}", one) for key, one in vars(value).items() if not key.startswith("__"))
        else:
            yield name, value


def _named(function: Any) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    names = set(_names(function.__code__))
    for name in sorted(names):
        value = function.__globals__.get(name)
        if inspect.ismodule(value):
            if _is_theirs(value):
                yield from ((f"{name}.{key}", getattr(value, key)) for key in sorted(names) if hasattr(value, key))
        elif name in function.__globals__:
            yield name, value
    for name, value in zip(function.__code__.co_varnames, function.__defaults__ or (), strict=False):
        yield name, value


def _names(code: CodeType) -> Iterator[str]:
    """Names in the code of a function and of those inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_theirs(what: Any) -> bool:
    """Whether something belongs to the user's code, not to a library that keeps nothing of a run."""
    name = what.__name__ if inspect.ismodule(what) else getattr(what, "__module__", None) or ""
    root = name.partition(".")[0]
    return root == "__main__" or (root not in _NOT_THEIRS and root not in sys.stdlib_module_names)


class Generators:
    """The sources of random numbers that a job has besides torch's default ones, and whether they moved.

    Args:
        model: Its modules' attributes are looked at, and what their code reaches.
        functions: So is what these reach.
    """

    def __init__(self, model: nn.Module, functions: Iterable[Any] = ()) -> None:
        self._known: dict[int, tuple[str, Any]] = {}
        for name, module in model.named_modules():
            place = f" in {name!r}" if name else " in the model"
            for _, value in [*vars(module).items(), *by_module(module)]:
                self._add(value, place)
        for function in functions:
            for _, value in by_function(function, depth=1):
                self._add(value, "")
        self._before = self.states()

    def _add(self, value: Any, place: str) -> None:
        if _state(value) is not None:
            self._known.setdefault(id(value), (f"a {type(value).__module__.partition('.')[0]} generator{place}", value))

    def states(self, *, of_torch: bool = True) -> list[Any]:
        """Where they are; those of torch may be left out."""
        return [
            _state(value) for _, value in self._known.values() if of_torch or not isinstance(value, torch.Generator)
        ]

    def moved(self) -> set[str]:
        """Descriptions of those that moved since they were found."""
        now = zip(self._known.values(), self._before, self.states(), strict=True)
        return {description for (description, _), before, after in now if before != after}


def _state(value: Any) -> Any:
    """What can be compared of a generator; None for anything else."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    return value.get_state().numpy().tobytes() if isinstance(value, torch.Generator) else None
