"""What an engine asks of the machine, answered for the traced device: its precision, and offloading to the host.

Entry points: ``precision_of`` and ``offloading_from``. What a step's own code asks of a card is ``cuda_functions``'s.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from snugfit import hardware
from snugfit.memory.recording import Recorder
from snugfit.memory.steps import places
from snugfit.training import offloading, precision


@contextmanager
def precision_of(device: hardware.Device) -> Iterator[None]:
    """Let ``precision="auto"`` be that of the traced device, wherever the tensors lie."""
    resolve = precision.resolve
    with mock.patch.object(precision, "resolve", lambda name, _: resolve(name, device)):
        # And what is said of devices that are present is not remembered: it is said of the target.
        with mock.patch.object(precision, "is_present", lambda kind: kind in ("cpu", device.kind)):
            yield


@contextmanager
def offloading_from(recorder: Recorder) -> Iterator[None]:
    """Let offloaded tensors leave the traced device, though all are fake CPU tensors."""

    def to_host(tensor: Tensor) -> tuple[Tensor, None]:
        with recorder.places.naming(places.HOST):
            return tensor.clone(), None

    def to_device(tensor: Tensor, *_: Any) -> Tensor:
        with recorder.on_device():
            return tensor.clone()

    def is_on_host(tensor: Tensor) -> bool:
        return recorder.place_of(tensor) == places.HOST

    with mock.patch.multiple(offloading, to_host=to_host, to_device=to_device, is_on_host=is_on_host):
        yield
