"""What is not public in torch and that the training room needs: constant random numbers, and torch's checkpoint calls.

Entry points: ``Steady`` and ``checkpoint_calls``, used by checks only, ``in_backward``, ``current_backward``,
``is_fake``, ``is_inside_transform``, ``transforms_are_active`` and ``never_compiled``.
``tests/test_check_canaries.py`` and ``tests/test_running_statistics.py`` hold a canary for each.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo.decorators import skip as _skip
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrize as _parametrize
from torch.utils import checkpoint as _checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

_Function = TypeVar("_Function", bound=Callable[..., Any])

_HALF = 0.5
_GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
"What runs before and after a checkpointed forward: since torch 2.14, and before."


class Steady(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Random operations of torch give constants: every element kept by dropout, every noise the same number.

    So a function that draws random numbers becomes one of its inputs alone, whatever the number of samples it draws
    for: what a sample gets is made of its own row of the arguments. Generators move as they would.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()
        "Names of the operations that were replaced."
        self.unknown: set[str] = set()
        "Operations that moved a generator and for which there is no constant."
        self.redrawn: set[str] = set()
        "Custom autograd functions whose backward runs a forward again that draws other numbers than the first did."
        self._states: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().partition("::")[2].partition(".")[0]
        if func.namespace != "aten":
            return self._watched(func, func.name(), args, kwargs)
        if name.startswith("_scaled_dot_product") or name in _ATTENTIONS:
            args, kwargs = self._without_dropout(func, name, args, kwargs)
        constant = _CONSTANTS.get(name)
        if constant is not None:
            self._note_draw(name)
            self.seen.add(name.strip("_"))
            return constant(func(*args, **kwargs), args, kwargs)
        if _draws(func):
            return self._watched(func, name, args, kwargs)
        return func(*args, **kwargs)

    def _watched(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        given = kwargs.get("generator")
        before = _states(given)
        result = func(*args, **kwargs)
        if any(not torch.equal(old, new) for old, new in zip(before, _states(given), strict=True)):
            self.unknown.add(name.strip("_"))
        return result

    def _note_draw(self, name: str) -> None:
        """A forward that runs again in a backward has to start from a random state of the first one."""
        state = hash(tuple(state.numpy().tobytes() for state in _states(None)))
        if not in_backward():
            self._states.add(state)
            return
        function = getattr(type(torch._C._current_autograd_node()), "_forward_cls", None)
        if function is not None and torch.is_grad_enabled() and state not in self._states:
            self.redrawn.add(function.__qualname__)

    def _without_dropout(self, func: Any, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        if given.get("dropout_p"):
            self.seen.add("dropout")
            return (), {**given, "dropout_p": 0.0}
        return args, kwargs


_ATTENTIONS = ("_flash_attention_forward", "_efficient_attention_forward")


def _draws(func: Any) -> bool:
    """Whether an operation says of itself that it draws random numbers."""
    is_tagged = torch.Tag.nondeterministic_seeded in func.tags
    return is_tagged or any(str(argument.type).endswith("Generator]") for argument in func._schema.arguments)


def _states(given: torch.Generator | None) -> list[Tensor]:
    if given is not None:
        return [given.get_state()]
    own = [torch.get_rng_state()]
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [*own, torch.cuda.get_rng_state()] if is_used else own


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


def _multinomial(result: Tensor, args: Any, kwargs: Any) -> Tensor:
    """The likeliest entry of each row; without replacement, the likeliest ones."""
    weights, number = args[0], result.shape[-1]
    if _given(args, kwargs, 2, "replacement", False):
        return result.copy_(weights.argmax(-1, keepdim=True).expand(result.shape))
    return result.copy_(weights.sort(stable=True, dim=-1, descending=True).indices[..., :number])


def _rrelu(result: Any, args: Any, kwargs: Any) -> Any:
    lower, upper = _given(args, kwargs, 2, "lower", 1 / 8), _given(args, kwargs, 3, "upper", 1 / 3)
    if not _given(args, kwargs, 4, "training", False):
        return result
    values, noise = result if isinstance(result, tuple) else (result, args[1])
    slope = (lower + upper) / 2
    is_low = noise != 1  # the factor that was drawn, and 1 for what was kept
    values.copy_(torch.where(is_low, values / torch.where(noise == 0, 1, noise) * slope, values))
    noise.copy_(torch.where(is_low, slope, 1.0))
    return result


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
    "log_normal_": _filled(
        lambda args, kwargs: math.exp(
            _given(args, kwargs, 1, "mean", 1.0) + _HALF * _given(args, kwargs, 2, "std", 2.0)
        )
    ),
    "cauchy_": _filled(
        lambda args, kwargs: _given(args, kwargs, 1, "median", 0.0) + _HALF * _given(args, kwargs, 2, "sigma", 1.0)
    ),
    "geometric_": _filled(lambda args, kwargs: max(1, round(1 / _given(args, kwargs, 1, "p", 1.0)))),
    "exponential_": _filled(lambda args, kwargs: 1 / _given(args, kwargs, 1, "lambd", 1.0)),
    "poisson": lambda result, args, kwargs: result.copy_(args[0].round()),
    "binomial": lambda result, args, kwargs: result.copy_((args[0] * args[1]).round()),
    "_standard_gamma": lambda result, args, kwargs: result.copy_(args[0]),
    "_sample_dirichlet": lambda result, args, kwargs: result.copy_(args[0] / args[0].sum(-1, keepdim=True)),
    "multinomial": _multinomial,
    "rrelu_with_noise": _rrelu,
    "rrelu_with_noise_": _rrelu,
    "randint": _integers,
    "randint_like": _integers,
    "random_": _integers,
    "randperm": lambda result, args, kwargs: result.copy_(torch.arange(result.numel(), device=result.device)),
}


def in_backward() -> bool:
    """Whether the calling thread is inside of autograd's backward: a forward that runs there is a repeated one."""
    return bool(torch._C._current_graph_task_id() != -1)


