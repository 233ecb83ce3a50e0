"""Everything of torch's that is not public and that the memory room needs, in one place.

``tests/test_torch_private.py`` holds a canary per name: when a new torch moves one, that test says which.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.optim import optimizer as _optimizer
from torch.utils import _foreach_utils

FAKE_ERRORS: tuple[type[Exception], ...] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"What fake tensors raise for an operation that they cannot follow."

FakeMode = FakeTensorMode
Fake = FakeTensor

_AUTOCAST_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_DEVICE_QUERY = torch.ops.prim.device.default


def is_device_query(op: Any) -> bool:
    """Whether a dispatched call only asks for a tensor's device; two of three calls do."""
    return op is _DEVICE_QUERY


def in_backward() -> bool:
    """Whether the calling thread is inside of autograd's backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def next_sequence_number() -> int:
    """The number that autograd will give to the next node made on this thread."""
    return int(torch._C._autograd._get_sequence_nr())


def current_sequence_number() -> int | None:
    """The number of the node whose backward is running; None where there is none."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def without_autocast() -> Any:
    """A context in which the CPU's autocast kernels are passed by."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CPU)


def autocast_registrations(key: str) -> list[str]:
    """The operators (``aten::name.overload``) that have a kernel for an autocast dispatch key."""
    return list(torch._C._dispatch_get_registrations_for_dispatch_key(key))


@contextmanager
def foreach_for_fake_tensors() -> Iterator[None]:
    """Let optimizers and gradient clipping choose their foreach form for fake CPU tensors, as they do on CUDA."""

    def devices() -> list[str]:
        return ["cuda", "cpu"]

    modules = (_optimizer, _foreach_utils)
    patches = [mock.patch.object(module, "_get_foreach_kernels_supported_devices", devices) for module in modules]
    lists: list[list[type]] = [module._foreach_supported_types for module in modules]
    for patch in patches:
        patch.start()
    for types in lists:
        types.append(FakeTensor)
    try:
        yield
    finally:
        for types in lists:
            types.remove(FakeTensor)
        for patch in patches:
            patch.stop()


@contextmanager
def autocast_as_cpu(on_cache_cleared: Callable[[], None]) -> Iterator[None]:
    """Let ``torch.autocast("cuda")`` act on CPU tensors, and say when the outermost autocast ends.

    Args:
        on_cache_cleared: Called whenever torch clears its own cache of cast weights.
    """
    original_init = torch.amp.autocast_mode.autocast.__init__
    original_clear = torch.clear_autocast_cache

    def init(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type == "cuda":
            dtype = dtype or torch.float16
            device_type = "cpu"
        original_init(self, device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    def clear() -> None:
        on_cache_cleared()
        original_clear()

    with (
        mock.patch.object(torch.amp.autocast_mode.autocast, "__init__", init),
        mock.patch.object(torch, "clear_autocast_cache", clear),
    ):
        yield
