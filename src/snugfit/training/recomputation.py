"""What is the same in a recomputation as in the forward it repeats: random and autocast state, what is held, modes.

Entry points: ``is_recomputing``, and the contexts ``FirstForward`` and ``repetition`` of a module of a segment. What
its arguments were is ``inputs``'s, what its weights were ``guarding``'s, what its modules hold ``held_tensors``'s.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar, Token
from typing import Any

import torch
from torch import Tensor, nn

from snugfit.training import held_tensors, random_sources, random_states, settings
from snugfit.training.attributes import Attributes
from snugfit.training.held_tensors import Held, HeldTensors
from snugfit.training.keeping import HandingOut, Keeping, Results, Seen

_recomputing: ContextVar[bool] = ContextVar("snugfit_recomputing", default=False)


def is_recomputing() -> bool:
    """Whether the calling code runs a second time, inside of a recomputation: counters and logs should not move."""
    return _recomputing.get()


_watched: ContextVar[bool] = ContextVar("snugfit_watched", default=False)


def is_watched() -> bool:
    """Whether the calling code runs in the forward of a segment that keeps results."""
    return _watched.get()


_begun = [0]


def num_begun() -> int:
    """How many repetitions have begun in this process, those included that hand out all that is asked for."""
    return _begun[0]


_last: list[tuple[str, ...]] = [()]
"Of the segment that was repeated last, on whatever thread backward ran."


def last_repeated() -> tuple[str, ...]:
    """The modules of the segment that was repeated last: where torch finds that a repetition differs, this one."""
    return _last[0]


class FirstForward:
    """Context of one forward of a module of a segment: notes what its repetition must find again.

    Args:
        modules: The module of the segment and those inside of it.
        parameters: Of the modules.
        learner: Of what the modules hold, for all forwards.
        seen: Which operations' results are kept, and what is known of them.
        devices: Where it computes.
        earlier: Other calls of the same pass.
        given: To the forward, which may draw from a generator in it.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        parameters: Iterable[nn.Parameter],
        learner: HeldTensors,
        seen: Seen,
        devices: Iterable[torch.device],
        earlier: Iterable["FirstForward"],
        given: Any,
    ) -> None:
        self._learner, self._seen = learner, seen
        self._attributes: Attributes | None = learner.looker.look(modules, given)
        found = self._attributes
        self.back = learner.take(modules, found.tensors)
        "Buffers and attributes that are put back."
        self.stayed: list[Held] = []
        "Those of which there is no copy."
        self.sources = random_sources.states_of(found.sources.sources)
        "Random states of a user's own generators."
        self.modes = [(module, module.training) for module in modules]
        "Modules of the segment, and whether each was in training mode."
        self.trains = [(parameter, parameter.requires_grad) for parameter in parameters]
        "Parameters, and whether gradients were recorded for each."
        self.autocasts = [_autocast(kind) for kind in {"cpu", *(device.type for device in devices)}]
        self.device = torch.get_default_device()
        self.settings = settings.present()
        self.drawn: random_states.OfPython | None = None
        "Random states of Python and numpy before a forward that drew from them."
        others = [first.results for first in earlier if first.results is not None and first.results.holds_any]
        is_watched = bool(others) or tuple(found.situation) not in seen.empty
        self.results: Results | None = Results(seen, found.sources.sources) if is_watched else None
        self._mode: Any = None if self.results is None else Keeping(self.results, others)
        self._watching: Token[bool] | None = None

    def __enter__(self) -> None:
        self.drawn = random_states.of_python()
        if self._mode is not None:
            self._watching = _watched.set(True)
            self._mode.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        attributes, self._attributes = self._attributes, None  # which would hold the graphs of earlier forwards
        assert attributes is not None
        if self._mode is not None and self.results is not None:
            self._mode.__exit__(kind, error, trace)
            if self._watching is not None:
                _watched.reset(self._watching)
            if self.results.is_empty and kind is None:
                self._seen.empty.add(tuple(attributes.situation))
                self.results = None
        self._mode = self._watching = None
        if self.drawn is not None and self.drawn.is_present():
            self.drawn = None  # the forward drew nothing, so neither does its repetition
        self.back, self.stayed = self._learner.settle(self.back, attributes)


@contextmanager
def repetition(first: FirstForward, names: tuple[str, ...]) -> Iterator[None]:
    """Context of a repetition: everything is as it was when the forward began, and afterwards as it is now.

    Args:
        first: The context of the forward that is repeated.
        names: Of the segment's modules.
    """
    token = _recomputing.set(True)
    _last[0] = names
    _begun[0] += 1
    try:
        with ExitStack() as stack:
            for context in _contexts(first):
                stack.enter_context(context)
            yield
    finally:
        _recomputing.reset(token)


def _contexts(first: FirstForward) -> Iterator[AbstractContextManager[Any]]:
    """What is not now as it was in the forward; mostly nothing."""
    if first.drawn is not None:
        yield random_states.of_python_again(first.drawn)
    modes = [(module, not was) for module, was in first.modes if module.training != was]
    trains = [(parameter, not was) for parameter, was in first.trains if parameter.requires_grad != was]
    if modes or trains:
        yield _modes(modes, trains)
    if first.sources:
        yield random_sources.drawn_again(first.sources)
    if first.back:
        yield held_tensors.put_back(first.back)
    for autocast in first.autocasts:
        if autocast != _autocast(autocast["device_type"]):
            yield torch.autocast(**autocast)
    if first.settings != settings.present():
        yield settings.as_then(first.settings)
    if first.device != torch.get_default_device():
        yield first.device
    if first.results is not None:
        yield _handed_out(first.results)


@contextmanager
def _modes(modes: list[tuple[nn.Module, bool]], trains: list[tuple[nn.Parameter, bool]]) -> Iterator[None]:
    """Turn the modes of modules and parameters that are now as given."""
    try:
        for module, now in modes:
            module.training = not now
        for parameter, now in trains:
            parameter.requires_grad_(not now)
        yield
    finally:
        for module, now in modes:
            module.training = now
        for parameter, now in trains:
            parameter.requires_grad_(now)


@contextmanager
def _handed_out(results: Results) -> Iterator[None]:
    results.begin()
    try:
        with random_sources.drawn_again(list(results.generators.items())), HandingOut(results):
            yield
    finally:
        results.end()


def _autocast(kind: str) -> dict[str, Any]:
    return {
        "device_type": kind,
        "enabled": torch.is_autocast_enabled(kind),
        "dtype": torch.get_autocast_dtype(kind),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }


def devices_of(tensors: Iterable[Tensor]) -> set[torch.device]:
    """The devices of some tensors, beside the CPU."""
    return {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
