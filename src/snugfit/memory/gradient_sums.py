"""What autograd does in place on real tensors, though it makes a new tensor for fake ones, on every device.

Entry point: ``is_in_place``. Fake tensors are a subclass of Tensor, and of a subclass autograd assumes nothing: it
sums two gradients into a third, and formulas that write into fresh zeros copy these first. A recording without this
rule has one activation too many wherever two gradients meet.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from snugfit.memory import torch_private

aten: Any = torch.ops.aten

_SUM = aten.add.Tensor
_ONTO_ZEROS = frozenset(
    [
        aten.scatter.src,
        aten.scatter.value,
        aten.scatter_add.default,
        aten.index_put.default,
        aten.index_add.default,
        aten.masked_scatter.default,
        aten.put.default,
        aten.index_fill.int_Scalar,
    ]
)
"""Backward formulas of gather, index, index_select, take, max and the like write into zeros that they have just made:
``isTensorSubclassLike`` in torch/csrc/autograd/FunctionsManual.cpp and ATen/native/TensorAdvancedIndexing.cpp."""
_ZEROS = ("new_zeros.default", "zeros.default", "zeros_like.default")


def is_in_place(op: Any, args: Sequence[Any], made_by: Callable[[Tensor], str]) -> bool:
    """Whether real tensors would let this operation write into its first argument.

    Args:
        op: Operation that is about to run, in backward.
        args: Its arguments.
        made_by: Name of the operation that made a tensor's storage.
    """
    if op is _SUM:
        return _is_tensor(args[1]) and torch_private.sums_gradients(args[0]) and is_dense(args[0])
    return op in _ONTO_ZEROS and made_by(args[0]) in _ZEROS and torch_private.is_called_by_autograd()


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements lie without gaps and overlaps, in any order of its dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
