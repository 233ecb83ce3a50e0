"""Cuts a batch into micro-batches and moves one to a device.

Entry points: ``split``, ``num_samples``, ``resize``, ``move`` and ``map_tensors``. Nothing is copied by cutting:
tensors of a micro-batch are views of the batch's, but for sparse ones. What a batch is weighted by is ``counting``'s.
"""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from snugfit.errors import BatchError, PlanError
from snugfit.jobs import Shared

_REPEATED = (str, bytes, bool, int, float, complex, type(None), Shared)


def split(batch: Any, micro_batch_size: int) -> list[Any]:
    """Cut a batch into micro-batches, in order, the last one shorter where the size does not divide.

    Mappings, sequences, named tuples and dataclasses are entered. Tensors with a dimension are cut along dim 0, as
    are lists (and tuples of strings) without tensors whose length is the number of samples. Numbers, strings, None
    and 0-dimensional tensors are repeated, as is a ``Shared``, of which a micro-batch holds the bare value.

    Args:
        batch: Nested tensors of shape ``(num_samples, ...)``. Not modified.
        micro_batch_size: Samples of a micro-batch; one that is larger than the batch gives one micro-batch.

    Returns:
        Micro-batches of the batch's own types, whose tensors are views.

    Raises:
        PlanError: ``micro_batch_size`` is not a whole number of at least 1.
        BatchError: No tensor, tensors that disagree on dim 0, or an object that cannot be cut; names its path.

    Example:
        >>> [part["x"].tolist() for part in split({"x": torch.arange(5), "scale": 2.0}, 2)]
        [[0, 1], [2, 3], [4]]
    """
    if not isinstance(micro_batch_size, int) or isinstance(micro_batch_size, bool) or micro_batch_size < 1:
        raise PlanError(
            "micro_batch_size must be a whole number of at least 1",
            got=f"micro_batch_size={micro_batch_size!r}",
            expected=">= 1",
            hint="pass micro_batch_size=1 or more",
        )
    size = num_samples(batch)
    starts = range(0, size, micro_batch_size)
    return [_cut(batch, size, slice(start, start + micro_batch_size), "batch") for start in starts]


def num_samples(batch: Any) -> int:
    """Number of samples of a batch: what its tensors have as their first dimension.

    Raises:
        BatchError: No tensor with a dimension, no sample, or tensors that disagree; names both paths and sizes.
    """
    number = samples_or_none(batch)
    if number == 0:
        path, _ = next(_tensors(batch, "batch"))
        raise BatchError(
            "a batch holds no sample", got=f"{path} has 0", expected="at least 1", hint="leave empty batches out"
        )
    return number


def samples_or_none(micro_batch: Any) -> int:
    """Number of samples of a micro-batch, which may be none: it then counts nothing.

    Raises:
        BatchError: No tensor with a dimension, or tensors that disagree; names both paths and sizes.
    """
    first: tuple[str, int] | None = None
    for path, tensor in _tensors(micro_batch, "batch"):
        if first is None:
            first = (path, tensor.shape[0])
        elif tensor.shape[0] != first[1]:
            listed = _listing(micro_batch, "batch", path, first[1])
            hint = f"wrap what is not per sample in snugfit.Shared, for example {path}, or pass split="
            if listed is not None:
                hint = f"{listed} has an entry of tensors for each sample: {_by_hand(micro_batch, listed)}"
            raise BatchError(
                "the tensors of a batch disagree on the number of samples",
                got=f"{first[0]} has {first[1]}, {path} has {tensor.shape[0]}",
                expected="the same first dimension in all tensors",
                hint=hint,
                paths=(first[0], path),
                sizes=(first[1], tensor.shape[0]),
            )
    if first is None:
        raise BatchError(
            "a batch holds no tensor with a dimension, so it cannot be cut",
            got=f"batch of type {type(micro_batch).__name__}",
            expected="at least one tensor whose first dimension is samples",
            hint="convert lists and arrays with torch.as_tensor, or pass split=",
        )
    return first[1]


def resize(batch: Any, size: int) -> Any:
    """Make a batch of another number of samples out of an example, repeating its samples where it has too few."""
    given = num_samples(batch)
    return batch if given == size else _cut(batch, given, [i % given for i in range(size)], "batch")


def move(batch: Any, device: torch.device) -> Any:
    """Bring the tensors of a micro-batch to a device, without waiting for the copies.

    Other objects that have a ``to`` method are asked to move themselves; the rest stays as it is.
    """
    if isinstance(batch, Shared):
        return move(batch.value, device)
    if hasattr(batch, "to") and not isinstance(batch, (Mapping, UserDict)):
        return batch.to(device, non_blocking=True) if isinstance(batch, Tensor) else batch.to(device)
    children = _children(batch, "")
    return batch if children is None else _rebuild(batch, [move(child, device) for _, child in children])


def bare(micro_batch: Any) -> Any:
    """A micro-batch as the loss function sees it: what is ``Shared`` without its wrapper."""
    return map_tensors(lambda tensor: tensor, micro_batch)


