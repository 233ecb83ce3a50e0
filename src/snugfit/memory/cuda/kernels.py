"""Operators whose CUDA kernels make or save other tensors than those of the CPU: dropout and softmax."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten: Any = torch.ops.aten


def dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """CUDA's dropout: one kernel, a bool mask saved."""
    if not train or p == 0:
        return input
    return torch.native_dropout(input, p, train)[0]


def softmax(operator: Any) -> Callable[..., Tensor]:
    """CUDA's softmax: fp16 input and float32 output in one kernel, without a float32 copy of the input.

    Of bfloat16 there is a copy: ``softmax`` and ``log_softmax`` in ATen/native/SoftMax.cpp ask for Half (torch 2.13).
    """

    def kernel(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        if dtype == torch.float32 and input.dtype == torch.float16:
            result: Tensor = operator(input, dim, True)
        else:
            result = operator(input if dtype is None else input.to(dtype), dim, False)
        return result

    return kernel
