"""Random generators of a user's own, found where modules and their code hold them, and set back for a repetition.

Entry points: ``Found``, ``states_of`` and ``drawn_again``. torch's, Python's and numpy's own generators are
``random_states``'s. A generator of torch that is hidden elsewhere is found by its use, by ``keeping``.
"""

import functools
import itertools
import random
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_DEPTH = 3
"Containers and objects that are looked into, one in the other."
_WIDTH = 100
"Items of a container that are looked at: a vocabulary holds no generators."
_CONTAINERS = (list, tuple, set, frozenset, deque)
_BOUND = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
_DULL: tuple[Any, ...] = (
    *(Tensor, nn.Module, type, types.ModuleType, str, bytes, int, float, complex, np.ndarray, torch.dtype),
    *(weakref.ReferenceType, *weakref.ProxyTypes),
)
_OF_LIBRARIES = ("torch", "numpy", "transformers", "accelerate", "builtins", "collections", "logging")

States = Sequence[tuple[Any, Any]]


class Found:
    """Random generators, each once."""

    def __init__(self) -> None:
        self.sources: list[Any] = []
        self._seen: dict[int, tuple[Any, int]] = {}
        "What was looked at, by its identity, and how deep."

    def look(self, value: Any, depth: int = _DEPTH) -> None:
        """Look for generators in a value, and in what it contains or refers to."""
        kind = _way(value)
        if kind == "dull":
            return
        _, seen_depth = self._seen.get(id(value), (None, -1))
        if depth <= seen_depth:
            return
        self._seen[id(value)] = value, depth
        if kind == "source":
            self.sources += [value] if seen_depth < 0 else []
        elif depth or kind in _REFERRING:
            for inner in itertools.islice(_CONTENTS[kind](value), _WIDTH):
                self.look(inner, depth if kind in _REFERRING else depth - 1)

    def look_at_code(self, kind: type) -> None:
        """Look for generators that a class of modules holds or that its code refers to."""
        names, cells = _places(kind)
        for namespace, name in names:
            self.look(namespace.get(name), 1)
        for cell in cells:
            self.look(_content(cell), 1)


def states_of(sources: Iterable[Any]) -> States:
    """Random generators and their present states."""
    return [(source, _state(source)) for source in sources]


@contextmanager
def drawn_again(states: States) -> Iterator[None]:
    """Generators as they were; afterwards as they are now."""
    present = states_of(source for source, _ in states)
    try:
        _set(states)
        yield
    finally:
        _set(present)


def _set(states: States) -> None:
    for source, state in states:
        if isinstance(source, np.random.Generator):
            source.bit_generator.state = state
        elif isinstance(source, np.random.BitGenerator):
            source.state = state
        elif isinstance(source, random.Random):
            source.setstate(state)
        else:
            source.set_state(state)


def _state(source: Any) -> Any:
    if isinstance(source, np.random.Generator):
        return source.bit_generator.state
    if isinstance(source, np.random.BitGenerator):
        return source.state
    if isinstance(source, np.random.RandomState):
        return source.get_state(legacy=False)
    return source.getstate() if isinstance(source, random.Random) else source.get_state()


_SOURCES = (torch.Generator, np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)


def _way(value: Any) -> str:
    kind: Any = type(value)
    return _kind(kind)


@functools.lru_cache(maxsize=1024)
def _kind(kind: Any) -> str:
    """How objects of a class are looked into."""
    if issubclass(kind, _SOURCES):
        return "dull" if issubclass(kind, random.SystemRandom) else "source"
    if issubclass(kind, _DULL):
        return "dull"
    if issubclass(kind, dict):
        return "mapping"
    if issubclass(kind, _CONTAINERS):
        return "container"
    if issubclass(kind, _BOUND):
        return "bound"
    if issubclass(kind, functools.partial):
        return "partial"
    if issubclass(kind, types.FunctionType):
        return "function"
    return "dull" if kind.__module__.partition(".")[0] in _OF_LIBRARIES else "object"


_REFERRING = ("bound", "partial", "function")
_HOLDING = ("source", "bound", "partial", "object")
"What may refer to a generator, and is looked into where code names it."
_CONTENTS: dict[str, Any] = {
    "mapping": lambda value: value.values(),
    "container": iter,
    "bound": lambda value: [value.__self__],
    "partial": lambda value: [value.func, *value.args, *value.keywords.values()],
    "function": lambda value: [_content(cell) for cell in value.__closure__ or ()],
    "object": lambda value: getattr(value, "__dict__", {}).values(),
}


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty: its variable has not been set
        return None


@functools.lru_cache(maxsize=1024)
def _places(kind: Any) -> tuple[list[tuple[Mapping[str, Any], str]], list[types.CellType]]:
    """Where a class and its code may find a generator: attributes and global variables by name, and closures."""
    names: list[tuple[Mapping[str, Any], str]] = [(vars(one), name) for one in _own(kind) for name in vars(one)]
    functions = _functions(kind)
    for function in functions:
        names += [(function.__globals__, name) for name in dict.fromkeys(_named_in(function.__code__))]
    holding = [(space, name) for space, name in names if _way(space.get(name)) in _HOLDING]
    return holding, [cell for function in functions for cell in function.__closure__ or ()]


def _own(kind: type) -> list[type]:
    """The classes of a user's own that a class is made of."""
    return [one for one in kind.__mro__ if one.__module__.partition(".")[0] not in _OF_LIBRARIES]


def _functions(kind: type) -> list[types.FunctionType]:
    """The functions of a class of a user's own, and those of the same file that they call."""
    ahead = [value for one in _own(kind) for value in vars(one).values() if isinstance(value, types.FunctionType)]
    found: dict[types.FunctionType, None] = {}
    while ahead:
        function = ahead.pop()
        if function in found:
            continue
        found[function] = None
        called = [function.__globals__.get(name) for name in _named_in(function.__code__)]
        ahead += [
            one for one in called if isinstance(one, types.FunctionType) and one.__globals__ is function.__globals__
        ]
    return list(found)


def _named_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _named_in(constant)
