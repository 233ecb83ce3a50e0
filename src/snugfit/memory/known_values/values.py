"""Which values a trace knows although its tensors are fake: of positions, masks, batches, counters, drawn numbers.

Entry point: ``Values``. A step decides by such values (rows of a mask, lengths, a depth schedule), so what can be
computed without the weights is computed for real, and only when it is read. Left out: anything that depends on a
parameter, or on given floats beyond a small size. What stands for values that nobody knows is ``assumed_values``'s.

NOTE [How values are known]
1. A storage's value is a node: an operation and its arguments, which are nodes themselves; views need none.
2. A node is computed at its first read (small ones at once) and checked against the fake result's type and size.
3. Writing into a storage gives it a new node, or none where what is written is not known.
4. Notes of a node say what was assumed on the way; they come out only if it is read.
"""

import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from snugfit.memory import torch_private
from snugfit.memory.known_values import assumed_values
from snugfit.memory.known_values.value_nodes import (
    LostError,
    Node,
    checked,
    nodes_of,
    reals,
    replaced,
    seen_of,
    storage_of,
)

_MAX_FLOATS = 1 << 12
"Floats of a tensor whose values are given or drawn: lengths and weights of classes, no images."
_MAX_COMPUTED_FLOATS = 1 << 24
"Floats of a computed result, which takes no memory until it is read: filter banks, anchors and how they overlap."
_MAX_INTEGERS = 1 << 26
"Elements of a known result. Masks of every pair of 8192 positions have this many."
_MAX_DRAWN = 1 << 22
_MAX_WRITTEN_FLOATS, _MAX_WRITTEN_INTEGERS = 1 << 8, 1 << 19
"Elements of what one operation writes into: the values are copied each time."
_AT_ONCE = 1 << 10
_MAX_DEPTH = 24
"Nodes that wait for each other; kept far from Python's recursion limit."

RANDOM = "random numbers that the step decides by are drawn as with seed 0; the traced windows follow them"

_FACTORIES = frozenset(
    """arange.default arange.start arange.start_step eye.default eye.m full.default linspace.default ones.default
    zeros.default scalar_tensor.default tril_indices.default triu_indices.default logspace.default""".split()
)
_LIKE = frozenset("full_like ones_like zeros_like new_full new_ones new_zeros".split())
_DRAWS = frozenset("normal rand rand_like randint randint_like randn randn_like randperm".split())
_OVERWRITING = frozenset("bernoulli_ copy_ fill_ normal_ random_ uniform_ zero_".split())


