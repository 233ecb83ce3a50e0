"""The catalogue of cards and what becomes of a device that a user names."""

import json
import pickle
from importlib import resources
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snugfit import hardware, sizes
from snugfit.errors import PlanError
from tolerances import PEAK_RATE

FILE = json.loads(resources.files("snugfit").joinpath("gpus.json").read_text(encoding="utf-8"))
ROWS = {row["name"]: row for row in FILE["cards"]}
DTYPES = ("float32", "tf32", "float16", "bfloat16", "fp8")
FULL, HALF = "full", "half"

# Multiply-adds per SM and clock with accumulation in float32, from the vendor's architecture papers; the second key
# tells cards whose tensor cores run at the full rate from those where float32 accumulation halves it.
MULTIPLY_ADDS = {
    ((6, 0), FULL): (64,),
    ((6, 1), FULL): (128,),
    ((7, 0), FULL): (64, None, 512),
    ((7, 5), FULL): (64, None, 512),
    ((7, 5), HALF): (64, None, 256),
    ((8, 0), FULL): (64, 512, 1024, 1024),
    ((8, 6), FULL): (128, 256, 512, 512),
    ((8, 6), HALF): (128, 128, 256, 256),
    ((8, 9), FULL): (128, 256, 512, 512, 1024),
    ((8, 9), HALF): (128, 128, 256, 256, 512),
    ((9, 0), FULL): (128, 1024, 2048, 2048, 4096),
    ((10, 0), FULL): (128, 2048, 4096, 4096, 8192),
    ((12, 0), FULL): (128, 256, 512, 512, 1024),
    ((12, 0), HALF): (128, 128, 256, 256, 512),
}


def family(row):
    geforce = any(name.startswith("GeForce") for name in row["reported"])
    halved = geforce and row["capability"] >= [7, 5]
    return tuple(row["capability"]), HALF if halved or row["name"] in {"a10g", "l40"} else FULL


@pytest.mark.parametrize("name", ROWS)
def test_rates_are_the_dense_peaks_of_the_cards_sms_and_clock(name):
    row = ROWS[name]
    multiply_adds = dict(zip(DTYPES, MULTIPLY_ADDS[family(row)], strict=False))
    if name.startswith("gtx-16"):
        multiply_adds = {"float32": 64}
    expected = {
        dtype: 2 * row["sms"] * row["mhz"] * 1e6 * count / 1e12 for dtype, count in multiply_adds.items() if count
    }
    assert row["tflops"] == pytest.approx(expected, rel=PEAK_RATE)


def test_the_catalogue_goes_from_pascal_to_blackwell_and_has_at_least_forty_cards():
    names = hardware.devices()
    assert len(names) == len(set(names)) == len(ROWS) >= 40
    assert {hardware.resolve(name).compute_capability for name in names} >= {(6, 1), (7, 5), (8, 6), (9, 0), (10, 0)}
    assert {"rtx-3060-6gb", "rtx-3060-8gb", "rtx-3060-12gb", "gtx-1080-ti", "t4", "b200"} <= set(names)


def test_names_come_by_generation_and_then_by_memory():
    cards = [hardware.resolve(name) for name in hardware.devices()]
    keys = [(card.compute_capability, card.memory_bytes) for card in cards]
    assert keys == sorted(keys)


@pytest.mark.parametrize("name", ROWS)
def test_every_card_is_complete_and_names_its_source(name):
    card = hardware.resolve(name)
    assert card.name == name == name.lower()
    assert card.kind == "cuda"
    assert 100e9 < card.bandwidth < 10e12
    assert set(card.flops) <= set(DTYPES)
    assert card.context_bytes == sizes.GIB // 2
    assert "NVIDIA" in card.source
    assert "memory " in card.source
    assert card.torch_device == torch.device("cuda")


@pytest.mark.parametrize("name", ROWS)
def test_memory_is_what_cuda_reports_and_never_more_than_what_was_sold(name):
    sold = ROWS[name]["gb"] * sizes.GIB
    assert 0.9 * sold < hardware.resolve(name).memory_bytes <= sold


