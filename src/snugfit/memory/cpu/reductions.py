"""Temporaries of reductions, sorts and lookups.

Entry point: ``HIDDEN``. A reduction whose input has another type than it sums in copies the whole input
(``make_reduction`` in ATen/native/ReduceOpsUtils.h, ``mean`` of half types in ReduceOps.cpp).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from snugfit.memory.cpu.copies import copied, num_bytes
from snugfit.memory.events import Call

_HALF = (torch.bfloat16, torch.float16)


def _sum(call: Call) -> int:
    value, result = call.args[0], call.result
    if value.dtype != result.dtype:
        return int(value.numel() * result.element_size())
    dims = call.args[1] if len(call.args) > 1 else None
    if value.dtype in _HALF and isinstance(dims, (list, tuple)) and len(dims) != 1 and value.dim() > 1:
        return int(4 * (value.numel() + result.numel()))  # several dimensions are summed in float32
    return 0


def _mean(call: Call) -> int:
    value, result = call.args[0], call.result
    if value.dtype in _HALF:
        return int(4 * (value.numel() + result.numel()))
    return 0 if value.dtype == result.dtype else int(value.numel() * result.element_size())


def _cumulative(call: Call) -> int:
    value, result = call.args[0], call.result
    return 0 if value.dtype == result.dtype else num_bytes(result)


def _logsumexp(call: Call) -> int:
    """The difference to the maximum is a tensor of the input's size; then the maxima (ReduceOps.cpp)."""
    return num_bytes(call.args[0]) + num_bytes(call.result)


def _sort(call: Call) -> int:
    """One row of indices (ATen/native/cpu/SortingKernel.cpp)."""
    value = call.args[0]
    dim = call.args[1] if len(call.args) > 1 and isinstance(call.args[1], int) else -1
    return 8 * value.shape[dim] if value.dim() else 0


def _kthvalue(call: Call) -> int:
    """Works on copies of values and indices (ATen/native/Sorting.cpp)."""
    return num_bytes(call.args[0]) + 8 * int(call.args[0].numel())


def _half_in_float32(position: int) -> Callable[[Call], int]:
    """Gather and scatter of half types take a float32 buffer (measured: TensorAdvancedIndexing kernels of AVX-512)."""

    def rule(call: Call) -> int:
        value = call.args[0]
        like = call.args[position]
        return 4 * like.numel() if value.dtype in _HALF and isinstance(like, Tensor) else 0

    return rule


def _embedding_bag(call: Call) -> int:
    """For the mean every index is told its bag, by counting and summing up (EmbeddingBag.cpp, make_offset2bag)."""
    indices, bags, mode = call.args[1], call.args[2], call.args[4]
    return num_bytes(indices) - 2 * num_bytes(bags) if mode == _MEAN else 0


def _embedding_bag_backward(call: Call) -> int:
    """Indices are sorted and counted, the gradient made contiguous; the maximum goes bag by bag (EmbeddingBag.cpp)."""
    gradient, indices, bags, mode = call.args[0], call.args[1], call.args[2], call.args[8]
    gathered = copied([gradient])
    if mode == _MAXIMUM:
        return gathered + 8 * int(gradient.numel()) + num_bytes(gradient) + num_bytes(bags)
    which_bag = call.args[3]
    return gathered + (3 if which_bag.numel() else 4) * num_bytes(indices)


_MEAN, _MAXIMUM = 1, 2


def _safe_softmax(call: Call) -> int:
    """Rows without any value to look at are found first: a mask, and its reduction (ATen/native/transformers)."""
    value = call.args[0]
    return int(value.numel() + 2 * value.numel() // max(1, value.shape[-1]))


HIDDEN: dict[str, Callable[[Call], int]] = {
    **dict.fromkeys(("sum.default", "sum.dim_IntList", "nansum.default", "prod.default", "prod.dim_int"), _sum),
    **dict.fromkeys(("mean.default", "mean.dim"), _mean),
    **dict.fromkeys(("cumsum.default", "cumprod.default"), _cumulative),
    "logsumexp.default": _logsumexp,
    **dict.fromkeys(("sort.default", "sort.stable"), _sort),
    "kthvalue.default": _kthvalue,
    "gather.default": _half_in_float32(2),
    **dict.fromkeys(
        (
            "scatter.src",
            "scatter.value",
            "scatter_add.default",
            "scatter_.src",
            "scatter_.value",
            "scatter_add_.default",
        ),
        _half_in_float32(0),
    ),
    "_embedding_bag.default": _embedding_bag,
    "_embedding_bag_backward.default": _embedding_bag_backward,
    "_safe_softmax.default": _safe_softmax,
}
