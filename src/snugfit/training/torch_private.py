"""What is not public in torch and that the training room needs: constant random numbers, and torch's checkpoint calls.

Entry points: ``Steady`` and ``checkpoint_calls``, used by checks only, and ``in_backward``.
``tests/test_check_canaries.py`` and ``tests/test_running_statistics.py`` hold a canary for each.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import checkpoint as _checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

_HALF = 0.5
_GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
"What runs before and after a checkpointed forward: since torch 2.14, and before."


class Steady(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Random operations of torch give constants: every element kept by dropout, every noise the same number.

    So a function that draws random numbers becomes one of its inputs alone, whatever the number of samples it draws
    for. Generators do not move.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()
        "Names of the operations that were replaced."

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "aten":
            return func(*args, **kwargs)
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name.startswith("_scaled_dot_product") or name in (
            "_flash_attention_forward",
            "_efficient_attention_forward",
        ):
            args, kwargs = self._without_dropout(func, name, args, kwargs)
        result = func(*args, **kwargs)
        constant = _CONSTANTS.get(name)
        if constant is not None:
            self.seen.add(name.strip("_"))
            return constant(result, args, kwargs)
        return result

    def _without_dropout(self, func: Any, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        if given.get("dropout_p"):
            self.seen.add("dropout")
            return (), {**given, "dropout_p": 0.0}
        return args, kwargs


def _filled(value: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    return lambda result, args, kwargs: result.fill_(value(args, kwargs))


def _given(args: Any, kwargs: Any, position: int, name: str, default: Any) -> Any:
    return kwargs.get(name, args[position] if len(args) > position else default)


def _normal(result: Tensor, args: Any, kwargs: Any) -> Tensor:
    mean, std = _given(args, kwargs, 0, "mean", 0.0), _given(args, kwargs, 1, "std", 1.0)
    return result.copy_(torch.as_tensor(mean + _HALF * std))


def _native_dropout(result: Any, args: Any, kwargs: Any) -> Any:
    values, mask = result
    keep = 1.0 - float(_given(args, kwargs, 1, "p", 0.0))
    if _given(args, kwargs, 2, "train", True) is False:
        return result
    values.copy_(args[0] / keep if keep else torch.zeros_like(args[0]))
    return values, mask.fill_(True)


def _middle(low: Any, high: Any) -> int:
    return (int(low) + int(high) - 1) // 2


def _integers(result: Tensor, args: Any, kwargs: Any) -> Tensor:
    bounds = [value for value in args if isinstance(value, int) and not isinstance(value, bool)][:2]
    bounds = bounds or [kwargs.get("high", 1)]
    return result.fill_(_middle(*(bounds if len(bounds) == 2 else (0, bounds[0]))))


_CONSTANTS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "bernoulli": _filled(lambda args, kwargs: 1),
    "bernoulli_": _filled(lambda args, kwargs: 1),
    "native_dropout": _native_dropout,
    "rand": _filled(lambda args, kwargs: _HALF),
    "rand_like": _filled(lambda args, kwargs: _HALF),
    "randn": _filled(lambda args, kwargs: _HALF),
    "randn_like": _filled(lambda args, kwargs: _HALF),
    "uniform_": _filled(
        lambda args, kwargs: _HALF * (_given(args, kwargs, 1, "from", 0.0) + _given(args, kwargs, 2, "to", 1.0))
    ),
    "normal_": _filled(
        lambda args, kwargs: _given(args, kwargs, 1, "mean", 0.0) + _HALF * _given(args, kwargs, 2, "std", 1.0)
    ),
    "normal": _normal,
    "exponential_": _filled(lambda args, kwargs: 1 / _given(args, kwargs, 1, "lambd", 1.0)),
    "randint": _integers,
    "randint_like": _integers,
    "random_": _integers,
    "randperm": lambda result, args, kwargs: result.copy_(torch.arange(result.numel(), device=result.device)),
}


def in_backward() -> bool:
    """Whether the calling thread is inside of autograd's backward: a forward that runs there is a repeated one."""
    return bool(torch._C._current_graph_task_id() != -1)


@dataclass(frozen=True, slots=True)
class CheckpointCall:
    """One call of ``torch.utils.checkpoint``: what is known before its forward."""

    function: Any
    preserves_random_state: bool
    arguments: tuple[Any, ...]


@contextmanager
def checkpoint_calls(around: Callable[[CheckpointCall], Callable[[], None]], *, plain: bool) -> Iterator[None]:
    """Watch every call of ``torch.utils.checkpoint``, however it was imported.

    Args:
        around: Called before a checkpointed forward; what it returns is called right after it.
        plain: Whether nothing is recomputed: every checkpointed function is then called as it is.
    """
    reentrant = _checkpoint.CheckpointFunction
    name = next(name for name in _GENERATORS if hasattr(_checkpoint, name))
    original = getattr(_checkpoint, name)
    takes_tuple = name == _GENERATORS[0]

    def watched(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        if takes_tuple:
            arguments, preserve = (*args[0], *args[1].values()), kwargs.get("preserve_rng_state", True)
        else:  # five settings of torch's precede the function's own arguments
            arguments, preserve = (*args[5:], *kwargs.values()), args[0]
        after = around(CheckpointCall(function, bool(preserve), arguments))
        if plain:
            yield
        else:
            yield from original(function, *args, **kwargs)
        after()

    class Reentrant:
        @staticmethod
        def apply(function: Any, preserve: bool, *args: Any) -> Any:
            after = around(CheckpointCall(function, bool(preserve), args))
            result = function(*args) if plain else reentrant.apply(function, preserve, *args)  # type: ignore[no-untyped-call]
            after()
            return result

    with (
        mock.patch.object(_checkpoint, name, watched),
        mock.patch.object(_checkpoint, "CheckpointFunction", Reentrant),
    ):
        yield
