"""Memory over the step: what lives after every event of a window, by category, thinned out without losing a peak.

Entry point: ``timeline``. Who holds what at one moment is ``attribution``'s; drawing it is the page's.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from snugfit.memory.events import Recording
from snugfit.memory.reporting.attribution import CATEGORIES
from snugfit.memory.traces import Trace

POINTS = 1200
"Moments of a window that are kept, about."

_AFTER = {"micro-batch": "forward", "forward end": "backward", "backward end": "optimizer", "step end": ""}
"A mark, and the phase that begins there."

_Numbers = NDArray[np.int64]
_Border = tuple[str, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of a window: one phase of one micro-batch, or the update."""

    phase: str
    "``forward``, ``backward`` or ``optimizer``."
    micro_batch: int
    "From 1; that of the last one for the update, 0 in a step without micro-batches."
    start: int
    "Index in the window's ``moments`` at which it begins."
    end: int
    "Index in the window's ``moments`` at which it ends."


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTimeline:
    """One window at chosen moments; sizes are bytes as the allocator counts them."""

    window: int
    "From 1."
    moments: tuple[int, ...]
    "How many events of the window lie before each of them; 0 is its beginning."
    seconds: tuple[float, ...]
    "Modelled time since the window began at each moment; empty where no time was asked for."
    by_category: Mapping[str, tuple[int, ...]]
    "Category to bytes at each moment; one that never has bytes is left out."
    reserved_bytes: tuple[int, ...]
    "Held from the driver at each moment; empty where the device has no caching allocator."
    spans: tuple[Span, ...]
    peak: int
    "Index in ``moments`` of the first at which most is allocated."

    @property
    def allocated_bytes(self) -> tuple[int, ...]:
        """All categories together at each moment."""
        return tuple(map(sum, zip(*self.by_category.values(), strict=True)))


def timeline(trace: Trace, *, seconds: Sequence[float] = (), points: int = POINTS) -> tuple[WindowTimeline, ...]:
    """Follow a recorded step and return, window by window, what lives at about ``points`` moments.

    A window is cut into equal parts, each of which gives its highest and its lowest moment. The highest moment of the
    window, of each category and of the reserved bytes, and the borders of the phases, are always among them.

    Args:
        trace: At least one window.
        seconds: Modelled seconds of each piece of the recording's work, in order; empty leaves the time out.
        points: Moments to keep of a window, at least 2; windows with fewer are kept whole.
    """
    recording, replayed = trace.recording, trace.peaks()
    levels = _levels(recording, replayed.block_bytes)
    reserved = _reserved(replayed.reserved_changes, levels.shape[1])
    return tuple(
        _window(
            number,
            levels[:, start : end + 1],
            reserved[:, start : end + 1],
            tuple(_borders(marks)),
            _clock(recording, start, end, seconds) if seconds else (),
            points,
        )
        for number, (start, end, marks) in enumerate(_windows(recording), start=1)
    )


def _window(
    number: int,
    levels: _Numbers,
    reserved: _Numbers,
    borders: Sequence[_Border],
    seconds: Sequence[float],
    points: int,
) -> WindowTimeline:
    """Thin one window out."""
    tops = (*levels.argmax(axis=1), *reserved.argmax(axis=1), *(moment for *_, a, b in borders for moment in (a, b)))
    kept = np.unique([*_highs_and_lows(levels.sum(axis=0), points), *tops])
    index = {moment: at for at, moment in enumerate(kept.tolist())}
    return WindowTimeline(
        window=number,
        moments=tuple(index),
        seconds=tuple(seconds[moment] for moment in index) if seconds else (),
        by_category={
            category: tuple(row.tolist())
            for category, row in zip(CATEGORIES, levels[:, kept], strict=True)
            if row.any()
        },
        reserved_bytes=tuple(reserved[0, kept].tolist()) if len(reserved) else (),
        spans=tuple(
            Span(phase=phase, micro_batch=micro_batch, start=index[begun], end=index[ended])
            for phase, micro_batch, begun, ended in borders
        ),
        peak=int(levels[:, kept].sum(axis=0).argmax()),
    )


def _levels(recording: Recording, blocks: Sequence[int]) -> _Numbers:
    """Category by moment: bytes that live before each event, and after the last."""
    events = np.asarray(recording.events, dtype=np.int64)
    births = np.abs(events) - 1
    rows = np.asarray([CATEGORIES.index(birth.category) for birth in recording.births], dtype=np.int64)
    changes = np.zeros((len(CATEGORIES), len(events) + 1), dtype=np.int64)
    changes[rows[births], np.arange(len(events)) + 1] = np.sign(events) * np.asarray(blocks, dtype=np.int64)[births]
    return changes.cumsum(axis=1)


def _reserved(changes: Sequence[tuple[int, int]], num_moments: int) -> _Numbers:
    """One row of reserved bytes at each moment; no row where they never change: there is no caching allocator."""
    steps = np.zeros((min(len(changes), 1), num_moments), dtype=np.int64)
    before = 0
    for event, num_bytes in changes:
        steps[0, event + 1] += num_bytes - before
        before = num_bytes
    return steps.cumsum(axis=1)


def _windows(recording: Recording) -> Iterator[tuple[int, int, list[tuple[int, str]]]]:
    """First and last moment of each window, and its marks, counted from its beginning."""
    marks = recording.marks
    begins = [index for index, (_, name) in enumerate(marks) if name == "window"]
    for index, following in pairwise([*begins, len(marks)]):
        start = marks[index][0]
        end = marks[following][0] if following < len(marks) else len(recording.events)
        yield start, end, [(position - start, name) for position, name in marks[index + 1 : following]]


def _borders(marks: Iterable[tuple[int, str]]) -> Iterator[_Border]:
    """Phase, micro-batch, begin and end of each stretch of a window."""
    phase, number, begun = "forward", 0, 0
    for position, name in marks:
        following = _AFTER.get(name)
        if following is None:
            continue
        if (phase, name) not in (("forward", "micro-batch"), ("backward", "forward end")):
            if phase and position > begun:
                yield phase, number, begun, position
            phase, begun = following, position
        number += name == "micro-batch"


def _highs_and_lows(heights: _Numbers, points: int) -> Iterator[int]:
    """The highest and the lowest moment of each of equally long parts, the first and the last moment."""
    yield from (0, len(heights) - 1)
    for part in np.array_split(np.arange(len(heights)), min(len(heights), max(1, points // 2))):
        yield from (int(part[heights[part].argmax()]), int(part[heights[part].argmin()]))


def _clock(recording: Recording, start: int, end: int, seconds: Sequence[float]) -> tuple[float, ...]:
    """Modelled time at every moment of a window: at a kernel's own position it has ended, in between it runs evenly."""
    timed = zip(recording.work, seconds, strict=True)
    done = [(position - start, taken) for (position, _), taken in timed if start <= position <= end]
    positions = [0, *(position for position, _ in done)]
    ended = np.cumsum([0.0, *(taken for _, taken in done)])
    return tuple(np.interp(np.arange(end - start + 1), positions, ended).tolist())
