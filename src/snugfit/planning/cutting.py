"""Cuts a recorded micro-step into a chain of elements, units and what lies between them, and measures each.

Entry points: ``cut``, ``measure`` and ``forward_work``. Forward is cut where modules are entered and left; backward
where the first node of an element runs, which autograd takes in reverse order. What the measures mean for a chain is
``chain``'s.

NOTE [What an element keeps]
1. Kept is what forward made, up to an element's end, and what is alive when its backward begins, less what is still
   alive when the backward of the element before it begins. So a tensor between two elements counts where it is needed:
   an input belongs to the element that keeps it, a skip connection to the one that takes it.
2. Static is what is alive at an element's beginning beside what the elements before it keep; its input is part of it
   in forward, and the gradient of its output in backward.
3. Held is what forward leaves for the rest of forward only: casts of weights that autocast remembers.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from snugfit.memory.events import Recording
from snugfit.training.offloading import MIN_BYTES

Sizes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Element:
    """A unit of the chain or, without a name, what runs between two of them; intervals are of event positions."""

    unit: str
    forward: tuple[int, int]
    backward: tuple[int, int]
    forward_work: tuple[int, int]
    "Which pieces of the recording's work run in forward: the first, and one past the last."
    backward_work: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Measures:
    """What an element needs in one trace, in bytes, and how long its kernels run, in nanoseconds."""

    kept_bytes: int
    small_bytes: int
    "Of what is kept, what lies in tensors of its own that are too small to be offloaded."
    held_bytes: int
    forward_bytes: int
    backward_bytes: int
    forward_static_bytes: int
    backward_static_bytes: int
    forward_ns: int
    backward_ns: int


def cut(recording: Recording, step: tuple[int, int], names: Sequence[str]) -> tuple[Element, ...]:
    """Cut a micro-step at the units with these names.

    A unit that does not run exactly once is not told apart from its surroundings.

    Args:
        recording: Where the step is.
        step: Event positions at which the micro-step begins and ends.
        names: Units; those inside of another one are ignored.

    Returns:
        Elements in forward order; the first and the last have no name.
    """
    worked = [position for position, _ in recording.work]

    def at(position: int) -> _Moment:
        return _Moment(position, bisect_right(worked, position))

    first, last = at(step[0]), at(step[1])
    ends = [p for p, name in recording.marks if name == "forward end" and step[0] <= p <= step[1]]
    if not ends:  # a closure that evaluates the loss several times
        return (_element("", (first, last), (last, last)),)
    forward_end = at(min(ends))
    spans = _forward_spans(recording, first.position, forward_end.position, frozenset(names))
    backward = _backward_spans(recording, forward_end, last, [name for name, _, _ in spans], at)
    found: list[Element] = []
    left_at, begun = first, last  # where the element before was left in forward, and begins in backward
    for (name, entered, left), (start, end) in zip(spans, backward, strict=True):
        events = recording.events[left_at.position : entered.position]
        is_idle = left_at.work == entered.work and all(event < 0 for event in events)  # something may be freed there
        if found and is_idle:
            end = begun
            found[-1] = replace(found[-1], forward=(found[-1].forward[0], entered.position))
        else:
            found.append(_element("", (left_at, entered), (end, begun)))
        found.append(_element(name, (entered, left), (start, end)))
        left_at, begun = left, start
    found.append(_element("", (left_at, forward_end), (forward_end, begun)))
    return tuple(found)


def forward_work(recording: Recording, elements: Sequence[Element]) -> dict[str, int]:
    """What each unit computes in forward, in FLOPs; if it only moves, less than 0: the bytes."""
    done = {}
    for element in elements:
        work = [item for _, item in recording.work[slice(*element.forward_work)]]
        done[element.unit] = sum(item.flops for item in work) or -sum(item.bytes for item in work)
    return done


class _Moment(NamedTuple):
    position: int
    "In the events."
    work: int
    "Pieces of work before."


def _element(unit: str, forward: tuple[_Moment, _Moment], backward: tuple[_Moment, _Moment]) -> Element:
    (a, b), (c, d) = forward, backward
    return Element(unit, (a.position, b.position), (c.position, d.position), (a.work, b.work), (c.work, d.work))


def _forward_spans(
    recording: Recording, start: int, end: int, names: frozenset[str]
) -> list[tuple[str, _Moment, _Moment]]:
    """Name and interval of each unit that is entered once, in the order in which they are."""
    entered: list[tuple[str, _Moment]] = []
    spans: list[tuple[str, _Moment, _Moment]] = []
    for border in recording.borders:
        if border.position < start or border.position > end or border.module not in names:
            continue
        moment = _Moment(border.position, border.num_work)
        if border.is_entered:
            entered.append((border.module, moment))
        elif entered and entered[-1][0] == border.module:
            name, begun = entered.pop()
            if not entered:
                spans.append((name, begun, moment))
    calls = [name for name, _, _ in spans]
    return [span for span in spans if calls.count(span[0]) == 1]


def _backward_spans(
    recording: Recording, start: _Moment, end: _Moment, units: Sequence[str], at: Callable[[int], _Moment]
) -> list[tuple[_Moment, _Moment]]:
    """Where the backward of each unit begins and ends: later units first, none begins before a later one has."""
    place = {name: number for number, name in enumerate(units)}
    known: dict[str, int] = {}

    def unit_of(module: str) -> int:
        if module not in known:
            parts = module.split(".")
            prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
            known[module] = next((place[prefix] for prefix in prefixes if prefix in place), -1)
        return known[module]

    first, last = [end] * len(units), [start] * len(units)
    for border in recording.borders:
        if start.position <= border.position < end.position and (number := unit_of(border.module)) >= 0:
            moment = _Moment(border.position, border.num_work)
            first[number], last[number] = min(first[number], moment), max(last[number], moment)
    for position in range(start.position, end.position):
        event = recording.events[position]
        if event > 0 and (number := unit_of(recording.births[event - 1].module)) >= 0:
            first[number], last[number] = min(first[number], at(position)), max(last[number], at(position + 1))
    spans: list[tuple[_Moment, _Moment]] = []
    latest = start
    for number in reversed(range(len(units))):
        if first[number] == end:  # nothing is made in its backward (ReLU in place): it lies behind the one after it
            first[number] = spans[-1][1] if spans else start
        latest = max(latest, first[number])
        spans.append((latest, max(last[number], latest)))
    spans.reverse()
    return [
        (begin, min(finish, spans[number - 1][0] if number else end)) for number, (begin, finish) in enumerate(spans)
    ]


def measure(events: Sizes, elements: Sequence[Element], sizes: Sizes, work_ns: Sizes) -> tuple[Measures, ...]:
    """Measure the elements of a micro-step.

    Args:
        events: Of the recording where they are.
        elements: What ``cut`` gave.
        sizes: Bytes of each of its births.
        work_ns: Time of each piece of its work.
    """
    index = np.abs(events) - 1
    alive = np.concatenate(([0], np.cumsum(np.sign(events) * sizes[index])))
    death = np.full(len(sizes), len(events) + 1, dtype=np.int64)
    death[index[events < 0]] = np.nonzero(events < 0)[0]
    spent = np.concatenate(([0], np.cumsum(work_ns)))

    def time(span: tuple[int, int]) -> int:
        return int(spent[span[1]] - spent[span[0]])

    def highest(span: tuple[int, int]) -> int:
        return int(alive[span[0] : span[1] + 1].max())

    head = elements[-1].forward[0]
    kept_before = 0
    found = []
    start = elements[0].forward[0]
    for number, element in enumerate(elements):
        begins = element.backward[0]
        kept = _alive(events[start : element.forward[1]], death, begins, sizes) - kept_before
        after = elements[number + 1].backward[0] if number + 1 < len(elements) else begins
        own = events[slice(*element.forward)]
        held = _alive(own, death, head, sizes) - _alive(own, death, max(after, head), sizes)
        rise = highest(element.backward) - int(alive[begins])
        found.append(
            Measures(
                kept_bytes=kept,
                small_bytes=_alive(own, death, begins, np.where(sizes < MIN_BYTES, sizes, 0)),
                held_bytes=held if element.forward[1] <= head else 0,
                forward_bytes=highest(element.forward) - int(alive[element.forward[0]]),
                backward_bytes=kept + rise,
                forward_static_bytes=int(alive[element.forward[0]]) - kept_before,
                backward_static_bytes=int(alive[begins]) - kept_before - kept,
                forward_ns=time(element.forward_work),
                backward_ns=time(element.backward_work),
            )
        )
        kept_before += kept
    return tuple(found)


def _alive(events: Sizes, death: Sizes, moment: int, sizes: Sizes) -> int:
    """Bytes of what was born in a stretch of events and is alive at a later moment."""
    born = events[events > 0] - 1
    return int(sizes[born[death[born] >= moment]].sum())
