"""The CUDA caching allocator as a program: addresses, block sizes, segments and peaks of a stream of requests.

Entry points: ``CachingAllocator`` for single requests and ``simulate`` for a whole stream of births and deaths.
torch 2.6 to 2.13, one stream or several independent ones; expandable segments have a file of their own.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from snugfit import sizes
from snugfit.memory.allocation import allocator_settings, blocks
from snugfit.memory.allocation.allocator_settings import AllocatorSettings
from snugfit.memory.allocation.blocks import ADDRESS_BITS, ADDRESS_MASK, MIN_BLOCK_BYTES, NO_BLOCK, SMALL_LIMIT_BYTES
from snugfit.memory.allocation.expandable_segments import ExpandableAllocator

# NOTE [Rules of the caching allocator] (c10/cuda/CUDACachingAllocator.cpp, default settings; the code cites these)
#   1. A request is rounded up to 512 B, or by ``roundup_power2_divisions``. Up to 1 MiB the rounded size belongs to
#      the small pool, else to the large.
#   2. The smallest free block of the pool and stream that holds it is taken, the lowest address among equals.
#   3. The block is split if the rest is at least 512 B (small pool) or more than 1 MiB (large pool). The lower part
#      is handed out. A rest that is not split off belongs to the block: it counts as allocated.
#   4. With no such block a segment comes from the driver: 2 MiB for the small pool, 20 MiB for a large request
#      below 10 MiB, else the request rounded up to 2 MiB.
#   5. If the driver refuses, every segment that is one free block goes back to it, and it is asked once more.
#   6. A freed block joins the free neighbours of its segment. Segments go back only by rule 5 or ``empty_cache``.


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """What is held from the driver and not used, at one moment."""

    index: int
    "Index of the event after which it is so; -1 if nothing was ever held."
    reserved_bytes: int
    "Held from the driver."
    allocated_bytes: int
    "In live blocks, tails that were not split off included."
    releasable_bytes: int
    "Free, and a flush would give it back: in segments (with expandable segments: pages) without a live block."
    largest_free_bytes: int
    "Size of the largest free block, whatever its stream and pool."

    @property
    def free_bytes(self) -> int:
        """Free inside segments: ``releasable_bytes`` and ``fragment_bytes``."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def fragment_bytes(self) -> int:
        """Free beside live blocks: of use only to requests of the same pool and stream that fit."""
        return self.free_bytes - self.releasable_bytes


