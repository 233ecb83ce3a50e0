"""Temporaries of reductions and sorts.

Entry point: ``HIDDEN``. A reduction whose input has another type than it sums in copies the whole input
(``make_reduction`` in ATen/native/ReduceOpsUtils.h, ``mean`` of half types in ReduceOps.cpp).
"""

from collections.abc import Callable

import torch

from snugfit.memory.cpu.copies import num_bytes
from snugfit.memory.cpu.transforms import are_one
from snugfit.memory.events import Call

_HALF = (torch.bfloat16, torch.float16)


def _sum(call: Call) -> int:
    value, result = call.args[0], call.result
    if value.dtype != result.dtype:
        return int(value.numel() * result.element_size())
    dims = call.args[1] if len(call.args) > 1 and value.dim() else None
    if value.dtype in _HALF and isinstance(dims, (list, tuple)) and not are_one(value, dims or range(value.dim())):
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


def _safe_softmax(call: Call) -> int:
    """Rows without any value to look at are found first: a mask, and its reduction (ATen/native/transformers)."""
    value = call.args[0]
    return int(value.numel() + value.numel() // max(1, value.shape[-1]))


def _in_type_of_result(call: Call) -> int:
    value, result = call.args[0], call.result
    return 0 if value.dtype == result.dtype else int(value.numel() * result.element_size())


def _magnitudes(call: Call) -> int:
    return num_bytes(call.args[0]) if call.args[0].is_floating_point() else 0


HIDDEN: dict[str, Callable[[Call], int]] = {
    **dict.fromkeys(("sum.default", "sum.dim_IntList", "nansum.default", "prod.default", "prod.dim_int"), _sum),
    **dict.fromkeys(("mean.default", "mean.dim"), _mean),
    **dict.fromkeys(("cumsum.default", "cumprod.default"), _cumulative),
    "logsumexp.default": _logsumexp,
    **dict.fromkeys(("sort.default", "sort.stable"), _sort),
    "kthvalue.default": _kthvalue,
    "linalg_vector_norm.default": _in_type_of_result,
    "isinf.default": _magnitudes,
    "_safe_softmax.default": _safe_softmax,
}
