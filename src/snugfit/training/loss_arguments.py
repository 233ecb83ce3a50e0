"""What ``chunked_cross_entropy`` can be called with: everything that is wrong with tensors and options, by name.

Entry points: ``check`` and ``check_options``, called before anything is computed. Labels that are no class are found
where they are used, in ``chunked_loss``.
"""

import math
from typing import Any

import torch
from torch import Tensor

from snugfit.errors import PlanError

_REDUCTIONS = ("mean", "sum", "none")


def check(hidden: Any, weight: Any, labels: Any, bias: Any, class_weight: Any) -> None:
    """Refuse tensors that do not fit each other.

    Raises:
        PlanError: One is none, or has another shape, type or device than it should.
    """
    given = {"hidden": hidden, "weight": weight, "labels": labels, "bias": bias, "class_weight": class_weight}
    for name, value in given.items():
        if not isinstance(value, Tensor) and not (value is None and name in ("bias", "class_weight")):
            raise PlanError(
                f"chunked_cross_entropy: {name} is not a tensor",
                got=f"{name} is a {type(value).__name__}",
                expected="tensors: what goes into the last layer, that layer's weight, the labels",
                hint="pass head.weight (and bias=head.bias) instead of the layer",
            )
    tensors = {name: value for name, value in given.items() if value is not None}
    _check_shapes(tensors)
    _check_places(tensors)


def _check_shapes(given: dict[str, Tensor]) -> None:
    hidden, weight, labels = given["hidden"], given["weight"], given["labels"]
    features, classes = hidden.shape[-1:], weight.shape[:1]
    wrong = [name for name, tensor in given.items() if name != "labels" and not tensor.is_floating_point()]
    if weight.dim() != 2 or weight.shape[1:] != features or not weight.numel():
        wrong.append("weight")
    if labels.shape != hidden.shape[:-1] or labels.dtype != torch.int64:
        wrong.append("labels")
    wrong += [name for name in ("bias", "class_weight") if name in given and given[name].shape != classes]
    if wrong:
        raise PlanError(
            f"chunked_cross_entropy: {wrong[0]} does not fit the others",
            got=", ".join(f"{name} {tuple(one.shape)} {str(one.dtype)[6:]}" for name, one in given.items()),
            expected="hidden (..., features), weight (classes, features), labels (...) of int64, bias and "
            "class_weight (classes,), all but labels of floating point, and at least one feature and one class",
            hint="pass what goes into the last layer as hidden and its weight, not the logits; labels are classes, "
            "shifted by yourself",
        )


def _check_places(given: dict[str, Tensor]) -> None:
    device = given["hidden"].device
    wrong = [name for name, one in given.items() if one.device != device or one.layout != torch.strided]
    if wrong:
        raise PlanError(
            f"chunked_cross_entropy: {wrong[0]} is not where or what the others are",
            got=", ".join(f"{name} {one.device} {str(one.layout)[6:]}" for name, one in given.items()),
            expected="dense tensors on one device",
            hint=f"call {wrong[0]}.to_dense(), or {wrong[0]}.to(hidden.device)",
        )


def check_options(ignore_index: Any, reduction: Any, label_smoothing: Any, logit_scale: Any) -> None:
    """Refuse options outside of their range.

    Raises:
        PlanError: One is.
    """
    if isinstance(logit_scale, Tensor):
        raise PlanError(
            "chunked_cross_entropy: logit_scale is a tensor, which would get no gradient",
            got=f"logit_scale of shape {tuple(logit_scale.shape)}",
            expected="a number",
            hint="multiply the hidden states by a learnable scale: chunked_cross_entropy(hidden * scale, ...)",
        )
    is_right = (
        isinstance(reduction, str)
        and reduction in _REDUCTIONS
        and all(_is_number(value) for value in (ignore_index, label_smoothing, logit_scale))
        and isinstance(ignore_index, int)
        and abs(ignore_index) < 2**63
        and 0 <= label_smoothing <= 1
    )
    if not is_right:
        raise PlanError(
            "chunked_cross_entropy: an option is outside of its range",
            got=f"reduction={reduction!r}, label_smoothing={label_smoothing!r}, ignore_index={ignore_index!r}, "
            f"logit_scale={logit_scale!r}",
            expected=f"reduction one of {_REDUCTIONS}, label_smoothing between 0 and 1, ignore_index a whole number, "
            "logit_scale a finite one",
            hint='use reduction="mean", label_smoothing=0.0, ignore_index=-100 and logit_scale=1.0, and change one',
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
