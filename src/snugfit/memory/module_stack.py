"""Which module is running: by its fully qualified name, in forward, in backward and in recomputation.

Entry point: ``ModuleStack``. Backward is attributed by sequence numbers: autograd numbers its nodes as they are made,
so the numbers at which modules were entered and left say in which of them a node was made.
"""

import bisect
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules import module as module_hooks

from snugfit.memory import torch_private


class ModuleStack:
    """Follows the modules of the process while a step is recorded.

    Args:
        on_root: Called with each outermost module when it runs for the first time.
    """

    def __init__(self, on_root: Callable[[nn.Module], None]) -> None:
        self._on_root = on_root
        self._names: dict[int, str] = {}
        self._roots: list[nn.Module] = []  # kept, so that no id passes on to another module
        self._running: list[str] = []
        self._ids: list[int] = []
        self._sequence_starts: list[int] = [0]
        self._sequence_modules: list[str] = [""]

    @property
    def is_running(self) -> bool:
        """Whether any module is inside of its forward, which in backward means that it is recomputed."""
        return bool(self._running)

    def watch(self) -> list[Any]:
        """Follow every module from now on; the handles end it."""
        return [
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

    def _enter(self, module: nn.Module, _: Any) -> None:
        if id(module) not in self._names:
            self._roots.append(module)
            for name, child in module.named_modules():
                self._names.setdefault(id(child), name)
            self._on_root(module)
        self._ids.append(id(module))
        self._running.append(self._names[id(module)])
        self._note()

    def _leave(self, module: nn.Module, *_: Any) -> None:
        while self._ids and self._ids.pop() != id(module):
            self._running.pop()
        if self._running:
            self._running.pop()
        self._note()

    def _note(self) -> None:
        self._sequence_starts.append(torch_private.next_sequence_number())
        self._sequence_modules.append(self._running[-1] if self._running else "")
