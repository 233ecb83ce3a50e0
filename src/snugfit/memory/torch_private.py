"""Everything of torch's that is not public and that the memory room needs, in one place.

``tests/test_torch_private.py`` holds a canary per name: when a new torch moves one, that test says which.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
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
def modules_converted_in_place() -> Iterator[None]:
    """Let ``module.to()``, ``.cuda()`` and ``.half()`` work on fake parameters.

    For real parameters torch replaces a parameter's data and keeps the object; for fake ones it tries to swap
    tensors and fails ("couldn't swap"). Here the data of fake ones is replaced as well, so that ties last.
    """
    original: Callable[..., nn.Module] = nn.Module._apply

    def apply(self: Any, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        own = [parameter for parameter in self._parameters.values() if parameter is not None]
        if not all(isinstance(parameter, FakeTensor) for parameter in own):
            return original(self, fn, recurse)
        for child in self.children() if recurse else ():
            child._apply(fn)
        for parameter in own:
            with torch.no_grad():
                parameter.data = fn(parameter)
        self._buffers.update({name: fn(buffer) for name, buffer in self._buffers.items() if buffer is not None})
        module: nn.Module = self
        return module

    with mock.patch.object(nn.Module, "_apply", apply):
        yield


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


# --- the profiler's memory events, for measuring.py ---


class MemoryEvent(NamedTuple):
    """One allocation (positive bytes) or free (negative) of host memory, or a mark (0 bytes, address 0)."""

    time_ns: int
    address: int
    num_bytes: int
    scopes: tuple[str, ...]
    "Names of the operations and marks around it, outermost first; for a mark its own name comes last."


@contextmanager
def profiled_memory(mark_prefix: str) -> Iterator[list[MemoryEvent]]:
    """Collect every host allocation and free of torch's allocator; the list is filled when the context ends.

    Memory that was allocated before is not seen, nor is its end. Memory that a library takes past torch's allocator
    is not seen either.

    Args:
        mark_prefix: A ``torch.profiler.record_function`` whose name begins with it is listed as a mark.
    """
    events: list[MemoryEvent] = []
    # Kineto reads its log level once, at its first use, and writes two lines to stderr at the default one.
    with mock.patch.dict(os.environ, {"KINETO_LOG_LEVEL": os.environ.get("KINETO_LOG_LEVEL", "99")}):
        profiler: Any = torch.autograd.profiler.profile(profile_memory=True)
        profiler.__enter__()
    try:
        yield events
    finally:
        profiler.__exit__(None, None, None)
    results = profiler.kineto_results
    stack: list[tuple[Any, tuple[str, ...]]] = [(node, ()) for node in results.experimental_event_tree()]
    while stack:
        node, scopes = stack.pop()
        if node.tag == torch._C._profiler._EventType.Allocation:
            fields = node.extra_fields
            if fields.device.type == "cpu":
                events.append(MemoryEvent(node.start_time_ns, fields.ptr, fields.alloc_size, scopes))
            continue
        inner = (*scopes, node.name)
        if node.name.startswith(mark_prefix):
            events.append(MemoryEvent(node.start_time_ns, 0, 0, inner))
        stack.extend((child, inner) for child in node.children)
    events.sort(key=lambda event: event.time_ns)
