"""What autograd keeps for backward, counted by its own hooks on saved tensors."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def saved_bytes(run: Callable[[], Any], outside: Iterable[Tensor] = ()) -> int:
    """Bytes of the distinct storages that a forward leaves for backward.

    Args:
        run: The forward; what it returns lives until all is counted.
        outside: Tensors whose storages do not count, such as weights and inputs.
    """
    ours = {tensor.untyped_storage().data_ptr() for tensor in outside}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    del result
    return sum(sizes.values())
