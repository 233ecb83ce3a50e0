"""Which module is running: by its fully qualified name, in forward, in backward and in recomputation.

Entry points: ``ModuleStack``, and ``Owners`` for who holds a parameter. Backward is attributed by sequence numbers:
autograd numbers its nodes as they are made, so the numbers at which modules were entered and left say in which of them
a node was made. No module is kept alive here, and ids are used again: whatever goes by an id checks what it stands for.
"""

import bisect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from snugfit.memory import torch_private
from snugfit.memory.events import Border, Recording

_COMPILED = "_orig_mod"
"Under which name torch.compile's wrapper holds a module, whose name it gets."


class ModuleStack:
    """Follows the modules of the process while a step is recorded.

    Names are those of the outermost module that holds a module, whether it is called itself or only its parts are.
    The names of the first such model are as its ``named_modules`` says; those of further ones (a discriminator, a
    loss that is a module) begin with the name of their class.

    Args:
        on_root: Called with each such outermost module when one of its modules runs for the first time.
        recording: Where modules are entered and left is written down there.
    """

    def __init__(self, on_root: Callable[[nn.Module], None], recording: Recording) -> None:
        self._on_root = on_root
        self._recording = recording
        self._names: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._roots: list[weakref.ref[nn.Module]] = []
        self._prefixes: set[str] = set()
        self._parents: dict[int, tuple[weakref.ref[nn.Module], weakref.ref[nn.Module]]] = {}
        self._running: list[str] = []
        self._ids: list[int] = []
        self._sequence_starts: list[int] = [0]
        self._sequence_modules: list[str] = [""]

    @property
    def roots(self) -> Iterator[nn.Module]:
        """The outermost modules met so far that are still there."""
        for reference in self._roots:
            root = reference()
            if root is not None:
                yield root

    @property
    def is_running(self) -> bool:
        """Whether any module is inside of its forward, which in backward means that it is recomputed."""
        return bool(self._running)

    def watch(self) -> list[Any]:
        """Follow every module from now on; the handles end it."""
        return [
            module_hooks.register_module_module_registration_hook(self._held_by),
            module_hooks.register_module_forward_pre_hook(self._enter),
            module_hooks.register_module_forward_hook(self._leave, always_call=True),
        ]

    def current(self) -> str:
        """The innermost module running, or the one in which the node whose backward runs was made."""
        if self._running:
            return self._running[-1]
        number = torch_private.current_sequence_number() if torch_private.in_backward() else None
        if number is None or number > 2**62:  # nodes that accumulate into a leaf carry the largest number
            return ""
        return self._sequence_modules[bisect.bisect_right(self._sequence_starts, number) - 1]

    def name(self, root: nn.Module) -> list[tuple[str, nn.Module]]:
        """Give the modules of a model their names, if they have none yet, and return all of them."""
        if self._name_of(root) is None:
            prefix = self._prefix(root)
            self._prefixes.add(prefix)
            self._roots.append(weakref.ref(root))
            for name, module in root.named_modules():
                if self._name_of(module) is None:
                    full = ".".join(part for part in (prefix, *name.split(".")) if part not in ("", _COMPILED))
                    self._names[id(module)] = (weakref.ref(module), full)
        return [(self._name_of(module) or "", module) for module in root.modules()]

    def _name_of(self, module: nn.Module) -> str | None:
        reference, name = self._names.get(id(module), (None, ""))
        return name if reference is not None and reference() is module else None

    def name_of(self, module: nn.Module) -> str | None:
        """The name of a module that was given one."""
        return self._name_of(module)

    def _prefix(self, root: nn.Module) -> str:
        if next(self.roots, None) is None:
            return ""
        prefix, number = type(root).__name__, 2
        while prefix in self._prefixes:
            prefix, number = f"{type(root).__name__}-{number}", number + 1
        return prefix

    def _held_by(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        if module is not None and name != _COMPILED:
            self._parents[id(module)] = (weakref.ref(module), weakref.ref(parent))

    def _outermost(self, module: nn.Module) -> nn.Module:
        seen = {id(module)}
        while id(module) in self._parents:
            child, parent = (reference() for reference in self._parents[id(module)])
            if child is not module or parent is None or id(parent) in seen:  # an id used again, or a circle
                break
            seen.add(id(parent))
            module = parent
        return module

    def _enter(self, module: nn.Module, _: Any) -> None:
        name = self._name_of(module)
        if name is None:
            name = self._new_name_of(module.__dict__["_modules"].get(_COMPILED, module))
            self._names[id(module)] = (weakref.ref(module), name)
        self._ids.append(id(module))
        self._running.append(name)
        self._note()
        self._note_border(name, is_entered=True)

    def _new_name_of(self, module: nn.Module) -> str:
        root = self._outermost(module)
        if self._name_of(root) is not None or all(module is not part for part in root.modules()):
            root = module  # made later than its model was named, or taken out of it
        self.name(root)
        self._on_root(root)
        return self._name_of(module) or ""

    def _leave(self, module: nn.Module, *_: Any) -> None:
        while self._ids and self._ids.pop() != id(module):
            self._running.pop()
        if self._running:
            name = self._running.pop()
            self._note_border(name, is_entered=False)
        self._note()

    def _note_border(self, name: str, *, is_entered: bool) -> None:
        recording = self._recording
        recording.borders.append(Border(len(recording.events), name, is_entered, len(recording.work)))

    def _note(self) -> None:
        self._sequence_starts.append(torch_private.next_sequence_number())
        self._sequence_modules.append(self.current())


class Owners:
    """Which module a parameter belongs to: of several that hold it (tied weights) the first that claimed it."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[nn.Module], str]] = {}

    def claim(self, parameter: Tensor, module: nn.Module, name: str) -> bool:
        """Let a module of that name own a parameter, if no other does; gives whether it owns it now."""
        holder, owner = self._of.get(id(parameter), (None, name))
        if holder is None or holder() is None:
            self._of[id(parameter)] = (weakref.ref(module), name)
            return True
        return owner == name

    def stand_in(self, held: Tensor, parameter: Tensor) -> None:
        """Let what an optimizer holds belong where the parameter does that it stands for."""
        if held is not parameter and id(parameter) in self._of:
            self._of[id(held)] = self._of[id(parameter)]

    def of(self, parameter: Tensor) -> str | None:
        """Name of the owner; None where nobody claimed it."""
        holder, name = self._of.get(id(parameter), (None, ""))
        return name if holder is not None and holder() is not None else None
