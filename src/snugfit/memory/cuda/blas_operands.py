"""The copies that cuBLAS products make of operands whose layout the library cannot read.

Entry point: ``record``. Rule: ``prepare_matrix_for_cublas`` in ATen/native/cuda/Blas.cpp. The gradient of a sum is one
number expanded, so that the matrix products behind it copy a whole gradient twice. Left out: products with vectors,
sparse and complex operands.
"""

from torch import Tensor

from snugfit.memory.events import Call
from snugfit.memory.recording import Recorder

_FIRST_OPERAND = {
    "mm.default": 0,
    "mm.out": 0,
    "bmm.default": 0,
    "bmm.out": 0,
    "addmm.default": 1,
    "addmm.out": 1,
    "addmm_.default": 1,
    "_addmm_activation.default": 1,
    "baddbmm.default": 1,
    "baddbmm_.default": 1,
}
"Products by the position of their first matrix; the second follows it."


def record(call: Call, recorder: Recorder) -> list[int]:
    """Record the copies of a product's operands; the caller releases them when the product is done."""
    first = _FIRST_OPERAND.get(call.name)
    if first is None:
        return []
    return [
        recorder.allocate(operand.numel() * operand.element_size(), "temporary", f"{call.name}, copy of an operand")
        for operand in call.args[first : first + 2]
        if not is_readable(operand)
    ]


def is_readable(matrix: Tensor) -> bool:
    """Whether cuBLAS can read a matrix, or each of a batch: rows or columns dense, the others at least as far apart."""
    rows, columns = matrix.shape[-2:]
    row_stride, column_stride = matrix.stride()[-2:]
    if matrix.is_contiguous() or matrix.numel() == 0:
        return True
    return (column_stride == 1 and row_stride >= max(1, columns)) or (row_stride == 1 and column_stride >= max(1, rows))