NOT_FRAGMENTED = Fragmentation(-1, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Simulation:
    """What ``simulate`` found out about one stream of events, in bytes."""

    peak_allocated_bytes: int
    "Largest sum of the live block sizes, tails that were not split off included."
    peak_reserved_bytes: int
    "Largest sum of the segments held from the driver."
    peak_index: int
    "Index of the event after which the allocated bytes first reached their peak; -1 if they never rose above 0."
    block_bytes: list[int]
    "Block size that each allocation got; 0 for an empty one or one that was never born."
    at_reserved_peak: Fragmentation = NOT_FRAGMENTED
    "The moment at which the reserved bytes first reached their peak."
    reserved_changes: tuple[tuple[int, int], ...] = ()
    "Index of each event that changed the reserved bytes, and what they were after it."

    def live_at_peak(self, events: Sequence[int]) -> set[int]:
        """Indices of the allocations alive at the peak; their ``block_bytes`` sum to ``peak_allocated_bytes``.

        Args:
            events: Those that were simulated.
        """
        live: set[int] = set()
        for event in events[: self.peak_index + 1]:
            if event > 0:
                live.add(event - 1)
            else:
                live.discard(-event - 1)
        return live


class CachingAllocator:
    """The allocator's state between requests. Allocations are named by integer keys of the caller.

    Args:
        limit_bytes: Most that the driver gives; None means as much as is asked for.
        place: ``(segment_bytes)`` to the address of a new segment; None puts each one above all before it. Only
            the order of addresses matters, and only among free blocks of one size.
        settings: Rounding and segment size; the other settings are not this class's.

    Known limitations: uses of a block on other streams are not followed.
    """

    def __init__(
        self,
        limit_bytes: int | None = None,
        place: Callable[[int], int] | None = None,
        settings: AllocatorSettings = allocator_settings.DEFAULTS,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._rounded = settings.rounded if settings.roundup_power2_divisions else None
        self._large_segment_bytes = settings.large_segment_bytes
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.num_flushes = 0
        self.releasable_bytes = 0
        "What ``empty_cache`` would give back."
        self._place = place or self._place_on_top
        self._top = 0
        self._segments: dict[int, int] = {}
        # Per block address: its size; the address of the block before it in its segment; the sorted list that it
        # is in while free, or is to return to (one list per stream and pool).
        self._size: dict[int, int] = {}
        self._before: dict[int, int] = {}
        self._list_of: dict[int, list[int]] = {}
        self._is_free: set[int] = set()
        self._small_lists: dict[int, list[int]] = {0: []}
        self._large_lists: dict[int, list[int]] = {0: []}
        self._address_of: dict[int, int] = {}

    @property
    def num_segments(self) -> int:
        """Number of segments held from the driver."""
        return len(self._segments)

    @property
    def segments(self) -> dict[int, int]:
        """Address to size of each segment held from the driver."""
        return dict(self._segments)

    @property
    def largest_free_bytes(self) -> int:
        """Size of the largest free block; 0 where there is none."""
        lists = (*self._small_lists.values(), *self._large_lists.values())
        return max((free[-1] >> ADDRESS_BITS for free in lists if free), default=0)

    def releasable(self) -> list[int]:
        """Addresses of the segments that are one free block."""
        return [address for address in self._is_free if self._segments.get(address) == self._size[address]]

    def block_bytes(self, key: int) -> int:
        """Size of the block that a live allocation holds; 0 for an empty one."""
        return self._size[self._address_of[key]] if self._address_of[key] != NO_BLOCK else 0

    def free_bytes_behind(self, key: int) -> int:
        """Size of the free block right behind a live allocation in its segment; 0 where there is none."""
        address = self._address_of[key]
        end = address + self._size.get(address, 0)
        return self._size[end] if self._before.get(end) == address and end in self._is_free else 0

    def malloc(self, key: int, requested_bytes: int, stream: int = 0) -> int:
        """Give a block to a new allocation and return its address, or -1 for a request of 0 bytes.

        Raises:
            DeviceMemoryError: The limit does not hold one more segment, not even after giving back every segment
                without a live block; ``.requested_bytes``, ``.allocated_bytes``, ``.reserved_bytes``,
                ``.limit_bytes``.
        """
        if requested_bytes <= 0:
            self._address_of[key] = NO_BLOCK
            return NO_BLOCK
        if self._rounded is None:
            size = (requested_bytes + MIN_BLOCK_BYTES - 1) & -MIN_BLOCK_BYTES  # rule 1
        else:
            size = self._rounded(requested_bytes)
        is_small = size <= SMALL_LIMIT_BYTES
        lists = self._small_lists if is_small else self._large_lists
        free = lists.get(stream)
        if free is None:
            free = lists[stream] = []
        index = bisect_left(free, size << ADDRESS_BITS)  # rule 2
        if index < len(free):
            code = free.pop(index)
            address, block = code & ADDRESS_MASK, code >> ADDRESS_BITS
            self._is_free.remove(address)
            if self._segments.get(address) == block:
                self.releasable_bytes -= block
        else:
            block = segment_bytes(size, self._large_segment_bytes)
            address = self._new_segment(block, free, requested_bytes)
        rest = block - size
        if rest > SMALL_LIMIT_BYTES or (is_small and rest):  # rule 3; sizes are multiples of 512
            self._size[address] = size
            upper, end = address + size, address + block
            if self._before.get(end) == address:
                self._before[end] = upper
            self._size[upper] = rest
            self._before[upper] = address
            self._list_of[upper] = free
            self._is_free.add(upper)
            insort(free, rest << ADDRESS_BITS | upper)
            block = size
        self._address_of[key] = address
        self.allocated_bytes = allocated = self.allocated_bytes + block
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated
        return address

    def free(self, key: int) -> None:
        """Take back the block of a live allocation and join it with its free neighbours.

        Raises:
            KeyError: No live allocation has this key.
        """
        address = self._address_of.pop(key)
        if address == NO_BLOCK:
            return
        size = self._size[address]
        self.allocated_bytes -= size
        free = self._list_of[address]
        upper = address + size
        if self._before.get(upper) == address:  # rule 6; a segment that merely lies next to ours has no block before
            if upper in self._is_free:
                size += self._forget(upper, free)
                end = address + size
                if self._before.get(end) == upper:
                    self._before[end] = address
            else:
                end = upper
        else:
            end = NO_BLOCK
        lower = self._before[address]
        if lower in self._is_free:
            lower_size = self._size[lower]
            del free[bisect_left(free, lower_size << ADDRESS_BITS | lower)]
            if end != NO_BLOCK and self._before.get(end) == address:
                self._before[end] = lower
            del self._size[address], self._before[address], self._list_of[address]
            address, size = lower, lower_size + size
        self._size[address] = size
        self._is_free.add(address)
        insort(free, size << ADDRESS_BITS | address)
        if self._segments.get(address) == size:
            self.releasable_bytes += size

    def empty_cache(self) -> None:
        """Give back to the driver every segment that is one free block."""
        for address in self.releasable():
            self._forget(address, self._list_of[address])
            self.reserved_bytes -= self._segments.pop(address)
        self.releasable_bytes = 0

    def adopt_segment(
        self, address: int, size: int, *, is_small: bool, blocks: Iterable[tuple[int, int, int]], stream: int = 0
    ) -> None:
        """Start from a segment that exists already, as in a recording that began late.

        Args:
            address: Address of the segment.
            size: Its size in bytes.
            is_small: Whether it belongs to the small pool.
            blocks: ``(key, offset, block_bytes)`` of its live blocks; what lies between them is free.
            stream: Stream that the segment belongs to.
        """
        lists = self._small_lists if is_small else self._large_lists
        free = lists.setdefault(stream, [])
        self._segments[address] = size
        self._top = max(self._top, address + size)
        self.reserved_bytes += size
        end, before = address, NO_BLOCK
        for key, offset, block in [*sorted(blocks, key=lambda item: item[1]), (NO_BLOCK, size, 0)]:
            start = address + offset
            if start > end:
                self._size[end], self._before[end], self._list_of[end] = start - end, before, free
                self._is_free.add(end)
                insort(free, (start - end) << ADDRESS_BITS | end)
                before = end
            if block:
                self._size[start], self._before[start], self._list_of[start] = block, before, free
                self._address_of[key] = before = start
                self.allocated_bytes += block
            end = start + block
        if address in self._is_free and self._size[address] == size:
            self.releasable_bytes += size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _forget(self, address: int, free: list[int]) -> int:
        """Drop a free block from all tables and return its size."""
        size = self._size.pop(address)
        del self._before[address], self._list_of[address]
        self._is_free.remove(address)
        del free[bisect_left(free, size << ADDRESS_BITS | address)]
        return size

    def _new_segment(self, size: int, free: list[int], requested_bytes: int) -> int:
        if self.limit_bytes is not None and self.reserved_bytes + size > self.limit_bytes:
            self.empty_cache()  # rule 5
            self.num_flushes += 1
            if self.reserved_bytes + size > self.limit_bytes:
                raise blocks.out_of_memory(
                    requested_bytes,
                    f"a segment of {sizes.text(size)}",
                    allocated_bytes=self.allocated_bytes,
                    reserved_bytes=self.reserved_bytes,
                    limit_bytes=self.limit_bytes,
                )
        address = self._place(size)
        self._segments[address] = size
        self._size[address], self._before[address], self._list_of[address] = size, NO_BLOCK, free
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return address

    def _place_on_top(self, size: int) -> int:
        address = self._top
        self._top += size
        return address


def segment_bytes(block_bytes: int, large_segment_bytes: int = allocator_settings.LARGE_SEGMENT_BYTES) -> int:
    """Size of the segment that the driver is asked for when no free block holds ``block_bytes`` (rule 4)."""
    if block_bytes <= SMALL_LIMIT_BYTES:
        return blocks.SMALL_SEGMENT_BYTES
    if block_bytes < blocks.OWN_SEGMENT_BYTES:
        return large_segment_bytes
    return -(-block_bytes // blocks.SEGMENT_STEP_BYTES) * blocks.SEGMENT_STEP_BYTES


def simulate(
    request_bytes: Sequence[int],
    events: Sequence[int],
    *,
    limit_bytes: int | None = None,
    settings: AllocatorSettings | None = None,
) -> Simulation:
    """Run a stream of births and deaths through an empty allocator and return its peaks.

    Args:
        request_bytes: Requested size of each allocation.
        events: In order of time, ``i + 1`` for the birth of allocation ``i`` and ``-(i + 1)`` for its death.
        limit_bytes: Most that the driver gives; None means as much as is asked for.
        settings: Of the allocator; None takes torch's defaults, not those of the environment.

    Raises:
        DeviceMemoryError: See ``CachingAllocator.malloc``.
        KeyError: The death of an allocation that is not alive.
    """
    settings = settings or allocator_settings.DEFAULTS
    kind = ExpandableAllocator if settings.expandable_segments else CachingAllocator
    allocator = kind(limit_bytes, settings=settings)
    malloc, free = allocator.malloc, allocator.free
    block_bytes = [0] * len(request_bytes)
    allocated, peak, peak_index, reserved, reserved_peak = 0, 0, -1, 0, 0
    changes: list[tuple[int, int]] = []
    at_reserved_peak = NOT_FRAGMENTED
    for index, event in enumerate(events):
        if event > 0:
            malloc(event, request_bytes[event - 1])
            now = allocator.allocated_bytes
            block_bytes[event - 1] = now - allocated
            allocated = now
            if now > peak:
                peak, peak_index = now, index
            if allocator.reserved_bytes != reserved:
                reserved = allocator.reserved_bytes
                changes.append((index, reserved))
                if reserved > reserved_peak:
                    reserved_peak = reserved
                    free_bytes = allocator.releasable_bytes, allocator.largest_free_bytes
                    at_reserved_peak = Fragmentation(index, reserved, now, *free_bytes)
        else:
            free(-event)
            allocated = allocator.allocated_bytes
    return Simulation(peak, reserved_peak, peak_index, block_bytes, at_reserved_peak, tuple(changes))
