"""Recordings of the allocator replayed: those of real GPUs, our own, and any that a second allocator makes.

``recordings/`` holds small event lists of our own making; what each must give is written here by hand.
"""

import gzip
import json
import os
import pickle
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from naive_allocator import Naive, OutOfMemory
from snugfit import cli
from snugfit.errors import PlanError, UnsupportedError
from snugfit.memory.replay import pickles, replaying, snapshots
from snugfit.sizes import MIB

RECORDINGS = Path(__file__).parent / "recordings"
TRACES = Path(__file__).resolve().parents[1].parent / "shared" / "groundtruth" / "traces"
COUNTS = ("reuses", "segments", "releases", "live_blocks")


def write(path, document, protocol=None):
    path.write_bytes(pickle.dumps(document, protocol))
    return path


def replay_of(document, device_index=None):
    recording = snapshots._of_snapshot(document, "the snapshot", device_index)
    return replaying.replay(recording)


def is_exact(found):
    return all(getattr(found, name) == getattr(found, f"{name}_matched") for name in COUNTS) and found.matched


@pytest.mark.skipif(not TRACES.is_dir(), reason="the recordings of real GPUs are not on this machine (../shared)")
@pytest.mark.parametrize("path", sorted(TRACES.glob("*.json.gz")), ids=lambda path: path.name.split(".")[0])
def test_a_recording_of_a_real_gpu_is_reproduced_address_by_address(path):
    trace = json.loads(gzip.decompress(path.read_bytes()))
    found = replaying.replay(snapshots.read(path))
    assert is_exact(found)
    assert found.label == "replay-exact"
    assert found.events == found.compared_events == len(trace["events"])
    assert found.segments == trace["event_counts"].get("segment_alloc", 0)
    assert found.reuses + found.segments == trace["event_counts"]["alloc"]
    assert found.peak_reserved_bytes == found.recorded_peak_reserved_bytes == trace["checks"]["peak_reserved"]


@pytest.mark.skipif(not TRACES.is_dir(), reason="the recordings of real GPUs are not on this machine (../shared)")
@pytest.mark.parametrize("start", [0.3, 0.7])
def test_a_recording_of_a_real_gpu_that_begins_later_is_reproduced_too(start):
    """A ring buffer that was full has lost the events before: the start state follows from those that are left."""
    trace = json.loads(gzip.decompress((TRACES / "cs336_2p7b_ctx128_trainstep_fp32_kkaitlyn.json.gz").read_bytes()))
    whole = snapshots._of_event_list(trace, "trace", None)
    kept = whole.events[int(len(whole.events) * start) :]
    assert is_exact(replaying.replay(replace(whole, events=kept)))


