"""What happens to a window whose gradient is not finite, for every precision the same.

Entry point: ``decider``, the engine's own ``decide`` hook. Finding out where the first such value came from is left
out.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from snugfit.errors import NonFiniteError
from snugfit.training.weighting import Number


def decider(policy: str) -> Callable[[Tensor | None, Number], str | None]:
    """The function that says why a window is skipped; the only one that waits for the device.

    Args:
        policy: ``"skip"``, ``"raise"``, or ``"ignore"``, which reads nothing.

    Returns:
        ``(whether a gradient is not finite, count)`` to a reason or None; raises ``NonFiniteError`` under ``"raise"``.
    """

    def decide(found_inf: Tensor | None, count: Number) -> str | None:
        if policy == "ignore":
            return None
        flags = [] if found_inf is None else [found_inf]
        if isinstance(count, Tensor):
            flags.append((count == 0).to(found_inf.device if found_inf is not None else count.device))
        elif count == 0:
            return "empty"
        values = torch.stack(flags).tolist() if flags else []
        if isinstance(count, Tensor) and values[-1]:
            return "empty"
        if found_inf is None or not values[0]:
            return None
        if policy == "raise":
            raise NonFiniteError(
                "the gradient of a window is not finite",
                got="inf or NaN in the averaged gradient",
                expected='finite gradients, as nonfinite="raise" asks for',
                hint='pass nonfinite="skip" to leave such windows out',
            )
        return "non-finite gradient"

    return decide


def too_many_skipped(windows: int, step: int, loss_scale: float | None) -> NonFiniteError:
    """The error of a run that only skips."""
    scale = "no loss scale" if loss_scale is None else f"loss scale {loss_scale:g}"
    return NonFiniteError(
        f"{windows} windows in a row had a gradient that is not finite",
        got=f"after {step} updates, {scale}",
        expected=f"fewer than {windows} (max_skipped_windows)",
        hint='look for inf or NaN in the data, lower the learning rate, or use precision="bf16-mixed"',
        windows=windows,
        step=step,
        loss_scale=loss_scale,
    )
