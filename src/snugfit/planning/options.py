"""What a plan may choose from on a device: precisions, with reasons, memory and micro-batch sizes.

Entry points: ``precisions``, ``left_out``, ``allowed_bytes`` and ``micro_batch_sizes``. What may be recomputed is
``units``'; what is taken is ``search``'s.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from snugfit.errors import PlanError, SnugfitError
from snugfit.hardware import Device
from snugfit.memory.reports import margin_bytes
from snugfit.planning import cost
from snugfit.plans import Segment
from snugfit.training import precision

_FEW = 6
"Micro-batch sizes that are looked at where each needs traces of its own."
_EVERY_STEP = 16


class Option(NamedTuple):
    """One value that a field of a plan may take, and why it is worth trying (or why nothing else is)."""

    value: Any
    reason: str


def precisions(device: Device, fixed: Mapping[str, Any]) -> tuple[Option, ...]:
    """Precisions worth trying, plain fp32 first; bf16 is proposed only where the device is fast at it."""
    if "precision" in fixed:
        _check_precision(fixed["precision"], device)
        return (Option(fixed["precision"], "given"),)
    plain = Option("32-true", "full precision")
    if device.kind == "cpu":
        if device.fast_bfloat16:
            return plain, Option("bf16-mixed", f"this CPU multiplies bf16 {_bfloat16_gain(device)}")
        how = "is taken to multiply" if device.rates is None else "was measured to multiply"
        return (Option(plain.value, f"this CPU {how} bf16 and fp16 more slowly"),)
    name, reason = precision.resolve("auto", device)
    return (Option(name, reason),) if name == plain.value else (plain, Option(name, reason))


def _bfloat16_gain(device: Device) -> str:
    if device.rates is None:
        return "in tiles of its own, which is taken to be faster than fp32"
    gain = cost.reached_rate("bfloat16", device) / cost.reached_rate("float32", device)
    return f"{gain:.1f} times as fast as fp32 (measured)"


def _check_precision(given: str, device: Device) -> None:
    if given == "16-mixed" and "float16" not in device.flops:
        raise PlanError(
            f"{device.name} does not multiply fp16",
            got='precision="16-mixed"',
            expected=f"a precision that it has rates for: {', '.join(device.flops)}",
            hint='leave precision out, or use "32-true"',
        )


def left_out(precision: str, error: Exception) -> str:
    """Why a precision is not searched: the step raises in it, and what would help.

    Args:
        precision: In which it was traced.
        error: What it raised.
    """
    if isinstance(error, SnugfitError):
        raised = error.got or error.what
    else:
        raised = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
    said = f"{precision} is left out, for the step cannot be traced in it: {raised}"
    module = getattr(error, "module", "")
    if not precision.endswith("-mixed"):
        return said
    if module:
        return f"{said}; snugfit.precision.keep_fp32(model, {module!r}) lets that module run in fp32"
    return (
        f"{said}; compute that part in fp32: with torch.autocast(device_type, enabled=False), of .float() of its inputs"
    )


def describe(recompute: tuple[Segment, ...]) -> str:
    """Segments in a few words, for tables: how many, and which of them keep something."""
    kept = Counter(segment.policy for segment in recompute if segment.policy != "full")
    which = ", ".join(f"{count} {policy}" for policy, count in sorted(kept.items()))
    return "nothing" if not recompute else segments(len(recompute)) + (f" ({which})" if which else "")


def segments(count: int) -> str:
    """That many segments: ``"1 segment"``."""
    return f"{count} segment{'s' if count > 1 else ''}"


def short(precision: str) -> str:
    """A precision in a table: fp32 for ``"32-true"``."""
    return "fp32" if precision == "32-true" else precision


def allowed_bytes(budget_bytes: int, device: Device) -> int:
    """The largest peak that fits into a budget together with context and margin."""
    low, high = 0, max(budget_bytes - device.context_bytes, 0)
    while low < high:
        middle = (low + high + 1) // 2
        if middle + device.context_bytes + margin_bytes(middle, device.name) <= budget_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def micro_batch_sizes(num_samples: int) -> tuple[int, ...]:
    """Even cuts of a batch, the whole batch first: every number of micro-batches up to 16, then fewer and fewer.

    Between those, one that leaves no smaller micro-batch at the end, if there is one: its blocks fit each other.

    Example:
        >>> micro_batch_sizes(4096)[16:25]
        (205, 164, 128, 103, 82, 66, 64, 52, 42)
    """
    steps = [*range(1, _EVERY_STEP + 1)]
    while steps[-1] < num_samples:
        steps.append(-(-steps[-1] * 5 // 4))
    gaps = itertools.pairwise(steps)
    whole = (next((count for count in range(*gap) if num_samples % count == 0), 1) for gap in gaps)
    return tuple(sorted({-(-num_samples // count) for count in (*steps, *whole, num_samples)}, reverse=True))


def few_of(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Some of the sizes of a batch, the largest and the smallest among them, in about equal ratios.

    Example:
        >>> few_of((24, 12, 8, 6, 5, 4, 3, 2, 1))
        (24, 12, 6, 4, 2, 1)
    """
    step = (sizes[-1] / sizes[0]) ** (1 / (_FEW - 1))
    wanted = [sizes[0] * step**number for number in range(_FEW)]
    return tuple(sorted({min(sizes, key=lambda size: abs(math.log(size / near))) for near in wanted}, reverse=True))
