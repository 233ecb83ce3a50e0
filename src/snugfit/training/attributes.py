"""What modules hold in plain attributes that a repetition must find as it was: tensors, random generators, flags.

Entry point: ``Looker``. Buffers and weights are no plain attributes; counters are left alone, unless a tensor has taken
the place of one: code that counts asks ``is_recomputing``.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from snugfit.training import random_sources

_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) | {"forward"}
_FLAGS = frozenset({bool, str})
_NUMBERS = frozenset({int, float})
_NO_TENSORS = _FLAGS | _NUMBERS | {type(None), dict, OrderedDict, set}
_DULL = _FLAGS | _NUMBERS | {tuple}
_OF_TORCH = "torch.nn.modules."
OF_FSDP1 = "_is_fsdp_managed_module"
"What ``FullyShardedDataParallel`` sets on the modules inside of it: their weights are attributes that it gathers."
NOTHING: Any = object()


@dataclass(frozen=True, slots=True)
class Attribute:
    """One attribute of a module."""

    module: nn.Module
    number: int
    "Of the module, among those that are looked at."
    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class Attributes:
    """The plain attributes of some modules."""

    tensors: list[Attribute]
    situation: list[Any]
    "Modes, flags and kinds: where they are as in another forward, the same code is likely to run."
    sources: random_sources.Found
    "Random generators."
    all_of_them: list[tuple[int, nn.Module, dict[str, Any]]]
    "Modules that may have attributes of interest, with their numbers and all that they hold."

    def became_tensors(self) -> Iterator[Attribute]:
        """What is a tensor now and was none, as it was; ``NOTHING`` where nothing was."""
        for number, module, held in self.all_of_them:
            for name, value in module.__dict__.items():
                if type(value) not in _NO_TENSORS and isinstance(value, Tensor) and OF_FSDP1 not in held:
                    before = held.get(name, NOTHING)
                    if not isinstance(before, Tensor):
                        yield Attribute(module, number, name, before)


class Looker:
    """Looks at the attributes of the same modules again and again."""

    def __init__(self) -> None:
        self._dull: dict[int, int] = {}
        "Modules of torch's own that hold numbers and flags alone, and how many attributes they have."

    def look(self, modules: Sequence[nn.Module], given: Any) -> Attributes:
        """Look at the attributes of modules.

        Args:
            modules: The same ones, in the same order, every time.
            given: To their forward, which may draw from generators in it.
        """
        found = Attributes([], [], random_sources.Found(), [])
        found.sources.look(given)
        for i, module in enumerate(modules):
            found.situation.append(module.training)
            if self._dull.get(i) != len(module.__dict__):
                self._look_at(module, i, found)
        return found

    def _look_at(self, module: nn.Module, number: int, found: Attributes) -> None:
        held = module.__dict__
        found.all_of_them.append((number, module, held.copy()))
        found.sources.look_at_code(type(module))
        own = held.keys() - _OF_EVERY_MODULE
        if type(module).__module__.startswith(_OF_TORCH) and {type(held[name]) for name in own} <= _DULL:
            self._dull[number] = len(held)  # from now on not looked at, so this once it is no part of the situation
            return
        for name in own:
            value = held[name]
            kind = type(value)
            if kind in _FLAGS:
                found.situation.append(value)
            elif isinstance(value, Tensor):
                if OF_FSDP1 not in held:
                    found.tensors.append(Attribute(module, number, name, value))
            elif kind not in _NUMBERS:
                found.situation.append(kind)
                found.sources.look(value)
