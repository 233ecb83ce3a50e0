"""Devices that memory and time are predicted for: a catalogue of cards, the present machine, or just a size.

Entry points: ``resolve`` and ``devices``. The catalogue is ``gpus.json``, read when it is first needed; it says where
its figures come from. Left out: several cards at once, accelerators other than CUDA, and measuring any rate.
"""

import difflib
import functools
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from snugfit import sizes
from snugfit.errors import PlanError
from snugfit.rates import Rates

CONTEXT_BYTES = sizes.GIB // 2
"""What a CUDA process holds outside of the allocator when nobody measured it: the driver's context and loaded kernels.

Published readings go from 0.3 GiB (lazy loading, since CUDA 11.7) to 1.4 GiB (A100, 2022), without a table per
generation.
"""

BFLOAT16_CAPABILITY = (8, 0)
"Least compute capability whose tensor cores multiply bfloat16; older cards convert to float32 and back."

SIZE_REFERENCE = "a100-pcie-40gb"
"Card whose rates a device has of which nothing but the size is known."

CPU_FLOPS_PER_THREAD = 80e9
"Peak float32 rate of one CPU core, assumed: two AVX2 multiply-add units (32 FLOP per cycle) at 2.5 GHz."

CPU_BANDWIDTH_PER_THREAD, CPU_BANDWIDTH = 20e9, 200e9
"Memory bandwidth that one CPU thread can draw, and all of them together, in bytes/s; assumed."

CPU_AMX_FACTOR = 4
"How much faster than float32 a CPU with AMX tiles multiplies bfloat16, assumed: a quarter of the tiles' peak."

