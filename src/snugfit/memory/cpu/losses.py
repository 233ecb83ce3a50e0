"""Temporaries of losses: a tensor of every element's loss, and what is made of it.

Entry points: ``HIDDEN`` and ``RESULTS``. Reason: ATen/native/Loss.cpp, LossCTC.cpp. A mean or sum is written into the
tensor of the elements' losses, whose storage stays as large (``at::mean_out``).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from snugfit.memory.cpu.copies import copied, num_bytes
from snugfit.memory.events import Call

_NONE, _MEAN = 0, 1
_HALF = (torch.bfloat16, torch.float16)


def _reduction(call: Call, position: int = 2) -> int:
    return int(call.args[position]) if len(call.args) > position else _MEAN


def _summed_in_float32(call: Call, position: int = 2) -> int:
    """Bytes of the float32 copy of which the mean of a half type is taken; a sum needs none."""
    value: Tensor = call.args[0]
    return 4 * value.numel() if _reduction(call, position) == _MEAN and value.dtype in _HALF else 0


def _pointwise(call: Call) -> int:
    if _reduction(call) == _NONE:
        return 0
    return num_bytes(call.args[0]) + _summed_in_float32(call)


def _binary_cross_entropy(call: Call) -> int:
    return _summed_in_float32(call, 3)


def _binary_cross_entropy_with_logits(call: Call) -> int:
    """The loss and a term of it live at once, then what is reduced."""
    if _reduction(call, 4) == _NONE:
        return num_bytes(call.args[0])
    return 2 * num_bytes(call.args[0]) + copied(call.args[:1]) + _summed_in_float32(call, 4)


def _soft_margin_backward(call: Call) -> int:
    return 2 * num_bytes(call.result)


def _ctc_backward(call: Call) -> int:
    """Probabilities of every position in every label, as many as forward made of the other direction."""
    return num_bytes(call.args[6])


def _whole(position: int) -> Callable[[Call], dict[int, int]]:
    """The size of a reduced loss whose reduction stands at that position."""

    def rule(call: Call) -> dict[int, int]:
        return {0: num_bytes(call.args[0])} if _reduction(call, position) != _NONE else {}

    return rule


HIDDEN: dict[str, Callable[[Call], int]] = {
    **dict.fromkeys(("mse_loss.default", "smooth_l1_loss.default", "huber_loss.default"), _pointwise),
    "binary_cross_entropy.default": _binary_cross_entropy,
    "binary_cross_entropy_with_logits.default": _binary_cross_entropy_with_logits,
    "soft_margin_loss.default": _summed_in_float32,
    "soft_margin_loss_backward.default": _soft_margin_backward,
    **dict.fromkeys(("_ctc_loss_backward.default", "_ctc_loss_backward.Tensor"), _ctc_backward),
}

RESULTS: dict[str, Callable[[Call], dict[int, int]]] = {
    **dict.fromkeys(("mse_loss.default", "smooth_l1_loss.default", "soft_margin_loss.default"), _whole(2)),
    "binary_cross_entropy.default": _whole(3),
}