# What each recording of ours does, and what must come out, by hand (MiB of reserved memory at the peak).
BY_HAND = {
    # 3 MiB and 1 KiB take a segment each (20, 2); 4 MiB go where the 3 were, 512 B behind the KiB.
    "first_step": {"events": 8, "reuses": 2, "segments": 2, "releases": 0, "live_blocks": 3, "peak": 22},
    # Of a segment of 20 MiB 3 and 4 are live; the 3 are freed and 2 put there, 3.5 behind the 4.
    "late_start": {"events": 4, "reuses": 2, "segments": 0, "releases": 0, "live_blocks": 3, "peak": 20},
    # 12 and 14 MiB, both given back, then 10.
    "flush": {"events": 12, "reuses": 0, "segments": 3, "releases": 2, "live_blocks": 1, "peak": 26},
    # 3 MiB, freed; 3 MiB on another stream take a segment of their own.
    "two_streams": {"events": 6, "reuses": 0, "segments": 2, "releases": 0, "live_blocks": 1, "peak": 40},
    # 3 MiB map a page of 20, 30 MiB one more, 1 KiB a page of 2; 2 MiB go where the 3 were.
    "expandable": {"events": 9, "reuses": 1, "segments": 3, "releases": 0, "live_blocks": 3, "peak": 42},
    # 12 MiB wait for another stream: the next 12 take a segment, those after that the freed one.
    "waiting_for_a_stream": {"events": 7, "reuses": 1, "segments": 2, "releases": 0, "live_blocks": 2, "peak": 24},
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_recording_of_our_own_gives_what_was_worked_out_by_hand(name):
    expected = dict(BY_HAND[name])
    found = replaying.replay(snapshots.read(RECORDINGS / f"{name}.json"))
    assert is_exact(found)
    assert found.recorded_peak_reserved_bytes == expected.pop("peak") * MIB
    assert {key: getattr(found, key) for key in expected} == expected


def test_every_recording_of_ours_has_its_expected_result():
    assert {path.stem for path in RECORDINGS.glob("*.json")} == set(BY_HAND)


REQUESTS = st.one_of(
    st.integers(1, 4096),
    st.integers(1, MIB + 600),
    st.integers(2 * MIB - 600, 12 * MIB),
    st.integers(9, 40).map(lambda n: n * MIB + 512),
)


@st.composite
def programs(draw):
    """A recording of a second allocator: any history, setting, device and beginning, in torch's own layout."""
    expandable = draw(st.booleans())
    divisions = draw(st.one_of(st.none(), st.lists(st.sampled_from([0, 2, 4]), min_size=16, max_size=16)))
    limit = draw(st.sampled_from([None, None, 150 * MIB, 300 * MIB]))
    naive = Naive(expandable=expandable, divisions=divisions, limit=limit, seed=draw(st.integers(0, 9)))
    live, waiting = [], []
    steps = draw(
        st.lists(st.tuples(st.integers(0, 99), REQUESTS, st.sampled_from([0, 0, 0, 7])), min_size=2, max_size=100)
    )
    begin = draw(st.integers(0, len(steps) - 1))
    for index, (what, size, stream) in enumerate(steps):
        if index == begin:
            naive.events.clear()
        if what < 55 or not live:
            try:
                live.append(naive.malloc(size, stream))
            except OutOfMemory:
                pass
        elif what < 90:
            naive.free(live.pop(what % len(live)))
        elif what < 94:
            waiting.append(live.pop(what % len(live)))
            naive.free(waiting[-1], wait=True)
        elif what < 97 and waiting:
            naive.complete(waiting.pop(0))
        elif what >= 98:
            naive.empty_cache()
    lost = draw(st.integers(0, max(0, len(naive.events) - 1)))
    if draw(st.booleans()):
        del naive.events[:lost]  # what a ring buffer that was full loses
    return naive


@given(programs())
@settings(max_examples=150)
def test_whatever_a_second_allocator_did_is_reproduced_from_its_snapshot(naive):
    if naive.events:
        assert is_exact(replay_of(naive.snapshot()))


@given(programs())
def test_a_snapshot_is_the_same_as_a_file_whatever_its_form(tmp_path_factory, naive):
    if not naive.events:
        return
    folder = tmp_path_factory.mktemp("snapshots")
    expected = replay_of(naive.snapshot())
    for protocol in (2, 3, 4, 5):
        document = naive.snapshot(frames=protocol > 3, pool_ids=protocol != 4)
        path = write(folder / "snapshot.pickle", document, protocol)
        assert replaying.replay(snapshots.read(path)) == expected
    (folder / "snapshot.pickle.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert replaying.replay(snapshots.read(folder / "snapshot.pickle.gz")) == expected
    (folder / "snapshot.json").write_text(json.dumps(document))
    assert replaying.replay(snapshots.read(folder / "snapshot.json")) == expected


def small_program(**options):
    """Segments of 20, 18 and 2 MiB; two reuses; the 18 are given back; three blocks are left."""
    naive = Naive(**options)
    first, second = naive.malloc(3 * MIB), naive.malloc(18 * MIB)
    naive.free(second)
    naive.malloc(4 * MIB)
    naive.free(first)
    naive.malloc(3 * MIB + 512)
    naive.empty_cache()
    naive.malloc(700)
    return naive


def test_a_changed_address_is_found_at_its_event_with_both_addresses():
    naive = Naive()
    naive.malloc(3 * MIB)
    right = naive.malloc(4 * MIB)
    wrong = right + 5 * MIB
    naive.malloc(700)
    document = naive.snapshot()
    large = next(s for s in document["segments"] if s["segment_type"] == "large")
    first, moved, rest = large["blocks"]
    free = {**rest, "address": right, "size": 5 * MIB}
    large["blocks"] = [first, free, {**moved, "address": wrong}, {**rest, "size": rest["size"] - 5 * MIB}]
    document["device_traces"][0][2]["addr"] = wrong
    found = replay_of(document)
    assert not found.matched
    difference = found.differences[0]
    assert (difference.index, difference.kind, difference.num_bytes) == (2, "alloc", 4 * MIB)
    assert (difference.recorded_address, difference.predicted_address) == (wrong, right)
    assert (found.reuses, found.reuses_matched, found.segments, found.segments_matched) == (1, 0, 2, 2)
    assert len(found.differences) == 1, "the replay goes on from what was recorded"
    assert found.compared_events == found.events == 5


class WorstFit(Naive):
    """An allocator with another rule: it takes the largest free block."""

    def search(self, size, stream, small):
        fitting = [
            (block["size"], block["address"], chain, block)
            for chain in self.chains
            if (chain["stream"], chain["small"]) == (stream, small)
            for block in chain["blocks"]
            if block["state"] == "inactive" and block["size"] >= size
        ]
        return max(fitting, key=lambda f: f[:2])[2:] if fitting else None


class LargeSegments(Naive):
    """An allocator with other segments: 32 MiB for large requests."""

    @staticmethod
    def segment_size(size):
        return max(32 * MIB, Naive.segment_size(size)) if size > MIB else 2 * MIB


class ShyFlush(Naive):
    """An allocator that keeps what is free of one segment when it is emptied."""

    def empty_cache(self):
        kept = [chain for chain in self.chains if chain["blocks"][0]["state"] == "inactive"][:1]
        self.chains = [chain for chain in self.chains if chain not in kept]
        super().empty_cache()
        self.chains += kept


@pytest.mark.parametrize(
    ("kind", "lacking"), [(WorstFit, "reuses"), (LargeSegments, "segments"), (ShyFlush, "releases")]
)
def test_an_allocator_with_another_rule_is_told_apart_by_what_does_not_match(kind, lacking):
    naive = kind()
    large = [naive.malloc(size * MIB) for size in (12, 14, 16, 18)]
    for address in large:
        naive.free(address)
    naive.malloc(11 * MIB)
    naive.malloc(3 * MIB)
    naive.empty_cache()
    naive.malloc(2 * MIB)
    found = replay_of(naive.snapshot())
    assert not found.matched
    if lacking == "releases":
        assert found.releases == found.releases_matched, "all that was given back was predicted, and more"
        assert "by the prediction alone" in found.differences[0].what
    else:
        assert getattr(found, f"{lacking}_matched") < getattr(found, lacking)


def test_a_tail_that_no_event_shows_is_chosen_so_that_it_contradicts_nothing():
    """When the recording begins, 5.5 MiB lie behind an old request of 11.5: a tail of 0.5 and 5 free, or 5.5 free?

    A request of 5.25 MiB then takes a block of 5.75 elsewhere. So 5.5 were not free.
    """
    naive = Naive()
    fitting = naive.malloc(23 * MIB // 4)
    naive.malloc(20 * MIB - 23 * MIB // 4)
    naive.free(naive.malloc(24 * MIB))
    first, second, _ = naive.malloc(12 * MIB), naive.malloc(5 * MIB), naive.malloc(7 * MIB)
    naive.free(first)
    old = naive.malloc(23 * MIB // 2)
    assert (old, naive.at(old)[1]["size"]) == (first, 12 * MIB)
    naive.free(second)
    naive.free(fitting)
    naive.events.clear()
    assert naive.malloc(21 * MIB // 4) == fitting
    naive.free(old)
    found = replay_of(naive.snapshot())
    assert is_exact(found)
    assert found.notes == ("tails of older blocks that follow only from where others were put: 1",)


def test_frees_that_wait_for_another_stream_keep_their_block_until_they_are_done():
    naive = Naive()
    address = naive.malloc(3 * MIB)
    naive.free(address, wait=True)
    assert naive.malloc(3 * MIB) != address
    naive.complete(address)
    assert naive.malloc(3 * MIB) == address
    waiting = naive.malloc(2 * MIB)
    naive.free(waiting, wait=True)
    assert is_exact(replay_of(naive.snapshot()))


def test_a_recording_without_completed_frees_takes_those_that_were_asked_for():
    naive = small_program()
    naive.events = [event for event in naive.events if event["action"] != "free_completed"]
    found = replay_of(naive.snapshot())
    assert is_exact(found)
    assert "free_completed" in found.notes[-1]


@pytest.mark.parametrize("left_out", ["alloc", "free_completed"])
def test_a_recording_that_lost_events_in_the_middle_is_refused(left_out):
    naive = small_program()
    del naive.events[next(i for i, e in enumerate(naive.events) if e["action"] == left_out)]
    with pytest.raises(PlanError, match="contradicts itself"):
        replay_of(naive.snapshot())


def test_private_pools_are_taken_from_the_recording_and_the_rest_is_predicted():
    naive = small_program()
    graph = small_program(base=0x7F10_0000_0000)
    document, private = naive.snapshot(), graph.snapshot()
    for entry in private["segments"]:
        entry["segment_pool_id"] = (1, 0)
    for entry in private["device_traces"][0]:
        entry["pool_id"] = (1, 0)
    own, theirs = document["device_traces"][0], private["device_traces"][0]
    document["device_traces"][0] = own[:5] + theirs + own[5:]
    document["segments"] += private["segments"]
    found, alone = replay_of(document), replay_of(naive.snapshot())
    assert is_exact(found)
    assert (found.reuses, found.segments) == (alone.reuses, alone.segments)
    assert found.peak_reserved_bytes > alone.peak_reserved_bytes
    assert "private pools" in found.notes[-1]


def test_one_of_several_devices_is_replayed_and_none_is_guessed():
    naive = small_program()
    document = naive.snapshot(device=1, devices=3)
    assert is_exact(replay_of(document)), "only one did anything"
    document["device_traces"][2] = document["device_traces"][1][:1]
    with pytest.raises(PlanError, match="several devices") as caught:
        replay_of(document)
    assert "--device-index" in caught.value.hint
    assert is_exact(replay_of(document, device_index=1))
    with pytest.raises(PlanError, match="nothing of device 0"):
        replay_of(document, device_index=0)


def test_out_of_memory_errors_and_flushes_before_them_are_followed():
    naive = Naive(limit=40 * MIB)
    kept = naive.malloc(2 * MIB)
    naive.free(naive.malloc(18 * MIB))
    with pytest.raises(OutOfMemory):
        naive.malloc(32 * MIB)
    naive.free(kept)
    found = replay_of(naive.snapshot())
    assert is_exact(found)
    assert found.num_ooms == 1
    assert "out-of-memory" in found.notes[-1]


@pytest.mark.parametrize(
    ("settings_given", "named"),
    [
        ({"max_split_size": 512 * MIB}, "max_split_size_mb"),
        ({"garbage_collection_threshold": 0.8}, "garbage_collection_threshold"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, "backend"),
    ],
)
def test_a_recording_under_settings_that_cannot_be_simulated_is_refused_by_name(settings_given, named):
    document = small_program().snapshot()
    document["allocator_settings"].update(settings_given)
    with pytest.raises(UnsupportedError, match=named):
        replay_of(document)


def test_segments_of_both_kinds_in_one_recording_are_refused_by_name():
    document = small_program().snapshot()
    document["segments"][0]["is_expandable"] = True
    with pytest.raises(UnsupportedError, match="mixes expandable segments"):
        replay_of(document)


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_hostile_pickle_is_refused_and_nothing_of_it_runs(tmp_path, protocol):
    touched = tmp_path / "touched"
    document = small_program().snapshot()
    document["segments"].append(Evil(touched))
    path = write(tmp_path / "evil.pickle", document, protocol)
    with pytest.raises(PlanError):
        snapshots.read(path)
    assert not touched.exists()


@pytest.mark.parametrize(
    "value",
    [print, Path("x"), {1, 2}, frozenset(), bytearray(b"x"), complex(1), Naive, ValueError("x"), slice(1), range(3)],
    ids=lambda value: type(value).__name__,
)
def test_a_pickle_of_anything_but_built_in_values_is_refused(value):
    for protocol in (2, 4, 5):
        with pytest.raises(PlanError, match="built-in values"):
            pickles.load(pickle.dumps({"segments": value}, protocol), "file")


def _text(word):
    return b"X" + struct.pack("<I", len(word)) + word.encode()


@pytest.mark.parametrize(
    ("name", "data"),
    {
        "persistent id": b"\x80\x02" + _text("x") + b"Q.",
        "extension registry": b"\x80\x02\x82\x01.",
        "out-of-band buffer": b"\x80\x05\x97.",
        "memory for a number that was never stored": b"\x80\x02]r\xff\xff\xff\x7f.",
        "text longer than the file": b"\x80\x04\x8d" + b"\xff" * 8 + b"x.",
        "number longer than the file": b"\x80\x02\x8b\xff\xff\xff\x7f.",
        "lists in lists": b"\x80\x02" + b"(" * 100000 + b"l" * 100000 + b".",
        "no value": b"\x80\x02.",
        "a mark too few": b"\x80\x02l.",
        "a key that cannot be one": b"\x80\x02}]K\x01s.",
        "a key of tuples in tuples": b"\x80\x04}N" + b"\x85" * 200000 + b"Ns.",
        "tuples in tuples": b"\x80\x04N" + b"\x85" * 200000 + b".",
        "a key that is a tuple": b"\x80\x04}K\x01\x85Ns.",
        "keys that are tuples": b"\x80\x04}(K\x01\x85Nu.",
        "a dictionary of a key that is a tuple": b"\x80\x04(K\x01\x85Nd.",
        "lists in lists by append": b"\x80\x04]" + b"]" * 100000 + b"a" * 100000 + b".",
        "dictionaries in dictionaries": b"\x80\x04}" + b"N}" * 100000 + b"s" * 100000 + b".",
        "a value that was never remembered": b"\x80\x04]h\x07a.",
        "an append to a number": b"\x80\x04K\x01K\x01a.",
        "protocol of the future": b"\x80\x09].",
        "only a beginning": b"\x80",
    }.items(),
)
def test_a_damaged_or_hostile_pickle_is_an_error_with_four_parts(name, data):
    with pytest.raises(PlanError) as caught:
        pickles.load(data, name)
    assert all((caught.value.got, caught.value.expected, caught.value.hint))


def test_lists_and_tuples_of_the_depth_of_a_snapshot_are_read():
    value = [{"a": ((1, 2), [3, {}], {"b": (4,)})}] * 3
    for protocol in (2, 3, 4, 5):
        assert pickles.load(pickle.dumps(value, protocol), "file") == value


@pytest.mark.parametrize("limit", ["MAX_VALUES", "MAX_OPCODES"])
def test_a_pickle_of_too_many_values_or_opcodes_is_refused_before_any_is_made(monkeypatch, limit):
    monkeypatch.setattr(pickles, limit, 100)
    monkeypatch.setattr(pickles._Reader, "load", lambda reader: pytest.fail("something was loaded"))
    for data in (b"\x80\x02](" + b"}" * 200 + b"e.", pickle.dumps(list(range(200)))):
        with pytest.raises(PlanError, match="too much to be read"):
            pickles.load(data, "file")


def test_a_pickle_that_repeats_one_value_too_often_is_refused(monkeypatch):
    monkeypatch.setattr(pickles, "MAX_OPCODES", 100)
    with pytest.raises(PlanError, match="too much to be read"):
        pickles.load(b"\x80\x04]\x94(" + b"h\x00" * 200 + b"e.", "file")


def test_a_json_document_of_too_many_values_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "MAX_JSON_VALUES", 100)
    monkeypatch.setattr(json, "loads", lambda data: pytest.fail("something was parsed"))
    (tmp_path / "many.json").write_text("[" + "[]," * 200 + "[]]")
    with pytest.raises(PlanError, match="too much to be read"):
        snapshots.read(tmp_path / "many.json")


def test_a_json_document_that_memory_does_not_hold_is_an_error_with_four_parts(tmp_path, monkeypatch):
    def parse(data):
        raise MemoryError

    monkeypatch.setattr(json, "loads", parse)
    (tmp_path / "large.json").write_text("{}")
    assert refused(tmp_path / "large.json")


def test_what_a_compressed_file_holds_is_limited_by_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "LEAST_LIMIT_BYTES", 1000)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b"{" + b" " * 1_000_000))
    with pytest.raises(PlanError, match="too large"):
        snapshots.read(tmp_path / "bomb.gz")


def test_segments_that_are_listed_twice_or_overlap_are_refused():
    document = small_program().snapshot()
    document["segments"].append(document["segments"][0])
    with pytest.raises(PlanError, match="two segments overlap"):
        replay_of(document)


def test_blocks_that_overlap_inside_of_a_segment_are_refused():
    document = json.loads((RECORDINGS / "first_step.json").read_text())
    segment = next(segment for segment in document["final_segments"] if len(segment[-1]) > 1)
    segment[-1][1][0] = segment[-1][0][0]
    with pytest.raises(PlanError, match="do not fill it"):
        snapshots._of_event_list(document, "file", None)


@pytest.mark.parametrize("text", ["x" * 100_000, "x" * 100_000 + ":1", "backend:" + "y" * 100_000])
def test_a_settings_text_of_any_length_is_shown_cut(text):
    document = small_program().snapshot()
    document["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = text
    with pytest.raises((PlanError, UnsupportedError)) as caught:
        replay_of(document)
    assert len(str(caught.value)) < 1500


def test_a_key_that_is_a_huge_number_is_no_crash():
    with pytest.raises(PlanError, match="no snapshot"):
        replay_of({10**5000: 1})


def refused(path):
    """Whether reading and replaying a file ends with an error; any but ours is raised."""
    try:
        replaying.replay(snapshots.read(path))
    except (PlanError, UnsupportedError) as error:
        return all((error.got, error.expected, error.hint))
    return False


def test_a_pickle_that_is_cut_is_refused_wherever_and_one_with_a_byte_changed_read_or_refused(tmp_path):
    data = pickle.dumps(small_program().snapshot())
    path = tmp_path / "snapshot.pickle"
    for position in range(0, len(data), 7):
        path.write_bytes(data[:position])
        assert refused(path)
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x41]) + data[position + 1 :])
        refused(path)


