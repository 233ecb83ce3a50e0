"""Temporaries of the CPU's kernel for scaled-dot-product attention: blocks of scores per thread.

Entry point: ``HIDDEN``. Reason: ATen/native/cpu/FlashAttentionKernel.cpp, block sizes by the number of queries.
"""

from collections.abc import Callable

import torch

from snugfit.memory.cpu.copies import copied
from snugfit.memory.cpu.matrix_products import packed
from snugfit.memory.events import Call

_KEYS = 512


def _queries(length: int) -> int:
    """Rows of one block."""
    return min(length, 256 if length >= 768 else 64 if length >= 192 else 32)


def _forward(call: Call) -> int:
    query, key = call.args[0], call.args[1]
    rows, columns = _queries(query.shape[2]), min(key.shape[2], _KEYS)
    num_bytes = 4 * (rows * columns + 2 * rows + rows * query.shape[3])
    if query.element_size() == 2:
        num_bytes += 2 * rows * columns
    return int(num_bytes * torch.get_num_threads())


def _backward(call: Call) -> int:
    gradient, query, key = call.args[0], call.args[1], call.args[2]
    rows, columns = _queries(query.shape[2]), min(key.shape[2], _KEYS)
    per_thread = 4 * (2 * rows * columns + rows)
    if query.element_size() == 2:
        # The scores and their gradient once more in the half type, and what the products of blocks pack.
        per_thread += 2 * 2 * rows * columns
        per_thread += (
            max(packed(columns, rows, query.shape[3], True), packed(rows, columns, query.shape[3], False))
            // torch.get_num_threads()
        )
    # The kernel reads gradients position by position, the heads of one position together.
    return copied([gradient.transpose(1, 2)]) + int(per_thread * torch.get_num_threads())


HIDDEN: dict[str, Callable[[Call], int]] = {
    "_scaled_dot_product_flash_attention_for_cpu.default": _forward,
    "_scaled_dot_product_flash_attention_for_cpu_backward.default": _backward,
}
