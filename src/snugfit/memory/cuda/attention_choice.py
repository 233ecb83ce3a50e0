"""Which kernel CUDA takes for scaled-dot-product attention.

Entry points: ``Attention`` (what is asked for), ``choose``. Rules: ATen/native/transformers/cuda/sdp_utils.cpp and
sdp_utils_cpp.h. The switches of ``torch.backends.cuda`` and ``torch.nn.attention.sdpa_kernel`` count. Left out:
nested tensors, FlashAttention 3, and cards without a kernel at all.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from snugfit.errors import UnsupportedError
from snugfit.memory import torch_private
from snugfit.memory.cuda.target import Target

_switches: Any = torch.backends.cuda
_HALF = (torch.float16, torch.bfloat16)
_LAST = (12, 1)
"Newest capability that the kernels are built for."


class Kernel(Enum):
    """A kernel for attention; the numbers are torch's own (``SDPBackend``)."""

    MATH = 0
    FLASH = 1
    MEMORY_EFFICIENT = 2
    CUDNN = 3


@dataclass(frozen=True, slots=True)
class Attention:
    """What a call of ``scaled_dot_product_attention`` asks for."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    enable_gqa: bool

    @property
    def needs_gradient(self) -> bool:
        """Whether a backward pass will come."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))


def choose(asked: Attention, target: Target) -> Kernel:
    """The first kernel in torch's order of priority that can do what is asked for.

    Raises:
        UnsupportedError: The kernels that are switched on cannot do it; on the card torch would raise as well.
    """
    suitable = {
        Kernel.FLASH: _switches.flash_sdp_enabled() and _flash(asked, target),
        Kernel.MEMORY_EFFICIENT: _switches.mem_efficient_sdp_enabled() and _memory_efficient(asked, target),
        Kernel.CUDNN: _switches.cudnn_sdp_enabled() and _cudnn(asked, target),
        Kernel.MATH: _switches.math_sdp_enabled(),
    }
    for kernel in _order(target):
        if suitable[kernel]:
            return kernel
    shape, dtype = tuple(asked.query.shape), str(asked.query.dtype)[6:]
    raise UnsupportedError(
        "no kernel for scaled_dot_product_attention",
        got=f"query {shape} in {dtype}, mask: {asked.mask is not None}, compute capability {target.compute_capability}",
        expected="a kernel that is switched on and takes these sizes and types",
        hint="switch on torch.backends.cuda.enable_math_sdp(True), or drop the mask or choose another type",
        op="scaled_dot_product_attention",
    )


def _order(target: Target) -> list[Kernel]:
    order = [Kernel(number) for number in torch_private.attention_priority() if number <= Kernel.CUDNN.value]
    is_default = order == [Kernel.FLASH, Kernel.MEMORY_EFFICIENT, Kernel.MATH, Kernel.CUDNN]
    if is_default and prefers_cudnn(target):
        order = [Kernel.CUDNN, Kernel.FLASH, Kernel.MEMORY_EFFICIENT, Kernel.MATH]
    return order


def prefers_cudnn(target: Target) -> bool:
    """Whether torch tries cuDNN first: on 9.x and 10.x, with a cuDNN newer than 9.15.0 (``prefer_cudnn_attention``)."""
    return target.compute_capability[0] in (9, 10) and target.cudnn_version > 91500


def _flash(asked: Attention, target: Target) -> bool:
    query, key, value, sm = asked.query, asked.key, asked.value, target.compute_capability
    head_dim = query.shape[-1]
    if not (_is_dense(asked) and (8, 0) <= sm <= _LAST and asked.mask is None):
        return False
    if not head_dim == key.shape[-1] == value.shape[-1] or head_dim > 256:
        return False
    small_shared_memory = (8, 6) <= sm <= (8, 9) or sm >= (12, 0)
    if small_shared_memory and asked.needs_gradient and head_dim > 192 and (asked.dropout_p or head_dim <= 224):
        return False
    if asked.is_causal and query.shape[-2] != key.shape[-2]:
        return False
    rows = all(t.stride(-1) == 1 or head_dim == 1 for t in (query, key, value))
    return _dtypes(asked) in _HALF and rows and _heads_fit(asked, grouped=True, mixed=_is_mixed(target))


def _memory_efficient(asked: Attention, target: Target) -> bool:
    query, key, value, sm = asked.query, asked.key, asked.value, target.compute_capability
    if not _is_dense(asked) or not (5, 0) <= sm <= _LAST:
        return False
    alignment = _alignment(query, sm)
    sizes = (query.shape[-1], value.shape[-1])
    if query.shape[-1] != key.shape[-1] or any(size % alignment or not size for size in sizes):
        return False
    if sm >= (8, 0) and any(t.storage_offset() % alignment for t in (query, key, value)):
        return False
    if any(t.stride(-1) != 1 for t in (query, key, value)) or (asked.mask is not None and asked.mask.stride(-1) != 1):
        return False
    grouped = _is_mixed(target)  # the kernels of 2.13 have no number of query heads per key head
    types = (torch.float32, torch.float16, torch.bfloat16) if sm >= (8, 0) else (torch.float32, torch.float16)
    return _dtypes(asked) in types and _heads_fit(asked, grouped=grouped, mixed=grouped)


def _cudnn(asked: Attention, target: Target) -> bool:
    query, key, value, sm = asked.query, asked.key, asked.value, target.compute_capability
    if not _is_dense(asked) or not (8, 0) <= sm <= _LAST or _dtypes(asked) not in _HALF:
        return False
    if asked.mask is not None and (asked.mask.requires_grad or asked.mask.dim() not in (2, 4)):
        return False
    if (asked.dropout_p * 16) % 1 or (asked.dropout_p and query.shape[-2] == 1) or key.shape[-2] == 1:
        return False
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    if any(size % 8 or size > 128 for size in (query.shape[-1], value.shape[-1])):
        return False
    rows = all(t.stride(-1) == 1 for t in (query, key, value))
    return rows and _heads_fit(asked, grouped=True, mixed=_is_mixed(target))


def _is_mixed(target: Target) -> bool:
    """Whether one head of keys may serve all of queries unasked (sdp_utils_cpp.h of 2.14, ``supports_mqa``)."""
    return target.torch_version >= (2, 14)


def _is_dense(asked: Attention) -> bool:
    """Four dimensions, as many samples everywhere, no length of zero."""
    tensors = (asked.query, asked.key, asked.value)
    if not all(t.dim() == 4 and not t.is_nested for t in tensors):
        return False
    return len({t.shape[0] for t in tensors}) == 1 and all(t.shape[-2] for t in tensors)


def _dtypes(asked: Attention) -> torch.dtype | None:
    dtypes = {t.dtype for t in (asked.query, asked.key, asked.value)}
    return dtypes.pop() if len(dtypes) == 1 else None


def _heads_fit(asked: Attention, *, grouped: bool, mixed: bool) -> bool:
    """Whether the numbers of heads go together: equal; grouped when asked for; one head for all where that works."""
    query, key, value = (t.shape[-3] for t in (asked.query, asked.key, asked.value))
    if asked.enable_gqa and grouped:
        return key == value and query % key == 0
    return query == key == value or (mixed and key == value == 1 and query > 0)


def _alignment(query: Tensor, sm: tuple[int, int]) -> int:
    """Elements that a head size must be a multiple of (``minimum_gemm_alignment``)."""
    half = query.dtype in _HALF
    tensor_cores = sm >= (8, 0) or (sm >= (7, 0) and half)
    return max(4 if sm >= (8, 0) else 1, (8 if half else 4) if tensor_cores else 1)
