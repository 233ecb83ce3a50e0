"""How long a step takes on a device: the sum over its operations, at the rates that each kind and size reaches.

Entry points: ``step_time``, ``breakdown``, ``times``, ``host_times`` and ``uncertainty``. Rates are those that were
measured (``Device.rates``, see ``calibration``), else assumed from the device's peaks (``assumed_rates``). Left out:
reducing gradients between cards (``links``), data loading, host synchronisation, and which tensors a cache still holds.

NOTE [What an operation costs]
1. Its work: arithmetic at the rate of its kind, dtype and side, and traffic at the rate of its name and size: the
   longer of the two on a card, both on a CPU. The side of a product is
   that of a cube with as many FLOPs per byte: ``1.5 * item size * flops / bytes``. Rates of products depend on little
   else (measured on a CPU: 8192 x 64 x 64 reaches what 96 cubed does).
2. Its dispatch: by forward, backward and update; what a recomputation repeats is dispatched like a forward. On a CPU
   work and dispatch follow each other; on a card the host runs ahead, and the longer of the two counts.
3. What Python does around it: what begins with it (a window, a micro-batch, the repetition of a segment), keeping
   track of what is repeated, and the Python mode that it passed. On a CPU that follows too; on a card it is hidden
   as long as the host as a whole takes less than the card in a phase.
4. Copies between host and device run beside the other operations of their phase; only what is longer counts.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from snugfit import rates as measured
from snugfit.hardware import Device
from snugfit.memory.events import Work
from snugfit.planning.assumed_rates import assumed
from snugfit.rates import OTHER, Rates

EMULATED_SLOWDOWN = {
    ("cuda", "float16"): 1.0,  # no tensor cores: cuBLAS converts to float32 (10.3 of 10.5 TFLOP/s on a GTX 1080 Ti)
    ("cuda", "bfloat16"): 2.0,  # before Ampere: converted to float32 and back around every product
    ("cuda", "float64"): 32.0,  # most cards; half the float32 rate on P100, V100, A100, H100: no model trains in it
    ("cpu", "float16"): 60.0,  # measured 60 to 105 times slower than float32 (AVX-512 machine, torch 2.13)
    ("cpu", "bfloat16"): 60.0,
    ("cpu", "float64"): 2.0,
}
"How many times slower than float32 a dtype is that the device has no rate for; 1 where not listed, never below."

UNCALIBRATED, CALIBRATED = 0.5, 0.35
"""Relative uncertainty of a step's time.

