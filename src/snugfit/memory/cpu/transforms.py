"""Temporaries of operations that move or combine whole tensors: rolls, Fourier transforms, distances, sampling grids.

Entry point: ``HIDDEN``. Reasons stand with the entries; all were measured with torch's profiler on single operations.
"""

import itertools
from collections.abc import Callable, Collection
from math import prod

import torch
from torch import Tensor

from snugfit.memory.cpu.copies import copied, num_bytes
from snugfit.memory.cpu.matrix_products import packed
from snugfit.memory.events import Call


def are_one(value: Tensor, dims: Collection[int]) -> bool:
    """Whether dimensions lie behind each other, so that they can be gone through as one."""
    sized = sorted((d % value.dim() for d in dims if value.shape[d] > 1), key=value.stride, reverse=True)
    return all(value.stride(a) == value.shape[b] * value.stride(b) for a, b in itertools.pairwise(sized))


def _roll(call: Call) -> int:
    """One dimension after the other, and what was rolled already stays (ATen/native/TensorTransformations.cpp)."""
    dims = call.args[2] if len(call.args) > 2 else ()
    return (len(dims) - 1) * num_bytes(call.result) if dims else copied(call.args[:1])


def _gathered(value: Tensor, dims: Collection[int]) -> int:
    """The dimensions that are not transformed are made one, with a copy where they are none (SpectralOps.cpp)."""
    chosen = {dim % value.dim() for dim in dims}
    return 0 if are_one(value, [dim for dim in range(value.dim()) if dim not in chosen]) else num_bytes(value)


def _fourier(call: Call) -> int:
    return _gathered(call.args[0], call.args[1])


def _fourier_to_real(call: Call) -> int:
    """All dimensions but the last are transformed into a complex tensor first."""
    value, dims = call.args[:2]
    if len(dims) == 1:
        return _gathered(value, dims)
    return num_bytes(value) + max(_gathered(value, dims[:-1]), _gathered(value, dims[-1:]))


def _euclidean_distance(call: Call) -> int:
    """Both sides with their squared lengths and ones beside them, for one product (ATen/native/Distance.cpp)."""
    first, second = call.args[:2]
    points, others = (value.numel() // value.shape[-1] for value in (first, second))
    width, element = first.shape[-1], first.element_size()
    multiplied = (points + others) * (width + 2) * element
    being_made = (2 * points * (width + 1) + 2 * (points + others)) * element
    return int(max(multiplied, being_made - num_bytes(call.result)))


def _sampling_grid(call: Call) -> int:
    """Homogeneous coordinates of every pixel, for one product (ATen/native/AffineGridGenerator.cpp)."""
    matrices, size = call.args[:2]
    pixels, width = prod(size[2:]), matrices.shape[-1]
    product = 0
    if matrices.dtype == torch.bfloat16:
        product = packed(pixels, width, width - 1, False)
    return int(size[0] * pixels * width * matrices.element_size() + product)


HIDDEN: dict[str, Callable[[Call], int]] = {
    "roll.default": _roll,
    "_fft_c2c.default": _fourier,
    "_fft_r2c.default": _fourier,
    "_fft_c2r.default": _fourier_to_real,
    "_euclidean_dist.default": _euclidean_distance,
    "affine_grid_generator.default": _sampling_grid,
}
