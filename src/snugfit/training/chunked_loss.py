"""The last linear layer and cross entropy in one, a chunk of rows at a time: all logits never exist at once.

Entry point: ``chunked_cross_entropy``. Backward computes each chunk's logits again, so that neither they nor their
gradients outlive their chunk; the price is one matrix product more. How many chunks a plan asks for is ``Planned``'s.
Class probabilities as labels are left out: they are as large as the logits.

NOTE [What does not cancel]
1. Of each row the highest logit and the sum of the other classes' exponentials are kept, not the logarithm of the sum:
   beside logits of 10 a normaliser is rounded by 5e-7, and with it each probability. The loss of a row that is nearly
   right, and the label's probability less one, are made of that sum and not of a difference.
2. The label's gradient is as large as all others together. It is left out of the matrix products, where every small
   summand would be rounded to it, and added afterwards, in an order that does not change from run to run.
3. What there is one of for each row, and the bias's gradient, is float64: an error there is one of everything that a
   row gives, and does not average out as that of single logits does.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from snugfit.errors import PlanError, UnsupportedError
from snugfit.training import loss_arguments

_FEW, _SUMMED = 4, 128
"Of fewer rows, how many classes are summed in one go."
_planned: ContextVar["Planned | None"] = ContextVar("snugfit_loss_chunks", default=None)


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunks: int | None,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
) -> Tensor:
    """``F.cross_entropy(F.linear(hidden, weight, bias) * logit_scale, labels, ...)`` in chunks of rows.

    Logits are computed in the type of autocast where it is on, else in that of ``hidden``; softmax, the loss and the
    sum of the weight's gradient in float32 at least. Memory beside inputs and gradients is that of one chunk's logits;
    for half-precision weights there is one float32 copy of their gradient. A second derivative is not defined.

    Args:
        hidden: What goes into the last layer, ``(..., features)``.
        weight: Of the last layer, ``(classes, features)``; may be tied to the embedding's.
        labels: Class of each row, int64, of the shape of ``hidden`` without its last dimension. Not shifted here.
        chunks: Number of chunks, of about the same number of rows; more than rows is as many as rows. A plan's
            ``loss_chunks`` above 1 comes before it; None leaves it to the plan.
        bias: Of the last layer, ``(classes,)``.
        class_weight: Weight of each class, ``(classes,)``; ``weight`` of ``F.cross_entropy``.
        ignore_index: Label of rows that do not count.
        reduction: ``"mean"`` over the rows (or class weights) that count, ``"sum"`` or ``"none"``.
        label_smoothing: Between 0 and 1, as in ``F.cross_entropy``.
        logit_scale: Factor of the logits.

    Returns:
        The loss, float32 at least; of the shape of ``labels`` for ``"none"``.

    Raises:
        PlanError: Shapes, types or options that do not fit.

    Example:
        >>> hidden, weight = torch.ones(6, 4), torch.ones(10, 4)
        >>> labels = torch.zeros(6, dtype=torch.long)
        >>> round(chunked_cross_entropy(hidden, weight, labels, chunks=3).item(), 4)
        2.3026
    """
    loss_arguments.check(hidden, weight, labels, bias, class_weight)
    loss_arguments.check_options(ignore_index, reduction, label_smoothing, logit_scale)
    number = _number_of_chunks(chunks)
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        hidden = hidden.to(dtype)
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    number = max(1, min(number, rows.shape[0]))
    wide = torch.promote_types(hidden.dtype, torch.float32)
    weights = None if class_weight is None else class_weight.detach().to(wide)
    losses: Tensor = _Rows.apply(  # type: ignore[no-untyped-call]
        rows, weight, bias, targets, weights, number, ignore_index, label_smoothing, logit_scale
    )
    if reduction == "none":
        return losses.reshape(labels.shape).to(wide)
    if reduction == "sum":
        return losses.sum().to(wide)
    counted = targets != ignore_index
    mass = counted if weights is None else weights[torch.where(counted, targets, 0)] * counted
    mass = mass.sum(dtype=losses.dtype)
    return (losses.sum() / mass).where(mass != 0, math.nan).to(wide)


class Planned:
    """The number of chunks that a plan asks for, for as long as a window is open.

    Args:
        chunks: ``Plan.loss_chunks``; 1 leaves every call its own number.
    """

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self.is_used = False

    @contextmanager
    def window(self) -> Iterator[None]:
        """Forwards and recomputations in this context use the plan's number."""
        token = _planned.set(self)
        try:
            yield
        finally:
            _planned.reset(token)

    @contextmanager
    def forward(self, autocast: AbstractContextManager[Any]) -> Iterator[None]:
        """The context of one forward; at its end the plan's number must have been used.

        Raises:
            PlanError: The plan asks for chunks and the loss never calls ``chunked_cross_entropy``.
        """
        with self.window(), autocast:
            yield
        if self.chunks > 1 and not self.is_used:
            raise PlanError(
                "the plan cuts a loss that is not cut",
                got=f"loss_chunks={self.chunks}, and the loss did not call snugfit.chunked_cross_entropy",
                expected="a loss that calls snugfit.chunked_cross_entropy, or loss_chunks=1",
                hint="compute the last layer and the loss with snugfit.chunked_cross_entropy(hidden, weight, labels, "
                "chunks=None), or leave loss_chunks out",
            )


