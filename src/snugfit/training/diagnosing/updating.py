"""Whether it was the update of an optimizer that made weights not finite, and which of its settings are odd.

Entry points: ``spoiled``, ``settings``, ``is_odd`` and ``remedy``. A gradient that is not finite makes no update; where
that came from is ``probes``'s.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from snugfit.training.diagnosing.ranges import badness


def spoiled(model: nn.Module) -> tuple[str, ...]:
    """Names of the parameters that are not finite; waits for the device."""
    return tuple(name for name, parameter in model.named_parameters() if badness(parameter))


def settings(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Optimizers with their learning rates, and what else is not finite or is an eps of 0: ``SGD(lr=nan)``."""
    found = {
        f"{type(optimizer).__name__}({', '.join(f'{name}={value:g}' for name, value in _shown(group))})"
        for optimizer in optimizers
        for group in optimizer.param_groups
    }
    return ", ".join(sorted(found))


def is_odd(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Whether a setting alone can make weights not finite."""
    return bool(_odd_names(optimizers))


def remedy(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """What to change about an optimizer whose update made weights not finite."""
    odd = _odd_names(optimizers)
    advice = [f"give the optimizer a finite {name}" for name in sorted(odd - {"eps"})]
    if "eps" in odd:
        advice.append("give the optimizer a finite eps above 0 (eps=1e-8), which keeps 0 / 0 out of its update")
    return "; ".join(advice) or "lower the learning rate or set max_grad_norm=1.0"


def _odd_names(optimizers: Sequence[torch.optim.Optimizer]) -> set[str]:
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return {name for group in groups for name, value in _numbers(group) if _is_odd(name, value)}


def _numbers(group: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in group.items():
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            yield name, float(number)


def _is_odd(name: str, value: float) -> bool:
    return not math.isfinite(value) or (name == "eps" and value == 0)


def _shown(group: dict[str, Any]) -> Iterator[tuple[str, float]]:
    return ((name, value) for name, value in _numbers(group) if name == "lr" or _is_odd(name, value))
