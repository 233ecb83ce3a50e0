"""Looks over the shoulder of a forward: which module runs, in which types, what leaves its range, who divides the loss.

Entry points: ``ModuleNames`` and ``Observer``. Only public hooks are used, on copies of the user's model. What is seen
is judged elsewhere.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from snugfit.training.checking.divisions import Division, Divisions
from snugfit.training.diagnosing.operations import leaves
from snugfit.training.diagnosing.ranges import badness, largest, type_name
from snugfit.training.islands import HALF

_SOFTMAX = ("softmax", "log_softmax")


class ModuleNames:
    """Knows which module of a model is running.

    Args:
        finds_functions: Whether graphs are searched for custom autograd functions.
    """

    def __init__(self, *, finds_functions: bool = False) -> None:
        self._finds_functions = finds_functions
        self._stack: list[str] = []
        self._known: dict[int, str] = {}
        self.custom_functions: dict[str, tuple[type, str]] = {}
        "Custom autograd functions that were called: name to class and module."
        self._visited: set[Any] = set()

    @property
    def present(self) -> str:
        """Fully qualified name of the innermost module that runs; ``""`` outside of all."""
        return self._stack[-1] if self._stack else ""

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Hooks on all modules of a model, taken off again."""
        handles: list[Any] = []
        try:
            for name, module in model.named_modules():
                handles.append(module.register_forward_pre_hook(self._entering(name), prepend=True))
                handles.append(module.register_forward_hook(self._leaving, always_call=True))
                self._known[id(module)] = name
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._stack.clear()
            self._known.clear()
            self._visited.clear()

    def called(self, function: Any) -> str:
        """Name of the module that a function belongs to, else of the one that runs."""
        while isinstance(function, functools.partial):
            function = function.func
        return self._known.get(id(getattr(function, "__self__", function)), self.present)

    def end_forward(self, losses: Iterable[Tensor]) -> None:
        """A loss is complete: what no module made, the loss function did; the graph is let go."""
        self._find_functions(losses, "")
        self._visited.clear()

    def _find_functions(self, outputs: Iterable[Tensor], module: str) -> None:
        waiting = [output.grad_fn for output in outputs] if self._finds_functions else []
        while waiting:
            node = waiting.pop()
            if node is None or node in self._visited:
                continue
            self._visited.add(node)
            kind = getattr(type(node), "_forward_cls", None)
            if kind is not None and kind.__module__.partition(".")[0] not in ("torch", "snugfit"):
                self.custom_functions.setdefault(kind.__qualname__, (kind, module))
            waiting += [before for before, _ in node.next_functions]

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._stack.append(name)

        return enter

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            name = self._stack.pop()
            self._find_functions((leaf for leaf in leaves(output) if isinstance(leaf, Tensor)), name)


@dataclass(frozen=True, slots=True)
class OutOfRange:
    """An operation that made a value that is not finite out of finite ones."""

    module: str
    op: str
    dtype: str
    is_masked_row: bool
    "A softmax over a row of nothing but -inf; else half precision was left."
    what: str
    is_trained_on: bool
    "Whether gradients were recorded there; else it may be a statistic that nothing reads."


class Observer(TorchFunctionMode):
    """What one or several forwards do.

    Args:
        names: Of the module that runs.
        watches_ranges: Whether values are looked at, which waits for the device after every operation.
        divisor: A number by which a loss should not be divided.
    """

    def __init__(self, names: ModuleNames, *, watches_ranges: bool, divisor: int = 1) -> None:
        super().__init__()
        self._names, self._watches_ranges = names, watches_ranges
        self.lowest = torch.float64
        "The coarsest type in which something that is trained on was computed."
        self.out_of_range: dict[tuple[str, str], OutOfRange] = {}
        self.failed_in = ""
        "Module in which an operation raised last."
        self._divisions = Divisions(divisor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = list(leaves((args, kwargs))) if self._watches_ranges else []
        before = max((_level(leaf) for leaf in inputs), default=0)
        try:
            result = func(*args, **kwargs)
        except Exception:
            self.failed_in = self._names.present
            raise
        for output in leaves(result):
            if isinstance(output, Tensor) and output.requires_grad:
                kind = output.dtype.to_real()
                if torch.finfo(kind).eps > torch.finfo(self.lowest).eps:
                    self.lowest = kind
                self._divisions.note(_name(func), args, kwargs, output)
            if self._watches_ranges and isinstance(output, Tensor) and inputs:
                self._note_range(func, args, kwargs, inputs, before, output)
        return result

    def division(self, losses: Iterable[Tensor]) -> Division | None:
        """Who divided the losses of the last forward as a whole, see ``divisions``; forgets that forward."""
        return self._divisions.of(losses)

    def _note_range(self, func: Any, args: Any, kwargs: Any, inputs: list[Any], before: int, output: Tensor) -> None:
        after = badness(output)
        if after == 0:
            return
        op, where = _name(func).strip("_"), self._names.present
        if op in _SOFTMAX and after == 2 and before < 2:
            if self._has_left_range() or not _has_masked_row(args, kwargs):
                return  # its infinite inputs were finite before half precision
            what = "a row whose inputs are all -inf: its result is NaN"
            self.out_of_range.setdefault((where, op), OutOfRange(where, op, type_name(output), True, what, True))
        elif before == 0 and output.dtype in HALF and any(isinstance(leaf, Tensor) for leaf in inputs):
            limit = torch.finfo(output.dtype).max
            numbers = [abs(leaf) for leaf in inputs if isinstance(leaf, (int, float))]
            size = max([largest(leaf for leaf in inputs if isinstance(leaf, Tensor)), *numbers])
            what = f"{('', 'inf', 'NaN')[after]} out of finite values up to {size:.5g} ({type_name(output)} ends at "
            what += f"{limit:.5g})"
            found = OutOfRange(where, op, type_name(output), False, what, torch.is_grad_enabled())
            known = self.out_of_range.get((where, op))
            if known is None or (found.is_trained_on and not known.is_trained_on):
                self.out_of_range[where, op] = found

    def _has_left_range(self) -> bool:
        return any(not one.is_masked_row for one in self.out_of_range.values())


def _level(leaf: Any) -> int:
    if isinstance(leaf, Tensor):
        return badness(leaf)
    return 2 if leaf != leaf else int(abs(leaf) == float("inf"))


def _has_masked_row(args: Any, kwargs: Any) -> bool:
    """Whether a row of a softmax's input is nothing but -inf."""
    given, dim = kwargs.get("input", args[0] if args else None), kwargs.get("dim", args[1] if len(args) > 1 else -1)
    if not isinstance(given, Tensor) or not isinstance(dim, int) or not given.dim():
        return True
    return bool((given.detach() == -torch.inf).all(dim).any())


def _name(func: Any) -> str:
    last: str = (resolve_name(func) or getattr(func, "__name__", "")).split(".")[-1]
    return last.strip("_") if last.startswith("__") else last
