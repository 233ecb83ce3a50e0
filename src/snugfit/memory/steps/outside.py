"""Tensors that were made before the trace, such as a model at the top of a script: met, and left as they were.

Entry point: ``Outside``. Fake twins run in their place; what a step hangs onto them (gradients, optimizer state) is
taken off again at the end. Left out: attributes that a module's own code replaces, and a scheduler's count.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from snugfit.memory import torch_private


class Outside:
    """Remembers what real objects held when the trace met them."""

    def __init__(self) -> None:
        self._twins: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        self._gradients: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._optimizers: dict[int, tuple[torch.optim.Optimizer, dict[Any, Any], list[dict[str, Any]]]] = {}

    def twin_of(self, tensor: Tensor) -> Tensor | None:
        """The fake tensor that stands for a real one; None if it was not met before."""
        reference, twin = self._twins.get(id(tensor), (None, None))
        return twin if reference is not None and reference() is tensor else None

    def meet(self, tensor: Tensor, twin: Tensor, on_death: Callable[[], object]) -> None:
        """A real tensor takes part for the first time; its twin lives as long as it does."""
        key = id(tensor)

        def died(_: Any) -> None:
            on_death()
            self._twins.pop(key, None)

        self._twins[key] = (weakref.ref(tensor, died), twin)
        if tensor.requires_grad and tensor.is_leaf and id(tensor) not in self._gradients:
            self._gradients[id(tensor)] = (tensor, tensor.grad)

    def meet_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to make an update."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if id(optimizer) in self._optimizers or all(type(p) is torch_private.Fake for p in parameters):
            return
        state = {parameter: dict(values) for parameter, values in optimizer.state.items()}
        self._optimizers[id(optimizer)] = (optimizer, state, [dict(group) for group in optimizer.param_groups])

    def restore(self) -> None:
        """Put everything back."""
        self._twins.clear()
        for tensor, gradient in self._gradients.values():
            tensor.grad = gradient
        for optimizer, state, groups in self._optimizers.values():
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(before)
