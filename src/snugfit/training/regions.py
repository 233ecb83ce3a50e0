"""Saved tensors that are dropped in the forward and made again when backward first asks for one of them.

Entry point: ``Region``, made of torch's public hooks on saved tensors. What is repeated is the caller's to say. torch's
own ``checkpoint`` holds one function; a region may be entered several times, once for each module of a run.

NOTE [Rules of a region]
1. In the forward a saved tensor becomes a ``_Place``, which holds nothing. Places are filled in the order in which they
   were made: the i-th tensor that a repetition saves belongs to the i-th place.
2. A backward that asks for a place repeats the region, once. Every backward (and one inside of another) repeats anew.
   A place hands its tensor out and lets go of it.
3. A repetition ends as soon as the last place has its tensor: what comes after it nobody needs.
4. Regions may lie in each other: the inputs of an inner one are saved tensors of the outer one, so that they are made
   again as well. The graph of a repetition holds its own tensors, for a forward may itself run a backward.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from snugfit.errors import UnsupportedError
from snugfit.training import torch_private

_ends_early: ContextVar[bool] = ContextVar("snugfit_ends_early", default=True)


@contextmanager
def repeated_to_the_end() -> Iterator[None]:
    """Regions that open in this context are repeated as a whole, so that their repetition has a result to look at."""
    token = _ends_early.set(False)
    try:
        yield
    finally:
        _ends_early.reset(token)


class Region:
    """The dropped tensors of one forward.

    Args:
        repeat: Runs the forward again, with the inputs it had.
        names: Of the segment's modules, for messages.
    """

    def __init__(self, repeat: Callable[[], None], names: tuple[str, ...]) -> None:
        self._repeat, self._names, self.ends_early = repeat, names, _ends_early.get()
        self._places: list[weakref.ref[_Place]] = []
        self._kinds: list[tuple[Any, ...]] = []

    def forward(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Context of the forward, or of a part of it."""
        return torch.autograd.graph.saved_tensors_hooks(self._drop, self._give)

    @torch_private.never_compiled
    def _drop(self, tensor: Tensor) -> "_Place":
        place = _Place()
        place.tensors = {}
        self._places.append(weakref.ref(place))
        self._kinds.append(_kind(tensor))
        return place

    def _give(self, place: "_Place") -> Tensor:
        backward: Any = torch_private.current_backward()
        if backward is None:
            backward = object()  # somebody looks at the graph from outside
        if backward not in place.tensors:
            self._make_again(backward)
        return place.tensors.pop(backward)

    def _make_again(self, backward: Any) -> None:
        filled = _Filled(self, self._places, self._kinds, backward)
        with torch.autograd.graph.saved_tensors_hooks(filled.add, lambda tensor: tensor), torch.enable_grad():
            try:
                self._repeat()
            except _Enough:
                return
            except RuntimeError:
                if filled.has_ended:  # within TorchScript, which makes its own error of whatever is raised in it
                    return
                raise
        if filled.number >= len(self._places):  # a forward has caught what was to end it
            return
        raise self.differs(f"a different number of tensors: {len(self._places)}, and {filled.number} in the repetition")

    def differs(self, got: str) -> UnsupportedError:
        """An error of a repetition that is not the forward."""
        error = UnsupportedError(
            "a segment was not computed the same way again, so its gradients would be of another function",
            got=f"segment {', '.join(self._names)}: {got}",
            expected="a forward that depends on its inputs, weights and random numbers alone",
            hint="look for counters and caches in it; ask snugfit.is_recomputing() where the second run has to act "
            "like the first, or leave this module out of recompute",
            names=self._names,
        )
        error.__cause__ = CheckpointError(got)
        return error


class _Filled:
    """The tensors of one repetition, in the order in which it saves them."""

    def __init__(
        self, region: Region, places: "list[weakref.ref[_Place]]", kinds: list[tuple[Any, ...]], backward: Any
    ) -> None:
        self._region, self._places, self._kinds, self._backward = region, places, kinds, backward
        self.number = 0
        self.has_ended = False

    @torch_private.never_compiled
    def add(self, tensor: Tensor) -> Tensor:
        """Put the next one into its place without its graph, and end the repetition if it was the last one."""
        number = self.number
        self.number = number + 1
        if number >= len(self._places):
            self.has_ended = True
            raise _Enough
        plain = tensor.detach() if tensor.requires_grad else tensor
        place, kind = self._places[number](), self._kinds[number]
        if place is not None:
            if kind != _kind(tensor):
                raise self._region.differs(f"tensor {number} was {_named(kind)} and is {_named(_kind(tensor))} now")
            place.tensors[self._backward] = plain
        if self._region.ends_early and number + 1 == len(self._places):
            self.has_ended = True
            raise _Enough
        return plain


class _Place:
    """Stands for one saved tensor, which it holds while a backward is on its way to it."""

    __slots__ = ("__weakref__", "tensors")
    tensors: dict[Any, Tensor]
    "By the backward that asks for it."


class _Enough(Exception):
    """Ends a repetition; no error, so that no forward takes it for one."""


@torch_private.never_compiled
def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _named(kind: tuple[Any, ...]) -> str:
    shape, dtype, device = kind
    return f"{tuple(shape)} {str(dtype)[6:]} on {device}"
