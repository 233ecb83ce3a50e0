"""The part of an allocator recording that the simulator predicts: what happens outside of private pools.

Entry point: ``of``. Blocks of a private pool (CUDA graphs, ``torch.cuda.MemPool``) serve nobody else; what it holds
is taken from the recording.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from snugfit import sizes
from snugfit.memory.replay import snapshots
from snugfit.memory.replay.snapshots import AllocatorRecording, Event

GIVES_BACK = (snapshots.SEGMENT_FREE, snapshots.SEGMENT_UNMAP)
TAKES = (snapshots.SEGMENT_ALLOC, snapshots.SEGMENT_MAP)
_FOLLOWED = {snapshots.ALLOC, snapshots.FREE_COMPLETED, snapshots.OOM, *TAKES, *GIVES_BACK}


@dataclass(frozen=True, slots=True)
class DefaultPool:
    """The events of the default pool, and what private pools held meanwhile."""

    events: Sequence[Event]
    indices: Sequence[int]
    "Of each event in the recording."
    private_bytes: Sequence[int]
    "Most that private pools held before the first event and after each."
    notes: Sequence[str]


def of(recording: AllocatorRecording) -> DefaultPool:
    """Leave out what happens in private pools, whose blocks serve nobody else, and frees that are only requested."""
    spans = [(s.address, s.address + s.num_bytes) for s in recording.segments if s.pool != snapshots.DEFAULT_POOL]
    completes = _completes(recording)
    held = sum(stop - start for start, stop in spans)
    notes = []

    def is_private(event: Event) -> bool:
        if event.pool is not None:
            return event.pool != snapshots.DEFAULT_POOL
        return any(start <= event.address < stop for start, stop in spans)

    privates = [bool(spans or event.pool) and is_private(event) for event in recording.events]
    for event, private in zip(recording.events, privates, strict=True):
        held -= reserves(event) if private else 0
    events: list[Event] = []
    indices, most = [], [held]
    for index, (event, private) in enumerate(zip(recording.events, privates, strict=True)):
        if private:
            held += reserves(event)
            most[-1] = max(most[-1], held)
            continue
        if event.kind == snapshots.FREE_REQUESTED and not completes:
            event = event._replace(kind=snapshots.FREE_COMPLETED)
        if event.kind in _FOLLOWED:
            events.append(event)
            indices.append(index)
            most.append(held)
    if any(privates):
        number, total = sum(privates), max(most)
        notes.append(
            f"{number} events of private pools (CUDA graphs, MemPool; up to {sizes.text(total)}) are taken from the "
            "recording"
        )
    if not completes and any(event.kind == snapshots.FREE_REQUESTED for event in recording.events):
        notes.append("the recording holds no free_completed; blocks are taken to be free when that was asked for")
    return DefaultPool(events, indices, most, notes)


def _completes(recording: AllocatorRecording) -> bool:
    """Whether the recording says when frees are done, not only when they are asked for (``skip_actions``)."""
    last = {event.address: event.kind for event in recording.events}
    asked = {address for address, kind in last.items() if kind == snapshots.FREE_REQUESTED}
    waiting = any(b.is_live and b.address in asked for segment in recording.segments for b in segment.blocks)
    return waiting or any(event.kind == snapshots.FREE_COMPLETED for event in recording.events)


def reserves(event: Event) -> int:
    """What an event adds to the bytes held from the driver."""
    if event.kind in TAKES:
        return event.num_bytes
    return -event.num_bytes if event.kind in GIVES_BACK else 0
