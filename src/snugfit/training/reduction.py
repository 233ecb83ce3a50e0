"""How DDP is brought to reduce a window's gradients in its last micro-step, whatever the losses of that step reach.

Entry points: ``reduce``, ``Reached`` and ``Forwards``. When ranks reduce is ``step``'s; sums of numbers are
``distributed``'s.

NOTE [A parameter that the last micro-step does not reach]
1. DDP counts the parameters that backward arrives at, and sends a bucket of gradients when all of its parameters were
   counted. If the last micro-step of a window leaves one out, its bucket and all behind it stay unsent, on some ranks
   or on all, and nothing says so before the next forward.
2. A gradient that backward added to is another tensor than before or has another version. The parameters for which
   neither holds are sent a gradient of 0 then, so that DDP counts them: what earlier micro-batches summed is reduced
   as it should be, on every rank by itself and without a message more. So it is where a backward broke off.
3. With ``find_unused_parameters`` DDP looks for them itself, in the graph of the last forward.
4. Whether it reduces at all is settled in its forward: of one that ran before the micro-step, or past DDP, the
   gradients are reduced once too often or not at all, and the ranks drift apart.
5. Also in a forward DDP sends buffers, and orders its buckets anew after the first window. So a rank whose loss
   function raised makes up for the forward that it did not get to; for one that broke off it cannot, where there are
   buffers.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from snugfit.errors import PlanError, UnsupportedError, warn


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
        self._model = model
        self._finds_them = getattr(model, "find_unused_parameters", False)
        self._before: list[tuple[str, nn.Parameter, Tensor | None, int]] = []
        if not self._finds_them:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    gradient = parameter.grad
                    version = 0 if gradient is None else gradient._version
                    self._before.append((name, parameter, gradient, version))

    @property
    def can_complete(self) -> bool:
        """Whether that can be known of a backward that broke off."""
        return not self._finds_them

    def complete(self, *, is_whole: bool = True) -> None:
        """Let DDP reduce what it waits for.

        Args:
            is_whole: Whether the backward reached its end.
        """
        left = [
            (name, parameter, gradient)
            for name, parameter, gradient, version in self._before
            if parameter.grad is gradient and (gradient is None or gradient._version == version)
        ]
        self._before = []
        unused = [name for name, _, gradient in left if gradient is None and is_whole]
        if unused:
            more = f" and {len(unused) - 1} others" if len(unused) > 1 else ""
            warn(
                f"no micro-batch of this rank reached {unused[0].removeprefix('module.')}{more}: DDP gives it a "
                "gradient of 0 where no rank did, on which momentum and weight decay act; freeze what is not used, or "
                "wrap the model with find_unused_parameters=True",
            )
        if not left and not is_whole:
            _BROKEN.add(self._model)
        if left:
            _arrive_at([parameter for _, parameter, _ in left])


class Forwards:
    """Follows the forwards that DDP runs in each micro-step; see the NOTE, 4 and 5.

    Args:
        model: Wrapped in DDP, or not; then nothing is followed.

    Raises:
        UnsupportedError: DDP is in the middle of a reduction that nothing ends.
    """

    def __init__(self, model: nn.Module) -> None:
        if model in _BROKEN:
            raise UnsupportedError(
                "this model can be reduced no more: an earlier backward broke off behind its last gradient",
                got="DDP whose reduction was not ended on this rank",
                expected="backwards that end, or that break off before the last gradient of a parameter",
                hint="wrap the model in DDP anew, on every rank, and make another engine",
            )
        self._model = model
        self._hooks: list[Any] = []
        self._number_begun = 0
        self._has_run = False

    def open(self) -> None:
        """Begin to look."""
        if isinstance(self._model, nn.parallel.DistributedDataParallel):
            before = self._model.register_forward_pre_hook(self._note_begin)
            self._hooks = [before, self._model.register_forward_hook(self._note_end)]

    def close(self) -> None:
        """Look no longer."""
        while self._hooks:
            self._hooks.pop().remove()

    def begin(self) -> None:
        """A micro-step begins."""
        self._number_begun, self._has_run = 0, False

    def check(self, micro_batch: int) -> None:
        """Refuse a backward in a micro-step without a forward.

        Raises:
            PlanError: The forward ran before the micro-step, or past DDP.
        """
        if self._hooks and not self._has_run:
            raise PlanError(
                "a loss was given whose forward DDP did not run in its own micro-step",
                got=f"no forward of the model in DDP in the micro-step of micro-batch {micro_batch}",
                expected="a forward of engine.model in each micro-step: there it is settled whether ranks reduce",
                hint="call engine.model(micro_batch) in the body of the loop, neither before it nor as "
                "engine.model.module(micro_batch)",
            )

    def can_go_on(self, *, reduces: bool) -> bool:
        """Whether DDP can take part in what the other ranks do, although the loss function raised in a micro-step.

        Args:
            reduces: Whether ranks reduce in it; DDP is made ready for that then.
        """
        if not self._hooks or (self._number_begun and next(self._model.buffers(), None) is not None):
            return False  # the next forward would send buffers once more
        if reduces and not self._has_run:
            if self._model.find_unused_parameters:
                return False
            self._run_nothing()
        return True

    def _run_nothing(self) -> None:
        """A forward of DDP without one of the model."""
        model: Any = self._model.module
        nothing = nn.Identity()
        nothing._modules, nothing._buffers = model._modules, model._buffers  # which DDP looks for by their names
        self._model.module = nothing
        try:
            self._model(torch.zeros(()))
        finally:
            self._model.module = model

    def _note_begin(self, *_: Any) -> None:
        self._number_begun += 1

    def _note_end(self, *_: Any) -> None:
        self._number_begun -= 1
        self._has_run = self._has_run or torch.is_grad_enabled()


_BROKEN: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"Models whose last reduction DDP has not ended, which it does at the end of a backward."


def _arrive_at(parameters: list[nn.Parameter]) -> None:
    torch.autograd.backward(parameters, [torch.zeros_like(parameter) for parameter in parameters])
