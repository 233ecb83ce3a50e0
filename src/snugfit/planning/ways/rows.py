"""What all ways out share: the ``WayOut`` that each makes, and the ``Case``, the job that does not fit and its traces.

Entry points: ``WayOut``, ``Case``, and ``row`` and ``unknown``, which make one. What a way changes is in its own file.
"""

import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from snugfit import hardware
from snugfit.jobs import Job
from snugfit.memory.reports import MemoryReport
from snugfit.memory.traces import Trace
from snugfit.planning import options
from snugfit.planning.own_loop import OwnLoop, own_loop
from snugfit.planning.ways import recorded_step
from snugfit.planning.ways.recorded_step import RecordedStep
from snugfit.plans import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class WayOut:
    """One way to make a job fit, with what it needs and costs."""

    name: str
    "One of ``ways_out.NAMES``."
    change: str
    "What is changed, in one sentence."
    code: str
    "The lines of a script that change, beside those of the plan."
    memory: MemoryReport | None
    "What one card needs, modelled; None where it could not be worked out, which the notes explain."
    step_time_s: float | None
    "Modelled seconds of one update."
    relative_time: float | None
    "Over the time of the plan that did not fit."
    fits: bool
    executed_by_snugfit: bool
    "Whether ``job`` and ``plan`` can be given to ``build`` and ``train`` as they are."
    plan: Plan
    by_hand: tuple[str, ...] = ()
    "All lines that the numbers rest on, those of the plan too, in plain PyTorch."
    decides: tuple[str, ...] = ()
    "Fields of the plan that the change rests on; the others may be chosen anew."
    missing: str = ""
    "The library without which snugfit cannot run it."
    optimizer: str = ""
    "Class of the optimizer that the change makes; empty where it stays."
    job: Job | None = None
    "The changed job; None where the change is not one of the job, or something is not installed."
    world_size: int = 1
    label: str = "modelled"
    is_least: bool = False
    "Whether it needs at least that much: it does not fit, and the rest was not worked out."
    notes: tuple[str, ...] = ()
    "Sentences: what it rests on, and what it costs beside time."

    @property
    def needed_bytes(self) -> int | None:
        """Peak reserved, context and margin of one card."""
        return None if self.memory is None else self.memory.needed_bytes

    def to_dict(self) -> dict[str, Any]:
        """The row as built-in values, ready for JSON."""
        return {
            "name": self.name,
            "change": self.change,
            "code": self.code,
            "by_hand": list(self.by_hand),
            "missing": self.missing,
            "needed_bytes": self.needed_bytes,
            "is_least": self.is_least,
            "by_category": None if self.memory is None else dict(self.memory.by_category),
            "step_time_s": self.step_time_s,
            "relative_time": self.relative_time,
            "fits": self.fits,
            "executed_by_snugfit": self.executed_by_snugfit,
            "plan": self.plan.to_dict(),
            "world_size": self.world_size,
            "label": self.label,
            "notes": list(self.notes),
        }


