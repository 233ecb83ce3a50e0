"""Sums of gradients in fp32 for weights of half precision, as transformers loads them, under any precision.

Entry points: ``opened``, by a window that closes what it returns, and ``warn_of_half_weights``. Weights of bf16-true
are ``bf16_weights``'s, and their sums last from window to window.

NOTE [Half-precision weights that were given]
1. A sum of n bf16 gradients stops growing where the next one is below 2^-9 of it: of a thousand equal ones a quarter
   arrives. So autograd sums in fp32 (``Tensor.grad_dtype``) while a window is open, and the gradient that the
   optimizer, its hooks and clipping's result see is rounded once to the type of the weight: what a single backward of
   the whole batch would have left. It costs two more bytes per weight until the update.
2. The update stays the user's: rounded to nearest, which is warned of.
3. DDP reduces in the type of the weights, so there sums stay in it, which the warning says.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from snugfit.errors import warn
from snugfit.training import updates
from snugfit.training.islands import HALF

_SHOWN = 3


class WideSums:
    """Sums the gradients of half-precision parameters in fp32 until ``narrow`` or ``close``.

    Args:
        parameters: Without gradients; those of another type are left as they are.
    """

    def __init__(self, parameters: Iterable[nn.Parameter] = ()) -> None:
        self._types: list[tuple[nn.Parameter, torch.dtype]] = []
        if not hasattr(Tensor, "grad_dtype"):
            return
        for parameter in parameters:
            if parameter.requires_grad and parameter.is_leaf and parameter.dtype in HALF:
                if parameter.grad_dtype == parameter.dtype:
                    self._types.append((parameter, parameter.dtype))
                    parameter.grad_dtype = torch.float32

    def narrow(self) -> None:
        """Round the sums to the type of their weights, one after another; there are no more of them afterwards."""
        types, self._types = self._types, []
        for parameter, dtype in types:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = dtype
            if gradient is not None:
                parameter.grad = gradient.to(dtype)

    def close(self) -> None:
        """Drop gradients that were not narrowed, and let backward sum as before."""
        types, self._types = self._types, []
        for parameter, dtype in types:
            parameter.grad = None
            parameter.grad_dtype = dtype


def opened(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> WideSums:
    """Sum in fp32 what optimizers hold of half-precision weights that were given; see the NOTE.

    Args:
        model: Without gradients.
        optimizers: Those that are attached to bf16-true weights are left out.
    """
    return WideSums() if _reduces_low(model) else WideSums(_given(optimizers))


def _reduces_low(model: nn.Module) -> bool:
    return isinstance(model, nn.parallel.DistributedDataParallel)


def _given(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[nn.Parameter]:
    """Parameters of the optimizers that hold them as they are."""
    for optimizer in optimizers:
        update = updates.of(optimizer)
        if not update.is_attached:
            yield from update.parameters


def warn_of_half_weights(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], precision: str) -> None:
    """Say what becomes of the updates of half-precision weights, by their names.

    Args:
        model: Whose parameters they are.
        optimizers: What they hold is trained.
        precision: ``"32-true"`` or ``"bf16-mixed"``.
    """
    ours = {id(parameter) for parameter in _given(optimizers)}
    half = {
        name: parameter.dtype
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.dtype in HALF and id(parameter) in ours
    }
    if not half:
        return
    names = list(half)
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    dtype = next(iter(half.values()))
    bits = 9 if dtype == torch.bfloat16 else 12
    is_summed_low = _reduces_low(model) or not hasattr(Tensor, "grad_dtype")
    sums = f"their gradients are summed in {dtype}, which loses the later micro-batches; " if is_summed_low else ""
    warn(
        f"precision={precision!r} and {len(names)} trained weights of {dtype} ({shown}): {sums}an update below "
        f"2^-{bits} of a weight is rounded away; convert the model before its optimizer is made, model.float(), or use "
        "snugfit.build with Plan(precision='bf16-true'), which keeps fp32 master weights",
    )