WRONG = {
    "segments": {"a": 1},
    "device_traces": 7,
    "allocator_settings": [1],
}


@pytest.mark.parametrize("key", WRONG)
def test_a_wrong_type_anywhere_is_named(key):
    document = small_program().snapshot()
    document[key] = WRONG[key]
    with pytest.raises(PlanError, match=key):
        replay_of(document)


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [
        ("event", "action", "dance"),
        ("event", "addr", "here"),
        ("event", "addr", -4),
        ("event", "addr", 2**63),
        ("event", "size", 1.5),
        ("event", "size", True),
        ("event", "size", -1),
        ("segment", "address", None),
        ("segment", "segment_type", "medium"),
        ("segment", "blocks", "none"),
        ("segment", "total_size", 5),
        ("segment", "segment_pool_id", (1, 2, 3)),
        ("block", "state", "asleep"),
        ("block", "state", ["x"]),
        ("segment", "segment_type", ["small"]),
        ("block", "size", 10**400),
    ],
)
def test_a_wrong_value_anywhere_is_an_error_with_four_parts(place, key, value):
    document = small_program().snapshot()
    first = document["segments"][0]
    {"event": document["device_traces"][0][0], "segment": first, "block": first["blocks"][0]}[place][key] = value
    with pytest.raises(PlanError) as caught:
        replay_of(document)
    assert all((caught.value.got, caught.value.expected, caught.value.hint))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("empty", b"", "is empty"),
        ("archive", b"PK\x03\x04....", "zip archive, as torch.save"),
        ("page", b"<!DOCTYPE html>", "no recording"),
        ("cut.json", b'{"format": "cuda-alloc', "no whole JSON"),
        ("deep.json", b"[" * 200000, "no whole JSON"),
        ("other.json", b'{"format": "cuda-allocator-trace v2"}', "another format"),
        ("list.json", b"[1, 2]", "a dictionary"),
        ("cut.gz", gzip.compress(b"x" * 1000, mtime=0)[:-20], "no whole gzip"),
        ("list.pickle", pickle.dumps([]), "without a history"),
        ("number.pickle", pickle.dumps(5), "a dictionary"),
        ("other.pickle", pickle.dumps({"model": 1}), "no snapshot"),
        ("idle.pickle", pickle.dumps({"segments": [], "device_traces": [[]]}), "no history"),
        ("none.pickle", pickle.dumps({"segments": [], "device_traces": []}), "no history"),
    ],
)
def test_a_file_that_is_no_recording_is_an_error_that_says_what_it_is(tmp_path, capsys, name, data, said):
    (tmp_path / name).write_bytes(data)
    assert cli.main(["replay", str(tmp_path / name)]) == cli.USER_ERROR
    message = capsys.readouterr().err
    assert said in message
    assert [line for line in message.splitlines() if line.startswith("hint: ")]


