"""The buffers of CUDA's reduction kernel: sums, means and norms that several blocks work on.

Entry point: ``buffers``. Rules: ATen/native/cuda/Reduce.cuh, ``setReduceConfig`` and ``ReduceConfig``. Where blocks
share an output, each puts its partial result into a buffer in global memory, with a semaphore per group of outputs.
The buffer is far from small: a bias gradient over 2048 rows and 1024 columns takes 16 MiB (seen in a published trace
of torch 2.11). Left out: the accumulation buffer of tensors with more than 2**31 elements, and complex numbers.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from snugfit.memory.cuda.target import Target

_MAX_THREADS = 512
_WARP = 32
_VALUES_PER_LOAD = 4
_MIN_VALUES_PER_THREAD, _MAX_VALUES_PER_THREAD = 16, 256
_SEMAPHORE_BYTES = 4


def buffers(tensor: Tensor, dims: Sequence[int], element_bytes: int, target: Target) -> tuple[int, ...]:
    """Sizes of what a reduction allocates beside its result: nothing, or a buffer and its semaphores.

    Args:
        tensor: What is reduced.
        dims: The dimensions that vanish; all of them if empty.
        element_bytes: Size of the accumulator: 4 for sums of half and single precision.
        target: The card.
    """
    gone = {dim % tensor.dim() for dim in dims} if dims and tensor.dim() else set(range(tensor.dim()))
    sizes = [(tensor.stride(dim), tensor.shape[dim], dim in gone) for dim in range(tensor.dim())]
    reduced = _merged([(stride, size) for stride, size, is_reduced in sizes if is_reduced and size > 1])
    kept = _merged([(stride, size) for stride, size, is_reduced in sizes if not is_reduced and size > 1])
    num_inputs = math.prod(size for _, size in reduced)
    num_outputs = math.prod(size for _, size in kept)
    if num_inputs <= 1 or num_outputs == 0:
        return ()

    along_fastest = not kept or reduced[0][0] < kept[0][0]
    width, height = (num_inputs, num_outputs) if along_fastest else (num_outputs, num_inputs)
    values_per_output_load = 1
    if (reduced if along_fastest else kept)[0][0] == 1:
        if along_fastest and width >= 128 and len(reduced) == 1:
            width //= _VALUES_PER_LOAD
        elif not along_fastest:
            values_per_output_load = _vector(kept[0][1], [stride for stride, _ in (*reduced, *kept[1:])], tensor)
            width //= values_per_output_load
    block_width, block_height = _block(width, height, _MAX_THREADS // values_per_output_load)

    step_input, step_output = (block_width, 1) if along_fastest else (1, block_width)
    if -(-num_inputs // step_input) < min(block_height * 16, _MAX_VALUES_PER_THREAD):
        return ()  # each warp has outputs of its own
    step_input *= block_height
    values_per_thread = -(-num_inputs // step_input)
    grid = -(-(num_outputs // values_per_output_load) // step_output)
    blocks = target.multiprocessors * (target.threads_per_multiprocessor // (block_width * block_height))
    if values_per_thread < _MAX_VALUES_PER_THREAD or grid > blocks:
        return ()
    least, most = -(-values_per_thread // _MAX_VALUES_PER_THREAD), -(-values_per_thread // _MIN_VALUES_PER_THREAD)
    sharing = min(max(-(-blocks // grid), least), most)
    if sharing <= 1:
        return ()
    num_bytes = element_bytes * num_outputs * sharing
    if not along_fastest:
        num_bytes *= block_width * values_per_output_load
    return num_bytes, _SEMAPHORE_BYTES * grid


def _merged(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Strides and sizes, fastest first, with dimensions that lie behind each other as one (TensorIterator does so)."""
    merged: list[tuple[int, int]] = []
    for stride, size in sorted(dims):
        if merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0], merged[-1][1] * size)
        else:
            merged.append((stride, size))
    return merged


def _block(width: int, height: int, max_threads: int) -> tuple[int, int]:
    wide, high = (_power_of_two(min(side, max_threads)) for side in (width, height))
    block_width = min(wide, _WARP)
    block_height = min(high, max_threads // block_width)
    return min(wide, max_threads // block_height), block_height


def _power_of_two(number: int) -> int:
    return 1 << max(number, 1).bit_length() - 1


def _vector(size: int, strides: Sequence[int], tensor: Tensor) -> int:
    """How many outputs a thread loads at once: 4, 2 or 1, by what divides sizes, strides and the address."""
    width = 4
    for number in (tensor.storage_offset(), size, *strides):
        while number % width:
            width //= 2
    return width
