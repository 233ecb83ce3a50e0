"""What CUDA's kernels take for their own length, by operation: partial sums, sort areas, contiguous copies.

Entry point: ``BUFFERS``: operation -> function of a call and the target -> sizes in bytes, all alive beside the
results and gone when the kernel is done; those in a tuple are gone as soon as the next one is there. Each function
says which file of ATen it follows. Left out: what depends on
values (``nonzero``, ``unique``), the scratch memory of cuDNN, cuSOLVER and cuFFT, and buffers of a few hundred bytes.
"""

import math
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from snugfit.memory.cuda import attention_buffers, reductions
from snugfit.memory.cuda.target import Target
from snugfit.memory.events import Call

Sizes = Sequence[int]
Buffers = Callable[[Call, Target], Sequence[int | tuple[int, ...]]]
_HALF = (torch.float16, torch.bfloat16)
_INT64 = 8


def _argument(call: Call, position: int, name: str, default: Any = None) -> Any:
    return call.args[position] if len(call.args) > position else call.kwargs.get(name, default)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _accumulator_bytes(dtype: torch.dtype) -> int:
    """Of a sum: single precision for half (AccumulateType.h), 64 bits for whole numbers."""
    return 4 if dtype in _HALF else max(4, dtype.itemsize) if dtype.is_floating_point else _INT64


def _reduction(
    dim_position: int | None, element_bytes: Callable[[torch.dtype], int]
) -> Callable[[Call, Target], Sizes]:
    """Reduce.cuh, for an operation whose dimensions are the argument at a position (None: all)."""

    def buffers(call: Call, target: Target) -> Sizes:
        tensor = call.args[0]
        dims = None if dim_position is None else _argument(call, dim_position, "dim")
        dims = () if dims is None else (dims,) if isinstance(dims, int) else dims
        return reductions.buffers(tensor, dims, element_bytes(tensor.dtype), target)

    return buffers


def _sum(dim_position: int | None) -> Callable[[Call, Target], Sizes]:
    """ReduceOpsUtils.h, ``make_reduction``: inputs are copied into the type of the result, but half into single."""
    reduction = _reduction(dim_position, _accumulator_bytes)

    def buffers(call: Call, target: Target) -> Sizes:
        tensor, dtype = call.args[0], call.result.dtype
        read_as_it_is = tensor.dtype == dtype or (tensor.dtype in _HALF and dtype == torch.float32)
        copy = () if read_as_it_is else (tensor.numel() * dtype.itemsize,)
        return (*copy, *reduction(call, target))

    return buffers


def _scan(call: Call, target: Target) -> Sizes:
    """ReduceOps.cpp, ``cum_ops``: inputs of another type than the result are copied into it."""
    tensor, dtype = call.args[0], call.result.dtype
    return [] if tensor.dtype == dtype else [tensor.numel() * dtype.itemsize]


def _welford_bytes(_: torch.dtype) -> int:
    return 16  # mean, sum of squares, count twice: WelfordData in SharedReduceOps.h


def _own_bytes(dtype: torch.dtype) -> int:
    return dtype.itemsize


def _with_index_bytes(dtype: torch.dtype) -> int:
    return 8 + max(8, dtype.itemsize)  # thrust pair of a value and an int64 index


def _logsumexp(call: Call, target: Target) -> Sizes:
    """ReduceOps.cpp: the exponentials of all inputs, then their sum."""
    return (_bytes(call.args[0]), *_reduction(1, _accumulator_bytes)(call, target))


def _contiguous_copies(*positions: int) -> Callable[[Call, Target], Sizes]:
    """Kernels that begin with ``.contiguous()`` of these arguments."""

    def buffers(call: Call, target: Target) -> Sizes:
        tensors = [call.args[position] for position in positions if position < len(call.args)]
        return [_bytes(t) for t in tensors if isinstance(t, Tensor) and not t.is_contiguous()]

    return buffers


def _mean_of_losses(call: Call, target: Target) -> Sizes:
    """Loss.cu, PointwiseOps: the losses of all elements, then their mean."""
    reduction = _argument(call, 3 if call.name.startswith("binary") else 2, "reduction", 1)
    return [_bytes(call.args[0])] if reduction else []