def test_every_source_and_memory_reference_of_the_file_exists_and_is_used():
    assert {row["source"] for row in ROWS.values()} == set(FILE["sources"])
    assert all("mib" in ROWS[row["memory_of"]] for row in ROWS.values() if "memory_of" in row)
    assert all(not {"mib", "memory_of"} <= set(row) for row in ROWS.values())
    assert all(ROWS[row["memory_of"]]["gb"] == row["gb"] for row in ROWS.values() if "memory_of" in row)


def test_bfloat16_is_fast_from_ampere_on_and_has_a_rate_exactly_there():
    for name in hardware.devices():
        card = hardware.resolve(name)
        assert card.fast_bfloat16 == (card.compute_capability >= (8, 0)) == ("bfloat16" in card.flops), name


def test_turing_multiplies_float16_on_tensor_cores_and_pascal_does_not():
    assert hardware.resolve("t4").flops["float16"] > 7 * hardware.resolve("t4").flops["float32"]
    assert "float16" not in hardware.resolve("gtx-1080-ti").flops


@pytest.mark.parametrize(
    ("given_name", "name"),
    [
        ("RTX-3060-12GB", "rtx-3060-12gb"),
        ("NVIDIA GeForce RTX 3060 12GB", "rtx-3060-12gb"),
        ("rtx_3090", "rtx-3090"),
        ("3090", "rtx-3090"),
        ("3090-ti", "rtx-3090-ti"),
        ("Tesla T4", "t4"),
        ("rtx-3050", "rtx-3050-8gb"),
        ("v100s", "v100s-pcie-32gb"),
        ("a100-80gb", "a100-pcie-80gb"),
        (" b200 ", "b200"),
    ],
)
def test_names_may_be_written_as_people_write_them(given_name, name):
    assert hardware.resolve(given_name).name == name


def test_a_name_written_together_is_understood():
    assert hardware.resolve("rtx3060-12gb") == hardware.resolve("RTX3060 12GB") == hardware.resolve("rtx-3060-12gb")
    with pytest.raises(PlanError, match="fits several cards") as caught:
        hardware.resolve("rtx3060")
    assert "rtx-3060-8gb" in caught.value.suggestions


@pytest.mark.parametrize(
    ("given_name", "suggestion"), [("rtx-3060-12g", "rtx-3060-12gb"), ("rtx-4990", "rtx-4090"), ("a1000", "a10")]
)
def test_an_unknown_name_is_refused_with_the_nearest_ones(given_name, suggestion):
    with pytest.raises(PlanError, match="unknown device") as caught:
        hardware.resolve(given_name)
    assert caught.value.device == given_name
    assert suggestion in caught.value.suggestions
    assert suggestion in str(caught.value)


def test_a_name_that_fits_several_cards_is_refused_with_all_of_them():
    with pytest.raises(PlanError, match="fits several cards") as caught:
        hardware.resolve("h100")
    assert caught.value.suggestions == ("h100-pcie-80gb", "h100-sxm-80gb", "h100-nvl-94gb")
    with pytest.raises(PlanError, match="fits several cards") as caught:
        hardware.resolve("3080")
    assert "rtx-3080-10gb" in caught.value.suggestions


@pytest.mark.parametrize("nonsense", ["", "foo", "24x", "5000 apples", 24, None, torch.device("cuda")])
def test_nonsense_is_refused_in_the_four_part_form(nonsense):
    with pytest.raises(PlanError) as caught:
        hardware.resolve(nonsense)
    message = str(caught.value)
    assert f"got:      device={nonsense!r}" in message
    assert "expected: " in message
    assert "snugfit gpus" in message


def test_a_device_passes_through():
    card = hardware.resolve("t4")
    assert hardware.resolve(card) is card
    assert pickle.loads(pickle.dumps(card)) == card


