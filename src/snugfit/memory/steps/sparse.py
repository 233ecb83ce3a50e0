"""Sparse gradients under fake tensors, whose own kernels for them lose the number of rows.

Entry point: ``kernel_for``. A sparse tensor is its indices and values; each kernel here makes those and the sparse
tensor out of them. Left out: compressed layouts, and what CUDA's kernels take while they run.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from snugfit.memory import torch_private
from snugfit.memory.known_values.values import Values

aten: Any = torch.ops.aten

REPEATED = "sparse gradients: every index counts once per occurrence, as if no row came up twice"


def kernel_for(func: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
    """What to run in the place of an operation on sparse tensors: a function of the known values and its arguments."""
    kernel = _KERNELS.get(func)
    if kernel is _bag_backward:
        return kernel if args[9] else None
    if kernel is None or not any(isinstance(value, Tensor) and value.layout is torch.sparse_coo for value in args):
        return None
    if kernel in (_product, _transpose) and not _is_matrix(args[0]):
        return None
    if kernel is _product and args[1].layout is not torch.strided:
        return None
    if kernel is _add_in_place and (args[0].layout is not torch.sparse_coo or args[1].layout is not torch.sparse_coo):
        return None
    return kernel


def _is_matrix(tensor: Tensor) -> bool:
    return tensor.layout is torch.sparse_coo and (tensor.sparse_dim(), tensor.dense_dim()) == (2, 0)


def made_of(tensor: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
    """A sparse tensor of what a function makes of the indices and the values of another."""
    indices, values = (part(each.detach()) for each in torch_private.sparse_parts(tensor))
    made: Tensor = _alike(tensor, indices, values)
    return made.requires_grad_(tensor.requires_grad)


def _like(tensor: Tensor, indices: Tensor, values: Tensor) -> Any:
    shape, dims = tuple(tensor.shape), (tensor.sparse_dim(), tensor.dense_dim())
    return aten._sparse_coo_tensor_with_dims_and_tensors(
        *dims, shape, indices, values, dtype=values.dtype, layout=torch.sparse_coo
    )


def _alike(tensor: Tensor, indices: Tensor, values: Tensor) -> Any:
    """The same, and coalesced if the other is."""
    return aten._coalesced_(_like(tensor, indices, values), tensor.is_coalesced())


def _detach(_: Values, tensor: Tensor) -> Any:
    return _alike(tensor, *torch_private.sparse_parts(tensor))


def _clone(_: Values, tensor: Tensor, *, memory_format: Any = None) -> Any:
    return _alike(tensor, *(part.clone() for part in torch_private.sparse_parts(tensor)))


def _to_copy(_: Values, tensor: Tensor, *, dtype: torch.dtype | None = None, **__: Any) -> Any:
    indices, held = torch_private.sparse_parts(tensor)
    return _alike(tensor, indices.clone(), held.clone() if dtype is None else held.to(dtype, copy=True))


def _coalesce(values: Values, tensor: Tensor) -> Any:
    """Equal indices become one: their number is known where the indices are."""
    indices, held = torch_private.sparse_parts(tensor)
    known = values.read(indices)
    if known is None:
        values.assumptions[REPEATED] = None
        number = indices.shape[1]
    else:
        with torch_private.without_modes():
            number = known.unique(dim=1).shape[1]  # type: ignore[no-untyped-call]
    made = _like(tensor, indices.new_empty((indices.shape[0], number)), held.new_empty((number, *held.shape[1:])))
    return aten._coalesced_(made, True)


def _transpose(_: Values, tensor: Tensor, *__: int) -> Any:
    """Indices in another order are other indices, and all of it is copied: native/sparse/SparseTensor.cpp."""
    indices, held = torch_private.sparse_parts(tensor)
    made = aten._sparse_coo_tensor_with_dims_and_tensors(
        2, 0, tuple(tensor.shape)[::-1], indices.clone(), held.clone(), dtype=held.dtype, layout=torch.sparse_coo
    )
    return aten._coalesced_(made, False)


def _product(_: Values, matrix: Tensor, dense: Tensor) -> Any:
    """Zeros are added to beside the result: ``_sparse_mm`` in native/sparse/SparseTensorMath.cpp."""
    zeros = dense.new_zeros((matrix.shape[0], dense.shape[1]))
    return torch.empty_like(zeros)


def _sparse_mask(_: Values, tensor: Tensor, mask: Tensor) -> Any:
    indices, held = torch_private.sparse_parts(mask)
    made = _like(mask, indices.clone(), held.new_empty(held.shape, dtype=tensor.dtype))
    return aten._coalesced_(made, True)


def _add_in_place(_: Values, tensor: Tensor, other: Tensor, **__: Any) -> Any:
    """Two gradients that are not coalesced become one by writing the second behind the first."""
    parts = zip(torch_private.sparse_parts(tensor), torch_private.sparse_parts(other), (1, 0), strict=True)
    tensor.data = _like(tensor, *(torch.cat([first, second], dim) for first, second, dim in parts))
    return tensor


def _bag_backward(_: Values, gradient: Tensor, indices: Tensor, *rest: Any, **more: Any) -> Any:
    """A row for every index, whatever the bags: ``_embedding_bag_sparse_backward`` in ATen/native/EmbeddingBag.cpp."""
    width = gradient.shape[1]
    rows = gradient.new_empty((indices.numel(), width))
    return aten._sparse_coo_tensor_with_dims_and_tensors(
        1, 1, (rest[4], width), indices.reshape(1, -1), rows, layout=torch.sparse_coo
    )


_KERNELS: dict[Any, Callable[..., Any]] = {
    aten._embedding_bag_backward.default: _bag_backward,
    aten.add_.Tensor: _add_in_place,
    aten.detach.default: _detach,
    aten.clone.default: _clone,
    aten._coalesce.default: _coalesce,
    aten._to_copy.default: _to_copy,
    aten.mm.default: _product,
    aten.sparse_mask.default: _sparse_mask,
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
}
