"""What a recomputed segment keeps of its forward: results of chosen operations, handed out instead of run again.

Entry points: ``operations`` (the set that a policy names), ``Results`` and the two modes ``Keeping`` and
``HandingOut``. Routing decisions (the best experts, sampled indices) are always kept: a near tie that falls the other
way the second time would give gradients of another function.

NOTE [Why a kept result is the right one]
1. Results are kept in the order of the calls of their operation; an operation that was called less often the second
   time was not needed any more. One that was not kept is run again.
2. A kept random operation is not run again, so the generators are moved to where it left them.
3. Before an operation of the same pass writes into the memory of a kept result, that result is copied. What others
   write into (a caller, a repetition) is told by its version, and run again; where only a part was written into, the
   rest has to come out as it was, for it may be a decision.
4. A result that the first recomputation never asked for is not kept the next time.
5. Where only the last matrix product is kept, each lets go of the one before it, so that the last one is what is left.
"""

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from snugfit.errors import PlanError, UnsupportedError
from snugfit.training import containing, torch_private

ATTENTION = (
    "_scaled_dot_product_*attention*",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
)
MATRIX_PRODUCTS = (
    *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "_grouped_mm", "_scaled_mm"),
    *("convolution", "_convolution", "*_convolution*", "mkldnn_rnn_layer", "_cudnn_rnn", "_thnn_fused_*_cell"),
)
ROUTING = ("topk", "sort", "argsort", "argmax", "argmin", "kthvalue", "multinomial")

_SETS = {"full": ROUTING, "keep-attention": (*ATTENTION, *ROUTING)}
_SETS["keep-matmul"] = (*MATRIX_PRODUCTS, *_SETS["keep-attention"])
_SETS["keep-last"] = (*MATRIX_PRODUCTS, *ROUTING)
_SETS["keep-attention-last"] = _SETS["keep-matmul"]
_OF_THE_LAST = ("keep-last", "keep-attention-last")
"Policies that keep the last matrix product of a module's forward alone: the others that it ran are let go of."
_OWN = "keep:"


def operations(policy: str) -> tuple[str, ...]:
    """Names (or patterns) of the operations whose results a policy keeps.

    Args:
        policy: ``"full"``, ``"keep-matmul"``, ``"keep-attention"``, or a set of one's own such as
            ``"keep:mm,addmm,_scaled_dot_product_*"``, by the names of torch's operators (``torch.ops.aten``).

    Raises:
        PlanError: An own set that names no operator of torch, or one that writes into its arguments.
    """
    if policy in _SETS:
        return _SETS[policy]
    names = tuple(name.strip() for name in policy.removeprefix(_OWN).split(","))
    known = torch_private.operator_names()
    for name in names:
        found = fnmatch.filter(known, name)
        if not found:
            raise PlanError(
                f"the policy {policy!r} keeps an operation that torch does not have",
                got=repr(name),
                expected="names of torch.ops.aten such as mm, addmm, bmm, convolution",
                hint="torch.profiler shows the operations of a model; write them without aten::",
            )
        if not any(torch_private.makes_new_tensors(one) for one in found):
            raise PlanError(
                f"the policy {policy!r} keeps an operation that makes no new tensor",
                got=repr(name),
                expected="operations that neither write into their arguments nor return views of them",
                hint=f"leave {name} out of the set",
            )
    return (*names, *ROUTING)


@dataclass(slots=True)
class _Kept:
    """What one call of an operation returned, and where it left the random generators if it moved them."""

    call: tuple[Any, ...]
    "Shapes and types of its arguments."
    values: Any
    states: list[tuple[Any, Tensor]]
    versions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.versions = _versions(self.values)

    @property
    def is_as_it_was(self) -> bool:
        """Whether nobody has written into it; except for what torch does not count."""
        return _versions(self.values) == self.versions

    def copy_apart(self, storages: set[int]) -> None:
        """Copy what lies in some storages that are about to be written."""
        if self.is_as_it_was:
            self.values = _each(self.values, lambda one: one.clone() if _storage(one) in storages else one)
            self.versions = _versions(self.values)


def seen_under(policy: str) -> "Seen":
    """What is known about a segment of a policy before its first forward."""
    return Seen(operations(policy), MATRIX_PRODUCTS if policy in _OF_THE_LAST else ())


