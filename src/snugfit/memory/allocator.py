"""The CUDA caching allocator as a program: addresses, block sizes, segments and peaks of a stream of requests.

Entry points: ``CachingAllocator`` for single requests and ``simulate`` for a whole stream of births and deaths.
Default settings of torch 2.10 to 2.13 on one stream or several independent ones; nothing waits on events.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from snugfit import sizes
from snugfit.errors import DeviceMemoryError

# NOTE [Rules of the caching allocator] (c10/cuda/CUDACachingAllocator.cpp, default settings; the code cites these)
#   1. A request is rounded up to 512 B. Up to 1 MiB the rounded size belongs to the small pool, else to the large.
#   2. The smallest free block of the pool and stream that holds it is taken, the lowest address among equals.
#   3. The block is split if the rest is at least 512 B (small pool) or more than 1 MiB (large pool). The lower part
#      is handed out. A rest that is not split off belongs to the block: it counts as allocated.
#   4. With no such block a segment comes from the driver: 2 MiB for the small pool, 20 MiB for a large request
#      below 10 MiB, else the request rounded up to 2 MiB.
#   5. If the driver refuses, every segment that is one free block goes back to it, and it is asked once more.
#   6. A freed block joins the free neighbours of its segment. Segments go back only by rule 5 or ``empty_cache``.
MIN_BLOCK_BYTES = 512
SMALL_LIMIT_BYTES = sizes.MIB
SMALL_SEGMENT_BYTES = 2 * sizes.MIB
LARGE_SEGMENT_BYTES = 20 * sizes.MIB
OWN_SEGMENT_BYTES = 10 * sizes.MIB
SEGMENT_STEP_BYTES = 2 * sizes.MIB

# A free block is one int, its size above its address: the order of these ints is the order of rule 2.
_ADDRESS_BITS = 52
_ADDRESS_MASK = (1 << _ADDRESS_BITS) - 1
_NO_BLOCK = -1


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

    Known limitations: settings (rounding to divisions of powers of two, ``max_split_size``, expandable segments,
    garbage collection) and uses of a block on other streams are not followed.
    """

    def __init__(self, limit_bytes: int | None = None, place: Callable[[int], int] | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.num_flushes = 0
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

    def block_bytes(self, key: int) -> int:
        """Size of the block that a live allocation holds; 0 for an empty one."""
        return self._size[self._address_of[key]] if self._address_of[key] != _NO_BLOCK else 0

    def malloc(self, key: int, requested_bytes: int, stream: int = 0) -> int:
        """Give a block to a new allocation and return its address, or -1 for a request of 0 bytes.

        Raises:
            DeviceMemoryError: The limit does not hold one more segment, not even after giving back every segment
                without a live block; ``.requested_bytes``, ``.allocated_bytes``, ``.reserved_bytes``,
                ``.limit_bytes``.
        """
        if requested_bytes <= 0:
            self._address_of[key] = _NO_BLOCK
            return _NO_BLOCK
        size = (requested_bytes + MIN_BLOCK_BYTES - 1) & -MIN_BLOCK_BYTES  # rule 1
        is_small = size <= SMALL_LIMIT_BYTES
        lists = self._small_lists if is_small else self._large_lists
        free = lists.get(stream)
        if free is None:
            free = lists[stream] = []
        index = bisect_left(free, size << _ADDRESS_BITS)  # rule 2
        if index < len(free):
            code = free.pop(index)
            address, block = code & _ADDRESS_MASK, code >> _ADDRESS_BITS
            self._is_free.remove(address)
        else:
            block = segment_bytes(size)
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
            insort(free, rest << _ADDRESS_BITS | upper)
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
        if address == _NO_BLOCK:
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
            end = _NO_BLOCK
        lower = self._before[address]
        if lower in self._is_free:
            lower_size = self._size[lower]
            del free[bisect_left(free, lower_size << _ADDRESS_BITS | lower)]
            if end != _NO_BLOCK and self._before.get(end) == address:
                self._before[end] = lower
            del self._size[address], self._before[address], self._list_of[address]
            address, size = lower, lower_size + size
        self._size[address] = size
        self._is_free.add(address)
        insort(free, size << _ADDRESS_BITS | address)

    def empty_cache(self) -> None:
        """Give back to the driver every segment that is one free block."""
        for address in [a for a in self._is_free if self._segments.get(a) == self._size[a]]:
            self._forget(address, self._list_of[address])
            self.reserved_bytes -= self._segments.pop(address)

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
        end, before = address, _NO_BLOCK
        for key, offset, block in [*sorted(blocks, key=lambda item: item[1]), (_NO_BLOCK, size, 0)]:
            start = address + offset
            if start > end:
                self._size[end], self._before[end], self._list_of[end] = start - end, before, free
                self._is_free.add(end)
                insort(free, (start - end) << _ADDRESS_BITS | end)
                before = end
            if block:
                self._size[start], self._before[start], self._list_of[start] = block, before, free
                self._address_of[key] = before = start
                self.allocated_bytes += block
            end = start + block
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _forget(self, address: int, free: list[int]) -> int:
        """Drop a free block from all tables and return its size."""
        size = self._size.pop(address)
        del self._before[address], self._list_of[address]
        self._is_free.remove(address)
        del free[bisect_left(free, size << _ADDRESS_BITS | address)]
        return size

    def _new_segment(self, size: int, free: list[int], requested_bytes: int) -> int:
        if self.limit_bytes is not None and self.reserved_bytes + size > self.limit_bytes:
            self.empty_cache()  # rule 5
            self.num_flushes += 1
            if self.reserved_bytes + size > self.limit_bytes:
                raise DeviceMemoryError(
                    f"out of memory in the simulated allocator, at a request of {sizes.text(requested_bytes)}",
                    got=f"{sizes.text(self.allocated_bytes)} allocated, {sizes.text(self.reserved_bytes)} reserved, "
                    f"and a segment of {sizes.text(size)} more",
                    expected=f"reserved <= {sizes.text(self.limit_bytes)}",
                    hint="use a smaller micro-batch, or recompute more",
                    requested_bytes=requested_bytes,
                    allocated_bytes=self.allocated_bytes,
                    reserved_bytes=self.reserved_bytes,
                    limit_bytes=self.limit_bytes,
                )
        address = self._place(size)
        self._segments[address] = size
        self._size[address], self._before[address], self._list_of[address] = size, _NO_BLOCK, free
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return address

    def _place_on_top(self, size: int) -> int:
        address = self._top
        self._top += size
        return address


def segment_bytes(block_bytes: int) -> int:
    """Size of the segment that the driver is asked for when no free block holds ``block_bytes`` (rule 4)."""
    if block_bytes <= SMALL_LIMIT_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-block_bytes // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES


def simulate(request_bytes: Sequence[int], events: Sequence[int], *, limit_bytes: int | None = None) -> Simulation:
    """Run a stream of births and deaths through an empty allocator and return its peaks.

    Args:
        request_bytes: Requested size of each allocation.
        events: In order of time, ``i + 1`` for the birth of allocation ``i`` and ``-(i + 1)`` for its death.
        limit_bytes: See ``CachingAllocator``.

    Raises:
        DeviceMemoryError: See ``CachingAllocator.malloc``.
        KeyError: The death of an allocation that is not alive.
    """
    allocator = CachingAllocator(limit_bytes)
    malloc, free = allocator.malloc, allocator.free
    block_bytes = [0] * len(request_bytes)
    allocated, peak, peak_index = 0, 0, -1
    for index, event in enumerate(events):
        if event > 0:
            malloc(event, request_bytes[event - 1])
            now = allocator.allocated_bytes
            block_bytes[event - 1] = now - allocated
            allocated = now
            if now > peak:
                peak, peak_index = now, index
        else:
            free(-event)
            allocated = allocator.allocated_bytes
    return Simulation(peak, allocator.peak_reserved_bytes, peak_index, block_bytes)
