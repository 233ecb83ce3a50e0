"""Precision: the autocast context of one, which one a device is good at, and the loss scale that fp16 needs.

Entry points: ``autocast``, ``resolve``, ``keep_fp32``, ``to_fp32_masters`` and ``Scaler``. The scale is a number of
the host, constant within a window; whether a window overflowed is handed in, so that nothing here reads a tensor.
"""

import functools
import math
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from snugfit import hardware
from snugfit.errors import PlanError, warn
from snugfit.jobs import LossScale, check_module
from snugfit.plans import PRECISIONS, nearest
from snugfit.training.islands import HALF
from snugfit.training.islands import keep_fp32 as keep_fp32

_DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16}
"Least compute capability with tensor cores for float16."


def autocast(precision: str, device: torch.device | str, *, cache_enabled: bool = True) -> AbstractContextManager[Any]:
    """The context in which forward and loss run under a precision.

    Args:
        precision: ``"32-true"`` (no autocast), ``"16-mixed"``, ``"bf16-mixed"``, or ``"bf16-true"``, whose model
            stays out of it (see ``bf16_weights``), so that its loss is computed as under ``"bf16-mixed"``.
        device: Where the forward runs.
        cache_enabled: Whether a weight that is cast keeps its copy until the context ends. Backward needs the copies
            anyway; evaluation does not.

    Raises:
        PlanError: Unknown precision, or one that the device does not have.
    """
    check_name(precision)
    if precision not in _DTYPES:
        return nullcontext()
    type_, dtype = _type_of(device), _DTYPES[precision]
    if not _has_half_types(type_) and not _can_be_on(type_, dtype):
        raise PlanError(
            f"the device does not have the precision {precision!r}",
            got=f"device={str(device)!r}, which is not present or has no autocast to {dtype}",
            expected='a device that is present and has it, or precision="32-true"',
            hint='use precision="auto" to take what the device is good at',
        )
    return torch.autocast(type_, dtype=dtype, cache_enabled=cache_enabled)


def _type_of(device: torch.device | str) -> str:
    """The type of a device.

    Raises:
        PlanError: Not a device of torch.
    """
    try:
        return torch.device(device).type
    except (TypeError, RuntimeError, ValueError) as error:
        raise PlanError(
            "this is not a device of torch",
            got=f"device={device!r}",
            expected='a torch.device, or its name: "cuda", "cpu"',
            hint="pass next(model.parameters()).device",
        ) from error


def check_name(precision: object) -> None:
    """Refuse a precision that there is not.

    Raises:
        PlanError: Unknown.
    """
    if not isinstance(precision, str) or precision not in PRECISIONS:
        raise PlanError(
            "unknown precision",
            got=f"precision={precision!r}",
            expected=" | ".join(map(repr, ("auto", *PRECISIONS))),
            hint=f"use precision={nearest(str(precision), PRECISIONS)!r}",
        )


def resolve(precision: str, device: torch.device | str | hardware.Device) -> tuple[str, str]:
    """The precision to use on a device, and why.

    Args:
        precision: ``"auto"``, or one that is taken as it is where the device has it.
        device: A torch device that is present, or one of ``snugfit.devices()``.

    Returns:
        Name of the precision, and the reason.

    Raises:
        PlanError: Unknown precision or device, or a precision that a present device does not have.

    Example:
        >>> resolve("auto", "rtx-3090")[0], resolve("auto", "t4")[0], resolve("auto", "cpu")[0]
        ('bf16-mixed', '16-mixed', '32-true')
    """
    if not isinstance(precision, str) or precision != "auto":
        check_name(precision)
        if isinstance(device, torch.device):
            autocast(precision, device)
        return precision, "asked for"
    if isinstance(device, torch.device) and device.type not in ("cpu", "cuda"):
        return "32-true", f"of a device of type {device.type} it is not known which precision it is good at"
    card = hardware.resolve(str(device) if isinstance(device, torch.device) else device)
    if card.kind == "cpu":
        return "32-true", "on a CPU products of bfloat16 or float16 matrices are mostly slower than float32, up to 105x"
    if card.compute_capability is None:
        return "32-true", f"the compute capability of {card.name} is not known"
    name = "{}.{}".format(*card.compute_capability)
    if card.fast_bfloat16:
        return "bf16-mixed", f"compute capability {name}: tensor cores multiply bfloat16, and no loss scale is needed"
    if card.flops.get("float16", 0.0) > 1.5 * card.flops.get("float32", 0.0):
        return "16-mixed", f"compute capability {name}: tensor cores multiply float16, but not bfloat16"
    return "32-true", f"compute capability {name}: no tensor cores that half precision would gain from"


