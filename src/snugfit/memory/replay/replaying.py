"""A recording of the CUDA caching allocator through the simulated one: do they agree, address by address?

Entry point: ``replay``. Requests, frees and out-of-memory errors are taken from the recording; where each block lies,
when a segment is asked for and how large it is, and what a flush gives back is predicted and compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snugfit import sizes
from snugfit.memory.allocation.blocks import ADDRESS_BITS, MIN_BLOCK_BYTES
from snugfit.memory.allocation.expandable_segments import ExpandableAllocator
from snugfit.memory.allocator import CachingAllocator
from snugfit.memory.replay import default_pool, snapshots
from snugfit.memory.replay.default_pool import DefaultPool
from snugfit.memory.replay.rewinding import Moment, Rewinding
from snugfit.memory.replay.snapshots import AllocatorRecording, Event

_MOST_DIFFERENCES = 50
"After so many the rest is not compared."
_MOST_EVENTS_TRIED = 5_000_000
"Events replayed at most in looking for open tails, see ``rewinding``."
_NOWHERE = 1 << (ADDRESS_BITS - 1)
"Where a segment goes that the recording does not have."


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where prediction and recording part."""

    index: int
    "Of the event in the recording; the number of events for the end."
    kind: str
    "Of the event, or ``end``."
    num_bytes: int
    stream: int
    recorded_address: int | None
    predicted_address: int | None
    "None where it does not exist or is not known."
    what: str
    "A sentence."

    def to_dict(self) -> dict[str, Any]:
        """The difference as built-in values."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What came out of a replay, sizes in bytes."""

    events: int
    "Of the recording's device."
    compared_events: int
    "Fewer than ``events`` where the recording was given up after too many differences."
    reuses: int
    "Allocations that the recording served from cached blocks."
    reuses_matched: int
    "Those that the simulator put at the same address."
    segments: int
    "Segments (with expandable segments: runs of pages) that the recording asked the driver for."
    segments_matched: int
    "Those that the simulator asked for at the same event, with the same size."
    releases: int
    "Segments or runs of pages that the recording gave back to the driver."
    releases_matched: int
    live_blocks: int
    "Blocks alive in the end."
    live_blocks_matched: int
    "Those of the same size in the simulator."
    peak_reserved_bytes: int
    "Predicted."
    recorded_peak_reserved_bytes: int
    num_ooms: int
    "Out-of-memory errors of the recording; they are not predicted."
    differences: tuple[Difference, ...]
    "The simulator goes on from the recorded state after each."
    is_expandable: bool
    notes: tuple[str, ...]
    "Sentences: what was taken for granted or left out."

    @property
    def matched(self) -> bool:
        """Whether prediction and recording agree everywhere."""
        return not self.differences and self.peak_reserved_bytes == self.recorded_peak_reserved_bytes

    @property
    def label(self) -> str:
        """How far the agreement goes."""
        return "replay-exact" if self.matched else "modelled"

    def to_dict(self) -> dict[str, Any]:
        """The result as built-in values, ready for JSON."""
        values = {name: getattr(self, name) for name in self.__slots__ if name not in ("differences", "notes")}
        first = self.differences[0].to_dict() if self.differences else None
        return {
            **values,
            "matched": self.matched,
            "label": self.label,
            "first_difference": first,
            "differences": [difference.to_dict() for difference in self.differences],
            "notes": list(self.notes),
        }


def replay(recording: AllocatorRecording) -> Replay:
    """Run a recording through the simulator, from its start state to its end.

    Raises:
        PlanError: The recording contradicts itself.
    """
    own = default_pool.of(recording)
    rewinding = Rewinding(recording, own.events)
    total, notes = _Counts(), list(own.notes)
    differences: list[Difference] = []
    start, num_tails, num_failed, is_done = 0, 0, 0, False
    live: tuple[int, int] = (0, 0)
    while not is_done and len(differences) < _MOST_DIFFERENCES:
        run = _with_open_tails(rewinding, own, start)
        total.add(run.counts)
        num_tails += len(run.tails)
        if run.difference is not None:
            differences.append(run.difference)
        elif run.position < len(own.events):
            num_failed += 1
        else:
            is_done = True
            live, wrong = _live_blocks(recording, run.allocator)
            differences += wrong
        start = run.position
    if num_tails:
        notes.append(f"tails of older blocks that follow only from where others were put: {num_tails}")
    if num_failed:
        notes.append(f"pages of {num_failed} requests that failed half way are taken from the recording")
    if total.num_ooms:
        notes.append(f"{total.num_ooms} out-of-memory errors are taken from the recording")
    return Replay(
        events=len(recording.events),
        compared_events=len(recording.events) if is_done else own.indices[start - 1] + 1,
        live_blocks=live[0],
        live_blocks_matched=live[1],
        recorded_peak_reserved_bytes=_recorded_peak(rewinding, own),
        differences=tuple(differences),
        is_expandable=recording.settings.expandable_segments,
        notes=(*recording.notes, *recording.settings.sentences(), *notes),
        **{name: getattr(total, name) for name in _Counts.__slots__},
    )


