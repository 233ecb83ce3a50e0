"""What a traced step is written down as: births and deaths of storages, marks, and the work of kernels.

Entry points: ``Recording`` and its parts. ``recording`` and ``measuring`` write them, ``traces`` reads them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

_aten: Any = torch.ops.aten

_COUNTED_AS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
    _aten.addmm_: _aten.addmm,
    _aten.baddbmm_: _aten.baddbmm,
}
"Operations whose FLOPs torch's counter leaves out, and those with the same arguments and arithmetic."

_IS_TRANSPOSED, _GROUPS = 7, 9
"Positions among the arguments of a convolution's backward; the last one says which gradients are wanted."

_LOOK_UP = frozenset([_aten.embedding, _aten.index_select, _aten.index, _aten.gather])


class Work(NamedTuple):
    """What one kernel does: for time models. FLOPs and bytes alone depend on the micro-batch."""

    op: str
    phase: str
    dtype: str
    flops: int
    bytes: int
    is_repeated: bool = False
    "Whether it is a forward's operation that a recomputation runs again."
    is_watched: bool = False
    "Whether it passed the Python mode of a segment that keeps results."
    is_copy: bool = False
    "Whether it moves a tensor between the host and the device."
    begins: str = ""
    '``"window"``, ``"micro-batch"`` or ``"segment"`` (its repetition) where it is the first operation of one.'


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


class Border(NamedTuple):
    """A module is entered or left, in forward or where it is recomputed."""

    position: int
    "In ``events``."
    module: str
    is_entered: bool
    num_work: int
    "Pieces of work that were recorded before."


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
    borders: list[Border] = field(default_factory=list)


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


def has_dimensions(value: Any) -> bool:
    """Whether a tensor, or the first of a list, is no scalar: of scalars fake tensors may know the value."""
    first = next(iter(tensors_of(value)), None)
    return first is not None and first.dim() > 0


def work_of(func: Any, phase: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Work:
    """What one operation reads, writes and computes."""
    packet = func._overloadpacket
    formula = flop_registry.get(_COUNTED_AS.get(packet, packet))
    flops = int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0
    if packet is _aten.convolution_backward and args[_GROUPS] > 1 and not args[_IS_TRANSPOSED]:
        gradient, weight = args[0], args[2]  # torch's formula takes every output channel to see every input channel
        flops = 2 * gradient.numel() * weight[0].numel() * sum(args[-1][:2])
    read, dtype = 0, ""
    for value in args:
        for tensor in tensors_of(value):
            read += tensor.numel() * tensor.element_size()
            if not dtype and tensor.is_floating_point():
                dtype = str(tensor.dtype)[6:]
    written = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(result))
    if packet in _LOOK_UP:  # of the table only what is written is read
        read = written
    if not written and func._schema.is_mutable and args:  # in place on a list, which is not returned
        written = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(args[0]))
    return Work(func.__name__, phase, dtype or "float32", flops, read + written)
