"""Python numbers that stand for values which a trace does not have, such as that of ``loss.item()``.

Entry points: ``number`` and ``array``. One can be printed, summed and logged; deciding by it is refused, with the line
at which it was read. Left out: what C code makes of it (``float(x)``, ``math.log``), which sees the number 1;
the report says so.
"""

from collections.abc import Callable
from typing import Any

import numpy
from torch import Tensor

from snugfit.errors import UnsupportedError

_MAX_ELEMENTS = 1 << 22


class Unknown(float):
    """A number whose value nobody knows. Sums and products with it are unknown too."""

    origin: str
    "Where it was read."
    compare: Callable[[str, object], bool] | None
    "How it compares with another number, where that may be assumed."

    def __repr__(self) -> str:
        return "nan"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        spec = spec.removesuffix("d")
        return format(float("nan"), spec)

    def _refuse(self, *_: Any) -> Any:
        raise UnsupportedError(
            "the step decides by a number that a trace does not have",
            got=f"the value read at {self.origin}",
            expected="steps whose course does not depend on what the weights compute; printing and summing are fine",
            hint="trace the branch that training takes, without the test; or wrap the part that decides in "
            "snugfit.opaque(function, outputs_like)",
            op="item",
            module="",
        )

    __bool__ = __int__ = __index__ = __trunc__ = __floor__ = __ceil__ = _refuse
    __hash__ = float.__hash__

    def __round__(self, *_: Any) -> "Unknown":  # type: ignore[override]
        return self

    def __reduce__(self) -> Any:
        return number, (self.origin,)


def number(origin: str, compare: Callable[[str, object], bool] | None = None, value: float = 1.0) -> Unknown:
    """A number that stands for one that was read at a place in the user's code.

    Args:
        origin: The place, ``file:line``.
        compare: Answers comparisons; without it they are refused.
        value: What C code sees.
    """
    unknown = Unknown(value)
    unknown.origin, unknown.compare = origin, compare
    return unknown


def array(tensor: Tensor, origin: str) -> Any:
    """An array of such numbers, for ``tensor.numpy()`` and ``tensor.tolist()``; None if it would be too large."""
    if tensor.numel() > _MAX_ELEMENTS:
        return None
    made = numpy.empty(tuple(tensor.shape), dtype=object)
    made.fill(number(origin))  # numpy.full would make plain numbers of them
    return made


def _computed(name: str) -> Callable[..., Any]:
    original = getattr(float, name)

    def method(self: Unknown, *others: Any) -> Any:
        if original(self, *(1.0 if isinstance(other, Unknown) else other for other in others)) is NotImplemented:
            return NotImplemented  # a tensor or an array on the other side
        return number(self.origin, self.compare)

    return method


def _comparison(name: str) -> Callable[..., Any]:
    def method(self: Unknown, other: object) -> Any:
        return self._refuse() if self.compare is None else self.compare(name, other)

    return method


for _name in "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg pos abs".split():
    setattr(Unknown, f"__{_name}__", _computed(f"__{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Unknown, f"__{_name}__", _comparison(_name))
