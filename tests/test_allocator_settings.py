"""The text of PYTORCH_ALLOC_CONF: what torch reads in it, what is refused by name, and what it does to sizes."""

import ctypes
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from naive_allocator import Naive
from snugfit.errors import PlanError, UnsupportedError
from snugfit.memory.allocation.allocator_settings import DEFAULTS, AllocatorSettings, from_environment, parse
from snugfit.memory.allocator import simulate
from snugfit.sizes import GIB, MIB

LIBRARY = Path(torch.__file__).parent / "lib" / "libc10.so"
DIVISIONS_OF_TORCH = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm"


@pytest.fixture(scope="module")
def divisions_of_torch():
    """torch's own parser: the divisions of the sixteen intervals after it has read a text."""
    if not LIBRARY.exists() or not hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        pytest.skip("this torch has no parser of allocator settings without CUDA")
    look_up = getattr(ctypes.CDLL(str(LIBRARY)), DIVISIONS_OF_TORCH, None)
    if look_up is None:
        pytest.skip("libc10 does not export the divisions")
    look_up.restype, look_up.argtypes = ctypes.c_size_t, [ctypes.c_size_t]

    def read(text):
        try:
            torch._C._accelerator_setAllocatorSettings(text)
            return tuple(look_up(MIB << interval) for interval in range(16))
        finally:
            torch._C._accelerator_setAllocatorSettings("")

    return read


@pytest.mark.parametrize(
    "value",
    [
        "8",
        "1",
        "[64:8,256:4,1024:4,>:1]",
        "[256:1,512:2,1024:4,>:8]",
        "[>:4]",
        "[64:4]",
        " [ 64 : 4 ] ,",
        "[64:4,]",
        "[]",
        "[65536:4]",
        "[131072:4,>:8]",
        "[64:0,256:4]",
        "[1024:8,64:2]",
        "[>:4,64:8]",
        "[1:2,>:0]",
        "4,roundup_power2_divisions:[1024:8]",
        "[64:4],roundup_power2_divisions:2",
    ],
)
def test_divisions_are_read_as_torch_reads_them(divisions_of_torch, value):
    text = f"roundup_power2_divisions:{value}"
    assert (parse(text).roundup_power2_divisions or (0,) * 16) == _off(divisions_of_torch(text))


ENTRIES = st.lists(
    st.tuples(
        st.one_of(st.just(">"), st.integers(0, 18).map(lambda n: str(2**n))), st.sampled_from("0 1 2 4 8 64".split())
    ),
    max_size=5,
)


@given(st.lists(st.one_of(ENTRIES, st.sampled_from("1 2 4 8 16".split())), min_size=1, max_size=2))
@settings(max_examples=200)
def test_any_divisions_are_read_as_torch_reads_them(divisions_of_torch, values):
    shown = [v if isinstance(v, str) else f"[{','.join(f'{mib}:{d}' for mib, d in v)}]" for v in values]
    text = ",".join(f"roundup_power2_divisions:{value}" for value in shown)
    assert (parse(text).roundup_power2_divisions or (0,) * 16) == _off(divisions_of_torch(text))


def _off(divisions):
    return divisions if max(divisions) > 1 else (0,) * 16


def test_what_users_write_is_read():
    found = parse("expandable_segments:True, roundup_power2_divisions:[256:1,512:2,>:4], pinned_num_register_threads:8")
    assert found.expandable_segments
    assert found.roundup_power2_divisions == (1,) * 9 + (2,) + (4,) * 6
    assert found.without_effect == ("pinned_num_register_threads",)
    assert parse("large_segment_size_mb:32").large_segment_bytes == 32 * MIB
    assert parse("per_process_memory_fraction:0.5").limit_bytes(24 * GIB) == 12 * GIB
    assert parse("expandable_segments:True,expandable_segments:False") == parse("expandable_segments:False") == DEFAULTS
    assert parse("") == parse(" ") == parse("backend:native") == DEFAULTS
    assert parse("expandable_\tsegments : True").expandable_segments, "torch drops white space wherever it stands"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max_split_size_mb:128", "max_split_size_mb"),
        ("expandable_segments:True,garbage_collection_threshold:0.8", "garbage_collection_threshold"),
        ("graph_capture_record_stream_reuse:True", "graph_capture_record_stream_reuse"),
        ("throw_on_cudamalloc_oom:True", "throw_on_cudamalloc_oom"),
        ("backend:cudaMallocAsync", "backend"),
        ("max_split_size:128", "max_split_size"),
        ("Expandable_segments:True", "Expandable_segments"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(text, named):
    with pytest.raises(UnsupportedError) as caught:
        parse(text)
    assert caught.value.op == named
    assert named in caught.value.what
    assert all((caught.value.got, caught.value.expected, caught.value.hint))


@pytest.mark.parametrize(
    "key",
    [
        "max_non_split_rounding_mb:64",
        "pinned_use_background_threads:True",
        "pinned_use_cuda_host_register:True",
        "pinned_reserve_segment_size_mb:64",
        "release_lock_on_cudamalloc:True",
        "throw_on_cudamalloc_oom:False",
        "graph_capture_record_stream_reuse:False",
    ],
)
def test_what_changes_no_size_is_accepted_and_said(key):
    found = parse(key, source="PYTORCH_ALLOC_CONF")
    name = key.partition(":")[0]
    assert found.without_effect == (name,)
    assert found.sentences() == (f"settings without effect on memory of the device (PYTORCH_ALLOC_CONF): {name}",)


@pytest.mark.parametrize(
    "text",
    [
        "expandable_segments",
        "expandable_segments=True",
        "expandable_segments:true",
        "expandable_segments:",
        "expandable_segments:[True]",
        "expandable_segments:True roundup_power2_divisions:8",
        "expandable_segments:True;roundup_power2_divisions:8",
        "expandable_segments:True,,roundup_power2_divisions:8",
        ":True",
        "[64:4]",
        "roundup_power2_divisions:0",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:-8",
        "roundup_power2_divisions:8x",
        "roundup_power2_divisions:[63:4]",
        "roundup_power2_divisions:[64:3]",
        "roundup_power2_divisions:[64:4",
        "roundup_power2_divisions:64:4",
        "roundup_power2_divisions:[64]",
        "roundup_power2_divisions:[64:4 128:4]",
        "large_segment_size_mb:10",
        "per_process_memory_fraction:1.5",
        "per_process_memory_fraction:nan",
        "per_process_memory_fraction:half",
        "backend:other",
        "pinned_num_register_threads:many",
    ],
)
def test_what_torch_cannot_read_or_reads_as_something_else_is_an_error_that_shows_the_form(text):
    with pytest.raises(PlanError) as caught:
        parse(text)
    assert repr(text) in caught.value.got
    assert "expandable_segments:True" in caught.value.hint


def test_the_environment_is_read_under_its_old_names_too():
    assert from_environment({}) == DEFAULTS
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        found = from_environment({name: "expandable_segments:True"})
        assert (found.expandable_segments, found.source) == (True, name)
        assert name in found.sentences()[0]


def test_the_process_s_own_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "large_segment_size_mb:40")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert from_environment().large_segment_bytes == 40 * MIB


