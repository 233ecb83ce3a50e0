"""How a value comes about: operations and their arguments, computed at the first read.

Entry points: ``Node`` and ``Seen``, with ``storage_of`` and ``reals``. Which storage has which node is ``values``'s.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class Node:
    """How a storage's value comes about; ``value`` once it has been computed, ``lost`` if it cannot be."""

    compute: Callable[[], Tensor | None]
    num_bytes: int
    depth: int
    notes: frozenset[str]
    value: torch.UntypedStorage | None = None
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """A fake argument as it was when its operation ran."""

    node: Node | None
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def real(self) -> Tensor:
        """The argument with its values; what they were when the operation ran.

        Raises:
            LostError: They cannot be computed.
        """
        if self.node is None:  # only its shape matters
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="cpu")
        storage = storage_of(self.node)
        if storage is None:
            raise LostError
        return torch.empty(0, dtype=self.dtype, device="cpu").set_(storage, self.offset, self.size, self.stride)


class LostError(Exception):
    """A value turned out not to be computable."""


def checked(run: Callable[[], Any], index: int | None, expected: tuple[Any, ...]) -> Callable[[], Tensor | None]:
    """Compute one part of a result, and give it only if type, size and strides are those of the fake one."""

    def compute() -> Tensor | None:
        result = run()
        part: Tensor = result if index is None else result[index]
        return part if (part.dtype, tuple(part.shape), part.stride()) == expected else None

    return compute


def storage_of(node: Node) -> torch.UntypedStorage | None:
    """Compute a node if that was not done yet."""
    if node.value is None and not node.is_lost:
        try:
            real = node.compute()
        except Exception:  # no kernel for real tensors, values that it refuses
            real = None
        if real is None or real.untyped_storage().nbytes() < node.num_bytes or real.storage_offset():
            node.is_lost = True
        else:
            node.value = real.untyped_storage()
        node.compute = lambda: None
    return node.value


def seen_of(tensor: Tensor, node: Node | None) -> Seen:
    """A fake tensor as it is now."""
    return Seen(node, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def reals(value: Any) -> Any:
    """Arguments with real tensors in the place of the seen ones."""
    if isinstance(value, Seen):
        return value.real()
    if type(value) in (list, tuple):
        return type(value)(reals(item) for item in value)
    if type(value) is dict:
        return {key: reals(item) for key, item in value.items()}
    return value


def replaced(value: Any, fresh: Mapping[int, Node]) -> Any:
    """Arguments with other nodes, given by the ids of those that they replace."""
    if isinstance(value, Seen):
        node = fresh.get(id(value.node), value.node)
        return Seen(node, value.dtype, value.size, value.stride, value.offset)
    if type(value) in (list, tuple):
        return type(value)(replaced(item, fresh) for item in value)
    if type(value) is dict:
        return {key: replaced(item, fresh) for key, item in value.items()}
    return value


def nodes_of(value: Any) -> list[Node]:
    """The nodes of all seen arguments."""
    if isinstance(value, Seen):
        return [] if value.node is None else [value.node]
    if type(value) in (list, tuple):
        return [node for item in value for node in nodes_of(item)]
    return [node for item in value.values() for node in nodes_of(item)] if type(value) is dict else []
