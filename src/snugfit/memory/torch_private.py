"""Everything of torch's that is not public and that the memory room needs, in one place.

``tests/test_torch_private.py`` holds a canary per name: when a new torch moves one, that test says which.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast
from unittest import mock

import torch
from torch import nn
from torch.optim import optimizer as _optimizer
from torch.utils import _device, _foreach_utils
from torch.utils._python_dispatch import _disable_current_modes

from snugfit.memory.fake_mode import FAKE_ERRORS as FAKE_ERRORS
from snugfit.memory.fake_mode import Fake as Fake
from snugfit.memory.fake_mode import FakeMode as FakeMode
from snugfit.memory.fake_mode import Recipe as Recipe

_CHANGES_STORAGE = ("resize_", "resize_as_", "set_")
_AUTOCAST_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
DEVICE_QUERY: Any = torch.ops.prim.device.default
"A dispatched call that only asks for a tensor's device."
PARSE_TO: Any = torch._C._nn._parse_to
"Reads the arguments of ``module.to``."
PACK_PADDED_SEQUENCE: Any = torch._VF._pack_padded_sequence
PAD_PACKED_SEQUENCE: Any = torch._VF._pad_packed_sequence
RECURRENT: dict[str, Any] = {name: getattr(torch._VF, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
_ENGINE = torch.autograd.graph._engine_run_backward.__code__


@functools.cache
def is_view(op: Any) -> bool:
    """Whether an operation's result shares its argument's storage."""
    return bool(op.is_view) or op.__name__ in ("detach.default", "_unsafe_view.default")


@functools.cache
def is_composite(op: Any) -> bool:
    """Whether an operation is made of others, and has no fake kernel of its own."""
    if not isinstance(op, torch._ops.OpOverload):
        return False
    has_kernel, keys = torch._C._dispatch_has_kernel_for_dispatch_key, torch._C.DispatchKey
    # The backward of silu and mish is composite for other devices and has a kernel for CPU and CUDA.
    name: str = op.name()  # type: ignore[no-untyped-call]
    return bool(has_kernel(name, keys.CompositeImplicitAutograd) and not has_kernel(name, keys.CPU))


@functools.cache
def only_writes(op: Any) -> bool:
    """Whether an operation does no more than write into its first argument, so that fake tensors need not run it."""
    schema = op._schema
    alias = schema.returns[0].alias_info if len(schema.returns) == 1 else None
    writes = schema.is_mutable and (not schema.returns or (alias is not None and alias.is_write))
    name = schema.name.partition("::")[2]
    return writes and name.endswith("_") and name not in _CHANGES_STORAGE and torch.Tag.inplace_view not in op.tags


def in_backward() -> bool:
    """Whether the calling thread is inside of autograd's backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_called_by_autograd() -> bool:
    """Whether the calling operation comes from C++ code of autograd's engine, not from Python code run in backward."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__package__") == __package__:  # the mode's own
        frame = frame.f_back
    return frame.f_code is _ENGINE


def sums_gradients(gradient: torch.Tensor) -> bool:
    """Whether autograd, which asks for the sum of this gradient and another, would sum into this one if it were real.

    It does when nobody else holds the tensor or its storage: ``can_accumulate_inplace`` in input_buffer.cpp. A
    dispatched call itself holds the tensor three times more, and looking at a storage once more.
    """
    if not is_called_by_autograd() or gradient._use_count() != 1 + 3:  # type: ignore[attr-defined]
        return False
    return bool(torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) == 1 + 1)


def is_held_by_one_call(tensor: torch.Tensor) -> bool:
    """Whether only the C++ code that calls the operation holds a tensor, and no variable of Python's.

    A dispatched call itself holds it three times more; one that Python made is held by its object instead.
    """
    return bool(tensor._use_count() == 1 + 3)  # type: ignore[attr-defined]


def next_sequence_number() -> int:
    """The number that autograd will give to the next node made on this thread."""
    return int(torch._C._autograd._get_sequence_nr())


def current_sequence_number() -> int | None:
    """The number of the node whose backward is running; None where there is none."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def attention_priority() -> list[int]:
    """The kernels for attention in the order in which torch tries them, as numbers of ``SDPBackend``."""
    return [int(number) for number in torch._C._get_sdp_priority_order()]


def without_autocast() -> Any:
    """A context in which the CPU's autocast kernels are passed by."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CPU)


def no_torch_function() -> Any:
    """A context in which torch's functions are called past every torch-function mode."""
    return torch._C.DisableTorchFunction()


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values of a sparse tensor, whether its indices are unique or not."""
    return tensor._indices(), tensor._values()


def is_meta(tensor: Any) -> bool:
    """Whether a fake tensor stands for one of the meta device, which takes no memory anywhere."""
    return bool(tensor.fake_device.type == "meta")


def is_functorch_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor only stands for another one inside of ``torch.func``."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def default_device() -> Any:
    """The device that ``with torch.device(...)`` or ``torch.set_default_device`` names; None for none."""
    return _device.CURRENT_DEVICE


def no_modes() -> Any:
    """A context without dispatch modes; fake tensors used in it bring their own back."""
    return _disable_current_modes()


@contextmanager
def without_modes() -> Iterator[None]:
    """A context in which plain tensors are computed for real, whatever modes are active around it."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


def operator(name: str, namespace: str = "aten") -> Any:
    """The operator of a name such as ``softmax.int``; without an overload its default one."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def autocast_registrations(key: str) -> list[str]:
    """Torch's own operators (``name.overload``) that have a kernel for an autocast dispatch key."""
    return [name for namespace, name in _autocast_registrations(key) if namespace == "aten"]


