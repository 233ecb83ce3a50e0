"""The gradients of a window: summed apart for several denominators, watched in between, and clipped, dense or sparse.

Entry points: ``Apart``, ``Watch``, ``values`` and ``clip``. When which of them is used is ``step``'s; what gradients
are multiplied by is ``losses``'s.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from snugfit.errors import PlanError, UnsupportedError
from snugfit.training.weighting import Number

_TAKE_SPARSE = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam, torch.optim.LBFGS)
_DENSE_ONLY = tuple(
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
    and kind not in _TAKE_SPARSE
)
"Torch's own that raise on a sparse gradient; others are the user's, who knows them."


class Apart:
    """Sets of gradients beside ``.grad``, so that sums with different denominators do not mix.

    Each set is one more gradient of every parameter that its losses reach, until it is folded.

    Args:
        parameters: All that backward may reach.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._sets: dict[int, list[Tensor | None]] = {}

    @contextmanager
    def summed_in(self, k: int) -> Iterator[None]:
        """The context in which backward adds to the k-th set; the 0-th is ``.grad`` itself."""
        if k == 0:
            yield
            return
        main = self._exchanged(self._sets.pop(k, [None] * len(self._parameters)))
        try:
            yield
        finally:
            self._sets[k] = self._exchanged(main)

    def fold(self, factors: Sequence[Number], multiply: Callable[[Sequence[Tensor], Number], None]) -> None:
        """Add all sets to ``.grad``, each times its factor, and give their memory back.

        Args:
            factors: Of ``.grad`` and of each set after it.
            multiply: Multiplies gradients by a factor, in place.
        """
        multiply(values(self._parameters), factors[0])
        for k in sorted(self._sets):
            gradients = self._sets.pop(k)
            pairs = [(p, g) for p, g in zip(self._parameters, gradients, strict=True) if g is not None]
            del gradients
            multiply([_values(gradient) for _, gradient in pairs], factors[k])
            while pairs:
                parameter, gradient = pairs.pop()
                if parameter.grad is None:
                    parameter.grad = gradient
                elif parameter.grad.is_sparse:
                    parameter.grad = parameter.grad + gradient
                else:
                    parameter.grad.add_(gradient)

    def _exchanged(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        before = [parameter.grad for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        return before


def add(tensor: Tensor, leaves: Sequence[Tensor], *, retain_graph: bool) -> None:
    """Add the gradients of a tensor to those of some leaves, past the hooks in which DDP reduces.

    Args:
        tensor: Is differentiated.
        leaves: Whose gradients; those that it does not depend on keep what they have.
        retain_graph: Whether the graph is needed again.
    """
    found = torch.autograd.grad(tensor, leaves, retain_graph=retain_graph, allow_unused=True)
    for leaf, gradient in zip(leaves, found, strict=True):
        if gradient is not None:
            leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


class Watch:
    """Notices gradients that someone clears, replaces or changes between two backwards of a window."""

    def __init__(self) -> None:
        self._seen: list[tuple[nn.Parameter, Tensor | None, int]] = []

    def look(self, parameters: Sequence[nn.Parameter]) -> None:
        """Remember the gradients as they are."""
        self._seen = [(p, grad, 0 if grad is None else grad._version) for p in parameters for grad in (p.grad,)]

    def check(self, micro_batch: int) -> None:
        """Compare the gradients with those that were remembered.

        Raises:
            PlanError: Any of them is another one, is gone or was written to.
        """
        for parameter, gradient, version in self._seen:
            found = parameter.grad
            if found is not gradient:
                if found is None:
                    raise _touched("no gradient where backward had left one: zero_grad() was called")
                raise _touched(f"another gradient than micro-batch {micro_batch}'s backward left")
            if gradient is not None and gradient._version != version:
                raise _touched(
                    f"a gradient that was written to after micro-batch {micro_batch}'s backward, as "
                    "zero_grad(set_to_none=False) does"
                )


def check_sparse_modules(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse, before the first window, modules whose sparse gradients their optimizer would fail on.

    Raises:
        UnsupportedError: Names module and optimizer.
    """
    for name, module in model.named_modules():
        if not (isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse):
            continue
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if not any(module.weight is parameter for parameter in group["params"]):
                    continue
                kind = type(optimizer).__name__
                if isinstance(optimizer, _DENSE_ONLY) or group.get("weight_decay"):
                    raise UnsupportedError(
                        f"the module {name!r} makes sparse gradients, which its optimizer does not take",
                        got=f"{type(module).__name__}(sparse=True) and {kind}, "
                        f"weight_decay={group.get('weight_decay', 0)}",
                        expected="torch.optim.SparseAdam, or SGD or Adagrad without weight_decay",
                        hint="build the module with sparse=False, or give its weight an optimizer of its own",
                        module=name,
                    )


def check_layouts(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an update that would fail half-way, before it moves anything.

    Raises:
        PlanError: ``SparseAdam`` is to update a parameter whose gradient is dense.
    """
    if not isinstance(optimizer, torch.optim.SparseAdam):
        return
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    dense = [tuple(p.shape) for p in held if p.grad is not None and not p.grad.is_sparse]
    if dense:
        raise PlanError(
            "SparseAdam updates sparse gradients only",
            got=f"{len(dense)} dense gradients, the first of shape {dense[0]}",
            expected="parameters of modules that are built with sparse=True",
            hint="give the other parameters to torch.optim.AdamW, and pass both optimizers to the engine",
        )


def coalesce(parameters: Sequence[nn.Parameter]) -> None:
    """Sum what sparse gradients hold twice, so that each entry is one value."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()


def values(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The gradients there are, as dense tensors that share their memory: of a sparse one the values it holds."""
    return [_values(parameter.grad) for parameter in parameters if parameter.grad is not None]


def coalesced_values(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The same without touching a gradient: what a sparse one holds twice is summed in a copy."""
    found = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [_values(gradient.coalesce() if gradient.is_sparse else gradient) for gradient in found]


def clip(gradients: Sequence[Tensor], limit: float, norm: Tensor) -> None:
    """Scale gradients so that their norm is at most the limit; torch's own formula, in place.

    Args:
        gradients: As ``values`` returns them.
        limit: Of the norm over all of them.
        norm: That norm.
    """
    holders = [_Holder(gradient) for gradient in gradients]
    nn.utils.clip_grads_with_norm_(holders, limit, norm)  # type: ignore[arg-type]


class _Holder:
    """Stands for a parameter whose gradient is to be clipped."""

    def __init__(self, grad: Tensor) -> None:
        self.grad = grad


def _values(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else gradient


def _touched(got: str) -> PlanError:
    return PlanError(
        "gradients were cleared or changed inside of a window",
        got=got,
        expected="gradients that only backward adds to until the window's update",
        hint="remove optimizer.zero_grad() from the loop; the engine clears gradients after each update",
    )
