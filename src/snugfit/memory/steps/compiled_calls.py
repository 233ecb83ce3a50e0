"""One call of a compiled function: its tensors, what it does the same as other calls, and its capture as graphs.

Entry point: ``Call``. Parameters and buffers of the modules around the function are inputs like any other. Which calls
are captured at all is ``compilation``'s to say.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from snugfit.memory import torch_compiler, torch_private
from snugfit.memory.steps.side_effects import Reached

_BY_VALUE = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, type)
_KNOWN_RESULTS = (int, float, bool, str, type(None))
_WEIGHTS = ("_parameters", "_buffers")
_NOT_COMPUTED_WITH = ("_modules", "_compiled_call_impl")


class Untraceable(Exception):
    """A call is not one graph."""


class Call:
    """A call of a function, taken apart.

    Args:
        function: That is called; a method, a closure or a plain function.
        args: What it is called with.
        kwargs: And by name.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._function = function
        self._leaves, self._containers = torch_compiler.flattened((tuple(args), dict(kwargs)))
        roots = [*_around(function), *self._leaves]
        self._modules = list(dict.fromkeys(m for root in roots if isinstance(root, nn.Module) for m in root.modules()))
        held = [value for module in self._modules for kind in _WEIGHTS for value in module.__dict__[kind].values()]
        weights = {id(value): value for value in held if value is not None}
        given = {id(leaf): leaf for leaf in self._leaves if isinstance(leaf, Tensor) and id(leaf) not in weights}
        self._num_weights = len(weights)
        self.tensors: list[Tensor] = [*weights.values(), *given.values()]

    @property
    def is_whole(self) -> bool:
        """Whether it may be one graph, as far as that shows before it is tried."""
        hooked = any(m._backward_hooks or m._backward_pre_hooks for m in self._modules)
        recurrent = any(isinstance(module, nn.RNNBase) for module in self._modules)
        known = all(isinstance(leaf, (*_BY_VALUE, Tensor, nn.Module)) for leaf in self._leaves)
        return known and not hooked and not recurrent and all(isinstance(t, torch_private.Fake) for t in self.tensors)

    def numbers(self) -> dict[tuple[int, str], int]:
        """What the modules hold as plain numbers, by their places: a layer's own number is one, and seldom read."""
        return {(place, name): value for place, module in enumerate(self._modules) for name, value in _numbers(module)}

    def key(self, kept: list[Any]) -> Any:
        """Equal for calls that have the same graphs if those of ``numbers`` that they read are the same.

        Args:
            kept: Objects that the key names by their id are appended to it.

        Raises:
            Untraceable: The function, or one of its modules, holds a tensor that is no input.
        """
        places = {id(tensor): place for place, tensor in enumerate(self.tensors)}

        def described(value: Any) -> Any:
            if isinstance(value, nn.Module):
                return tuple(_structure(module, described) for module in value.modules())
            if isinstance(value, Tensor):
                if id(value) not in places:
                    raise Untraceable
                return places[id(value)]
            if isinstance(value, _BY_VALUE):
                return type(value), value
            if type(value) in (tuple, list):
                return type(value), *map(described, value)
            if isinstance(value, dict):
                return type(value), *((described(name), described(item)) for name, item in value.items())
            if isinstance(value, (set, frozenset)):
                return type(value), frozenset(map(described, value))
            kept.append(value)
            return id(value)

        function = getattr(self._function, "__func__", self._function)
        code = getattr(function, "__code__", None)
        around = [*_around(self._function), getattr(function, "__defaults__", None)]
        origin = (code, *map(described, around)) if code else described(function)
        tensors = [(t.shape, t.stride(), t.dtype, t.requires_grad) for t in self.tensors]
        modes = (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
        leaves = tuple(map(described, self._leaves))
        return origin, str(self._containers), leaves, tuple(tensors), modes, torch.get_default_dtype()

    def captured(self, execute: torch_compiler.Execute) -> tuple[Callable[["Call"], Any], set[tuple[int, str]]]:
        """What runs this call, and every other one with the same key, by graphs; and which numbers it has read.

        Raises:
            Untraceable: It cannot be captured.
        """
        results: list[Any] = []
        read: set[tuple[int, str]] = set()
        calls = [self]  # until it is captured: the compiler holds on to the function
        reached = Reached([self._function, *self._modules])
        is_stored = False

        def flat(*values: Tensor) -> list[Tensor]:
            leaves, containers = torch_compiler.flattened(calls[0]._with(values, read))
            if not all(isinstance(leaf, (*_KNOWN_RESULTS, Tensor)) for leaf in leaves):
                raise Untraceable
            results[:] = [[None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves], containers]
            return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        try:
            run = torch_compiler.captured(flat, self.tensors, self._num_weights, execute)
        except Exception as error:  # whatever the compiler, or the code on its tensors, cannot do
            raise Untraceable from error
        finally:
            calls.clear()
            is_stored = reached.take_back()  # tensors of the compiler, which nobody can read
        if is_stored:
            raise Untraceable
        known, containers = results

        def replay(call: Call) -> Any:
            tensors = iter(run(*call.tensors))
            return torch_compiler.unflattened([next(tensors) if k is None else k[0] for k in known], containers)

        return replay, read

    def _with(self, values: Sequence[Tensor], read: set[tuple[int, str]]) -> Any:
        """The result of the function for other tensors in place of its own."""
        others = dict(zip(map(id, self.tensors), values, strict=True))
        args, kwargs = torch_compiler.unflattened(
            [others.get(id(leaf), leaf) for leaf in self._leaves], self._containers
        )
        with _replaced(self._modules, others, read):
            return self._function(*args, **kwargs)


def _around(function: Any) -> list[Any]:
    """What a function is a method of, and what it encloses."""
    owner = getattr(function, "__self__", None)
    cells = getattr(function, "__closure__", None) or ()
    return [*([] if owner is None else [owner]), *(cell.cell_contents for cell in cells)]


def _structure(module: nn.Module, described: Callable[[Any], Any]) -> Any:
    """What a module computes with, its parts and plain numbers left out."""
    numbers = dict(_numbers(module))
    own = [(name, value) for name, value in module.__dict__.items() if name not in (*_NOT_COMPUTED_WITH, *numbers)]
    return type(module), tuple(module.__dict__["_modules"]), tuple((name, described(value)) for name, value in own)


def _numbers(module: nn.Module) -> list[tuple[str, int]]:
    """A module's own plain numbers; of those that its class has as well, reading cannot be seen."""
    own, kind = module.__dict__.items(), type(module)
    return [(name, value) for name, value in own if type(value) is int and not hasattr(kind, name)]


@contextmanager
def _replaced(modules: Sequence[nn.Module], others: Mapping[int, Tensor], read: set[tuple[int, str]]) -> Iterator[None]:
    """Other parameters and buffers in modules, by the ids of their own.

    Args:
        modules: Whose.
        others: By the ids of their own.
        read: Which of the modules' plain numbers are read is added to it.

    Raises:
        Untraceable: The modules hold something else at the end.
    """
    before = [_Held(dict(m.__dict__), [dict(m.__dict__[kind]) for kind in _WEIGHTS]) for m in modules]
    for module in modules:
        for name, _ in _numbers(module):
            del module.__dict__[name]
        for kind in _WEIGHTS:
            slots = module.__dict__[kind]
            slots.update({name: others[id(value)] for name, value in slots.items() if value is not None})
    put = [_Held(dict(m.__dict__), [dict(m.__dict__[kind]) for kind in _WEIGHTS]) for m in modules]
    is_changed = False
    try:
        with _numbers_noted(modules, before, read):
            yield
    finally:
        for module, held, placed in zip(modules, before, put, strict=True):
            is_changed |= not _are_same(module.__dict__, placed.attributes)
            for kind, slots, others_put in zip(_WEIGHTS, held.weights, placed.weights, strict=True):
                is_changed |= not _are_same(module.__dict__[kind], others_put)
                module.__dict__[kind].clear()
                module.__dict__[kind].update(slots)
            module.__dict__.clear()
            module.__dict__.update(held.attributes)
    if is_changed:
        raise Untraceable


@dataclass(frozen=True, slots=True)
class _Held:
    """What a module holds."""

    attributes: dict[str, Any]
    weights: list[dict[str, Any]]


@contextmanager
def _numbers_noted(modules: Sequence[nn.Module], held: Sequence[_Held], read: set[tuple[int, str]]) -> Iterator[None]:
    """Answer for numbers that were taken off modules, and note which were asked for."""
    original: Any = nn.Module.__getattr__
    places = {id(module): place for place, module in enumerate(modules)}

    def answer(module: nn.Module, name: str) -> Any:
        place = places.get(id(module))
        value = None if place is None else held[place].attributes.get(name)
        if place is None or type(value) is not int:
            return original(module, name)
        read.add((place, name))
        return value

    with mock.patch.object(nn.Module, "__getattr__", answer):
        yield


def _are_same(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    return left.keys() == right.keys() and all(left[name] is right[name] for name in left)
