"""What a plan may choose from on a device: precisions and regions to recompute, each with its reason.

Entry points: ``precisions``, ``recomputations``, ``micro_batch_sizes``. Which of them is taken is ``search``'s.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from snugfit.errors import PlanError
from snugfit.hardware import Device
from snugfit.plans import Segment
from snugfit.training import checkpointing, precision


class Option(NamedTuple):
    """One value that a field of a plan may take, and why it is worth trying (or why nothing else is)."""

    value: Any
    reason: str


def precisions(device: Device, fixed: Mapping[str, Any]) -> tuple[Option, ...]:
    """Precisions worth trying, plain fp32 first; bf16 is proposed only where the device is fast at it."""
    if "precision" in fixed:
        return (Option(fixed["precision"], "given"),)
    plain = Option("32-true", "full precision")
    if device.kind == "cpu" and device.fast_bfloat16:
        return plain, Option("bf16-mixed", f"{device.name} multiplies bf16 in tiles of its own")
    name, reason = precision.resolve("auto", device)
    return (Option(name, reason),) if name == plain.value else (plain, Option(name, reason))


def recomputations(model: nn.Module, fixed: Mapping[str, Any]) -> tuple[Option, ...]:
    """What to recompute: nothing, or every repeated block."""
    if "recompute" in fixed:
        return (Option(tuple(fixed["recompute"]), "given"),)
    nothing = Option((), "nothing is recomputed")
    try:
        blocks = checkpointing.blocks(model)
    except PlanError:
        return (nothing,)
    if not blocks:
        return (nothing,)
    return nothing, Option(tuple(blocks), f"each of the {len(blocks)} repeated blocks keeps only its input")


def describe(recompute: tuple[Segment, ...]) -> str:
    """Segments in a few words, for tables."""
    return "nothing" if not recompute else f"{len(recompute)} segments"


def short(precision: str) -> str:
    """A precision in a table: fp32 for ``"32-true"``."""
    return "fp32" if precision == "32-true" else precision


def micro_batch_sizes(num_samples: int, largest: int) -> tuple[int, ...]:
    """Sizes up to the largest that are worth timing: the largest itself, even cuts, and divisors of the batch."""
    even = {-(-num_samples // steps) for steps in range(1, num_samples + 1)}
    return tuple(sorted({size for size in even if size <= largest} | {largest}, reverse=True))