def warn_of_emulation(precision: str, device: torch.device) -> None:
    """Say that a device computes a precision only by converting to float32 and back."""
    if device.type != "cuda" or _DTYPES.get(precision) != torch.bfloat16:
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < hardware.BFLOAT16_CAPABILITY:
        warn(
            f"precision={precision!r}: compute capability {capability[0]}.{capability[1]} has no bfloat16 (8.0 has) "
            'and converts to float32 and back, which is slower than either; use precision="auto"',
        )


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """The context in which backward and update run as recorded, whatever autocast the caller is in."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


def of_backward(device_type: str, loss_scale: float | None) -> AbstractContextManager[Any]:
    """The context in which a backward runs: without autocast, and without torch's search for NaN under a loss scale.

    That search (``torch.autograd.set_detect_anomaly``) would take an overflow, which the scale is found by, for a bug
    and end the run. What an operation was called from is still told.
    """
    contexts = ExitStack()
    contexts.enter_context(without_autocast(device_type))
    if loss_scale is not None and loss_scale > 1 and torch.is_anomaly_enabled():
        contexts.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
    return contexts


class Scaler:
    """Dynamic loss scale: losses are multiplied by ``scale`` so that small fp16 gradients do not vanish.

    Args:
        settings: Start, growth, back-off and bounds.
    """

    def __init__(self, settings: LossScale) -> None:
        self.settings = settings
        self.scale = float(settings.init_scale)
        self._clean_windows = 0

    def update(self, found_inf: bool) -> None:
        """Learn how one window went: back off after an overflow, grow after a run of clean windows."""
        settings = self.settings
        if found_inf:
            self.scale = max(self.scale * settings.backoff_factor, settings.floor)
            self._clean_windows = 0
            return
        self._clean_windows += 1
        if self._clean_windows >= settings.growth_interval:
            self.scale = min(self.scale * settings.growth_factor, settings.cap)
            self._clean_windows = 0

    def state_dict(self) -> dict[str, float]:
        """Scale and number of clean windows in a row."""
        return {"scale": self.scale, "clean_windows": self._clean_windows}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a saved state, within the bounds that are set now.

        Raises:
            PlanError: The saved scale is not finite.
        """
        scale, clean_windows = float(state["scale"]), int(state["clean_windows"])
        if not math.isfinite(scale):
            raise PlanError(
                "a saved loss scale is no number to multiply by",
                got=f"scale={scale}",
                expected="a finite number",
                hint="load another saved state",
            )
        self.scale = min(max(scale, self.settings.floor), self.settings.cap)
        self._clean_windows = clean_windows


def scaler(precision: str, loss_scale: LossScale | None) -> Scaler | None:
    """The loss scale of a precision: only fp16 needs one.

    ``LossScale(init_scale=1, growth_factor=1)`` turns it off, which is warned about.

    Raises:
        PlanError: Something else than a ``LossScale``.
    """
    if loss_scale is not None and not isinstance(loss_scale, LossScale):
        raise PlanError(
            "loss_scale is not a LossScale",
            got=f"loss_scale={loss_scale!r}",
            expected="snugfit.LossScale, or None for its defaults",
            hint=f"write loss_scale=snugfit.LossScale(init_scale={loss_scale!r})"
            if isinstance(loss_scale, (int, float))
            else "leave loss_scale out",
        )
    if precision != "16-mixed":
        return None
    settings = LossScale() if loss_scale is None else loss_scale
    if settings.init_scale == 1 and settings.growth_factor == 1:
        warn(
            'precision="16-mixed" with a loss scale that stays 1: gradients below 3e-8 become 0 in fp16, and those '
            "below 6e-5 lose digits; leave loss_scale out to have it found",
        )
    return Scaler(settings)


def multiply(gradients: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply gradients in place: the one pass that divides by the count and by the loss scale.

    Args:
        gradients: Gradients of any device and type.
        factor: A number, or a 0-dimensional float64 tensor where only the device knows the count.
    """
    if not isinstance(factor, Tensor):
        torch.ops.aten._foreach_mul_.Scalar(list(gradients), factor)
        return
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), group in groups.items():
        torch.ops.aten._foreach_mul_.Tensor(group, factor.to(device, dtype))


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Norm over all gradients, in fp32 where they are of half precision, whose own range and digits do not do."""
    if not any(gradient.dtype in HALF for gradient in gradients):
        total: Tensor = nn.utils.get_total_norm(gradients)
        return total
    norms = []
    for gradient in gradients:
        dtype = torch.float32 if gradient.dtype in HALF else gradient.dtype
        norms.append(torch.linalg.vector_norm(gradient, dtype=dtype).to(gradients[0].device, torch.float32))
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def refuse_half_weights(model: nn.Module) -> None:
    """Refuse trainable half-precision weights, whose gradients a loss scale cannot be divided out of.

    Raises:
        PlanError: Names every such parameter; frozen ones are fine.
    """
    half = _half_weights(model)
    if half:
        raise PlanError(
            "16-mixed training needs fp32 trainable weights",
            got=f"half-precision trainable parameters: {', '.join(half)}",
            expected="torch.float32; autocast casts them where it pays, frozen ones may stay as they are",
            hint="convert them before the optimizer is made: snugfit.precision.to_fp32_masters(model)",
            parameters=tuple(half),
        )


def to_fp32_masters(model: nn.Module) -> tuple[str, ...]:
    """Convert trainable half-precision weights to fp32, in place and exactly; frozen ones stay as they are.

    Call it before the optimizer is made. The parameters stay the same objects.

    Returns:
        Names of the parameters that were converted.

    Raises:
        PlanError: The model is none.
    """
    check_module(model, "there is no model to convert to fp32")
    names = _half_weights(model)
    for name in names:
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.float()
    return tuple(names)


def _half_weights(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.dtype in HALF]


@functools.cache
def is_present(device_type: str) -> bool:
    """Whether this machine has an accelerator of a type, and torch can use it."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device_type and torch.accelerator.is_available()


def _has_half_types(device_type: str) -> bool:
    """Whether autocast to both half types is certain to work."""
    return device_type == "cpu" or (device_type == "cuda" and is_present(device_type))


def _can_be_on(device_type: str, dtype: torch.dtype) -> bool:
    """Whether autocast stays on when asked for; torch turns it off with a warning where it has none."""
    if not torch.amp.is_autocast_available(device_type) or (device_type != "cuda" and not is_present(device_type)):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bool(getattr(torch.autocast(device_type, dtype=dtype), "_enabled", True))
