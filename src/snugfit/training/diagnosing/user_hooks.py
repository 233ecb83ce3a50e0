"""Names of the hooks that a user put on tensors and modules and that may change a gradient.

Entry points: ``noted``, ``of_node``, ``of_parameter`` and ``of_module``. Whether one did is ``backward``'s.
"""

from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

from torch import Tensor, nn

_NOTE = "snugfit hooks"
OF_MODULES = "BackwardHookFunction"
"Beginning of the name of the node by which torch calls a module's backward hooks."


def noted(tensor: Tensor, hook: Any) -> None:
    """Remember that a hook is put on a tensor, with the node that made it."""
    if tensor.grad_fn is not None:
        metadata: Any = tensor.grad_fn.metadata
        metadata.setdefault(_NOTE, []).append(_name(hook))


def of_node(metadata: Mapping[str, Any]) -> str:
    """Names of the hooks noted on the output of the node whose metadata is given."""
    return ", ".join(metadata.get(_NOTE, ()))


def of_parameter(parameter: nn.Parameter) -> str:
    """Names of the hooks on a parameter that change its gradient before it is summed."""
    return _names(parameter._backward_hooks)


def of_module(module: nn.Module) -> str:
    """Names of the backward hooks of a module."""
    return _names(module._backward_hooks, module._backward_pre_hooks)


def _names(*hooks: Any) -> str:
    found: Iterable[Any] = (hook for registered in hooks for hook in (registered or {}).values())
    return ", ".join(_name(hook) for hook in found if not _is_own(hook))


def _is_own(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "snugfit"


def _name(hook: Any) -> str:
    code = getattr(hook, "__code__", None)
    name = str(getattr(hook, "__qualname__", type(hook).__qualname__))
    return name if code is None else f"{name} ({PurePath(code.co_filename).name}:{code.co_firstlineno})"
