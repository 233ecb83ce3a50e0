"""Temporaries of element-wise operations whose inputs have different types: CPU kernels take one type only.

Entry point: ``HIDDEN``. Reason: ``TensorIteratorBase::compute_types`` in ATen/TensorIterator.cpp makes a copy of every
input whose type is not the common one, and of an output that is written in another type; all live until the kernel
ends. CUDA kernels cast while they load.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from snugfit.memory.events import Call, tensors_of

_ARITHMETIC = """add.Tensor add_.Tensor sub.Tensor sub_.Tensor rsub.Tensor mul.Tensor mul_.Tensor div.Tensor div_.Tensor
    div.Tensor_mode remainder.Tensor fmod.Tensor pow.Tensor_Tensor atan2.default maximum.default minimum.default
    fmax.default fmin.default hypot.default logaddexp.default logaddexp2.default addcmul.default addcmul_.default
    addcdiv.default addcdiv_.default lerp.Tensor lerp_.Tensor floor_divide.default clamp_min.Tensor clamp_max.Tensor
    clamp.Tensor copysign.Tensor xlogy.Tensor ldexp.Tensor bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor
    add.Scalar mul.Scalar div.Scalar sub.Scalar rsub.Scalar""".split()
_UNARY = """sqrt.default rsqrt.default exp.default log.default log2.default log1p.default sin.default cos.default
    tanh.default sigmoid.default reciprocal.default erf.default expm1.default""".split()
_COMPARISON = """eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor""".split()
_CATEGORIES = (
    (torch.bool,),
    (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    (torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


def _mixed(call: Call) -> int:
    tensors = [tensor for value in call.args for tensor in tensors_of(value)]
    if len({tensor.dtype for tensor in tensors}) < 2 and not _becomes_float(call):
        return 0
    name = call.name.partition(".")[0]
    common = common_dtype(tensors, call.args)
    if not name.endswith("_") and call.name not in _COMPARISON:
        common = call.result.dtype
    copied = sum(tensor.numel() for tensor in tensors if tensor.dtype != common)
    if name.endswith("_") and tensors[0].dtype != common:
        copied += tensors[0].numel()
    return copied * common.itemsize


def _where(call: Call) -> int:
    values = [value for value in call.args[1:] if isinstance(value, Tensor)]
    return sum(value.numel() * call.result.element_size() for value in values if value.dtype != call.result.dtype)


def _becomes_float(call: Call) -> bool:
    """Whether integers are turned into floating point, as by division or by a Python float."""
    result = call.result
    first = call.args[0]
    return isinstance(result, Tensor) and result.is_floating_point() and not first.is_floating_point()


def common_dtype(tensors: list[Tensor], values: object = ()) -> torch.dtype:
    """The type in which an element-wise operation computes: 0-dimensional tensors count only in a wider category."""
    shaped = [tensor.dtype for tensor in tensors if tensor.dim()]
    common = _promoted(shaped) if shaped else _promoted([tensor.dtype for tensor in tensors])
    for tensor in tensors:
        if not tensor.dim() and _category(tensor.dtype) > _category(common):
            common = torch.promote_types(common, tensor.dtype)
    return common


def _promoted(dtypes: list[torch.dtype]) -> torch.dtype:
    common = dtypes[0]
    for dtype in dtypes[1:]:
        common = torch.promote_types(common, dtype)
    return common


def _category(dtype: torch.dtype) -> int:
    for position, dtypes in enumerate(_CATEGORIES):
        if dtype in dtypes:
            return position
    return len(_CATEGORIES)


def _magnitude(call: Call) -> int:
    """``abs`` of complex numbers is computed as a complex result first (ATen/native/UnaryOps.cpp)."""
    return call.args[0].numel() * call.args[0].element_size() if call.args[0].is_complex() else 0


HIDDEN: dict[str, Callable[[Call], int]] = {
    **dict.fromkeys((*_ARITHMETIC, *_UNARY, *_COMPARISON), _mixed),
    "where.self": _where,
    "abs.default": _magnitude,
}
