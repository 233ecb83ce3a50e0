"""Lets code that asks about CUDA's autocast see the one that acts on fake CPU tensors in its place.

Entry point: ``answered_for_cuda``. Libraries ask ``torch.is_autocast_enabled()`` (of CUDA by default) and
``torch.get_autocast_dtype("cuda")`` before they cast; ``custom_fwd`` and checkpointing ask too, and restore what they
were told in backward.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def answered_for_cuda() -> Iterator[None]:
    """Answer questions about CUDA's autocast, and take orders to it, for as long as the context lasts."""
    enabled: Callable[..., Any] = torch.is_autocast_enabled
    dtype: Callable[..., Any] = torch.get_autocast_dtype
    switch: Callable[..., Any] = torch.set_autocast_enabled
    choose: Callable[..., Any] = torch.set_autocast_dtype

    def is_enabled(device_type: str = "cuda") -> bool:
        return bool(enabled(_place(device_type)))

    def get_dtype(device_type: str = "cuda") -> torch.dtype:
        of_cuda = device_type.partition(":")[0] == "cuda"
        result: torch.dtype = dtype("cpu" if of_cuda and enabled("cpu") else device_type)
        return result

    def set_enabled(*args: Any) -> None:
        switch(*((_place(args[0]), args[1]) if len(args) == 2 else ("cpu", args[0])))

    def set_dtype(device_type: str, value: torch.dtype) -> None:
        choose(_place(device_type), value)

    replaced: dict[str, Callable[..., Any]] = {
        "is_autocast_enabled": is_enabled,
        "get_autocast_dtype": get_dtype,
        "get_autocast_gpu_dtype": get_dtype,
        "set_autocast_enabled": set_enabled,
        "set_autocast_dtype": set_dtype,
        "set_autocast_gpu_dtype": lambda value: set_dtype("cuda", value),
    }
    with ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(mock.patch.object(torch, name, function))
        yield


def _place(device_type: str) -> str:
    return "cpu" if device_type.partition(":")[0] == "cuda" else device_type
