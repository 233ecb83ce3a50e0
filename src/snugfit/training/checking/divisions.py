"""Who divides a loss by the number of micro-batches, which the engine averages over by itself.

Entry points: ``Divisions``, which is told of every operation, and ``verdict``. Sums that are returned as means are
``coupling``'s.

NOTE [What tells a double division from a mean or a weight]
1. A loss that is N times too small is a loss, so no comparison of gradients shows it: only how it is written does.
2. A division that makes a mean is none: k terms by k, sums over k elements by k, a sum over elements by anything.
3. A divisor whose name says accumulation ("accum", "gas", "num_micro", "grad_acc", also through the variable that it
   is put into) is a hazard whatever its value, also as a factor.
4. Without such a name it has to equal N, the number of micro-batches of the plan, in all forwards. Then a division by
   what is called n, N, k or steps is a hazard, and so is one by a bare number if it is the last operation of the loss
   and N > 2 (a half is the factor of squared errors).
5. Any other factor that equals 1 / N (a weight, a number of classes, a temperature) is a remark among the assumptions.
6. A divisor that follows the number of micro-batches makes split and full batch differ, and is found by that.
"""

import ast
import functools
import linecache
import numbers
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor

from snugfit.training.torch_private import is_inside_transform

Evidence = Literal["accumulation", "general", "bare", "other"]

_DIVISIONS = {"div", "div_", "truediv", "itruediv", "divide", "divide_", "true_divide"}
_PRODUCTS = {"mul", "mul_", "rmul", "imul", "multiply", "multiply_"}
_SAME_VALUES = ("ToCopy", "Clone", "Alias", "View", "Squeeze", "Unsqueeze")
_FACTORS = ("Mul", "Div", "Neg")
_GENERAL = {"n", "num", "k", "m", "nr", "number", "step", "steps", "div", "divisor", "acc", "ga", "micro", "batches"}
_CONVERSIONS = {"float", "int", "tensor", "as_tensor", "scalar_tensor", "full", "get", "getattr", "item", "int64"}
_COUNTED = {"size", "token", "tokens", "sample", "samples", "loss", "losses", "weight", "weights"}
_SHAPES = {"shape", "size", "len", "numel"}
_LIBRARIES = tuple(str(Path(module.__file__ or "").parent) for module in (torch, sys.modules["snugfit"]))


@dataclass(frozen=True, slots=True)
class Division:
    """A loss, or a part of one, that was divided by a number."""

    divisor: float
    where: str
    "File and line of the user's code."
    text: str
    "The expression in it."
    evidence: Evidence
    "What the names of the divisor say about it; ``bare`` where there is none."
    is_alone: bool
    "Whether the divisor is nothing but that number."
    is_product: bool
    "Whether it is written as a product with the inverse."
    makes_mean: bool
    "Whether as many terms or elements were added up before, or any number of elements."
    is_last: bool = False
    "Whether the loss is its result as it is."


def verdict(division: Division, number: int) -> Literal["hazard", "remark"] | None:
    """Whether a loss is divided twice by what a division says, given the number of micro-batches. See the NOTE."""
    if division.evidence == "accumulation":
        return "hazard"
    if division.makes_mean or division.divisor != number:
        return None
    if division.is_product or division.evidence == "other":
        return "remark"
    if division.evidence == "general":
        return "hazard"
    return "hazard" if division.is_last and number > 2 else "remark"


