"""The caching allocator with ``expandable_segments:True``: one growing range of addresses for each stream and pool.

Entry point: ``ExpandableAllocator``, with the methods of ``CachingAllocator``. From torch's source, not verified by a
recording. Left out: a range that is full (torch reserves 9/8 of the device's memory for each).
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from snugfit import sizes
from snugfit.memory.allocation import allocator_settings, blocks
from snugfit.memory.allocation.allocator_settings import AllocatorSettings
from snugfit.memory.allocation.blocks import ADDRESS_BITS, ADDRESS_MASK, NO_BLOCK, SMALL_LIMIT_BYTES

# NOTE [Rules of expandable segments] (c10/cuda/CUDACachingAllocator.cpp; the code cites these)
#   1. Blocks are sized and pooled as without them, and always split down to 512 B.
#   2. Search: from the smallest free block that holds the request go on to the next as long as that one counts as
#      smaller; a free block in front of unmapped addresses counts as long as it could grow.
#   3. With no such block the lowest place is taken where free and unmapped neighbours together hold the rounded
#      request, and as many whole pages are mapped as it lacks: 2 MiB each for the small pool, 20 MiB for the large.
#      Each run of unmapped addresses is mapped for itself.
#   4. A mapped page joins its free neighbours. A freed block joins free ones, never unmapped addresses.
#   5. A flush unmaps the pages that lie wholly inside one free block; a range without a mapped page is given up.
#   6. If the driver has no page left, what was mapped stays, everything else is flushed, and the search for a place
#      starts once more.
RANGE_BYTES = 1 << 41
"More than 9/8 of any card's memory."

_LIVE, _FREE, _UNMAPPED = "live", "free", "unmapped"


@dataclass(slots=True)
class _Pool:
    """Free and unmapped blocks of one stream and one size class."""

    page_bytes: int
    free: list[int] = field(default_factory=list)
    "Size above address, sorted."
    unmapped: list[int] = field(default_factory=list)
    "Addresses, sorted."


class ExpandableAllocator:
    """The allocator's state between requests. Allocations are named by integer keys of the caller.

    Args:
        limit_bytes: Most that the driver gives; None means as much as is asked for.
        place: ``(range_bytes)`` to the address of a new range; None puts each where there is room.
        settings: Rounding and the size of a page of the large pool.

    Known limitations: uses of a block on other streams are not followed; a range never gets full.
    """

    def __init__(
        self,
        limit_bytes: int | None = None,
        place: Callable[[int], int] | None = None,
        settings: AllocatorSettings = allocator_settings.DEFAULTS,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.num_flushes = 0
        self.releasable_bytes = 0
        "What ``empty_cache`` would give back."
        self.mapped: list[tuple[int, int]] = []
        "Address and size of each run of pages mapped so far."
        self._settings = settings
        self._place = place or self._place_anywhere
        self._vacant: list[int] = []
        self._top = 0
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._ranges: dict[int, int] = {}
        self._range_starts: list[int] = []
        # Per block address: its size, its state, its pool, and the address of the block before it in its range.
        self._size: dict[int, int] = {}
        self._state: dict[int, str] = {}
        self._pool_of: dict[int, _Pool] = {}
        self._before: dict[int, int] = {}
        self._address_of: dict[int, int] = {}

    @property
    def largest_free_bytes(self) -> int:
        """Size of the largest free block, without what it could grow by; 0 where there is none."""
        return max((pool.free[-1] >> ADDRESS_BITS for pool in self._pools.values() if pool.free), default=0)

    def block_bytes(self, key: int) -> int:
        """Size of the block that a live allocation holds; 0 for an empty one."""
        return self._size[self._address_of[key]] if self._address_of[key] != NO_BLOCK else 0

    def malloc(self, key: int, requested_bytes: int, stream: int = 0) -> int:
        """Give a block to a new allocation and return its address, or -1 for a request of 0 bytes.

        Raises:
            DeviceMemoryError: The limit does not hold the pages, not even after a flush; facts as of
                ``CachingAllocator.malloc``.
        """
        if requested_bytes <= 0:
            self._address_of[key] = NO_BLOCK
            return NO_BLOCK
        size = self._settings.rounded(requested_bytes)  # rule 1
        pool = self._pool(stream, is_small=size <= SMALL_LIMIT_BYTES)
        index = bisect_left(pool.free, size << ADDRESS_BITS)  # rule 2
        if index < len(pool.free):
            reach = self._reach(pool.free[index])
            while index + 1 < len(pool.free) and self._reach(pool.free[index + 1]) < reach:
                index += 1
                reach = self._reach(pool.free[index])
            address = self._take_free(pool, index) & ADDRESS_MASK
        else:
            address = self._grow(pool, size, requested_bytes)
        rest = self._size[address] - size
        if rest:
            self._cut(address, size)
            self._set_free(address + size)
        self._state[address] = _LIVE
        self._address_of[key] = address
        self.allocated_bytes += size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return address

    def free(self, key: int) -> None:
        """Take back the block of a live allocation and join it with its free neighbours.

        Raises:
            KeyError: No live allocation has this key.
        """
        address = self._address_of.pop(key)
        if address != NO_BLOCK:
            self.allocated_bytes -= self._size[address]
            self._set_free(self._joined(address, _FREE))

    def empty_cache(self) -> list[tuple[int, int]]:
        """Give back every page inside a free block (rule 5); return address and size of each run of them."""
        unmapped = []
        for pool in self._pools.values():
            for code in list(pool.free):
                first, last = self._whole_pages(code, pool)
                if first >= last:
                    continue
                address, size = code & ADDRESS_MASK, code >> ADDRESS_BITS
                self._take_free(pool, bisect_left(pool.free, code))
                if last < address + size:
                    self._cut(address, last - address)
                    self._set_free(last)
                if first > address:
                    self._cut(address, first - address)
                    self._set_free(address)
                self.reserved_bytes -= last - first
                unmapped.append((first, last - first))
                self._set_unmapped(self._joined(first, _UNMAPPED))
                start = self._range_start(first)
                if self._size.get(start) == self._ranges[start] and self._state[start] == _UNMAPPED:
                    self._give_up(start, pool)
        return unmapped

    def adopt_range(
        self,
        start: int,
        runs: Iterable[tuple[int, int, Iterable[tuple[int, int, int]]]],
        *,
        is_small: bool,
        stream: int = 0,
    ) -> None:
        """Start from a range that exists already, as in a recording that began late.

        Args:
            start: Address of the range.
            runs: ``(address, size, blocks)`` of what is mapped, in order of addresses; ``blocks`` as
                ``(key, offset, block_bytes)`` of the live ones. What lies between is unmapped.
            is_small: Whether it belongs to the small pool.
            stream: Stream that the range belongs to.
        """
        pool = self._pool(stream, is_small=is_small)
        self._new_range(start, RANGE_BYTES, pool)
        rest = start
        for run, size, live in runs:
            if run > rest:
                self._cut(rest, run - rest)
            else:
                self._take_unmapped(run)
            self._cut(run, size)
            self._set_unmapped(run + size)
            self.reserved_bytes += size
            position = run
            for key, offset, block in sorted(live, key=lambda item: item[1]):
                if run + offset > position:
                    self._cut(position, run + offset - position)
                    self._set_free(position)
                if run + size > run + offset + block:
                    self._cut(run + offset, block)
                self._state[run + offset] = _LIVE
                self._address_of[key] = run + offset
                self.allocated_bytes += block
                position = run + offset + block
            if position < run + size:
                self._set_free(position)
            rest = run + size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _range_start(self, address: int) -> int:
        return self._range_starts[bisect_right(self._range_starts, address) - 1]

    def _whole_pages(self, code: int, pool: _Pool) -> tuple[int, int]:
        """Where the pages inside a free block begin and end."""
        address, size, page = code & ADDRESS_MASK, code >> ADDRESS_BITS, pool.page_bytes
        start = self._range_start(address)
        return start + -(-(address - start) // page) * page, start + (address + size - start) // page * page

    def _reach(self, code: int) -> int:
        address, size = code & ADDRESS_MASK, code >> ADDRESS_BITS
        end = address + size
        grows = self._before.get(end) == address and self._state[end] == _UNMAPPED
        return size + self._size[end] if grows else size

    def _grow(self, pool: _Pool, size: int, requested_bytes: int) -> int:
        """A free block of at least ``size``, taken out of its list, for which pages were mapped (rules 3 and 6)."""
        address = self._map_enough(pool, size)
        if address is None:
            self.empty_cache()
            self.num_flushes += 1
            address = self._map_enough(pool, size)
        if address is None:
            assert self.limit_bytes is not None
            raise blocks.out_of_memory(
                requested_bytes,
                f"pages of {sizes.text(pool.page_bytes)}",
                allocated_bytes=self.allocated_bytes,
                reserved_bytes=self.reserved_bytes,
                limit_bytes=self.limit_bytes,
            )
        return address

    def _map_enough(self, pool: _Pool, size: int) -> int | None:
        address = self._lowest_place(pool, size)
        if self._state[address] == _UNMAPPED:
            mapped = self._map(pool, address, min(size, self._size[address]))
            if mapped is None:
                return None
            address = mapped
        while self._size[address] < size:
            lacking = size - self._size[address]
            behind = address + self._size[address]
            mapped = self._map(pool, behind, min(lacking, self._size[behind]))
            if mapped is None:
                return None
            address = mapped
        self._unlist(address)
        return address

    def _lowest_place(self, pool: _Pool, size: int) -> int:
        for start in pool.unmapped:
            before = self._before[start]
            first = before if before != NO_BLOCK and self._state[before] == _FREE else start
            room, address = 0, first
            while self._state[address] != _LIVE:
                room += self._size[address]
                end = address + self._size[address]
                if room >= size:
                    return first
                if self._before.get(end) != address:
                    break
                address = end
        num_bytes = max(RANGE_BYTES, -(-size // pool.page_bytes) * pool.page_bytes)
        start = self._place(num_bytes)
        self._new_range(start, num_bytes, pool)
        return start

    def _map(self, pool: _Pool, address: int, num_bytes: int) -> int | None:
        """Map pages at the start of an unmapped block; the address of the free block that they belong to then."""
        pages = -(-num_bytes // pool.page_bytes) * pool.page_bytes
        if self.limit_bytes is not None and self.reserved_bytes + pages > self.limit_bytes:
            return None
        self._take_unmapped(address)
        if pages < self._size[address]:
            self._cut(address, pages)
            self._set_unmapped(address + pages)
        self.reserved_bytes += pages
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self.mapped.append((address, pages))
        address = self._joined(address, _FREE)  # rule 4
        self._set_free(address)
        return address

    def _joined(self, address: int, state: str) -> int:
        """Join a block that is in no list with its neighbours in a state, and return the address of the whole."""
        end = address + self._size[address]
        if self._before.get(end) == address and self._state[end] == state:
            self._swallow(address, end)
        before = self._before[address]
        if before != NO_BLOCK and self._state[before] == state:
            self._unlist(before)
            self._merge(before, address)
            address = before
        return address

    def _swallow(self, address: int, following: int) -> None:
        self._unlist(following)
        self._merge(address, following)

    def _merge(self, address: int, following: int) -> None:
        end = following + self._size[following]
        if self._before.get(end) == following:
            self._before[end] = address
        self._size[address] += self._size.pop(following)
        self._state.pop(following, None)
        del self._before[following], self._pool_of[following]

    def _unlist(self, address: int) -> None:
        pool = self._pool_of[address]
        if self._state[address] == _FREE:
            self._take_free(pool, bisect_left(pool.free, self._size[address] << ADDRESS_BITS | address))
        else:
            del pool.unmapped[bisect_left(pool.unmapped, address)]

    def _cut(self, address: int, size: int) -> None:
        """Cut a block in two; the upper part is in no list yet."""
        upper, end = address + size, address + self._size[address]
        if self._before.get(end) == address:
            self._before[end] = upper
        self._size[address], self._size[upper] = size, end - upper
        self._before[upper], self._pool_of[upper] = address, self._pool_of[address]

    def _set_free(self, address: int) -> None:
        self._state[address] = _FREE
        pool, code = self._pool_of[address], self._size[address] << ADDRESS_BITS | address
        insort(pool.free, code)
        first, last = self._whole_pages(code, pool)
        if last > first:
            self.releasable_bytes += last - first

    def _take_free(self, pool: _Pool, index: int) -> int:
        code = pool.free.pop(index)
        first, last = self._whole_pages(code, pool)
        if last > first:
            self.releasable_bytes -= last - first
        return code

    def _set_unmapped(self, address: int) -> None:
        self._state[address] = _UNMAPPED
        insort(self._pool_of[address].unmapped, address)

    def _take_unmapped(self, address: int) -> None:
        pool = self._pool_of[address]
        del pool.unmapped[bisect_left(pool.unmapped, address)]

    def _pool(self, stream: int, *, is_small: bool) -> _Pool:
        pool = self._pools.get((stream, is_small))
        if pool is None:
            page = blocks.SMALL_SEGMENT_BYTES if is_small else self._settings.large_segment_bytes
            pool = self._pools[stream, is_small] = _Pool(page)
        return pool

    def _new_range(self, start: int, num_bytes: int, pool: _Pool) -> None:
        self._top = max(self._top, start + num_bytes)
        self._ranges[start] = self._size[start] = num_bytes // pool.page_bytes * pool.page_bytes
        insort(self._range_starts, start)
        self._before[start], self._pool_of[start] = NO_BLOCK, pool
        self._set_unmapped(start)

    def _give_up(self, start: int, pool: _Pool) -> None:
        self._take_unmapped(start)
        if self._ranges[start] <= RANGE_BYTES:
            self._vacant.append(start)
        del self._ranges[start], self._range_starts[bisect_left(self._range_starts, start)]
        del self._size[start], self._state[start], self._pool_of[start], self._before[start]

    def _place_anywhere(self, num_bytes: int) -> int:
        return self._vacant.pop() if self._vacant and num_bytes <= RANGE_BYTES else self._top
