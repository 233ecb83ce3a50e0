"""Mixed precision: the autocast context of a precision, and the loss scale that fp16 needs.

Entry points: ``autocast`` and ``Scaler``. The scale is a number of the host, constant within a window; whether a
window overflowed is decided elsewhere and handed in, so that nothing here reads a tensor.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from snugfit.errors import PlanError, UnsupportedError
from snugfit.jobs import LossScale
from snugfit.plans import PRECISIONS

_DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


def autocast(precision: str, device: torch.device | str, *, cache_enabled: bool = True) -> AbstractContextManager[Any]:
    """The context in which a forward runs under a precision.

    Args:
        precision: ``"32-true"`` (no autocast), ``"16-mixed"`` or ``"bf16-mixed"``.
        device: Where the forward runs.
        cache_enabled: Whether a weight that is cast keeps its copy until the context ends. Backward needs the copies
            anyway; evaluation does not.

    Raises:
        PlanError: Unknown precision.
        UnsupportedError: ``"bf16-true"``, which is not built yet.
    """
    if precision == "bf16-true":
        raise UnsupportedError(
            "bf16-true weights are not supported yet",
            got="precision='bf16-true'",
            expected='"32-true", "16-mixed" or "bf16-mixed"',
            hint='use precision="bf16-mixed"',
        )
    if precision not in PRECISIONS:
        raise PlanError(
            "unknown precision",
            got=f"precision={precision!r}",
            expected=" | ".join(map(repr, PRECISIONS)),
            hint='use precision="bf16-mixed"',
        )
    if precision not in _DTYPES:
        return nullcontext()
    return torch.autocast(torch.device(device).type, dtype=_DTYPES[precision], cache_enabled=cache_enabled)


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """The context in which backward and update run as recorded, whatever autocast the caller is in."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


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
        if self._clean_windows == settings.growth_interval:
            self.scale = min(self.scale * settings.growth_factor, settings.cap)
            self._clean_windows = 0

    def state_dict(self) -> dict[str, float]:
        """Scale and number of clean windows in a row."""
        return {"scale": self.scale, "clean_windows": self._clean_windows}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a saved state."""
        self.scale, self._clean_windows = float(state["scale"]), int(state["clean_windows"])


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


def refuse_half_weights(model: nn.Module) -> None:
    """Refuse trainable half-precision weights, whose gradients a loss scale cannot be divided out of.

    Raises:
        PlanError: Names every such parameter; frozen ones are fine.
    """
    half = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16)
    ]
    if half:
        raise PlanError(
            "16-mixed training needs fp32 trainable weights",
            got=f"half-precision trainable parameters: {', '.join(half)}",
            expected="torch.float32; autocast casts them where it pays, frozen ones may stay as they are",
            hint=f"convert them before the optimizer is made: model.get_parameter({half[0]!r}).data = "
            f"model.get_parameter({half[0]!r}).data.float()",
            parameters=tuple(half),
        )
