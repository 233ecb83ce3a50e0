"""What a step gets when it reads tensors in Python: known values, or numbers that stand for unknown ones.

Entry points: ``answers``, for the mode through which every function of torch's passes, and ``files_not_written``. Left
out: reads by torch's own C++ code, which the recorder answers where values are known and refuses where they are not.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from snugfit.errors import UnsupportedError
from snugfit.memory import torch_private
from snugfit.memory.known_values import assumed_values, stand_ins
from snugfit.memory.recording import Recorder
from snugfit.memory.steps import packed_sequences, refusals

UNKNOWN = (
    "numbers that the step reads and nobody knows are printed as nan and taken as 1.0 by float(), math and numpy; if "
    "the step branches on one of them, the branch for that value is what was traced: read at {}"
)
TAKEN = "float(...) at {} is taken as 1.0; if the step branches on it, that is the branch that was traced"
UNSAVED = "files that the step saves with torch.save are not written"


@contextmanager
def files_not_written(assume: Callable[[str], None]) -> Iterator[None]:
    """Let ``torch.save`` write nothing: what it is given holds no values.

    Args:
        assume: Called with the sentence, if the step saves something.
    """

    def save(*_: Any, **__: Any) -> None:
        assume(UNSAVED)

    with mock.patch.object(torch, "save", save):
        yield


def answers(recorder: Recorder) -> dict[Any, Callable[..., Any]]:
    """Functions of torch's by which a step reads values, with what to do instead; NotImplemented means as always."""

    def unknown(sentence: str = UNKNOWN) -> stand_ins.Unknown:
        line = refusals.users_line()
        if recorder.values.in_update:
            recorder.assume(assumed_values.COMPARED)
            return stand_ins.number(line, assumed_values.compared, recorder.values.falling())
        recorder.assume(sentence.format(line))
        return stand_ins.number(line)

    def is_fake(tensor: Tensor) -> bool:
        return type(tensor) is torch_private.Fake

    def item(tensor: Tensor, sentence: str = UNKNOWN) -> Any:
        if not is_fake(tensor) or tensor.numel() != 1:
            return NotImplemented
        real = recorder.values.read(tensor)
        if real is not None:
            with torch_private.without_modes():
                return real.item()
        try:
            return tensor.item()  # a constant of torch's own
        except UnsupportedError:
            return unknown(sentence)

    def array(tensor: Tensor, *_: Any, **__: Any) -> Any:
        if not is_fake(tensor):
            return NotImplemented
        real = recorder.values.read(tensor)
        if real is not None:
            with torch_private.without_modes():
                return real.clone().numpy()
        found = stand_ins.array(tensor, unknown().origin)
        return NotImplemented if found is None else found

    def tolist(tensor: Tensor) -> Any:
        found = array(tensor)
        if found is NotImplemented:
            return found
        return item(tensor) if not tensor.dim() else found.tolist()

    def to_float(tensor: Tensor) -> Any:
        value = item(tensor, TAKEN)
        return value if value is NotImplemented else float(value)

    def text(tensor: Tensor, spec: str = "") -> Any:
        if not is_fake(tensor):
            return NotImplemented
        return format(item(tensor), spec) if tensor.dim() == 0 else object.__format__(tensor, "")

    return {
        Tensor.item: item,
        Tensor.__float__: to_float,
        Tensor.__format__: text,
        Tensor.tolist: tolist,
        Tensor.numpy: array,
        Tensor.__array__: array,
        Tensor.pin_memory: lambda tensor, *_: tensor,
        Tensor.share_memory_: lambda tensor: tensor,
        torch_private.PACK_PADDED_SEQUENCE: lambda *args: packed_sequences.pack(recorder.values, *args),
        torch_private.PAD_PACKED_SEQUENCE: lambda *args: packed_sequences.pad(recorder.values, *args),
    }
