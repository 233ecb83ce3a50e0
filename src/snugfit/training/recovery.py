"""Recognises that a device ran out of memory, and takes a window back to its beginning.

Entry points: ``is_out_of_memory`` and ``Snapshots``. Gradients need no copy: a window starts without any. What is
smaller in the next attempt is the engine's to say.
"""

import random
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from snugfit.errors import DeviceMemoryError, SnugfitError

# Anchored beginnings of what is raised as a plain RuntimeError. Only allocation failures: an internal error of a
# library may be anything.
_MESSAGES = tuple(
    re.compile(pattern)
    for pattern in (
        r"\[enforce fail at \S*alloc_cpu\.cpp:\d+\] .*DefaultCPUAllocator: (can't allocate|not enough) memory",
        r"DefaultCPUAllocator: (can't allocate|not enough) memory",
        r"(CUDA|HIP|MPS backend|XPU) out of memory",
        r"(CUDA|HIP) error: out of memory",
        r"CUDA error: (CUBLAS|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED",
        r"(cuBLAS|cusolver|cusparse) error: \w+_STATUS_ALLOC_FAILED",
        r"cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        r"cuFFT error: CUFFT_ALLOC_FAILED",
    )
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or what it was raised from, says that memory ran out.

    By type first (``torch.OutOfMemoryError``, ``MemoryError``), then by the beginning of a ``RuntimeError``'s message.
    """
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, SnugfitError):
        if isinstance(seen, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(seen, RuntimeError) and any(pattern.match(str(seen)) for pattern in _MESSAGES):
            return True
        seen = seen.__cause__
    return False


@dataclass(frozen=True, slots=True)
class _Kept:
    """One buffer before a window."""

    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    copy: Tensor | None
    "None for a buffer that no window has changed so far."


class Snapshots:
    """Random states and buffers of a model before a window, and the way back.

    A buffer that stayed as it was in a window is not copied before the next ones (masks, position tables).

    Args:
        model: Whose buffers are kept.
        device: Whose random state is kept beside the host's.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._unchanged: set[tuple[str, bool]] = set()

    def take(self) -> tuple[dict[str, Any], list[_Kept]]:
        """What ``restore`` needs."""
        kept = []
        for prefix, module in self._model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                changes = (f"{prefix}.{name}", module.training) not in self._unchanged
                copy = buffer.detach().clone() if changes else None
                kept.append(_Kept(module, name, buffer, buffer._version, copy))
        return random_states(self._device), kept

    def learn(self, snapshot: tuple[dict[str, Any], list[_Kept]]) -> None:
        """Note which buffers a completed window left as they were."""
        names = {id(module): prefix for prefix, module in self._model.named_modules()}
        for kept in snapshot[1]:
            key = (f"{names.get(id(kept.module), '')}.{kept.name}", kept.module.training)
            if _is_unchanged(kept):
                self._unchanged.add(key)
            else:
                self._unchanged.discard(key)

    def restore(self, snapshot: tuple[dict[str, Any], list[_Kept]]) -> None:
        """Set random states and buffers to what they were.

        Raises:
            DeviceMemoryError: A buffer changed for the first time in the window that failed.
        """
        states, buffers = snapshot
        set_random_states(states, self._device)
        for kept in buffers:
            if _is_unchanged(kept):
                continue
            if kept.copy is None:
                raise DeviceMemoryError(
                    "a window that ran out of memory cannot be taken back to its beginning",
                    got=f"buffer {kept.name} of {type(kept.module).__name__} changed, as it never had before",
                    expected="buffers that change in the first window or never",
                    hint="start again from a saved state with a smaller micro_batch_size",
                )
            with torch.no_grad():
                kept.buffer.copy_(kept.copy)
            setattr(kept.module, kept.name, kept.buffer)


def random_states(device: torch.device) -> dict[str, Any]:
    """States of the random generators that a training step may draw from, as tensors and built-in values."""
    kind, keys, position, has_gauss, cached = np.random.get_state()  # type: ignore[misc]
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Set what ``random_states`` read."""
    torch.set_rng_state(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _is_unchanged(kept: _Kept) -> bool:
    return getattr(kept.module, kept.name) is kept.buffer and kept.buffer._version == kept.version
