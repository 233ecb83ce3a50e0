"""Normalisation layers that CUDA computes in one kernel where a CPU takes several: RMSNorm.

Entry point: ``rms_norm``. Rule: ``rms_norm_symint`` in ATen/native/layer_norm.cpp. LayerNorm, BatchNorm and GroupNorm
make and save the same on both; ``storage_sizes`` and ``temporaries`` say what differs in size. Left out: the reserve
of cuDNN's batch norm for channels_last in half precision.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from snugfit.memory import torch_compiler
from snugfit.memory.cuda.target import Target

aten: Any = torch.ops.aten
_FUSED_SINCE = (2, 9)
"First torch with a fused kernel: pytorch/pytorch#153666."


class _FusedRmsNorm(torch.autograd.Function):
    """Output and reciprocal deviations in single precision; input, weight and deviations are saved."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, shape: Sequence[int], weight: Tensor | None) -> Tensor:
        rows = (*input.shape[: input.dim() - len(shape)], *(1 for _ in shape))
        output = torch.empty_like(input, memory_format=torch.contiguous_format)
        dtype = torch.float32 if input.element_size() < 4 else input.dtype
        deviations = torch.empty(rows, dtype=dtype, device=input.device)
        ctx.shape = shape
        ctx.save_for_backward(input, weight, deviations)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        input, weight, deviations = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[2]]
        results = aten._fused_rms_norm_backward(gradients[0], input, ctx.shape, deviations, weight, wanted)
        return results[0], None, results[1]


def rms_norm(target: Target) -> Callable[..., Tensor] | None:
    """The kernel for ``aten::rms_norm``; None where the target's torch has no fused one."""
    if target.torch_version < _FUSED_SINCE:
        return None

    def kernel(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: Any = None) -> Tensor:
        is_captured = torch_compiler.is_captured(input)  # and the compiler takes the kernel apart
        if is_captured or (weight is not None and weight.dtype != input.dtype):
            return _composite(input, normalized_shape, weight)
        output: Tensor = _FusedRmsNorm.apply(input, tuple(normalized_shape), weight)  # type: ignore[no-untyped-call]
        return output

    return kernel


def _composite(input: Tensor, shape: Sequence[int], weight: Tensor | None) -> Tensor:
    """What torch does for a weight of another type (``rms_norm_composite``): single precision, a tensor per step."""
    upcast = input.float() if input.element_size() < 4 else input
    dims = list(range(-len(shape), 0))
    scale = torch.rsqrt(upcast.pow(2).mean(dims, keepdim=True).add_(math.ulp(1.0)))
    scaled = upcast.mul(scale)
    return (scaled if weight is None else scaled.mul(weight)).type_as(input)
