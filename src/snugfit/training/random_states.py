"""The states of Python's, numpy's and torch's random generators: read, set, and set aside.

Entry points: ``take``, ``restore`` and ``seeded`` for whole steps, ``of_python``, ``of_torch`` and the contexts that
put them back for parts of one.
"""

import ctypes
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_TWISTER_BYTES = 625 * 4
"The words of numpy's Mersenne twister, and its place in them."


def take(device: torch.device) -> dict[str, Any]:
    """States of the generators that a training step on a device may draw from, as those give them."""
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def saved(device: torch.device) -> dict[str, Any]:
    """The same as tensors and built-in values only, to be written to a file."""
    states = take(device)
    kind, keys, *rest = states["numpy"]
    return {**states, "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest)}


def restore(states: dict[str, Any], device: torch.device) -> None:
    """Set what ``take`` or ``saved`` read."""
    torch.set_rng_state(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.asarray(keys).astype(np.uint32), *rest))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def numpy_state() -> tuple[bytes, int]:
    """Numpy's random state in a form that can be compared."""
    _, keys, position, *_ = np.random.get_state()
    return np.asarray(keys).tobytes(), int(position)


@dataclass(frozen=True, slots=True)
class OfPython:
    """Random states of Python and numpy, and what numpy's generator had in memory."""

    python: Any
    numpy: dict[str, Any]
    memory: bytes | None
    """Tells whether numpy's state is still the same, in a hundredth of the time that reading it takes.

    None where it does not: other generators than numpy's own, or a normal number in store, which is given away without
    asking the generator.
    """

    def is_present(self) -> bool:
        """Whether nothing was drawn since."""
        if random.getstate() != self.python:
            return False
        if self.memory is not None:
            return _memory_of_numpy() == self.memory
        return _comparable(np.random.get_state(legacy=False)) == _comparable(self.numpy)


def of_python() -> OfPython:
    """The present random states of Python and numpy."""
    numpy: Any = np.random.get_state(legacy=False)
    is_told_by_memory = numpy["bit_generator"] == "MT19937" and not numpy["has_gauss"]
    return OfPython(random.getstate(), numpy, _memory_of_numpy() if is_told_by_memory else None)


def _memory_of_numpy() -> bytes:
    generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined, unused-ignore]
    return ctypes.string_at(generator.ctypes.state_address, _TWISTER_BYTES)


def _comparable(state: Any) -> dict[str, Any]:
    words = {name: one.tobytes() if isinstance(one, np.ndarray) else one for name, one in state["state"].items()}
    return {**state, "state": words}


def set_python(states: OfPython) -> None:
    """Set what ``of_python`` read."""
    random.setstate(states.python)
    np.random.set_state(states.numpy)


@contextmanager
def of_python_again(states: OfPython) -> Iterator[None]:
    """Python's and numpy's random states as they were; afterwards as they are now."""
    present = of_python()
    set_python(states)
    try:
        yield
    finally:
        set_python(present)


TorchStates = Sequence[tuple[torch.device, Tensor]]


def of_torch(devices: Iterable[torch.device]) -> TorchStates:
    """The present states of torch's own generators, of the CPU and of some other devices."""
    own = [(torch.device("cpu"), torch.get_rng_state())]
    return own + [(device, torch.get_device_module(device).get_rng_state(device)) for device in devices]


def set_torch(states: TorchStates) -> None:
    """Set what ``of_torch`` read."""
    for device, state in states:
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


def are_same(states: TorchStates, others: TorchStates) -> bool:
    """Whether nothing was drawn between two readings on the same devices."""
    return [(device, _bytes(state)) for device, state in states] == [(device, _bytes(s)) for device, s in others]


def _bytes(state: Tensor) -> bytes:
    """What a random state holds, read past torch's dispatcher: where a step is traced that has no values."""
    return ctypes.string_at(state.data_ptr(), state.nbytes)


@contextmanager
def of_torch_kept(devices: Iterable[torch.device]) -> Iterator[None]:
    """Whatever is drawn or set in this context, afterwards torch's random states are as they were."""
    present = of_torch(devices)
    try:
        yield
    finally:
        set_torch(present)


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed Python's, numpy's and torch's random states, and put them back as they were.

    Args:
        seed: Of all of them.
        device: Whose generator is seeded beside the host's; None: those of all devices.
    """
    states = take(device or torch.device("cpu"))
    with _seeded_everywhere(seed) if device is None else _seeded_on(device, seed):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            restore(states, device or torch.device("cpu"))


@contextmanager
def _seeded_everywhere(seed: int) -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@contextmanager
def _seeded_on(device: torch.device, seed: int) -> Iterator[None]:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed all devices
    if device.type == "cpu":
        yield
        return
    module: Any = torch.get_device_module(device)
    own = module.get_rng_state()
    module.manual_seed(seed)
    try:
        yield
    finally:
        module.set_rng_state(own)