def test_two_variables_that_differ_are_refused_because_versions_of_torch_differ_in_which_one_counts():
    both = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:8"}
    with pytest.raises(PlanError, match="two variables"):
        from_environment(both)
    same = dict.fromkeys(both, "expandable_segments:True") | {"PYTORCH_CUDA_ALLOC_CONF": " expandable_segments: True"}
    assert from_environment(same).expandable_segments


def test_settings_in_effect_are_said_with_what_they_rest_on():
    text = "expandable_segments:True,roundup_power2_divisions:[256:1,>:4],per_process_memory_fraction:0.5"
    said = parse(f"{text},large_segment_size_mb:32", source="PYTORCH_ALLOC_CONF").sentences()
    assert "not verified" in said[0]
    assert "1 from 1.00 MiB, 4 from 512.00 MiB" in said[1]
    assert "32.00 MiB" in said[2]
    assert "50%" in said[3]
    assert DEFAULTS.sentences() == ()


def test_1200_bytes_in_four_divisions_become_1280():
    """The example in a comment of torch's allocator, times 2^20: up to 512 B x divisions nothing is rounded so."""
    four = AllocatorSettings(roundup_power2_divisions=(4,) * 16)
    assert four.rounded(1200 * MIB) == 1280 * MIB
    assert four.rounded(1024 * MIB) == 1024 * MIB
    assert four.rounded(1025 * MIB) == 1280 * MIB
    assert four.rounded(1792 * MIB + 1) == 2048 * MIB
    assert (four.rounded(1200), four.rounded(2048), four.rounded(2049)) == (1536, 2048, 2560), (
        "512 B x 4 or less: as ever"
    )


def test_divisions_are_those_of_the_interval_of_the_request():
    found = parse("roundup_power2_divisions:[1:1,2:2,4:4,8:8,>:0]")
    assert found.rounded(3 * MIB // 2 + 1) == 3 * MIB // 2 + 512, "1 division in 1..2 MiB: off"
    assert found.rounded(5 * MIB // 2) == 3 * MIB
    assert found.rounded(6 * MIB + 1) == 7 * MIB
    assert found.rounded(12 * MIB + 1) == 13 * MIB
    assert found.rounded(16 * MIB + 1) == 16 * MIB + 512


SIZES = st.one_of(st.integers(1, 5000), st.integers(1, 2**21), st.integers(1, 2**37))


@given(SIZES, st.lists(st.sampled_from([0, 1, 2, 4, 8, 16, 32, 64]), min_size=16, max_size=16))
def test_any_request_is_rounded_as_the_second_allocator_rounds_it(size, divisions):
    ours = AllocatorSettings(roundup_power2_divisions=tuple(divisions)).rounded(size)
    assert ours == Naive(divisions=divisions).rounded(size)
    assert ours % 512 == 0


def test_rounding_up_makes_requests_of_changing_size_share_a_block():
    """12 and 15 MiB in two divisions: both 16 MiB, so the second reuses the segment of the first."""
    sizes, events = [12 * MIB + 1, 15 * MIB], [1, -1, 2]
    assert simulate(sizes, events).peak_reserved_bytes == (14 + 16) * MIB
    rounded = simulate(sizes, events, settings=parse("roundup_power2_divisions:2"))
    assert (rounded.block_bytes, rounded.peak_reserved_bytes) == ([16 * MIB, 16 * MIB], 16 * MIB)


def test_the_large_segment_is_as_large_as_asked_for():
    assert simulate([2 * MIB], [1], settings=parse("large_segment_size_mb:64")).peak_reserved_bytes == 64 * MIB
    assert simulate([20 * MIB], [1], settings=parse("large_segment_size_mb:64")).peak_reserved_bytes == 20 * MIB
