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
from snugfit.errors import InfeasibleError, PlanError, UnsupportedError
from snugfit.jobs import Job
from snugfit.memory import tracing
from snugfit.memory.reports import MemoryReport
from snugfit.planning import cost, options
from snugfit.planning.ladder import ACCUMULATION, CHECKPOINTING, CHOSEN, FULL_BATCH, MIXED_PRECISION, Candidate, Rung
from snugfit.planning.scaling import NotAffineError, ScaledTrace
from snugfit.plans import Plan

_ALLOWANCES = ("8bit-optimizer", "host-offload", "fused-backward", "lora", "fsdp")
_STATIC = ("parameter", "buffer", "gradient", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """What ``plan`` found."""

    plan: Plan
    "The fastest plan that fits."
    runner_up: Plan | None
    "The next fastest that differs in more than its micro-batch size; None if there is none."
    ladder: tuple[Rung, ...]
    "One technique after the other; the last rung is the chosen plan."
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
        given = {"micro_batch_size": batch_size, **self.fixed, "batch_size": batch_size, "world_size": world_size}
        given["micro_batch_size"] = min(given["micro_batch_size"], -(-batch_size // max(1, world_size)))
        self.first = Plan(**given)
        self.candidates: dict[Plan, Candidate] = {}
        self._families: dict[tuple[Any, ...], ScaledTrace | None] = {}
        self._surplus: dict[tuple[Any, ...], int] = {}
        self._traced: set[Plan] = set()

    def run(self) -> PlanReport:
        """Climb the ladder, then choose among what it met."""
        model = tracing.skeleton(self.job)
        precisions = options.precisions(self.device, self.fixed)
        recomputations = options.recomputations(model, self.fixed)
        start = replace(self.first, precision=precisions[0].value, recompute=recomputations[0].value)
        mixed = replace(start, precision=precisions[-1].value)
        rungs = [(FULL_BATCH, self._exact(start))]
        if mixed != start:
            rungs.append((MIXED_PRECISION, self._judge(mixed)))
        if not rungs[-1][1].fits:
            if "micro_batch_size" not in self.fixed and mixed.samples_per_rank > 1:
                rungs.append((ACCUMULATION, self._fastest(mixed)))
            for option in recomputations[1:]:
                rungs.append((CHECKPOINTING, self._fastest(replace(mixed, recompute=option.value))))
        contenders = [rung for _, rung in rungs]
        if not any(candidate.fits for candidate in contenders):
            # Cast copies of weights can make mixed precision the larger one.
            contenders += [self._fastest(replace(start, recompute=option.value)) for option in recomputations]
        chosen = self._choose(contenders)
        if chosen.plan != rungs[-1][1].plan:
            rungs.append((CHOSEN, chosen))
        return self._report(chosen, contenders, rungs, precisions[-1], model)

    def _exact(self, plan: Plan) -> Candidate:
        """A candidate traced as it is."""
        self._traced.add(plan)
        gc.collect()  # the last trace's tensors hold each other
        trace = tracing.record_job(self.job, plan, self.device)
        report = trace.report()
        candidate = Candidate(
            plan=plan,
            memory=report,
            fits=report.fits(self.budget_bytes),
            step_time_s=cost.step_time(trace.work, self.device),
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
        if failing <= share:
            self._judge(replace(plan, micro_batch_size=failing))  # the reasons say what one sample more would need
        sizes_tried = options.micro_batch_sizes(plan.samples_per_rank, fitting)[:_SIZES_TIMED]
        tried = [self._judge(replace(plan, micro_batch_size=size)) for size in sizes_tried]
        tried = [candidate for candidate in tried if candidate.fits]
        best = min(candidate.step_time_s for candidate in tried)
        equals = [candidate for candidate in tried if candidate.step_time_s <= best * _EQUAL_TIME]
        return max(equals, key=lambda candidate: candidate.plan.micro_batch_size)

    def _choose(self, contenders: list[Candidate]) -> Candidate:
        """The fastest contender that fits, traced as it is; one that then does not fit is made smaller."""
        while fitting := [candidate for candidate in contenders if candidate.fits]:
            best = min(fitting, key=_by_time)
            exact = self._exact(best.plan)
            if exact.fits:
                return exact
            contenders.remove(best)
            if best.plan.micro_batch_size > 1 and "micro_batch_size" not in self.fixed:
                self._raise_surplus(best.plan, exact.memory.needed_bytes - best.memory.needed_bytes)
                contenders.append(self._fastest(best.plan, best.plan.micro_batch_size - 1))
        smallest = min(self.candidates.values(), key=lambda candidate: candidate.memory.needed_bytes)
        raise _infeasible(smallest, self.budget_bytes, self.device)

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
            frontier=_frontier(list(self.candidates.values())),
            reasons=self._reasons(chosen, precision, model),
            memory=chosen.memory,
        )

    def _reasons(self, chosen: Candidate, precision: options.Option, model: nn.Module) -> dict[str, str]:
        plan, memory = chosen.plan, chosen.memory
        norms = sum(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
        reasons = {field.name: "given" for field in fields(Plan) if field.name in self.fixed}
        reasons["batch_size"] = "given; never changed"
        reasons["world_size"] = "given"
        used = f"{sizes.text(memory.needed_bytes)} of {sizes.text(self.budget_bytes)} with context and margin"
        if plan.accumulation_steps == 1:
            reasons.setdefault("micro_batch_size", f"the whole batch fits: {used}")
        else:
            larger = [c for c in self.candidates.values() if _differs_in_size(c.plan, plan) and not c.fits]
            next_up = min(larger, key=lambda c: c.plan.micro_batch_size, default=None)
            beyond = (
                f"; {next_up.plan.micro_batch_size} would need {sizes.text(next_up.memory.needed_bytes)}"
                if next_up
                else ""
            )
            reasons.setdefault("micro_batch_size", f"the fastest size that fits: {used}{beyond}")
        reasons.setdefault(
            "precision", precision.reason if plan.precision == precision.value else "fp32 is the fastest that fits"
        )
        if plan.recompute:
            saved = [c for c in self.candidates.values() if not c.plan.recompute and c.plan.precision == plan.precision]
            faster = min((c.memory.needed_bytes for c in saved), default=0)
            why = (
                "without it nothing fits"
                if saved and faster > self.budget_bytes
                else "with it larger micro-batches fit"
            )
            reasons.setdefault("recompute", f"{len(plan.recompute)} blocks keep only their inputs: {why}")
        else:
            reasons.setdefault("recompute", "not needed: recomputing would only cost time")
        reasons.setdefault("optimizer_impl", "the job's own choice is kept")
        reasons.setdefault(
            "norm_policy",
            f"{norms} BatchNorm layers see micro-batches, not the batch: not equivalent to the full batch"
            if norms and plan.accumulation_steps > 1
            else "no BatchNorm layer is affected",
        )
        return reasons


_SIZES_TIMED = 4
"Micro-batch sizes, from the largest that fits downwards, whose step time is compared."
_EQUAL_TIME = 1.01
"Ratio up to which two modelled step times are taken as equal."


def _family_of(plan: Plan) -> tuple[Any, ...]:
    return plan.precision, plan.recompute


def _cut(plan: Plan) -> list[int]:
    share, size = plan.samples_per_rank, plan.micro_batch_size
    return [min(size, share - start) for start in range(0, share, size)]


def _by_time(candidate: Candidate) -> tuple[float, int, int]:
    """Fastest first; among equals the one with less recomputation, then with larger micro-batches."""
    plan = candidate.plan
    return round(candidate.step_time_s, 9), len(plan.recompute), -plan.micro_batch_size


def _differs_in_size(a: Plan, b: Plan) -> bool:
    return replace(a, micro_batch_size=1) == replace(b, micro_batch_size=1) and a.micro_batch_size > b.micro_batch_size


def _frontier(candidates: list[Candidate]) -> tuple[Candidate, ...]:
    frontier: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.step_time_s, c.memory.needed_bytes)):
        if not frontier or candidate.memory.needed_bytes < frontier[-1].memory.needed_bytes:
            frontier.append(candidate)
    return tuple(frontier)


def _infeasible(smallest: Candidate, budget_bytes: int, device: hardware.Device) -> InfeasibleError:
    memory, plan = smallest.memory, smallest.plan
    held = ", ".join(f"{category} {sizes.text(size)}" for category, size in memory.by_category.items())
    static = memory.static_bytes
    if static + memory.context_bytes > budget_bytes:
        at_end = memory.at("backward end")
        alone = ", ".join(
            f"{category} {sizes.text(at_end.get(category, 0))}" for category in _STATIC if at_end.get(category)
        )
        hint = f"these tensors alone exceed it, at any micro-batch size: {alone}; use an optimizer with less state, "
        hint += "freeze weights, or take a larger device"
    else:
        hint = "use an optimizer with less state, shorter inputs, or a larger device"
    return InfeasibleError(
        f"no plan fits the budget of {sizes.text(budget_bytes)} on {device.name}",
        got=f"the smallest candidate needs {sizes.text(memory.needed_bytes)} "
        f"(micro_batch_size={plan.micro_batch_size}, precision={plan.precision}, "
        f"recompute={options.describe(plan.recompute)}): {held}; "
        f"context {sizes.text(memory.context_bytes)}, margin {sizes.text(memory.margin_bytes)}",
        expected=f"peak reserved, context and margin together <= {sizes.text(budget_bytes)}",
        hint=hint,
        smallest=memory,
        plan=plan,
        budget_bytes=budget_bytes,
        static_bytes=static,
    )


def _check_names(fixed: Mapping[str, Any], allow: Collection[str]) -> None:
    known = {field.name for field in fields(Plan)}
    unknown = sorted(set(fixed) - known)
    if unknown:
        raise PlanError(
            f"unknown field of a plan in fixed: {', '.join(unknown)}",
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
