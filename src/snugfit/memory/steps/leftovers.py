"""What micro-batches leave alive: it grows with their number, of which a trace runs only a few.

Entry points: ``grows`` says whether something does, ``multiplied`` adds what micro-batches that were not traced leave.
Left out: single numbers, such as the losses that an engine keeps until the window's end, and what the update frees.
"""

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from snugfit.memory.events import Birth, Recording

_NUMBER_BYTES = 16
"Of the largest single number; what an engine keeps of a micro-batch is not more."
_BOUNDED = ("gradient", "optimizer", "workspace")
"Made by the first micro-batch that needs them, for all."


class _Left(NamedTuple):
    """What the second micro-batch of a window left, beyond what replaces something of the first one's."""

    start: int
    "Event at which that micro-batch begins."
    num_bytes: dict[int, int]
    "Birth to the bytes by which every further micro-batch adds."


def grows(recording: Recording) -> bool:
    """Whether more is alive behind the second micro-batch of a window than before it, gradients left out."""
    return bool(_left(recording))


def added(recording: Recording) -> dict[int, int]:
    """What every further micro-batch of the last window adds: birth to bytes."""
    return {index: more for left in _left(recording)[-1:] for index, more in left.num_bytes.items()}


def multiplied(recording: Recording, times: int) -> Recording:
    """The recording as if so many more micro-batches had run before the second one of each window.

    What they left lives as long as what the second one left.
    """
    births, events, last = list(recording.births), list(recording.events), len(recording.events)
    added: dict[int, list[int]] = {}
    for start, num_bytes in _left(recording):
        deaths = {-event - 1: position for position, event in enumerate(events) if event < 0}
        for index, more in num_bytes.items():
            for _ in range(times):
                births.append(replace(births[index], num_bytes=more))
                added.setdefault(start, []).append(len(births))
                if index in deaths:
                    added.setdefault(deaths[index], []).append(-len(births))
    stream: list[int] = []
    moved = [0] * (last + 1)
    for position in range(last + 1):
        moved[position] = len(stream)  # a mark stays in front of what is added behind it
        stream += added.get(position, [])
        stream += events[position : position + 1]
    marks = [(moved[position], name) for position, name in recording.marks]
    work = [(moved[position], item) for position, item in recording.work]
    borders = [border._replace(position=moved[border.position]) for border in recording.borders]
    return Recording(births, stream, marks, work, borders)


def _left(recording: Recording) -> list[_Left]:
    windows = [position for position, name in recording.marks if name == "window"]
    found = [_left_in(recording, *borders) for borders in zip(windows, [*windows[1:], None], strict=True)]
    return [left for left in found if left is not None]


def _left_in(recording: Recording, window: int, following: int | None) -> _Left | None:
    end = len(recording.events) if following is None else following
    starts = [position for position, name in recording.marks if name == "micro-batch" and window <= position < end]
    if len(starts) < 2:
        return None
    first, start = starts[:2]
    events = recording.events
    stop = starts[2] if len(starts) > 2 else _behind_backward(recording, start, end)
    before = {event - 1 for event in events[first:start] if event > 0}
    born: dict[int, int] = {}
    gone: list[int] = []
    for event in events[start:stop]:
        index = abs(event) - 1
        if event > 0:
            born[index] = recording.births[index].num_bytes
        elif born.pop(index, None) is None and index in before:
            gone.append(index)
    kept = {index: size for index, size in born.items() if _may_grow(recording.births[index])}
    lost = [index for index in gone if _may_grow(recording.births[index])]
    replaced = Counter(_kind(recording.births[index]) for index in lost)
    surplus = sum(recording.births[index].num_bytes for index in lost)
    for index in list(kept):  # what the same line makes in the place of the first one's
        kind = _kind(recording.births[index])
        if replaced[kind] > 0:
            replaced[kind] -= 1
            surplus -= kept.pop(index)
    for index in sorted(kept, key=kept.__getitem__, reverse=True):  # what became larger instead: only by how much
        less = min(surplus, kept[index])
        kept[index], surplus = kept[index] - less, surplus - less
    kept = {index: size for index, size in kept.items() if size > 0}
    return _Left(start, kept) if kept else None


def _may_grow(birth: Birth) -> bool:
    return birth.num_bytes > _NUMBER_BYTES and birth.category not in _BOUNDED


def _kind(birth: Birth) -> tuple[object, ...]:
    return birth.num_bytes, birth.op, birth.module, birth.phase


def _behind_backward(recording: Recording, start: int, end: int) -> int:
    """Where the last micro-batch of a window is over: its last backward kernel has run and freed what it held."""
    done = [position for position, item in recording.work if start < position <= end and item.phase == "backward"]
    stop = max(done, default=end)
    while stop < end and recording.events[stop] < 0:
        stop += 1
    return stop