class Divisions:
    """The divisions of one forward at a time.

    Args:
        number: Of micro-batches; what is divided by another one is kept only if it is called accumulation.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._found: dict[Any, Division] = {}

    def note(self, name: str, args: Any, kwargs: Any, output: Tensor) -> None:
        """Keep an operation if it divides by a number that matters."""
        if (name not in _DIVISIONS and name not in _PRODUCTS) or output.grad_fn is None or is_inside_transform(output):
            return
        values = [*args, *kwargs.values()]
        places = [i for i, value in enumerate(values) if not (isinstance(value, Tensor) and value.requires_grad)]
        if len(values) != 2 or len(places) != 1:
            return
        is_product, value = name in _PRODUCTS, values[places[0]]
        is_scalar = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not (is_scalar or is_number) or (places[0] == 0 and not is_product):
            return
        factor = float(value)
        divisor = (round(1 / factor, 6) if factor else 0.0) if is_product else factor
        if divisor in (0.0, 1.0):
            return
        where, text, evidence, is_alone = _written(_caller(), is_product)
        if evidence != "accumulation" and (self._number < 2 or divisor != self._number):
            return
        below = next((node for node, _ in output.grad_fn.next_functions if node is not None), None)
        self._found[output.grad_fn] = Division(
            divisor, where, text, evidence, is_alone, is_product, _makes_mean(below, divisor)
        )

    def of(self, losses: Iterable[Tensor]) -> Division | None:
        """Who divided the losses of the last forward as a whole, if anyone did; forgets that forward."""
        found = [self._below(loss.grad_fn, is_last=True) for loss in losses]
        self._found.clear()
        return found[0] if found and all(found) else None

    def _below(self, node: Any, *, is_last: bool) -> Division | None:
        first: Division | None = None
        while node is not None:
            found = self._found.get(node)
            if found is not None:
                found = replace(found, is_last=is_last)
                if found.evidence == "accumulation":
                    return found
                first = first or found
            name, before = node.name(), [one for one, _ in node.next_functions if one is not None]
            if name == "AddBackward0" and len(before) > 1:
                terms = [self._below(term, is_last=False) for term in before]
                return first or (terms[0] if all(terms) else None)
            is_last = is_last and name.startswith(_SAME_VALUES)
            is_linear = name.startswith((*_SAME_VALUES, *_FACTORS, "Mean", "Sum", "Add"))
            node = before[0] if is_linear and len(before) == 1 else None
        return first


def _makes_mean(node: Any, divisor: float) -> bool:
    """Whether what is divided is a sum of as many terms or elements, or one over elements of any number."""
    if node is None:
        return False
    if node.name().startswith("Sum") or getattr(node, "_saved_reduction", 1) == 2:
        return True
    if _num_terms(node) == divisor:
        return True
    while node is not None and node.name().startswith("Mean"):  # a mean of sums: one over the samples, of classes
        node = node.next_functions[0][0]
    return node is not None and node.name().startswith("Sum") and _num_summed(node) == divisor


def _num_terms(node: Any) -> int:
    """Summands of a tree of additions."""
    if node is None:
        return 0
    if node.name() != "AddBackward0":
        return 1
    return sum(_num_terms(term) for term, _ in node.next_functions)


def _num_summed(node: Any) -> int:
    sizes, dims = list(node._saved_self_sym_sizes), getattr(node, "_saved_dim", None)
    number = 1
    for i in range(len(sizes)) if not dims else dims:
        number *= int(sizes[i if i < len(sizes) else i - 2**64])  # negative ones are saved unsigned
    return number


def _caller() -> FrameType:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return frame


def _written(frame: FrameType, is_product: bool) -> tuple[str, str, Evidence, bool]:
    """Where the user's code is, what it says, what its divisor is called, and whether that is all of it."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    return _read(file, line, _position(frame), is_product)


