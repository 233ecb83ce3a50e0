"""Finds the fastest plan that fits: micro-batch size, precision and recomputation for a fixed batch size.

Entry point: ``plan``. Every combination is judged on a trace of the job's own step (``scaling``), the chosen one is
traced once more as it is. The time model is a roofline, so it ranks plans; it does not promise seconds.
"""

import gc
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from snugfit import hardware, sizes
from snugfit.errors import PlanError, UnsupportedError
from snugfit.jobs import Job
from snugfit.memory import tracing
from snugfit.memory.events import Work
from snugfit.memory.reports import MemoryReport
from snugfit.memory.traces import Trace
from snugfit.planning import cost, explain, options
from snugfit.planning.ladder import ACCUMULATION, CHECKPOINTING, CHOSEN, FULL_BATCH, MIXED_PRECISION, Candidate, Rung
from snugfit.planning.scaling import NotAffineError, ScaledTrace
from snugfit.plans import Plan
from snugfit.training import fingerprint

_ALLOWANCES = ("8bit-optimizer", "host-offload", "fused-backward", "lora", "fsdp")


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
    "Considered plans of which no other needs less memory and less time, largest first."
    reasons: Mapping[str, str]
    "Field of the plan to the reason of its value."
    memory: MemoryReport
    "What the chosen plan needs, modelled."


def plan(
    job: Job,
    device: str | hardware.Device = "auto",
    batch_size: int = 32,
    budget: str | int | None = None,
    world_size: int = 1,
    fixed: Mapping[str, Any] | None = None,
    allow: Collection[str] = (),
) -> PlanReport:
    """Find the fastest plan whose memory fits.

    The batch size is never changed. Memory is modelled (label of the reports), time is a roofline.

    Args:
        job: What is trained.
        device: Name from the catalogue, ``"auto"``, ``"cpu"`` or a size such as ``"24GiB"``.
        batch_size: Samples per update over all ranks.
        budget: Size or bytes that peak, context and margin together may take; None means the device's memory.
        world_size: Number of ranks.
        fixed: Fields of ``Plan`` that are given, such as ``{"precision": "bf16-mixed"}``.
        allow: Changes of the job itself that may be made; none is available in this version.

    Raises:
        InfeasibleError: Nothing fits; ``.smallest`` is the report of the closest plan, ``.budget_bytes`` the budget.
        PlanError: An argument outside of its range, an unknown field or device.
        UnsupportedError: An operation that cannot be traced, or an allowance that is not available yet.
    """
    search = _Search(job, device, batch_size, budget, world_size, fixed or {}, allow)
    with tracing.collector_off():
        return search.run()