@given(st.integers(1, 2**12))
def test_a_size_is_a_card_of_that_size_with_assumed_rates(num_gib):
    card = hardware.resolve(f"{num_gib}GiB")
    assert card.memory_bytes == num_gib * sizes.GIB
    assert card.kind == "cuda"
    assert card.compute_capability == (8, 0)
    assert card.flops == hardware.resolve("a100-pcie-40gb").flops
    assert "assumed" in card.source


def test_binary_and_decimal_sizes_are_told_apart_and_24g_is_refused():
    assert hardware.resolve("24 GB").memory_bytes == 24 * 10**9
    with pytest.raises(PlanError, match="unknown unit") as caught:
        hardware.resolve("24G")
    assert "24GiB" in caught.value.hint


def test_the_cpu_has_the_memory_that_is_available_and_no_context():
    cpu = hardware.resolve("CPU")
    assert cpu.name == cpu.kind == "cpu"
    assert cpu.context_bytes == 0
    assert cpu.compute_capability is None
    assert cpu.torch_device == torch.device("cpu")
    assert 2**20 < cpu.memory_bytes
    assert cpu.flops["float32"] == hardware.CPU_FLOPS_PER_THREAD * torch.get_num_threads()
    assert "not measured" in cpu.source


@pytest.mark.parametrize(("flags", "fast"), [("sse avx512_bf16", False), ("sse amx_bf16 amx_tile", True)])
def test_only_amx_tiles_make_bfloat16_fast_on_a_cpu(flags, fast, tmp_path, monkeypatch):
    machine(tmp_path, {"proc/cpuinfo": f"processor\t: 0\nflags\t\t: {flags}\n"})
    assert hardware._has_amx_bfloat16(tmp_path) is fast
    monkeypatch.setattr(hardware, "_has_amx_bfloat16", lambda: fast)
    cpu = hardware.resolve("cpu")
    assert cpu.fast_bfloat16 is fast
    assert ("bfloat16" in cpu.flops) is fast


def machine(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


MEMINFO = {"proc/meminfo": "MemTotal:       32768000 kB\nMemFree:         1024 kB\nMemAvailable:   16384000 kB\n"}


def test_available_memory_is_the_machines_where_no_control_group_limits_it(tmp_path):
    machine(tmp_path, MEMINFO)
    assert hardware._available_bytes(tmp_path) == 16384000 * 1024


def test_a_version_2_control_group_limits_memory_and_its_file_cache_is_free(tmp_path):
    group = "sys/fs/cgroup/user/job"
    machine(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/user/job\n",
            f"{group}/memory.max": "4000\n",
            f"{group}/memory.current": "3000\n",
            f"{group}/memory.stat": "anon 2000\ninactive_file 500\n",
        },
    )
    assert hardware._available_bytes(tmp_path) == 1500
    outer = "sys/fs/cgroup/user"
    machine(
        tmp_path,
        {f"{outer}/memory.max": "3500", f"{outer}/memory.current": "3400", f"{outer}/memory.stat": "anon 3400\n"},
    )
    assert hardware._available_bytes(tmp_path) == 100
    machine(tmp_path, {f"{outer}/memory.max": "max\n"})
    assert hardware._available_bytes(tmp_path) == 1500


def test_a_version_1_control_group_limits_memory_also_where_only_its_top_folder_is_seen(tmp_path):
    top = "sys/fs/cgroup/memory"
    machine(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "4:memory:/box/4902\n3:cpuset:/\n0::/\n",
            f"{top}/memory.limit_in_bytes": "9000\n",
            f"{top}/memory.usage_in_bytes": "8000\n",
            f"{top}/memory.stat": "inactive_file 1\ntotal_inactive_file 700\n",
        },
    )
    assert hardware._available_bytes(tmp_path) == 1700
    machine(tmp_path, {f"{top}/memory.usage_in_bytes": "9900\n"})
    assert hardware._available_bytes(tmp_path) == 0


