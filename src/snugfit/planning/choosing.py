"""Chooses a plan: climbs the ladder, lets the joint search choose, and traces what it chooses as it is.

Entry point: ``Search``. Where a trace needs more than the chain of units predicted, the choice is made again in less
room; where it needs much less, once more in all of it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from snugfit import hardware, sizes
from snugfit.errors import BatchError, PlanError, SnugfitError, UnsupportedError
from snugfit.jobs import Job
from snugfit.memory import tracing
from snugfit.planning import explain, options, scale, ways_out
from snugfit.planning.errands import Errand, errand
from snugfit.planning.joint import ANY, BLOCKS, NONE, Choice, JointSearch, family_of
from snugfit.planning.ladder import ACCUMULATION, CHECKPOINTING, CHOSEN, FULL_BATCH, MIXED_PRECISION, Candidate, Rung
from snugfit.planning.plan_report import PlanReport
from snugfit.planning.traced_plans import TracedPlan, as_candidate, traced_plan, undominated
from snugfit.plans import Plan, Segment
from snugfit.training import checkpointing, fingerprint


class Search:
    """One search: what was traced so far and what was chosen with it."""

    def __init__(
        self,
        job: Job,
        device: str | hardware.Device,
        batch_size: int,
        budget: str | int | None,
        world_size: int,
        fixed: Mapping[str, Any],
        allow: Collection[str],
        progress: Callable[[str], None],
    ) -> None:
        self.job, self.allow, self.progress = job, tuple(allow), progress
        self.device = hardware.resolve(device)
        self.budget_bytes = self.device.memory_bytes if budget is None else sizes.parse(budget)
        self.fixed = dict(fixed)
        whole = Plan(**{"micro_batch_size": 1, **self.fixed, "batch_size": batch_size, "world_size": world_size})
        given = "micro_batch_size" in self.fixed
        first = whole if given else replace(whole, micro_batch_size=whole.samples_per_rank)
        self.model = tracing.skeleton(job)
        self.first = replace(first, fingerprint=first.fingerprint or fingerprint.of(self.model))
        self.precisions = options.precisions(self.device, self.fixed)
        self.joint = JointSearch(job, self.device, self.first, self.fixed, self.model, self.budget_bytes)
        self.traced: dict[Plan, TracedPlan] = {}
        self.begun: dict[Plan, Errand[list[TracedPlan]]] = {}

    def run(self) -> PlanReport:
        """Climb the ladder, then choose among all plans."""
        try:
            return self._run()
        finally:
            for begun in self.begun.values():
                begun.give_up()

    def _run(self) -> PlanReport:
        plain = replace(self.first, precision=self.precisions[0].value)
        mixed = replace(self.first, precision=self.precisions[-1].value)
        if mixed != plain:
            self._begin([plain])
        whole = self._exact(mixed)
        if not whole.fits and whole.memory.static_bytes <= self.joint.allowed_bytes:
            self.joint.prepare(mixed, whole.memory.peak_reserved_bytes)
        rungs = [(f"{FULL_BATCH}, {options.short(plain.precision)}", self._exact(plain))]
        if mixed != plain:
            rungs.append((MIXED_PRECISION, whole))
        if all(traced.memory.static_bytes > self.joint.allowed_bytes for _, traced in rungs):
            raise self._hopeless(mixed)
        if not rungs[-1][1].fits and "recompute" not in self.fixed:
            rungs += self._middle_rungs(mixed)
        elif not rungs[-1][1].fits and "micro_batch_size" not in self.fixed:
            rungs.append((ACCUMULATION, self._by_itself(mixed, ANY)))
        chosen, choice = self._choose([mixed, plain] if mixed != plain else [mixed], rungs)
        if all(traced.plan != chosen.plan for _, traced in rungs):
            rungs.append((CHOSEN, chosen))
        return self._report(chosen, choice, rungs)

    def _middle_rungs(self, mixed: Plan) -> list[tuple[str, TracedPlan]]:
        """Accumulation by itself, then with every block recomputed."""
        wanted = []
        if "micro_batch_size" not in self.fixed and mixed.samples_per_rank > 1:
            wanted.append((ACCUMULATION, NONE))
        if self.joint.names:
            wanted.append((CHECKPOINTING, BLOCKS))
        first = [self.joint.best(mixed, recompute) for _, recompute in wanted[1:]]
        self._begin([choice.plan for choice in first if choice is not None])
        return [(name, self._by_itself(mixed, recompute)) for name, recompute in wanted]

    def _begin(self, plans: Iterable[Plan]) -> None:
        """Let plans be traced that will be asked for, while something else is done."""
        wanted = [plan for plan in plans if plan not in self.traced]
        if wanted:
            begun = errand(lambda: [self._trace(plan) for plan in wanted])
            self.begun.update(dict.fromkeys(wanted, begun))

    def _by_itself(self, like: Plan, recompute: str) -> TracedPlan:
        """The fastest plan of a family that fits by its own trace; the one that needs least if none does."""
        self.progress("units of the model")
        found: TracedPlan | None = None
        for _ in range(_MOST_OF_A_RUNG):
            choice = self.joint.best(like, recompute)
            if choice is None:
                break
            traced = self._attempt(choice)
            if traced is None:
                continue
            self._learn(choice, traced)
            if traced.fits:
                found = self._larger(traced, like, recompute)
                break
        while found is None:
            found = self._attempt(self.joint.smallest(like, recompute))
        return found

    def _larger(self, found: TracedPlan, like: Plan, recompute: str) -> TracedPlan:
        """A plan with larger micro-batches than one that leaves room, if there is one that fits as well."""
        if not self._has_room(found):
            return found
        with self.joint.hoping():
            choice = self.joint.best(like, recompute)
        if choice is None or choice.plan.micro_batch_size <= found.plan.micro_batch_size:
            return found
        traced = self._attempt(choice)
        is_as_fast = traced is not None and traced.fits and traced.step_time_s <= found.step_time_s * _AS_FAST
        return traced if traced is not None and is_as_fast else found

    def _choose(
        self, families: Sequence[Plan], rungs: Sequence[tuple[str, TracedPlan]]
    ) -> tuple[TracedPlan, Choice | None]:
        """The fastest plan that fits by its own trace.

        Raises:
            InfeasibleError: None does.
        """
        fitting = [traced for _, traced in rungs if traced.fits]
        best = min(fitting, key=lambda traced: traced.step_time_s, default=None)
        chosen: Choice | None = None
        if best is not None and best.plan.accumulation_steps == 1 and not best.plan.recompute:
            return self._with_faster_update(best), None  # nothing runs less
        for _ in range(_MOST_TRACES):
            choice = self._next(families, best)
            if choice is None:
                break
            traced = self._attempt(choice)
            if traced is None:  # a run of units that is no chain after all
                continue
            self._learn(choice, traced)
            better = traced.fits and (best is None or traced.step_time_s < best.step_time_s)
            if better:
                best, chosen = self._larger(traced, replace(choice.plan, recompute=self.first.recompute), ANY), choice
            if better and not self._has_room(traced):
                break
        best = best or self._without_units(families[0])
        if best is None:
            raise self._infeasible(families)
        return best, chosen

    def _with_faster_update(self, whole: TracedPlan) -> TracedPlan:
        """The whole batch with the optimizer's fused form, if it has one that is faster and fits."""
        if "optimizer_impl" in self.fixed:
            return whole
        try:
            fused = self._exact(replace(whole.plan, optimizer_impl="fused"))
        except (PlanError, UnsupportedError):
            return whole
        return fused if fused.fits and fused.step_time_s < whole.step_time_s else whole

    def _without_units(self, like: Plan) -> TracedPlan | None:
        """A plan that recomputes every block, where that is no chain of units: blocks that run several times."""
        if "recompute" in self.fixed:
            return None
        try:
            blocks = checkpointing.blocks(self.model)
        except PlanError:
            return None
        found: TracedPlan | None = None
        for size in sorted(self.joint.sizes(family_of(like)))[::_STRIDE]:
            try:
                traced = self._exact(replace(like, micro_batch_size=size, recompute=blocks))
            except (PlanError, UnsupportedError, BatchError):
                continue
            if not traced.fits:
                break
            found = traced
        return found

    def _next(self, families: Sequence[Plan], best: TracedPlan | None) -> Choice | None:
        """The fastest choice of all families that was not traced yet and is faster than what is known to fit."""
        found: list[Choice] = []
        for family in families:
            known = min((choice.step_time_s for choice in found), default=float("inf"))
            whole = self.traced.get(family)
            if whole is not None and whole.step_time_s >= known:
                continue  # even the whole batch at once, with nothing recomputed, is slower
            self.progress(f"micro-batches and segments, {options.short(family.precision)}")
            for like in self.joint.variants(family):
                choice = self.joint.best(like)
                if choice is not None:
                    found.append(choice)
        found = [choice for choice in found if choice.plan not in self.traced]
        found = [choice for choice in found if best is None or choice.step_time_s < best.step_time_s * _FASTER]
        return min(found, key=lambda choice: choice.step_time_s, default=None)

    def _attempt(self, choice: Choice) -> TracedPlan | None:
        """The choice traced as it is; None where it cannot run, which is remembered.

        Its micro-batches are too small for BatchNorm, or units that are recomputed as one are no chain.
        """
        try:
            return self._exact(choice.plan)
        except BatchError:
            if choice.plan.micro_batch_size in self.joint.too_small:
                raise
            self.joint.too_small.add(choice.plan.micro_batch_size)
            return None
        except (UnsupportedError, PlanError):
            if not self.joint.runs or not any(span.option is None for span in choice.spans):
                raise
            self.joint.runs = False
            return None

    def _learn(self, choice: Choice, traced: TracedPlan) -> None:
        """Remember by how much the chain's prediction was off: fragments, runs, what the host takes."""
        kind = choice.kind.family, choice.kind.is_recomputed
        self.joint.pace[kind] = self.joint.pace.get(kind, 1.0) * traced.step_time_s / choice.step_time_s
        beyond = traced.memory.peak_reserved_bytes - choice.allocated_bytes
        known = self.joint.surplus.get(choice.kind, 0)
        if not traced.fits:  # never twice the same room
            beyond = max(beyond, known + (traced.memory.needed_bytes - self.budget_bytes))
        self.joint.surplus[choice.kind] = beyond

    def _has_room(self, traced: TracedPlan) -> bool:
        """Whether a plan that fits leaves room that could make it faster."""
        if traced.plan.accumulation_steps == 1 and not traced.plan.recompute:
            return False
        unused = self.budget_bytes - traced.memory.needed_bytes
        return unused > _MUCH * self.budget_bytes

    def _exact(self, plan: Plan) -> TracedPlan:
        """A plan traced as it is."""
        begun = self.begun.pop(plan, None)
        if begun is not None:
            for traced in begun.result():
                self.traced[traced.plan] = traced
                self.begun.pop(traced.plan, None)
        if plan not in self.traced:
            self.progress(f"trace: {options.short(plan.precision)}, micro-batch {plan.micro_batch_size}")
            self.traced[plan] = self._trace(plan)
        fitting = sorted((one for one in self.traced.values() if one.fits), key=lambda one: one.step_time_s)
        for known, one in self.traced.items():
            if one.trace is not None and all(one is not kept for kept in fitting[:_TRACES_KEPT]):
                self.traced[known] = replace(one, trace=None)
        return self.traced[plan]

    def _trace(self, plan: Plan) -> TracedPlan:
        return traced_plan(self.job, plan, self.device, self.budget_bytes)

    def _hopeless(self, like: Plan) -> SnugfitError:
        """Weights, gradients and state of the optimizer alone are too large, at any micro-batch size."""
        blocks = tuple(Segment((name,)) for name in self.joint.names)
        size = self.joint.sizes(family_of(like))[-1]
        with suppress(SnugfitError):  # its micro-batches are too small, or its blocks cannot be recomputed
            self._exact(replace(like, micro_batch_size=size, recompute=blocks or like.recompute))
        return self._without_plan()

    def _infeasible(self, families: Sequence[Plan]) -> SnugfitError:
        for like in families:
            choice = self.joint.smallest(like)
            if choice.plan not in self.traced:
                self._attempt(choice)
        return self._without_plan()

    def _without_plan(self) -> SnugfitError:
        """The error, about what needed least of all that was traced."""
        smallest = min(self.traced.values(), key=lambda traced: traced.memory.needed_bytes)
        self.progress("ways out")
        ways = ways_out.ways_out(
            self.job,
            smallest.plan,
            self.device,
            self.budget_bytes,
            allow=self.allow or None,
            step_time_s=smallest.step_time_s,
            model=self.model,
        )
        return explain.infeasible(smallest.plan, smallest.memory, self.budget_bytes, self.device, ways)

    def _report(self, chosen: TracedPlan, choice: Choice | None, rungs: list[tuple[str, TracedPlan]]) -> PlanReport:
        first = rungs[0][1]
        ladder = tuple(
            Rung(
                name=name,
                plan=traced.plan,
                memory=traced.memory,
                fits=traced.fits,
                step_time_s=traced.step_time_s,
                relative_time=traced.step_time_s / first.step_time_s,
                samples_per_s=traced.plan.batch_size / traced.step_time_s,
                flops=traced.flops,
                pays_with=explain.pays_with(traced.plan, traced.flops, first.plan, first.flops),
            )
            for name, traced in rungs
        )
        reasons = explain.reasons(
            chosen.plan,
            chosen.memory,
            self.fixed,
            self.budget_bytes,
            self.precisions[-1],
            self.model,
            self.joint if choice is not None else None,
            {plan: traced.memory for plan, traced in self.traced.items()},
        )
        return PlanReport(
            plan=chosen.plan,
            runner_up=self._runner_up(chosen),
            ladder=ladder,
            frontier=self._frontier(chosen),
            contenders=self._contenders(chosen),
            reasons=reasons,
            memory=chosen.memory,
            step_time_s=chosen.step_time_s,
            budget_bytes=self.budget_bytes,
            notes=explain.notes(ladder, chosen.plan, self.device, self.model),
            advice=scale.advice(
                chosen.plan, chosen.memory, self.device, self.model, max_grad_norm=self.job.max_grad_norm
            ),
            trace=self.traced[chosen.plan].trace,
        )

    def _runner_up(self, chosen: TracedPlan) -> Plan | None:
        others = [
            traced
            for traced in self.traced.values()
            if traced.fits and (traced.plan.precision, traced.plan.recompute) != _kind(chosen.plan)
        ]
        return min(others, key=lambda traced: traced.step_time_s).plan if others else None

    def _contenders(self, chosen: TracedPlan) -> tuple[Candidate, ...]:
        """The plans worth trying out: those that were traced, and the choices at other sizes."""
        found = {traced.plan: as_candidate(traced) for traced in self.traced.values() if traced.fits}
        for choice in self.joint.contenders.values():
            if choice.plan not in self.traced and self.joint.needed_bytes(choice) <= self.budget_bytes:
                found[choice.plan] = self._candidate(choice)
        return tuple(sorted(found.values(), key=lambda one: (one.plan != chosen.plan, one.step_time_s)))

    def _candidate(self, choice: Choice) -> Candidate:
        needed = self.joint.needed_bytes(choice)
        return Candidate(
            plan=choice.plan,
            needed_bytes=needed,
            peak_allocated_bytes=choice.allocated_bytes,
            fits=needed <= self.budget_bytes,
            step_time_s=choice.step_time_s,
        )

    def _frontier(self, chosen: TracedPlan) -> tuple[Candidate, ...]:
        """What the chains say of other budgets, and every plan that was traced."""
        found = [as_candidate(traced) for traced in self.traced.values()]
        if family_of(chosen.plan) in self.joint.known_families:
            for choice in self.joint.frontier(chosen.plan, _FRONTIER_SIZES):
                candidate = self._candidate(choice)
                is_untried = candidate.fits and candidate.step_time_s < chosen.step_time_s
                if choice.plan not in self.traced and not is_untried:
                    found.append(candidate)
        return undominated(found, chosen.plan)


_MOST_TRACES = 8
"Choices that are traced before the search is content with what fits."
_MOST_OF_A_RUNG = 5
_FASTER, _AS_FAST = 0.995, 1.01
"Ratio of step times below which another trace is worth making."
_STRIDE = 3
"Of the sizes that are traced by themselves."
_TRACES_KEPT = 3
"Of the fastest plans that fit, one of which is chosen."
_MUCH = 0.04
"Share of the budget that is worth another trace."
_FRONTIER_SIZES = 6
"Micro-batch sizes of a frontier."


def _kind(plan: Plan) -> tuple[Any, ...]:
    return plan.precision, plan.recompute
