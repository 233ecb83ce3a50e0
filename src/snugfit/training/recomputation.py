"""What is the same in a recomputation as in the forward it repeats: buffers, kept results; how code tells them apart.

Entry points: ``is_recomputing``, and the contexts that ``checkpointing`` hands to torch. torch's random and autocast
state are torch's own; those of Python and numpy, and training modes, are put back here.

NOTE [Buffers of a recomputed segment]
1. Backward runs the segment's forward again; running statistics and counters in buffers must not move again.
2. Restoring a buffer in place would raise its version, and backward would refuse it. So the buffer *objects* of the
   segment are swapped for copies of their values before the first forward, and swapped back afterwards.
"""

from collections.abc import Sequence
from contextvars import ContextVar, Token
from typing import Any

from torch import Tensor, nn

from snugfit.training import random_states
from snugfit.training.buffers import Keeper, Kept
from snugfit.training.keeping import HandingOut, Keeping, Results, Seen

_recomputing: ContextVar[bool] = ContextVar("snugfit_recomputing", default=False)


def is_recomputing() -> bool:
    """Whether the calling code runs a second time, inside of a recomputation: counters and logs should not move."""
    return _recomputing.get()


_last: list[tuple[str, ...]] = [()]
"Of the segment that was repeated last, on whatever thread backward ran."


def last_repeated() -> tuple[str, ...]:
    """The modules of the segment that was repeated last: where torch finds that a repetition differs, this one."""
    return _last[0]


class FirstForward:
    """Context of a segment's forward: copies the buffers that it may change, and keeps results.

    Args:
        modules: The modules of the segment.
        keeper: Of the segment, for all its forwards.
        seen: Which operations' results are kept, and what is known of them.
    """

    def __init__(self, modules: Sequence[nn.Module], keeper: Keeper, seen: Seen) -> None:
        self._modules, self._keeper, self._seen = modules, keeper, seen
        self.kept: list[Kept] = []
        self.modes: list[tuple[nn.Module, bool]] = []
        "Modules of the segment, and whether each was in training mode."
        self.drawn: random_states.OfPython | None = None
        "Random states of Python and numpy before a forward that drew from them."
        self.results: Results | None = None if seen.is_empty else Results(seen)
        self._mode: Any = None if self.results is None else Keeping(self.results)

    def __enter__(self) -> None:
        inner = [inner for module in self._modules for inner in module.modules()]
        self.kept = self._keeper.take(inner)
        self.modes = [(module, module.training) for module in inner]
        self.drawn = random_states.of_python()
        if self._mode is not None:
            self._mode.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self._mode is not None and self.results is not None:
            self._mode.__exit__(kind, error, trace)
            if self.results.is_empty and kind is None:
                self._seen.is_empty, self.results = True, None
        self._mode = None
        if self.drawn is not None and random_states.of_python().is_as(self.drawn):
            self.drawn = None  # the forward drew nothing, so neither does its repetition
        self.kept = [kept for kept in self.kept if not kept.has_stayed]


class Recomputation:
    """Context of a recomputation: swaps the buffers that the forward changed, and hands kept results out.

    Entered once per backward.

    Args:
        forward: The context of the forward that is repeated.
        names: Of the segment's modules.
    """

    def __init__(self, forward: FirstForward, names: tuple[str, ...]) -> None:
        self._forward, self._names = forward, names
        self._entered: list[tuple[Token[bool], list[Tensor | None], Any]] = []
        self._outside: list[tuple[list[tuple[nn.Module, bool]], random_states.OfPython | None]] = []

    def __enter__(self) -> None:
        drawn = self._forward.drawn
        present_modes = [(module, module.training) for module, _ in self._forward.modes]
        self._outside.append((present_modes, None if drawn is None else random_states.of_python()))
        for module, training in self._forward.modes:
            module.training = training
        if drawn is not None:
            random_states.set_python(drawn)
        present = [kept.module._buffers[kept.name] for kept in self._forward.kept]
        results = self._forward.results
        mode = None if results is None else HandingOut(results)
        self._entered.append((_recomputing.set(True), present, mode))
        for kept in self._forward.kept:
            value = kept.buffer if kept.value is None else kept.value
            kept.module._buffers[kept.name] = value.detach().clone()
        if mode is not None and results is not None:
            results.begin()
            mode.__enter__()

    def __exit__(self, *raised: Any) -> None:
        token, present, mode = self._entered.pop()
        _last[0] = self._names
        if mode is not None and self._forward.results is not None:
            mode.__exit__(*raised)
            self._forward.results.end()
        for kept, buffer in zip(self._forward.kept, present, strict=True):
            kept.module._buffers[kept.name] = buffer
        modes, drawn = self._outside.pop()
        for module, training in modes:
            module.training = training
        if drawn is not None:
            random_states.set_python(drawn)
        _recomputing.reset(token)
