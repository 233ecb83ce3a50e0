"""What CUDA's kernels for scaled-dot-product attention make and save.

Entry point: ``ScaledDotProductAttention``, a kernel for ``aten::scaled_dot_product_attention``. Rules:
ATen/native/transformers/attention.cpp. ``attention_choice`` says which kernel runs, ``attention_buffers`` what it
takes beside its results.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from snugfit.memory.cuda.attention_choice import Attention, Kernel, choose
from snugfit.memory.cuda.target import Target

aten: Any = torch.ops.aten
_switches: Any = torch.backends.cuda
_UNBATCHED_SINCE = (2, 14)
"First torch that gives inputs of three dimensions to fused kernels: sdp_utils_cpp.h, ``normalize_unbatched_input``."
_MASK_ALIGNMENT = 8
"Elements that rows of a mask are padded to for the memory-efficient kernel (16 before torch 2.4)."


class ScaledDotProductAttention:
    """Runs the operator as the target's kernel would, with what that kernel makes and saves."""

    def __init__(self, target: Target) -> None:
        self._target = target

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
        asked = Attention(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        kernel = choose(asked, self._target)
        mask = attn_mask
        if kernel is Kernel.MATH and query.dim() == 3 and self._target.torch_version >= _UNBATCHED_SINCE:
            tensors = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            asked = Attention(*tensors, _batched(mask), dropout_p, is_causal, enable_gqa)
            if choose(asked, self._target) is not Kernel.MATH:
                return self(*tensors, asked.mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa).squeeze(0)
            asked = Attention(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        if mask is not None and mask.dtype == torch.bool:
            mask = _additive(mask, query.dtype)
        if kernel is Kernel.FLASH:
            return _flash(asked, scale)
        if kernel is Kernel.MATH:
            return _math(asked, mask, scale)
        if kernel is Kernel.CUDNN:
            operator = aten._scaled_dot_product_cudnn_attention
            output: Tensor = operator(
                query, key, value, mask, asked.needs_gradient, dropout_p, is_causal, False, scale=scale
            )[0]
            return output
        bias = None if mask is None else _bias(mask, query, key)
        operator = aten._scaled_dot_product_efficient_attention
        efficient: Tensor = operator(query, key, value, bias, asked.needs_gradient, dropout_p, is_causal, scale=scale)[
            0
        ]
        return efficient


def _batched(mask: Tensor | None) -> Tensor | None:
    while mask is not None and mask.dim() < 4:
        mask = mask.unsqueeze(0)
    return mask


def _flash(asked: Attention, scale: float | None) -> Tensor:
    """FlashAttention 2: heads padded to 8 elements, which is what is saved."""
    head_dim = asked.query.shape[-1]
    padding = -head_dim % 8
    tensors = (asked.query, asked.key, asked.value)
    if padding:
        tensors = tuple(F.pad(tensor, (0, padding)) for tensor in tensors)  # type: ignore[assignment]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    operator = aten._scaled_dot_product_flash_attention
    output: Tensor = operator(*tensors, asked.dropout_p, asked.is_causal, scale=scale)[0]
    return output[..., :head_dim] if padding else output


def _math(asked: Attention, mask: Tensor | None, scale: float | None) -> Tensor:
    """The composite operator: scores and weights as tensors, half precision computed in single.

    Torch's own adds the mask out of place where it sees fake tensors; real scores are added to in place.
    """
    query, key, value = asked.query, asked.key, asked.value
    dtype = query.dtype
    if not _switches.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = (
            t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in (query, key, value)
        )
    factor = math.sqrt(abs(scale if scale is not None else 1 / math.sqrt(query.shape[-1])))
    query = query * (-factor if scale is not None and scale < 0 else factor)
    if asked.is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = _additive(mask, query.dtype)
    if asked.enable_gqa and not query.shape[-3] == key.shape[-3] == value.shape[-3]:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = query @ (key.transpose(-2, -1) * factor)
    if mask is not None:
        scores.add_(mask)
    weights = aten._safe_softmax(scores, -1)
    del scores
    if asked.dropout_p:
        weights = F.dropout(weights, asked.dropout_p)
    output: Tensor = (weights @ value).to(dtype)
    return output


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=dtype, device=mask.device))


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as the memory-efficient kernel takes it: rows padded where they are not aligned, expanded as a view."""
    length = mask.shape[-1]
    if mask.stride(-1) != 1 or any(stride % _MASK_ALIGNMENT for stride in mask.stride()[:-1]):
        mask = F.pad(mask, (0, _MASK_ALIGNMENT - length % _MASK_ALIGNMENT))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[-2], key.shape[-2])
