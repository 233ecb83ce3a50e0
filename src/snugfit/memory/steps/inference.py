"""Inference mode in a traced step: as ``torch.no_grad``, which holds the same memory.

Entry point: ``as_without_gradients``. In true inference mode composite operators reach a dispatch mode whole, past the
kernels in which they are taken apart; what each part makes could not be recorded. Left out: the version counters.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def as_without_gradients() -> Iterator[None]:
    """Let ``torch.inference_mode``, context or decorator, switch gradients off and nothing more."""

    def enter(mode: Any) -> None:
        mode.gradients_before = torch.is_grad_enabled()
        torch.set_grad_enabled(not mode.mode)

    def leave(mode: Any, *_: Any) -> None:
        torch.set_grad_enabled(mode.gradients_before)

    with mock.patch.multiple(torch.inference_mode, __enter__=enter, __exit__=leave):
        yield
