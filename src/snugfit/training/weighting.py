"""The algebra of a window: what each micro-batch's loss is multiplied by, so that the sum is the mean of all.

Entry points: ``agree`` before a window, ``term`` and ``merged`` for what a loss function returned. Running anything
is ``step``'s.

NOTE [How micro-batches are weighted]
1. The window's loss is sum(total_i) / C: total_i is the sum of the loss over the counted units of micro-batch i, C
   the count of the window over all ranks. A loss that is a mean is total_i / count_i.
2. If all counts are known and equal, on all ranks, backward runs on mean_i / N: the plain loop, bit for bit.
3. Else it runs on mean_i * (count_i / R) and gradients are multiplied once by R * ranks / C at the end (ranks: DDP
   has divided by them). R is a power of two near C / ranks, so that no partial sum leaves the range of its type.
4. A loss that reports its own count is only known afterwards: R is then near the last window's count, and in the
   first window near what its first micro-batch foretells. Several of them: see ``losses``.
5. A micro-batch whose count is 0 is not run; a reported count of 0 is not back-propagated. 0 * NaN is NaN.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from snugfit.errors import BatchError, PlanError, UnsupportedError
from snugfit.jobs import Loss

Number: TypeAlias = float | Tensor
"A number of the host, or a 0-dimensional tensor whose value stays on the device."
Reduce: TypeAlias = Callable[[Sequence[Number]], Sequence[Number]]


@dataclass(frozen=True, slots=True)
class Weighting:
    """How the micro-batches of a window are weighted, agreed by all ranks; see the NOTE, 2 and 3."""

    total: float | None
    equal: bool
    reference: float
    in_step: bool = True
    "Whether all ranks run as many micro-steps, so that they can reduce gradients in each."


def agree(counts: Sequence[float | None], reduce_counts: Reduce, ranks: int) -> Weighting:
    """Settle how a window is weighted, from the counts that are known before it; the same on all ranks.

    Raises:
        BatchError: There is no micro-batch on any rank.
        UnsupportedError: Some ranks have nothing to train on, others have.
    """
    known = [count for count in counts if count is not None]
    first = known[0] if known else 0.0
    alike = len(known) == len(counts) and all(count == first for count in known)
    number, runs = len(counts), sum(count != 0 for count in counts)
    local = [sum(known), not alike, len(known) < number, sum(known) == 0]
    pairs = [first, first * first, number, number * number, runs, runs * runs]
    summed = reduce_counts([float(value) for value in (*local, *pairs)])
    total, unlike, unknown, empty, firsts, squares, numbers, number_squares, run, run_squares = map(float, summed)
    if numbers == 0:
        raise BatchError(
            "a window without micro-batches",
            got="an empty list",
            expected="at least one micro-batch",
            hint="leave the call out where a loader has nothing left, or iterate over engine.windows(loader)",
        )
    # equal on all ranks: sums and sums of squares agree only then (Cauchy and Schwarz)
    as_many = ranks * number_squares == numbers * numbers
    in_step = as_many and ranks * run_squares == run * run
    if unknown:
        return Weighting(None, False, 1.0, in_step)
    if empty and total > 0:
        raise UnsupportedError(
            "a rank has nothing to train on while others have",
            got=f"{int(empty)} of {ranks} ranks count 0 in this window",
            expected="a count above 0 on every rank, or on none",
            hint="give every rank a share of each batch",
        )
    equal = not unlike and ranks * squares == firsts * firsts and as_many
    return Weighting(total, equal, float(power_of_two(total / ranks)), in_step)


def power_of_two(value: Number) -> Number:
    """The largest power of two that is not above a positive number; 1 for 0."""
    if isinstance(value, Tensor):
        return torch.where(value > 0, torch.exp2(torch.floor(torch.log2(value))), 1.0)
    return 2.0 ** math.floor(math.log2(value)) if value > 0 else 1.0


def references(counts: Sequence[Number] | None, before: Sequence[Number | None] | None) -> tuple[Number | None, ...]:
    """R of the next window for losses that report their own counts; one that counted nothing keeps what it had.

    Args:
        counts: What the window counted per rank; None: no loss reported anything.
        before: R of the window.
    """
    old = tuple(before or ())
    if counts is None:
        return old
    found: list[Number | None] = []
    for k, count in enumerate(counts):
        last = old[k] if k < len(old) else None
        if isinstance(count, Tensor):
            found.append(torch.where(count > 0, power_of_two(count), 1.0 if last is None else last))
        else:
            found.append(power_of_two(count) if count > 0 else last)
    return tuple(found)


def _checked(value: Any, name: str) -> Tensor:
    """The loss as a scalar of at least single precision with a graph."""
    if isinstance(value, Tensor) and value.dim() == 0 and value.requires_grad and value.is_floating_point():
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    got, hint = type(value).__name__, "return the loss tensor from the loss function, as in `return value`"
    if isinstance(value, Tensor):
        got = f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
        hint = "reduce it with .mean()"
        if value.dim() == 0:
            got += ", without a graph"
            hint = "keep .item(), .detach() and torch.no_grad() out of the loss function, and train some parameter"
    raise PlanError(
        f"{name} is not a scalar that can be back-propagated",
        got=got,
        expected="a 0-dimensional tensor of floating point that depends on trainable parameters",
        hint=hint,
    )


def _further(value: Any, count: Number | None, only: Any) -> "Term":
    """A loss behind the first of a sequence; models that return more than their loss are told so."""
    try:
        return term(value, count, only)
    except PlanError as error:
        raise PlanError(
            "the loss function returned a sequence, which is taken as several losses",
            got=f"another entry behind the first: {error.got}",
            expected="a scalar, or scalars only",
            hint=f"return the first entry alone if the others are no losses, else {error.hint}",
        ) from error


@dataclass(frozen=True, slots=True)
class Term:
    """One loss of a micro-batch, whatever form it was given in."""

    value: Tensor
    is_sum: bool
    "A sum over the counted units; else their mean."
    count: Number | None
    "What it reports itself; None: the count of the micro-batch."
    inputs: list[Tensor] | None
    "The parameters that it may reach; None: all."
    metrics: Mapping[str, tuple[Any, Any]]


def terms(value: Any, count: Number | None, only: Any) -> list[Term]:
    """Read what a loss function returned: one loss, or a sequence of them.

    Args:
        value: What it returned.
        count: What a mean is taken over, if given beside it.
        only: What it may reach, if given beside it.

    Raises:
        PlanError: Nothing in it, or not scalars that can be back-propagated.
    """
    values = value if isinstance(value, (list, tuple)) else [value]
    if not values:
        raise PlanError(
            "the loss function returned no loss",
            got=f"an empty {type(value).__name__}",
            expected="a scalar, a Loss, or a sequence of them",
            hint="return the loss tensor from the loss function, or a Loss with a count of 0 where nothing counts",
        )
    return [term(one, count, only) if i == 0 else _further(one, count, only) for i, one in enumerate(values)]


def check_function(loss: object) -> None:
    """Refuse one of torch's own losses, which compare scores with labels, as a loss function.

    Raises:
        PlanError: It is one.
    """
    kind = type(loss) if isinstance(loss, nn.Module) else loss
    module, name = getattr(kind, "__module__", None) or "", getattr(kind, "__name__", type(loss).__name__)
    if module in ("torch.nn.modules.loss", "torch.nn.functional"):
        raise PlanError(
            f"loss={name} compares scores with labels; it does not run the model",
            got=f"torch's {name}",
            expected="a function of (model, micro_batch)",
            hint="write def loss(model, micro_batch): return criterion(model(micro_batch['x']), micro_batch['y'])",
        )


def term(value: Any, count: Number | None, only: Any) -> Term:
    """Read one of the values that a loss function may return.

    Args:
        value: A mean, or a ``Loss``.
        count: What it is taken over, if given beside it.
        only: What it may reach, if given beside it.

    Raises:
        PlanError: Not a scalar that can be back-propagated.
    """
    if isinstance(value, Loss):
        own = value.count if count is None else count
        reach = value.only if only is None else only
        metrics = {} if value.metrics is None else value.metrics
        return Term(_checked(value.total, "Loss.total"), True, own, _inputs(reach), metrics)
    return Term(_checked(value, "the loss"), False, count, _inputs(only), {})


def _inputs(only: Any) -> list[Tensor] | None:
    """The trainable parameters that a loss may reach; None: all.

    Raises:
        PlanError: None at all, or no parameters, or an iterator, which is empty the second time.
    """
    if only is None:
        return None
    parameters = list(only.parameters()) if isinstance(only, nn.Module) else only
    if isinstance(parameters, Iterator) or not isinstance(parameters, Iterable) or isinstance(parameters, Tensor):
        raise _bad_only(f"only={type(only).__name__}", "list it once: only=list(module.parameters()), or only=module")
    listed = list(parameters)
    strangers = [type(one).__name__ for one in listed if not isinstance(one, Tensor)]
    if strangers:
        raise _bad_only(f"a {strangers[0]} among them", "pass only=module, or a list of parameters")
    trainable = [parameter for parameter in listed if parameter.requires_grad]
    if not trainable:
        raise _bad_only(
            f"only={type(only).__name__} with {len(listed)} parameters, none of which requires a gradient",
            "leave a loss that trains nothing out of what the loss function returns",
        )
    return trainable


def _bad_only(got: str, hint: str) -> PlanError:
    return PlanError(
        "only= does not name parameters that a loss may reach",
        got=got,
        expected="a module, or a sequence of parameters, at least one of them trainable",
        hint=hint,
    )


def merged(
    weighted: Sequence[tuple[Tensor | None, list[Tensor] | None]],
) -> list[tuple[Tensor, list[Tensor] | None]]:
    """One backward for all losses that may reach everything, and one for each other."""
    free: Tensor | None = None
    bound: list[tuple[Tensor, list[Tensor] | None]] = []
    for tensor, inputs in weighted:
        if tensor is None:
            continue
        if inputs is None:
            free = tensor if free is None else free + tensor
        elif inputs:
            bound.append((tensor, inputs))
    return bound if free is None else [*bound, (free, None)]


def as_float(count: Tensor) -> Tensor:
    """A count as precise as its device can hold it."""
    return count.to(torch.float32 if count.device.type == "mps" else torch.float64)
