"""What the fused attention kernels take for their own length: accumulators, staging areas, and copies of gradients.

Entry point: ``BUFFERS``. Rules: ATen/native/transformers/cuda/flash_attn/flash_api.cpp (flash),
mem_eff_attention/kernel_forward.h, kernel_backward.h and kernels/cutlassB.h (memory-efficient), the frontend of cuDNN
(node/scaled_dot_product_flash_attention.h). Left out: what cuDNN's own engines add, and deterministic mode's splits.
"""

from collections.abc import Callable

from torch import Tensor

from snugfit.memory.cuda.target import Target
from snugfit.memory.events import Call

_FLOAT = 4
_UNBOUNDED = 65536
"Head size of the kernels that take any."


def _ceil(number: int, step: int) -> int:
    return -(-number // step)


def _up(number: int, step: int) -> int:
    return _ceil(number, step) * step


def _rounded_head(head_dim: int) -> int:
    return _up(head_dim, 32 if head_dim <= 128 else 64)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _copy(tensor: Tensor) -> list[int]:
    """A copy in the kernels' layout (batch, length, head, size), where a tensor does not have it."""
    expected = 1
    for dim in (3, 1, 2, 0):
        size = tensor.shape[dim]
        if size > 1 and tensor.stride(dim) != expected:
            return [_bytes(tensor)] if tensor.numel() else []
        expected *= size
    return []


def flash_forward(call: Call, target: Target) -> list[int]:
    """Partial results of split keys, where batch and heads alone do not fill the card (``set_params_splitkv``)."""
    query, key = call.args[:2]
    batch, heads, length, head_dim = query.shape
    dropout_p = call.args[3] if len(call.args) > 3 else call.kwargs.get("dropout_p", 0.0)
    if dropout_p:
        return []
    block = 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64
    splits = _num_splits(batch * heads * _ceil(length, 64), 2 * target.multiprocessors, _ceil(key.shape[2], block))
    if splits == 1:
        return []
    rows = splits * batch * heads * length
    return [rows * _FLOAT, rows * _rounded_head(head_dim) * _FLOAT]


def _num_splits(blocks: int, multiprocessors: int, key_blocks: int) -> int:
    """``num_splits_heuristic`` of flash_api.cpp: the fewest splits that come within 85 % of the best occupancy."""
    if blocks >= 0.8 * multiprocessors:
        return 1
    most = min(128, multiprocessors, key_blocks)
    useful = [n for n in range(1, most + 1) if n == 1 or _ceil(key_blocks, n) != _ceil(key_blocks, n - 1)]
    waves = {n: blocks * n / multiprocessors for n in useful}
    occupancy = {n: wave / max(1, -(-blocks * n // multiprocessors)) for n, wave in waves.items()}
    best = max(occupancy.values())
    return next(n for n in useful if occupancy[n] >= 0.85 * best)


def flash_backward(call: Call, target: Target) -> list[int]:
    """The gradient of the queries in single precision, a row sum, and for grouped queries whole gradients."""
    grad_out, query, key, _, out = call.args[:5]
    batch, heads, length, head_dim = query.shape
    rows = _up(length, 128)
    sizes = [*_copy(grad_out), *_copy(out)]
    sizes += [batch * heads * rows * _FLOAT, batch * rows * heads * _rounded_head(head_dim) * _FLOAT]
    if key.shape[1] != heads:
        sizes += 2 * [batch * key.shape[2] * heads * head_dim * query.element_size()]
    return sizes


def efficient_forward(call: Call, target: Target) -> list[int]:
    """The output in single precision, for half-precision values that one block of keys cannot hold."""
    value = call.args[2]
    if value.element_size() == _FLOAT or max(value.shape[-1], call.args[0].shape[-1]) <= 128:
        return []
    batch, heads, length, _ = call.args[0].shape
    return [batch * heads * length * value.shape[-1] * _FLOAT]


def efficient_backward(call: Call, target: Target) -> list[int]:
    """A row sum and the staging area of the gradients (``Params::workspace_size`` of kernel_backward.h)."""
    grad_out, query, key, value = call.args[:4]
    batch, heads, length, head_dim = query.shape
    has_dropout = bool(call.args[9] if len(call.args) > 9 else call.kwargs.get("dropout_p", 0.0))
    half = query.element_size() < _FLOAT
    sizes = [*_copy(grad_out), batch * heads * length * _FLOAT]
    rows, keys, head_limit = _efficient_kernel(
        max(head_dim, value.shape[-1]), half, has_dropout, target.compute_capability
    )
    sm = target.compute_capability
    elements = 0
    in_registers = half and head_limit <= rows
    num_splits = _efficient_splits(batch * heads, key.shape[2], keys, half and not in_registers, sm)
    if half and not in_registers:
        elements += num_splits * keys * (_up(head_dim, rows) + _up(value.shape[-1], rows))
    if half or sm >= (7, 0):
        # One tile of rows x keys floats, with a lock, a counter and padding: 4 words.
        elements += _ceil(length, rows) * _ceil(head_dim, keys) * (rows * keys + 4)
    if elements:
        sizes.append(batch * heads * _up(elements, 4) * _FLOAT)
    if key.shape[1] != heads:  # gradients of all heads, summed afterwards; since torch 2.14
        sizes += [batch * heads * key.shape[2] * size * query.element_size() for size in (head_dim, value.shape[-1])]
    return sizes


def _efficient_kernel(head_dim: int, half: bool, dropout: bool, sm: tuple[int, int]) -> tuple[int, int, int]:
    """Rows and keys of a block, and the largest head, of the first kernel that fits (kernels/cutlassB.h).

    Those of 128 rows and a head of 128 need more shared memory than cards of 8.6 and 8.9 have, nor those of 7.5.
    """
    if head_dim <= 64:
        return 64, 64, 32 if head_dim <= 32 else 64
    large_shared_memory = sm in ((8, 0), (8, 7)) or (9, 0) <= sm < (12, 0)
    if half and head_dim <= 96 and sm in ((8, 6), (8, 9)) and not dropout:
        return 128, 64, 96
    if head_dim <= 128:
        if half and large_shared_memory:
            return 128, 128, 128
        if large_shared_memory or (half and sm == (7, 0)):
            return 128, 64, 128
        return 64, 64, 128
    return (128, 64, _UNBOUNDED) if large_shared_memory or (half and sm == (7, 0)) else (64, 64, _UNBOUNDED)


def _efficient_splits(parallel: int, num_keys: int, block: int, stages: bool, sm: tuple[int, int]) -> int:
    if sm < (7, 0):
        return 1
    splits = _ceil(num_keys, block)
    if parallel * splits >= 256 and num_keys <= 2 * block:
        splits = 1
    if stages:
        splits = min(splits, 200 // parallel)
    return max(splits, 1)


def cudnn_backward(call: Call, target: Target) -> list[int]:
    """The gradient of the queries in single precision and a row sum; for grouped queries whole gradients."""
    _, query, key, value = call.args[:4]
    batch, heads, length, head_dim = query.shape
    size = batch * heads * length * _FLOAT * (1 + head_dim)
    if key.shape[1] != heads:
        size += batch * heads * key.shape[2] * (head_dim + value.shape[-1]) * query.element_size()
    return [size]


BUFFERS: dict[str, Callable[[Call, Target], list[int]]] = {
    "_scaled_dot_product_flash_attention.default": flash_forward,
    "_scaled_dot_product_flash_attention_backward.default": flash_backward,
    "_scaled_dot_product_efficient_attention.default": efficient_forward,
    "_scaled_dot_product_efficient_attention_backward.default": efficient_backward,
    "_scaled_dot_product_cudnn_attention_backward.default": cudnn_backward,
}
"Sizes of an operation's buffers, alive beside its results."
