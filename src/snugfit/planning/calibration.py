"""Measures how fast the present device is, in well under a minute, so that predicted times become its own.

Entry points: ``calibrate``, and ``calibrated``, which puts rates on a device. Nothing is kept anywhere but in the
file that the user names. Left out: other devices, communication, and reading data.
"""

import platform
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from snugfit import hardware
from snugfit.errors import PlanError, UnsupportedError, warn
from snugfit.hardware import Device
from snugfit.planning import cost, timed_operations, timed_steps
from snugfit.rates import OVERHEADS, Rates, at
from snugfit.training import random_states

_LARGE_SIDE = 1e4
_LINK_BYTES = 2**26


def calibrate(device: str | Device = "auto") -> Rates:
    """Measure a device of this machine and return what it reaches.

    Takes ten to thirty seconds in which nothing else should run, and a few hundred MiB. Random states are left as
    they are.

    Args:
        device: ``"auto"``, ``"cpu"`` or a CUDA device of this machine.

    Raises:
        UnsupportedError: A device that is not in this machine.
    """
    target = hardware.resolve(device)
    if target.kind == "cuda" and target.index is None:
        raise UnsupportedError(
            "only a device of this machine can be calibrated",
            got=f"device={target.name!r}",
            expected='"auto", "cpu", or a CUDA device that torch finds here',
            hint="run snugfit calibrate where the device is, and pass its file here: --rates rates.json",
        )
    place = target.torch_device
    with random_states.seeded(0):
        arithmetic = timed_operations.arithmetic(place, _dtypes(target))
        traffic = timed_operations.traffic(place)
        unknown: dict[str, Any] = dict.fromkeys(OVERHEADS, 0.0)
        rates = Rates(
            device=target.name,
            processor=processor(target),
            threads=torch.get_num_threads(),
            torch=torch.__version__,
            arithmetic=arithmetic,
            traffic=traffic,
            **unknown,
            link=_link(place) if target.kind == "cuda" else None,
        )
        return timed_steps.overheads(rates, replace(target, rates=None))


def calibrated(device: str | Device, rates: Rates) -> Device:
    """The device with measured rates: every time predicted for it rests on them.

    A dtype that was measured to be faster than float32 counts as one that the hardware multiplies.

    Raises:
        PlanError: The rates are those of another device, another processor, or another number of threads.
    """
    target = hardware.resolve(device)
    is_here = target.kind == "cpu" or target.index is not None
    wrong = [
        f"{what} {found!r} measured, {wanted!r} here"
        for what, found, wanted in (
            ("device", rates.device, target.name),
            ("processor", rates.processor, processor(target) if is_here else rates.processor),
            ("threads", rates.threads, torch.get_num_threads() if target.kind == "cpu" else rates.threads),
        )
        if found != wanted
    ]
    if wrong:
        raise PlanError(
            "the measured rates are not those of this device",
            got="; ".join(wrong),
            expected="rates of the same device, processor and number of threads",
            hint="measure them here: snugfit calibrate -o rates.json",
        )
    if rates.torch != torch.__version__:
        warn(f"rates measured with torch {rates.torch}, and this is {torch.__version__}; measure them again")
    faster = {
        dtype: cost.reached_rate(dtype, replace(target, rates=rates))
        for dtype in ("bfloat16", "float16")
        if target.kind == "cpu" and _is_faster(dtype, rates)
    }
    return replace(target, rates=rates, flops={**target.flops, **faster})


def processor(device: Device) -> str:
    """What this machine calls the processor of a device."""
    if device.kind == "cuda":
        return torch.cuda.get_device_name(device.index)
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine() or "unknown"


def _is_faster(dtype: str, rates: Rates) -> bool:
    curve = rates.arithmetic.get(f"product {dtype}")
    return curve is not None and at(curve, _LARGE_SIDE) > at(rates.arithmetic["product float32"], _LARGE_SIDE)


def _dtypes(device: Device) -> tuple[str, ...]:
    if device.kind == "cpu":
        return ("float32", "bfloat16", "float16")
    return tuple(dtype for dtype in ("float32", "float16", "bfloat16") if dtype in device.flops)


def _link(device: torch.device) -> float:
    """Bytes/s between pinned host memory and the device, the slower direction."""
    best = timed_operations.timer(device)
    here, there = (
        torch.empty(_LINK_BYTES, dtype=torch.uint8).pin_memory(),
        torch.empty(_LINK_BYTES, dtype=torch.uint8, device=device),
    )
    slower = max(best(lambda: there.copy_(here, non_blocking=True)), best(lambda: here.copy_(there, non_blocking=True)))
    return _LINK_BYTES / slower
