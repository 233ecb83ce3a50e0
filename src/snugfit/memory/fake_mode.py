"""Fake CPU tensors with short ways: torch's own mode, made quicker for what a training step mostly does.

Entry points: ``FakeMode``, ``Fake``, ``FAKE_ERRORS``; other files take them from ``torch_private``, to which this one
belongs: what it uses of torch's is not public. Recording is ``recording``'s.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    CONSTANT_NUMEL_LIMIT,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from snugfit.memory.steps import refusals

FAKE_ERRORS: tuple[type[Exception], ...] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"What fake tensors raise for an operation that they cannot follow."

Fake = FakeTensor

_CPU, _META = torch.device("cpu"), torch.device("meta")
_KNOWS_VALUES = ("lift_fresh", "lift_fresh_copy", "scalar_tensor", "_local_scalar_dense")
_PRODUCTS = tuple(
    getattr(torch.ops.aten, name).default
    for name in ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear", "convolution")
)
_CONVOLUTIONS = frozenset([torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default])
"Their layouts follow what the CPU's libraries are allowed."
_COUNT = torch.ops.aten.add_.Tensor
_LIFT = torch.ops.aten.lift_fresh.default
_SIMPLE = frozenset([int, float, bool, str, torch.dtype, torch.device, torch.memory_format])
_UNMARKED_VIEWS = ("_unsafe_view", "_reshape_alias")


@dataclass(slots=True)
class Recipe:
    """What is known of an operation on inputs of given shapes and types, and numbers."""

    container: type | None
    "Of several results."
    parts: list[tuple[Any, ...] | float | None]
    "Shape, strides and dtype of each result; a number, or None, where the operation has that there."
    remembered: dict[Any, Any] = field(default_factory=dict)
    "Whatever else depends on no more than that."


_UNKNOWN = Recipe(None, [])
_MOST_KNOWN = 1 << 15
"Operations that a process remembers; a trace of the UNet has 800, of 1.6 kB each."
_known: dict[Hashable, dict[tuple[Any, ...], Recipe | None]] = {}
"By what their results depend on beside their arguments."


def _known_here() -> dict[tuple[Any, ...], Recipe | None]:
    """What is known of torch's own operations, for all modes that are made under the same settings."""
    if sum(map(len, _known.values())) > _MOST_KNOWN:
        _known.clear()
    backends = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    return _known.setdefault((*backends, deterministic), {})


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake CPU tensors, with short ways for what a training step mostly does.

    A half of the time of torch's own dispatch goes into the key of its cache. Here a view is made by the meta kernel
    at once, and a result that is new is made again from the shapes it had for inputs of the same shapes and types.
    Everything else (values, scalars with known values, other layouts and devices) takes torch's way.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._kinds: dict[Any, str] = {}
        self._known = {"new": _known_here(), "own": dict[tuple[Any, ...], Recipe | None]()}
        self._attributes: dict[str, Any] | None = None
        self.recipe: Recipe | None = None
        "Of the operation that was run last; None where its results depend on more than shapes, types and numbers."

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not around each operation: while a trace runs, no compiler listens."""
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> "FakeMode":
        """Itself: a copied tensor belongs to the same mode."""
        return self

    def run(self, op: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one operation on fake tensors."""
        self.recipe = None
        kind = self._kinds.get(op) or self._kinds.setdefault(op, _kind(op))
        if kind == "lift" and not kwargs and _may_be_lifted(args[0]):
            return self._lifted(args[0])
        if op is _COUNT and not kwargs and _counts(*args):
            with torch._C._DisableTorchDispatch():
                args[0].constant.add_(args[1])
            return args[0]
        described: list[Any] = [op, torch.get_default_dtype()]
        if kind in ("other", "lift") or not (_describe(args, described) and _describe(kwargs.values(), described)):
            return super().__torch_dispatch__(op, types, args, kwargs)
        if kind == "view":
            result = self._on_meta(op, args, kwargs)
            return self._fake(result) if isinstance(result, torch.Tensor) else [self._fake(part) for part in result]
        described.extend(kwargs)
        if op in _CONVOLUTIONS:
            described += (torch._C._get_mkldnn_enabled(), torch.get_num_threads())
        key = tuple(described)
        known = self._known[kind]
        recipe = known.get(key, _UNKNOWN)
        if recipe is _UNKNOWN:
            if op in _PRODUCTS:  # asked once per shapes and types
                self._refuse_two_types(op, args)
            run = self._laid_out if op in _CONVOLUTIONS else super().__torch_dispatch__
            result = run(op, types, args, kwargs)
            self.recipe = known[key] = _recipe(result, args)
            return result
        if recipe is None:
            return super().__torch_dispatch__(op, types, args, kwargs)
        self.recipe = recipe
        with torch._C._DisableTorchDispatch():
            made = [
                torch.empty_strided(part[0], part[1], dtype=part[2], device=_META) if type(part) is tuple else part
                for part in recipe.parts
            ]
        results = [self._fake(part) if isinstance(part, torch.Tensor) else part for part in made]
        return results[0] if recipe.container is None else recipe.container(results)

    def _laid_out(self, op: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A convolution, past torch's own cache, which does not know what its layout follows."""
        is_cached, self.cache_enabled = self.cache_enabled, False
        try:
            return super().__torch_dispatch__(op, types, args, kwargs)
        finally:
            self.cache_enabled = is_cached

    def _on_meta(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """An operation by the meta kernel: ``in_kernel_invocation_manager`` of torch, without a generator."""
        with torch._C._DisableTorchDispatch():
            self.in_kernel_invocation = True
            with torch._C._PreserveDispatchKeyGuard():
                torch._C._set_meta_in_tls_dispatch_include(True)
                try:
                    return op(*args, **kwargs)
                finally:
                    self.in_kernel_invocation = False

    def _lifted(self, real: torch.Tensor) -> FakeTensor:
        """What ``torch.tensor`` gives."""
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=_META)
        return self._fake(meta)

    @property
    def module(self) -> str:
        """The module that runs; empty where nobody follows modules."""
        return ""

    def _refuse_two_types(self, op: Any, args: Sequence[Any]) -> None:
        """Refuse a product of two types, which every device refuses and meta kernels let pass."""
        types = {str(value.dtype): tuple(value.shape) for value in args if isinstance(value, torch.Tensor)}
        if len(types) > 1:
            raise refusals.two_types(str(op), self.module, types)

    def _fake(self, meta: torch.Tensor) -> FakeTensor:
        """What ``FakeTensor(self, meta, _CPU)`` makes, with the attributes of one that was made in this way."""
        if self._attributes is None:
            fake = FakeTensor(self, meta, _CPU)
            self._attributes = dict(vars(fake))
            return fake
        fake = torch.Tensor._make_subclass(
            FakeTensor, meta, meta.requires_grad, dispatch_device=True, device_for_backend_keys=_CPU
        )
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
        vars(fake).update(self._attributes)
        return fake


def _kind(op: Any) -> str:
    """``view``, ``new`` (a function of shapes whose results share no storage with inputs), ``lift``, or ``other``.

    New as well is ``own``, which is not torch's: who registers its kernel may register another one.
    """
    if op is _LIFT:
        return "lift"
    schema = op._schema
    name = schema.name.partition("::")[2]
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
    if schema.is_mutable or name in _KNOWS_VALUES or any(tag in op.tags for tag in tags) or not schema.returns:
        return "other"
    if name in _UNMARKED_VIEWS or op.is_view:
        return "view"
    return "new" if op.namespace in ("aten", "prims") else "own"


def _may_be_lifted(value: Any) -> bool:
    """Whether an argument is a plain tensor that fills its storage, and no number whose value torch remembers."""
    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.device != _CPU:
        return False
    plain = not (value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg())
    fills = value.is_contiguous() and value.nbytes == value.untyped_storage().nbytes()
    return plain and fills and value.numel() > CONSTANT_NUMEL_LIMIT


def _counts(number: Any, other: Any, *_: Any) -> bool:
    """Whether a number whose value torch remembers grows by one of Python's, as an optimizer's steps do."""
    return type(number) is FakeTensor and number.constant is not None and type(other) in (int, float)


def _describe(values: Iterable[Any], described: list[Any]) -> bool:
    """Append what the result of an operation depends on; False where that is more than shapes, types and numbers."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            dtype, device = value.dtype, value.fake_device
            if value.constant is not None or value.layout is not torch.strided or dtype.is_complex:
                return False
            if device is not _CPU and device != _CPU:
                return False
            described += (value.shape, value.stride(), dtype)
        elif value is None:
            described.append(None)
        elif kind in _SIMPLE:
            described += (kind, value)
        elif kind is list or kind is tuple:
            described.append(len(value))
            if not _describe(value, described):
                return False
        elif kind is torch.layout:
            described.append(value)
        else:
            return False
    return True


def _recipe(result: Any, args: Sequence[Any]) -> Recipe | None:
    """How to make a result again; None if it cannot be."""
    single = isinstance(result, torch.Tensor)
    parts = [result] if single else list(result) if type(result) in (tuple, list) else None
    if parts is None:
        return None
    storages = {tensor.untyped_storage()._cdata for tensor in _fakes(args)}
    described: list[tuple[Any, ...] | float | None] = []
    for part in parts:
        if part is None or type(part) in (int, float, bool):
            described.append(part)
            continue
        plain = type(part) is FakeTensor and part.constant is None and part.layout is torch.strided
        plain = plain and not part._is_zerotensor()
        if not plain or part.is_complex() or part.fake_device != _CPU or part.storage_offset():
            return None
        storage = part.untyped_storage()
        described.append((tuple(part.shape), part.stride(), part.dtype))
        again = torch.empty_strided(tuple(part.shape), part.stride(), dtype=part.dtype, device=_META)
        if storage._cdata in storages or storage.nbytes() != again.untyped_storage().nbytes():
            return None
        storages.add(storage._cdata)
    return Recipe(None if single else type(result), described)


def _fakes(values: Sequence[Any]) -> Iterator[FakeTensor]:
    for value in values:
        if type(value) is FakeTensor:
            yield value
        elif type(value) in (list, tuple):
            yield from _fakes(value)
