"""Functions and modules that a trace cannot look into: the user says what comes out, and what is kept for backward.

Entry point: ``opaque``, as a function or a decorator. With real tensors the function itself runs. In a trace its
outputs are made from a description; what it needs while it runs is not counted, which the report says.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from snugfit.errors import PlanError, UnsupportedError
from snugfit.memory import torch_private
from snugfit.memory.recording import Recorder
from snugfit.memory.steps.places import HOST
from snugfit.training import splitting

_Function = TypeVar("_Function", bound=Callable[..., Any])
_active: list[Recorder] = []


def opaque(
    function: Any = None, outputs_like: Callable[..., Any] | None = None, *, saves: Callable[..., Any] | None = None
) -> Any:
    """Declare a function or module that cannot be traced: a kernel of another library, or code that reads values.

    With real tensors the function runs as it is. In a trace ``outputs_like`` is called in its place, with the same
    arguments; gradients flow to every tensor argument that requires one, and to a module's parameters. Memory that the
    function takes while it runs and gives back is not counted.

    Args:
        function: A function, or a module, whose ``forward`` is declared; a module is changed in place and returned.
            Left out: the result is a decorator.
        outputs_like: Makes tensors with the shapes and types of the outputs, such as
            ``lambda q, k, v: torch.empty_like(q)``; on any device, also ``"meta"``.
        saves: Called with the function's arguments and ``outputs=``; returns what the function keeps for its backward
            (a tensor or a nest of them, new ones count with their size). By default all arguments and outputs.

    Returns:
        What is called in the function's place.

    Raises:
        PlanError: An argument of the wrong kind.

    Example:
        >>> @opaque(outputs_like=lambda x: torch.empty_like(x))
        ... def double(x):
        ...     return x * 2
        >>> double(torch.ones(2))
        tensor([2., 2.])
    """
    for name, value in (("outputs_like", outputs_like), ("saves", saves)):
        if not callable(value) and not (name == "saves" and value is None):
            raise PlanError(
                f"{name} of opaque is no function",
                got=type(value).__name__,
                expected="a function of the same arguments that returns tensors of the right shapes and types",
                hint="opaque(kernel, outputs_like=lambda x: torch.empty_like(x))",
            )
    assert outputs_like is not None
    if function is None:
        return lambda declared: opaque(declared, outputs_like, saves=saves)
    if not callable(function) or isinstance(function, type):
        raise PlanError(
            "only functions and modules can be opaque",
            got=f"{type(function).__name__} {getattr(function, '__name__', '')}".strip(),
            expected="a function, or an instance of torch.nn.Module",
            hint="declare the instance: self.attention = snugfit.opaque(Attention(...), outputs_like=...)",
        )
    if isinstance(function, nn.Module):
        return _declared_module(function, outputs_like, saves)
    return _declared(function, outputs_like, saves)


@contextmanager
def traced_by(recorder: Recorder) -> Iterator[None]:
    """For as long as the context lasts, opaque functions are described instead of run."""
    _active.append(recorder)
    try:
        yield
    finally:
        _active.pop()


def _declared(function: Any, outputs_like: Callable[..., Any], saves: Callable[..., Any] | None) -> Any:
    name = getattr(function, "__qualname__", type(function).__name__)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not _active:
            return function(*args, **kwargs)
        return _described(name, outputs_like, saves, args, kwargs, ())

    call.__name__ = call.__qualname__ = name
    call.__doc__ = inspect.getdoc(function)
    return call


def _declared_module(module: nn.Module, outputs_like: Callable[..., Any], saves: Callable[..., Any] | None) -> Any:
    """The module with another class, so that copies of it are opaque too and its parameters keep their names."""
    kind = type(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not _active:
            return cast(Any, kind).forward(self, *args, **kwargs)
        weights = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return _described(kind.__name__, outputs_like, saves, args, kwargs, weights)

    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return module


def _described(
    name: str,
    outputs_like: Callable[..., Any],
    saves: Callable[..., Any] | None,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    weights: Sequence[Tensor],
) -> Any:
    kept = "what `saves` says" if saves else "its inputs and outputs"
    _active[-1].assume(f"opaque: {name} keeps {kept} for backward; what it takes while it runs is not counted")
    inputs: list[Tensor] = []

    def found(tensor: Tensor) -> Tensor:
        inputs.append(tensor)
        return tensor

    splitting.map_tensors(found, (list(args), kwargs))
    made: list[Any] = []

    def run(*tensors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        with torch.no_grad():
            outputs = splitting.map_tensors(_on_device, outputs_like(*args, **kwargs))
            flat = _tensors_of(outputs)
            if not flat:
                raise UnsupportedError(
                    f"outputs_like of the opaque {name} returned no tensor",
                    got=type(outputs).__name__,
                    expected="tensors of the outputs' shapes and types",
                    hint="return torch.empty_like(...) or torch.empty(..., device='meta')",
                    op=name,
                    module=_active[-1].module,
                )
            made.append(outputs)
            if saves is None:
                return flat, [*tensors, *flat]
            return flat, _tensors_of(splitting.map_tensors(_on_device, saves(*args, **kwargs, outputs=outputs)))

    results = iter(_Opaque.apply(run, *inputs, *weights))  # type: ignore[no-untyped-call]
    return splitting.map_tensors(lambda _: next(results), made[0])


class _Opaque(torch.autograd.Function):
    """Keeps what it is told to, and gives every input a gradient of its size."""

    @staticmethod
    def forward(ctx: Any, run: Any, *inputs: Tensor) -> Any:
        outputs, kept = run(*inputs)
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        ctx.like = [(tensor.shape, tensor.dtype) for tensor in inputs]
        ctx.mark_non_differentiable(*(tensor for tensor in outputs if not tensor.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        kept = ctx.saved_tensors  # alive until the gradients are made
        like = next(gradient for gradient in gradients if gradient is not None)
        made = [
            like.new_empty(shape, dtype=dtype) if needed else None
            for (shape, dtype), needed in zip(ctx.like, ctx.needs_input_grad[1:], strict=True)
        ]
        del kept
        return (None, *made)


def _on_device(tensor: Tensor) -> Tensor:
    """A tensor of the trace: one of the meta device, or a real one, becomes a new one there."""
    recorder = _active[-1]
    is_there = not recorder.places.names_device or recorder.place_of(tensor) != HOST
    if type(tensor) is torch_private.Fake and not torch_private.is_meta(tensor) and is_there:
        return tensor
    with recorder.on_device() if recorder.places.names_device else nullcontext():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _tensors_of(nest: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def add(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    splitting.map_tensors(add, nest)
    return found
