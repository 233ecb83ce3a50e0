"""The simulated CUDA caching allocator: each rule by hand, invariants, and recordings of real GPUs to the byte."""

import gzip
import json
from bisect import bisect_right
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snugfit.errors import DeviceMemoryError
from snugfit.memory.allocator import CachingAllocator, segment_bytes, simulate
from snugfit.sizes import KIB, MIB

TRACES = Path(__file__).resolve().parents[1].parent / "shared" / "groundtruth" / "traces"
SEGMENT_ALLOC, SEGMENT_FREE, ALLOC, FREED = 3, 4, 0, 2


@pytest.mark.parametrize(
    ("requested", "block"), [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB - 1, MIB), (MIB, MIB)]
)
def test_a_request_is_rounded_up_to_512_bytes(requested, block):
    allocator = CachingAllocator()
    assert allocator.malloc(1, requested) == 0
    assert allocator.block_bytes(1) == allocator.allocated_bytes == block


def test_an_empty_request_gets_no_block_and_can_be_freed():
    allocator = CachingAllocator()
    assert allocator.malloc(1, 0) == -1
    assert (allocator.block_bytes(1), allocator.allocated_bytes, allocator.num_segments) == (0, 0, 0)
    allocator.free(1)


@pytest.mark.parametrize(
    ("requested", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_a_segment_has_the_size_that_its_first_request_asks_for(requested, segment):
    allocator = CachingAllocator()
    allocator.malloc(1, requested)
    assert allocator.reserved_bytes == segment
    assert segment_bytes(allocator.block_bytes(1)) == segment


def test_small_and_large_requests_never_share_a_segment():
    allocator = CachingAllocator()
    allocator.malloc(1, 2 * MIB)
    allocator.malloc(2, MIB)
    assert (allocator.num_segments, allocator.reserved_bytes) == (2, 22 * MIB)


def test_streams_never_share_a_segment():
    allocator = CachingAllocator()
    allocator.malloc(1, 4 * MIB)
    allocator.malloc(2, 4 * MIB, stream=7)
    assert allocator.num_segments == 2


def test_the_smallest_free_block_that_holds_the_request_is_taken():
    allocator = CachingAllocator()
    for key, size in ((1, 12 * MIB), (2, 10 * MIB), (3, 14 * MIB)):
        allocator.malloc(key, size)
    for key in (1, 2, 3):
        allocator.free(key)
    assert allocator.malloc(4, 11 * MIB) == 0
    assert allocator.malloc(5, 10 * MIB) == 12 * MIB


def test_among_free_blocks_of_one_size_the_lowest_address_is_taken():
    allocator = CachingAllocator()
    for key in range(3):
        allocator.malloc(key, 10 * MIB)
    for key in (2, 0, 1):
        allocator.free(key)
    assert [allocator.malloc(key, 10 * MIB) for key in (3, 4, 5)] == [0, 10 * MIB, 20 * MIB]


def test_a_small_block_is_split_down_to_the_last_512_bytes():
    allocator = CachingAllocator()
    addresses = [allocator.malloc(key, MIB - 512) for key in range(2)] + [allocator.malloc(2, 1024)]
    assert addresses == [0, MIB - 512, 2 * MIB - 1024]
    assert (allocator.num_segments, allocator.allocated_bytes) == (1, 2 * MIB)


def test_a_large_block_is_split_only_if_more_than_1_mib_is_left():
    allocator = CachingAllocator()
    for key in (1, 2):
        allocator.malloc(key, 12 * MIB)
    allocator.free(1)
    allocator.malloc(3, 11 * MIB)
    assert allocator.block_bytes(3) == 12 * MIB, "exactly 1 MiB is left: not split, the tail belongs to the block"
    allocator.free(2)
    allocator.malloc(4, 11 * MIB - 512)
    assert allocator.block_bytes(4) == 11 * MIB - 512, "1 MiB and 512 B are left: split"


def test_allocated_depends_on_history():
    fresh = simulate([11 * MIB + 512], [1])
    reused = simulate([12 * MIB, 11 * MIB + 512], [1, -1, 2])
    assert fresh.block_bytes == [12 * MIB], "a segment of 12 MiB with a rest below 1 MiB"
    assert reused.block_bytes == [12 * MIB, 12 * MIB]
    assert simulate([10 * MIB + 512], [1]).block_bytes == [10 * MIB + 512], "the rest exceeds 1 MiB"


def test_a_freed_block_joins_both_free_neighbours_of_its_segment():
    allocator = CachingAllocator()
    for key in range(4):
        allocator.malloc(key, 5 * MIB)
    for key in (0, 2, 1):
        allocator.free(key)
    assert allocator.malloc(4, 15 * MIB) == 0
    assert allocator.num_segments == 1


def test_blocks_of_adjacent_segments_are_never_joined():
    allocator = CachingAllocator()
    for key in (1, 2):
        allocator.malloc(key, 10 * MIB)
    for key in (1, 2):
        allocator.free(key)
    assert allocator.malloc(3, 20 * MIB) == 20 * MIB
    assert allocator.reserved_bytes == 40 * MIB


def test_emptying_the_cache_releases_only_segments_without_a_live_block():
    allocator = CachingAllocator()
    for key, size in ((1, 12 * MIB), (2, 5 * MIB), (3, 5 * MIB), (4, 512)):
        allocator.malloc(key, size)
    for key in (1, 2, 4):
        allocator.free(key)
    allocator.empty_cache()
    assert allocator.segments == {12 * MIB: 20 * MIB}
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (20 * MIB, 34 * MIB)


def test_a_full_device_is_flushed_once_before_it_is_out_of_memory():
    allocator = CachingAllocator(limit_bytes=30 * MIB)
    allocator.malloc(1, 12 * MIB)
    allocator.malloc(2, 10 * MIB)
    allocator.free(1)
    allocator.malloc(3, 14 * MIB)
    assert (allocator.reserved_bytes, allocator.num_flushes) == (24 * MIB, 1)
    with pytest.raises(DeviceMemoryError, match=r"request of 11\.00 MiB") as caught:
        allocator.malloc(4, 11 * MIB)
    facts = caught.value
    assert (facts.requested_bytes, facts.allocated_bytes, facts.reserved_bytes, facts.limit_bytes) == (
        11 * MIB,
        24 * MIB,
        24 * MIB,
        30 * MIB,
    )
    allocator.free(3)
    allocator.malloc(4, 11 * MIB)
    assert allocator.allocated_bytes == 21 * MIB, "a refusal leaves the allocator usable"


def test_the_peak_is_where_allocated_first_reached_its_maximum():
    sizes, events = [4 * MIB, 3 * MIB, 3 * MIB, 1 * MIB], [1, 2, -1, 3, -2, 4, -3, -4, 1]
    simulation = simulate(sizes, events)
    assert (simulation.peak_allocated_bytes, simulation.peak_index) == (7 * MIB, 1)
    assert simulation.live_at_peak(events) == {0, 1}
    assert simulation.peak_reserved_bytes == 22 * MIB
    assert simulate([], []).peak_index == -1


def test_freeing_what_is_not_alive_is_an_error():
    with pytest.raises(KeyError):
        simulate([512], [1, -1, -1])


REQUESTS = st.one_of(
    st.integers(0, 4 * KIB),
    st.integers(1, 4).map(lambda n: n * MIB // 2),
    st.integers(MIB - 600, 12 * MIB),
    st.integers(9, 40).map(lambda n: n * MIB + 512),
)


@st.composite
def streams(draw):
    sizes = draw(st.lists(REQUESTS, min_size=1, max_size=40))
    order = draw(st.lists(st.tuples(st.booleans(), st.integers(0, 39)), min_size=len(sizes), max_size=len(sizes)))
    events, alive = [], []
    for index, (dies, which) in enumerate(order):
        events.append(index + 1)
        alive.append(index + 1)
        if dies:
            events.append(-alive.pop(which % len(alive)))
    return sizes, events, alive


@given(streams())
def test_blocks_never_overlap_and_every_byte_is_accounted_for(stream):
    sizes, events, alive = stream
    allocator, live = CachingAllocator(), {}
    for event in events:
        if event < 0:
            allocator.free(-event)
            live.pop(-event, None)
        elif (address := allocator.malloc(event, sizes[event - 1])) >= 0:
            live[event] = (address, allocator.block_bytes(event))
        spans = sorted(live.values())
        assert all(a + size <= b for (a, size), (b, _) in pairwise(spans))
        assert all(any(s <= a and a + n <= s + size for s, size in allocator.segments.items()) for a, n in spans)
        assert allocator.allocated_bytes == sum(size for _, size in spans)
        assert allocator.reserved_bytes == sum(allocator.segments.values()) >= allocator.allocated_bytes
        assert all(size - sizes[key - 1] <= MIB for key, (_, size) in live.items())
    for key in alive:
        allocator.free(key)
    assert allocator.allocated_bytes == 0
    allocator.empty_cache()
    assert (allocator.num_segments, allocator.reserved_bytes) == (0, 0), "all blocks joined to whole segments"


@given(streams())
def test_block_sizes_at_the_peak_sum_to_peak_allocated(stream):
    sizes, events, _ = stream
    simulation = simulate(sizes, events)
    live = simulation.live_at_peak(events)
    assert sum(simulation.block_bytes[index] for index in live) == simulation.peak_allocated_bytes
    assert simulation.peak_reserved_bytes >= simulation.peak_allocated_bytes


@given(streams())
def test_a_limit_of_peak_reserved_is_enough_and_less_than_the_live_bytes_is_not(stream):
    sizes, events, _ = stream
    simulation = simulate(sizes, events)
    assert simulate(sizes, events, limit_bytes=simulation.peak_reserved_bytes or 1) == simulation
    live, most = 0, 0
    for event in events:
        rounded = -(-sizes[abs(event) - 1] // 512) * 512
        live += rounded if event > 0 else -rounded
        most = max(most, live)
    if most:
        with pytest.raises(DeviceMemoryError):
            simulate(sizes, events, limit_bytes=most - 1)


@pytest.mark.skipif(not TRACES.is_dir(), reason="the recordings of real GPUs are not on this machine (../shared)")
@pytest.mark.parametrize("path", sorted(TRACES.glob("*.json.gz")), ids=lambda path: path.name.split(".")[0])
def test_a_recording_of_a_real_gpu_is_reproduced_address_by_address(path):
    trace = json.loads(gzip.decompress(path.read_bytes()))
    announced: list[tuple[int, int]] = []

    def place(size: int) -> int:
        address, recorded = announced.pop(0)
        assert size == recorded, "a new segment has the recorded size"
        return address

    allocator = _start_of(trace, CachingAllocator(place=place))
    assert allocator.reserved_bytes == trace["checks"]["start_reserved"]
    released: set[int] = set()
    for kind, address, size, stream in trace["events"]:
        if kind == SEGMENT_FREE:
            if not released:
                held = allocator.segments
                allocator.empty_cache()
                released = set(held) - set(allocator.segments)
            released.remove(address)
            continue
        assert not released, "the recording released as many segments as the simulator"
        if kind == SEGMENT_ALLOC:
            announced.append((address, size))
        elif kind == ALLOC:
            assert allocator.malloc(address, size, stream) == address
        elif kind == FREED:
            allocator.free(address)
    assert not announced, "each recorded segment was needed"
    assert allocator.peak_reserved_bytes == trace["checks"]["peak_reserved"]
    assert allocator.reserved_bytes == trace["checks"]["end_reserved"]
    assert allocator.allocated_bytes == trace["checks"]["end_allocated_from_segments"]


def _start_of(trace: dict[str, Any], allocator: CachingAllocator) -> CachingAllocator:
    """The allocator's state when the recording began: the final segments with the recorded events undone."""
    segments = {address: (size, bool(large), stream) for address, size, large, stream, _ in trace["final_segments"]}
    for kind, address, size, stream in reversed(trace["events"]):
        if kind == SEGMENT_ALLOC:
            del segments[address]
        elif kind == SEGMENT_FREE:
            segments[address] = (size, size != 2 * MIB, stream)
    live = {address: -(-size // 512) * 512 for address, size in trace["initial_live"]}
    blocks = {address: live[address] + tail for address, tail in _tails(trace, live, segments).items()}
    for start, (size, large, stream) in segments.items():
        inside = [(a, a - start, blocks[a]) for a in live if start <= a < start + size]
        allocator.adopt_segment(start, size, is_small=not large, blocks=inside, stream=stream)
    return allocator


def _tails(trace: dict[str, Any], live: dict[int, int], segments: dict[int, tuple[int, bool, int]]) -> dict[int, int]:
    """Bytes behind each first block that belong to it: known for survivors, else read from the gap behind.

    Blocks of the large pool exceed 1 MiB, so a smaller gap is a tail. A larger gap may be a tail and a free block;
    the first allocation made in it while the block lives shows where the free block begins.
    """
    addresses, starts = sorted(live), sorted(segments)
    freed = {event[1] for event in trace["events"] if event[0] == FREED}
    survivors = {
        start + offset: size
        for start, _, _, _, blocks in trace["final_segments"]
        for offset, size, _, active in blocks
        if active and start + offset in live and start + offset not in freed
    }
    first_in_gap: dict[int, int] = {}
    dead: set[int] = set()
    for kind, address, _, _ in trace["events"]:
        before = addresses[bisect_right(addresses, address) - 1] if addresses and address > addresses[0] else None
        if kind == FREED:
            dead.add(address)
        elif kind == ALLOC and before is not None and before not in dead:
            first_in_gap.setdefault(before, address)
    tails = {}
    for index, address in enumerate(addresses):
        start = starts[bisect_right(starts, address) - 1]
        size, large, _ = segments[start]
        following = min(start + size, *addresses[index + 1 : index + 2] or [start + size])
        end = address + live[address]
        reused = first_in_gap.get(address, following)
        tail = (reused if reused < following else following) - end
        tails[address] = tail if large and tail <= MIB else 0
        if address in survivors:
            tails[address] = survivors[address] - live[address]
    return tails
