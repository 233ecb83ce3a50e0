"""What a checkpointed forward does that its recomputation does not repeat, or repeats although it should not.

Entry point: ``Replays``. Whether the gradient differs is ``repetition``'s.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from snugfit.training import containing, random_states
from snugfit.training.checking import reached
from snugfit.training.checking.hazards import Hazard
from snugfit.training.checking.observing import ModuleNames
from snugfit.training.checking.side_effects import same_values
from snugfit.training.diagnosing.operations import leaves
from snugfit.training.torch_private import CheckpointCall

_OF_TORCH = "Python's random, numpy or a generator of its own", "torch's default random state is"
_OF_SEGMENTS = "a generator of numpy's or Python's own", "torch's, Python's and numpy's global random states are"
"What a recomputation does not repeat, and what it does."
_CACHE_METHODS = ("get_seq_length", "get_usable_length")


@dataclass(slots=True)
class Replays:
    """Looks at the checkpointed forwards of a run."""

    names: ModuleNames
    device: torch.device
    hazards: dict[tuple[str, str], Hazard] = field(default_factory=dict)
    _generators: reached.Generators | None = None

    def watching(
        self, other: Callable[[nn.Module], AbstractContextManager[Any]]
    ) -> Callable[[nn.Module], AbstractContextManager[Any]]:
        """A context for the model that runs, which also finds its generators."""

        @contextmanager
        def watch(model: nn.Module) -> Iterator[None]:
            self._generators = reached.Generators(model)
            with other(model):
                yield

        return watch

    def around(self, call: CheckpointCall) -> Callable[[], None]:
        """Look at what a checkpointed forward is given, and afterwards at what it did."""
        module = self.names.called(call.function)
        tensors = [value for value in leaves(call.arguments) if isinstance(value, Tensor)]
        kept = [tensor.detach().clone() for tensor in tensors]
        drawn, others = self._own_state(), self._others(call)
        given = [value for value in call.arguments if not (call.is_segment and containing.is_copied(value))]
        cache = next((value for value in given if _is_cache(value)), None)
        if cache is not None:
            self._add_cache(module, type(cache).__name__)
        containers = [*given, *(value for _, value in reached.by_function(call.function, depth=0))]
        sizes = [_num_tensors(value) for value in containers]

        def after() -> None:
            changed = [i for i, tensor in enumerate(tensors) if not same_values(tensor, kept[i])]
            if changed:
                shapes = ", ".join(str(tuple(tensors[i].shape)) for i in changed)
                self._add(
                    "input-changed-in-place",
                    module,
                    f"{place(module)} is recomputed and changes its own input in place (shape {shapes}): the "
                    "recomputation starts from another input; use operations without a trailing underscore there, "
                    "inplace=False",
                )
            for value, size in zip(containers, sizes, strict=True):
                if _num_tensors(value) > size:
                    self._add_cache(module, type(value).__name__)
            if not call.preserves_random_state and not torch.equal(self._own_state(), drawn):
                self._add(
                    "dropout-not-replayed",
                    module,
                    f"{place(module)} draws random numbers (dropout) and is recomputed with preserve_rng_state=False: "
                    "the recomputation draws others, so the gradient belongs to another mask than the loss; leave "
                    "preserve_rng_state at True",
                )
            if self._others(call) != others:
                drawn_from, repeated = _OF_SEGMENTS if call.is_segment else _OF_TORCH
                self._add(
                    "random-numbers-not-replayed",
                    module,
                    f"{place(module)} draws numbers from {drawn_from} and is recomputed, where only {repeated} "
                    "repeated: draw them with torch's default generator, or outside of the recomputed module",
                )

        return after

    def _add_cache(self, module: str, kind: str) -> None:
        self._add(
            "cache-under-recompute",
            module,
            f"{place(module)} is recomputed and is handed a {kind}, which grows again in the recomputation: set "
            "model.config.use_cache = False for training, or hand it no list that it appends to",
        )

    def _add(self, kind: str, module: str, message: str) -> None:
        self.hazards.setdefault((kind, module), Hazard(kind, module, message))

    def _own_state(self) -> Tensor:
        """Of torch's default generators."""
        own = torch.get_rng_state()
        return torch.cat([own, torch.cuda.get_rng_state(self.device)]) if self.device.type == "cuda" else own

    def _others(self, call: CheckpointCall) -> list[Any]:
        """The states of generators that a recomputation does not put back."""
        found = [] if self._generators is None else self._generators.states(of_torch=not call.is_segment)
        return found if call.is_segment else [*found, random.getstate(), random_states.numpy_state()]


def place(module: str) -> str:
    """How a module is called in a message."""
    return f"module {module!r}" if module else "the model itself"


def _is_cache(value: Any) -> bool:
    return any(hasattr(value, method) for method in _CACHE_METHODS) or type(value).__name__.endswith("Cache")


def _num_tensors(value: Any, depth: int = 2) -> int:
    """Tensors in a container or an object that can grow; 0 for anything else."""
    if isinstance(value, (Tensor, nn.Module, tuple, str, bytes)) or callable(value):
        return 0
    if isinstance(value, dict):
        items = list(value.values())
    elif isinstance(value, (list, set)):
        items = list(value)
    else:
        items = list(vars(value).values()) if hasattr(value, "__dict__") and type(value).__name__ != "module" else []
    own = sum(isinstance(item, Tensor) for item in items)
    return own + (sum(_num_tensors(item, depth - 1) for item in items) if depth else 0)
