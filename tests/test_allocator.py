"""The simulated CUDA caching allocator: each rule by hand, invariants, and a second allocator to compare with.

Recordings of real GPUs, to the byte, are in ``test_replay.py``.
"""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naive_allocator import FREE, Naive, OutOfMemory
from snugfit.errors import DeviceMemoryError
from snugfit.memory.allocation import fragmentation
from snugfit.memory.allocation.allocator_settings import AllocatorSettings
from snugfit.memory.allocation.expandable_segments import RANGE_BYTES, ExpandableAllocator
from snugfit.memory.allocator import NOT_FRAGMENTED, CachingAllocator, segment_bytes, simulate
from snugfit.sizes import KIB, MIB

EXPANDABLE = AllocatorSettings(expandable_segments=True)


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


@st.composite
def histories(draw):
    """What a program does: requests on two streams, frees, emptied caches; under any setting and on any device."""
    steps = st.one_of(
        st.tuples(st.just("malloc"), REQUESTS.filter(bool), st.sampled_from([0, 0, 0, 7])),
        st.tuples(st.just("free"), st.integers(0, 99)),
        st.tuples(st.just("free"), st.integers(0, 99)),
        st.tuples(st.sampled_from(["empty", *["malloc"] * 9]), st.integers(MIB, 12 * MIB), st.just(0)),
    )
    divisions = draw(st.one_of(st.none(), st.lists(st.sampled_from([0, 2, 4]), min_size=16, max_size=16)))
    limit = draw(st.one_of(st.none(), st.integers(20, 200).map(lambda mib: mib * MIB)))
    return draw(st.lists(steps, max_size=80)), divisions, limit, draw(st.integers(0, 9))


@pytest.mark.parametrize("is_expandable", [False, True], ids=["segments", "expandable segments"])
@given(histories())
def test_every_address_is_that_of_a_second_allocator_that_looks_at_every_block(is_expandable, history):
    steps, divisions, limit, seed = history
    slow = Naive(expandable=is_expandable, divisions=divisions, limit=limit, seed=seed)
    places, ask_driver = [], slow.driver_address
    slow.driver_address = lambda size: places.append(ask_driver(size)) or places[-1]
    rounding = AllocatorSettings(roundup_power2_divisions=tuple(divisions or ()))
    kind = ExpandableAllocator if is_expandable else CachingAllocator
    fast = kind(limit, lambda _: places.pop(0), rounding)
    live = []
    for key, (what, *arguments) in enumerate(steps):
        if what == "malloc":
            try:
                live.append((key, slow.malloc(*arguments)))
            except OutOfMemory:
                with pytest.raises(DeviceMemoryError):
                    fast.malloc(key, *arguments)
            else:
                assert fast.malloc(key, *arguments) == live[-1][1]
        elif what == "free" and live:
            name, address = live.pop(arguments[0] % len(live))
            slow.free(address)
            fast.free(name)
        elif what == "empty":
            slow.empty_cache()
            fast.empty_cache()
        free = [b["size"] for chain in slow.chains for b in chain["blocks"] if b["state"] == FREE]
        assert (fast.reserved_bytes, fast.allocated_bytes) == (slow.reserved, slow.allocated)
        assert fast.largest_free_bytes == max(free, default=0)
        assert not places
    held, releasable = slow.reserved, fast.releasable_bytes
    slow.empty_cache()
    assert releasable == held - slow.reserved


def test_expandable_small_requests_grow_by_pages_of_2_mib_and_large_ones_of_20():
    allocator = ExpandableAllocator()
    for key, requested, reserved in ((1, 512, 2), (2, MIB, 2), (3, MIB, 4), (4, 2 * MIB, 24), (5, 30 * MIB, 44)):
        allocator.malloc(key, requested)
        assert allocator.reserved_bytes == reserved * MIB
    assert allocator.block_bytes(5) == 30 * MIB, "18 MiB were free in the first page: 12 MiB were lacking, one page"


def test_expandable_blocks_are_always_split_and_join_into_one():
    allocator = ExpandableAllocator()
    start = allocator.malloc(1, 11 * MIB + 512)
    assert allocator.malloc(2, 5 * MIB) == start + 11 * MIB + 512
    assert allocator.block_bytes(1) == 11 * MIB + 512, "no tail"
    allocator.free(1)
    allocator.free(2)
    assert allocator.malloc(3, 20 * MIB) == start
    assert allocator.reserved_bytes == 20 * MIB


def test_expandable_search_prefers_a_block_that_cannot_grow():
    allocator = ExpandableAllocator()
    start = allocator.malloc(1, 8 * MIB)
    allocator.malloc(2, 5 * MIB)
    allocator.free(1)
    assert allocator.malloc(3, 6 * MIB) == start, "the 7 MiB at the end would fit more tightly, but can grow"


