"""What the modules of a segment hold in buffers and plain attributes, put back while a forward of theirs is repeated.

Entry points: ``HeldTensors``, one for each module of a segment, and ``put_back``. What a window puts back is
``buffers``'s; weights are not put back, ``guarding`` watches them.

NOTE [What is put back]
1. Running statistics and counters must not move again in a repetition, and it has to see what the forward saw.
   Restoring a tensor in place would raise its version, and backward would refuse it. So the *objects* are swapped for
   twins of what they were, and swapped back afterwards.
2. Versions do not tell all: writes to ``.data`` and the kernels of BatchNorm are not counted. Small tensors are always
   copied before the forward. Large ones are compared with a copy in the first forwards of each mode, and what ever
   changed is copied from then on; of the others a counted change is refused.
3. An attribute is put back as the object that it was, for modules exchange those (the weight of ``spectral_norm``).
   Of one that is not copied an alias without its graph is held: the result of the last forward, kept in an attribute,
   would otherwise hold all forwards.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from snugfit.training import torch_private
from snugfit.training.attributes import NOTHING, Attribute, Attributes, Looker
from snugfit.training.buffers import SMALL, Copy, copies, overlapping

_LOOKS = 2
"Forwards of each mode after which a large tensor is compared with its copy."


@dataclass(frozen=True, slots=True)
class Held:
    """What one module held under one name before a forward."""

    module: nn.Module
    number: int
    "Of the module in its segment."
    name: str
    value: Any
    "The buffer, or an alias of the attribute without its graph; or what was in the place of a tensor."
    is_buffer: bool
    trains: bool = False
    version: int = 0
    is_small: bool = True
    "Whether a copy of it, and of what overlaps it in memory, costs next to nothing."
    copy: Copy | None = None

    @property
    def holder(self) -> Any:
        """The mapping that it is in."""
        return self.module._buffers if self.is_buffer else self.module.__dict__

    @property
    def is_untouched(self) -> bool:
        """Whether no change of it was counted, and a buffer is the same object."""
        if self.is_buffer and _now(self.holder, self.name) is not self.value:
            return False
        return not isinstance(self.value, Tensor) or _version(self.value) == self.version

    @property
    def has_moved(self) -> bool:
        """Whether it is not what it was, as far as versions and a copy tell."""
        if not self.is_untouched:
            return True
        if self.copy is None or torch_private.is_fake(self.value) or self.value.is_meta:
            return False
        return self.value.shape != self.copy.shape or not torch.equal(self.value, self.copy.value)

    def without_copy(self) -> "Held":
        """The same with no copy of the values."""
        return replace(self, copy=None)


@dataclass(slots=True)
class _Known:
    """What is known of a large tensor from earlier forwards."""

    changes: bool = False
    looks: dict[bool, int] = field(default_factory=dict)
    "By mode, how often it was compared."

    def is_looked_at(self, module: nn.Module) -> bool:
        return self.looks.get(module.training, 0) < _LOOKS


class HeldTensors:
    """Copies what a module of a segment holds, again and again, and learns which of the large ones never change."""

    def __init__(self) -> None:
        self.looker = Looker()
        self._known: dict[tuple[int, str], _Known] = {}

    def take(self, modules: Sequence[nn.Module], attributes: Iterable[Attribute]) -> list[Held]:
        """Note what is there before a forward, and copy what that may change.

        Args:
            modules: The same ones, in the same order, every time.
            attributes: The tensors among those of these modules.
        """
        held = [
            _held(module, i, name, buffer, is_buffer=True)
            for i, module in enumerate(modules)
            for name, buffer in module._buffers.items()
        ]
        held += [_held(one.module, one.number, one.name, one.value, is_buffer=False) for one in attributes]
        found = _measured([one for one in held if one.value is not None])
        nothing = [one for one in held if one.value is None]
        made = copies([one.value for one in found], [self._may_change(one) for one in found])
        return [replace(one, copy=copy) for one, copy in zip(found, made, strict=True)] + nothing

    def settle(self, held: Sequence[Held], attributes: Attributes) -> tuple[list[Held], list[Held]]:
        """After the forward: what a repetition has to put back, and of what it must not have been changed till then.

        Args:
            held: What ``take`` gave.
            attributes: Before the forward.
        """
        for one in held:
            if not one.is_small:
                self._learn(one)
        moving = {id(one.copy.memory) for one in held if one.copy is not None and self._is_copied(one)}
        back, stayed = [], []
        for one in held:
            if one.value is None:
                back += [] if one.is_untouched else [one]
            elif one.copy is not None and id(one.copy.memory) in moving:
                back.append(one)
            else:
                stayed.append(one.without_copy())
                back += [] if one.is_buffer else [one.without_copy()]
        back += [
            Held(one.module, one.number, one.name, one.value, is_buffer=False) for one in attributes.became_tensors()
        ]
        return back, stayed

    def _may_change(self, one: Held) -> bool:
        return self._is_copied(one) or self._of(one).is_looked_at(one.module)

    def _is_copied(self, one: Held) -> bool:
        return one.is_small or self._of(one).changes

    def _learn(self, one: Held) -> None:
        known = self._of(one)
        if not known.changes and (one.copy is None or known.is_looked_at(one.module)):
            known.changes = one.has_moved
            known.looks[one.module.training] = known.looks.get(one.module.training, 0) + 1

    def _of(self, one: Held) -> _Known:
        return self._known.setdefault((one.number, one.name), _Known())


@contextmanager
def put_back(back: Sequence[Held]) -> Iterator[None]:
    """Modules hold what they held before a forward; afterwards what they hold now.

    Args:
        back: What ``settle`` gave.
    """
    present = [(one.holder, one.name, _now(one.holder, one.name)) for one in back]
    try:
        _put((one.holder, one.name, twin) for one, twin in zip(back, _twins(back), strict=True))
        yield
    finally:
        _put(present)


def _put(places: Iterable[tuple[Any, str, Any]]) -> None:
    for holder, name, value in places:
        if value is not NOTHING:
            holder[name] = value
        elif name in holder:
            del holder[name]


def _now(holder: Any, name: str) -> Any:
    return holder[name] if name in holder else NOTHING


def _held(module: nn.Module, number: int, name: str, tensor: Tensor | None, *, is_buffer: bool) -> Held:
    if tensor is None:
        return Held(module, number, name, None, is_buffer)
    value = tensor if is_buffer else tensor.detach()
    return Held(module, number, name, value, is_buffer, tensor.requires_grad, _version(value))


def _measured(held: Sequence[Held]) -> list[Held]:
    """The same, told which are large; one that cannot be compared with a copy is not."""
    large = [one.value.layout == torch.strided and one.value.numel() > SMALL for one in held]
    if any(large):
        for numbers in overlapping([one.value for one in held]):
            if any(large[i] for i in numbers):
                for i in numbers:
                    large[i] = True
    return [replace(one, is_small=False) if is_large else one for one, is_large in zip(held, large, strict=True)]


def _twins(held: Sequence[Held]) -> list[Any]:
    """Tensors as they were, to be written into; those that shared memory do so again."""
    memories = {id(one.copy.memory): one.copy.memory for one in held if one.copy is not None}
    cloned = {key: memory.clone() for key, memory in memories.items()}

    def twin(one: Held) -> Any:
        if not isinstance(one.value, Tensor):
            return one.value
        values = one.value.detach() if one.copy is None else one.copy.of(cloned[id(one.copy.memory)])
        return values.requires_grad_(one.trains)

    return [twin(one) for one in held]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
