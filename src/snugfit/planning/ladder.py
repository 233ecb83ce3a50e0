"""The ladder: one technique after the other, with numbers, until the job fits.

Entry point: ``Rung``; ``search`` climbs it. The order is the one a person would try (least change, most effect
first): full batch in fp32, then mixed precision, then accumulation, then activation checkpointing.
"""

from dataclasses import dataclass

from snugfit.memory.reports import MemoryReport
from snugfit.plans import Plan

FULL_BATCH = "full batch"
MIXED_PRECISION = "mixed precision"
ACCUMULATION = "gradient accumulation"
CHECKPOINTING = "activation checkpointing"
CHOSEN = "chosen plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One step of the ladder."""

    name: str
    plan: Plan
    memory: MemoryReport
    fits: bool
    step_time_s: float
    "Modelled seconds of one update."
    relative_time: float
    "Step time over that of the first rung."


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan that was considered."""

    plan: Plan
    memory: MemoryReport
    fits: bool
    step_time_s: float
