"""Whether samples of a batch influence each other: in which module, or in the loss function.

Entry points: ``coupling_module``, ``is_separable`` and ``uses_statistics``. What follows from it is ``coupling``'s.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from snugfit.errors import BatchError
from snugfit.training import splitting
from snugfit.training.checking.comparison import Bench, Setting
from snugfit.training.diagnosing import operations
from snugfit.training.diagnosing.operations import leaves

LOSS_FUNCTION = "loss function"
_VISIBLE = 1e-3
"Relative; what is smaller is rounding, in any type."
_REDUCTIONS = {"mean", "std", "var", "std_mean", "var_mean", "max", "min", "amax", "amin", "median", "quantile", "norm"}
_FAR = 10.0
"How far outputs are moved, in their own size: far enough for a maximum to change hands."


@dataclass(slots=True)
class _Outputs:
    """First outputs of modules that have one row per sample."""

    number: int
    rows: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    "(module, which of its calls) to one number per sample, in the order in which calls end."
    given: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    "The same of their first inputs."
    calls: dict[str, int] = field(default_factory=dict)
    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    "Those that gradients flow through."


def coupling_module(bench: Bench, part: Any, both: Any, setting: Setting) -> str | None:
    """The first module whose output for some samples depends on which others are there.

    Args:
        bench: Runs both.
        part: Some samples.
        both: The same ones first, then others.
        setting: How.

    Returns:
        Its name; ``LOSS_FUNCTION`` where samples are mixed before a module sees them; None where none are.
    """
    alone, together = _run(bench, part, setting), _run(bench, both, setting)

    def is_mixed(call: tuple[str, int]) -> bool:
        return call in alone.given and _differ(alone.given[call], together.given.get(call))

    for call, values in alone.rows.items():
        if _differ(values, together.rows.get(call)):
            if not is_mixed(call):
                return call[0]
            # what reaches the module differs already: the code that called it is to blame
            for name in _ancestors(call[0]):
                calls = [(name, i) for i in range(alone.calls.get(name, 0))]
                if calls and not any(map(is_mixed, calls)):
                    return name
            return LOSS_FUNCTION
    return None


def _ancestors(name: str) -> Iterator[str]:
    """The modules around a module, the nearest first."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _differ(values: Tensor, other: Tensor | None) -> bool:
    if other is None or len(other) <= len(values):
        return False
    scale = float(values.abs().max()) or 1.0
    return float((other[: len(values)] - values).abs().max()) > _VISIBLE * scale


def is_separable(bench: Bench, part: Any, both: Any, setting: Setting, unmoved: float) -> bool:
    """Whether moving what modules make of some samples leaves the gradients of the others as they are.

    Outputs are moved in the first and in the last module, for one half and for the other; gradients are compared in
    all of them. False where nothing can be seen.

    Args:
        bench: Runs windows.
        part: Some samples.
        both: The same ones first, then others.
        setting: How.
        unmoved: Relative; gradients that differ by less did not notice that other outputs were moved.
    """
    alone, plain = _run(bench, part, setting), _run(bench, both, setting)
    per_sample = {name: len(tensor) / alone.number for name, tensor in alone.tensors}
    chosen = [
        i
        for i, (name, tensor) in enumerate(plain.tensors)
        if tensor.grad is not None and per_sample.get(name) == len(tensor) / plain.number
    ]
    if not chosen:
        return False
    share = alone.number / plain.number
    for place in {plain.tensors[chosen[0]][0], plain.tensors[chosen[-1]][0]}:
        for moves_first in (False, True):
            change = {place: functools.partial(_moved, share=share, moves_first=moves_first)}
            after = _run(bench, both, setting, change).tensors
            if [name for name, _ in after] != [name for name, _ in plain.tensors]:
                return False
            for i in chosen:
                first, second = plain.tensors[i][1].grad, after[i][1].grad
                kept = _half(first, share, not moves_first)
                if second is None or not _alike(kept, _half(second, share, not moves_first), unmoved):
                    return False
    return True


def _half(tensor: Any, share: float, is_first: bool) -> Tensor:
    cut = round(len(tensor) * share)
    half: Tensor = tensor[:cut] if is_first else tensor[cut:]
    return half


def _moved(output: Tensor, share: float, moves_first: bool) -> Tensor:
    shift = torch.zeros_like(output)
    part = _half(shift, share, moves_first)
    steps = torch.linspace(1.0, 2.0, part.numel(), dtype=output.dtype, device=output.device)
    part.copy_(_FAR * (output.detach().abs().mean() + 1) * steps.view_as(part))
    return output + shift


def _alike(first: Tensor, second: Tensor, unmoved: float) -> bool:
    scale = max(float(first.abs().max()), float(second.abs().max()))
    return float((first - second).abs().max()) <= unmoved * scale


def uses_statistics(bench: Bench, batch: Any, setting: Setting) -> bool:
    """Whether the loss uses a mean, a maximum or the like that was taken over the samples of data without gradients.

    A sum is none: it may be the count of a mask.
    """
    statistics = _Statistics(_samples(batch))
    bench.run([batch], [1.0], setting, around_model=lambda model: statistics)
    return statistics.are_used


class _Statistics(TorchFunctionMode):
    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number
        self._found: dict[int, Tensor] = {}
        self.are_used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        if any(id(tensor) in self._found for tensor in given) or self._reduces(func, given, made):
            self.are_used = self.are_used or any(tensor.requires_grad for tensor in made)
            self._found.update({id(tensor): tensor for tensor in made})
        return result

    def _reduces(self, func: Any, given: list[Tensor], made: list[Tensor]) -> bool:
        if operations.name(func) not in _REDUCTIONS or not given or not made or self._number < 2:
            return False
        data = given[0]
        is_data = data.is_floating_point() and not data.requires_grad and data.dim() and len(data) == self._number
        return bool(is_data) and (not made[0].dim() or len(made[0]) != self._number)


def _run(
    bench: Bench, part: Any, setting: Setting, changes: Mapping[str, Callable[[Tensor], Tensor]] | None = None
) -> _Outputs:
    found = _Outputs(_samples(part))
    bench.run([part], [1.0], setting, around_model=lambda model: _hooked(model, found, changes or {}))
    return found


@contextmanager
def _hooked(model: nn.Module, found: _Outputs, changes: Mapping[str, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    def hook(name: str) -> Callable[..., Any]:
        def note(module: nn.Module, args: Any, output: Any) -> Any:
            call = name, found.calls.get(name, 0)
            found.calls[name] = call[1] + 1
            for value, rows in ((output, found.rows), (args, found.given)):
                tensor = _first(value, found.number)
                if tensor is not None and len(tensor) == found.number:
                    rows[call] = _rows(tensor)
            value = _first(output, found.number)
            if value is None or not value.requires_grad:
                return None
            if name in changes and output is value:
                output = value = changes[name](value)
            value.retain_grad()
            found.tensors.append((name, value))
            return output

        return note

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _rows(value: Tensor) -> Tensor:
    """One number per sample that stands for its values."""
    weights = torch.arange(1, value[0].numel() + 1, device=value.device, dtype=torch.float64).sqrt()
    return (value.detach().double().reshape(len(value), -1) @ weights).cpu()


def _first(output: Any, number: int) -> Tensor | None:
    """The first tensor with one row for each sample, or several."""
    if number < 1:
        return None
    for _, tensor in splitting.named_tensors(output):
        if tensor.is_floating_point() and tensor.dim() and len(tensor) and len(tensor) % number == 0:
            return tensor
    return None


def _samples(part: Any) -> int:
    try:
        return splitting.num_samples(part)
    except BatchError:
        return -1