class _Search:
    """One search: the families of traces made so far and the candidates judged with them."""

    def __init__(
        self,
        job: Job,
        device: str | hardware.Device,
        batch_size: int,
        budget: str | int | None,
        world_size: int,
        fixed: Mapping[str, Any],
        allow: Collection[str],
    ) -> None:
        _check_names(fixed, allow)
        self.job = job
        self.device = hardware.resolve(device)
        self.budget_bytes = self.device.memory_bytes if budget is None else sizes.parse(budget)
        self.fixed = dict(fixed)
        whole = Plan(**{"micro_batch_size": 1, **self.fixed, "batch_size": batch_size, "world_size": world_size})
        given = "micro_batch_size" in self.fixed
        self.first = whole if given else replace(whole, micro_batch_size=whole.samples_per_rank)
        self.candidates: dict[Plan, Candidate] = {}
        self._families: dict[tuple[Any, ...], ScaledTrace | None] = {}
        self._surplus: dict[tuple[Any, ...], int] = {}
        self._traced: set[Plan] = set()

    def run(self) -> PlanReport:
        """Climb the ladder, then choose among what it met."""
        model = tracing.skeleton(self.job)
        precisions = options.precisions(self.device, self.fixed)
        recomputations = options.recomputations(model, self.fixed)
        first = replace(self.first, fingerprint=self.first.fingerprint or fingerprint.of(model))
        start = replace(first, precision=precisions[0].value, recompute=recomputations[0].value)
        mixed = replace(start, precision=precisions[-1].value)
        rungs = [(f"{FULL_BATCH}, {options.short(start.precision)}", self._exact(start))]
        if mixed != start:
            rungs.append((MIXED_PRECISION, self._judge(mixed)))
        if not rungs[-1][1].fits:
            if "micro_batch_size" not in self.fixed and mixed.samples_per_rank > 1:
                rungs.append((ACCUMULATION, self._fastest(mixed)))
            for option in recomputations[1:]:
                rungs.append((CHECKPOINTING, self._fastest(replace(mixed, recompute=option.value))))
        contenders = dict(rungs)
        if not any(candidate.fits for candidate in contenders.values()):
            for option in recomputations:  # cast copies of weights can make mixed precision the larger one
                name = f"fp32, {options.describe(option.value)} recomputed"
                contenders[name] = self._fastest(replace(start, recompute=option.value))
        chosen = self._choose(contenders)
        rungs = [(name, contenders[name]) for name, _ in rungs]
        if all(chosen.plan != rung.plan for _, rung in rungs):
            rungs.append((CHOSEN, chosen))
        return self._report(chosen, list(contenders.values()), rungs, precisions[-1], model)

    def _exact(self, plan: Plan) -> Candidate:
        """A candidate traced as it is."""
        if plan in self._traced:
            return self.candidates[plan]
        self._traced.add(plan)
        gc.collect()  # the last trace's tensors hold each other
        trace = tracing.record_job(self.job, plan, self.device)
        report = trace.report()
        candidate = Candidate(
            plan=plan,
            memory=report,
            fits=report.fits(self.budget_bytes),
            step_time_s=cost.step_time(_whole_window(trace, plan), self.device),
        )
        self.candidates[plan] = candidate
        return candidate

    def _fits(self, plan: Plan) -> bool:
        """Whether a plan would be judged to fit, without making a candidate of it."""
        if plan in self.candidates:
            return self.candidates[plan].fits
        family = self._family(plan)
        if family is None:
            return self._exact(plan).fits
        needed = family.needed_bytes(plan.micro_batch_size, plan.accumulation_steps)
        return needed + self._surplus.get(_family_of(plan), 0) <= self.budget_bytes

    def _judge(self, plan: Plan) -> Candidate:
        """A candidate judged by the traces of its family."""
        if plan in self.candidates:
            return self.candidates[plan]
        family = self._family(plan)
        if family is None:
            return self._exact(plan)
        report = family.report(plan.micro_batch_size, plan.accumulation_steps)
        candidate = Candidate(
            plan=plan,
            memory=report,
            fits=report.needed_bytes + self._surplus.get(_family_of(plan), 0) <= self.budget_bytes,
            step_time_s=family.step_time(_cut(plan)),
        )
        self.candidates[plan] = candidate
        return candidate

    def _family(self, plan: Plan) -> ScaledTrace | None:
        """The traces of all micro-batch sizes of a plan; None where they cannot be interpolated."""
        key = _family_of(plan)
        share = plan.samples_per_rank
        if key not in self._families:
            try:
                base = max(1, share // 4)
                pair = (base, max(base + 1, share // 2))
                gc.collect()
                self._families[key] = ScaledTrace.record(self.job, plan, self.device, pair) if share > 1 else None
            except NotAffineError:
                self._families[key] = None
        return self._families[key]

    def _fastest(self, plan: Plan, largest: int | None = None) -> Candidate:
        """The fastest micro-batch size up to the largest that fits; the smallest size if none does.

        Sizes within a percent of the fastest are equals, of which the largest is taken: it uses what was allowed.
        """
        share = plan.samples_per_rank if largest is None else largest
        if "micro_batch_size" in self.fixed:
            return self._judge(plan)
        whole = replace(plan, micro_batch_size=share)
        if share == 1 or self._fits(whole):
            return self._judge(whole)
        fitting, failing = 0, share
        while failing - fitting > 1:
            middle = (fitting + failing) // 2
            if self._fits(replace(plan, micro_batch_size=middle)):
                fitting = middle
            else:
                failing = middle
        if fitting == 0:
            return self._judge(replace(plan, micro_batch_size=1))
        self._judge(replace(plan, micro_batch_size=failing))  # the reasons say what one sample more would need
        sizes_tried = options.micro_batch_sizes(plan.samples_per_rank, fitting)[:_SIZES_TIMED]
        tried = [self._judge(replace(plan, micro_batch_size=size)) for size in sizes_tried]
        tried = [candidate for candidate in tried if candidate.fits]
        best = min(candidate.step_time_s for candidate in tried)
        equals = [candidate for candidate in tried if candidate.step_time_s <= best * _EQUAL_TIME]
        return max(equals, key=lambda candidate: candidate.plan.micro_batch_size)

    def _choose(self, contenders: dict[str, Candidate]) -> Candidate:
        """The fastest contender that fits, traced as it is; one that then does not fit is made smaller."""
        while fitting := {name: candidate for name, candidate in contenders.items() if candidate.fits}:
            name = min(fitting, key=lambda name: _by_time(fitting[name]))
            best = fitting[name].plan
            exact = contenders[name] = self._exact(best)
            if exact.fits:
                return exact
            if best.micro_batch_size > 1 and "micro_batch_size" not in self.fixed:
                self._raise_surplus(best, exact.memory.needed_bytes - fitting[name].memory.needed_bytes)
                contenders[name] = self._fastest(best, best.micro_batch_size - 1)
        smallest = min(self.candidates.values(), key=lambda candidate: candidate.memory.needed_bytes)
        raise explain.infeasible(smallest, self.budget_bytes, self.device)

    def _raise_surplus(self, plan: Plan, num_bytes: int) -> None:
        """Remember by how much a family's traces were too low (the order of blocks), and judge its sizes again."""
        family = _family_of(plan)
        self._surplus[family] = self._surplus.get(family, 0) + max(num_bytes, 0)
        self.candidates = {
            known: candidate
            for known, candidate in self.candidates.items()
            if known in self._traced or _family_of(known) != family
        }

    def _report(
        self,
        chosen: Candidate,
        contenders: list[Candidate],
        rungs: list[tuple[str, Candidate]],
        precision: options.Option,
        model: nn.Module,
    ) -> PlanReport:
        first = rungs[0][1]
        ladder = tuple(
            Rung(
                name=name,
                plan=candidate.plan,
                memory=candidate.memory,
                fits=candidate.fits,
                step_time_s=candidate.step_time_s,
                relative_time=candidate.step_time_s / first.step_time_s,
            )
            for name, candidate in ((name, self.candidates.get(rung.plan, rung)) for name, rung in rungs)
        )
        others = [c for c in contenders if c.fits and _family_of(c.plan) != _family_of(chosen.plan)]
        return PlanReport(
            plan=chosen.plan,
            runner_up=min(others, key=_by_time).plan if others else None,
            ladder=ladder,
            frontier=_frontier(list(self.candidates.values()), chosen),
            reasons=explain.reasons(chosen, self.candidates.values(), self.fixed, self.budget_bytes, precision, model),
            memory=chosen.memory,
        )


_SIZES_TIMED = 4
"Micro-batch sizes, from the largest that fits downwards, whose step time is compared."
_EQUAL_TIME = 1.01
"Ratio up to which two modelled step times are taken as equal."


def _whole_window(trace: Trace, plan: Plan) -> list[Work]:
    """The work of all micro-batches of a window, of which a trace runs two full ones and the tail."""
    work = list(trace.work)
    starts = trace.micro_batch_starts
    missing = plan.accumulation_steps - len(starts)
    if missing <= 0:
        return work
    last_backward = max(i for i, item in enumerate(work) if item.phase == "backward")
    return work + work[starts[1] : (*starts, last_backward + 1)[2]] * missing


def _family_of(plan: Plan) -> tuple[Any, ...]:
    return plan.precision, plan.recompute


def _cut(plan: Plan) -> list[int]:
    share, size = plan.samples_per_rank, plan.micro_batch_size
    return [min(size, share - start) for start in range(0, share, size)]


def _by_time(candidate: Candidate) -> tuple[float, int, int]:
    """Fastest first; among equals the one with less recomputation, then with larger micro-batches."""
    plan = candidate.plan
    return round(candidate.step_time_s, 9), len(plan.recompute), -plan.micro_batch_size


def _frontier(candidates: list[Candidate], chosen: Candidate) -> tuple[Candidate, ...]:
    """The candidates that no other beats in both time and memory; those that count as equal to the chosen one yield."""
    frontier: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.step_time_s, c.memory.needed_bytes)):
        is_equal = candidate.step_time_s <= chosen.step_time_s <= candidate.step_time_s * _EQUAL_TIME
        if candidate.plan != chosen.plan and is_equal and candidate.memory.needed_bytes <= chosen.memory.needed_bytes:
            continue
        if not frontier or candidate.memory.needed_bytes < frontier[-1].memory.needed_bytes:
            frontier.append(candidate)
    return tuple(frontier)


def _check_names(fixed: Mapping[str, Any], allow: Collection[str]) -> None:
    if not isinstance(fixed, Mapping):
        raise PlanError(
            "fixed is not a mapping",
            got=repr(fixed),
            expected="names of Plan's fields to values",
            hint='write fixed={"precision": "bf16-mixed"}',
        )
    known = {field.name for field in fields(Plan)} - {"batch_size", "world_size"}
    unknown = sorted(set(fixed) - known)
    if unknown:
        raise PlanError(
            f"not a field that can be fixed: {', '.join(unknown)}",
            got=repr(dict(fixed)),
            expected=f"fields of Plan: {', '.join(sorted(known))}",
            hint='write fixed={"precision": "bf16-mixed"}',
        )
    for name in allow:
        if name not in _ALLOWANCES:
            expected = " | ".join(map(repr, _ALLOWANCES))
            raise PlanError("unknown allowance", got=repr(name), expected=expected, hint="plan without it")
        raise UnsupportedError(
            f"the allowance {name!r} is not available in this version",
            got=f"allow={tuple(allow)!r}",
            expected="allow=()",
            hint="plan without it",
        )
