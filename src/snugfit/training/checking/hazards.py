"""What would make a job train wrongly although it runs, found by looking: at layers, weights, types and data.

Entry points: ``Hazard`` and one function per place that is looked at. What has to be run to be found is
``full_batch``'s and ``repetition``'s.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from snugfit.plans import Plan
from snugfit.training import norms, splitting
from snugfit.training.checking.divisions import Division
from snugfit.training.checking.observing import OutOfRange
from snugfit.training.diagnosing import ranges
from snugfit.training.islands import HALF

_MASKING = ("add", "sub", "mul", "where", "masked_fill", "to", "half", "type", "type_as", "full_like")
_MIXED = ("16-mixed", "bf16-mixed")


@dataclass(frozen=True, slots=True)
class Hazard:
    """Something that makes training differ from what was asked for."""

    kind: str
    'A name such as ``"batch-norm"``; ``check.KINDS`` lists them.'
    module: str
    'Fully qualified name of the module; ``""`` for the loss function, the batch or the job as a whole.'
    message: str
    "What happens, with numbers, and the way out."


def of_batch_norms(model: nn.Module, plan: Plan) -> list[Hazard]:
    """BatchNorm layers that normalise each micro-batch by itself."""
    number = plan.accumulation_steps
    if number == 1 or plan.norm_policy == "frozen":
        return []
    pooled = "; norm_policy='window' only pools the running statistics" if plan.norm_policy == "window" else ""
    return [
        Hazard(
            "batch-norm",
            name,
            f"not equivalent: {type(layer).__name__} normalises each of {number} micro-batches by its own mean and "
            f"variance, not by the batch's{pooled}; use norm_policy='frozen', snugfit.norms.to_group_norm, or "
            f"micro_batch_size={plan.samples_per_rank}",
        )
        for name, layer in norms.batch_norms(model)
        if norms.couples(layer)
    ]


def of_half_weights(model: nn.Module, plan: Plan) -> list[Hazard]:
    """Trainable half-precision weights, whose gradients a loss scale cannot be divided out of; frozen ones are fine."""
    found = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.dtype in HALF
    ]
    if plan.precision != "16-mixed" or not found:
        return []
    modules = {name.rpartition(".")[0] for name, _ in found}
    first, parameter = found[0]
    names = ", ".join(name for name, _ in found[:6]) + (", ..." if len(found) > 6 else "")
    are = "is a trainable" if len(found) == 1 else f"are {len(found)} trainable"
    return [
        Hazard(
            "half-precision-weight",
            next(iter(modules)) if len(modules) == 1 else "",
            f"{names} {are} {ranges.type_name(parameter)} weight{'s' * (len(found) > 1)}: 16-mixed keeps trainable "
            "weights in float32 and casts them where it pays; convert them before the optimizer is made: "
            f"model.get_parameter({first!r}).data = model.get_parameter({first!r}).data.float()",
        )
    ]


def of_data(batch: Any) -> list[Hazard]:
    """Values of a batch that are not finite."""
    found = []
    for path, tensor in splitting.named_tensors(batch):
        level = ranges.badness(tensor)
        if level:
            message = (
                f"{path} holds {ranges.num_bad(tensor)} of {tensor.numel()} values that are "
                f"{('inf', 'NaN or inf')[level - 1]}: every gradient of its micro-batch is lost; clean the data, or "
                "mask such samples"
            )
            has_nan = level == 2
            found.append(Hazard("non-finite-data", "", message) if has_nan else Hazard("infinite-data", "", message))
    return found


def of_ranges(found: Iterable[OutOfRange], precision: str) -> list[Hazard]:
    """Operations that left the range of their type."""
    hazards = []
    for one in found:
        place = f"{one.op} in {one.module!r}" if one.module else f"{one.op} in the model itself or in the loss function"
        if one.is_masked_row:
            way = (
                "let every row keep one position, mask with a finite value such as torch.finfo(scores.dtype).min / 2, "
                "or use F.scaled_dot_product_attention, which gives such rows 0"
            )
            hazards.append(Hazard("fully-masked-row", one.module, f"{place} has {one.what}; {way}"))
            continue
        way = f"snugfit.precision.keep_fp32(model, {one.module!r})" if one.module else "call .float() on its inputs"
        way = f"compute it in float32: {way}"
        if one.op in _MASKING:
            way = f"mask with half of the type's lowest value (torch.finfo(dtype).min / 2), never with two, or {way}"
        other = "; precision='bf16-mixed' has the range of float32" if precision == "16-mixed" else ""
        hazards.append(Hazard("half-range", one.module, f"{place} makes {one.what}; {way}{other}"))
    return hazards


def of_division(division: Division, number: int) -> Hazard:
    """A loss that is divided by a number of micro-batches before the engine averages over them."""
    divisor = f"{division.divisor:g}"
    by = divisor if division.is_alone else "what is called one of accumulation"
    plan = (
        "the plan's number of micro-batches" if division.divisor == number else f"the plan has {number} micro-batches"
    )
    times = f"{divisor} times" if division.is_alone else "as many times"
    return Hazard(
        "double-division",
        "",
        f"the loss is divided by {by} for accumulation ({plan}), and the engine averages over micro-batches by itself: "
        f"loss and gradient are {times} too small; remove the division at {division.where}: {division.text}",
    )


def of_functions(functions: Mapping[str, tuple[type, str]], precision: str, error: str) -> list[Hazard]:
    """Custom autograd functions whose backward clashes with the types that autocast gave their forward."""
    if precision not in _MIXED:
        return []
    return [
        Hazard(
            "undecorated-function",
            owner,
            f"{name} has its own backward and is not decorated for autocast: under {precision} {error}; decorate "
            "forward with torch.amp.custom_fwd(device_type=...) and backward with torch.amp.custom_bwd(device_type="
            f"...), or run it in float32: snugfit.precision.keep_fp32(model, {owner!r})",
        )
        for name, (kind, owner) in functions.items()
        if not is_decorated(kind)
    ]


def is_decorated(function: Any) -> bool:
    """Whether a custom autograd function says by ``custom_fwd`` what it does under autocast."""
    code = getattr(function.forward, "__code__", None)
    return code is not None and code.co_filename.replace("\\", "/").endswith("torch/amp/autocast_mode.py")
