"""Results whose storages have another size on CUDA than the same operation's on a CPU.

Entry point: ``SIZES``: operation -> function of a call -> pairs of a tensor and its bytes on CUDA. The shapes are the
same; statistics in single precision and numbers that stay on the host are not.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from snugfit.memory.events import Call

Sizes = Callable[[Call], Iterator[tuple[Tensor, int]]]
_HALF = (torch.float16, torch.bfloat16)


def _float32_statistics(*positions: int) -> Sizes:
    """Means and deviations that CUDA keeps in single precision for half-precision inputs (layer_norm_kernel.cu)."""

    def sizes(call: Call) -> Iterator[tuple[Tensor, int]]:
        if call.args[0].dtype in _HALF:
            yield from ((call.result[position], call.result[position].numel() * 4) for position in positions)

    return sizes


def _on_the_host(*positions: int) -> Sizes:
    """Seeds that the memory-efficient kernel keeps on the host while no graph is captured (attention.cu)."""

    def sizes(call: Call) -> Iterator[tuple[Tensor, int]]:
        yield from ((call.result[position], 0) for position in positions)

    return sizes


SIZES: dict[str, Sizes] = {
    "native_layer_norm.default": _float32_statistics(1, 2),
    "native_batch_norm.default": _float32_statistics(1, 2),
    "_native_batch_norm_legit.default": _float32_statistics(1, 2),
    "_batch_norm_with_update.default": _float32_statistics(1, 2),
    "_scaled_dot_product_efficient_attention.default": _on_the_host(2, 3),
}
"Tensors among an operation's results, and what they take on CUDA."
