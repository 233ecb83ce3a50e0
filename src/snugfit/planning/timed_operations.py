"""Single operations of torch, timed on a real device at several sizes: the curves of ``Rates``.

Entry points: ``arithmetic`` and ``traffic``. What an operation reads, writes and computes is counted as the tracer
counts it, so that a rate and the trace that it prices speak of the same bytes. Left out: what surrounds an operation
in a step, which is ``timed_steps``'.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from snugfit.memory.events import Work, work_of
from snugfit.planning import cost
from snugfit.rates import OTHER, Curve
from snugfit.training import torch_private

SIDES = {"float32": (16, 64, 192, 512), "bfloat16": (64, 256), "float16": (64, 256)}
"Cubes of products that are timed, by dtype; on a CPU without fast half precision a larger one takes seconds."

SMALL_BYTES, BYTES = 2**15, (2**20, 2**22, 2**24)
"""Sizes of the first argument of what streams: from the nearest cache to memory.

From the second on a CPU's caches are emptied before each call, for between two uses of a tensor a step touches others.
Of a small one about half of the uses find it there (what the operation before has made) and half do not (what a
forward saved), so that its rate is the mean of both.
"""

CARD_BYTES = (2**22, 2**25, 2**27)
"The same on a card, whose cache is as large and whose operations are quick."

FLUSH_BYTES = 2**26
"Read to empty the caches."

LEAST_SHARE = 0.25
"Share of a call's time that is work at least, where it takes no longer than that of an operation without work."

BATCH_SECONDS, MOST_CALLS, BATCHES = 2e-3, 200, 5
"A batch of calls takes about so long; the fastest of some batches counts, for whatever disturbs takes longer."

_aten: Any = torch.ops.aten
Timer = Callable[[Callable[[], object]], float]


def clock(device: torch.device) -> Callable[[], float]:
    """The seconds of a call are read from it: with one thread its own, which other processes do not lengthen."""
    return time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def timer(device: torch.device) -> Timer:
    """A function that gives the seconds of one call of its argument on a device, and waits for the device."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    now = clock(device)

    def seconds(call: Callable[[], object], number: int) -> float:
        wait()
        start = now()
        for _ in range(number):
            call()
        wait()
        return (now() - start) / number

    def best(call: Callable[[], object]) -> float:
        seconds(call, 1)
        number = max(1, min(MOST_CALLS, int(BATCH_SECONDS / seconds(call, 1))))
        return min(seconds(call, number) for _ in range(BATCHES))

    return best


