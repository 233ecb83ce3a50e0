"""Who still needs something that was put on a model: two engines may need the same, and each takes off its own.

Entry points: ``Holders``, kept by what was put on, and ``let_go``, called by a handle. A handle that nobody keeps
needs nothing; a copy of a model needs nothing but for handles that are copied with it, which add themselves again.
"""

import gc
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet


class Holders:
    """The handles that need one thing, as far as anybody still has them."""

    def __init__(self) -> None:
        self._handles: WeakSet[Any] = WeakSet()

    def add(self, handle: object) -> None:
        """Note a handle; again changes nothing."""
        self._handles.add(handle)

    def discard(self, handle: object) -> None:
        """Forget a handle."""
        self._handles.discard(handle)

    def __bool__(self) -> bool:
        return bool(self._handles)

    def __deepcopy__(self, memo: object) -> "Holders":
        return Holders()

    def __reduce__(self) -> Any:
        return Holders, ()


def let_go(handle: object, things: Sequence[Holders]) -> list[bool]:
    """Take a handle off what it holds; for each thing, whether nobody needs it any more."""
    for holders in things:
        holders.discard(handle)
    if any(things):
        gc.collect()  # an engine that was dropped is a cycle, and needs nothing
    return [not holders for holders in things]
