"""What ``snugfit estimate`` and ``snugfit measure`` answer: a document for programs and tables for people.

Entry points: ``estimate`` and ``measure``, each of which takes a request and gives an ``Answer``. Predicting, measuring
and comparing are ``memory``'s; writing the answer out is ``cli``'s.
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from snugfit import hardware, memory_tables, tables
from snugfit.arguments import EstimateRequest, PlannedRequest
from snugfit.errors import PlanError, UnsupportedError
from snugfit.jobs import Job
from snugfit.memory import measuring, tracing
from snugfit.memory.reporting import what_if
from snugfit.memory.reporting.comparing import Comparison, compare
from snugfit.memory.reports import MemoryReport
from snugfit.plans import Plan
from snugfit.targets import load_job_or_step, load_target, prints_on_stderr

_PATIENCE_S = 10.0
"What other plans would free is worked out unasked where that takes about this long at most."


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A report, and what it is compared with."""

    plan: Plan | None
    "None for a step of the user's own."
    target: str
    budget_bytes: int
    memory: MemoryReport
    savings: tuple[what_if.Saving, ...] | None = None
    "None: not worked out."
    savings_s: float = 0.0
    "About how long working them out would take; 0 where nobody wants to know."
    comparison: Comparison | None = None

    @property
    def fits(self) -> bool:
        """Whether the budget holds it."""
        return self.memory.fits(self.budget_bytes)

    def document(self) -> dict[str, Any]:
        """The answer as built-in values, ready for JSON; its keys are always the same."""
        compared = self.comparison
        return {
            "plan": None if self.plan is None else self.plan.to_dict(),
            "budget_bytes": self.budget_bytes,
            "needed_bytes": self.memory.needed_bytes,
            "fits": self.fits,
            "memory": self.memory.to_dict(),
            "what_if": None if self.savings is None else [line.to_dict() for line in self.savings],
            "measured": None if compared is None else compared.measured.to_dict(),
            "comparison": None if compared is None else compared.to_dict(),
        }

    def show(self, out: Console) -> None:
        """Print the answer as tables."""
        out.print(f"step:   {self.target}" if self.plan is None else f"plan:   {tables.plan_line(self.plan)}")
        out.print(f"device: {self.memory.device}, {self.memory.label}\n")
        memory_tables.report(out, self.memory, self.budget_bytes)
        if self.comparison is not None:
            memory_tables.comparison(out, self.comparison)
        if self.savings is not None:
            memory_tables.savings(out, self.savings, self.budget_bytes)
        elif self.savings_s:
            out.print(f"what other plans would free takes about {self.savings_s:.0f} s: --what-if")
        out.print(f"\n{tables.verdict(self.memory, self.budget_bytes)}")


def estimate(request: EstimateRequest) -> Answer:
    """Predict what a job, or a step of the user's own, needs.

    Raises:
        PlanError: An option that a step does not take, and what ``tracing`` raises.
        UnsupportedError: An operation that cannot be traced, or a comparison on a device that is not here.
    """
    with prints_on_stderr():
        card, budget_bytes = request.card()
        if request.compare:
            _check_present(card)
        target = load_job_or_step(request.target, **request.options())
        if not isinstance(target, Job):
            return _of_step(request, target, card, budget_bytes)
        planned = request.planned(target)
        start = time.perf_counter()
        memory = tracing.estimate(target, planned, card)
        answer = Answer(
            plan=planned,
            target=request.target,
            budget_bytes=budget_bytes,
            memory=memory,
            savings_s=0.0 if request.what_if is False else what_if.USUAL_TRACES * (time.perf_counter() - start),
        )
        if _wants_savings(request, answer):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of other plans than the one that was asked about
                lines = what_if.savings(target, planned, card, budget=budget_bytes, memory=memory)
            answer = replace(answer, savings=lines)
        if request.compare:
            answer = replace(answer, comparison=compare(memory, measuring.measure(target, planned, card)))
    return answer


def _of_step(
    request: EstimateRequest, make_step: Callable[[], Callable[[], object]], card: hardware.Device, budget_bytes: int
) -> Answer:
    given = request.said_of_a_plan()
    if given:
        raise PlanError(
            f"{', '.join(given)} {'belong' if len(given) > 1 else 'belongs'} to a job; a step of your own is traced as "
            "it is",
            got=f"{request.target} with {', '.join(given)}",
            expected="--device, --budget, and --seq or --image if the function takes them",
            hint="change the step itself, or write a function job() that returns a snugfit.Job",
        )
    memory = tracing.trace(make_step, card)
    return Answer(plan=None, target=request.target, budget_bytes=budget_bytes, memory=memory)


def _wants_savings(request: EstimateRequest, answer: Answer) -> bool:
    if request.what_if is not None:
        return request.what_if
    return not request.as_json and answer.savings_s <= _PATIENCE_S


def _check_present(card: hardware.Device) -> None:
    if card.kind == "cuda" and card.index is None:
        raise UnsupportedError(
            "an estimate can be compared only on a device of this machine",
            got=f"--compare --device {card.name}",
            expected="--device cpu, or a CUDA device that torch finds here (cuda, cuda:1)",
            hint="write --compare --device cpu; it checks the job and the rules of the CPU, not those of a card",
        )


def measure(request: PlannedRequest) -> Answer:
    """Run a few updates of a job on this machine, and say what they needed.

    Raises:
        UnsupportedError: A device that is not here.
        DeviceMemoryError: It is too small.
    """
    with prints_on_stderr():
        job = load_target(request.target, **request.options())
        card, budget_bytes = request.card()
        planned = request.planned(job)
        memory = measuring.measure(job, planned, card)
    return Answer(plan=planned, target=request.target, budget_bytes=budget_bytes, memory=memory)