class _Counting(torch_private.DispatchMode):  # type: ignore[misc, unused-ignore]
    """Collects the work of what runs, as a trace would."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[Work] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.work.append(work_of(func, "forward", args, kwargs or {}, result))
        return result


def counted(call: Callable[[], object]) -> list[Work]:
    """The work of one call."""
    with _Counting() as mode:
        call()
    return list(mode.work)


@torch.no_grad()
def arithmetic(device: torch.device, dtypes: Sequence[str]) -> dict[str, Curve]:
    """FLOP/s by side for products, attention and convolution, by dtype."""
    best = timer(device)
    points: dict[str, dict[float, list[float]]] = {}
    for dtype in dtypes:
        small = best(_product(device, dtype, 4))
        for call in _arithmetic_calls(device, dtype, points):
            (work,) = (item for item in counted(call) if item.flops)
            reached = work.flops / _beyond(best(call), small)
            kind = f"{cost.kind_of(work.op.partition('.')[0])} {dtype}"
            points.setdefault(kind, {}).setdefault(round(cost.side_of(work), 1), []).append(reached)
    return {
        kind: tuple((side, statistics.harmonic_mean(reached)) for side, reached in sorted(found.items()))
        for kind, found in points.items()
    }


def _arithmetic_calls(
    device: torch.device, dtype: str, points: Mapping[str, Mapping[float, Sequence[float]]]
) -> Iterator[Callable[[], object]]:
    """Products, then the rest where the products that were timed so far are no slower than those of float32."""
    sides = SIDES[dtype] if device.type == "cpu" else (64, 256, 1024, 4096)
    for side in sides:
        yield _product(device, dtype, side)
        yield _product(device, dtype, side, transposed=True)
    reached, plain = (max(max(found) for found in points[f"product {name}"].values()) for name in (dtype, "float32"))
    if reached < plain:
        return  # seconds for one call, and no plan takes it
    scale = 1 if device.type == "cpu" else 8
    for length in (32, 128, 512):
        for is_causal in (False, True):
            yield from _attention(device, dtype, 4 * scale, length, is_causal)
    for channels, groups in ((32, 32), (16, 1), (64, 1), (128, 1)):
        yield from _convolution(device, dtype, 4 * scale, channels, groups)


def _product(device: torch.device, dtype: str, side: int, *, transposed: bool = False) -> Callable[[], object]:
    a, b = (torch.randn(side, side, device=device).to(getattr(torch, dtype)) for _ in range(2))
    a = a.t() if transposed else a
    return lambda: _aten.mm.default(a, b)


def _attention(
    device: torch.device, dtype: str, samples: int, length: int, is_causal: bool
) -> Iterator[Callable[[], object]]:
    shape = (samples, 4, length, 64)
    q, k, v = (torch.randn(shape, device=device).to(getattr(torch, dtype)) for _ in range(3))
    if device.type == "cpu":
        forward = _aten._scaled_dot_product_flash_attention_for_cpu.default
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        yield lambda: forward(q, k, v, 0.0, is_causal)
        out, sums = forward(q, k, v, 0.0, is_causal)
        yield lambda: backward(out, q, k, v, out, sums, 0.0, is_causal)
        return
    if dtype == "float32" or torch.cuda.get_device_capability(device) < (8, 0):
        efficient = _aten._scaled_dot_product_efficient_attention.default
        yield lambda: efficient(q, k, v, None, True, 0.0, is_causal)
        return
    flash = _aten._scaled_dot_product_flash_attention.default
    yield lambda: flash(q, k, v, 0.0, is_causal)
    out, sums, q_ends, k_ends, q_most, k_most, seed, unused, _ = flash(q, k, v, 0.0, is_causal)
    flash_backward = _aten._scaled_dot_product_flash_attention_backward.default
    saved = (out, sums, q_ends, k_ends, q_most, k_most, 0.0, is_causal, seed, unused)
    yield lambda: flash_backward(out, q, k, v, *saved)


def _convolution(
    device: torch.device, dtype: str, images: int, channels: int, groups: int
) -> Iterator[Callable[[], object]]:
    x = torch.randn(images, channels, 28, 28, device=device).to(getattr(torch, dtype))
    w = torch.randn(channels, channels // groups, 3, 3, device=device).to(getattr(torch, dtype))
    shape = ([1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    yield lambda: _aten.convolution.default(x, w, None, *shape)
    gradient = torch.randn_like(x)
    yield lambda: _aten.convolution_backward.default(gradient, x, w, None, *shape, [True, True, False])


@torch.no_grad()
def traffic(device: torch.device) -> dict[str, Curve]:
    """Bytes/s by bytes for operations that stream; ``"other"`` is the sum of two tensors."""
    best, cold = timer(device), _cold_timer(device)
    empty = {op: best(call) for op, call in _streams(device, _ROW)}
    warm = {op: _reached(call, best, empty[op]) for op, call in _streams(device, SMALL_BYTES // 4)}
    points: dict[str, list[tuple[float, float]]] = {}
    for num_bytes in BYTES if device.type == "cpu" else CARD_BYTES:
        for op, call in _streams(device, num_bytes // 4):
            if points.get(op) and points[op][-1][0] / points[op][-1][1] > _LONG_S:
                continue  # slow enough: larger ones take as long per byte
            points.setdefault(op, []).append(_reached(call, cold, empty[op]))
    curves: dict[str, Curve] = {}
    for op, large in points.items():
        size, rate = warm[op]
        curves[op] = ((size, math.sqrt(rate * large[0][1])), *large)
    return {OTHER: curves["add"], **curves}


def _reached(call: Callable[[], object], best: Timer, empty_s: float) -> tuple[float, float]:
    """The bytes that a call moves, and bytes/s beside what a call takes that moves nearly none."""
    moved = float(max(item.bytes for item in counted(call)))
    return moved, moved / _beyond(best(call), empty_s)


def _cold_timer(device: torch.device) -> Timer:
    """Like ``timer``, with nothing of the call's tensors in a CPU's caches."""
    if device.type != "cpu":
        return timer(device)
    now, scratch = clock(device), torch.zeros(FLUSH_BYTES // 4)

    def seconds(call: Callable[[], object]) -> float:
        scratch.sum()
        start = now()
        call()
        return now() - start

    return lambda call: statistics.median(seconds(call) for _ in range(BATCHES))


def _beyond(seconds: float, small: float) -> float:
    """The part of a call's time that is work."""
    return max(seconds - small, LEAST_SHARE * seconds)


_LONG_S = 5e-3
_ROW = 256
"Elements of the last dimension."


