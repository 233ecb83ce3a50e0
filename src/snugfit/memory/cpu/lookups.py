"""Temporaries of lookups and of writing to places: masks and narrow indices made into long ones, half types into wider.

Entry point: ``HIDDEN``. Reasons stand with the entries; all were measured with torch's profiler on single operations.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from snugfit.memory.cpu.copies import copied, num_bytes
from snugfit.memory.events import Call

_HALF = (torch.bfloat16, torch.float16)
_LONG = 8
_MEAN, _MAXIMUM = 1, 2


def _long(index: Tensor) -> int:
    """Bytes of a narrow index made a long one."""
    return 0 if index.dtype == torch.int64 else _LONG * index.numel()


def _places(indices: Sequence[Tensor | None], looked_up: Tensor) -> int:
    """A mask becomes as many long indices as it has dimensions, one for each value (TensorAdvancedIndexing.cpp)."""
    given = [(place, index) for place, index in enumerate(indices) if index is not None]
    num_bytes = 0
    for place, index in given:
        if index.dtype not in (torch.bool, torch.uint8):
            num_bytes += _long(index)
        elif place < looked_up.dim():
            num_bytes += _LONG * index.dim() * looked_up.shape[place]
    return num_bytes


def _index(call: Call) -> int:
    return _places(call.args[1], call.result)


def _index_put(call: Call) -> int:
    return _places(call.args[1], call.args[2])


def _index_select(call: Call) -> int:
    """The second dimension is looked up in a contiguous tensor (``index_select_out_cpu_dim1_``)."""
    value, dim, index = call.args[:3]
    return copied([index, *([value] if value.dim() > 1 and dim % value.dim() == 1 else [])])


def _masked_select(call: Call) -> int:
    """The mask is counted as long numbers, before the result is made."""
    return _LONG * int(call.args[1].numel()) - num_bytes(call.result)


def _moved(position: int) -> Callable[[Call], int]:
    """Half types take a float32 buffer of the size of that argument (measured with AVX-512)."""

    def rule(call: Call) -> int:
        value, like = call.args[0], call.args[position]
        wider = 4 * like.numel() if value.dtype in _HALF and isinstance(like, Tensor) else 0
        return int(_long(call.args[2]) + wider)

    return rule


def _scatter_reduce(call: Call) -> int:
    """A mean counts what was written to every place, with ones in the type of what is written."""
    value, source, reduction = call.args[0], call.args[3], call.args[4]
    wider = 4 * value.numel() if value.dtype in _HALF else 0
    if reduction == "mean":
        return int(num_bytes(source) + num_bytes(value) + max(wider, value.numel()))
    return int(wider)


def _embedding_bag(call: Call) -> int:
    """For the mean every index is told its bag, by counting and summing up (EmbeddingBag.cpp, make_offset2bag)."""
    indices, bags, mode = call.args[1], call.args[2], call.args[4]
    return num_bytes(indices) - 2 * num_bytes(bags) if mode == _MEAN else 0


def _embedding_bag_backward(call: Call) -> int:
    """Indices are sorted and counted, the gradient made contiguous; the maximum goes bag by bag (EmbeddingBag.cpp)."""
    gradient, indices, bags, mode = call.args[0], call.args[1], call.args[2], call.args[8]
    gathered = copied([gradient])
    if mode == _MAXIMUM:
        return gathered + 8 * int(gradient.numel()) + num_bytes(gradient) + num_bytes(bags)
    which_bag = call.args[3]
    return gathered + (3 if which_bag.numel() else 4) * num_bytes(indices)


HIDDEN: dict[str, Callable[[Call], int]] = {
    "index.Tensor": _index,
    **dict.fromkeys(("index_put.default", "index_put_.default"), _index_put),
    "index_select.default": _index_select,
    "masked_select.default": _masked_select,
    "gather.default": _moved(2),
    **dict.fromkeys(
        (
            "scatter.src",
            "scatter.value",
            "scatter_add.default",
            "scatter_.src",
            "scatter_.value",
            "scatter_add_.default",
        ),
        _moved(0),
    ),
    "scatter_reduce.two": _scatter_reduce,
    "_embedding_bag.default": _embedding_bag,
    "_embedding_bag_backward.default": _embedding_bag_backward,
}