class _Rows(torch.autograd.Function):
    """Loss of every row in a wide type; ignored rows have 0. See NOTE [What does not cancel]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        class_weight: Tensor | None,
        number: int,
        ignore_index: int,
        smoothing: float,
        scale: float,
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        highest = torch.empty(hidden.shape[:1], dtype=wide, device=hidden.device)
        losses, others = (torch.empty_like(highest, dtype=_precise(highest)) for _ in range(2))
        narrow, narrow_bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        with _plain(hidden.device.type):
            for part in _parts(hidden.shape[0], number):
                logits = _logits(hidden[part], narrow, narrow_bias, scale)
                counted, labels = _labels(targets[part], ignore_index)
                highest[part] = logits.amax(1)
                logits.sub_(highest[part].unsqueeze(1))
                picked = _picked(logits, labels).to(losses.dtype)
                smooth = _smoothed(logits, class_weight) if smoothing else None
                others[part] = logits.exp_().scatter_(1, labels, 0).sum(1)
                normaliser = torch.log1p(others[part] + torch.expm1(picked))
                loss = normaliser - picked
                if class_weight is not None:
                    loss = loss * class_weight[labels.squeeze(1)]
                if smooth is not None:
                    mass = logits.shape[1] if class_weight is None else class_weight.sum(dtype=losses.dtype)
                    loss = loss * (1 - smoothing) + (normaliser * mass - smooth) * (smoothing / logits.shape[1])
                losses[part] = torch.where(counted, loss, 0)
                del logits
        ctx.save_for_backward(hidden, weight, bias, targets, class_weight, highest, others)
        ctx.options = (number, ignore_index, smoothing, scale)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "the chunked loss has no second derivative",
                got="a backward with create_graph=True through chunked_cross_entropy",
                expected="create_graph=False",
                hint="use torch.nn.functional.cross_entropy where gradients are differentiated again",
            )
        hidden, weight, bias, targets, class_weight, highest, others = ctx.saved_tensors
        number, ignore_index, smoothing, scale = ctx.options
        wide = highest.dtype
        narrow, narrow_bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias, dtype=others.dtype) if bias is not None and ctx.needs_input_grad[2] else None
        of_label = torch.empty_like(others).unsqueeze(1)
        with _plain(hidden.device.type):
            for part in _parts(hidden.shape[0], number):
                rows = hidden[part]
                logits = _logits(rows, narrow, narrow_bias, scale)
                counted, labels = _labels(targets[part], ignore_index)
                upstream = torch.where(counted, gradient[part], 0).mul_(scale).unsqueeze(1)
                exponentials = logits.sub_(highest[part].unsqueeze(1)).exp_()
                slope, of_label[part] = _slopes(
                    exponentials, others[part].unsqueeze(1), labels, upstream, class_weight, smoothing
                )
                del logits, exponentials
                if of_bias is not None:
                    of_bias += slope.sum(0)
                slope = slope.to(hidden.dtype)
                if of_hidden is not None:
                    of_hidden[part] = _product(slope, narrow)
                if of_weight is not None:
                    if hidden.dtype == wide:
                        torch.addmm(of_weight, slope.t(), rows, out=of_weight)  # which FLOP counters know
                    else:
                        of_weight += slope.t() @ rows
                del slope
            for part in _parts(hidden.shape[0], number):
                own = _labels(targets[part], ignore_index)[1].squeeze(1)
                slope = of_label[part].to(wide)
                if of_hidden is not None:
                    of_hidden[part] += slope * narrow[own]
                if of_weight is not None:
                    of_weight.index_put_((own,), slope * hidden[part], accumulate=True)
                if of_bias is not None:
                    of_bias.index_put_((own,), of_label[part].squeeze(1), accumulate=True)
        return (
            of_hidden,
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(bias.dtype),
            *[None] * 6,
        )


def _slopes(
    exponentials: Tensor,
    others: Tensor,
    labels: Tensor,
    upstream: Tensor,
    class_weight: Tensor | None,
    smoothing: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of some rows' logits: of all classes but the label's, over the exponentials, and of the label's."""
    exponential = exponentials.gather(1, labels).to(others.dtype)
    total = others + exponential
    hard = upstream if class_weight is None else upstream * class_weight[labels]
    dtype = exponentials.dtype
    if not smoothing:
        return exponentials.mul_((hard / total).to(dtype)).scatter_(1, labels, 0), -hard * (others / total)
    share = upstream * (smoothing / exponentials.shape[1])
    hard = hard * (1 - smoothing)
    soft = share * (exponentials.shape[1] if class_weight is None else class_weight.sum(dtype=others.dtype))
    own = share if class_weight is None else share * class_weight[labels]
    of_label = soft * (exponential / total) - own - hard * (others / total)
    exponentials.mul_(((hard + soft) / total).to(dtype))
    share = share.to(dtype)
    if class_weight is None:
        exponentials.sub_(share)
    else:
        exponentials.addr_(share.squeeze(1), class_weight, alpha=-1)
    return exponentials.scatter_(1, labels, 0), of_label


