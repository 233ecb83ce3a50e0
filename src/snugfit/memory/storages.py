"""The storages behind a tensor, whatever its kind: dense, sparse, or a subclass made of other tensors.

Entry points: ``parts_of`` and ``is_plain``. Quantised weights and 8-bit optimizer states are subclasses; their bytes
are those of their parts. Left out: what a subclass holds beside the tensors that it declares.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from snugfit.memory import torch_private
from snugfit.memory.events import tensors_of
from snugfit.memory.steps import refusals

_SIMPLE = (Tensor, nn.Parameter, torch_private.Fake)


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """The dense tensors that hold a tensor's data; none for a wrapper whose data another tensor holds."""
    if type(tensor) not in _SIMPLE and hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from parts_of(getattr(tensor, name))
    elif tensor.layout is torch.sparse_coo:
        yield from torch_private.sparse_parts(tensor)
    elif tensor.layout is torch.strided and not torch_private.is_functorch_wrapper(tensor):
        yield tensor


def dense_parts(result: Any) -> Iterator[Tensor]:
    """The fake tensors of an operation's result that take memory; of sparse ones the indices and values.

    Raises:
        UnsupportedError: A compressed layout.
    """
    for tensor in tensors_of(result):
        if type(tensor) is torch_private.Fake and not torch_private.is_meta(tensor):
            if tensor.layout is torch.strided:
                yield tensor
            elif tensor.layout is torch.sparse_coo:
                yield from parts_of(tensor)
            else:
                raise refusals.layout(str(tensor.layout))


def has_plain(args: Sequence[Any]) -> bool:
    """Whether there is a real tensor among the arguments of an operation."""
    for value in args:
        kind = type(value)
        if kind is Tensor or kind is nn.Parameter:
            return True
        if (kind is list or kind is tuple) and value and isinstance(value[0], Tensor) and has_plain(value):
            return True
    return False


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is a real one of torch's own kind, on the host."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return plain and tensor.device.type == "cpu" and not torch_private.is_functorch_wrapper(tensor)
