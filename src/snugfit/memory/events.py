"""What a traced step is written down as: births and deaths of storages, marks, and the work of kernels.

Entry points: ``Recording`` and its parts. ``recording`` and ``measuring`` write them, ``traces`` reads them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.flop_counter import flop_registry


class Work(NamedTuple):
    """What one kernel does: for time models."""

    op: str
    phase: str
    dtype: str
    flops: int
    bytes: int


class Call(NamedTuple):
    """One operation that has run: what a device's rules look at to add what no tensor shows."""

    name: str
    phase: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Any


@dataclass(slots=True)
class Birth:
    """Where a storage comes from."""

    num_bytes: int
    category: str
    phase: str
    module: str
    op: str
    window: int
    place: str = ""
    "``device`` or ``host`` where the step says so, else open."


@dataclass(slots=True)
class Recording:
    """The event stream of a traced step.

    ``events[k]`` is ``i + 1`` for the birth of ``births[i]`` and ``-(i + 1)`` for its death. ``marks`` are
    positions in ``events`` with a name: ``window``, ``micro-batch`` (jobs only), ``forward end``, ``backward end``,
    ``step end``.
    """

    births: list[Birth] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)
    work: list[tuple[int, Work]] = field(default_factory=list)
    "Position in ``events`` and what was done there."


def tensors_of(result: Any) -> Sequence[Tensor]:
    """The tensors of an argument or a result, those of lists and of lists in lists included."""
    if isinstance(result, Tensor):
        return (result,)
    if isinstance(result, (tuple, list)):
        return [
            item
            for part in result
            for item in (part if isinstance(part, (tuple, list)) else (part,))
            if isinstance(item, Tensor)
        ]
    return ()


def work_of(func: Any, phase: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Work:
    """What one operation reads, writes and computes."""
    formula = flop_registry.get(func._overloadpacket)
    flops = int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0
    read, dtype = 0, ""
    for value in args:
        for tensor in tensors_of(value):
            read += tensor.numel() * tensor.element_size()
            if not dtype and tensor.is_floating_point():
                dtype = str(tensor.dtype)[6:]
    written = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(result))
    return Work(func.__name__, phase, dtype or "float32", flops, read + written)