def current_backward() -> int | None:
    """The number of the backward that the calling thread is inside of."""
    number: int = torch._C._current_graph_task_id()
    return None if number == -1 else number


REFUSES_HOOKS = "saved tensor hooks"
"In what ``torch.func`` says where such hooks are on."


def transforms_are_active() -> bool:
    """Whether the calling code runs inside of ``torch.func`` (vmap, grad, jvp and so on)."""
    return bool(torch._C._are_functorch_transforms_active())


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no values, as in a trace: nothing that happens to it moves any weight."""
    return isinstance(tensor, FakeTensor)


def is_inside_transform(tensor: Tensor) -> bool:
    """Whether a tensor is one that ``torch.func`` (vmap, grad and so on) is mapping over: its values cannot be read."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


@dataclass(frozen=True, slots=True)
class CheckpointCall:
    """One call of ``torch.utils.checkpoint``: what is known before its forward."""

    function: Any
    preserves_random_state: bool
    arguments: tuple[Any, ...]
    is_segment: bool = False
    "Whether it is one of snugfit's own, which also repeats Python's, numpy's and further generators of torch."


@contextmanager
def checkpoint_calls(around: Callable[[CheckpointCall], Callable[[], None]], *, plain: bool) -> Iterator[None]:
    """Watch every call of ``torch.utils.checkpoint``, however it was imported.

    Args:
        around: Called before a checkpointed forward; what it returns is called right after it.
        plain: Whether nothing is recomputed: every checkpointed function is then called as it is.
    """
    reentrant = _checkpoint.CheckpointFunction
    _watching.append(around)
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

    try:
        with (
            mock.patch.object(_checkpoint, name, watched),
            mock.patch.object(_checkpoint, "CheckpointFunction", Reentrant),
        ):
            yield
    finally:
        _watching.remove(around)


_watching: list[Callable[[CheckpointCall], Callable[[], None]]] = []


def watched(function: Any, arguments: tuple[Any, ...]) -> Callable[[], None]:
    """Show the forward of a segment of our own to whoever watches checkpoints; what is returned is called after it."""
    after = [around(CheckpointCall(function, True, arguments, is_segment=True)) for around in _watching]

    def end() -> None:
        for one in after:
            one()

    return end


def never_compiled(function: _Function) -> _Function:
    """Keep ``torch.compile`` from compiling a function that torch calls while compiled code runs.

    As ``torch.compiler.disable``, which costs as much per call as a small kernel does, but what the function calls is
    compiled unless it is marked as well.
    """
    _skip(function)
    return function


# --- weights that torch.nn.utils.parametrize.cached has computed once, for segments ---


def cached_weights(modules: Iterable[nn.Module]) -> dict[Any, Tensor] | None:
    """What ``parametrize.cached`` holds of some modules, by its own keys; None outside of it."""
    if not _parametrize._cache_enabled:
        return None
    own = {id(module) for module in modules}
    return {key: one for key, one in _parametrize._cache.items() if key[0] in own and one is not None}


@contextmanager
def weights_cached(then: dict[Any, Tensor] | None) -> Iterator[None]:
    """Context in which ``parametrize.cached`` holds what it held, or is off, whatever it is now."""
    now = _parametrize._cache_enabled, _parametrize._cache
    _parametrize._cache_enabled, _parametrize._cache = int(then is not None), dict(then or {})
    try:
        yield
    finally:
        _parametrize._cache_enabled, _parametrize._cache = now


# --- modes under a segment, for keeping.py ---

DispatchMode: Any = TorchDispatchMode
"A mode that sees every operation below autograd."


def retains_graph() -> bool:
    """Whether the backward that is running leaves its graph for another one."""
    return in_backward() and bool(torch._C._autograd._get_current_graph_task_keep_graph())


def counted_alias(tensor: Tensor) -> Tensor:
    """What ``detach`` gives, but also under a mode such that writes into either are counted in the version of both."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def operator_names() -> frozenset[str]:
    """The names of all operators of torch, without namespace and overload."""
    names = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    return frozenset(rest.partition(".")[0] for namespace, _, rest in names if namespace == "aten")


def is_new(op: Any) -> bool:
    """Whether an operator returns new tensors: neither its arguments, written over, nor views of them."""
    return not op._schema.is_mutable and all(one.alias_info is None for one in op._schema.returns)


def makes_new_tensors(name: str) -> bool:
    """Whether any overload of an operator of torch returns new tensors."""
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(is_new(getattr(packet, overload)) for overload in packet.overloads())