def map_tensors(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """A batch of the same structure with each tensor replaced by what a function makes of it."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Shared):
        return map_tensors(function, batch.value)
    children = _children(batch, "")
    return batch if children is None else _rebuild(batch, [map_tensors(function, child) for _, child in children])


def named_tensors(batch: Any, path: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a micro-batch and where it is, what is ``Shared`` included."""
    if isinstance(batch, Tensor):
        yield path, batch
    elif isinstance(batch, Shared):
        yield from named_tensors(batch.value, path)
    else:
        for child_path, child in _children(batch, path) or ():
            yield from named_tensors(child, child_path)


def _cut(value: Any, size: int, chosen: slice | list[int], path: str) -> Any:
    """The chosen samples of a value that belongs to a batch of ``size`` samples.

    A slice makes a micro-batch, which holds bare what is ``Shared``; a list makes another batch, which is still cut.
    """
    if isinstance(value, Tensor):
        return _rows(value, size, chosen) if value.dim() else value
    if isinstance(value, Shared):
        return value.value if isinstance(chosen, slice) else value
    if _is_column(value, size):
        return value[chosen] if isinstance(chosen, slice) else type(value)(value[i] for i in chosen)
    children = _children(value, path)
    if children is not None:
        return _rebuild(value, [_cut(child, size, chosen, child_path) for child_path, child in children])
    if isinstance(value, _REPEATED):
        return value
    raise BatchError(
        f"a batch holds an object that cannot be cut: {type(value).__name__} at {path}",
        got=f"{type(value).__module__}.{type(value).__qualname__} at {path}",
        expected="tensors, numbers, strings, None, snugfit.Shared, and mappings, sequences or dataclasses of them",
        hint="wrap it in snugfit.Shared to hand it whole to every micro-batch, or pass split=",
        path=path,
    )


def _rows(tensor: Tensor, size: int, chosen: slice | list[int]) -> Tensor:
    """The chosen samples of a tensor; sparse ones know no slices."""
    if tensor.layout != torch.sparse_coo:
        return tensor[chosen]
    places = range(size)[chosen] if isinstance(chosen, slice) else chosen
    return tensor.index_select(0, torch.tensor(list(places), device=tensor.device))


def _tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor with a dimension and where it is; what is ``Shared`` is not looked into."""
    if isinstance(value, Tensor):
        if value.is_nested or value.layout not in (torch.strided, torch.sparse_coo):
            kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
            raise BatchError(
                f"a batch holds a {kind} tensor, which cannot be cut: {path}",
                got=f"{type(value).__name__} at {path}",
                expected="dense or sparse_coo tensors whose samples are their first dimension",
                hint="pad it, convert it with .to_sparse(), wrap what is not per sample in snugfit.Shared, or pass "
                "split=",
                path=path,
            )
        if value.dim():
            yield path, value
        return
    for child_path, child in _children(value, path) or ():
        yield from _tensors(child, child_path)


def _listing(value: Any, path: str, inner: str, size: int) -> str | None:
    """The list on the way to a path inside of a batch that has one entry per sample; None where there is none."""
    for child_path, child in _children(value, path) or ():
        if inner.startswith((f"{child_path}[", f"{child_path}.")):
            is_it = isinstance(child, list) and len(child) == size
            return child_path if is_it else _listing(child, child_path, inner, size)
    return None


def _by_hand(batch: Any, listed: str) -> str:
    """What to pass for a batch with a list of one entry per sample."""
    count = f"count=lambda micro_batch: len(micro_{listed})"
    columns = list(batch.values()) if isinstance(batch, Mapping) else []
    are_cut = [isinstance(each, list) or (isinstance(each, Tensor) and each.dim() > 0) for each in columns]
    if not columns or not all(are_cut) or len(set(map(len, columns))) > 1:
        return f"pass {count} and split=, a function of (batch, size) to a list of micro-batches"
    cut = "{key: value[i : i + size] for key, value in batch.items()}"
    return f"pass split=lambda batch, size: [{cut} for i in range(0, len({listed}), size)], {count}"


def _is_column(value: Any, size: int) -> bool:
    """Whether a list is one entry per sample (captions, file names) although it holds no tensor."""
    if type(value) is tuple:
        return len(value) == size and all(isinstance(item, (str, bytes)) for item in value)
    return isinstance(value, list) and len(value) == size and not _holds_tensor_or_shared(value)


def _holds_tensor_or_shared(value: Any) -> bool:
    if isinstance(value, (Tensor, Shared)):
        return True
    return any(_holds_tensor_or_shared(child) for _, child in _children(value, "") or ())


def _children(value: Any, path: str) -> list[tuple[str, Any]] | None:
    """What a container holds, each with its path; None for anything that is not a container."""
    if isinstance(value, (str, bytes, Tensor, PackedSequence)):
        return None
    if isinstance(value, (Mapping, UserDict)):
        return [(f"{path}[{key!r}]", value[key]) for key in value]
    if isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", None)
        return [(f"{path}.{names[i]}" if names else f"{path}[{i}]", item) for i, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Shared)):
        return [(f"{path}.{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def _rebuild(value: Any, children: Sequence[Any]) -> Any:
    """A container of the same type with other contents."""
    if isinstance(value, (Mapping, UserDict)):
        contents = dict(zip(value, children, strict=True))
        if type(value) is dict:
            return contents
        if isinstance(value, UserDict):  # transformers' BatchEncoding: its per-sample encodings do not fit a part
            return type(value)(contents)
        if isinstance(value, dict):
            copied = copy.copy(value)
            for key, child in contents.items():
                copied[key] = child
            return copied
        return contents
    if isinstance(value, (list, tuple)):
        make: Callable[[Sequence[Any]], Any] = getattr(type(value), "_make", type(value))
        return make(children)
    copied = copy.copy(value)
    for field, child in zip(dataclasses.fields(value), children, strict=True):
        object.__setattr__(copied, field.name, child)  # frozen ones, too
    return copied
