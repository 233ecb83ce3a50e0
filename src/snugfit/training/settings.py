"""Settings of torch that hold for all code and that a forward may have run under: default type, choice of kernels.

Entry points: ``present`` and ``as_then``. Autocast and the default device are ``recomputation``'s.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.backends import cuda, mkldnn

_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    (lambda: mkldnn.enabled, mkldnn.set_flags),
)
"How each is read and set."


def present() -> tuple[Any, ...]:
    """The settings at this moment."""
    return tuple(read() for read, _ in _SETTINGS)


@contextmanager
def as_then(then: tuple[Any, ...]) -> Iterator[None]:
    """Context under earlier settings."""
    now = present()
    _set(then)
    try:
        yield
    finally:
        _set(now)


def _set(values: tuple[Any, ...]) -> None:
    for (_, write), value in zip(_SETTINGS, values, strict=True):
        write(value)
