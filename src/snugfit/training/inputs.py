"""What a module of a segment was called with: kept for its repetition, except for what the repetition makes itself.

Entry points: ``Inputs`` and ``Made``. Kept tensors are saved by autograd, so that an outer segment may drop them, and
so that one that is written into is noticed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from snugfit.errors import UnsupportedError
from snugfit.training import containing

_WRITTEN_INTO = "modified by an inplace operation"


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that an earlier call of the same segment makes: the index-th in what that call returns."""

    call: int
    index: int


@dataclass(frozen=True, slots=True)
class _Kept:
    index: int


_Origin = Made | _Kept


class Inputs:
    """The arguments of one call.

    Args:
        args: Of the call, together with ``kwargs``; containers in them are copied, for the forward may add to them.
        kwargs: See ``args``.
        cached: Weights that the call finds computed, see ``torch_private.cached_weights``.
        made_by: Says of a tensor whether an earlier call makes it.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cached: dict[Any, Tensor] | None,
        made_by: Callable[[Tensor], Made | None],
    ) -> None:
        kept: list[Tensor] = []
        self._trains: list[bool] = []
        self.made: list[Made] = []
        "What the call needs of earlier ones."

        def origin(tensor: Tensor) -> _Origin:
            made = made_by(tensor)
            if made is not None:
                self.made.append(made)
                return made
            kept.append(tensor.clone() if tensor.is_inference() else tensor)  # autograd saves none of inference mode
            self._trains.append(tensor.requires_grad)
            return _Kept(len(kept) - 1)

        self._values = containing.replaced((args, kwargs, cached), Tensor, origin)
        root = torch.empty(0, requires_grad=True, device="cpu")
        self._node: Any = _Keep.apply(root, *kept).grad_fn  # type: ignore[no-untyped-call]

    def again(
        self, made: Mapping[Made, Tensor], name: str
    ) -> tuple[tuple[Any, ...], dict[str, Any], dict[Any, Tensor] | None]:
        """The arguments for a repetition, and the weights that it finds computed.

        Args:
            made: What earlier calls have made this time.
            name: Of the module, for a message.

        Raises:
            UnsupportedError: A tensor was written into after the call, or by it.
        """
        try:
            kept = [_as_it_was(*one) for one in zip(self._node.saved_tensors, self._trains, strict=True)]
        except RuntimeError as error:
            if _WRITTEN_INTO not in str(error):
                raise
            raise UnsupportedError(
                f"the segment {name} cannot be computed again as it was: its input was written into",
                got=str(error).partition(". ")[0],
                expected="inputs as the forward saw them",
                hint="use the operation that makes a new tensor instead of the one that writes into it (relu for "
                "relu_, inplace=False), in the segment and behind it; in place of a StaticCache hand in a DynamicCache",
                names=(name,),
            ) from error
        is_origin: Any = (Made, _Kept)
        args, kwargs, cached = containing.replaced(
            self._values, is_origin, lambda origin: made[origin] if isinstance(origin, Made) else kept[origin.index]
        )
        return args, kwargs, cached


def _as_it_was(tensor: Tensor, trains: bool) -> Tensor:
    """A leaf may have been told since whether its gradient is recorded."""
    return tensor if tensor.requires_grad == trains else tensor.detach().requires_grad_(trains)


class ForwardModeError(Exception):
    """A kept tensor has a tangent, of which a repetition would know nothing."""


class _Keep(torch.autograd.Function):
    """Saves tensors in a node that nothing runs backward through."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, *kept: Tensor) -> Tensor:
        ctx.save_for_backward(*kept)
        return torch.empty(0, device="cpu")

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> None:
        raise ForwardModeError
