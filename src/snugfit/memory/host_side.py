"""What the host does beside the operations of a step: what begins, what is repeated, watched, or moved.

Entry point: ``HostSide``, which the recorder asks about each piece of work. How long any of it takes is ``planning``'s.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from snugfit.memory import torch_private
from snugfit.memory.events import Work, work_of
from snugfit.memory.steps.places import DEVICE, HOST
from snugfit.training import recomputation

_Call: TypeAlias = tuple[Any, str, Sequence[Any], Mapping[str, Any], Any]
_BOTH = {HOST, DEVICE}
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

    def work(self, recipe: torch_private.Recipe | None, call: _Call, place: str | None) -> Work:
        """The work of an operation that has just run, with what the host does around it.

        Args:
            recipe: Remembers it for the same operation on tensors of the same shapes and types.
            call: Operation, phase, arguments and result.
            place: Of its result; None where all memory is one place.
        """
        phase, args = call[1], call[2]
        is_repeated = phase == "backward" and torch.is_grad_enabled()  # autograd's own formulas record nothing
        num_begun = recomputation.num_begun()
        is_begun = is_repeated or num_begun > self._num_begun  # one that hands out all that is asked for runs nothing
        begins = self._begun or ("segment" if is_begun and not self._was_repeated else "")
        self._begun, self._was_repeated, self._num_begun = "", is_repeated, num_begun
        is_watched = not is_repeated and recomputation.is_watched()
        source = self._place_of(args[0]) if place and args and isinstance(args[0], Tensor) else ""
        is_copy = source != place and {source, place} == _BOTH
        remembered = {} if recipe is None else recipe.remembered
        around = phase, is_repeated, is_watched, is_copy, begins
        work = remembered.get(around)
        if work is None:
            work = work_of(*call)._replace(
                is_repeated=is_repeated, is_watched=is_watched, is_copy=is_copy, begins=begins
            )
            remembered[around] = work
        return work
