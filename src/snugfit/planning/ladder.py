"""The ladder: one technique after the other, with numbers, until the job fits, then the fastest combination.

Entry points: ``Rung`` and ``Candidate``; ``short_line``, a plan as their tables show it, and ``legend``, its words. The
order is a person's: full batch in fp32, mixed precision, accumulation, checkpointing of every block, the best.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from snugfit.memory.reports import MemoryReport
from snugfit.plans import Plan, Segment, cut

FULL_BATCH = "full batch"
MIXED_PRECISION = "mixed precision"
ACCUMULATION = "gradient accumulation"
CHECKPOINTING = "activation checkpointing"
CHOSEN = "chosen plan"
_PRECISIONS = {"32-true": "fp32", "16-mixed": "fp16", "bf16-mixed": "bf16", "bf16-true": "bf16 weights"}


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


_SEGMENT = "segment: a module, or a run of them, that is recomputed in backward as one. block: a layer that repeats."
_KEPT = {
    "full": "nothing is kept of it but its input",
    "offload": "not recomputed, what it saves waits on the host",
    "keep-matmul": "results of matrix products, convolutions and attention are kept",
    "keep-attention": "results of attention are kept",
    "keep-last": "the result of each module's last matrix product is kept",
    "keep-attention-last": "the results of attention and of each module's last matrix product are kept",
}


def legend(plans: Iterable[Plan]) -> list[str]:
    """What the words for recomputation in these plans mean; nothing where nothing is recomputed."""
    policies = {segment.policy for plan in plans for segment in plan.recompute}
    if not policies:
        return []
    shown = [] if policies == {"full"} else [name for name in _KEPT if name in policies]
    return [_SEGMENT, *(f"{name}: {_KEPT[name]}." for name in shown)]


class _Named(Protocol):
    """A rung, as a search makes it or as a page reads it."""

    @property
    def name(self) -> str: ...
    @property
    def plan(self) -> Plan: ...


def blocks_of(ladder: Iterable[_Named]) -> tuple[Segment, ...]:
    """All blocks of the model as segments: those of the rung that recomputes every block; nothing without it."""
    return next((rung.plan.recompute for rung in ladder if rung.name == CHECKPOINTING), ())


def short_line(plan: Plan, blocks: tuple[Segment, ...] = ()) -> str:
    """A plan in a few words for a column: what a search varies; ``tables.plan_line`` has all of it.

    Args:
        plan: Of a batch size that is said elsewhere.
        blocks: All blocks of the model as segments, where they are known.
    """
    words = [cut(plan), _PRECISIONS[plan.precision]]
    if plan.recompute:
        policies = {segment.policy for segment in plan.recompute}
        is_all = [s.modules for s in plan.recompute] == [s.modules for s in blocks]
        count = len(plan.recompute)
        what = "every block" if is_all else f"{count} segment{'s' if count > 1 else ''}"
        words.append(what if policies == {"full"} else f"{what} {' + '.join(sorted(policies))}")
    if plan.optimizer_impl != "as-given":
        words.append(f"{plan.optimizer_impl} update")
    if plan.loss_chunks > 1:
        words.append(f"loss in {plan.loss_chunks}")
    return ", ".join(words)
