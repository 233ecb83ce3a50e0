"""How far values are from the ends of their types: head-room of exponentials, gradients too small for half precision.

Entry points: ``badness``, ``head_room`` and ``underflow``. Everything here reads values, so nothing of a training
step may call it; and nothing here has a graph, which would save tensors that a recomputation does not.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from snugfit.training.torch_private import is_inside_transform

FP16_SMALLEST = 2.0**-24
BF16_SMALLEST = 2.0**-133
"Smallest subnormals: a smaller value is lost."

_EXPONENTIALS = {"exp", "expm1", "exp2", "softmax", "log_softmax", "logsumexp", "cross_entropy", "logcumsumexp"}
_ATTENTION = "scaled_dot_product_attention"
_SOFTMAX = {"softmax", "log_softmax", "logsumexp"}


@dataclass(frozen=True, slots=True)
class HeadRoom:
    """The largest input of an exponential or softmax, against what its type can take the exponential of."""

    module: str
    op: str
    dtype: str
    largest: float
    "Largest finite input; of an attention, largest score before the softmax."
    limit: float
    "Natural logarithm of the largest value of the type: 11.09 for float16, 88.7 for bfloat16 and float32."
    masked_fraction: float
    "Share of the inputs that are -inf."
    num_masked_rows: int
    "Rows of a softmax whose inputs are all -inf: their result is NaN."

    def joined(self, other: "HeadRoom") -> "HeadRoom":
        """The worst of two calls."""
        return replace(
            self,
            largest=max(self.largest, other.largest),
            masked_fraction=max(self.masked_fraction, other.masked_fraction),
            num_masked_rows=max(self.num_masked_rows, other.num_masked_rows),
        )


@dataclass(frozen=True, slots=True)
class Underflow:
    """Share of a module's gradient values, other than 0, that are too small for a half-precision type."""

    module: str
    fp16_fraction: float
    "At the loss scale of the window."
    bf16_fraction: float
    num_values: int


def is_readable(tensor: Tensor) -> bool:
    """Whether a tensor has values to look at; one that ``torch.func.vmap`` is mapping over has none of its own."""
    return tensor.device.type != "meta" and not is_inside_transform(tensor)


@torch.no_grad()
def badness(tensor: Tensor) -> int:
    """0 for finite values only, 1 with an infinite one, 2 with NaN; waits for the device."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not is_readable(tensor) or tensor.numel() == 0:
        return 0
    values = _stored(tensor)
    if values.is_nested or values.is_quantized or values.layout != torch.strided:
        return 0
    if bool(torch.isfinite(values).all()):
        return 0
    return 2 if bool(torch.isnan(values).any()) else 1


@torch.no_grad()
def num_bad(tensor: Tensor) -> int:
    """Number of values that are not finite."""
    return int((~torch.isfinite(tensor)).sum())


@torch.no_grad()
def largest(tensors: Iterable[Tensor]) -> float:
    """Largest magnitude among the finite values of some tensors; 0 if there are none."""
    found = 0.0
    for tensor in tensors:
        if not is_readable(tensor):
            continue
        if tensor.is_floating_point() and tensor.numel() and tensor.layout == torch.strided and not tensor.is_nested:
            values = tensor.detach()
            found = max(found, float(torch.where(torch.isfinite(values), values, 0).abs().max()))
    return found


@torch.no_grad()
def lowest(tensor: Tensor) -> float:
    """Smallest of the finite values of a tensor; 0 if there is none."""
    if not tensor.numel() or tensor.layout != torch.strided or tensor.is_nested:
        return 0.0
    values = tensor.detach()
    values = values[torch.isfinite(values)]
    return float(values.min()) if values.numel() else 0.0


@torch.no_grad()
def head_room(module: str, op: str, args: Any, kwargs: Any, outputs: Iterable[Tensor]) -> HeadRoom | None:
    """The head-room of an operation that takes exponentials; None for any other.

    Args:
        module: Where it ran.
        op: Its name.
        args: Its positional arguments.
        kwargs: Its arguments by name.
        outputs: What it returned; their type is the one that it worked in.
    """
    given = kwargs.get("input", args[0] if args else None)
    if any(isinstance(one, Tensor) and not is_readable(one) for one in [given, *args]):
        return None
    if op == _ATTENTION:
        given = _scores(*args, **kwargs)
    elif op not in _EXPONENTIALS:
        return None
    output = next(iter(outputs), None)
    if not isinstance(given, Tensor) or output is None or not given.is_floating_point() or given.numel() == 0:
        return None
    values = given.detach().float()
    masked = values == -math.inf
    finite = values[torch.isfinite(values)]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else -1) if op in _SOFTMAX else -1
    rows = 0
    if op == _ATTENTION or (op in _SOFTMAX and isinstance(dim, int) and values.dim()):
        rows = int(masked.all(dim).sum())
    if not finite.numel() and not rows:
        return None
    top = float(finite.max()) if finite.numel() else -math.inf
    limit = math.log(torch.finfo(output.dtype).max)
    return HeadRoom(module, op, type_name(output), top, limit, float(masked.float().mean()), rows)


@torch.no_grad()
def underflow(model: nn.Module, loss_scale: float) -> tuple[Underflow, ...]:
    """Gradient values that half precision loses, by module, worst first; gradients are the unscaled ones.

    Args:
        model: Its gradients are read.
        loss_scale: What fp16 gradients are multiplied by.
    """
    counts: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        sizes = _stored(parameter.grad).abs().double()
        sizes = sizes[torch.isfinite(sizes) & (sizes > 0)]
        row = counts.setdefault(name.rpartition(".")[0], [0, 0, 0])
        row[0] += int((sizes * loss_scale < FP16_SMALLEST).sum())
        row[1] += int((sizes < BF16_SMALLEST).sum())
        row[2] += sizes.numel()
    rows = [Underflow(name, fp16 / n, bf16 / n, n) for name, (fp16, bf16, n) in counts.items() if n]
    return tuple(sorted(rows, key=lambda row: -row.fp16_fraction))


def _stored(tensor: Tensor) -> Tensor:
    """The values of a tensor, of a sparse one those that it stores."""
    return tensor.detach().coalesce().values() if tensor.layout == torch.sparse_coo else tensor.detach()


def type_name(tensor: Tensor) -> str:
    """``float16`` for ``torch.float16``."""
    return str(tensor.dtype).removeprefix("torch.")


def _scores(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **other: Any
) -> Tensor:
    """The scores of an attention before its softmax, computed again."""
    query, key = query.detach().float(), key.detach().float()
    if key.shape[-3] != query.shape[-3] and query.dim() > 3:  # grouped queries
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scale = other.get("scale") or 1 / math.sqrt(query.shape[-1])
    scores = query @ key.transpose(-2, -1) * scale
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    if other.get("is_causal"):
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores
