"""Recognises that a device ran out of memory, and takes a window back to its beginning.

Entry points: ``is_out_of_memory`` and ``Snapshots``. Gradients need no copy: a window starts without any. What is
smaller in the next attempt is the engine's to say.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from snugfit.errors import DeviceMemoryError, SnugfitError, warn
from snugfit.training import buffers as buffer_copies
from snugfit.training import random_states, splitting
from snugfit.training.buffers import Keeper, Kept

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


@contextmanager
def memory_errors_named(
    doing: str, *, hint: str = "let snugfit plan it: snugfit plan TARGET --budget SIZE"
) -> Iterator[None]:
    """Turn an out-of-memory error that no engine has named into a ``DeviceMemoryError``.

    Args:
        doing: For the message: what ran out of memory, ``"training"`` for example.
        hint: What to do about it.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DeviceMemoryError(
            f"out of memory while {doing}",
            got=message,
            expected="a plan whose peak memory is within what the device, or the cap, allows",
            hint=hint,
        ) from error


def not_retried(error: BaseException, where: str) -> DeviceMemoryError:
    """The named error for an out-of-memory error that no smaller micro-batch is tried for."""
    return DeviceMemoryError(
        f"the device ran out of memory {where}",
        got=f"{type(error).__name__}: {error}",
        expected="memory for one micro-batch",
        hint="use a smaller micro_batch_size; only engine.step and step_window in one process try again by themselves",
    )


def largest(batches: Sequence[Any], split: Callable[[Any, int], list[Any]] | None) -> int:
    """Samples of the largest of some batches, so that they can be halved.

    Args:
        batches: On the host.
        split: The user's own, for batches that only it understands: cut into single samples they can be counted.
    """
    if split is not None:
        return max(len(split(batch, 1)) for batch in batches)
    return max(map(splitting.samples_or_none, batches))


def halved(size: int, failure: str) -> int:
    """Half of a micro-batch size that ran out of memory, rounded up; warns, for the size asked for has no effect.

    Raises:
        DeviceMemoryError: The size is 1.
    """
    if size == 1:
        raise DeviceMemoryError(
            "the device ran out of memory with a micro-batch of one sample",
            got=failure,
            expected="memory for the weights, the optimizer and one sample",
            hint="recompute more, use bf16-mixed, or a smaller model or optimizer; `snugfit estimate` says what needs "
            "how much",
            micro_batch_size=1,
        )
    half = -(-size // 2)
    warn(
        f"out of memory with micro_batch_size={size}; the window starts again with {half}: same samples, same "
        "weights, more micro-steps",
    )
    return half


class Snapshots:
    """Random states and buffers of a model before a window, and the way back.

    Args:
        model: Whose buffers are kept.
        device: Whose random state is kept beside the host's.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._keeper = Keeper()
        self._latest: list[Kept] | None = None

    def take(self) -> tuple[dict[str, Any], list[Kept]]:
        """What ``restore`` needs."""
        self._latest = self._keeper.take(self._model.modules())
        return random_states.take(self._device), self._latest

    def buffers(self) -> list[Kept]:
        """What ``restore_buffers`` needs: what ``take`` has just copied, if it was called for this window."""
        kept, self._latest = self._latest, None
        return self._keeper.take(self._model.modules()) if kept is None else kept

    def restore_buffers(self, kept: list[Kept]) -> None:
        """Set buffers to what they were before a window that made no update; random states go on."""
        changed = buffer_copies.restore(kept)
        if changed:
            warn(
                f"a window without an update changed buffer {changed[0].name} of {type(changed[0].module).__name__}, "
                "which the window before had left as it was, so it cannot be taken back; change buffers in every "
                "window or in none",
            )

    def restore(self, snapshot: tuple[dict[str, Any], list[Kept]]) -> None:
        """Set random states and buffers to what they were.

        Raises:
            DeviceMemoryError: A buffer changed that the window before had left as it was.
        """
        states, kept = snapshot
        random_states.restore(states, self._device)
        changed = buffer_copies.restore(kept)
        if changed:
            raise DeviceMemoryError(
                "a window cannot be taken back to its beginning",
                got=f"buffer {changed[0].name} of {type(changed[0].module).__name__} changed, unlike in the window "
                "before",
                expected="buffers that change in every window or in none",
                hint="start again from a saved state with a smaller micro_batch_size",
            )
