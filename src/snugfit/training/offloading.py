"""Saved tensors of chosen segments, kept on the host between forward and backward.

Entry point: ``saved_on_host``. On CUDA copies run on a stream of their own, beside the computation, into pinned
memory, and come back one ahead of backward. Where tensors are on the host already nothing is copied. Parameters,
buffers and small tensors stay where they are.

NOTE [Which memory is freed, and when]
1. A saved tensor is replaced by a copy on the host; the device's memory is free when the forward has let go of it and
   the copy is done. ``record_stream`` tells the allocator of the copy.
2. Tensors that share memory are copied once, with all of that memory; views come back as views.
3. A copy holds what was saved. Where none is made, a tensor that is changed in place after it was saved is an error,
   as in plain autograd.
"""

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from snugfit.errors import PlanError
from snugfit.sizes import MIB

MIN_BYTES = MIB
"Smaller tensors stay: what a copy costs in launches is more than the memory is worth."


def saved_on_host(modules: Sequence[nn.Module]) -> AbstractContextManager[Any]:
    """Context of a segment's forward whose saved tensors are kept on the host.

    Args:
        modules: Of the segment; their parameters and buffers stay.
    """
    moved = _Moved({_memory(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())})
    return torch.autograd.graph.saved_tensors_hooks(moved.pack, moved.unpack)


def is_on_host(tensor: Tensor) -> bool:
    """Whether a tensor is where offloading would move it to."""
    return tensor.device.type == "cpu"


def to_host(tensor: Tensor) -> tuple[Tensor, Any]:
    """A copy of a tensor in pinned memory of the host, under way, and the event that ends it."""
    stream = _stream(tensor.device)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)
        return copy, stream.record_event()


def to_device(tensor: Tensor, device: torch.device, ready: Any) -> Tensor:
    """A copy of a host tensor on the device, under way; the present stream waits for it.

    Args:
        tensor: On the host.
        device: Where it came from.
        ready: The event after which ``tensor`` is complete.
    """
    stream, current = _stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        stream.wait_event(ready)
        back = tensor.to(device, non_blocking=True)
    current.wait_stream(stream)
    back.record_stream(current)
    return back


@dataclass(eq=False)
class _Place:
    """Memory that was copied to the host."""

    host: Tensor
    device: torch.device
    ready: Any
    before: "weakref.ref[_Place] | None"
    "What was moved before it, and is needed after it."
    back: Tensor | None = None

    def returned(self) -> Tensor:
        if self.back is None:
            self.back = to_device(self.host, self.device, self.ready)
        return self.back


@dataclass(frozen=True, slots=True)
class _View:
    """A saved tensor as a view of copied memory."""

    place: _Place
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Uncopied:
    """A saved tensor that stays where it is."""

    tensor: Tensor
    version: int


class _Moved:
    """The saved tensors of one forward of a segment."""

    def __init__(self, staying: set[int]) -> None:
        self._staying = staying
        self._places: dict[tuple[int, torch.dtype, int], _Place] = {}
        self._watches: list[Any] = []
        self._last: weakref.ref[_Place] | None = None

    def pack(self, tensor: Tensor) -> "_View | _Uncopied":
        # Never the tensor itself: an output that its own node saves would keep that node alive for ever.
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            return _Uncopied(tensor.detach(), tensor._version)
        memory = _memory(tensor)
        is_small = tensor.untyped_storage().nbytes() < MIN_BYTES
        if is_small or memory in self._staying or is_on_host(tensor):
            return _Uncopied(tensor.detach(), tensor._version)
        key = (memory, tensor.dtype, tensor._version)
        place = self._places.get(key)
        if place is None:
            storage = tensor.untyped_storage()
            flat = tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
            host, ready = to_host(flat)
            place = self._places[key] = _Place(host, tensor.device, ready, self._last)
            self._last = weakref.ref(place)
            # When the memory is freed its address may come again.
            self._watches.append(weakref.ref(storage, lambda _: self._places.pop(key, None)))
        return _View(place, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, packed: "_View | _Uncopied") -> Tensor:
        if isinstance(packed, _Uncopied):
            if packed.tensor._version != packed.version:
                raise PlanError(
                    "a saved tensor of a segment was changed in place before its backward",
                    got=f"a tensor of shape {tuple(packed.tensor.shape)} at version {packed.tensor._version}",
                    expected=f"version {packed.version}, as it was saved",
                    hint="use the operation that makes a new tensor instead of the one that writes into it",
                )
            return packed.tensor
        self._places.clear()
        back = packed.place.returned()
        before = packed.place.before() if packed.place.before is not None else None
        if before is not None:
            before.returned()
        return back.as_strided(packed.shape, packed.stride, packed.offset)


_streams: dict[torch.device, Any] = {}


def _stream(device: torch.device) -> Any:
    """One stream per device for all copies."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