def foreign_autocast_registrations(key: str) -> list[tuple[str, str]]:
    """Namespace and name of the operators of other libraries that have a kernel for an autocast dispatch key."""
    return [(namespace, name) for namespace, name in _autocast_registrations(key) if namespace != "aten"]


def _autocast_registrations(key: str) -> Iterator[tuple[str, str]]:
    for qualified in torch._C._dispatch_get_registrations_for_dispatch_key(key):
        namespace, _, name = qualified.partition("::")
        yield namespace, name


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
        types.append(Fake)
    try:
        yield
    finally:
        for types in lists:
            types.remove(Fake)
        for patch in patches:
            patch.stop()


@contextmanager
def _copied_with_their_numbers() -> Iterator[None]:
    """Let ``copy.deepcopy`` copy fake tensors whose number torch remembers, such as BatchNorm's counter.

    It copies their attributes as well, and a real tensor among them cannot be copied where all new ones are fake.
    """

    def copied(fake: Any, memo: dict[int, Any]) -> Any:
        if fake.constant is not None:
            with torch._C._DisableTorchDispatch(), no_torch_function():
                memo[id(fake.constant)] = fake.constant.clone()  # a count goes on in one of the two only
        return torch.Tensor.__deepcopy__(fake, memo)  # type: ignore[no-untyped-call]

    with mock.patch.object(Fake, "__deepcopy__", copied):
        yield


@contextmanager
def modules_converted_in_place(keep: Callable[[torch.Tensor, torch.Tensor], None]) -> Iterator[None]:
    """Let ``module.to()``, ``.cuda()`` and ``.half()`` work on fake parameters, and ``copy.deepcopy`` on fake numbers.

    For real parameters torch replaces a parameter's data and keeps the object; for fake ones it tries to swap
    tensors and fails ("couldn't swap"). Here the data of fake ones is replaced as well, so that ties last.

    Args:
        keep: Called with a real parameter or buffer, which is left as it is, and what it was to become.
    """
    original: Callable[..., nn.Module] = nn.Module._apply

    def apply(self: Any, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        held = [tensor for tensor in (*self._parameters.values(), *self._buffers.values()) if tensor is not None]
        own = [parameter for parameter in self._parameters.values() if parameter is not None]
        if held and all(type(tensor) in (torch.Tensor, nn.Parameter) for tensor in held):  # made before the trace
            with torch.no_grad():
                for tensor in held:
                    keep(tensor, fn(tensor))
            for child in self.children() if recurse else ():
                child._apply(fn)
            return cast(nn.Module, self)
        if not all(isinstance(parameter, Fake) for parameter in own):
            return original(self, fn, recurse)
        for child in self.children() if recurse else ():
            child._apply(fn)
        for name, parameter in self._parameters.items():
            if parameter is None:
                continue
            with torch.no_grad():
                made = fn(parameter)
            if is_meta(parameter) == is_meta(made):
                parameter.data = made
            else:  # from the meta device or to it: another object, as with real parameters
                self._parameters[name] = nn.Parameter(made, parameter.requires_grad)
        self._buffers.update({name: fn(buffer) for name, buffer in self._buffers.items() if buffer is not None})
        module: nn.Module = self
        return module

    with mock.patch.object(nn.Module, "_apply", apply), _copied_with_their_numbers():
        yield


@contextmanager
def engine_entered(mode: Any) -> Iterator[None]:
    """Let a torch-function mode be active while autograd runs: torch takes it off around ``tensor.backward()``."""
    original = torch.autograd.graph._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        with mode.entered():
            return original(*args, **kwargs)

    with (
        mock.patch.object(torch.autograd.graph, "_engine_run_backward", run),
        mock.patch.object(torch.autograd, "_engine_run_backward", run),
    ):
        yield


@contextmanager
def compiled_run_eagerly(on_compiled: Callable[[], None]) -> Iterator[None]:
    """Let what torch.compile made run as plain Python; says so each time, before it runs."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        yield
        return

    def eager(callback: Any) -> None:
        if callback not in (None, False):
            on_compiled()

    with mock.patch.object(frames, "_callback_from_stance", eager):
        yield


@contextmanager
def subclasses_on_host() -> Iterator[None]:
    """Let tensor subclasses made of fake tensors be of the host, as those are for torch's C++ code."""
    original: Any = torch.Tensor._make_wrapper_subclass

    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = torch.device("cpu")
        return original(*args, **kwargs)

    with mock.patch.object(torch.Tensor, "_make_wrapper_subclass", staticmethod(make)):
        yield


@contextmanager
def autocast_as_cpu(on_cache_cleared: Callable[[], None]) -> Iterator[None]:
    """Let ``torch.autocast("cuda")`` act on CPU tensors, and say when the outermost autocast ends.

    Args:
        on_cache_cleared: Called whenever torch clears its own cache of cast weights.
    """
    original_init = torch.amp.autocast_mode.autocast.__init__
    original_clear = torch.clear_autocast_cache
    original_cast: Callable[..., Any] = torch.amp.autocast_mode._cast

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

    def cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        value = original_cast(value, device_type, dtype)
        return original_cast(value, "cpu", dtype) if device_type == "cuda" else value

    with (
        mock.patch.object(torch.amp.autocast_mode.autocast, "__init__", init),
        mock.patch.object(torch.amp.autocast_mode, "_cast", cast),
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
