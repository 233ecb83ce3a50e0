"""What the arguments and results of a segment contain: tensors, and containers that its forward might change.

Entry points: ``tensors``, ``replaced`` and ``is_copied``. Looked into are lists, tuples, sets, queues, mappings, what
else acts like one of these, arrays, data classes, namespaces and caches of transformers; other objects are not.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence, MutableSet
from dataclasses import is_dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from snugfit.errors import UnsupportedError

_COLLECTIONS = (MutableMapping, MutableSequence, MutableSet, SimpleNamespace)
_PLAIN = (dict, list, set, deque)
_OF_PYTHON = ("builtins", "itertools")


def tensors(value: Any, seen: dict[int, Any] | None = None) -> Iterator[Tensor]:
    """The tensors of a value, in order.

    Args:
        value: Looked through; may contain itself.
        seen: Containers that have been looked through.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors(item, seen)
    elif _is_looked_into(type(value)):
        seen = {} if seen is None else seen
        if id(value) not in seen:
            seen[id(value)] = value
            for item in _contents(value):
                yield from tensors(item, seen)


def replaced(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """The value with every container in it copied, and what is of a kind replaced; other objects stay the same.

    What occurs twice occurs twice in the copy as well, and what contains itself does so.

    Args:
        value: Looked through as in ``tensors``, except that sets are copied as they are.
        kind: Of what is replaced.
        function: From what is there to what stands for it in the copy.

    Raises:
        UnsupportedError: There is an iterator, or a container that cannot be copied.
    """
    return _replaced(value, kind, function, {})


def is_copied(value: Any) -> bool:
    """Whether a container is one that a segment gets a copy of for its repetition."""
    return isinstance(value, tuple) or _is_looked_into(type(value))


def _replaced(value: Any, kind: type, function: Callable[[Any], Any], twins: dict[int, tuple[Any, Any]]) -> Any:
    if id(value) in twins:
        return twins[id(value)][1]
    if isinstance(value, kind):
        twin = function(value)
    elif isinstance(value, tuple):
        twin = _tuple(value, [_replaced(item, kind, function, twins) for item in value])
    elif not _is_looked_into(type(value)):
        _refuse_iterator(value)
        return value
    else:
        twin = _copied(value)
        twins[id(value)] = value, twin  # before its contents, which may contain it
        _fill(twin, value, lambda item: _replaced(item, kind, function, twins))
    return twins.setdefault(id(value), (value, twin))[1]


def _holds(kind: type) -> bool:
    """Whether objects of a class hold what is of interest here."""
    if issubclass(kind, nn.Module):
        return False
    is_collection = issubclass(kind, (list, set, deque, *_COLLECTIONS))
    is_data = is_dataclass(kind) or hasattr(kind, "__attrs_attrs__")
    return is_collection or is_data or _is_array(kind) or _is_cache(kind)


_is_looked_into: Callable[[type], bool] = lru_cache(maxsize=1024)(_holds)


def _is_array(kind: type) -> bool:
    return any((one.__module__, one.__name__) == ("numpy", "ndarray") for one in kind.__mro__)


def _is_cache(kind: type) -> bool:
    """Whether a class is a cache of keys and values in transformers, or a layer of one."""
    return any(one.__module__.startswith("transformers.") and "Cache" in one.__name__ for one in kind.__mro__)


def _refuse_iterator(value: Any) -> None:
    if isinstance(value, Iterator) and type(value).__module__ in _OF_PYTHON:
        raise UnsupportedError(
            "an argument of a segment is an iterator, which is used up when the segment runs again",
            got=f"a {type(value).__name__}",
            expected="arguments that can be read twice",
            hint="pass a list: list(...)",
        )


def _contents(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, set, deque)):
        yield from value
    yield from _attributes(value).values()


def _attributes(value: Any) -> dict[str, Any]:
    """What an object holds under names of its own."""
    if type(value) in _PLAIN:
        return {}
    slots = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for some in slots for name in ([some] if isinstance(some, str) else some)]
    held = {name: getattr(value, name) for name in names if name[:2] != "__" and hasattr(value, name)}
    return held | getattr(value, "__dict__", {})


def _copied(value: Any) -> Any:
    try:
        return copy.copy(value)
    except Exception as error:
        raise UnsupportedError(
            "an argument of a segment cannot be copied, and the segment may write into it each time it runs",
            got=f"a {type(value).__qualname__}: {error}",
            expected="containers that copy.copy copies",
            hint="pass a dict, a list or a data class, or leave the module out of recompute",
        ) from error


def _fill(twin: Any, value: Any, twin_of: Callable[[Any], Any]) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            twin[key] = twin_of(item)
    elif isinstance(value, (list, deque)):
        for i, item in enumerate(value):
            twin[i] = twin_of(item)
    for name, item in _attributes(value).items():
        object.__setattr__(twin, name, twin_of(item))


def _tuple(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """A tuple of the same class, whatever its constructor takes."""
    kind: Any = type(value)
    if all(a is b for a, b in zip(items, value, strict=True)):
        return value
    if hasattr(kind, "n_sequence_fields"):  # what torch.topk and others return
        made: tuple[Any, ...] = kind(items)
        return made
    made = tuple.__new__(kind, items)
    for name, item in getattr(value, "__dict__", {}).items():
        object.__setattr__(made, name, item)
    return made