def test_a_request_beyond_the_memory_of_any_card_has_a_range_of_its_own():
    """An optimizer whose state is far too large is told apart by its numbers, not by an error of the simulation."""
    allocator = ExpandableAllocator()
    for key, size in enumerate((5 * MIB, RANGE_BYTES + 1, 7 * MIB)):
        allocator.malloc(key, size)
    assert allocator.reserved_bytes >= RANGE_BYTES + 12 * MIB
    for key in range(3):
        allocator.free(key)
    assert allocator.allocated_bytes == 0
    allocator.malloc(4, 3 * RANGE_BYTES)
    assert allocator.allocated_bytes == 3 * RANGE_BYTES


def test_expandable_flush_gives_back_the_pages_inside_free_blocks_and_fills_the_lowest_hole_first():
    allocator = ExpandableAllocator(limit_bytes=120 * MIB)
    start = allocator.malloc(1, 50 * MIB)
    allocator.malloc(2, 40 * MIB)
    assert allocator.reserved_bytes == 100 * MIB
    allocator.free(1)
    assert allocator.empty_cache() == [(start, 40 * MIB)], "two whole pages of two and a half; 10 MiB at the end less"
    assert allocator.reserved_bytes == 60 * MIB
    assert allocator.malloc(3, 30 * MIB) == start, "the hole of 40 MiB unmapped and 10 free holds it"
    assert allocator.reserved_bytes == 100 * MIB, "30 MiB of unmapped addresses: two pages"
    with pytest.raises(DeviceMemoryError, match=r"request of 40\.00 MiB"):
        allocator.malloc(4, 40 * MIB)
    allocator.malloc(5, 20 * MIB)
    assert allocator.allocated_bytes == 90 * MIB, "a refusal leaves the allocator usable"


def test_fragmentation_is_what_is_reserved_and_free_when_reserved_peaks():
    sizes = [12 * MIB, 3 * MIB, 4 * MIB, 18 * MIB, 512]
    simulation = simulate(sizes, [1, 2, 3, -1, -3, 4, -4, 5])
    peak = simulation.at_reserved_peak
    assert simulation.reserved_changes == ((0, 12 * MIB), (1, 32 * MIB), (5, 50 * MIB), (7, 52 * MIB))
    assert (peak.index, peak.reserved_bytes, peak.allocated_bytes) == (7, 52 * MIB, 3 * MIB + 512)
    assert peak.releasable_bytes == 30 * MIB, "the segments of 12 and 18 MiB"
    assert peak.fragment_bytes == 17 * MIB + 2 * MIB - 512, "beside the 3 MiB, and beside the 512 B"
    assert peak.largest_free_bytes == 18 * MIB
    assert simulate([], []).at_reserved_peak == NOT_FRAGMENTED


@given(streams(), st.booleans())
def test_reserved_is_allocated_and_releasable_and_fragments(stream, is_expandable):
    sizes, events, _ = stream
    simulation = simulate(sizes, events, settings=EXPANDABLE if is_expandable else None)
    peak = simulation.at_reserved_peak
    assert peak.reserved_bytes == simulation.peak_reserved_bytes
    assert peak.allocated_bytes + peak.releasable_bytes + peak.fragment_bytes == peak.reserved_bytes
    assert min(peak.releasable_bytes, peak.fragment_bytes) >= 0
    assert max((reserved for _, reserved in simulation.reserved_changes), default=0) == simulation.peak_reserved_bytes


def test_c093_a_device_that_live_bytes_fill_to_six_tenths_is_full_of_fragments():
    """Twelve batches of 20.1 to 21.2 MiB, each longer than the last; of each 11.5 MiB are kept in its place.

    What is kept leaves less than a batch in each segment of 22 MiB: live bytes reach 11 x 11.5 + 21.2 = 147.7 MiB,
    reserved ones 12 x 22 = 264, and a flush gives nothing back.
    """
    sizes, events = [], []
    for batch in range(12):
        sizes += [20 * MIB + (batch + 1) * MIB // 10, 11 * MIB + MIB // 2]
        events += [2 * batch + 1, -(2 * batch + 1), 2 * batch + 2]
    live = 11 * (11 * MIB + MIB // 2) + -(-sizes[-2] // 512) * 512
    device = live * 10 // 6
    simulation = simulate(sizes, events)
    assert live <= simulation.peak_allocated_bytes <= live + MIB, "the tail of the batch's block besides"
    assert simulation.peak_reserved_bytes == 12 * 22 * MIB > device
    with pytest.raises(DeviceMemoryError):
        simulate(sizes, events, limit_bytes=device)
    assert simulate(sizes, events, limit_bytes=device, settings=EXPANDABLE).peak_reserved_bytes == 160 * MIB
    said = " ".join(fragmentation.advice(sizes, events, simulation))
    for part in (
        "264.00 MiB",
        "expandable_segments:True",
        "160.00 MiB",
        "not together with max_split_size",
        "bucket",
    ):
        assert part in said
    assert fragmentation.advice(sizes[:1], [1], simulate(sizes[:1], [1])) == ()
