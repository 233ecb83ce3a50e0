"""What the arguments and results of a segment contain: tensors, and containers that its forward might change.

Entry points: ``tensors`` and ``replaced``. Looked into are lists, tuples, sets, mappings, queues and data
classes; what other objects hold is not seen.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a value, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (list, tuple, set, deque)):
        for item in value:
            yield from tensors(item)
    elif _is_data(value):
        for field in fields(value):
            yield from tensors(getattr(value, field.name, None))


def replaced(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """The value with every container in it copied, and what is of a kind replaced; other objects stay the same.

    Args:
        value: Looked through as in ``tensors``, except that sets are copied as they are.
        kind: Of what is replaced.
        function: From what is there to what stands for it in the copy.
    """
    twin: Any
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        twin = copy.copy(value)
        for key, item in value.items():
            twin[key] = replaced(item, kind, function)
        return twin
    if isinstance(value, (list, deque)):
        twin = copy.copy(value)
        for i, item in enumerate(value):
            twin[i] = replaced(item, kind, function)
        return twin
    if isinstance(value, set):
        return copy.copy(value)
    if isinstance(value, tuple):
        items = [replaced(item, kind, function) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        make: Any = getattr(value, "_make", type(value))  # a named tuple's own, for it checks nothing
        return make(items)
    if _is_data(value):
        twin = copy.copy(value)
        for field in fields(value):
            if hasattr(value, field.name):
                object.__setattr__(twin, field.name, replaced(getattr(value, field.name), kind, function))
        return twin
    return value


def _is_data(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)