def _streams(device: torch.device, num_elements: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Operations by name, and a call of each on tensors of so many elements."""
    row = min(_ROW, num_elements)
    a, b = (torch.randn(num_elements // row, row, device=device) for _ in range(2))
    c, positive = a.clone(), a.abs()
    weight, bias = torch.ones(row, device=device), torch.zeros(row, device=device)
    yield "add", lambda: _aten.add.Tensor(a, b)
    yield "mul", lambda: _aten.mul.Tensor(a, b)
    heads = a.view(-1, 4, 2, row // 8).transpose(1, 2)  # most copies of a step put heads or channels elsewhere
    yield "clone", lambda: _aten.clone.default(heads, memory_format=torch.contiguous_format)
    yield "stack", lambda: _aten.stack.default([heads, heads])
    yield "_to_copy", lambda: _aten._to_copy.default(a, dtype=torch.bfloat16)
    yield "add_", lambda: _aten.add_.Tensor(c, a)
    yield "mul_", lambda: _aten.mul_.Tensor(c, 1.0)
    yield "lerp_", lambda: _aten.lerp_.Scalar(c, a, 0.1)
    yield "addcmul_", lambda: _aten.addcmul_.default(c, a, b, value=0.1)
    yield "addcdiv_", lambda: _aten.addcdiv_.default(c, a, weight, value=0.1)
    yield "sqrt", lambda: _aten.sqrt.default(positive)
    yield "div", lambda: _aten.div.Tensor(a, 2.0)
    yield "exp", lambda: _aten.exp.default(a)
    yield "tanh", lambda: _aten.tanh.default(a)
    yield "sigmoid", lambda: _aten.sigmoid.default(a)
    yield "pow", lambda: _aten.pow.Tensor_Scalar(a, 2)
    yield "relu", lambda: _aten.relu.default(a)
    yield "threshold_backward", lambda: _aten.threshold_backward.default(a, b, 0)
    yield "gelu", lambda: _aten.gelu.default(a)
    yield "gelu_backward", lambda: _aten.gelu_backward.default(a, b)
    yield "silu", lambda: _aten.silu.default(a)
    yield "silu_backward", lambda: _aten.silu_backward.default(a, b)
    yield "bernoulli_", lambda: _aten.bernoulli_.float(c, 0.5)
    yield "sum", lambda: _aten.sum.dim_IntList(a, [0])
    yield "mean", lambda: _aten.mean.dim(a, [-1])
    yield "linalg_vector_norm", lambda: _aten.linalg_vector_norm.default(a)
    yield "cat", lambda: _aten.cat.default([a, b])
    yield "_softmax", lambda: _aten._softmax.default(a, -1, False)
    soft = _aten._softmax.default(a, -1, False)
    yield "_softmax_backward_data", lambda: _aten._softmax_backward_data.default(a, soft, -1, a.dtype)
    yield "_log_softmax", lambda: _aten._log_softmax.default(a, -1, False)
    yield "_log_softmax_backward_data", lambda: _aten._log_softmax_backward_data.default(a, soft, -1, a.dtype)
    yield "native_layer_norm", lambda: _aten.native_layer_norm.default(a, [row], weight, bias, 1e-5)
    _, mean, deviation = _aten.native_layer_norm.default(a, [row], weight, bias, 1e-5)
    every = [True, True, True]
    yield (
        "native_layer_norm_backward",
        lambda: _aten.native_layer_norm_backward.default(b, a, [row], mean, deviation, weight, bias, every),
    )
    ids = torch.arange(a.shape[0], device=device) % 64
    yield "embedding", lambda: _aten.embedding.default(a[:64], ids)
    yield "embedding_dense_backward", lambda: _aten.embedding_dense_backward.default(a, ids, 64, -1, False)
    yield from _on_images(device, a, b)


def _on_images(device: torch.device, a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    channels = min(16, a.numel() // 16)
    pixels = a.numel() // channels
    side = max(2, 2 ** ((pixels.bit_length() - 1) // 2))
    side = min(side, 32)
    image, gradient = (t.view(-1, channels, side, side) for t in (a, b))
    weight, bias = torch.ones(channels, device=device), torch.zeros(channels, device=device)
    mean, deviation = torch.zeros(channels, device=device), torch.ones(channels, device=device)
    statistics_ = (mean, deviation, True, 0.1, 1e-5)
    yield "native_batch_norm", lambda: _aten.native_batch_norm.default(image, weight, bias, *statistics_)
    every = [True, True, True]
    backward = _aten.native_batch_norm_backward.default
    yield (
        "native_batch_norm_backward",
        lambda: backward(gradient, image, weight, mean, deviation, mean, deviation, True, 1e-5, every),
    )
    shape = (image.shape[0], channels, side * side, min(4, channels))
    yield "native_group_norm", lambda: _aten.native_group_norm.default(image, weight, bias, *shape, 1e-5)
    _, means, deviations = _aten.native_group_norm.default(image, weight, bias, *shape, 1e-5)
    group_backward = _aten.native_group_norm_backward.default
    yield (
        "native_group_norm_backward",
        lambda: group_backward(gradient, image, means, deviations, weight, *shape, every),
    )
    window = ([2, 2], [2, 2], [0, 0], [1, 1], False)
    pooled, indices = _aten.max_pool2d_with_indices.default(image, *window)
    yield "max_pool2d_with_indices", lambda: _aten.max_pool2d_with_indices.default(image, *window)
    pool_backward = _aten.max_pool2d_with_indices_backward.default
    yield "max_pool2d_with_indices_backward", lambda: pool_backward(pooled, image, *window, indices)