class Seen:
    """What is known about a segment from its forwards so far.

    Args:
        names: See ``operations``.
        last: Names (or patterns) of those of which only the last call's result is kept.
    """

    def __init__(self, names: Sequence[str], last: Sequence[str] = ()) -> None:
        self.names, self.last = tuple(names), tuple(last)
        self.empty: set[tuple[Any, ...]] = set()
        "Situations in which a whole forward had no operation to keep, so that none need be watched."
        self.unused: set[tuple[Any, int]] = set()
        "Calls whose results a whole recomputation did not ask for."
        self._matches: dict[Any, bool] = {}

    def __reduce__(self) -> Any:
        return Seen, (self.names, self.last)  # what was learned is of this process

    def keeps(self, op: Any) -> bool:
        """Whether results of an operation are kept."""
        found = self._matches.get(op)
        if found is None:
            name = op._schema.name.partition("::")[2]
            is_new = torch_private.is_new(op)
            found = is_new and any(fnmatch.fnmatchcase(name, pattern) for pattern in self.names)
            self._matches[op] = found
        return found

    def keeps_last_only(self, op: Any) -> bool:
        """Whether of an operation, and of others like it, the last result alone is kept."""
        return any(fnmatch.fnmatchcase(op._schema.name.partition("::")[2], pattern) for pattern in self.last)


