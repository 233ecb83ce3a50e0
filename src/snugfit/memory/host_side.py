"""What the host does beside the operations of a step: what begins, what is repeated, watched, or moved.

Entry point: ``HostSide``, which the recorder asks about each piece of work. How long any of it takes is ``planning``'s.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from snugfit.memory.events import Work
from snugfit.memory.steps.places import DEVICE, HOST
from snugfit.training import recomputation

_BEGINNINGS = ("window", "micro-batch")


class HostSide:
    """Remembers what has begun since the last operation.

    Args:
        place_of: Where a tensor is.
    """

    def __init__(self, place_of: Callable[[Tensor], str]) -> None:
        self._place_of = place_of
        self._begun = ""
        self._was_repeated = False
        self._num_begun = recomputation.num_begun()

    def mark(self, name: str) -> None:
        """A mark of the recording; a window's first micro-batch begins with the window."""
        if name in _BEGINNINGS:
            self._begun = self._begun or name

    def described(self, work: Work, args: Sequence[Any], place: str | None) -> Work:
        """An operation's work with what the host does around it.

        Args:
            work: Of the operation that has just run.
            args: Its arguments.
            place: Of its result; None where all memory is one place.
        """
        is_repeated = work.phase == "backward" and torch.is_grad_enabled()  # autograd's own formulas record nothing
        num_begun = recomputation.num_begun()
        is_begun = is_repeated or num_begun > self._num_begun  # one that hands out all that is asked for runs nothing
        begins = self._begun or ("segment" if is_begun and not self._was_repeated else "")
        self._begun, self._was_repeated, self._num_begun = "", is_repeated, num_begun
        source = self._place_of(args[0]) if place and args and isinstance(args[0], Tensor) else ""
        return work._replace(
            is_repeated=is_repeated,
            is_watched=not is_repeated and recomputation.is_watched(),
            is_copy={source, place} == {HOST, DEVICE},
            begins=begins,
        )
