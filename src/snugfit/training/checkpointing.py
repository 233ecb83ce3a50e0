"""Activation checkpointing of modules by name: their saved tensors are dropped and computed again in backward.

Entry points: ``apply`` with the segments that ``every``, ``blocks``, ``segments`` and ``match`` name, and
``is_recomputing``. Built on torch's non-reentrant form, which keeps random and autocast state. Policies other than
``"full"`` and nested segments are left out.
"""

import fnmatch
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from snugfit.errors import PlanError, UnsupportedError
from snugfit.plans import Segment
from snugfit.training.buffers import Keeper
from snugfit.training.caches import Cache, without_cache
from snugfit.training.holders import Holders, let_go
from snugfit.training.recomputation import FirstForward, Recomputation
from snugfit.training.recomputation import is_recomputing as is_recomputing

_SIMILAR_SHARE = 0.125
"A repeated container is taken beside the largest if it holds at least this share of its parameters."


class Handle:
    """What ``apply`` did, and the way to undo it."""

    def __init__(
        self,
        segments: tuple[Segment, ...],
        modules: dict[str, nn.Module],
        forwards: list["_Forward"],
        caches: list[Cache],
    ) -> None:
        self.segments = segments
        self.covered: tuple[str, ...] = tuple(modules)
        "Names of the modules that are recomputed."
        self._undone: list[_Forward | Cache] = [*forwards, *caches]
        self._note()

    def remove(self) -> None:
        """Give the modules their own forward back; a second call does nothing.

        Where another handle or engine needs the same segments they stay for it.
        """
        undone, self._undone = self._undone, []
        for one, is_free in zip(undone, let_go(self, [one.holders for one in undone]), strict=True):
            if is_free:
                one.uninstall()

    def _note(self) -> None:
        for one in self._undone:
            one.holders.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._note()


def apply(model: nn.Module, segments: Sequence[Segment]) -> Handle:
    """Recompute segments of a model during backward. The model is changed in place.

    A segment of several modules is run as one: each module but the first must be called with what the one before
    returned and otherwise with the same arguments. Applying the same segments again changes nothing. Models of
    transformers get ``config.use_cache = False`` until the handle is removed: a block that runs again would append to
    the cache again.

    Args:
        model: May be wrapped in DDP; names are those of the plain module.
        segments: What is recomputed as one unit each.

    Returns:
        Handle with ``covered`` and ``remove()``.

    Raises:
        PlanError: No segment, a name that matches nothing, segments that overlap or lie inside of one another.
        UnsupportedError: A policy other than ``"full"``, or a module that is compiled.
    """
    model = unwrapped(model)
    segments = tuple(segments)
    _refuse_compiled(model, segments)
    modules = _named(model, segments)
    installed: list[_Forward] = []
    forwards: list[_Forward] = []
    try:
        for segment in segments:
            members = [modules[name] for name in segment.modules]
            present = {name: modules[name].__dict__.get("forward") for name in segment.modules}
            ours = {name: forward for name, forward in present.items() if isinstance(forward, _Forward)}
            if len(ours) == len(members) and all(forward.segment == segment for forward in ours.values()):
                forwards += ours.values()
                continue
            taken = list(ours)
            if taken:
                raise PlanError(
                    "modules are recomputed already, in another segment",
                    got=", ".join(taken),
                    expected="each module in one segment",
                    hint="call remove() on the first handle",
                )
            run = _Run(segment, members)
            for position, member in enumerate(members):
                installed.append(_Forward(run, position, member))
                installed[-1].install()
            forwards += installed[-len(members) :]
    except BaseException:
        for forward in installed:
            forward.uninstall()
        raise
    return Handle(segments, modules, forwards, without_cache(model, [forward.module for forward in forwards]))


def blocks(model: nn.Module) -> tuple[Segment, ...]:
    """One segment per block of the model: children of containers that repeat one class (encoder and decoder both).

    Raises:
        PlanError: No container repeats a class.
    """
    return tuple(Segment((name,)) for chain in _chains(unwrapped(model)) for name in chain)


def every(model: nn.Module, k: int, policy: str = "full") -> tuple[Segment, ...]:
    """One segment per k-th block, counted from the first.

    Raises:
        PlanError: k below 1 or above the number of blocks.
    """
    names = [segment.modules[0] for segment in blocks(model)]
    _check_range("k", k, len(names))
    return tuple(Segment((name,), policy) for name in names[::k])


