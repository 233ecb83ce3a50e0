"""The fake twin of a module that exists: the same classes, names and shapes, no data, and the module untouched.

Entry point: ``of_module``. Buffers keep what they hold, as far as the trace follows values: positions, masks. Left out:
modules that ``copy.deepcopy`` cannot copy.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from snugfit.memory.recording import Recorder


def of_module(module: nn.Module, recorder: Recorder) -> Callable[[], nn.Module]:
    """A builder of the module's twin, to be called while the recorder is active."""

    def twin() -> nn.Module:
        memo: dict[int, Any] = {}
        for parameter in module.parameters():
            memo[id(parameter)] = nn.Parameter(_empty_like(parameter), requires_grad=parameter.requires_grad)
        for buffer in module.buffers():
            memo[id(buffer)] = fake = _empty_like(buffer)
            if type(buffer) is Tensor:
                recorder.values.know(fake, buffer.detach())
        return copy.deepcopy(module, memo)

    return twin


def _empty_like(tensor: Tensor) -> Any:
    """A tensor of the same kind without data; a subclass made of other tensors is made of such again."""
    kind: Any = type(tensor)
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        parts = {name: _empty_like(getattr(tensor, name)) for name in names}
        return kind.__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