def _radix_sort_bytes(count: int, num_bits: int) -> int:
    """Scratch memory of cub's radix sort of pairs of int64.

    One tile needs 1 byte; more need copies of keys and values, 256 counters per 8 bits and per tile, and alignment.
    Tile sizes follow two published traces of torch 2.11: 1 B for 2048 pairs, 138,751 B for 8192 pairs of 14 bits.
    """
    if count <= 256 * 9:
        return 1
    passes, tiles = -(-num_bits // 8), -(-count // 1920)
    return 2 * (-(-count * _INT64 // 256) * 256) + passes * 1024 + tiles * 1024 + 256 + 255


def _index_put(call: Call, target: Target) -> Sequence[int | tuple[int, ...]]:
    """Indexing.cu, ``index_put_with_sort_kernel``: linear indices, sorted, and where they came from."""
    table, indices, values = call.args[:3]
    if not _argument(call, 3, "accumulate", False) and not torch.are_deterministic_algorithms_enabled():
        return []
    given = [index for index in indices if isinstance(index, Tensor)]
    if not given or any(index.dtype in (torch.bool, torch.uint8) for index in given):
        return []
    count = math.prod(max(sizes) for sizes in zip_longest(*(index.shape[::-1] for index in given), fillvalue=1))
    rows = math.prod(size for size, index in zip(table.shape, indices, strict=False) if isinstance(index, Tensor))
    sizes = [] if values.is_contiguous() else [_bytes(values)]
    return [*sizes, (count * _INT64,), *4 * [count * _INT64], _radix_sort_bytes(count, max(rows - 1, 1).bit_length())]


def _embedding_backward(call: Call, target: Target) -> Sizes:
    """Embedding.cu and EmbeddingBackwardKernel.cu: up to 3072 indices need nothing, more are sorted and summed.

    The partial sums take (distinct + indices / 10) rows; as many rows may be distinct as there are indices.
    """
    gradient, indices, num_weights = call.args[:3]
    sizes = [] if gradient.is_contiguous() else [_bytes(gradient)]
    count, width = indices.numel(), gradient.shape[-1]
    if count <= 3072 and not _argument(call, 4, "scale_grad_by_freq", False):
        return sizes
    segments = min(count, int(num_weights))
    parts = count // 10 + segments
    index_bytes = indices.element_size()
    sizes += [count * index_bytes] * 3 + [segments * index_bytes] * 2 + [parts * index_bytes]
    accumulator = _accumulator_bytes(gradient.dtype)
    padded = -(-width // 32) * 32
    grid = -(-segments * padded // min(padded, 1024))
    if target.torch_version >= (2, 10) and grid < 4 * target.multiprocessors and parts > 4 * grid:
        sizes.append(parts * index_bytes)
        return sizes if gradient.dtype not in _HALF else [*sizes, int(num_weights) * width * accumulator]
    return [*sizes, parts * width * accumulator]


def _foreach_norm(call: Call, target: Target) -> Sizes:
    """ForeachReduceOp.cu: a partial norm per chunk of 65,536 elements, for as many chunks as the longest has."""
    tensors = call.args[0]
    chunks = max((-(-t.numel() // 65536) for t in tensors), default=0)
    return [len(tensors) * chunks * max(_accumulator_bytes(t.dtype) for t in tensors[:1])] if chunks else []


def _safe_softmax(call: Call, target: Target) -> Sizes:
    """transformers/attention.cpp: which scores are minus infinity, one byte each."""
    return [call.args[0].numel()]


def _softmax_backward(call: Call, target: Target) -> Sizes:
    """SoftMax.cu, ``softmax_backward_cuda_out``: the product of gradient and output, in the wider of their types.

    Seen in published peaks of OPT with eager attention; the logarithm's backward has no such product.
    """
    gradient, output = call.args[:2]
    product = output.numel() * torch.promote_types(gradient.dtype, output.dtype).itemsize
    return [product] if output.is_contiguous() else [product, _bytes(output)]


def _group_norm(call: Call, target: Target) -> Sizes:
    """group_norm_kernel.cu: scale and shift per sample and channel."""
    tensor, batch, channels = call.args[0], int(call.args[3]), int(call.args[4])
    return [*_contiguous_copies(0)(call, target), *2 * [batch * channels * _accumulator_bytes(tensor.dtype)]]


def _group_norm_backward(call: Call, target: Target) -> Sizes:
    """group_norm_kernel.cu: two sums per channel, a factor per channel and two per group."""
    tensor, batch, channels, groups = call.args[1], int(call.args[5]), int(call.args[6]), int(call.args[8])
    size = _accumulator_bytes(tensor.dtype)
    copies = _contiguous_copies(0, 1)(call, target)
    return [*copies, *3 * [batch * channels * size], *2 * [batch * groups * size]]


def _layer_norm_backward(call: Call, target: Target) -> Sizes:
    """layer_norm_kernel.cu: many rows of few columns are summed in two passes."""
    gradient, normalized = call.args[0], call.args[2]
    columns = math.prod(normalized)
    rows = gradient.numel() // max(columns, 1)
    copies = list(_contiguous_copies(0, 1)(call, target))
    if rows <= 64 * 1024 or columns // 32 >= target.multiprocessors // 2:
        return copies
    blocks = min(64 * 1024 // 2 // -(-columns // 32), -(-rows // 32))
    wanted = 1 if "rms_norm" in call.name else 2
    return copies + wanted * [blocks * columns * gradient.element_size()]


def _layout(*tensors: Tensor) -> torch.memory_format:
    """What cuDNN computes in: channels_last as soon as one operand has it (ConvUtils.h)."""
    for tensor in tensors:
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        wanted = formats.get(tensor.dim())
        if wanted and tensor.is_contiguous(memory_format=wanted) and not tensor.is_contiguous():
            return wanted
    return torch.contiguous_format


def _convolution(call: Call, target: Target) -> Sizes:
    """cudnn/ConvShared.cpp: operands of another layout are copied; the workspace is not known."""
    tensor, weight = call.args[:2]
    layout = _layout(tensor, weight)
    return [_bytes(t) for t in (tensor, weight) if not t.is_contiguous(memory_format=layout)]


def _convolution_backward(call: Call, target: Target) -> Sizes:
    """Convolution.cpp: operands of another layout are copied, and the bias' gradient is a sum."""
    gradient, tensor, weight = call.args[:3]
    layout = _layout(tensor, weight)
    sizes = [_bytes(t) for t in (gradient, tensor, weight) if not t.is_contiguous(memory_format=layout)]
    if call.args[-1][2]:
        dims = (0, *range(2, gradient.dim()))
        sizes += reductions.buffers(gradient, dims, _accumulator_bytes(gradient.dtype), target)
    return sizes


BUFFERS: dict[str, Buffers] = {
    **attention_buffers.BUFFERS,
    "sum.default": _sum(None),
    "sum.dim_IntList": _sum(1),
    "mean.default": _sum(None),
    "mean.dim": _sum(1),
    "prod.default": _sum(None),
    "prod.dim_int": _sum(1),
    "linalg_vector_norm.default": _reduction(2, _accumulator_bytes),
    "norm.Scalar": _reduction(None, _accumulator_bytes),
    "norm.ScalarOpt_dim": _reduction(2, _accumulator_bytes),
    "cumsum.default": _scan,
    "cumprod.default": _scan,
    "amax.default": _reduction(1, _own_bytes),
    "amin.default": _reduction(1, _own_bytes),
    "max.default": _reduction(None, _own_bytes),
    "min.default": _reduction(None, _own_bytes),
    "any.default": _reduction(None, lambda _: 1),
    "all.default": _reduction(None, lambda _: 1),
    "max.dim": _reduction(1, _with_index_bytes),
    "min.dim": _reduction(1, _with_index_bytes),
    "argmax.default": _reduction(1, _with_index_bytes),
    "argmin.default": _reduction(1, _with_index_bytes),
    "var.correction": _reduction(1, _welford_bytes),
    "std.correction": _reduction(1, _welford_bytes),
    "var_mean.correction": _reduction(1, _welford_bytes),
    "logsumexp.default": _logsumexp,
    "_softmax.default": _contiguous_copies(0),
    "_log_softmax.default": _contiguous_copies(0),
    "_softmax_backward_data.default": _softmax_backward,
    "_log_softmax_backward_data.default": _contiguous_copies(0, 1),
    "_safe_softmax.default": _safe_softmax,
    "native_layer_norm.default": _contiguous_copies(0),
    "native_layer_norm_backward.default": _layer_norm_backward,
    "_fused_rms_norm.default": _contiguous_copies(0),
    "_fused_rms_norm_backward.default": _layer_norm_backward,
    "native_group_norm.default": _group_norm,
    "native_group_norm_backward.default": _group_norm_backward,
    "mse_loss.default": _mean_of_losses,
    "smooth_l1_loss.default": _mean_of_losses,
    "huber_loss.default": _mean_of_losses,
    "binary_cross_entropy.default": _mean_of_losses,
    "index_put.default": _index_put,
    "index_put_.default": _index_put,
    "_index_put_impl_.default": _index_put,
    "_unsafe_index_put.default": _index_put,
    "embedding_dense_backward.default": _embedding_backward,
    "_foreach_norm.Scalar": _foreach_norm,
    "convolution.default": _convolution,
    "convolution_backward.default": _convolution_backward,
}
"Sizes of an operation's buffers, alive beside its results."
