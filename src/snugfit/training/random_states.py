"""The states of Python's, numpy's and torch's random generators: read, set, and set aside.

Entry points: ``take``, ``restore`` and ``seeded``. Generators that a user made are left out.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


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
    """Random states of Python and numpy."""

    python: Any
    numpy: Any

    def is_as(self, other: "OfPython") -> bool:
        """Whether nothing was drawn between the two."""
        _, keys, position, *_ = self.numpy
        _, other_keys, other_position, *_ = other.numpy
        if position != other_position or self.python != other.python:
            return False
        return bool(np.array_equal(keys, other_keys))


def of_python() -> OfPython:
    """The present random states of Python and numpy."""
    return OfPython(random.getstate(), np.random.get_state())


def set_python(states: OfPython) -> None:
    """Set what ``of_python`` read."""
    random.setstate(states.python)
    np.random.set_state(states.numpy)


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
