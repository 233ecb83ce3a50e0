"""A plan and its own trace: what it needs, how long it takes, and which of several are worth showing.

Entry points: ``TracedPlan``, ``traced_plan`` and ``undominated``.
"""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from snugfit.hardware import Device
from snugfit.jobs import Job
from snugfit.memory import tracing
from snugfit.memory.events import Recording, Work
from snugfit.memory.reporting import advice
from snugfit.memory.reports import MemoryReport
from snugfit.memory.traces import Trace
from snugfit.planning import cost, links
from snugfit.planning.cutting import cut, forward_work
from snugfit.planning.ladder import Candidate
from snugfit.planning.scaling import micro_steps
from snugfit.plans import Plan


@dataclass(frozen=True, slots=True)
class TracedPlan:
    """A plan and its own trace."""

    plan: Plan
    trace: Trace | None
    "None once a faster plan fits: traces are large."
    memory: MemoryReport
    fits: bool
    step_time_s: float
    flops: int
    offloaded_bytes: int
    "What a micro-batch moves to the host in forward and back."
    forward_work: Mapping[str, int]
    "What each unit computes in forward, if nothing is recomputed."
    compares_classes: bool
    "Whether a loss picks the score of a label among those of all classes."


def whole_window(trace: Trace, plan: Plan) -> Counter[Work]:
    """The work of all micro-batches of a window, of which a trace may run two full ones and the tail only."""
    work = Counter(trace.work)
    starts = trace.micro_batch_starts
    missing = plan.accumulation_steps - len(starts)
    if missing <= 0 or len(starts) < 2:
        return work
    last_backward = max(i for i, item in enumerate(trace.work) if item.phase == "backward")
    for item, times_run in Counter(trace.work[starts[1] : (*starts, last_backward + 1)[2]]).items():
        work[item] += missing * times_run
    return work


def traced_plan(job: Job, plan: Plan, device: Device, budget_bytes: int, names: Sequence[str] = ()) -> TracedPlan:
    """Trace a plan as it is.

    Args:
        job: What is trained.
        plan: How.
        device: What it is traced for.
        budget_bytes: For peak, context and margin.
        names: Of the model's units.
    """
    with warnings.catch_warnings():
        if plan.recompute:  # what it means to a model is said when the plan is carried out
            warnings.simplefilter("ignore")
        trace = tracing.record_job(job, plan, device)
    work = whole_window(trace, plan)
    report = trace.report()
    phases = cost.breakdown(work, device)
    reducing = links.added_seconds(
        plan,
        report.at("backward end").get("gradient", 0),
        device,
        backward_s=phases.get("backward", 0.0) / plan.accumulation_steps,
    )
    return TracedPlan(
        plan=plan,
        trace=trace,
        memory=report,
        fits=report.fits(budget_bytes),
        step_time_s=sum(phases.values()) + reducing,
        flops=sum(item.flops * times_run for item, times_run in work.items()),
        offloaded_bytes=_offloaded_bytes(trace, plan),
        forward_work={} if plan.recompute else _forward_work(trace.recording, names),
        compares_classes=advice.compares_classes(trace.recording),
    )


def _forward_work(recording: Recording, names: Sequence[str]) -> dict[str, int]:
    return forward_work(recording, cut(recording, micro_steps(recording)[0], names))


def _offloaded_bytes(trace: Trace, plan: Plan) -> int:
    if not any(segment.policy == "offload" for segment in plan.recompute):
        return 0
    read_and_written = sum(item.bytes for item in trace.work if item.is_copy and item.phase == "forward")
    return read_and_written // 2 // len(trace.micro_batch_starts)


def as_candidate(traced: TracedPlan) -> Candidate:
    """A traced plan as one of those considered."""
    return Candidate(
        plan=traced.plan,
        needed_bytes=traced.memory.needed_bytes,
        peak_allocated_bytes=traced.memory.peak_allocated_bytes,
        fits=traced.fits,
        step_time_s=traced.step_time_s,
        memory=traced.memory,
    )


def undominated(candidates: Sequence[Candidate], chosen: Plan) -> tuple[Candidate, ...]:
    """The candidates that no other beats in both time and memory, the chosen one always among them."""
    frontier: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.step_time_s, c.needed_bytes, c.plan != chosen)):
        if candidate.plan == chosen or not frontier or candidate.needed_bytes < frontier[-1].needed_bytes:
            frontier.append(candidate)
    return tuple(frontier)