def _position(frame: FrameType) -> tuple[int, ...] | None:
    """Lines and columns of what a frame is at, where Python knows them."""
    positions = getattr(frame.f_code, "co_positions", None)  # since Python 3.11
    if positions is None:
        return None
    found = next(islice(positions(), frame.f_lasti // 2, None), None)
    return None if found is None or None in found else tuple(value or 0 for value in found)


@functools.lru_cache(maxsize=4096)
def _read(file: str, line: int, position: tuple[int, ...] | None, is_product: bool) -> tuple[str, str, Evidence, bool]:
    where, text = f"{Path(file).name}:{line}", linecache.getline(file, line).strip()
    source = _source(file)
    operator, called = (ast.Mult, _PRODUCTS) if is_product else (ast.Div, _DIVISIONS)
    found = [node for node in source.operations if node.lineno <= line <= (node.end_lineno or node.lineno)]
    exact = [node for node in found if position is not None and _place(node) == position]
    if len(exact) == 1:
        text = ast.get_source_segment(source.text, exact[0]) or text
    else:  # all that it can be
        exact = [node for node in found if not isinstance(node, ast.Call) and isinstance(node.op, operator)]
        exact = exact or [node for node in found if isinstance(node, ast.Call) and _called(node) in called]
    if any(isinstance(node, ast.Call) and _called(node) not in called for node in exact):
        return where, text, "other", True  # a library function that divides inside
    operands = [operand for node in exact for operand in _operands(node)]
    words = {word for operand in operands for word in _words(operand)}
    behind = {word for name in words for word in source.behind(name, line)}
    if any(map(_is_accumulation, {*behind, *(word for operand in operands for word in _identifiers(operand))})):
        return where, text, "accumulation", len(words) == 1
    if not words:
        return where, text, "bare", True
    parts = {part for word in words for part in _parts(word)}
    is_general = parts <= _GENERAL and not (behind & _SHAPES)
    return where, text, "general" if is_general else "other", len(words) == 1


@dataclass(frozen=True, slots=True)
class _Source:
    text: str
    operations: tuple[Any, ...]
    "Products, divisions and calls."
    assigned: tuple[tuple[str, int, ast.expr], ...]
    "Names, the lines where they are given a value, and the values."

    def behind(self, name: str, line: int) -> set[str]:
        """Identifiers in the last value that a name was given above a line."""
        above = [value for known, at, value in self.assigned if known == name and at <= line]
        return set(_identifiers(above[-1])) if above else set()


@functools.lru_cache(maxsize=32)
def _source(file: str) -> _Source:
    """What matters of a file of the user's; nothing where it cannot be read."""
    text = "".join(linecache.getlines(file))
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):
        nodes = []
    operations = [
        node
        for node in nodes
        if isinstance(node, ast.Call)
        or (isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, (ast.Div, ast.Mult)))
    ]
    assigned = [
        (target.id, node.lineno, node.value)
        for node in nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    return _Source(text, tuple(operations), tuple(sorted(assigned, key=lambda one: one[1])))


def _place(node: Any) -> tuple[int, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _operands(node: Any) -> list[ast.expr]:
    """The expression of the number; of a product both sides, apart from what a call returns."""
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Div):
            return [node.right]
        return [side for side in (node.left, node.right) if not isinstance(side, ast.Call)]
    if isinstance(node, ast.AugAssign):
        return [node.value]
    return [*node.args, *(keyword.value for keyword in node.keywords)][-1:]


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _words(node: ast.AST) -> Iterator[str]:
    """What the parts of an expression are called, without what they are looked up in or converted by."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not node.value.isdigit():
        yield node.value
    elif isinstance(node, ast.Subscript):
        found = list(_words(node.slice))
        yield from found or _words(node.value)
    elif isinstance(node, ast.Call):
        called = _called(node)
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if called not in _CONVERSIONS:
            yield called
        elif called == "item" and isinstance(node.func, ast.Attribute):
            given = [node.func.value]
        elif called == "getattr":
            given = given[1:]
        for one in given:
            yield from _words(one)
    elif not isinstance(node, ast.keyword):
        for child in ast.iter_child_nodes(node):
            yield from _words(child)


def _identifiers(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            yield inner.id
        elif isinstance(inner, ast.Attribute):
            yield inner.attr
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value


def _parts(word: str) -> list[str]:
    """``["num", "micro", "batches"]`` for ``numMicro_batches2``."""
    return re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", word).lower())


def _is_accumulation(word: str) -> bool:
    parts = set(_parts(word))
    if parts & _COUNTED:
        return False
    said = "accum" in word.lower() or "microbatch" in word.lower() or parts & {"gas", "micro"}
    return bool(said) or {"grad", "acc"} <= parts or bool("steps" in parts and parts & {"acc", "ga"})
