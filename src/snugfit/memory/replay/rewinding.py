"""What the allocator held at any moment of a recording: the segments of its end with the later events undone.

Entry point: ``Rewinding``. Sizes of blocks that died on the way are not recorded; what follows from the events is
taken, and what is left open (a tail that was not split off) is chosen so that it contradicts nothing.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from snugfit import sizes
from snugfit.errors import PlanError
from snugfit.memory.allocation.blocks import MIN_BLOCK_BYTES, SMALL_LIMIT_BYTES, SMALL_SEGMENT_BYTES
from snugfit.memory.allocation.expandable_segments import ExpandableAllocator
from snugfit.memory.allocator import CachingAllocator
from snugfit.memory.replay import snapshots
from snugfit.memory.replay.snapshots import AllocatorRecording, Event

# NOTE [Tails] Outside of expandable segments a block of the large pool may be larger than its rounded request, by a
# tail of at most 1 MiB that was not split off. Free blocks of that pool are larger than 1 MiB. So of the gap between
# a live block and the next one
#   1. up to 1 MiB is tail;
#   2. else, the first allocation inside it while the block lives begins where the free block begins, behind the tail;
#   3. else the tail is open: any size that leaves a free block of more than 1 MiB. The replay starts with none, and
#      tries larger ones where the free block would be taken although the recording took another.


@dataclass(slots=True)
class Moment:
    """What was held before an event."""

    segments: dict[int, tuple[int, bool, int]] = field(default_factory=dict)
    "Address to size, whether it is of the small pool, and stream; with expandable segments each run of pages."
    live: dict[int, int] = field(default_factory=dict)
    "Address to requested bytes of each live block."


class Rewinding:
    """A recording that can be looked at from any of its moments."""

    def __init__(self, recording: AllocatorRecording, events: Sequence[Event]) -> None:
        self._settings = recording.settings
        self._events = events
        self._final = [segment for segment in recording.segments if segment.pool == snapshots.DEFAULT_POOL]
        self._sizes = {b.address: b.num_bytes for s in self._final for b in s.blocks if b.is_live}

    def rounded(self, requested_bytes: int) -> int:
        """Block size of a request under the recording's settings."""
        return self._settings.rounded(requested_bytes)

    def at(self, index: int) -> Moment:
        """What was held before event ``index``.

        Raises:
            PlanError: The events contradict each other or the segments of the end.
        """
        moment = Moment()
        for segment in self._final:
            moment.segments[segment.address] = (segment.num_bytes, segment.is_small, segment.stream)
            moment.live.update((b.address, b.requested_bytes) for b in segment.blocks if b.is_live)
        for position in range(len(self._events) - 1, index - 1, -1):
            self._undo(moment, position)
        return moment

    def allocator(
        self, index: int, moment: Moment, place: Callable[[int], int], tails: Mapping[int, int]
    ) -> CachingAllocator | ExpandableAllocator:
        """A simulated allocator in the state of a moment; its keys are addresses.

        Args:
            index: Index of the moment's event.
            moment: What was held.
            place: Where new segments go.
            tails: Chosen tails, by address of the block.
        """
        inside = self._blocks(index, moment, tails)
        if self._settings.expandable_segments:
            return self._expandable(index, moment, place, inside)
        allocator = CachingAllocator(place=place, settings=self._settings)
        for start, (size, is_small, stream) in moment.segments.items():
            held = [(address, address - start, block) for address, block in inside[start]]
            allocator.adopt_segment(start, size, is_small=is_small, blocks=held, stream=stream)
        return allocator

    def open_tails(self, index: int, moment: Moment) -> dict[int, tuple[int, int]]:
        """Of each block whose tail is open (see the NOTE): its end without a tail, and the largest tail."""
        return {
            address: (address + block, most)
            for address, block, most in self._gaps(index, moment)
            if most and not self._settings.expandable_segments
        }

    def _undo(self, moment: Moment, position: int) -> None:
        kind, address, num_bytes, stream, _ = self._events[position]
        if kind == snapshots.FREE_COMPLETED:
            if address in moment.live:
                raise self._contradiction(position, "a block is freed that is alive afterwards")
            moment.live[address] = num_bytes
        elif kind == snapshots.ALLOC:
            if moment.live.pop(address, None) is None:
                raise self._contradiction(position, "a block is allocated that is neither freed nor there in the end")
        elif kind == snapshots.SEGMENT_ALLOC:
            if moment.segments.pop(address, (0,))[0] != num_bytes:
                raise self._contradiction(position, "a segment comes that is neither given back nor there in the end")
        elif kind == snapshots.SEGMENT_FREE:
            if address in moment.segments:
                raise self._contradiction(position, "a segment is given back that is there afterwards")
            moment.segments[address] = (num_bytes, num_bytes == SMALL_SEGMENT_BYTES, stream)
        elif kind == snapshots.SEGMENT_MAP:
            self._cut_out(moment, position, address, num_bytes)
        elif kind == snapshots.SEGMENT_UNMAP:
            self._put_in(moment, position, address, num_bytes, stream)

    def _cut_out(self, moment: Moment, position: int, address: int, num_bytes: int) -> None:
        around = [s for s, (size, _, _) in moment.segments.items() if s <= address and address + num_bytes <= s + size]
        if not around:
            raise self._contradiction(position, "pages are mapped that are neither unmapped nor there in the end")
        start = around[0]
        size, is_small, stream = moment.segments.pop(start)
        if address > start:
            moment.segments[start] = (address - start, is_small, stream)
        end = address + num_bytes
        if end < start + size:
            moment.segments[end] = (start + size - end, is_small, stream)

    def _put_in(self, moment: Moment, position: int, address: int, num_bytes: int, stream: int) -> None:
        end, is_small = address + num_bytes, self._was_small(position, address, num_bytes)
        for start, (size, also_small, also_stream) in list(moment.segments.items()):
            if start < end and address < start + size:
                raise self._contradiction(position, "pages are unmapped that are mapped afterwards")
            if (also_small, also_stream) == (is_small, stream) and end == start:
                del moment.segments[start]
                end += size
        for start, (size, also_small, also_stream) in list(moment.segments.items()):
            if (also_small, also_stream) == (is_small, stream) and start + size == address:
                address = start
        moment.segments[address] = (end - address, is_small, stream)

    def _was_small(self, position: int, address: int, num_bytes: int) -> bool:
        """The pool of pages that are unmapped: told by the last thing that happened in them."""
        for earlier in range(position - 1, -1, -1):
            kind, at, size, _, _ = self._events[earlier]
            if kind in (snapshots.ALLOC, snapshots.FREE_COMPLETED) and address <= at < address + num_bytes:
                return self._settings.rounded(size) <= SMALL_LIMIT_BYTES
            if kind == snapshots.SEGMENT_MAP and at < address + num_bytes and address < at + size:
                return size == SMALL_SEGMENT_BYTES
        return num_bytes % self._settings.large_segment_bytes != 0

    def _blocks(self, index: int, moment: Moment, tails: Mapping[int, int]) -> dict[int, list[tuple[int, int]]]:
        """Address and size of the live blocks of each segment."""
        inside: dict[int, list[tuple[int, int]]] = {start: [] for start in moment.segments}
        starts = sorted(moment.segments)
        for address, block, most in self._gaps(index, moment):
            start = starts[bisect_right(starts, address) - 1]
            inside[start].append((address, block + (tails.get(address, 0) if most else 0)))
        return inside

    def _gaps(self, index: int, moment: Moment) -> list[tuple[int, int, int]]:
        """Address of each live block, its size as far as it is known, and the largest tail besides; 0 if known."""
        addresses, starts = sorted(moment.live), sorted(moment.segments)
        segments, stops = [], []
        for position, address in enumerate(addresses):
            at = bisect_right(starts, address) - 1
            size, is_small, _ = moment.segments[starts[at]] if at >= 0 else (0, False, 0)
            segments.append(is_small)
            stops.append(min([starts[at] + size if at >= 0 else 0, *addresses[position + 1 : position + 2]]))
        freed, first_inside = self._later(index, addresses, stops)
        found = []
        for address, is_small, stop in zip(addresses, segments, stops, strict=True):
            block = self._settings.rounded(moment.live[address])
            gap, most = stop - address - block, 0
            if gap < 0:
                raise self._contradiction(index, f"the block at {address} lies in no segment or on another block")
            if address not in freed and address in self._sizes:
                block = self._sizes[address]
            elif gap and not is_small and not self._settings.expandable_segments:
                if gap <= sizes.MIB:
                    block += gap
                elif address in first_inside and first_inside[address] - address - block <= sizes.MIB:
                    block = first_inside[address] - address
                else:
                    most = max(0, min(sizes.MIB, gap - sizes.MIB - MIN_BLOCK_BYTES))
            found.append((address, block, most))
        return found

    def _later(self, index: int, addresses: Sequence[int], stops: Sequence[int]) -> tuple[set[int], dict[int, int]]:
        """Which live blocks die later, and the first allocation between each and the next one while it lives."""
        alive, freed = set(addresses), set()
        first_inside: dict[int, int] = {}
        for kind, address, _, _, _ in self._events[index:]:
            if kind == snapshots.FREE_COMPLETED and address in alive:
                alive.remove(address)
                freed.add(address)
            elif kind == snapshots.ALLOC:
                at = bisect_right(addresses, address) - 1
                if at >= 0 and addresses[at] in alive and addresses[at] < address < stops[at]:
                    first_inside.setdefault(addresses[at], address)
        return freed, first_inside

    def _expandable(
        self, index: int, moment: Moment, place: Callable[[int], int], inside: Mapping[int, Sequence[tuple[int, int]]]
    ) -> ExpandableAllocator:
        allocator = ExpandableAllocator(place=place, settings=self._settings)
        ranges: dict[tuple[int, bool], list[int]] = {}
        for start in sorted(moment.segments):
            _, is_small, stream = moment.segments[start]
            ranges.setdefault((stream, is_small), []).append(start)
        for (stream, is_small), starts in ranges.items():
            runs = [
                (start, moment.segments[start][0], [(a, a - start, block) for a, block in inside[start]])
                for start in starts
            ]
            lowest = self._lowest(index, stream, is_small, starts[0], sum(size for _, size, _ in runs))
            allocator.adopt_range(lowest, runs, is_small=is_small, stream=stream)
        return allocator

    def _lowest(self, index: int, stream: int, is_small: bool, start: int, mapped: int) -> int:
        """Where a range begins: the lowest address that is mapped in it until all of it is given up."""
        for position in range(index, len(self._events)):
            kind, address, num_bytes, also_stream, _ = self._events[position]
            if also_stream != stream or kind not in (snapshots.SEGMENT_MAP, snapshots.SEGMENT_UNMAP):
                continue
            is_unmap = kind == snapshots.SEGMENT_UNMAP
            small = self._was_small(position, address, num_bytes) if is_unmap else num_bytes == SMALL_SEGMENT_BYTES
            if small != is_small:
                continue
            mapped += -num_bytes if is_unmap else num_bytes
            start = min(start, address)
            if mapped <= 0:
                break
        return start

    def _contradiction(self, position: int, what: str) -> PlanError:
        event = self._events[position] if position < len(self._events) else None
        return PlanError(
            f"the recording contradicts itself: {what}",
            got="its end" if event is None else f"{event.kind} of {event.num_bytes} bytes at {event.address}",
            expected="every event from some moment on, none left out (skip_actions), and the segments of the end",
            hint="record again: torch.cuda.memory._record_memory_history(), without skip_actions",
        )
