"""On the card or on the host: where each storage of a traced step is, though all are fake CPU tensors.

Entry points: ``Places`` and ``on_device_only``. A step that names "cuda" puts there what it moves or makes there, and
what operations make of it; without a name everything is on the card. Naming itself is read by ``placement``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from snugfit.memory.events import Recording, tensors_of
from snugfit.memory.steps import refusals

DEVICE, HOST, OPEN = "device", "host", ""
KINDS = ("cpu", "cuda", "meta")
"Types of devices that a step may name."

_HOST_RESULTS = {"_pack_padded_sequence.default": 1}
"Position of the result that CUDA's operator puts on the host."

_TAKES_ONE = frozenset(
    """addmm baddbmm binary_cross_entropy_with_logits bmm convolution embedding mm mse_loss native_batch_norm
    native_group_norm native_layer_norm nll_loss2d_forward nll_loss_forward""".split()
)
"""Operators at which a batch or a model that was left on the host shows. Others are let pass: some take both (indices),
and C++ code moves tensors to the card where no mode sees it."""


class Places:
    """Which places the step has named so far, and where what an operation makes belongs."""

    def __init__(self) -> None:
        self.named = OPEN
        "Where the running code says that tensors are to be made."
        self.own = 0
        "Index of the target."
        self.index: int | None = None
        "Of the card, where the step says one; a process uses one card."
        self.names_device = False
        "Whether the step has named the device at all."

    @property
    def card(self) -> torch.device:
        """The device that a tensor on the card names."""
        return torch.device("cuda", self.index or 0)

    def choose(self, device: Any) -> None:
        """Remember that the step names a card by its index, which is the target: one card.

        Raises:
            UnsupportedError: It names another one, or a device of another kind.
        """
        if device is None or (isinstance(device, int) and device < 0):  # torch takes both for "no choice"
            return
        if not isinstance(device, int):
            device = torch.device(device)
            if device.type not in KINDS:
                raise refusals.other_device(device.type)
            device = device.index if device.type == "cuda" else None
        if device is not None:
            if device != self.own:
                raise refusals.other_card(device, self.own)
            self.index = device

    @staticmethod
    def redirected(kwargs: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
        """The place that an operation's arguments name where no torch-function mode saw it, and arguments without."""
        device = kwargs.get("device")
        if device is not None and device.type == "cuda":
            return DEVICE, {**kwargs, "device": torch.device("cpu")}
        if device is not None and device.type not in KINDS:
            raise refusals.other_device(device.type)
        return (HOST, {**kwargs, "pin_memory": False}) if kwargs.get("pin_memory") else None

    @contextmanager
    def naming(self, place: str) -> Iterator[None]:
        """What is made in this context is at a place; once it was the device, the rest may be on the host."""
        outer, self.named = self.named, place
        self.names_device = self.names_device or place == DEVICE
        try:
            yield
        finally:
            self.named = outer

    def of_result(
        self, op: str, args: Sequence[Any], place_of: Callable[[Tensor], str], *, window: int, module: str
    ) -> str:
        """Where the result of an operation is.

        Raises:
            UnsupportedError: Its arguments lie in two places.
        """
        if self.named:
            return self.named
        tensors = [tensor for value in args for tensor in tensors_of(value)]
        places = {place_of(tensor) for tensor in tensors}
        if not places:
            return OPEN if window else HOST
        if DEVICE in places and HOST in places and op.partition(".")[0] in _TAKES_ONE:
            for tensor in tensors:
                if tensor.dim() and place_of(tensor) == HOST:
                    raise refusals.two_places(op, module, tuple(tensor.shape))
        return DEVICE if DEVICE in places else HOST if HOST in places else OPEN


def host_result(op: str, result: Any) -> Any:
    """The part of a result that CUDA's operator puts on the host; None for none."""
    position = _HOST_RESULTS.get(op)
    return None if position is None else result[position]


def on_device_only(recorder: Any) -> Recording:
    """What a recorder has written down, without what stayed on the host, where the step tells the two apart."""
    recording: Recording = recorder.recording
    if not recorder.places.names_device:
        return recording
    return _without(recording, {i + 1 for i, birth in enumerate(recording.births) if birth.place == HOST})


def built_on_host(recording: Recording) -> Recording:
    """A job's recording without what building the model makes and drops: ``build`` converts it before it is moved."""
    first = next(position for position, name in recording.marks if name == "window")
    gone = {-event for event in recording.events[:first] if event < 0}
    births = recording.births
    dropped = {i + 1 for i, birth in enumerate(births) if birth.phase == "build" and i + 1 in gone}
    return _without(recording, dropped)


def _without(recording: Recording, hosted: set[int]) -> Recording:
    if not hosted:
        return recording
    kept_before = [0]
    for event in recording.events:
        kept_before.append(kept_before[-1] + (abs(event) not in hosted))
    return Recording(
        recording.births,
        [event for event in recording.events if abs(event) not in hosted],
        [(kept_before[position], name) for position, name in recording.marks],
        [(kept_before[position], work) for position, work in recording.work],
        [border._replace(position=kept_before[border.position]) for border in recording.borders],
    )