class Values:
    """Keeps the values that are known of a trace's storages, by the storages' keys."""

    def __init__(self) -> None:
        self._nodes: dict[int, Node] = {}
        self._watches: dict[int, weakref.ref[Any]] = {}
        self._kinds: dict[Any, str] = {}
        self._written: dict[Any, tuple[int, ...]] = {}
        self._reads = itertools.count(assumed_values.HIGH, -1)
        self.in_update = False
        "Whether an optimizer is making an update: what it compares is assumed."
        self.assumptions: dict[str, None] = {}
        "Sentences, in the order in which values that rest on them were read."

    def falling(self) -> float:
        """An unknown number that an optimizer reads: lower than the one before."""
        return float(next(self._reads))

    def forget(self, key: int) -> None:
        """A storage has died."""
        self._nodes.pop(key, None)
        self._watches.pop(key, None)

    def know(self, fake: Tensor, real: Tensor) -> None:
        """Say what a fake tensor holds; the real one must not be changed later."""
        if self._wanted(fake) and not fake.requires_grad:
            key, storage, held = _key(fake), fake.untyped_storage(), real.untyped_storage()
            if held.nbytes() != storage.nbytes():
                return
            self._nodes[key] = Node(lambda: None, storage.nbytes(), 0, frozenset(), value=held)
            self._watches[key] = weakref.ref(storage, lambda _: self.forget(key))

    def read(self, tensor: Tensor) -> Tensor | None:
        """The real values of a tensor; None where they are not known."""
        if type(tensor) is not torch_private.Fake:
            return tensor.detach() if type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu" else None
        node = self._node(tensor)
        if node is None:
            return None
        with torch_private.without_modes(), torch.no_grad():
            try:
                real = seen_of(tensor, node).real()
            except LostError:
                return None
        self.assumptions.update(dict.fromkeys(sorted(node.notes)))
        return real

    def answer(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The real result of an operation that fake tensors cannot follow; None where an input is not known."""
        notes: set[str] = set()
        seen = self._see((tuple(args), dict(kwargs)), notes, needed=True)
        if seen is None:
            return None
        with torch_private.without_modes(), torch.no_grad(), torch_private.without_autocast():
            try:
                real_args, real_kwargs = reals(seen)
                result = func(*real_args, **real_kwargs)
            except Exception:  # a value is lost, or there is no kernel for real tensors
                return None
        self.assumptions.update(dict.fromkeys(sorted(notes)))
        return result

    def follow(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Look at an operation that has run on fake tensors, and keep what is known of its result."""
        kind = self._kinds.get(func) or self._kinds.setdefault(func, _kind(func))
        if kind == "view":
            return
        if kind == "write":
            if self._nodes:
                self._write(func, args, kwargs)
            return
        if kind == "new" and self._nodes and self._all_known(args, kwargs):
            self._add(func, args, kwargs, result, needed=True)
        elif kind in ("factory", "like", "random"):
            self._add(func, args, kwargs, result, needed=False)
        elif kind == "lift" and type(args[0]) is Tensor:
            self.know(result, args[0].clone())
        elif kind == "new":
            for tensor, make, note in assumed_values.of(func, args, result, in_update=self.in_update):
                if self._wanted(tensor):
                    node = Node(make, _num_bytes(tensor), 0, frozenset([note]))
                    self._nodes[_key(tensor)] = node

    def _add(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, *, needed: bool) -> None:
        several = result if isinstance(result, (tuple, list)) else ()
        parts: list[tuple[int | None, Any]] = [(None, result)] if isinstance(result, Tensor) else [*enumerate(several)]
        parts = [(index, part) for index, part in parts if type(part) is torch_private.Fake]
        random = _is_drawn(func)
        most_floats = _MAX_FLOATS if random else _MAX_COMPUTED_FLOATS
        if not parts or not all(self._wanted(part, most_floats) for _, part in parts):
            return
        if random and sum(part.numel() for _, part in parts) > _MAX_DRAWN:
            return
        notes: set[str] = {RANDOM} if random else set()
        seen = self._see((tuple(args), dict(kwargs)), notes, needed=needed)
        if seen is None:
            return
        depth = 1 + max((node.depth for node in nodes_of(seen)), default=0)
        memo: list[Any] = []

        def run() -> Any:
            if not memo:
                real_args, real_kwargs = reals(seen)
                memo.append(func(*real_args, **real_kwargs))
            return memo[0]

        for index, part in parts:
            if part.layout is not torch.strided or part.untyped_storage()._cdata in self._nodes:
                continue
            expected = (part.dtype, tuple(part.shape), part.stride())
            node = Node(checked(run, index, expected), _num_bytes(part), depth, frozenset(notes))
            self._nodes[_key(part)] = node
            if random or part.numel() <= _AT_ONCE or depth > _MAX_DEPTH:  # draws keep their order
                self._compute_now(part, node)

    def _write(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        written = list(self._targets(func, args, kwargs))
        known = [tensor for tensor in written if _key(tensor) in self._nodes]
        if assumed_values.writes_found_inf(func):
            for tensor in known:
                if assumed_values.is_kept(args, tensor):
                    self._nodes[_key(tensor)].notes |= {assumed_values.FINITE}
                else:
                    self.forget(_key(tensor))
            return
        overwrites = func.__name__.partition(".")[0] in _OVERWRITING and len(written) == 1 and _covers(written[0])
        if overwrites and _may_be_written(written):
            known = written
            self._nodes[_key(written[0])] = _blank(written[0])  # what it held before is no matter
        elif not known:
            return
        notes: set[str] = set()
        seen = self._see((tuple(args), dict(kwargs)), notes, needed=True) if _may_be_written(known) else None
        if seen is None:
            for tensor in known:
                self.forget(_key(tensor))
            return
        self._write_now(func, seen, written, notes | ({RANDOM} if _is_drawn(func) else set()))

    def _write_now(self, func: Any, seen: Any, written: Sequence[Tensor], notes: set[str]) -> None:
        """Run a writing operation on copies of what its targets hold, which become their values."""
        keys = [_key(tensor) for tensor in written]
        old = {key: self._nodes[key] for key in keys}
        with torch_private.without_modes(), torch.no_grad(), torch_private.without_autocast():
            try:
                fresh: dict[int, Node] = {}
                for node in old.values():
                    storage = storage_of(node)
                    if storage is None:
                        raise LostError
                    copy = Node(lambda: None, node.num_bytes, 0, frozenset(notes) | node.notes)
                    copy.value = storage.clone()  # type: ignore[no-untyped-call]
                    fresh[id(node)] = copy
                real_args, real_kwargs = reals(replaced(seen, fresh))
                func(*real_args, **real_kwargs)
            except Exception:  # no kernel for real tensors, or none for these
                for key in keys:
                    self.forget(key)
                return
        self._nodes.update({key: fresh[id(node)] for key, node in old.items()})

    def _targets(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
        if func not in self._written:
            arguments = func._schema.arguments
            self._written[func] = tuple(
                i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write
            )
        for index in self._written[func]:
            name = func._schema.arguments[index].name
            value = args[index] if index < len(args) else kwargs.get(name)
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if type(tensor) is torch_private.Fake and tensor.layout is torch.strided:
                    yield tensor

    def _compute_now(self, part: Tensor, node: Node) -> None:
        with torch_private.without_modes(), torch.no_grad(), torch_private.without_autocast():
            if storage_of(node) is None:
                self.forget(_key(part))

    def _node(self, tensor: Tensor) -> Node | None:
        if tensor.layout is not torch.strided or tensor.requires_grad:
            return None
        return self._nodes.get(_key(tensor))

    def _all_known(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether there are tensors among the arguments and all are known."""
        found = False
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, Tensor):
                if type(value) is torch_private.Fake and self._node(value) is None:
                    return False
                found = True
            elif type(value) in (list, tuple):
                for item in value:
                    if isinstance(item, Tensor):
                        if type(item) is torch_private.Fake and self._node(item) is None:
                            return False
                        found = True
        return found

    def _see(self, value: Any, notes: set[str], *, needed: bool) -> Any:
        """Arguments with each fake tensor as it is now; None if one is not known though its values are needed."""
        if isinstance(value, Tensor):
            if type(value) is not torch_private.Fake:
                plain = type(value) is Tensor and value.device.type == "cpu"
                return value.detach() if plain else None
            node = self._node(value) if value.layout is torch.strided else None
            if node is None and needed:
                return None
            if node is not None:
                notes |= node.notes
            return seen_of(value, node)
        if type(value) in (list, tuple):
            parts = [self._see(item, notes, needed=needed) if item is not None else None for item in value]
            lost = any(part is None and item is not None for part, item in zip(parts, value, strict=True))
            return None if lost else type(value)(parts)
        if type(value) is dict:
            seen = {key: self._see(item, notes, needed=needed) for key, item in value.items()}
            return None if any(seen[key] is None and value[key] is not None for key in value) else seen
        return value

    def _wanted(self, tensor: Tensor, most_floats: int = _MAX_FLOATS) -> bool:
        if tensor.layout is not torch.strided or torch_private.is_meta(tensor):
            return False
        is_float = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        return tensor.untyped_storage().nbytes() // tensor.element_size() <= (
            most_floats if is_float else _MAX_INTEGERS
        )


def _kind(func: Any) -> str:
    name = func.__name__
    short = name.partition(".")[0]
    if func._schema.is_mutable:
        return "write"
    if short in ("lift_fresh", "lift_fresh_copy"):
        return "lift"
    if short in _DRAWS and name != "normal.Tensor_Tensor":
        return "random"
    if name in _FACTORIES:
        return "factory"
    if short in _LIKE:
        return "like"
    if short in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "native_dropout"):
        return "unknown"
    if func.is_view or short in ("_unsafe_view", "_reshape_alias", "detach", "alias"):
        return "view"
    return "new" if func.namespace in ("aten", "prims") else "unknown"


def _covers(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _may_be_written(tensors: Sequence[Tensor]) -> bool:
    elements = sum(_num_bytes(tensor) // tensor.element_size() for tensor in tensors)
    is_float = any(tensor.dtype.is_floating_point or tensor.dtype.is_complex for tensor in tensors)
    return elements <= (_MAX_WRITTEN_FLOATS if is_float else _MAX_WRITTEN_INTEGERS)


def _blank(tensor: Tensor) -> Node:
    num_bytes = _num_bytes(tensor)
    return Node(lambda: torch.zeros(num_bytes, dtype=torch.uint8, device="cpu"), num_bytes, 0, frozenset())


def _is_drawn(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _num_bytes(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
