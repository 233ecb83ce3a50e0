"""The rates of a device that nobody measured: its peak rates, and the share of them that operations reach.

Entry point: ``assumed``. Where the catalogue knows a peak rate it is scaled; all else here is assumed and says so.
What is assumed enters every plan alike, so ratios between plans are worth more than the times themselves.
"""

import functools
from collections.abc import Mapping
from typing import Any

from snugfit.hardware import CPU_BANDWIDTH_PER_THREAD, Device
from snugfit.rates import OTHER, Curve, Rates

MATMUL_FRACTION = {"float32": 0.75}
"""Share of the peak rate that large matrix products reach, by dtype; ``TENSOR_CORE_FRACTION`` where not listed.

Published cuBLAS readings for float32 range from 0.70 (RTX 4090), 0.72 (RTX 5060 Ti) and 0.79 (RTX 5090) of the
peak to 0.94 (RTX 2080 Ti).
"""

TENSOR_CORE_FRACTION = 0.65
"""Share of the peak rate of tensor cores that the large matrix products of a model reach.

The best shapes reach 0.7 (Titan V) to 0.9 (RTX PRO 6000, L20) and more, a model's own are less even: assumed.
"""

HALF_SIDE = {"float32": 16.0, "float64": 16.0}
"""Side of a cube of products that reaches half of what large ones do; ``TENSOR_CORE_HALF_SIDE`` where not listed.

Assumed: a few tiles of the kernel, which is 16 wide on a CPU core's vectors.
"""
TENSOR_CORE_HALF_SIDE = 64.0
"Assumed: half of the tile of 128 x 128 that the fast kernels of tensor cores want to fill."

BANDWIDTH_FRACTION = 0.8
"Share of the peak memory bandwidth that streaming kernels reach, assumed."

LAUNCH_S = 4e-6
"""Time between two kernels when the device waits for the host, which dispatches and launches them; assumed.

The host runs ahead, so that it is hidden behind every kernel that takes longer.
"""

PYTHON_S = {
    "segment_s": 300e-6,
    "repeated_s": 70e-6,
    "watched_s": 110e-6,
    "micro_step_s": 200e-6,
    "window_s": 500e-6,
}
"What Python takes beside operations, see ``Rates``: measured on one core of a server's CPU (torch 2.13), rounded."

CPU_DISPATCH_S = {"forward_s": 15e-6, "backward_s": 9e-6, "update_s": 3e-6}
"What the CPU takes for each operation beside its work; measured and rounded as above."

CPU_CACHE = ((2.0**16, 2.0), (2.0**22, 1.0))
"How many times faster than from memory a CPU streams what its caches may hold, by size; measured and rounded as above."

CPU_SLOWNESS: Mapping[str, float] = {
    "bernoulli_": 30.0,
    "max_pool2d_with_indices": 18.0,
    "tanh": 7.0,
    "native_batch_norm": 6.0,
    "native_batch_norm_backward": 2.5,
    "embedding_dense_backward": 2.5,
    "sum": 2.5,
    "exp": 2.5,
    "gelu": 2.0,
    "gelu_backward": 2.0,
    "_softmax": 2.0,
    "_log_softmax": 2.0,
}
"How many times slower per byte than a sum some operations are on one CPU core; measured and rounded as above."

LINKS = (((9, 0), 50e9), ((8, 0), 24e9), ((0, 0), 12e9))
"""Bytes/s between pinned host memory and a card, by least compute capability: 16 lanes of PCIe 5, 4 and 3.

Assumed: a little under four fifths of 63, 31.5 and 15.8 GB/s, whatever the board gives the card.
"""

_SIDES = tuple(2.0**k for k in range(2, 15))


def assumed(device: Device) -> Rates:
    """The rates that times rest on where nothing was measured."""
    return _assumed(
        device.kind, device.name, device.bandwidth, tuple(device.flops.items()), device.compute_capability or (0, 0)
    )


@functools.lru_cache
def _assumed(
    kind: str, name: str, bandwidth: float, flops: tuple[tuple[str, float], ...], capability: tuple[int, int]
) -> Rates:
    reached = bandwidth * BANDWIDTH_FRACTION
    traffic: dict[str, Curve] = {OTHER: ((1.0, reached),)}
    overheads: dict[str, Any] = {**dict.fromkeys(CPU_DISPATCH_S, LAUNCH_S), **PYTHON_S}
    if kind == "cpu":
        overheads |= CPU_DISPATCH_S
        traffic[OTHER] = tuple((size, times * reached) for size, times in CPU_CACHE)
        traffic |= {op: ((1.0, reached / slow),) for op, slow in CPU_SLOWNESS.items()}
    return Rates(
        device=name,
        processor="assumed",
        threads=max(1, round(bandwidth / CPU_BANDWIDTH_PER_THREAD)) if kind == "cpu" else 1,
        torch="any",
        arithmetic={f"product {dtype}": _products(dtype, peak) for dtype, peak in flops},
        traffic=traffic,
        **overheads,
        link=None if kind == "cpu" else next(link for least, link in LINKS if capability >= least),
    )


def _products(dtype: str, peak: float) -> Curve:
    fraction = MATMUL_FRACTION.get(dtype, TENSOR_CORE_FRACTION)
    half = HALF_SIDE.get(dtype, TENSOR_CORE_HALF_SIDE)
    return tuple((side, peak * fraction * side / (side + half)) for side in _SIDES)
