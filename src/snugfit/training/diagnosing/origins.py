"""What made the first value that is not finite, and what was known of it there.

Entry points: ``Origin`` and ``Evidence``. Finding them is ``probes``'s and ``backward``'s, saying what helps
``advice``'s.
"""

from dataclasses import dataclass

import torch

LOSS_FUNCTION = "loss function"
WORDS = ("finite", "inf", "NaN")
"By badness."


@dataclass(frozen=True, slots=True)
class Evidence:
    """What an operation was given, as far as it decides about the remedy."""

    dtype: torch.dtype
    "Of the operand that decides: the divisor of a division, else the first."
    lowest: float = 0.0
    "Of its finite values."
    exponent: float | None = None
    "Of a power, where it is a number."
    counted: str = ""
    "What a mean over nothing leaves out, as a sentence."
    count: str = ""
    "The count that would leave the micro-batch out, as code."
    num_reduced: int | None = None
    "Values that a standard deviation or variance was taken over."


@dataclass(frozen=True, slots=True)
class Origin:
    """What made the first value that is not finite."""

    kind: str
    '``"operation" "data" "weights" "buffers" "operand" "sum" "hook" "recomputation" "norm" "update"``.'
    module: str
    'Fully qualified; ``""`` for the loss function.'
    op: str
    phase: str
    '``"forward" "backward" "update"``.'
    micro_batch: int | None
    cause: str
    evidence: Evidence | None = None
