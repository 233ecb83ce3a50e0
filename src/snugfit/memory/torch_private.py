"""Everything of torch's that is not public and that the memory room needs, in one place.

``tests/test_torch_private.py`` holds a canary per name: when a new torch moves one, that test says which.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    in_kernel_invocation_manager,
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

Fake = FakeTensor

_CPU, _META = torch.device("cpu"), torch.device("meta")
_CHANGES_STORAGE = ("resize_", "resize_as_", "set_")
_KNOWS_VALUES = ("lift_fresh", "lift_fresh_copy", "scalar_tensor", "_local_scalar_dense")
_UNMARKED_VIEWS = ("_unsafe_view", "_reshape_alias")
_AUTOCAST_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_DEVICE_QUERY = torch.ops.prim.device.default


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake CPU tensors, with short ways for what a training step mostly does.

    A half of the time of torch's own dispatch goes into the key of its cache. Here a view is made by the meta kernel
    at once, and a result that is new is made again from the shapes it had for inputs of the same shapes and types.
    Everything else (values, scalars with known values, other layouts and devices) takes torch's way.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._kinds: dict[Any, str] = {}
        self._known: dict[tuple[Any, ...], tuple[Any, ...] | None] = {}

    def run(self, op: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one operation on fake tensors."""
        kind = self._kinds.get(op) or self._kinds.setdefault(op, _kind(op))
        described: list[Any] = [op]
        if kind == "other" or not _describe(args, described) or not _describe(tuple(kwargs.values()), described):
            return super().__torch_dispatch__(op, types, args, kwargs)
        if kind == "view":
            with in_kernel_invocation_manager(self):
                result = op(*args, **kwargs)
            return self._fake(result) if isinstance(result, torch.Tensor) else [self._fake(part) for part in result]
        described.extend(kwargs)
        key = tuple(described)
        if key not in self._known:
            result = super().__torch_dispatch__(op, types, args, kwargs)
            self._known[key] = _recipe(result, args)
            return result
        recipe = self._known[key]
        if recipe is None:
            return super().__torch_dispatch__(op, types, args, kwargs)
        container, parts = recipe
        with in_kernel_invocation_manager(self):
            made = [
                None if part is None else torch.empty_strided(part[0], part[1], dtype=part[2], device=_META)
                for part in parts
            ]
        fakes = [None if part is None else self._fake(part) for part in made]
        return fakes[0] if container is None else container(fakes)

    def _fake(self, meta: torch.Tensor) -> FakeTensor:
        return FakeTensor(self, meta, _CPU)


def _kind(op: Any) -> str:
    """``view``, ``new`` (a function of shapes whose results share no storage with inputs), or ``other``."""
    schema = op._schema
    name = schema.name.partition("::")[2]
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
    if schema.is_mutable or name in _KNOWS_VALUES or any(tag in op.tags for tag in tags) or not schema.returns:
        return "other"
    if name in _UNMARKED_VIEWS or op.is_view:
        return "view"
    return "new"


def _describe(values: Sequence[Any], described: list[Any]) -> bool:
    """Append what the result of an operation depends on; False where that is more than shapes, types and numbers."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.layout is not torch.strided or value.is_complex():
                return False
            if value.fake_device != _CPU:
                return False
            described += (value.shape, value.stride(), value.dtype)
        elif kind is list or kind is tuple:
            described.append(len(value))
            if not _describe(value, described):
                return False
        elif value is None or kind in (int, float, bool, str, torch.dtype, torch.device, torch.memory_format):
            described += (kind, value)
        elif kind is torch.layout:
            described.append(value)
        else:
            return False
    return True


def _recipe(result: Any, args: Sequence[Any]) -> tuple[Any, ...] | None:
    """How to make a result again: its container, and shape, strides and dtype of each part; None if it cannot be."""
    single = isinstance(result, torch.Tensor)
    parts = [result] if single else list(result) if type(result) in (tuple, list) else None
    if parts is None:
        return None
    storages = {tensor.untyped_storage()._cdata for tensor in _fakes(args)}
    described: list[Any] = []
    for part in parts:
        if part is None:
            described.append(None)
            continue
        plain = type(part) is FakeTensor and part.constant is None and part.layout is torch.strided
        if not plain or part.is_complex() or part.fake_device != _CPU or part.storage_offset():
            return None
        storage = part.untyped_storage()
        described.append((tuple(part.shape), part.stride(), part.dtype))
        again = torch.empty_strided(tuple(part.shape), part.stride(), dtype=part.dtype, device=_META)
        if storage._cdata in storages or storage.nbytes() != again.untyped_storage().nbytes():
            return None
        storages.add(storage._cdata)
    return None if single else type(result), described


def _fakes(values: Sequence[Any]) -> Iterator[FakeTensor]:
    for value in values:
        if type(value) is FakeTensor:
            yield value
        elif type(value) in (list, tuple):
            yield from _fakes(value)


def only_writes(op: Any) -> bool:
    """Whether an operation does no more than write into its first argument, so that fake tensors need not run it."""
    schema = op._schema
    alias = schema.returns[0].alias_info if len(schema.returns) == 1 else None
    writes = schema.is_mutable and (not schema.returns or (alias is not None and alias.is_write))
    name = schema.name.partition("::")[2]
    return writes and name.endswith("_") and name not in _CHANGES_STORAGE and torch.Tag.inplace_view not in op.tags


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


def operator(name: str) -> Any:
    """The operator of a name such as ``softmax.int``; without an overload its default one."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


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
