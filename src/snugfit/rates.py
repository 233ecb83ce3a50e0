"""How fast a device has been measured to be: the ``Rates``, their validation and their JSON form.

Entry points: ``Rates`` and ``at``. A file of rates is data from outside: every key and number is checked. Measuring
them is ``planning/calibration``'s, turning them into times ``planning/cost``'s.
"""

import itertools
import json
import math
import os
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

from snugfit.errors import PlanError

VERSION = 1
OTHER = "other"
"Key of the curve of every operation without one of its own."

Curve: TypeAlias = tuple[tuple[float, float], ...]
"Points (size, rate), sizes ascending."

_WORDS = ("device", "processor", "torch")
OVERHEADS = ("forward_s", "backward_s", "update_s", "segment_s", "repeated_s", "watched_s", "micro_step_s", "window_s")
_CURVES = ("arithmetic", "traffic")
_AGAIN = "measure them again: snugfit calibrate -o rates.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device reached when it was measured.

    Raises:
        PlanError: A value of a wrong type or outside of its range, or a curve that is none.
    """

    device: str
    'As ``hardware.Device.name`` says it: ``"cpu"``, or the name of a card.'
    processor: str
    "What the machine calls it; rates of one processor say nothing of another."
    threads: int
    "Of torch, while it was measured."
    torch: str
    "Version."
    arithmetic: Mapping[str, Curve]
    """FLOP/s by size, for each kind of operation and dtype: ``"product float32"``, ``"attention backward float32"``.

    Size is the side of a cube of products with as many FLOPs per byte; see ``planning/cost``.
    """
    traffic: Mapping[str, Curve]
    'Bytes/s by the bytes read and written, for operations of torch by name, and for ``"other"`` ones.'
    forward_s: float
    "For each operation of a forward beside its work: Python, dispatch, the graph."
    backward_s: float
    "The same of a backward, which autograd runs."
    update_s: float
    "The same of an optimizer's step."
    segment_s: float
    "For each recomputed segment, beside the operations that are repeated."
    repeated_s: float
    "For each operation that is repeated: what not saving and then finding its tensors takes."
    watched_s: float
    "For each operation of a segment that keeps results, both its passes through the Python mode taken together."
    micro_step_s: float
    "For each micro-batch, beside its operations."
    window_s: float
    "For each update, beside its operations."
    link: float | None = None
    "Bytes/s between the host and the device; None where they are one."
    version: int = VERSION
    "Version of this schema."

    def __post_init__(self) -> None:
        if isinstance(self.version, bool) or self.version != VERSION:
            raise _wrong("version", self.version, f"version={VERSION}")
        for name in _WORDS:
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise _wrong(name, getattr(self, name), "a name")
        if isinstance(self.threads, bool) or not isinstance(self.threads, int) or self.threads < 1:
            raise _wrong("threads", self.threads, "a whole number of at least 1")
        for name in OVERHEADS:
            if not _is_number(getattr(self, name)) or getattr(self, name) < 0:
                raise _wrong(name, getattr(self, name), "seconds, a finite number of at least 0")
        if self.link is not None and (not _is_number(self.link) or self.link <= 0):
            raise _wrong("link", self.link, "bytes/s, a finite number above 0, or null")
        for name, needed in zip(_CURVES, ("product float32", OTHER), strict=True):
            curves = getattr(self, name)
            if not isinstance(curves, Mapping) or needed not in curves:
                raise _wrong(name, curves, f"an object of curves, among them {needed!r}")
            object.__setattr__(self, name, {key: _curve(f"{name}[{key!r}]", value) for key, value in curves.items()})

    def to_dict(self) -> dict[str, Any]:
        """The rates as built-in values, ready for JSON."""
        values = asdict(self)
        for name in _CURVES:
            values[name] = {key: [list(point) for point in curve] for key, curve in values[name].items()}
        return {"version": values.pop("version"), **values}

    @classmethod
    def from_json(cls, document: str) -> "Rates":
        """Read a JSON document, checking every key and value.

        Raises:
            PlanError: Not JSON, unknown or missing keys (named), or a value outside of its range.
        """
        try:
            values = json.loads(document)
        except (TypeError, ValueError, RecursionError) as error:
            raise _wrong("the document", str(error), "JSON that snugfit calibrate wrote") from error
        known = {field.name for field in fields(cls)}
        if not isinstance(values, dict):
            raise _wrong("the document", type(values).__name__, "an object with named keys")
        if set(values) != known:
            odd = sorted(set(values) ^ known)
            raise _wrong("the document", f"unknown or missing: {', '.join(map(repr, odd))}", ", ".join(sorted(known)))
        return cls(**values)

    def to_json(self) -> str:
        """The rates as a JSON document."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Rates":
        """Read rates from a file.

        Raises:
            PlanError: The file cannot be read or holds no rates (the message names the file).
        """
        try:
            document = Path(path).read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
        except (OSError, TypeError, ValueError) as error:  # no file, no path, no text
            raise _wrong(f"the file {str(path)!r}", str(error), "a text file") from error
        try:
            return cls.from_json(document)
        except PlanError as error:
            where = f"{error.what} (in {os.fspath(path)!r})"
            raise PlanError(where, got=error.got, expected=error.expected, hint=error.hint) from error


def at(curve: Curve, size: float) -> float:
    """The rate at a size: between two points on the straight line of the logarithms, beyond them that of the end."""
    right = bisect_left(curve, (size,))
    if right == 0 or right == len(curve):
        return curve[min(right, len(curve) - 1)][1]
    (x0, y0), (x1, y1) = curve[right - 1], curve[right]
    share = math.log(size / x0) / math.log(x1 / x0)
    return float(y0 * (y1 / y0) ** share)


def _curve(name: str, value: object) -> Curve:
    expected = "a list of at least one [size, rate], positive and finite, sizes ascending"
    if not isinstance(value, (list, tuple)) or not value:
        raise _wrong(name, value, expected)
    points = []
    for point in value:
        is_pair = isinstance(point, (list, tuple)) and len(point) == 2
        if not is_pair or not all(_is_number(number) and number > 0 for number in point):
            raise _wrong(name, point, expected)
        points.append((float(point[0]), float(point[1])))
    if any(a[0] >= b[0] for a, b in itertools.pairwise(points)):
        raise _wrong(name, [point[0] for point in points], expected)
    return tuple(points)


def _is_number(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond any float
        return False


def _wrong(name: str, got: object, expected: str) -> PlanError:
    shown = repr(got)
    return PlanError(
        f"measured rates are not valid: {name}",
        got=shown if len(shown) < 200 else f"{shown[:200]} ...",
        expected=expected,
        hint=_AGAIN,
    )
