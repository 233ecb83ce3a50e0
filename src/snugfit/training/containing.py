"""What the arguments of a segment contain: tensors, and containers that its forward might change.

Entry points: ``tensors``, ``copied`` and ``Guard``. Looked into are lists, tuples, sets, mappings, queues and data
classes; what other objects hold is not seen.
"""

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn

from snugfit.errors import UnsupportedError


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


def copied(value: Any) -> Any:
    """The value with every container in it copied; tensors and other objects stay the same."""
    twin: Any
    if isinstance(value, dict):
        twin = copy.copy(value)
        for key, item in value.items():
            twin[key] = copied(item)
        return twin
    if isinstance(value, (list, deque)):
        twin = copy.copy(value)
        for i, item in enumerate(value):
            twin[i] = copied(item)
        return twin
    if isinstance(value, set):
        return copy.copy(value)
    if isinstance(value, tuple):
        items = [copied(item) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if _is_data(value):
        twin = copy.copy(value)
        for field in fields(value):
            if hasattr(value, field.name):
                object.__setattr__(twin, field.name, copied(getattr(value, field.name)))
        return twin
    return value


class Guard:
    """Notes what a repetition relies on to be as it was, and refuses it where that has changed.

    Args:
        names: Of the segment's modules.
        modules: Of the segment.
        arguments: Of the forward; tensors given by themselves are torch's to check.
    """

    def __init__(self, names: Sequence[str], modules: Sequence[nn.Module], arguments: Sequence[Any]) -> None:
        self._names, self._modules = tuple(names), modules
        self._inputs = [(tensor, tensor._version) for tensor in tensors(list(arguments))]
        self._weights = [(parameter, parameter._version) for parameter in self._parameters()]

    def check(self) -> None:
        """Refuse a repetition with other weights or inputs.

        Raises:
            UnsupportedError: Weights were exchanged or written into, or a tensor inside of an argument was.
        """
        weights = list(self._parameters())
        same = len(weights) == len(self._weights) and all(
            now is then and (now._version == version or self._is_sharded)
            for now, (then, version) in zip(weights, self._weights, strict=True)
        )
        if not same:
            raise self._refused(
                "weights were changed or exchanged between forward and backward",
                "call backward before optimizer.step(), and not outside of torch.func.functional_call",
            )
        if any(tensor._version != version for tensor, version in self._inputs):
            raise self._refused(
                "a tensor inside of an argument was written into after the forward",
                "use the operation that makes a new tensor instead of the one that writes into it",
            )

    @property
    def _is_sharded(self) -> bool:
        return any("FSDP" in kind.__name__ for module in self._modules for kind in type(module).__mro__)

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for module in self._modules for parameter in module.parameters())

    def _refused(self, got: str, hint: str) -> UnsupportedError:
        return UnsupportedError(
            f"the segment {', '.join(self._names)} cannot be computed again as it was",
            got=got,
            expected="weights and inputs as the forward saw them",
            hint=hint,
            names=self._names,
        )


def _is_data(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)