def test_a_file_that_is_too_large_or_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "MAX_FILE_BYTES", 1000)
    (tmp_path / "plain").write_bytes(b"\x80" * 1001)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b"{" + b" " * 2000))
    for name in ("plain", "bomb.gz"):
        with pytest.raises(PlanError, match="too large"):
            snapshots.read(tmp_path / name)


def test_the_command_prints_tables_or_one_document_and_says_by_its_status_whether_they_agree(tmp_path, capsys):
    naive = small_program()
    path = write(tmp_path / "snapshot.pickle", naive.snapshot())
    assert cli.main(["replay", str(path)]) == cli.DONE
    assert "agree (replay-exact)" in capsys.readouterr().out
    assert cli.main(["replay", str(path), "--json", "-o", str(tmp_path / "out.json")]) == cli.DONE
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "out.json").read_text())
    assert printed["events"] == len(naive.events)
    assert printed["reuses"] == printed["reuses_matched"] == 2
    assert printed["segments"] == printed["segments_matched"] == 3
    assert printed["peak_reserved_bytes"] == printed["recorded_peak_reserved_bytes"] == 38 * MIB
    assert printed["first_difference"] is None

    other = WorstFit()
    for address in [other.malloc(size * MIB) for size in (12, 14)]:
        other.free(address)
    chosen = other.malloc(11 * MIB)
    path = write(tmp_path / "other.pickle", other.snapshot())
    assert cli.main(["replay", str(path)]) == cli.PARTED == 1
    out = capsys.readouterr().out
    assert "recording part" in out
    assert f"{chosen:#x}" in out
    assert cli.main(["replay", str(path), "--json"]) == cli.PARTED
    first = json.loads(capsys.readouterr().out)["first_difference"]
    assert (first["index"], first["kind"], first["num_bytes"]) == (8, "alloc", 11 * MIB)
    assert first["recorded_address"] == chosen != first["predicted_address"]


