"""What a search answers: the plan, what it needs, why, and what else was possible.

Entry point: ``PlanReport``. Finding it is ``search``'s, printing it the command line's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from snugfit.jobs import Job
from snugfit.memory.reports import MemoryReport
from snugfit.memory.traces import Trace
from snugfit.planning.ladder import Candidate, Rung
from snugfit.planning.own_loop import OwnLoop
from snugfit.planning.scale import Advice
from snugfit.planning.trials import Trial
from snugfit.planning.ways_out import WayOut
from snugfit.plans import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """What ``plan`` found."""

    plan: Plan
    "The fastest plan that fits."
    runner_up: Plan | None
    "The next fastest that differs in more than its micro-batch size; None if there is none."
    ladder: tuple[Rung, ...]
    "One technique after the other; the chosen plan is one of them."
    frontier: tuple[Candidate, ...]
    "Plans of which no other needs less memory and less time, the fastest first; the chosen one is among them."
    contenders: tuple[Candidate, ...] = ()
    "Plans that fit or are predicted to, the fastest first: one for each precision and micro-batch size."
    reasons: Mapping[str, str]
    "Field of the plan to the reason of its value."
    memory: MemoryReport
    "What the chosen plan needs, modelled."
    step_time_s: float
    "Modelled seconds of one update of the chosen plan."
    budget_bytes: int
    "For peak, context and margin."
    notes: tuple[str, ...] = ()
    "Where the usual order of the techniques is not the best one here, and why; how sure the times are."
    advice: tuple[Advice, ...] = ()
    "What accumulation, the batch size and more cards mean for this plan, in numbers."
    changes: tuple[WayOut, ...] = ()
    "Changes of the job itself that were allowed and that the plan needs; empty: the plan is for the job as it is."
    job: Job | None = field(default=None, repr=False, compare=False)
    "The job with these changes, for ``build`` and ``train``; None without changes."
    loop: OwnLoop = field(default_factory=OwnLoop)
    "What the job's own training loop does beside the plan."
    trials: tuple[Trial, ...] = ()
    "What the best contenders took when they were run; empty where nothing was measured."
    trace: Trace | None = field(default=None, repr=False, compare=False)
    "The trace of the chosen plan; None where it was not kept."