@dataclass(slots=True)
class _Counts:
    reuses: int = 0
    reuses_matched: int = 0
    segments: int = 0
    segments_matched: int = 0
    releases: int = 0
    releases_matched: int = 0
    num_ooms: int = 0
    peak_reserved_bytes: int = 0

    def add(self, other: "_Counts") -> None:
        for name in self.__slots__:
            both = getattr(self, name), getattr(other, name)
            setattr(self, name, max(both) if name == "peak_reserved_bytes" else sum(both))


class _Run:
    """The replay of a stretch of events without a difference in it, and the difference that ends it."""

    def __init__(
        self, rewinding: Rewinding, own: DefaultPool, start: int, moment: Moment, tails: dict[int, int]
    ) -> None:
        self.counts = _Counts()
        self.difference: Difference | None = None
        self.position = start
        "The first event that has not been replayed."
        self.tails = tails
        self.old = set(moment.live)
        "Blocks older than the stretch that are still alive."
        self._own = own
        self._taken: list[tuple[int, int]] = []
        self._asked: list[int] = []
        self.allocator = rewinding.allocator(start, moment, self._place, tails)
        self._note_peak()
        while self.position < len(own.events) and self.difference is None and self._follow():
            self._note_peak()

    def _follow(self) -> bool:
        """Replay the next event, or the next segments that were given back; False where nothing can be predicted."""
        event = self._own.events[self.position]
        if event.kind == snapshots.ALLOC:
            self._allocate(event)
        elif event.kind in default_pool.TAKES:
            self._taken.append((event.address, event.num_bytes))
            self.counts.segments += 1
        elif self._taken and self.is_expandable:
            self.counts.segments -= len(self._taken)
            return False
        elif self._taken:
            self._part(self.position, "a segment came for no allocation", None)
        elif event.kind == snapshots.FREE_COMPLETED:
            self.allocator.free(event.address)
            self.old.discard(event.address)
        elif event.kind in default_pool.GIVES_BACK:
            self._flush()
            return True
        else:
            self.counts.num_ooms += 1
        self.position += 1
        return True

    @property
    def is_expandable(self) -> bool:
        return isinstance(self.allocator, ExpandableAllocator)

    def _allocate(self, event: Event) -> None:
        allocator, taken, self._asked = self.allocator, self._taken, []
        mapped_before = len(allocator.mapped) if isinstance(allocator, ExpandableAllocator) else 0
        address = allocator.malloc(event.address, event.num_bytes, event.stream)
        if isinstance(allocator, ExpandableAllocator):
            asked = allocator.mapped[mapped_before:]
        else:
            asked = [(address, size) for size in self._asked]
        matched = asked == taken and address == event.address
        if taken:
            self.counts.segments_matched += len(taken) if asked == taken else 0
        else:
            self.counts.reuses += 1
            self.counts.reuses_matched += matched
        self._taken = []
        if matched:
            return
        shown = None if asked and not taken else address
        if asked == taken:
            what = "the block lies elsewhere"
        elif not taken:
            what = f"predicted {_listed(asked)} from the driver; the recording took a cached block"
        elif not asked:
            what = f"predicted a cached block; the recording took {_listed(taken)} from the driver"
        else:
            what = f"predicted {_listed(asked)} from the driver; the recording took {_listed(taken)}"
        self._part(self.position, what, shown)

    def _flush(self) -> None:
        """Compare what is given back from here on, up to the next event of another kind."""
        events, first = self._own.events, self.position
        recorded = set()
        while self.position < len(events) and events[self.position].kind in default_pool.GIVES_BACK:
            recorded.add((events[self.position].address, events[self.position].num_bytes))
            self.position += 1
        if isinstance(self.allocator, CachingAllocator):
            segments = self.allocator.segments
            predicted = {(address, segments[address]) for address in self.allocator.releasable()}
            self.allocator.empty_cache()
        else:
            predicted = set(self.allocator.empty_cache())
        self.counts.releases += len(recorded)
        self.counts.releases_matched += len(recorded & predicted)
        if predicted != recorded:
            only, missing = sorted(recorded - predicted), sorted(predicted - recorded)
            what = f"given back by the recording alone: {_listed(only)}, by the prediction alone: {_listed(missing)}"
            self._part(first, what, missing[0][0] if missing else None)

    def _part(self, position: int, what: str, predicted: int | None) -> None:
        event = self._own.events[position]
        self.difference = Difference(
            index=self._own.indices[position],
            kind=event.kind,
            num_bytes=event.num_bytes,
            stream=event.stream,
            recorded_address=event.address,
            predicted_address=predicted,
            what=what,
        )

    def _place(self, size: int) -> int:
        self._asked.append(size)
        return self._taken[0][0] if self._taken else _NOWHERE

    def _note_peak(self) -> None:
        reserved = self.allocator.reserved_bytes + self._own.private_bytes[self.position]
        self.counts.peak_reserved_bytes = max(self.counts.peak_reserved_bytes, reserved)


