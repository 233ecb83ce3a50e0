"""What a CUDA kernel asks about the card and about torch before it decides how much memory to take.

Entry points: ``Target``, ``target_of``, and ``under_torch`` for another torch than the installed one. Left out: what
only the driver knows.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from snugfit import hardware

_cudnn: Any = torch.backends.cudnn

_THREADS_PER_MULTIPROCESSOR = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
"Resident threads where they are not 2048. Source: CUDA C++ Programming Guide, table of technical specifications."

_MULTIPROCESSORS = {
    (6, 0): 56,
    (6, 1): 28,
    (7, 0): 80,
    (7, 5): 68,
    (8, 0): 108,
    (8, 6): 82,
    (8, 9): 128,
    (9, 0): 132,
    (10, 0): 148,
    (12, 0): 170,
}
"Multiprocessors of the best-known card of a capability, for cards that ``_OF_CARD`` does not list."

_OF_CARD = {
    "a30": 56,
    "a10": 72,
    "a10g": 80,
    "a2": 10,
    "a40": 84,
    "gtx-1060-6gb": 10,
    "gtx-1070": 15,
    "gtx-1080": 20,
    "h100-pcie-80gb": 114,
    "l4": 58,
    "l40": 142,
    "l40s": 142,
    "p40": 30,
    "quadro-rtx-6000": 72,
    "quadro-rtx-8000": 72,
    "rtx-2060-6gb": 30,
    "rtx-2070": 36,
    "rtx-2080": 46,
    "rtx-3060-12gb": 28,
    "rtx-3070": 46,
    "rtx-3080-10gb": 68,
    "rtx-3090-ti": 84,
    "rtx-4060": 24,
    "rtx-4070": 46,
    "rtx-4080": 76,
    "rtx-5000-ada": 100,
    "rtx-5070": 48,
    "rtx-5080": 84,
    "rtx-6000-ada": 142,
    "rtx-a4000": 48,
    "rtx-a5000": 64,
    "rtx-a6000": 84,
    "rtx-pro-6000-blackwell": 188,
    "t4": 40,
    "titan-rtx": 72,
    "titan-xp": 30,
}
"Multiprocessors by card where they differ from the table above. Source: NVIDIA's architecture white papers."


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The card that a step is traced for, and the torch that it is traced with."""

    compute_capability: tuple[int, int]
    multiprocessors: int
    threads_per_multiprocessor: int
    torch_version: tuple[int, int]
    cudnn_version: int
    """As ``torch.backends.cudnn.version()`` gives it.

    Of a torch without CUDA it is that of the wheel which PyPI gives for the same torch.
    """


def target_of(device: hardware.Device) -> Target:
    """The target that a device of the catalogue is; a card of unknown capability counts as 8.0."""
    return of_capability(device.compute_capability or (8, 0), device.name)


def of_capability(compute_capability: tuple[int, int], card: str = "") -> Target:
    """The target with a compute capability, under the installed torch."""
    known = [count for capability, count in _MULTIPROCESSORS.items() if capability <= compute_capability]
    return Target(
        compute_capability=compute_capability,
        multiprocessors=_OF_CARD.get(card, known[-1] if known else 16),
        threads_per_multiprocessor=_THREADS_PER_MULTIPROCESSOR.get(compute_capability, 2048),
        torch_version=_torch_version(),
        cudnn_version=_cudnn_version(_torch_version()),
    )


def _cudnn_version(torch_version: tuple[int, int]) -> int:
    """The installed one, else that of PyPI's wheels: 9.10 with CUDA 12.8 up to torch 2.10, 9.15.1 or newer since."""
    installed = None if _ASSUMED.get() else _cudnn.version()
    return int(installed or (92000 if torch_version >= (2, 11) else 91002))


@contextmanager
def under_torch(version: str) -> Iterator[None]:
    """Trace for a training run under another torch: what changed between versions follows it, such as workspaces.

    Args:
        version: Such as ``"2.6"``. Model code and autograd stay those of the installed torch.
    """
    token = _ASSUMED.set(_parsed(version))
    try:
        yield
    finally:
        _ASSUMED.reset(token)


_ASSUMED: ContextVar[tuple[int, int] | None] = ContextVar("assumed torch version", default=None)


def _torch_version() -> tuple[int, int]:
    return _ASSUMED.get() or _parsed(torch.__version__)


def _parsed(version: str) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (2, 0)
