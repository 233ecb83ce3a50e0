"""How DDP is brought to reduce a window's gradients in its last micro-step, whatever the losses of that step reach.

Entry points: ``reduce`` and ``Reached``. When ranks reduce is ``step``'s; sums of numbers are ``distributed``'s.

NOTE [A parameter that the last micro-step does not reach]
1. DDP counts the parameters that backward arrives at, and sends a bucket of gradients when all of its parameters were
   counted. If the last micro-step of a window leaves one out, its bucket and all behind it stay unsent, on some ranks
   or on all, and nothing says so before the next forward.
2. A gradient that backward added to is another tensor than before or has another version. The parameters for which
   neither holds are sent a gradient of 0 then, so that DDP counts them: what earlier micro-batches summed is reduced
   as it should be, on every rank by itself and without a message more.
3. With ``find_unused_parameters`` DDP looks for them itself, in the graph of the last forward.
"""

import torch
from torch import Tensor, nn

from snugfit.errors import UnsupportedError, warn


def reduce(model: nn.Module) -> None:
    """Let DDP reduce the gradients as they are, where a micro-step has no backward of its own to do it.

    Raises:
        UnsupportedError: DDP looks for unused parameters, which it does within the backward of a loss.
    """
    if getattr(model, "find_unused_parameters", False):
        raise UnsupportedError(
            "DDP with find_unused_parameters=True reduces only within the backward of a loss",
            got="a last micro-step without one backward that may reach everything",
            expected="one loss without only=, whose count is above 0, in the last micro-batch of every rank",
            hint="wrap the model without find_unused_parameters, or return the losses together",
        )
    _arrive_at([parameter for parameter in model.parameters() if parameter.requires_grad])


class Reached:
    """Notices, after a backward that DDP reduces in, which parameters it did not arrive at; see the NOTE.

    Args:
        model: Wrapped in DDP.
    """

    def __init__(self, model: nn.Module) -> None:
        self._finds_them = getattr(model, "find_unused_parameters", False)
        self._before: list[tuple[str, nn.Parameter, Tensor | None, int]] = []
        if not self._finds_them:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    gradient = parameter.grad
                    version = 0 if gradient is None else gradient._version
                    self._before.append((name, parameter, gradient, version))

    def complete(self) -> None:
        """Let DDP reduce what it waits for."""
        left = [
            (name, parameter, gradient)
            for name, parameter, gradient, version in self._before
            if parameter.grad is gradient and (gradient is None or gradient._version == version)
        ]
        self._before = []
        unused = [name for name, _, gradient in left if gradient is None]
        if unused:
            more = f" and {len(unused) - 1} others" if len(unused) > 1 else ""
            warn(
                f"no micro-batch of this rank reached {unused[0].removeprefix('module.')}{more}: DDP gives it a "
                "gradient of 0 where no rank did, on which momentum and weight decay act; freeze what is not used, or "
                "wrap the model with find_unused_parameters=True",
            )
        if left:
            _arrive_at([parameter for _, parameter, _ in left])


def _arrive_at(parameters: list[nn.Parameter]) -> None:
    torch.autograd.backward(parameters, [torch.zeros_like(parameter) for parameter in parameters])