Without measured rates: whole training steps are published at 0.3 to 0.6 of the peak of one and the same card, and a
CPU's peak itself is assumed. With them: 11 % in the median, and all of nine jobs on a CPU; large depthwise
convolutions take up to twice what is predicted (``benchmarks/results/planning_order.md``).
"""

_LARGE_SIDE = 1e4
_ITEM_SIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def step_time(work: Iterable[Work] | Mapping[Work, int], device: Device, *, tf32: bool = False) -> float:
    """Predict the time of a step from its operations, and return it in seconds.

    Args:
        work: Operations of the step, or how often each of them runs.
        device: Where they run.
        tf32: Whether float32 matrix products may use TF32 tensor cores. PyTorch's default
            (``torch.get_float32_matmul_precision() == "highest"``) does not allow it.
    """
    return sum(breakdown(work, device, tf32=tf32).values())


def breakdown(work: Iterable[Work] | Mapping[Work, int], device: Device, *, tf32: bool = False) -> dict[str, float]:
    """Predict the time of each phase of a step, and return phase to seconds; see ``step_time``."""
    rates = device.rates or assumed(device)
    seconds, copies, host = (defaultdict[str, float](float) for _ in range(3))
    counts = Counter(work)  # identical blocks are priced once
    for (kernel, times_run), one in zip(counts.items(), times(counts, device, tf32=tf32), strict=True):
        (copies if kernel.is_copy else seconds)[kernel.phase] += times_run * one
        host[kernel.phase] += times_run * _host_seconds(kernel, device.kind, rates)
    return {phase: max(seconds[phase], copies[phase], host[phase]) for phase in {**seconds, **copies}}


def times(work: Iterable[Work], device: Device, *, tf32: bool = False) -> list[float]:
    """Predict the seconds of each operation by itself, in order; see the NOTE above for what may be hidden or added."""
    rates = device.rates or assumed(device)
    known: dict[Work, float] = {}
    seconds = []
    for kernel in work:
        if kernel not in known:
            known[kernel] = _seconds(kernel, device.kind, rates, tf32)
        seconds.append(known[kernel])
    return seconds


def host_times(work: Iterable[Work], device: Device) -> list[float]:
    """Predict the seconds that the host takes for each operation before it can go on; nothing on a CPU."""
    rates = device.rates or assumed(device)
    return [_host_seconds(kernel, device.kind, rates) for kernel in work]


def uncertainty(device: Device) -> float:
    """The fraction by which a predicted step time may be off, either way; ratios between plans are off by less."""
    return UNCALIBRATED if device.rates is None else CALIBRATED


def reached_rate(dtype: str, device: Device, *, side: float = _LARGE_SIDE, tf32: bool = False) -> float:
    """Rate in FLOP/s that matrix products of a dtype (``"bfloat16"``) are taken to reach on a device.

    A dtype without a rate of its own runs at the float32 rate or slower, never faster.

    Args:
        dtype: Of both factors.
        device: Where.
        side: Of a cube of products, see the NOTE at the top of this file.
        tf32: See ``step_time``.
    """
    return _arithmetic_rate("product", dtype, side, device.kind, device.rates or assumed(device), tf32)


def _seconds(kernel: Work, kind: str, rates: Rates, tf32: bool) -> float:
    if kernel.is_copy and rates.link is not None:
        return kernel.bytes / 2 / rates.link  # read on one side, written on the other
    work, dispatch = work_seconds(kernel, kind, rates, tf32=tf32), _dispatch_seconds(kernel, rates)
    return work + dispatch + _around_seconds(kernel, rates) if kind == "cpu" else max(work, dispatch)


def _host_seconds(kernel: Work, kind: str, rates: Rates) -> float:
    return 0.0 if kind == "cpu" else _dispatch_seconds(kernel, rates) + _around_seconds(kernel, rates)


def work_seconds(kernel: Work, kind: str, rates: Rates, *, tf32: bool = False) -> float:
    """Seconds of an operation's arithmetic or traffic alone."""
    op = kernel.op.partition(".")[0]
    curve = rates.traffic.get(op, rates.traffic[OTHER])
    traffic = kernel.bytes / measured.at(curve, kernel.bytes) if kernel.bytes else 0.0
    if not kernel.flops:
        return traffic
    reached = _arithmetic_rate(kind_of(op), kernel.dtype, side_of(kernel), kind, rates, tf32)
    arithmetic = kernel.flops / reached
    return arithmetic + traffic if kind == "cpu" else max(arithmetic, traffic)


def side_of(kernel: Work) -> float:
    """The side of a cube of products with as many FLOPs per byte."""
    return 1.5 * _ITEM_SIZE.get(kernel.dtype, 4) * kernel.flops / max(kernel.bytes, 1)


def kind_of(op: str) -> str:
    """The kind of arithmetic of an operation, as in the keys of ``Rates.arithmetic``."""
    kind = "attention" if "attention" in op else "convolution" if "convolution" in op else "product"
    return f"{kind} backward" if op.endswith("backward") else kind


def _dispatch_seconds(kernel: Work, rates: Rates) -> float:
    if kernel.phase == "forward" or kernel.is_repeated:
        return rates.forward_s
    is_sum = kernel.op.partition(".")[0].endswith("_")  # of gradients: without a graph, as in an optimizer
    return rates.backward_s if kernel.phase == "backward" and not is_sum else rates.update_s


def _around_seconds(kernel: Work, rates: Rates) -> float:
    begun = {
        "window": rates.window_s + rates.micro_step_s,
        "micro-batch": rates.micro_step_s,
        "segment": rates.segment_s,
    }.get(kernel.begins, 0.0)
    repeated = rates.repeated_s if kernel.is_repeated else 0.0
    return begun + repeated + (rates.watched_s if kernel.is_watched else 0.0)


def _arithmetic_rate(arithmetic: str, dtype: str, side: float, kind: str, rates: Rates, tf32: bool) -> float:
    curves = rates.arithmetic
    own = curves.get(f"{arithmetic} {dtype}") or curves.get(f"product {dtype}")
    if own is None:
        general = curves.get(f"{arithmetic} float32") or curves["product float32"]
        return measured.at(general, side) / EMULATED_SLOWDOWN.get((kind, dtype), 1.0)
    reached = measured.at(own, side)
    if dtype == "float32" and tf32 and "product tf32" in curves:
        # No gain on GeForce cards since Ampere, whose TF32 peak is that of float32.
        reached = max(reached, measured.at(curves["product tf32"], side))
    return reached
