"""The ladder: one technique after the other, with numbers, until the job fits, then the fastest combination.

Entry points: ``Rung`` and ``Candidate``. The order is the one a person would try (least change, most effect first):
full batch in fp32, then mixed precision, then accumulation, then activation checkpointing of every block.
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
    """One step of the ladder, traced as it is."""

    name: str
    plan: Plan
    memory: MemoryReport
    fits: bool
    step_time_s: float
    "Modelled seconds of one update."
    relative_time: float
    "Step time over that of the first rung."
    samples_per_s: float
    "Samples of the whole batch over the step time."
    flops: int
    "Of one update on one rank, recomputation included."
    pays_with: str
    "What it costs beside the rung before."


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan that was considered."""

    plan: Plan
    needed_bytes: int
    "Peak reserved, context and margin: what a budget must hold."
    peak_allocated_bytes: int
    fits: bool
    step_time_s: float
    "Modelled seconds of one update."
    memory: MemoryReport | None = None
    "Where the plan was traced by itself; the others are put together from the traces of their parts."