def _with_open_tails(rewinding: Rewinding, own: DefaultPool, start: int) -> _Run:
    """Replay a stretch with the smallest tails of old blocks that the recording does not contradict."""
    moment = rewinding.at(start)
    is_open = rewinding.open_tails(start, moment)
    tails: dict[int, int] = {}
    first = run = _Run(rewinding, own, start, moment, {})
    for _ in range(max(10, _MOST_EVENTS_TRIED // max(1, len(own.events)))):
        larger = _larger_tail(rewinding, run, is_open) if run.difference is not None else None
        if larger is None:
            break
        tails.update([larger])
        run = _Run(rewinding, own, start, moment, dict(tails))
    # What tails do not explain is shown as it is without them.
    return run if run.difference is None or run.position > first.position else first


def _larger_tail(rewinding: Rewinding, run: _Run, is_open: Mapping[int, tuple[int, int]]) -> tuple[int, int] | None:
    """An old block and a tail with which the free block behind it would not have been taken; None if there is none.

    The recording took another block, so that one must be too small.
    """
    allocator, parted = run.allocator, run.difference
    assert parted is not None
    at, key = parted.predicted_address, parted.recorded_address
    if parted.kind != snapshots.ALLOC or at is None or key is None or not isinstance(allocator, CachingAllocator):
        return None
    for address, (end, most) in is_open.items():
        tail = run.tails.get(address, 0)
        if address in run.old and end + tail == at:
            free = allocator.block_bytes(key) + allocator.free_bytes_behind(key)
            tail += free - rewinding.rounded(parted.num_bytes) + MIN_BLOCK_BYTES
            return (address, tail) if tail <= most else None
    return None


def _live_blocks(
    recording: AllocatorRecording, allocator: CachingAllocator | ExpandableAllocator
) -> tuple[tuple[int, int], list[Difference]]:
    """Number of blocks alive in the end and of those that have the recorded size; the first that has not."""
    wrong: list[Difference] = []
    number = matched = 0
    for segment in recording.segments:
        for block in segment.blocks:
            if segment.pool != snapshots.DEFAULT_POOL or not block.is_live:
                continue
            number += 1
            size = allocator.block_bytes(block.address)
            if size == block.num_bytes:
                matched += 1
            elif not wrong:
                wrong.append(
                    Difference(
                        index=len(recording.events),
                        kind="end",
                        num_bytes=block.requested_bytes,
                        stream=segment.stream,
                        recorded_address=block.address,
                        predicted_address=block.address,
                        what=f"predicted a block of {size} bytes; the recording ends with {block.num_bytes}",
                    )
                )
    return (number, matched), wrong


def _recorded_peak(rewinding: Rewinding, own: DefaultPool) -> int:
    reserved = sum(size for size, _, _ in rewinding.at(0).segments.values())
    peak = reserved + own.private_bytes[0]
    for event, private in zip(own.events, own.private_bytes[1:], strict=True):
        reserved += default_pool.reserves(event)
        peak = max(peak, reserved + private)
    return peak


def _listed(runs: Sequence[tuple[int, int]]) -> str:
    if not runs:
        return "nothing"
    shown = ", ".join(f"{sizes.text(size)} at {address}" for address, size in runs[:3] if address != _NOWHERE)
    unplaced = ", ".join(sizes.text(size) for address, size in runs[:3] if address == _NOWHERE)
    return ", ".join(part for part in (shown, unplaced, f"{len(runs) - 3} more" if len(runs) > 3 else "") if part)