_SIZE = re.compile(r"[0-9.]+\s*([kmgt]i?b?|b)")
_PRESENT = re.compile(r"cuda(?::([0-9]+))?")
_VENDOR = re.compile(r"^(nvidia|geforce|tesla)-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device as the predictions see it: how much memory, and how fast."""

    name: str
    "As in the catalogue, ``cpu``, or a size."
    kind: str
    '``"cuda"`` or ``"cpu"``.'
    memory_bytes: int
    "Capacity that a budget starts from: all of a card in the catalogue, what is free of the present machine."
    compute_capability: tuple[int, int] | None
    "CUDA's (major, minor); None for a CPU."
    bandwidth: float
    "Peak memory bandwidth in bytes/s."
    flops: Mapping[str, float]
    """Dense peak rates in FLOP/s, keys ``float32 tf32 float16 bfloat16 fp8``, with accumulation in float32.

    A missing key means that the hardware has no such rate.
    """
    context_bytes: int = CONTEXT_BYTES
    "Held outside of the allocator (driver, loaded kernels); 0 for a CPU."
    source: str
    "Where the figures come from, and which of them are assumed."
    index: int | None = None
    "Which of this machine's CUDA devices this is; None for one that need not be here."
    rates: Rates | None = None
    "What it was measured to reach; None: times rest on the peak rates."

    @property
    def torch_device(self) -> torch.device:
        """The device that tensors are put on."""
        return torch.device(self.kind) if self.index is None else torch.device(self.kind, self.index)

    @property
    def fast_bfloat16(self) -> bool:
        """Whether bfloat16 is worth proposing: the hardware multiplies it faster than float32.

        On a CPU without AMX tiles bfloat16 matrix products are 60 to 105 times slower than float32 (measured, one
        AVX-512 machine, torch 2.13).
        """
        if self.kind == "cpu":
            return "bfloat16" in self.flops
        return self.compute_capability is not None and self.compute_capability >= BFLOAT16_CAPABILITY


def devices() -> tuple[str, ...]:
    """Names of the catalogue, by generation (compute capability) and then by memory."""
    cards = sorted(_catalogue().values(), key=lambda card: (card.compute_capability, card.memory_bytes, card.name))
    return tuple(card.name for card in cards)


def resolve(device: str | Device) -> Device:
    """Find out what a device is, and return it with its memory and rates.

    Names are compared without regard to case, to the vendor's prefix, and to spaces; one that is cut at a dash will
    do where it fits one card only (``"3090"``). Asking for the present card starts CUDA in this process.

    Args:
        device: A ``Device`` (returned as it is); a name of the catalogue; ``"auto"`` (the present CUDA card with its
            free memory, else the CPU); ``"cuda"`` or ``"cuda:1"`` (that card of this machine); ``"cpu"`` (available
            memory); or a size such as ``"24GiB"`` (a card of that size with assumed rates).

    Raises:
        PlanError: Unknown or ambiguous name (``.suggestions`` holds the nearest ones), a size that cannot be read, or
            a CUDA device that this machine does not have.

    Example:
        >>> resolve("RTX 3060 12GB").name, resolve("24 GB").memory_bytes
        ('rtx-3060-12gb', 24000000000)
    """
    if isinstance(device, Device):
        return device
    if not isinstance(device, str):
        raise _unknown(device)
    text = device.strip().lower()
    present = _PRESENT.fullmatch(text)
    if present:
        return _present_card(int(present[1] or 0), device)
    if text == "auto":
        return _present_card(0, device) if torch.cuda.is_available() else _cpu()
    if text == "cpu":
        return _cpu()
    name = _VENDOR.sub("", _VENDOR.sub("", re.sub(r"[\s_]+", "-", text)))
    if name in _catalogue():
        return _catalogue()[name]
    if _SIZE.fullmatch(text):
        return _sized(sizes.parse(text))
    return _catalogue()[_full_name(name, device)]


@functools.cache
def _file() -> dict[str, Any]:
    content = resources.files("snugfit").joinpath("gpus.json").read_text(encoding="utf-8")
    file: dict[str, Any] = json.loads(content)
    return file


@functools.cache
def _catalogue() -> Mapping[str, Device]:
    rows = {row["name"]: row for row in _file()["cards"]}
    return {name: _card(row, rows) for name, row in rows.items()}


def _card(row: dict[str, Any], rows: Mapping[str, dict[str, Any]]) -> Device:
    memory, origin = row["gb"] * sizes.GIB, f"as sold ({row['gb']} GB)"
    if "mib" in row:
        memory, origin = row["mib"] * sizes.MIB, "as reported by CUDA"
    elif "memory_of" in row:
        memory, origin = rows[row["memory_of"]]["mib"] * sizes.MIB, f"as reported by CUDA for {row['memory_of']}"
    major, minor = row["capability"]
    return Device(
        name=row["name"],
        kind="cuda",
        memory_bytes=memory,
        compute_capability=(major, minor),
        bandwidth=row["gb_per_s"] * 1e9,
        flops={dtype: rate * 1e12 for dtype, rate in row["tflops"].items()},
        source=f"{_file()['sources'][row['source']]}; memory {origin}",
    )


def _full_name(name: str, given: str) -> str:
    """The one name of the catalogue that a part of a name stands for.

    Raises:
        PlanError: None, or more than one.
    """
    alias: str | None = _file()["aliases"].get(name)
    if alias is not None:
        return alias
    cut = [full for full in devices() if f"-{name}-" in f"-{full}-"]
    if not cut:  # written together, as in rtx3060
        together = name.replace("-", "")
        cut = [full for full in devices() if together in itertools.accumulate(full.split("-"))]
    tails = [full for full in cut if full.endswith(f"-{name}")]
    for candidates in (tails, cut):
        if len(candidates) == 1:
            return candidates[0]
    if cut:
        raise PlanError(
            "the name of the device fits several cards",
            got=f"device={given!r}",
            expected=" | ".join(cut),
            hint=f'write for example device="{cut[0]}"',
            device=given,
            suggestions=tuple(cut),
        )
    raise _unknown(given, difflib.get_close_matches(name, devices(), n=3, cutoff=0.5))


def _unknown(given: object, suggestions: Sequence[str] = ()) -> PlanError:
    hint = "list the names with: snugfit gpus"
    return PlanError(
        "unknown device",
        got=f"device={given!r}",
        expected='"auto", "cpu", "cuda", a size such as "24GiB", or a name of the catalogue',
        hint=f"did you mean {', '.join(suggestions)}? {hint}" if suggestions else hint,
        device=given,
        suggestions=tuple(suggestions),
    )


def _sized(memory_bytes: int) -> Device:
    reference = _catalogue()[SIZE_REFERENCE]
    return replace(
        reference,
        name=sizes.text(memory_bytes),
        memory_bytes=memory_bytes,
        source=f"memory as given; rates and compute capability assumed, those of {SIZE_REFERENCE}",
    )


def _present_card(index: int, given: str) -> Device:
    """A card of this machine with what is free of its memory now, this process' own cache included."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        raise PlanError(
            "this machine has no such CUDA device",
            got=f"device={given!r}, CUDA devices that torch finds: {count}",
            expected=f"cuda:0 to cuda:{count - 1}" if count else "a CUDA device, a driver and a CUDA build of torch",
            hint='predict for a card that is not here by its name, such as device="rtx-3060-12gb", or use device="cpu"',
            device=given,
        )
    properties = torch.cuda.get_device_properties(index)
    free, _ = torch.cuda.mem_get_info(index)
    reusable = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    capability = (properties.major, properties.minor)
    card, known = _nearest(properties.name, capability, properties.total_memory)
    rates = f"rates of {card.name}" if known else f"not in the catalogue: rates assumed, those of {card.name}"
    return replace(
        card,
        name=card.name if known else re.sub(r"\s+", "-", _reported(properties.name)),
        memory_bytes=free + reusable,
        compute_capability=capability,
        source=f"{properties.name}, free memory of cuda:{index} with this process' context already taken off; {rates}",
        index=index,
    )


def _nearest(name: str, capability: tuple[int, int], total_bytes: int) -> tuple[Device, bool]:
    """The card of the catalogue with a reported name, else the one most alike, and whether it is that card.

    Cards of one name are told apart by their memory.
    """
    cards = _catalogue()
    same = [cards[row["name"]] for row in _file()["cards"] if _reported(name) in map(_reported, row["reported"])]

    def distance(card: Device) -> tuple[int, int]:
        major, minor = card.compute_capability or (0, 0)
        generations = abs(10 * (major - capability[0]) + minor - capability[1])
        return generations, abs(card.memory_bytes - total_bytes)

    return min(same or cards.values(), key=distance), bool(same)


def _reported(name: str) -> str:
    return name.lower().removeprefix("nvidia ").strip()


def _cpu() -> Device:
    num_threads = torch.get_num_threads()
    rates = {"float32": CPU_FLOPS_PER_THREAD * num_threads}
    if _has_amx_bfloat16():
        rates["bfloat16"] = CPU_AMX_FACTOR * rates["float32"]
    return Device(
        name="cpu",
        kind="cpu",
        memory_bytes=_available_bytes(),
        compute_capability=None,
        bandwidth=min(CPU_BANDWIDTH_PER_THREAD * num_threads, CPU_BANDWIDTH),
        flops=rates,
        context_bytes=0,
        source=f"memory available now; rates assumed for {num_threads} threads of torch, not measured",
    )


def _has_amx_bfloat16(root: Path = Path("/")) -> bool:
    try:
        return re.search(r"^flags\b.*\bamx_bf16\b", (root / "proc/cpuinfo").read_text(), re.MULTILINE) is not None
    except OSError:
        return False


def _available_bytes(root: Path = Path("/")) -> int:
    """Memory that this process can still get without swapping: the machine's, within its control groups' limits."""
    try:
        found = re.search(r"^MemAvailable:\s+([0-9]+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found:
        available = int(found[1]) * sizes.KIB
    elif hasattr(os, "sysconf"):
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        raise PlanError(
            "cannot find out how much memory this machine has",
            got='device="cpu" on a system without /proc/meminfo and sysconf',
            expected="Linux or macOS",
            hint="build a snugfit.hardware.Device with the memory_bytes of this machine",
        )
    return min([available, *_group_rooms(root)])


def _group_rooms(root: Path) -> Iterator[int]:
    """Bytes that each control group around this process still allows, versions 1 and 2.

    File cache that the kernel gives back under pressure (``inactive_file``) is not counted as used.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, limit, usage, cache = mount, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, usage = mount / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):  # limits of outer groups hold as well
            yield from _room(folder, limit, usage, cache)
            if folder == top:
                break


def _room(folder: Path, limit: str, usage: str, cache: str) -> Iterator[int]:
    try:
        allowed, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        stat = (folder / "memory.stat").read_text()
    except OSError:  # a container often sees the outermost folder only
        return
    if allowed != "max":
        found = re.search(rf"^{cache} ([0-9]+)$", stat, re.MULTILINE)
        yield max(int(allowed) - used + (int(found[1]) if found else 0), 0)
