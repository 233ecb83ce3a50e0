"""``torch.cuda`` and ``torch.accelerator`` inside of a trace: answered for the target, or refused by name.

Entry points: ``answered_for`` and ``absent``. What only waits or counts has no effect; what a real card would have to
tell (temperature, clocks, captured graphs) is refused. Side streams run as the one stream that is traced.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from snugfit import hardware
from snugfit.memory.allocation.blocks import MIN_BLOCK_BYTES
from snugfit.memory.known_values import stand_ins
from snugfit.memory.recording import Recorder
from snugfit.memory.steps import refusals

STREAMS = "side streams are traced as one stream: no memory waits for another stream"
COUNTERS = "memory counters that the step reads are those of the trace so far, in blocks of 512 bytes"

_WITHOUT_EFFECT = frozenset(
    """empty_cache init ipc_collect manual_seed manual_seed_all reset_accumulated_memory_stats
    reset_max_memory_allocated reset_max_memory_cached reset_peak_memory_stats seed seed_all set_rng_state
    set_rng_state_all set_stream set_sync_debug_mode synchronize""".split()
)
_UNTOUCHED = frozenset("amp check_error cudaStatus CudaError DeferredCudaCallError has_half has_magma".split())
_CARD = torch.device("cuda", 0)


@contextmanager
def answered_for(device: hardware.Device, recorder: Recorder, assume: Callable[[str], None]) -> Iterator[None]:
    """Let code ask for the card, choose it and wait for it, though there is none.

    Args:
        device: The target.
        recorder: Whose counters of memory are read.
        assume: Called with the sentence of each assumption that an answer rests on.
    """
    answers = _answers(device, recorder, assume)
    with ExitStack() as stack:
        for module in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.graphs, torch.cuda.streams):
            for name in torch.cuda.__all__:
                if name in vars(module):
                    _replace(stack, module, name, answers)
        for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
            stack.enter_context(mock.patch.object(torch.cuda.nvtx, name, return_value=0))
        stack.enter_context(mock.patch.object(torch.cuda.nvtx, "range", _Context))
        stack.enter_context(mock.patch.object(torch.cuda.memory, "_record_memory_history", return_value=None))
        for name, answer in _of_accelerator(answers).items():
            if hasattr(torch.accelerator, name):
                stack.enter_context(mock.patch.object(torch.accelerator, name, answer))
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", _nothing))
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        stack.enter_context(mock.patch.multiple(torch, Event=answers["Event"], Stream=answers["Stream"]))
        yield


@contextmanager
def absent() -> Iterator[None]:
    """Let code that asks find no card: the target is the CPU."""
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        mock.patch.object(torch.cuda, "device_count", return_value=0),
        mock.patch.object(torch.accelerator, "is_available", return_value=False),
        mock.patch.object(torch.accelerator, "current_accelerator", return_value=None),
    ):
        yield


def _replace(stack: ExitStack, module: ModuleType, name: str, answers: dict[str, Any]) -> None:
    value = getattr(module, name)
    if name in _UNTOUCHED or isinstance(value, ModuleType):
        return
    if name in answers:
        answer = answers[name]
    elif name in _WITHOUT_EFFECT:
        answer = _nothing
    elif inspect.isclass(value) or callable(value):
        answer = _refused(f"torch.cuda.{name}")
    else:
        return
    stack.enter_context(mock.patch.object(module, name, answer))


def _answers(device: hardware.Device, recorder: Recorder, assume: Callable[[str], None]) -> dict[str, Any]:
    counters = _Counters(recorder, assume)
    major, minor = device.compute_capability or (8, 0)
    properties = _Properties(device.name, device.memory_bytes, major, minor)

    class Stream(_Stream):
        def __init__(self, *_: Any, **__: Any) -> None:
            assume(STREAMS)

    class Device(_Context):
        def __init__(self, device: Any = None) -> None:
            super().__init__()
            recorder.places.choose(device)

    current = object.__new__(Stream)
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: recorder.places.index or 0,
        "set_device": recorder.places.choose,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (major, minor),
        "get_device_properties": lambda device=None: properties,
        "get_arch_list": list,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or major >= 8,
        "is_tf32_supported": lambda: major >= 8,
        "is_current_stream_capturing": lambda: False,
        "can_device_access_peer": lambda device, peer: False,
        "get_allocator_backend": lambda: "native",
        "get_sync_debug_mode": lambda: 0,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "initial_seed": lambda: 0,
        "device": Device,
        "device_of": _Context,
        "stream": _Context,
        "StreamContext": _Context,
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": _Event,
        "current_stream": lambda device=None: current,
        "default_stream": lambda device=None: current,
        "mem_get_info": lambda device=None: counters.free_and_total(properties.total_memory),
        "memory_allocated": lambda device=None: counters.allocated(),
        "memory_reserved": lambda device=None: counters.allocated(),
        "memory_cached": lambda device=None: counters.allocated(),
        "max_memory_allocated": lambda device=None: counters.peak(),
        "max_memory_reserved": lambda device=None: counters.peak(),
        "max_memory_cached": lambda device=None: counters.peak(),
        "reset_peak_memory_stats": lambda device=None: counters.reset(),
        "reset_max_memory_allocated": lambda device=None: counters.reset(),
        "memory_stats": lambda device=None: counters.stats(),
        "empty_cache": lambda: recorder.mark("empty cache"),
        "memory_summary": lambda *_, **__: "a trace: no allocator has run",
        "set_per_process_memory_fraction": _nothing,
    }


def _of_accelerator(answers: dict[str, Any]) -> dict[str, Any]:
    same = (
        "is_available device_count current_stream get_device_capability memory_allocated memory_reserved "
        "max_memory_allocated max_memory_reserved memory_stats reset_peak_memory_stats"
    ).split()
    nothing = "empty_cache empty_host_cache reset_accumulated_memory_stats set_stream synchronize".split()
    return {
        **{name: answers[name] for name in same},
        **dict.fromkeys(nothing, _nothing),
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": answers["current_device"],
        "current_device_idx": answers["current_device"],
        "set_device_index": answers["set_device"],
        "set_device_idx": answers["set_device"],
        "device_index": answers["device"],
        "get_memory_info": answers["mem_get_info"],
    }


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _refused(name: str) -> type:
    """A class, as annotations may name it; making one or calling it is refused."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise refusals.function(name, "functions of torch.cuda whose answer follows from the target's data sheet")

    return type(name.rpartition(".")[2], (), {"__new__": refuse})