def test_a_missing_file_and_a_folder_are_user_errors(tmp_path, capsys):
    for path in (tmp_path / "missing", tmp_path):
        assert cli.main(["replay", str(path)]) == cli.USER_ERROR
        assert "hint:" in capsys.readouterr().err
    with pytest.raises(PlanError, match="is a folder"):
        snapshots.read(tmp_path)
    assert cli.main(["replay", str(tmp_path / "missing")]) == cli.USER_ERROR
    assert f"there is no file {tmp_path / 'missing'}" in capsys.readouterr().err


PROGRAM = """
import sys, torch
torch.cuda.memory._record_memory_history(stacks="python")
torch.manual_seed(0)
side, kept = torch.cuda.Stream(), []
for size in torch.randint(1, 40_000_000, (200,)).tolist():
    kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    if len(kept) > 20:
        kept.pop(size % 20)
    if size % 7 == 0:
        with torch.cuda.stream(side):
            torch.empty(size // 2, dtype=torch.uint8, device="cuda")
    if size % 11 == 0:
        kept[0].record_stream(side)
    if size % 31 == 0:
        torch.cuda.empty_cache()
torch.cuda.memory._dump_snapshot(sys.argv[1])
"""


@pytest.mark.gpu
@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "roundup_power2_divisions:[1:4,8:2,>:8]"])
def test_what_this_gpu_does_is_reproduced_address_by_address(tmp_path, conf):
    variables = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": conf, "PYTORCH_ALLOC_CONF": conf}
    path = tmp_path / "snapshot.pickle"
    subprocess.run([sys.executable, "-c", PROGRAM, str(path)], env=variables, check=True, timeout=300)
    assert is_exact(replaying.replay(snapshots.read(path)))