def segments(model: nn.Module, n: int) -> tuple[Segment, ...]:
    """Every chain of blocks cut into n runs of about the same length.

    Raises:
        PlanError: n below 1 or above the number of blocks of the shortest chain.
    """
    chains = _chains(unwrapped(model))
    _check_range("n", n, min(map(len, chains)))
    cuts = [(chain, [len(chain) * i // n for i in range(n + 1)]) for chain in chains]
    return tuple(Segment(chain[a:b]) for chain, at in cuts for a, b in pairwise(at))


def match(model: nn.Module, pattern: str) -> tuple[Segment, ...]:
    """One segment per module whose name matches a pattern such as ``"*.attn"``.

    Raises:
        PlanError: Nothing matches.
    """
    names = [name for name, _ in unwrapped(model).named_modules() if name]
    found = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if not found:
        raise PlanError(
            "a pattern matches no module",
            got=repr(pattern),
            expected=f"one of {len(names)} names such as {names[0] if names else 'none at all'}",
            hint="print([name for name, _ in model.named_modules()])",
        )
    return tuple(Segment((name,)) for name in found)


def unwrapped(model: nn.Module) -> nn.Module:
    """The plain module inside of DDP."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


class _Run:
    """The modules of one segment, run as one by the first of them."""

    def __init__(self, segment: Segment, modules: list[nn.Module]) -> None:
        self.segment, self.modules = segment, modules
        self.forwards: list[Callable[..., Any]] = []
        self._keeper = Keeper()
        self._pending: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None

    def begin(self, *args: Any, **kwargs: Any) -> Any:
        """Run all modules; the later ones then only hand the result through."""
        forward = FirstForward(self.modules, self._keeper)
        number, names = len(args), tuple(kwargs)
        values = (*args, *kwargs.values())
        if not any(isinstance(value, Tensor) for value in values):
            values += tuple(parameter.detach() for parameter in list(self.modules[0].parameters())[:1])

        def run(*values: Any) -> Any:
            return self._chain(*values[:number], **dict(zip(names, values[number:], strict=False)))

        # torch finds the device whose random state it keeps among positional arguments only
        result = checkpoint(
            run,
            *values,
            use_reentrant=False,
            context_fn=lambda: (forward, Recomputation(forward)),
        )
        if len(self.modules) > 1:
            self._pending = (result, args[1:], kwargs)
        return result

    def hand_through(self, position: int, *args: Any, **kwargs: Any) -> Any:
        """The result of the whole run, for a later module of it."""
        pending = self._pending
        if position == len(self.modules) - 1:
            self._pending = None
        fits = (
            pending is not None
            and len(args) == 1 + len(pending[1])
            and all(a is b for a, b in zip(args, (pending[0], *pending[1]), strict=True))
            and kwargs.keys() == pending[2].keys()
            and all(kwargs[key] is pending[2][key] for key in kwargs)
        )
        if not fits:
            raise UnsupportedError(
                f"the modules of a segment are not a chain: {self.segment.modules[position]}",
                got="a call with other arguments than the first module's, or with another input than the result "
                "of the module before",
                expected="output of one module handed to the next, other arguments the same objects",
                hint="make one segment of each module",
                module=self.segment.modules[position],
            )
        return args[0]

    def _chain(self, *args: Any, **kwargs: Any) -> Any:
        value = self.forwards[0](*args, **kwargs)
        for forward in self.forwards[1:]:
            value = forward(value, *args[1:], **kwargs)
        return value


class _Forward:
    """Stands in for ``forward`` of one module; an object, so that a deep copy of the model refers to the copy."""

    def __init__(self, run: _Run, position: int, module: nn.Module) -> None:
        self.run, self.position, self.module = run, position, module
        self.own: Callable[..., Any] | None = module.__dict__.get("forward")
        self.holders = Holders()

    @property
    def segment(self) -> Segment:
        return self.run.segment

    def install(self) -> None:
        self.run.forwards.append(self.plain)
        self.module.__dict__["forward"] = self

    def uninstall(self) -> None:
        if self.module.__dict__.get("forward") is not self:
            return
        if self.own is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self.own

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        return self.own(*args, **kwargs) if self.own else type(self.module).forward(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        if self.position == 0:
            return self.run.begin(*args, **kwargs)
        return self.run.hand_through(self.position, *args, **kwargs)


def _refuse_compiled(model: nn.Module, segments: Sequence[Segment]) -> None:
    """Refuse modules whose forward has been compiled, or lies inside of one that was."""
    wanted = {name for segment in segments for name in segment.modules}
    for name, module in model.named_modules(remove_duplicate=False):
        is_scripted = isinstance(module, torch.jit.ScriptModule)
        is_compiled = isinstance(getattr(module, "_orig_mod", None), nn.Module)
        if not (is_scripted or is_compiled or getattr(module, "_compiled_call_impl", None) is not None):
            continue
        inside = sorted(one for one in wanted if not name or one == name or one.startswith(f"{name}."))
        if inside:
            raise UnsupportedError(
                "compiled modules are not recomputed: what stands in for a forward would be compiled with it",
                got=f"{name or 'the model itself'}, a {type(module).__name__}, and segments of {inside[0]}"
                + (f" and {len(inside) - 1} more" if len(inside) > 1 else ""),
                expected="segments of modules that are neither compiled nor inside of a compiled one",
                hint="apply the segments to the model before torch.compile, or leave recompute out: the compiler "
                "decides itself what to recompute",
                names=tuple(inside),
            )


def _named(model: nn.Module, wanted: Sequence[Segment]) -> dict[str, nn.Module]:
    """The modules of all segments by name, once everything that can be wrong with the names is ruled out."""
    if not wanted:
        raise PlanError(
            "nothing is recomputed",
            got="no segment",
            expected="at least one snugfit.Segment",
            hint="pass snugfit.checkpointing.blocks(model), or leave recompute out",
        )
    for segment in wanted:
        if segment.policy != "full":
            raise UnsupportedError(
                f"the recompute policy {segment.policy!r} is not supported yet",
                got=f"policy={segment.policy!r} of {segment.modules[0]}",
                expected="policy='full'",
                hint="leave policy out",
            )
    known = dict(model.named_modules())
    names = [name for segment in wanted for name in segment.modules]
    missing = [name for name in names if name not in known]
    if missing:
        raise PlanError(
            "segments name modules that the model does not have",
            got=", ".join(missing),
            expected=f"names of {type(model).__name__}.named_modules(), such as {list(known)[-1]!r}",
            hint="print([name for name, _ in model.named_modules()])",
            names=tuple(missing),
        )
    inside = {id(inner): name for name in dict.fromkeys(names) for inner in list(known[name].modules())[1:]}
    clashes = [f"{name} inside of {inside[id(known[name])]}" for name in names if id(known[name]) in inside]
    twice = [name for i, name in enumerate(names) if any(known[name] is known[other] for other in names[:i])]
    if clashes or twice:
        raise PlanError(
            "segments overlap",
            got=", ".join([*clashes, *(f"{name} twice" for name in twice)]),
            expected="each module in at most one segment, none inside of another",
            hint="name only the outer or only the inner modules",
            names=(*clashes, *twice),
        )
    return {name: known[name] for name in names}


def _chains(model: nn.Module) -> list[tuple[str, ...]]:
    """The repeated containers worth recomputing, as the names of their children."""
    found: list[tuple[str, type, int, tuple[str, ...]]] = []
    for name, module in model.named_modules():
        kinds = {type(child) for child in module.children()}
        outer = any(name == other[0] or name.startswith(f"{other[0]}.") or not other[0] for other in found)
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) >= 2 and len(kinds) == 1 and not outer:
            size = sum(parameter.numel() for parameter in module.parameters())
            prefix = f"{name}." if name else ""
            found.append((name, kinds.pop(), size, tuple(f"{prefix}{i}" for i, _ in module.named_children())))
    if not found:
        raise PlanError(
            "the model has no repeated blocks",
            got=type(model).__name__,
            expected="an nn.ModuleList or nn.Sequential of at least two children of one class",
            hint='name the modules yourself: snugfit.checkpointing.match(model, "*.attn")',
        )
    largest = max(found, key=lambda container: container[2])
    return [
        names for _, kind, size, names in found if kind is largest[1] or size >= _SIMILAR_SHARE * max(largest[2], 1)
    ]


def _check_range(name: str, value: int, limit: int) -> None:
    if not isinstance(value, int) or not 1 <= value <= limit:
        raise PlanError(
            f"{name} does not fit the number of blocks",
            got=f"{name}={value!r}",
            expected=f"1 to {limit}",
            hint=f"pass {name}=1",
        )