class _Counters:
    """Memory counters as the recording has them at the moment."""

    def __init__(self, recorder: Recorder, assume: Callable[[str], None]) -> None:
        self._recorder = recorder
        self._assume = assume
        self._start = 0

    def allocated(self) -> int:
        """Bytes alive now."""
        return self._walk()[0]

    def peak(self) -> int:
        """Largest number of bytes alive since the last reset."""
        return self._walk()[1]

    def reset(self) -> None:
        """The peak is counted from here on."""
        self._start = len(self._recorder.recording.events)

    def free_and_total(self, total: int) -> tuple[int, int]:
        """What ``mem_get_info`` returns: free bytes, the context taken off, and the total."""
        return max(total - self.allocated() - hardware.CONTEXT_BYTES, 0), total

    def stats(self) -> dict[str, int]:
        """The counters that are known, by their names in ``memory_stats``."""
        now, peak = self._walk()
        names = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
        known = {f"{name}.all.current": now for name in names} | {f"{name}.all.peak": peak for name in names}
        return {**known, "num_ooms": 0, "num_alloc_retries": 0}

    def _walk(self) -> tuple[int, int]:
        self._assume(COUNTERS)
        recording = self._recorder.recording
        current = peak = 0
        for position, event in enumerate(recording.events):
            birth = recording.births[abs(event) - 1]
            if birth.place == "host" and self._recorder.places.names_device:
                continue
            size = -(-birth.num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
            current += size if event > 0 else -size
            if position >= self._start:
                peak = max(peak, current)
        return current, max(peak, current)


@dataclass(frozen=True, slots=True)
class _Properties:
    """What ``get_device_properties`` returns, as far as the catalogue knows it."""

    name: str
    total_memory: int
    major: int
    minor: int

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise refusals.function(f"torch.cuda.get_device_properties().{name}", "name, total_memory, major, minor")


class _Context:
    """A choice of device or stream, which changes nothing where there is one of each."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.idx = 0

    def __enter__(self) -> "_Context":
        return self

    def __exit__(self, *_: Any) -> None:
        return None


class _Stream(_Context):
    """Stands for a stream: everything on it has happened already."""

    device = _CARD
    cuda_stream = stream_id = priority = 0

    def record_event(self, event: Any = None) -> Any:
        """An event that has happened."""
        return _Event() if event is None else event

    def query(self) -> bool:
        """Whether all work is done."""
        return True

    def is_capturing(self) -> bool:
        """Whether a graph is being captured."""
        return False

    wait_event = wait_stream = synchronize = _nothing


class _Event:
    """Stands for an event, which has happened already; how long anything took is not known."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = _CARD

    def query(self) -> bool:
        """Whether the event has happened."""
        return True

    def elapsed_time(self, _: Any) -> float:
        """Milliseconds; an unknown number."""
        return stand_ins.number(refusals.users_line())

    record = wait = synchronize = _nothing


class _AnyGenerator(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _RealGenerator)

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        return _RealGenerator("cpu" if torch.device(device).type == "cuda" else device)


_RealGenerator = torch.Generator


class _Generator(metaclass=_AnyGenerator):
    """Makes generators; those of a card draw on the host here."""
