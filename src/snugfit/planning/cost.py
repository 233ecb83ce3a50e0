"""How long a step takes on a device: a roofline over its kernels.

Entry points: ``step_time`` and ``breakdown``. Every kernel takes the time of its arithmetic or of its memory traffic,
whichever is longer. Only ratios between plans on one device deserve trust (modelled, not measured). Left out:
communication, data loading, host synchronisation, and how the shape of a matrix product suits the hardware.
"""

from collections import defaultdict
from collections.abc import Iterable

from snugfit.hardware import Device
from snugfit.memory.events import Work

MATMUL_FRACTION = {"float32": 0.75}
"""Share of the peak rate that large matrix products reach, by dtype; ``TENSOR_CORE_FRACTION`` where not listed.

Published cuBLAS readings for float32 range from 0.70 (RTX 4090), 0.72 (RTX 5060 Ti) and 0.79 (RTX 5090) of the
peak to 0.94 (RTX 2080 Ti).
"""

TENSOR_CORE_FRACTION = 0.65
"""Share of the peak rate of tensor cores that the matrix products of a model reach.

The best shapes reach 0.7 (Titan V) to 0.9 (RTX PRO 6000) and more, a model's own are smaller: assumed. All kernels of
a step like BERT-large's (batch 32, 512 tokens) then reach 0.33 of the peak of an A100 and 0.50 of that of an RTX 3060.
"""

BANDWIDTH_FRACTION = 0.8
"Share of the peak memory bandwidth that streaming kernels reach, assumed."

LAUNCH_S = 4e-6
"""Time between two kernels when the device waits for the host, which dispatches and launches them; assumed.

The host runs ahead, so that it is hidden behind every kernel that takes longer.
"""

EMULATED_SLOWDOWN = {
    ("cuda", "float16"): 1.0,  # no tensor cores: cuBLAS converts to float32 (10.3 of 10.5 TFLOP/s on a GTX 1080 Ti)
    ("cuda", "bfloat16"): 2.0,  # before Ampere: converted to float32 and back around every product
    ("cuda", "float64"): 32.0,  # most cards; half the float32 rate on P100, V100, A100, H100: no model trains in it
    ("cpu", "float16"): 60.0,  # measured 60 to 105 times slower than float32 (AVX-512 machine, torch 2.13)
    ("cpu", "bfloat16"): 60.0,
    ("cpu", "float64"): 2.0,
}
"How many times slower than float32 a dtype is that the device has no rate for; 1 where not listed, never below."


def step_time(work: Iterable[Work], device: Device, *, tf32: bool = False) -> float:
    """Predict the time of a step from its kernels, and return it in seconds.

    ``sum(max(flops / reached rate, bytes / reached bandwidth, LAUNCH_S))``.

    Args:
        work: Kernels of the step.
        device: Where they run.
        tf32: Whether float32 matrix products may use TF32 tensor cores. PyTorch's default
            (``torch.get_float32_matmul_precision() == "highest"``) does not allow it.
    """
    return sum(breakdown(work, device, tf32=tf32).values())


def breakdown(work: Iterable[Work], device: Device, *, tf32: bool = False) -> dict[str, float]:
    """Predict the time of each phase of a step, and return phase to seconds; see ``step_time``."""
    seconds: dict[str, float] = defaultdict(float)
    rates: dict[str, float] = {}
    bandwidth = device.bandwidth * BANDWIDTH_FRACTION
    for kernel in work:
        arithmetic = 0.0
        if kernel.flops:
            if kernel.dtype not in rates:
                rates[kernel.dtype] = reached_rate(kernel.dtype, device, tf32=tf32)
            arithmetic = kernel.flops / rates[kernel.dtype]
        seconds[kernel.phase] += max(arithmetic, kernel.bytes / bandwidth, LAUNCH_S)
    return dict(seconds)


def reached_rate(dtype: str, device: Device, *, tf32: bool = False) -> float:
    """Rate in FLOP/s that matrix products of a dtype (``"bfloat16"``) are taken to reach on a device.

    A dtype without a rate of its own runs at the float32 rate or slower, never faster.
    """
    if dtype in device.flops:
        reached = device.flops[dtype] * MATMUL_FRACTION.get(dtype, TENSOR_CORE_FRACTION)
        if dtype == "float32" and tf32:  # no gain on GeForce cards since Ampere, whose TF32 peak is that of float32
            reached = max(reached, device.flops.get("tf32", 0.0) * TENSOR_CORE_FRACTION)
        return reached
    slowdown = EMULATED_SLOWDOWN.get((device.kind, dtype), 1.0)
    return device.flops["float32"] * MATMUL_FRACTION["float32"] / slowdown
