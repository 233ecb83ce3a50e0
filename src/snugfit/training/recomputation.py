"""What is the same in a recomputation as in the forward it repeats: buffers; and how code can tell the two apart.

Entry points: ``is_recomputing``, and the contexts that ``checkpointing`` hands to torch. Random and autocast state are
torch's.

NOTE [Buffers of a recomputed segment]
1. Backward runs the segment's forward again; running statistics and counters in buffers must not move again.
2. Restoring a buffer in place would raise its version, and backward would refuse it. So the buffer *objects* of the
   segment are swapped for copies of their values before the first forward, and swapped back afterwards.
"""

from collections.abc import Sequence
from contextvars import ContextVar, Token

from torch import Tensor, nn

from snugfit.training.buffers import Keeper, Kept

_recomputing: ContextVar[bool] = ContextVar("snugfit_recomputing", default=False)


def is_recomputing() -> bool:
    """Whether the calling code runs a second time, inside of a recomputation: counters and logs should not move."""
    return _recomputing.get()


class FirstForward:
    """Context of a segment's forward: copies the buffers that it may change.

    Args:
        modules: The modules of the segment.
        keeper: Of the segment, for all its forwards.
    """

    def __init__(self, modules: Sequence[nn.Module], keeper: Keeper) -> None:
        self._modules, self._keeper = modules, keeper
        self.kept: list[Kept] = []

    def __enter__(self) -> None:
        self.kept = self._keeper.take(inner for module in self._modules for inner in module.modules())

    def __exit__(self, *_: object) -> None:
        self.kept = [kept for kept in self.kept if not kept.has_stayed]


class Recomputation:
    """Context of a recomputation: swaps the buffers that the forward changed; entered once per backward.

    Args:
        forward: The context of the forward that is repeated.
    """

    def __init__(self, forward: FirstForward) -> None:
        self._forward = forward
        self._entered: list[tuple[Token[bool], list[Tensor | None]]] = []

    def __enter__(self) -> None:
        present = [kept.module._buffers[kept.name] for kept in self._forward.kept]
        self._entered.append((_recomputing.set(True), present))
        for kept in self._forward.kept:
            value = kept.buffer if kept.value is None else kept.value
            kept.module._buffers[kept.name] = value.detach().clone()

    def __exit__(self, *_: object) -> None:
        token, present = self._entered.pop()
        for kept, buffer in zip(self._forward.kept, present, strict=True):
            kept.module._buffers[kept.name] = buffer
        _recomputing.reset(token)
