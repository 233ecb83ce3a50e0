"""Which kernel CUDA takes for scaled-dot-product attention, and what that kernel makes and saves.

Entry point: ``Attention``, a kernel for ``aten::scaled_dot_product_attention``.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten: Any = torch.ops.aten


class Attention:
    """Chooses CUDA's kernel for scaled-dot-product attention by the target's capability, types, sizes and mask.

    Rules: ATen/native/transformers/cuda/sdp_utils.cpp; order flash, memory-efficient, math.
    """

    def __init__(self, compute_capability: tuple[int, int]) -> None:
        self._capability = compute_capability

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """The operator, by the kernel that the target would take."""
        head_dim = query.shape[-1]
        if self._flash(query, key, value, attn_mask, is_causal):
            padding = -head_dim % 8
            if padding:
                scale = 1 / math.sqrt(head_dim) if scale is None else scale
                query, key, value = (F.pad(tensor, (0, padding)) for tensor in (query, key, value))
            flash = aten._scaled_dot_product_flash_attention
            output: Tensor = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
            return output[..., :head_dim] if padding else output
        if self._memory_efficient(query, key, value, attn_mask, enable_gqa):
            needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
            bias = None if attn_mask is None else _bias(attn_mask, query, key)
            efficient: Tensor = aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, needs_gradient, dropout_p, is_causal, scale=scale
            )[0]
            return efficient
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = _additive(attn_mask, query.dtype)
        composite: Tensor = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
        return composite

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
        head_dim = query.shape[-1]
        return (
            query.dim() == 4
            and self._capability >= (8, 0)
            and query.dtype in (torch.float16, torch.bfloat16)
            and query.dtype == key.dtype == value.dtype
            and mask is None
            and head_dim == key.shape[-1] == value.shape[-1]
            and head_dim <= 256
            and not (is_causal and query.shape[-2] != key.shape[-2])
        )

    def _memory_efficient(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool
    ) -> bool:
        types = [torch.float32, torch.float16]
        if self._capability >= (8, 0):
            types.append(torch.bfloat16)
        alignment = 16 // query.element_size() if self._capability >= (8, 0) else 8 // query.element_size()
        return (
            query.dim() == 4
            and self._capability >= (5, 0)
            and query.dtype in types
            and query.dtype == key.dtype == value.dtype
            and not (enable_gqa and query.shape[-3] != key.shape[-3])
            and query.shape[-1] % alignment == 0
            and value.shape[-1] % alignment == 0
            and not (mask is not None and mask.requires_grad)
        )


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(mask, torch.zeros((), dtype=dtype), torch.full((), -math.inf, dtype=dtype))


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as the memory-efficient kernel takes it: additive, rows padded to 16 elements, expanded as a view."""
    if mask.dtype == torch.bool:
        mask = _additive(mask, query.dtype)
    length = mask.shape[-1]
    if length % 16:
        mask = F.pad(mask, (0, -length % 16))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[-2], key.shape[-2])
