"""Looks over the shoulder of a forward: which module runs, in which types, what leaves its range, who divides the loss.

Entry points: ``ModuleNames`` and ``Observer``. Only public hooks are used, on copies of the user's model. What is seen
is judged elsewhere.
"""

import ast
import functools
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from snugfit.training.diagnosing.operations import leaves
from snugfit.training.diagnosing.ranges import badness, largest, type_name
from snugfit.training.islands import HALF

_LINEAR = ("ToCopy", "Clone", "Alias", "View", "Squeeze", "Unsqueeze", "Mean", "Sum")
_SOFTMAX = ("softmax", "log_softmax")
_DIVISIONS = {"div", "div_", "truediv", "itruediv", "divide", "divide_", "true_divide"}
_PRODUCTS = {"mul", "mul_", "rmul", "imul", "multiply", "multiply_"}
_LIBRARIES = tuple(str(Path(module.__file__ or "").parent) for module in (torch, sys.modules["snugfit"]))


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


@dataclass(frozen=True, slots=True)
class Division:
    """Something that was divided by a number."""

    divisor: float
    where: str
    "File and line of the user's code."
    text: str
    "The expression in it."
    is_certain: bool
    "Whether the number is unlikely to be something else than a number of micro-batches, if it equals one."
    num_terms: int
    "How many losses were added up before: a sum of k terms divided by k is their mean."
    is_of_sum: bool
    "Whether a sum over elements was divided, which makes a mean."
    is_named: bool
    "Whether the user's code calls the number one of accumulation."


class Observer(TorchFunctionMode):
    """What one or several forwards do.

    Args:
        names: Of the module that runs.
        watches_ranges: Whether values are looked at, which waits for the device after every operation.
        divisor: A number by which a loss should not be divided.
    """

    def __init__(self, names: ModuleNames, *, watches_ranges: bool, divisor: int = 1) -> None:
        super().__init__()
        self._names, self._watches_ranges, self._divisor = names, watches_ranges, divisor
        self.lowest = torch.float64
        "The coarsest type in which something that is trained on was computed."
        self.out_of_range: dict[tuple[str, str], OutOfRange] = {}
        self.failed_in = ""
        "Module in which an operation raised last."
        self._divisions: dict[Any, Division] = {}

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
                self._note_division(func, args, kwargs, output)
            if self._watches_ranges and isinstance(output, Tensor) and inputs:
                self._note_range(func, args, kwargs, inputs, before, output)
        return result

    def division(self, losses: Iterable[Tensor]) -> Division | None:
        """Who divided the losses of the last forward as a whole by ``divisor``, if anyone did; forgets that forward."""
        found = [self._division_below(loss.grad_fn) for loss in losses]
        self._divisions.clear()
        return found[0] if found and all(found) else None

    def _division_below(self, node: Any) -> Division | None:
        while node is not None and node not in self._divisions and node.name().startswith(_LINEAR):
            node = node.next_functions[0][0]
        if node is None:
            return None
        if node.name() == "AddBackward0":
            found = [self._division_below(term) for term, _ in node.next_functions if term is not None]
            return found[0] if found and all(found) else None
        return self._divisions.get(node)

    def _note_division(self, func: Any, args: Any, kwargs: Any, output: Tensor) -> None:
        name = _name(func)
        if name not in _DIVISIONS and name not in _PRODUCTS:
            return
        values = [*args, *kwargs.values()]
        tensors = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
        others = [value for value in values if not (isinstance(value, Tensor) and value.requires_grad)]
        if len(tensors) != 1 or len(others) != 1 or isinstance(others[0], bool):
            return
        is_scalar = isinstance(others[0], Tensor) and others[0].numel() == 1 and not others[0].is_complex()
        if not is_scalar and not isinstance(others[0], (int, float)):
            return
        number = float(others[0])
        if number == 0 or output.grad_fn is None:
            return
        is_product = name in _PRODUCTS
        divisor = round(1 / number, 6) if is_product else number
        is_sought = self._divisor > 1 and divisor == self._divisor
        if divisor == 1 or not (is_sought or output.dim() == 0):
            return
        where, text, origin = _caller(is_product)
        is_named = "accum" in text.lower()
        if not (is_sought or is_named):
            return
        node = next((node for node, _ in output.grad_fn.next_functions if node is not None), None)
        number_type = others[0].dtype if isinstance(others[0], Tensor) else type(others[0])
        is_whole = not is_product and number_type in (int, torch.int64, torch.int32)
        # a half is the factor of squared errors, a number from a shape makes a mean, a weight may be any fraction
        chosen = origin == "name" if is_product else is_whole and (origin == "name" or divisor != 2)
        is_certain = origin != "shape" and (is_named or (chosen and (divisor != 2 or not is_product)))
        is_sum = node is not None and node.name().startswith("Sum")
        self._divisions[output.grad_fn] = Division(divisor, where, text, is_certain, _num_terms(node), is_sum, is_named)

    def _note_range(self, func: Any, args: Any, kwargs: Any, inputs: list[Any], before: int, output: Tensor) -> None:
        after = badness(output)
        if after == 0:
            return
        op, where = _name(func).strip("_"), self._names.present
        if op in _SOFTMAX and after == 2 and before < 2:
            what = "a row whose inputs are all -inf: its result is NaN"
            self.out_of_range.setdefault((where, op), OutOfRange(where, op, type_name(output), True, what))
        elif before == 0 and output.dtype in HALF and any(isinstance(leaf, Tensor) for leaf in inputs):
            limit = torch.finfo(output.dtype).max
            numbers = [abs(leaf) for leaf in inputs if isinstance(leaf, (int, float))]
            size = max([largest(leaf for leaf in inputs if isinstance(leaf, Tensor)), *numbers])
            what = f"{('', 'inf', 'NaN')[after]} out of finite values up to {size:.5g} ({type_name(output)} ends at "
            what += f"{limit:.5g})"
            self.out_of_range.setdefault((where, op), OutOfRange(where, op, type_name(output), False, what))