class Case:
    """The job that does not fit, and the traces of it made so far.

    Args:
        job: What is trained.
        plan: The smallest that did not fit.
        device: What it is planned for.
        budget_bytes: Of one card.
        model: The job's, data or not.
        is_planned_next: Whether a changed job is planned next, which tells whether it can be.
        runs_in_half: Whether its step runs in 16-bit types, as far as is known.
        is_precision_given: Whether the user has said in which precision it is to run.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        device: hardware.Device,
        budget_bytes: int,
        model: nn.Module,
        *,
        is_planned_next: bool = False,
        runs_in_half: bool = True,
        is_precision_given: bool = False,
    ) -> None:
        self.job, self.plan, self.device, self.budget_bytes, self.model = job, plan, device, budget_bytes, model
        self.weights = recorded_step.weights_of(model)
        self._steps: dict[Plan, RecordedStep] = {}
        self.is_planned_next, self.runs_in_half = is_planned_next, runs_in_half
        self.is_precision_given = is_precision_given
        self._loop: OwnLoop | None = None

    def step(self, plan: Plan) -> RecordedStep:
        """The job traced under a plan, once."""
        if plan not in self._steps:
            self._steps[plan] = recorded_step.record(self.job, plan, self.device, self.model)
        return self._steps[plan]

    def any_step(self) -> RecordedStep:
        """A trace that exists, that with the smallest weights; else one under the plan."""
        steps = sorted(self._steps.values(), key=lambda step: step.weight_itemsize)
        return steps[0] if steps else self.step(self.plan)

    @property
    def loop(self) -> OwnLoop:
        """What the job's own loop does, for lines of code."""
        if self._loop is None:
            self._loop = own_loop(self.job, self.model)
        return self._loop

    def seconds(self) -> float | None:
        """Modelled time of the job as it is, where it was traced."""
        return sum(self.any_step().seconds().values()) if self._steps else None

    @property
    def fast_plan(self) -> Plan:
        """The plan; where it is one in fp32, in the mixed precision in which the device is fast, if the step runs so.

        What needs least may be fp32 only because autocast keeps casts of all weights, which a way may do without.
        """
        if self.plan.precision != "32-true" or not self.runs_in_half:
            return self.plan
        return replace(self.plan, precision=options.precisions(self.device, {})[-1].value)

    def fast_step(self) -> RecordedStep:
        """The job traced under that plan if it is one of bf16 and the step runs so; else, or if given, under its own.

        Not all that is done by hand goes with the loss scale of fp16.
        """
        if not self.is_precision_given and self.fast_plan != self.plan and self.fast_plan.precision == "bf16-mixed":
            with suppress(Exception):  # of an operation or of the user's code: it is about the precision then
                return self.step(self.fast_plan)
        return self.step(self.plan)

    def changed(
        self,
        per_trained: Callable[[int], int],
        change: Callable[[RecordedStep], Trace],
        *,
        is_planned_again: bool = False,
    ) -> tuple[RecordedStep, Trace]:
        """The step, as it is and changed; with weights and gradients in bf16 where it does not fit otherwise.

        Args:
            per_trained: Bytes that a trained element takes beside its weight, of the bytes of its gradient: where even
                this exceeds the budget, the plan itself is not traced.
            change: Makes the changed step.
            is_planned_again: Whether a precision is chosen anew for the changed job; else mixed precision is taken
                where it fits and is faster.
        """
        lower = recorded_step.in_bfloat16(self.plan) if self._may_lower() else None
        if lower is None or self._least_bytes(per_trained(4)) <= self.budget_bytes:
            step = self.step(self.plan)
            trace = change(step)
            holds = self.holds(step, trace)
            other = self.fast_step() if holds and not is_planned_again else step
            if sum(other.seconds().values()) < sum(step.seconds().values()):
                changed = change(other)
                if self.holds(other, changed):
                    return other, changed
            if lower is None or holds:
                return step, trace
        step = self.step(lower)
        return step, change(step)

    def holds(self, step: RecordedStep, trace: Trace) -> bool:
        """Whether the budget holds a changed step."""
        return step.needed_bytes(trace) <= self.budget_bytes

    def _may_lower(self) -> bool:
        can = self.plan.precision == "bf16-true" or (self.device.fast_bfloat16 and self.runs_in_half)
        return can and recorded_step.in_bfloat16(self.plan) != self.plan

    def _least_bytes(self, per_trained: int) -> int:
        weights = sum(weight.numel * weight.itemsize for weight in self.weights)
        trained = sum(weight.numel for weight in self.weights if weight.is_trained)
        return weights + trained * per_trained + self.device.context_bytes


def unknown(case: Case, name: str, reason: str) -> WayOut:
    """The row of a way that cannot be worked out, with the reason."""
    return WayOut(
        name=name,
        change="cannot be worked out for this job",
        code="",
        memory=None,
        step_time_s=None,
        relative_time=None,
        fits=False,
        executed_by_snugfit=False,
        plan=case.plan,
        notes=(reason,),
    )


def row(
    case: Case,
    name: str,
    trace: Trace,
    *,
    change: str,
    code: str,
    by_hand: tuple[str, ...],
    seconds: float | None,
    plan: Plan,
    decides: tuple[str, ...] = (),
    missing: str = "",
    job: Job | None = None,
    cards: int = 1,
    is_least: bool = False,
    notes: tuple[str, ...] = (),
) -> WayOut:
    """The row of a way.

    Args:
        case: The job that does not fit.
        name: Of the way.
        trace: Of the changed step.
        change: One sentence.
        code: Lines of a script.
        by_hand: All of them, with those of the plan.
        seconds: Modelled, of one update.
        plan: That the numbers are for.
        decides: Fields of the plan that the change rests on; those of bf16 weights are added.
        missing: A library that is not installed.
        job: The changed one, where it can be trained as it is.
        cards: That take part.
        is_least: Whether it needs at least that much.
        notes: Sentences.
    """
    memory = trace.report()
    return WayOut(
        name=name,
        change=change,
        code=code,
        by_hand=by_hand,
        decides=(*decides, *(_OF_BFLOAT16 if plan.precision == "bf16-true" else ())),
        missing=missing,
        memory=memory,
        step_time_s=seconds,
        relative_time=None,
        fits=memory.needed_bytes <= case.budget_bytes,
        executed_by_snugfit=job is not None,
        plan=plan,
        job=job,
        world_size=max(cards, plan.world_size),
        is_least=is_least,
        notes=notes,
    )


_OF_BFLOAT16 = ("precision", "gradient_dtype", "bf16_update")
"Fields of a plan that a way with bf16 weights decides."


def optimizer_of(step: RecordedStep) -> str:
    """Name of the class of the job's first optimizer."""
    return step.optimizers[0].kind.__name__


def and_bfloat16(case: Case, step: RecordedStep) -> str:
    """The end of a sentence on a change that takes bf16 weights beside."""
    is_changed = step.plan.precision == "bf16-true" and case.plan.precision != "bf16-true"
    return ", weights and gradients in bf16" if is_changed else ""


def installed(library: str) -> tuple[bool, tuple[str, ...]]:
    """Whether an optional library can be found, and the sentence that says how to get it if not."""
    is_there = importlib.util.find_spec(library) is not None
    return is_there, () if is_there else (f'needs {library}, which is not installed: pip install "snugfit[{library}]"',)


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Importing torchao, which peft does too, warns of kernels that a build of torch cannot load; none is needed."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