def _product(slope: Tensor, weight: Tensor) -> Tensor:
    """What goes back from the logits of some rows."""
    if len(slope) >= _FEW:
        return slope @ weight
    # of a few rows a kernel adds up class after class, and rounds the sum each time
    total = torch.zeros(len(slope), weight.shape[1], dtype=_precise(weight), device=weight.device)
    for some, part in zip(torch.split(slope, _SUMMED, 1), torch.split(weight, _SUMMED), strict=True):
        total += some @ part
    return total


def _labels(targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Which rows count, and the label of each as a column; 0 where it is ignored."""
    counted = targets != ignore_index
    return counted, torch.where(counted, targets, 0).unsqueeze(1)


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Logits of some rows in a wide type; a new tensor that may be overwritten."""
    logits = F.linear(rows, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if scale == 1 else logits.mul_(scale)


class LabelError(PlanError, IndexError):
    """A label that is no class; an ``IndexError`` as ``F.cross_entropy`` raises. A GPU stops at its own assertion."""


def _picked(logits: Tensor, labels: Tensor) -> Tensor:
    try:
        return logits.gather(1, labels).squeeze(1)
    except RuntimeError as error:
        if "out of bounds" not in str(error):
            raise
        raise LabelError(
            "chunked_cross_entropy: a label is no class",
            got=f"labels from {int(labels.min())} to {int(labels.max())}, those that are ignored left out",
            expected=f"0 to {logits.shape[1] - 1}, or ignore_index",
            hint="mark rows that do not count with ignore_index (-100); head and labels need one vocabulary",
        ) from error


def _smoothed(logits: Tensor, class_weight: Tensor | None) -> Tensor:
    return logits.sum(1) if class_weight is None else logits @ class_weight


def _precise(numbers: Tensor) -> torch.dtype:
    """The type of what there is one of for each row or class."""
    return numbers.dtype if numbers.device.type == "mps" else torch.float64


def _parts(rows: int, number: int) -> Iterator[slice]:
    for i in range(number):
        yield slice(rows * i // number, rows * (i + 1) // number)


def _plain(device_type: str) -> AbstractContextManager[Any]:
    return torch.autocast(device_type, enabled=False)


def _number_of_chunks(given: int | None) -> int:
    planned = _planned.get()
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
        raise PlanError(
            "chunks must be a whole number of at least 1",
            got=f"chunks={given!r}",
            expected=">= 1, or None for the plan's loss_chunks",
            hint="pass chunks=8",
        )
    if planned is not None:
        planned.is_used = True
        if planned.chunks > 1:
            return planned.chunks
    return given or 1