def test_a_machine_without_proc_has_its_physical_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware.os, "sysconf", {"SC_PHYS_PAGES": 100, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert hardware._available_bytes(tmp_path) == 409600
    monkeypatch.delattr(hardware.os, "sysconf")
    with pytest.raises(PlanError, match="how much memory"):
        hardware._available_bytes(tmp_path)


@pytest.fixture
def cards_here(monkeypatch):
    """Pretends that this machine has CUDA cards: (reported name, capability, total bytes, free bytes)."""

    def pretend(*cards, reserved=0, allocated=0):
        def properties(index):
            name, (major, minor), total, _ = cards[index]
            return SimpleNamespace(name=name, major=major, minor=minor, total_memory=total)

        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cards))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (cards[index][3], cards[index][2]))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: reserved)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: allocated)

    return pretend


def test_auto_is_the_cpu_where_there_is_no_card(cards_here):
    cards_here()
    assert hardware.resolve("auto").name == "cpu"


def test_auto_is_the_present_card_with_its_free_memory_and_the_rates_of_the_catalogue(cards_here):
    cards_here(("NVIDIA GeForce RTX 3090", (8, 6), 25294995456, 20 * sizes.GIB))
    card = hardware.resolve("auto")
    assert card.name == "rtx-3090"
    assert card.memory_bytes == 20 * sizes.GIB
    assert card.flops == hardware.resolve("rtx-3090").flops
    assert card.torch_device == torch.device("cuda", 0)
    assert "free memory" in card.source


def test_what_this_process_only_caches_counts_as_free(cards_here):
    cards_here(("Tesla T4", (7, 5), 15 * sizes.GIB, 2 * sizes.GIB), reserved=6 * sizes.GIB, allocated=sizes.GIB)
    assert hardware.resolve("auto").memory_bytes == 7 * sizes.GIB


@pytest.mark.parametrize(("total_gib", "name"), [(7.6, "rtx-3060-8gb"), (11.6, "rtx-3060-12gb")])
def test_cards_that_share_a_name_are_told_apart_by_their_memory(cards_here, total_gib, name):
    cards_here(("NVIDIA GeForce RTX 3060", (8, 6), int(total_gib * sizes.GIB), sizes.GIB))
    assert hardware.resolve("cuda").name == name


def test_a_present_card_outside_of_the_catalogue_keeps_its_name_and_says_whose_rates_are_assumed(cards_here):
    here = ("NVIDIA GeForce RTX 3070 Laptop GPU", (8, 6), int(7.8 * sizes.GIB), 7 * sizes.GIB)
    cards_here(here, ("NVIDIA GB10", (12, 1), 119 * sizes.GIB, 100 * sizes.GIB))
    card = hardware.resolve("cuda:0")
    assert card.name == "geforce-rtx-3070-laptop-gpu"
    assert card.compute_capability == (8, 6)
    assert "assumed" in card.source
    other = hardware.resolve("cuda:1")
    assert other.torch_device == torch.device("cuda", 1)
    assert other.compute_capability == (12, 1)
    assert other.fast_bfloat16


@pytest.mark.parametrize(("num_cards", "device"), [(0, "cuda"), (0, "cuda:0"), (1, "cuda:1")])
def test_a_card_that_is_not_here_is_refused_and_the_catalogue_is_named(cards_here, num_cards, device):
    cards_here(*[("Tesla T4", (7, 5), 15 * sizes.GIB, 14 * sizes.GIB)] * num_cards)
    with pytest.raises(PlanError, match="no such CUDA device") as caught:
        hardware.resolve(device)
    assert f"CUDA devices that torch finds: {num_cards}" in str(caught.value)
    assert "rtx-3060-12gb" in caught.value.hint


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_real_card_reports_what_torch_says():
    card = hardware.resolve("auto")
    _, total = torch.cuda.mem_get_info(0)
    assert card.kind == "cuda"
    assert card.compute_capability == torch.cuda.get_device_capability(0)
    assert 0 < card.memory_bytes <= total
    assert torch.empty(16, device=card.torch_device).device == card.torch_device
