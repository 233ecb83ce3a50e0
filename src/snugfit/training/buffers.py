"""Copies of a model's registered buffers, taken before something that may change them.

Entry points: ``Keeper`` and ``restore``, by which the engine puts buffers back after a window that made no update, and
``copies`` for whoever copies tensors that may share memory. What a repetition puts back is ``held_tensors``'s.

NOTE [Which buffers are copied]
1. Copying every buffer every time would cost memory (masks, tables of positions), so one that was left as it was the
   last time, in the same mode, is not copied again. Torch counts in-place changes of a tensor in its version.
2. Except that the kernels of BatchNorm and InstanceNorm change running statistics without counting. So a floating
   point buffer of a module in training mode is always copied if it is small, as statistics per channel are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

SMALL = 2**16
"Elements; more than any number of channels."
_ALIGNED = 16
"Bytes; a multiple of the size of every type."


@dataclass(frozen=True, slots=True)
class Copy:
    """The values of a tensor: in memory of their own, or in a part of what copies that overlap share."""

    memory: Tensor
    shape: torch.Size
    part: tuple[torch.dtype, int, tuple[int, ...]] | None = None
    "Type, offset and strides in shared memory."

    def of(self, memory: Tensor) -> Tensor:
        """The tensor that lies in some memory: in this copy's, or in a twin of that."""
        if self.part is None:
            return memory if memory.shape == self.shape else memory.expand(self.shape)
        dtype, offset, strides = self.part
        whole = len(memory) // dtype.itemsize * dtype.itemsize
        return memory[:whole].view(dtype).as_strided(self.shape, strides, offset)

    @property
    def value(self) -> Tensor:
        """The tensor that was copied."""
        return self.of(self.memory)


def copies(tensors: Sequence[Tensor], wanted: Sequence[bool]) -> list[Copy | None]:
    """Copies of the wanted tensors and of those that overlap them in memory; the copies overlap alike.

    Args:
        tensors: Of any kind.
        wanted: Of each, whether it may change.
    """
    found: dict[int, Copy] = {}
    for numbers in overlapping(tensors):
        if any(wanted[i] for i in numbers):
            together = [tensors[i] for i in numbers]
            made = _together(together) if len(together) > 1 else [_alone(together[0])]
            found.update(zip(numbers, made, strict=True))
    return [found.get(i) for i in range(len(tensors))]


def overlapping(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The numbers of tensors, those together that may overlap in memory."""
    by_storage: dict[int, list[int]] = {}
    for i, tensor in enumerate(tensors):
        key = tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)
        by_storage.setdefault(key, []).append(i)
    found = []
    for numbers in by_storage.values():
        if len(numbers) == 1:
            found.append(numbers)
            continue
        end = -1
        for i in sorted(numbers, key=lambda i: _first_byte(tensors[i])):
            if _first_byte(tensors[i]) >= end:
                found.append([])
            found[-1].append(i)
            end = max(end, _first_byte(tensors[i]) + _num_bytes(tensors[i]))
    return found


def _alone(tensor: Tensor) -> Copy:
    return Copy(_written(tensor).clone(), tensor.shape)


def _together(tensors: Sequence[Tensor]) -> list[Copy]:
    tensors = [tensor.detach() for tensor in tensors]
    start = min(_first_byte(tensor) for tensor in tensors) // _ALIGNED * _ALIGNED
    end = max(_first_byte(tensor) + _num_bytes(tensor) for tensor in tensors)
    finest = min(tensors, key=lambda tensor: tensor.element_size())
    size = finest.element_size()
    memory = finest.as_strided(((end - start) // size,), (1,), start // size).view(torch.uint8).clone()
    return [
        Copy(memory, one.shape, (one.dtype, (_first_byte(one) - start) // one.element_size(), one.stride()))
        for one in tensors
    ]


def _first_byte(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _num_bytes(tensor: Tensor) -> int:
    """From the first element of a tensor to behind its last one."""
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + last) * tensor.element_size() if tensor.numel() else 0


@dataclass(frozen=True, slots=True)
class Kept:
    """One buffer as it was."""

    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    copy: Copy | None
    "None for one that is not expected to change."

    @property
    def has_stayed(self) -> bool:
        """Whether it is known to be what it was; False where a change may go unseen."""
        is_same = self.module._buffers[self.name] is self.buffer and self.buffer._version == self.version
        return is_same and not _changes_unseen(self.module, self.buffer)


class Keeper:
    """Keeps buffers again and again, and learns which of them never change."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, str], tuple[Tensor, int, bool]] = {}

    def take(self, modules: Iterable[nn.Module]) -> list[Kept]:
        """Copy what may change.

        Args:
            modules: The same ones, in the same order, every time; only buffers of their own are looked at.
        """
        buffers = [
            (i, module, name, buffer)
            for i, module in enumerate(modules)
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        changing = [not self._has_stayed(*one) or _changes_unseen(one[1], one[3]) for one in buffers]
        made = copies([buffer for *_, buffer in buffers], changing)
        return [
            Kept(module, name, buffer, buffer._version, copy)
            for (_, module, name, buffer), copy in zip(buffers, made, strict=True)
        ]

    def _has_stayed(self, i: int, module: nn.Module, name: str, buffer: Tensor) -> bool:
        """Whether a buffer is what it was when it was last looked at, in the same mode."""
        last = self._last.get((i, name))
        version, mode = buffer._version, module.training
        self._last[i, name] = buffer, version, mode
        return last is not None and last[0] is buffer and last[1:] == (version, mode)


@torch.no_grad()
def restore(kept: Iterable[Kept]) -> list[Kept]:
    """Put the copies back, into the same buffers.

    Returns:
        What changed although no copy was taken, and so could not be put back.
    """
    changed = []
    for one in kept:
        if one.copy is not None:
            _write_back(one.buffer, one.copy.value, is_counted=one.buffer._version != one.version)
            setattr(one.module, one.name, one.buffer)
        elif not one.has_stayed:
            changed.append(one)
    return changed


def _write_back(buffer: Tensor, values: Tensor, *, is_counted: bool) -> None:
    if buffer.shape != values.shape:
        buffer.data = values.clone()
        return
    # where no change was counted, none is to be: other copies tell by the version what has stayed
    (_written(buffer) if is_counted else _written(buffer).data).copy_(_written(values))


def _written(buffer: Tensor) -> Tensor:
    """A view of a buffer that holds each value once, for torch writes to no tensor that overlaps itself."""
    found = buffer.detach()
    if found.layout == torch.strided:
        for dim, stride in enumerate(found.stride()):
            if stride == 0 and found.shape[dim] > 1:
                found = found.narrow(dim, 0, 1)
    return found


def _changes_unseen(module: nn.Module, buffer: Tensor) -> bool:
    return module.training and buffer.is_floating_point() and buffer.numel() <= SMALL
