"""Copies of a model's registered buffers, taken before something that may change them.

Entry points: ``Keeper`` and ``restore``. The engine puts the copies back after a window that made no update;
recomputation swaps them in while a forward is repeated.

NOTE [Which buffers are copied]
1. Copying every buffer every time would cost memory (masks, tables of positions), so one that was left as it was the
   last time, in the same mode, is not copied again. Torch counts in-place changes of a tensor in its version.
2. Except that the kernels of BatchNorm and InstanceNorm change running statistics without counting. So a floating
   point buffer of a module in training mode is always copied if it is small, as statistics per channel are.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

_SMALL = 2**16
"Elements; more than any number of channels."


@dataclass(frozen=True, slots=True)
class Kept:
    """One buffer as it was."""

    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    copy: Tensor | None
    "None for one that is not expected to change. Of an expanded buffer each value once; ``value`` has its shape."

    @property
    def value(self) -> Tensor | None:
        """The copy in the buffer's own shape."""
        return None if self.copy is None else self.copy.expand(self.buffer.shape)

    @property
    def has_stayed(self) -> bool:
        """Whether it is known to be what it was; False where a change may go unseen."""
        return self.is_untouched and not _changes_unseen(self.module, self.buffer)

    @property
    def may_change_unseen(self) -> bool:
        """Whether a later forward, in training mode, may change it without counting."""
        return _is_of_norm(self.module)

    @property
    def is_untouched(self) -> bool:
        """Whether it is the same object, and no change of it was counted."""
        return self.module._buffers[self.name] is self.buffer and self.buffer._version == self.version

    def without_copy(self) -> "Kept":
        """The same with no copy of the values."""
        return replace(self, copy=None)


class Keeper:
    """Keeps buffers again and again, and learns which of them never change."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, str], tuple[Tensor, int, bool]] = {}

    def take(self, modules: Iterable[nn.Module], *, for_repetition: bool = False) -> list[Kept]:
        """Copy what may change.

        Args:
            modules: The same ones, in the same order, every time; only buffers of their own are looked at.
            for_repetition: Whether copies are also used after other forwards, in another mode, have run.
        """
        kept = []
        for i, module in enumerate(modules):
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                now = (buffer, buffer._version, module.training)
                last = self._last.get((i, name))
                stayed = last is not None and last[0] is buffer and last[1:] == now[1:]
                may_change = _changes_unseen(module, buffer) or (for_repetition and _is_of_norm(module))
                needless = stayed and not may_change
                kept.append(Kept(module, name, buffer, now[1], None if needless else _written(buffer).clone()))
                self._last[i, name] = now
        return kept


@torch.no_grad()
def restore(kept: Iterable[Kept]) -> list[Kept]:
    """Put the copies back, into the same buffers.

    Returns:
        What changed although no copy was taken, and so could not be put back.
    """
    changed = []
    for one in kept:
        if one.copy is not None:
            # where no change was counted, none is to be: other copies tell by the version what has stayed
            is_counted = one.buffer._version != one.version
            (_written(one.buffer) if is_counted else _written(one.buffer).data).copy_(one.copy)
            setattr(one.module, one.name, one.buffer)
        elif not one.has_stayed:
            changed.append(one)
    return changed


def _written(buffer: Tensor) -> Tensor:
    """A view of a buffer that holds each value once, for torch writes to no tensor that overlaps itself."""
    found = buffer.detach()
    if found.layout == torch.strided:
        for dim, stride in enumerate(found.stride()):
            if stride == 0 and found.shape[dim] > 1:
                found = found.narrow(dim, 0, 1)
    return found


def _changes_unseen(module: nn.Module, buffer: Tensor) -> bool:
    return module.training and buffer.is_floating_point() and buffer.numel() <= _SMALL


def _is_of_norm(module: nn.Module) -> bool:
    return module._buffers.get("running_mean") is not None