def _level(leaf: Any) -> int:
    if isinstance(leaf, Tensor):
        return badness(leaf)
    return 2 if leaf != leaf else int(abs(leaf) == float("inf"))


def _name(func: Any) -> str:
    last: str = (resolve_name(func) or getattr(func, "__name__", "")).split(".")[-1]
    return last.strip("_") if last.startswith("__") else last


def _num_terms(node: Any) -> int:
    """Summands of a tree of additions."""
    if node is None:
        return 0
    if node.name() != "AddBackward0":
        return 1
    return sum(_num_terms(term) for term, _ in node.next_functions)


def _caller(is_product: bool) -> tuple[str, str, str]:
    """Where the user's code is, what it says, and whether its number is a ``"literal" "name"`` or of a ``"shape"``."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    file, line = frame.f_code.co_filename, frame.f_lineno
    text, where = linecache.getline(file, line).strip(), f"{Path(file).name}:{line}"
    operator = ast.Mult if is_product else ast.Div
    origins = set()
    for node, segment in _operations(file):
        if isinstance(node.op, operator) and node.lineno <= line <= (node.end_lineno or node.lineno):
            sides = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.value]
            origins |= {"literal" for side in sides if isinstance(side, ast.Constant)}
            origins |= {"shape" for side in sides[-1:] if _is_of_shape(side)}
            text = segment or text
    return where, text, next((origin for origin in ("shape", "literal") if origin in origins), "name")


@functools.lru_cache(maxsize=32)
def _operations(file: str) -> tuple[tuple[ast.BinOp | ast.AugAssign, str | None], ...]:
    """Products and divisions in a file of the user's, and how they are written; none where it cannot be read."""
    source = "".join(linecache.getlines(file))
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ()
    found = [node for node in ast.walk(tree) if isinstance(node, (ast.BinOp, ast.AugAssign))]
    chosen = [node for node in found if isinstance(node.op, (ast.Div, ast.Mult))]
    return tuple((node, ast.get_source_segment(source, node)) for node in chosen)


def _is_of_shape(node: ast.AST) -> bool:
    words = {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
    words |= {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return bool(words & {"shape", "size", "len", "numel"})
