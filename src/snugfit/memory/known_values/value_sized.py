"""Operations whose result's size follows from values that the trace knows, or for which torch has no fake kernel.

Entry point: ``run``. Masks as indices, histograms and CTC: the sizes are those of real tensors, since the values that
decide about them are known. Where they are not, the operation is refused by whoever asked.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from snugfit.memory import torch_private
from snugfit.memory.known_values import assumed_values
from snugfit.memory.known_values.values import Values

aten: Any = torch.ops.aten


def run(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], values: Values, faked: Callable[[Tensor], Tensor]
) -> Any:
    """The fake result of an operation; None where a value that it needs is not known.

    Args:
        func: Operation that fake tensors could not follow.
        args: Its arguments.
        kwargs: Its named arguments.
        values: What is known.
        faked: Makes the fake twin of a real tensor.
    """
    kernel = _KERNELS.get(func.__name__)
    return None if kernel is None else kernel(values, faked, *args, **kwargs)


def has_kernel(func: Any) -> bool:
    """Whether an operation is one of these."""
    return func.__name__ in _KERNELS


def _index(values: Values, faked: Callable[[Tensor], Tensor], tensor: Tensor, indices: Sequence[Tensor | None]) -> Any:
    """Masks become the positions where they are true, as CUDA makes them before it takes these."""
    positions: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            positions.append(index)
            continue
        mask = values.read(index)
        if mask is None:
            return None
        positions += [faked(part) for part in _real(lambda mask=mask: mask.nonzero().unbind(1))]  # type: ignore[misc]
    return aten.index.Tensor(tensor, positions)


def _masked_select(values: Values, _: Any, tensor: Tensor, mask: Tensor) -> Any:
    real = values.read(mask)
    if real is None:
        return None
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)  # type: ignore[no-untyped-call]
    return tensor.new_empty(int(_real(lambda: real.expand(shape).sum().item())))


def _histc(
    values: Values, faked: Callable[[Tensor], Tensor], tensor: Tensor, bins: int = 100, min: Any = 0, max: Any = 0
) -> Any:
    """CUDA counts whole numbers as well, which a CPU does not."""
    real = values.read(tensor)
    if real is None:
        return tensor.new_empty(bins)
    return faked(_real(lambda: real.double().histc(bins, min, max).to(real.dtype)))


def _grouped_mm(
    _: Values,
    __: Any,
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: Any = None,
) -> Any:
    """Any floating type, as the real kernels take it; torch's fake one takes bfloat16 only (torch 2.13).

    Rows are padded to 16 bytes: ``create_grouped_gemm_output_tensor`` in ATen/native/GroupedMMUtils.h.
    """
    if a.dim() == b.dim() == 2:
        if offs is None:
            return None
        shape = (offs.shape[0], a.shape[0], b.shape[1])
    else:
        rows = (a.shape[0], a.shape[1]) if a.dim() == b.dim() else (a.shape[0],) if a.dim() == 2 else (a.shape[1],)
        shape = (*rows, b.shape[-1])
    step = 16 // a.element_size()
    row = -(-shape[-1] // step) * step
    stride = (row, 1) if len(shape) == 2 else (shape[1] * row, row, 1)
    return a.new_empty_strided(shape, stride, dtype=out_dtype or a.dtype)


def _pack(values: Values, faked: Callable[[Tensor], Tensor], tensor: Tensor, lengths: Tensor, batch_first: bool) -> Any:
    """Steps of all sequences one after the other, and how many sequences each step has; the latter on the host."""
    real = values.read(lengths)
    if real is None:
        return None
    ends: list[int] = _real(real.tolist)
    sizes = _real(lambda: torch.tensor([sum(end > step for end in ends) for step in range(max(ends))]))
    return tensor.new_empty((sum(ends), *tensor.shape[2:])), faked(sizes)


def _number(values: Values, _: Any, tensor: Tensor) -> Any:
    """A loss or a factor that an optimizer reads, also in the middle of torch's own code."""
    if not values.in_update or not tensor.is_floating_point():
        return None
    values.assumptions[assumed_values.COMPARED] = None
    return values.falling()


def _ctc_loss(
    values: Values,
    _: Any,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    *options: Any,
    **more: Any,
) -> Any:
    """The loss of each sample, and the probabilities of all prefixes, which backward needs."""
    if isinstance(target_lengths, Tensor):
        real = values.read(target_lengths)
        if real is None:
            return None
        longest = int(_real(lambda: real.max().item()))
    else:
        longest = max(target_lengths)
    steps, samples = log_probs.shape[0], log_probs.shape[1] if log_probs.dim() == 3 else 1
    return log_probs.new_empty(samples), log_probs.new_empty((samples, steps, 2 * longest + 1))


def _ctc_loss_backward(_: Any, __: Any, grad: Tensor, log_probs: Tensor, *options: Any, **more: Any) -> Any:
    return torch.empty_like(log_probs)


def _real(compute: Callable[[], Any]) -> Any:
    with torch_private.without_modes(), torch.no_grad():
        return compute()


_KERNELS: dict[str, Callable[..., Any]] = {
    "index.Tensor": _index,
    "_grouped_mm.default": _grouped_mm,
    "_pack_padded_sequence.default": _pack,
    "_local_scalar_dense.default": _number,
    "masked_select.default": _masked_select,
    "histc.default": _histc,
    "_ctc_loss.default": _ctc_loss,
    "_ctc_loss.Tensor": _ctc_loss,
    "_ctc_loss_backward.default": _ctc_loss_backward,
    "_ctc_loss_backward.Tensor": _ctc_loss_backward,
}
