"""What a search found out beside the plan: a file of its own, written with the plan and read for the page.

Entry points: ``of``, ``save`` and ``load``. What is read comes from outside: it is checked value by value, and refused
where it belongs to another plan. Making a page of it takes no trace and no search.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, PlainSerializer, PlainValidator, TypeAdapter

from snugfit import hardware, runs
from snugfit.errors import PlanError
from snugfit.jobs import Job
from snugfit.memory import tracing
from snugfit.memory.reporting.attribution import CATEGORIES
from snugfit.memory.reporting.timeline import WindowTimeline, timeline
from snugfit.memory.reports import MemoryReport
from snugfit.memory.traces import Trace
from snugfit.page import outside
from snugfit.planning import cost
from snugfit.planning.ladder import Candidate, Rung
from snugfit.planning.own_loop import OwnLoop, own_loop
from snugfit.planning.plan_report import PlanReport
from snugfit.plans import Plan, write_atomically
from snugfit.training import fingerprint

_EXPECTED = "what snugfit plan -o wrote beside the plan"
_AGAIN = "plan again: snugfit plan TARGET ... -o plan.json"

_Plan = Annotated[Plan, PlainValidator(Plan.from_dict), PlainSerializer(Plan.to_dict)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Considered:
    """A plan with what it needs and how long it takes: a rung of the ladder, or a point of the frontier."""

    plan: _Plan
    needed_bytes: NonNegativeInt
    "Peak reserved, context and margin: what a budget must hold."
    peak_allocated_bytes: NonNegativeInt
    fits: bool
    step_time_s: NonNegativeFloat
    "Modelled seconds of one update."
    name: str = ""
    "Of the rung; a point of the frontier has neither this nor the fields below."
    peak_reserved_bytes: NonNegativeInt = 0
    context_bytes: NonNegativeInt = 0
    margin_bytes: NonNegativeInt = 0
    by_category: Mapping[str, NonNegativeInt] = field(default_factory=dict)
    "At the moment of the peak."
    samples_per_s: NonNegativeFloat = 0.0
    flops: NonNegativeInt = 0
    "Of one update on one rank, what is recomputed included."
    pays_with: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """Everything that a page shows of a plan."""

    __pydantic_config__ = ConfigDict(allow_inf_nan=False)

    format: Literal["snugfit details 1"] = "snugfit details 1"
    versions: Mapping[str, str]
    target: str
    "The job as the command line named it."
    options: Mapping[str, str | int]
    "What was said of the target: sequence length, image size, task."
    plan: _Plan
    budget_bytes: NonNegativeInt
    memory: MemoryReport
    timeline: tuple[WindowTimeline, ...]
    "Empty where the memory of the plan was put together from that of another one."
    step_time_s: NonNegativeFloat | None = None
    "Modelled seconds of one update; None where no search was made, and the fields below are empty."
    ladder: tuple[Considered, ...] = ()
    frontier: tuple[Considered, ...] = ()
    runner_up: _Plan | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)
    "Field of the plan to the reason of its value."
    notes: tuple[str, ...] = ()
    "Of the search: what a reader of its numbers must know."
    advice: Mapping[str, str] = field(default_factory=dict)
    "Topic to what the plan means for it."
    loop: OwnLoop = field(default_factory=OwnLoop)
    "What the job's own training loop does beside the plan; nothing is known of it in files of older versions."
    plan_file: str = ""
    "The plan's file, where a page is made of it."

    def considered(self, plan: Plan) -> Considered | None:
        """The numbers of a plan that the search met."""
        return next((one for one in (*self.ladder, *self.frontier) if one.plan == plan), None)


_ADAPTER = TypeAdapter(Details)


def of(
    job: Job,
    plan: Plan,
    card: hardware.Device,
    budget_bytes: int,
    *,
    target: str,
    options: Mapping[str, str | int],
    found: PlanReport | None = None,
) -> Details:
    """Gather what a page shows; without a search the plan is traced for it.

    Args:
        job: What is trained.
        plan: How.
        card: The device that it is planned for.
        budget_bytes: What the job may use there.
        target: The job as the command line named it.
        options: What was said of the target.
        found: The search that found the plan; None leaves ladder, frontier and reasons empty.
    """
    trace: Trace | None
    if found is None:
        trace = traced = tracing.record_job(job, plan, card)
        memory = traced.report()
    else:
        trace, memory = found.trace, found.memory
    return Details(
        versions=runs.versions(),
        target=target,
        options=dict(options),
        plan=plan,
        budget_bytes=budget_bytes,
        memory=memory,
        timeline=() if trace is None else _timeline(trace, card),
        loop=own_loop(job, tracing.skeleton(job)) if found is None else found.loop,
        **({} if found is None else _searched(found)),
    )


def _timeline(trace: Trace, card: hardware.Device) -> tuple[WindowTimeline, ...]:
    return timeline(trace, seconds=cost.times([work for _, work in trace.recording.work], card))


def again(
    job: Job, plan: Plan, card: hardware.Device, budget_bytes: int, *, target: str, options: Mapping[str, str | int]
) -> Details:
    """Trace a plan for a page without the search that found it; see ``of``.

    Raises:
        PlanError: The plan was made for another model (says what differs).
    """
    fingerprint.check(plan, tracing.skeleton(job))
    return of(job, plan, card, budget_bytes, target=target, options=options)


def beside(plan_file: str | os.PathLike[str]) -> Path:
    """Where the details of a plan file are, also in a run folder: ``plan.details.json`` beside ``plan.json``."""
    return Path(plan_file).with_suffix(".details.json")


def save(details: Details, file: Path) -> None:
    """Write the details; the file is complete or untouched, never half-written."""
    write_atomically(file, _ADAPTER.dump_json(details).decode() + "\n")


def load(file: Path, plan: Plan) -> Details:
    """Read the details of a plan.

    Args:
        file: What ``save`` wrote.
        plan: The plan that they must belong to.

    Raises:
        PlanError: The file cannot be read, is cut off, is something else, contradicts itself, or belongs to another
            plan (says what differs).
    """
    document = outside.text(file, expected=_EXPECTED, hint=_AGAIN)
    details = outside.checked(_ADAPTER, document, where=repr(str(file)), expected=_EXPECTED, hint=_AGAIN)
    wrong = _contradiction(details)
    if wrong:
        raise PlanError(f"{str(file)!r} contradicts itself", got=wrong, expected=_EXPECTED, hint=_AGAIN)
    differing = [f.name for f in fields(Plan) if getattr(plan, f.name) != getattr(details.plan, f.name)]
    if differing:
        raise PlanError(
            f"{str(file)!r} belongs to another plan: {', '.join(differing)} differ",
            got=_values(details.plan, differing),
            expected=f"{_values(plan, differing)}, as in the plan",
            hint=f"{_AGAIN}, or name the job: snugfit report ... --target TARGET",
            differing=tuple(differing),
        )
    return details


def device_of(plan_file: str | os.PathLike[str], plan: Plan) -> str | None:
    """The device that a plan was made for, where its details lie beside it and are its own; else None."""
    file = beside(plan_file)
    try:
        return load(file, plan).memory.device if file.exists() else None
    except PlanError:
        return None


def _searched(found: PlanReport) -> dict[str, Any]:
    return {
        "step_time_s": found.step_time_s,
        "ladder": tuple(_rung(rung) for rung in found.ladder),
        "frontier": tuple(_point(candidate) for candidate in found.frontier),
        "runner_up": found.runner_up,
        "reasons": dict(found.reasons),
        "notes": (*(f"the job must change: {way.change}" for way in found.changes), *found.notes),
        "advice": {advice.topic: advice.text for advice in found.advice},
    }


def _rung(rung: Rung) -> Considered:
    memory = rung.memory
    return Considered(
        plan=rung.plan,
        needed_bytes=memory.needed_bytes,
        peak_allocated_bytes=memory.peak_allocated_bytes,
        fits=rung.fits,
        step_time_s=rung.step_time_s,
        name=rung.name,
        peak_reserved_bytes=memory.peak_reserved_bytes,
        context_bytes=memory.context_bytes,
        margin_bytes=memory.margin_bytes,
        by_category=dict(memory.by_category),
        samples_per_s=rung.samples_per_s,
        flops=rung.flops,
        pays_with=rung.pays_with,
    )


def _point(candidate: Candidate) -> Considered:
    return Considered(
        plan=candidate.plan,
        needed_bytes=candidate.needed_bytes,
        peak_allocated_bytes=candidate.peak_allocated_bytes,
        fits=candidate.fits,
        step_time_s=candidate.step_time_s,
    )


def _contradiction(details: Details) -> str:
    """What does not fit together in a file, in words; empty if everything does."""
    named = [*details.memory.by_module.values(), details.memory.by_category]
    named += [rung.by_category for rung in details.ladder]
    named += [{holder.category: 0} for holder in details.memory.holders]
    drawn = {category for window in details.timeline for category in window.by_category}
    unknown = sorted(drawn.union(*named) - set(CATEGORIES))
    if unknown:
        return f"categories {', '.join(map(repr, unknown[:3]))}; there are {', '.join(CATEGORIES)}"
    for window in details.timeline:
        length = len(window.moments)
        rows: dict[str, Sequence[float]] = {"moments": window.moments, **window.by_category}
        rows |= {"seconds": window.seconds} if window.seconds else {}
        rows |= {"reserved_bytes": window.reserved_bytes} if window.reserved_bytes else {}
        for name, row in rows.items():
            if len(row) != length or any(value < 0 for value in row):
                return f"window {window.window}: {name} has {len(row)} values, {length} of at least 0 are expected"
        borders = [window.peak, *(at for span in window.spans for at in (span.start, span.end))]
        if not window.by_category or not all(0 <= at < length for at in borders):
            return f"window {window.window}: a peak or a phase that lies outside of it"
    peak = details.memory.peak_allocated_bytes
    highest = max((max(window.allocated_bytes) for window in details.timeline), default=peak)
    if highest != peak:
        return f"a timeline that peaks at {highest} bytes, a report that says {peak}"
    return ""


def _values(plan: Plan, names: list[str]) -> str:
    return ", ".join(f"{name}={_short(getattr(plan, name))}" for name in names)


def _short(value: object) -> str:
    return f"{len(value)} segments" if isinstance(value, tuple) else repr(value)
