"""A linear layer adds its bias in place on real tensors, though it makes a new tensor for fake ones, on every device.

Entry point: ``is_in_place``. Of a tensor subclass torch assumes nothing: ``linear`` in ATen/native/Linear.cpp. It
concerns inputs that are not contiguous or have four dimensions; others take one operation for product and bias.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from snugfit.memory import torch_private

aten: Any = torch.ops.aten

_PRODUCTS = ("mm.default", "bmm.default")
_BEFORE = (aten.mm.default, aten.bmm.default, aten._unsafe_view.default)


def is_in_place(op: Any, before: Any, args: Sequence[Any], made_by: Callable[[Tensor], str]) -> bool:
    """Whether an operation is the sum of a product and a bias that ``linear`` makes of its own product.

    Args:
        op: Operation that is about to run.
        before: The one that ran before it.
        args: Its arguments.
        made_by: Name of the operation that made a tensor's storage.
    """
    if op is not aten.add.Tensor or before not in _BEFORE or not isinstance(args[1], Tensor) or args[1].dim() != 1:
        return False
    return made_by(args[0]) in _PRODUCTS and torch_private.is_held_by_one_call(args[0])
