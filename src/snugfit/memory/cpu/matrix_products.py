"""Temporaries of matrix products: copies of operands that BLAS cannot read, and oneDNN's packed blocks of bfloat16.

Entry point: ``HIDDEN``. float32 goes to BLAS, which reads transposed matrices but none whose rows overlap; bfloat16
goes to oneDNN's kernel, which packs blocks of both operands and sums into a float32 block, per thread.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from snugfit.memory.cpu.copies import num_bytes
from snugfit.memory.events import Call

_SMALL = 16**3
"Products with no more multiplications stay out of oneDNN: ATen/native/mkldnn/Matmul.cpp, mkldnn_gemm_min_size."
_ROWS, _COLUMNS = 256, 64
_FEWEST_ROWS, _MOST_COLUMNS = 32, 1024
_DEPTH = 512


def _product(call: Call) -> int:
    first, second = call.args[-2:] if call.name.startswith(("mm", "bmm")) else call.args[1:3]
    if first.dtype == torch.bfloat16:
        number = first.shape[0] if first.dim() == 3 else 1
        return packed(first.shape[-2], first.shape[-1], second.shape[-1], is_transposed(first), number)
    each = num_bytes if first.dim() == 2 else _one_matrix
    return sum(each(operand) for operand in (first, second) if not _blas_reads(operand))


def packed(rows: int, depth: int, columns: int, transposed: bool, number: int = 1) -> int:
    """Bytes of oneDNN's scratchpad for a product of bfloat16 matrices.

    A block of the right operand, one of float32 sums, and one of the left operand where that is transposed; then sums
    that need several blocks of depth are kept for up to 1024 columns. These are the blocks of one thread with AVX-512,
    measured over sizes from 8 to 4096 and exact there; each thread has its own (measured with two).

    Args:
        rows: Of the left operand.
        depth: What is summed over.
        columns: Of the right operand.
        transposed: Whether the left operand lies so.
        number: Matrices of a batch, which are multiplied one after the other.
    """
    if number * rows * depth * columns <= _SMALL:
        return 0
    threads = torch.get_num_threads()
    block_rows = _block_rows(rows)
    if -(-rows // block_rows) * (1 if transposed else -(-columns // _COLUMNS)) < threads:
        block_rows = min(block_rows, -(-rows // threads))
    block_columns = min(columns, _COLUMNS)
    block_depth = min(-(-depth // 32) * 32, _DEPTH)
    left = 0
    if transposed:
        left = 2 * block_rows * (block_depth if depth < _DEPTH else _DEPTH + 32)
        if depth > _DEPTH and columns > _COLUMNS:
            parts = -(-columns // _MOST_COLUMNS)
            block_columns = max(block_columns, -(-columns // parts // _COLUMNS) * _COLUMNS)
    elif depth > 2 * _DEPTH:
        block_depth = 2 * _DEPTH
    each = 2 * _COLUMNS * block_depth + 4 * block_rows * block_columns + left + 640
    return each * threads + 384 + (128 if transposed else 0)


def _block_rows(rows: int) -> int:
    """Rows of one block: as many as 256, so that the last block is as full as can be."""
    if rows <= _ROWS:
        return rows
    return min(range(_ROWS, _FEWEST_ROWS - 1, -1), key=lambda block: -rows % block)


def is_transposed(matrix: Tensor) -> bool:
    """Whether the columns of a matrix, not its rows, lie together."""
    return matrix.stride(-1) != 1 and matrix.stride(-2) == 1


def _blas_reads(matrix: Tensor) -> bool:
    """Whether BLAS takes a matrix as it lies: one stride is 1, the other is at least a line (ATen/native/Blas.cpp)."""
    rows, columns = matrix.shape[-2:]
    down, right = matrix.stride()[-2:]
    return (right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows))


def _one_matrix(batch: Tensor) -> int:
    """A batch is copied matrix by matrix."""
    return batch.shape[-1] * batch.shape[-2] * batch.element_size()


def _matrix_vector(call: Call) -> int:
    matrix = call.args[0]
    if matrix.dtype == torch.bfloat16:
        rows, depth = matrix.shape
        return packed(rows, depth, 1, is_transposed(matrix))
    return 0 if _blas_reads(matrix) else num_bytes(matrix)


HIDDEN: dict[str, Callable[[Call], int]] = {
    **dict.fromkeys(("mm.default", "addmm.default", "bmm.default", "baddbmm.default"), _product),
    "mv.default": _matrix_vector,
}