class Results:
    """The kept results of one forward of a segment.

    Args:
        seen: Of the segment.
        sources: Random generators whose states are known.
    """

    def __init__(self, seen: Seen, sources: Sequence[Any] = ()) -> None:
        self.seen = seen
        self.generators: dict[torch.Generator, Tensor] = {}
        "Other generators of a user's own that the forward drew from, and their states before."
        self._sources = {id(source) for source in sources}
        self._kept: dict[Any, list[_Kept | None]] = {}
        self._asked: dict[Any, int] = {}

    def add(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any], values: Any) -> None:
        """Keep what a call returned, unless earlier recomputations did without."""
        if self.seen.keeps_last_only(op):
            for other, earlier in self._kept.items():
                if self.seen.keeps_last_only(other):
                    earlier[:] = [None] * len(earlier)
        calls = self._kept.setdefault(op, [])
        is_unused = (op, len(calls)) in self.seen.unused
        calls.append(
            None if is_unused else _Kept(_described(args), _each(values, _alias), _states(op, args, kwargs, values))
        )

    def note(self, generator: torch.Generator) -> None:
        """A generator is about to be drawn from."""
        if generator not in self.generators and id(generator) not in self._sources:
            self.generators[generator] = generator.get_state()

    def begin(self) -> None:
        """A recomputation starts: results are asked for from the first on."""
        self._asked.clear()

    def end(self) -> None:
        """A recomputation is over, maybe early: what it did not ask for is not needed."""
        for op, calls in self._kept.items():
            for i in range(self._asked.get(op, 0), len(calls)):
                self.seen.unused.add((op, i))
                calls[i] = None

    def take(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Whether there is a result of the next call of an operation, and that result.

        Raises:
            UnsupportedError: The next call had other arguments the first time.
        """
        calls = self._kept.get(op, [])
        i = self._asked.get(op, 0)
        self._asked[op] = i + 1
        kept = calls[i] if i < len(calls) else None
        if kept is None:
            self.seen.unused.discard((op, i))
            return False, None
        name = op._schema.name.partition("::")[2]
        if kept.call != _described(args):
            raise UnsupportedError(
                "a segment does not call its operations in the same order again, so kept results cannot be handed out",
                got=f"{name}, call {i}, with other arguments than the first time",
                expected="the same operations on the same shapes in a repetition",
                hint="use the policy 'full' for this segment; what it computes once, or only outside of a repetition, "
                "belongs before it",
                op=op._schema.name,
            )
        if not kept.is_as_it_was:
            calls[i] = None
            return True, _run_again(name, op(*args, **kwargs), kept)
        for move, state in kept.states:
            move(state)
        if torch_private.retains_graph():
            return True, _each(kept.values, _alias)
        calls[i] = None
        return True, kept.values

    def protect(self, storages: set[int]) -> None:
        """Copy kept results that lie in memory that is about to be written."""
        for calls in self._kept.values():
            for kept in calls:
                if kept is not None:
                    kept.copy_apart(storages)

    @property
    def holds_any(self) -> bool:
        """Whether there is a result that somebody may write into."""
        return any(kept is not None for calls in self._kept.values() for kept in calls)

    @property
    def is_empty(self) -> bool:
        """Whether nothing has run that need be watched."""
        return not self._kept and not self.generators


class Keeping(torch_private.DispatchMode):  # type: ignore[misc, unused-ignore]
    """The mode of a segment's forward: keeps results.

    Args:
        results: Filled while the mode is on.
        earlier: Of other calls of the same pass, into which this one may write.
    """

    def __init__(self, results: Results, earlier: Sequence[Results]) -> None:
        super().__init__()
        self._results, self._protected = results, (results, *earlier)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            written = _written(func, args, kwargs)
            for results in self._protected:
                results.protect(written)
        generator = kwargs.get("generator")
        if generator is not None:
            self._results.note(generator)
        values = func(*args, **kwargs)
        if self._results.seen.keeps(func):
            self._results.add(func, args, kwargs, values)
        return values


class HandingOut(torch_private.DispatchMode):  # type: ignore[misc, unused-ignore]
    """The mode of a recomputation: hands kept results out instead of running their operations.

    Args:
        results: Of the forward that is repeated.
    """

    def __init__(self, results: Results) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self._results.protect(_written(func, args, kwargs))
        if self._results.seen.keeps(func):
            is_there, values = self._results.take(func, args, kwargs)
            if is_there:
                return values
        return func(*args, **kwargs)


def _each(values: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(values, Tensor):
        return function(values)
    if isinstance(values, (tuple, list)):
        return type(values)(_each(value, function) for value in values)
    return values


def _described(args: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((tensor.shape, tensor.dtype) for tensor in containing.tensors(args))


def _alias(tensor: Tensor) -> Tensor:
    """The same memory without its graph; of a tensor that has no version, memory of its own."""
    return tensor.clone() if tensor.is_inference() else torch_private.counted_alias(tensor)


def _versions(values: Any) -> list[int]:
    return [0 if one.is_inference() else one._version for one in containing.tensors(values)]


def _storage(tensor: Tensor) -> int:
    """The same for tensors that share memory; those of other layouts share none that could be told."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else id(tensor)


def _run_again(name: str, values: Any, kept: _Kept) -> Any:
    """What an operation gives whose kept result was written into."""
    found = zip(containing.tensors(values), containing.tensors(kept.values), kept.versions, strict=True)
    untouched = [(now, then) for now, then, version in found if not then.is_inference() and then._version == version]
    for now, then in untouched:
        is_number = now.is_floating_point() or now.is_complex() or torch_private.is_fake(now)
        if not is_number and not torch.equal(now, then):
            raise UnsupportedError(
                "a routing decision fell the other way when it was made again: what was kept of it was written into",
                got=f"another result of {name} in the repetition of a segment",
                expected="the decision of the forward",
                hint="use the operation that makes a new tensor instead of the one that writes into the segment's "
                "result (mul for mul_)",
                op=name,
            )
    return values


def _written(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> set[int]:
    """The storages that a call writes into."""
    found: list[Tensor] = []
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += containing.tensors(args[i] if i < len(args) else kwargs.get(argument.name))
    return {_storage(tensor) for tensor in found}


def _states(op: Any, args: Sequence[Any], kwargs: dict[str, Any], values: Any) -> list[tuple[Any, Tensor]]:
    """Where a random operation left the generators, as functions that move them there and what to give these."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return []
    generator = kwargs.get("generator")
    if generator is not None:
        return [(generator.set_state, generator.get_state())]
    names = [argument.name for argument in op._schema.arguments]
    if "dropout_p" in names:
        i = names.index("dropout_p")
        if not (args[i] if i < len(args) else kwargs.get("dropout_p")):
            return []
    states: list[tuple[Any, Tensor]] = [(torch.set_rng_state, torch.get_rng_state())]
    devices = {tensor.device for tensor in containing.tensors(values) if tensor.device.type != "cpu"}
    for device in devices:
        module = torch.get_device_module(device)
        states.append((lambda state, d=device, m=module: m.set_rng_state(state, d), module.get_rng_state(device)))
    return states
