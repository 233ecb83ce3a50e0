"""Chooses a plan: climbs the ladder, lets the joint search choose, and traces what it chooses as it is.

Entry point: ``Search``. Where a trace needs more than the chain of units predicted, the choice is made again in less
room; where it needs much less, once more in all of it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from snugfit import hardware, sizes
from snugfit.errors import BatchError, PlanError, SnugfitError, UnsupportedError
from snugfit.jobs import Job
from snugfit.memory import tracing
from snugfit.memory.reports import MemoryReport
from snugfit.planning import options, smallest_plans
from snugfit.planning.asides import Aside, Asides
from snugfit.planning.assembling import assembled
from snugfit.planning.joint import ANY, BLOCKS, NONE, Choice, JointSearch
from snugfit.planning.ladder import ACCUMULATION, CHECKPOINTING, CHOSEN, FULL_BATCH, MIXED_PRECISION
from snugfit.planning.learning import Learnt, family_of, kind_of
from snugfit.planning.plan_report import PlanReport
from snugfit.planning.traced_plans import TracedPlan
from snugfit.planning.traces import Traces
from snugfit.plans import Plan
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
        optimizer: str = "",
    ) -> None:
        self.job, self.allow, self.progress = job, tuple(allow), progress
        self.device = hardware.resolve(device)
        self.budget_bytes = self.device.memory_bytes if budget is None else sizes.parse(budget)
        self.fixed = dict(fixed)
        whole = Plan(**{"micro_batch_size": 1, **self.fixed, "batch_size": batch_size, "world_size": world_size})
        given = "micro_batch_size" in self.fixed
        first = whole if given else replace(whole, micro_batch_size=whole.samples_per_rank)
        self.model = tracing.skeleton(job)
        self.first = replace(first, fingerprint=first.fingerprint or fingerprint.of(self.model, optimizer))
        self.precisions = options.precisions(self.device, self.fixed)
        self.joint = JointSearch(job, self.device, self.first, self.fixed, self.model, self.budget_bytes)
        self.traced = Traces(job, self.device, self.budget_bytes, self.joint.names, progress)
        self.asides = Asides(self.joint, self.traced)

    def run(self) -> PlanReport:
        """Climb the ladder, then choose among all plans."""
        try:
            return self._run()
        finally:
            self.asides.give_up()

    def _run(self) -> PlanReport:
        plain = replace(self.first, precision=self.precisions[0].value)
        mixed = replace(self.first, precision=self.precisions[-1].value)
        other = self.asides.begin(lambda: self.traced.of(plain)) if mixed != plain else None
        try:
            whole = self.traced.of(mixed)
        except Exception as error:  # whoever's it is: if fp32 runs, it is about the precision
            if other is None:
                raise
            whole, mixed, other = self.asides.join(other), plain, None
            self._leave_out(self.precisions[-1], error)
        self.joint.forward_work, self.joint.compares_classes = whole.forward_work, whole.compares_classes
        if not whole.fits and whole.memory.static_bytes <= self.joint.allowed_bytes:
            self.joint.reserved[mixed] = whole.memory.peak_reserved_bytes
            self.joint.aim(whole.memory)
            self.joint.prepare(mixed)
        first = whole
        if other is not None:
            try:
                first = self.asides.join(other)
            except UnsupportedError as error:  # 16-bit weights that only autocast multiplies with what they are given
                plain = mixed
                self._leave_out(self.precisions[0], error)
        if not first.fits:
            self.joint.reserved[first.plan] = first.memory.peak_reserved_bytes
        rungs = {f"{FULL_BATCH}, {options.short(plain.precision)}": first}
        rungs |= {MIXED_PRECISION: whole} if mixed != plain else {}
        families = [mixed, plain] if mixed != plain else [mixed]
        if all(traced.memory.static_bytes > self.joint.allowed_bytes for traced in rungs.values()):
            raise smallest_plans.of_large_weights(self.joint, self.asides, families, self.allow)
        middle = {} if whole.fits else self._middle_rungs(mixed)
        chosen, choice = self._choose(families, list(rungs.values()), list(middle.values()))
        rungs |= {name: self._settled(rung) for name, rung in middle.items()}
        fitting = [traced for traced in rungs.values() if traced.fits and traced.step_time_s < chosen.step_time_s]
        if fitting:
            chosen, choice = min(fitting, key=lambda traced: traced.step_time_s), None
        if all(traced.plan != chosen.plan for traced in rungs.values()):
            rungs[CHOSEN] = chosen
        return assembled(self.joint, self.traced, chosen, choice, rungs, self.precisions[-1])

    def _leave_out(self, precision: options.Option, error: Exception) -> None:
        """Plan without a precision in which the step does not run."""
        self.joint.left_out = options.left_out(precision.value, error)
        reason = "the step runs in no other that was tried"
        self.precisions = tuple(one._replace(reason=reason) for one in self.precisions if one != precision)

    def _middle_rungs(self, mixed: Plan) -> dict[str, Aside]:
        """Accumulation by itself, then with every block recomputed: found out while others are traced."""
        rungs: dict[str, Aside] = {}
        if "micro_batch_size" not in self.fixed and mixed.samples_per_rank > 1:
            alone = NONE if "recompute" not in self.fixed else ANY
            rungs[ACCUMULATION] = self.asides.begin(lambda: self._by_itself(mixed, alone), may_wait=True)
        if "recompute" not in self.fixed and self.joint.names:
            rungs[CHECKPOINTING] = self.asides.begin(lambda: self._by_itself(mixed, BLOCKS), may_wait=True)
        return rungs

    def _settled(self, begun: Aside) -> TracedPlan:
        """A rung: what was begun for it, or a faster one found elsewhere that differs in its micro-batches only."""
        rung = self.asides.join(begun)
        size = rung.plan.micro_batch_size
        alike = [one for one in self.traced.values() if replace(one.plan, micro_batch_size=size) == rung.plan]
        return min((one for one in alike if one.fits), key=lambda one: one.step_time_s, default=rung)

    def _by_itself(self, like: Plan, recompute: str) -> TracedPlan:
        """About the fastest plan of a family that fits by its own trace; the one that needs least if none does."""
        self.progress("units of the model")
        found: TracedPlan | None = None
        for _ in range(_MOST_OF_A_RUNG):
            choice = self.joint.best(like, recompute)
            if choice is None:
                break
            traced = self._attempt(choice)
            if traced is not None:
                self._learn(choice, traced)
            if traced is not None and traced.fits:
                found = traced
                break
        while found is None:
            found = self._attempt(self.joint.smallest(like, recompute))
        return self._larger(found, like, recompute, worth=_FASTER_RUNG) if found.fits else found

    def _larger(self, found: TracedPlan, like: Plan, recompute: str, *, worth: float) -> TracedPlan:
        """A plan with larger micro-batches than one that fits, if there is one that fits as well.

        Args:
            found: The one that fits.
            like: A plan of its family.
            recompute: What may be.
            worth: Ratio of step times from which on another trace is made.
        """
        if found.plan.accumulation_steps == 1 and not found.plan.recompute:
            return found
        kind = kind_of(found.plan, found.plan.recompute)
        own = self.joint.learnt.of(kind)
        # What a plan reserves, another may fill better: of a small one most is fragments.
        within = replace(own, surplus={kind: self.joint.allowed_bytes - found.memory.peak_reserved_bytes})
        hopes = [(within, _MUCH_FASTER)]
        if self._has_room(found):  # the fragments of one plan need not be those of a larger one
            half = {known: num_bytes // 2 for known, num_bytes in own.surplus.items()}
            hopes = [(own, worth), (replace(own, surplus=half), worth), *hopes]
        for _ in range(_MOST_OF_A_RUNG):
            choice = self._hoped_larger(found, like, recompute, hopes)
            if choice is None:
                break
            traced = self._attempt(choice)
            if traced is None:
                break
            if traced.fits:
                return traced if traced.step_time_s <= worth * found.step_time_s else found
            self._teach(within, choice, traced)
            hopes = [(within, _MUCH_FASTER)]  # again as long as it teaches something
        return found

    def _hoped_larger(
        self, found: TracedPlan, like: Plan, recompute: str, hopes: Sequence[tuple[Learnt, float]]
    ) -> Choice | None:
        """The first choice with larger micro-batches that is as much faster as is asked for, if a hope holds.

        Args:
            found: What it is compared with.
            like: A plan of its family.
            recompute: What may be.
            hopes: What may be expected of fragments, and the ratio of step times from which on that is worth a trace.
        """
        for hope, ratio in hopes:
            with self.joint.knowing(hope):
                choice = self.joint.best(like, recompute)
            if choice is None or choice.plan.micro_batch_size <= found.plan.micro_batch_size:
                continue
            if choice.step_time_s <= ratio * found.step_time_s:
                return choice
        return None

    def _choose(
        self, families: Sequence[Plan], known: Sequence[TracedPlan], middle: Sequence[Aside]
    ) -> tuple[TracedPlan, Choice | None]:
        """The fastest plan that fits by its own trace.

        Args:
            families: A plan of each.
            known: What was traced so far.
            middle: Rungs that may be on their way still; they are waited for if nothing else fits.

        Raises:
            InfeasibleError: None does.
        """
        fitting = [traced for traced in known if traced.fits]
        best = min(fitting, key=lambda traced: traced.step_time_s, default=None)
        chosen: Choice | None = None
        if best is not None and best.plan.accumulation_steps == 1 and not best.plan.recompute:
            return self._with_faster_update(best), None  # nothing runs less
        left = families
        for _ in range(_MOST_TRACES):
            choice = self._next(left, best)
            if choice is None:
                break
            traced = self._attempt(choice)
            if traced is None:  # a run of units that is no chain after all
                continue
            self._learn(choice, traced)
            better = traced.fits and (best is None or traced.step_time_s < best.step_time_s)
            if better:
                like = replace(choice.plan, recompute=self.first.recompute)
                best, chosen = self._larger(traced, like, ANY, worth=_AS_FAST), choice
            if better and not self._has_room(traced):
                for rung in middle:  # they may have seen what others could only expect
                    self.asides.join(rung)
                left = [one for one in left if self.joint.learnt.is_only_expected(family_of(one))]
        best = self._evener(best, families)
        if best is None:
            settled = [traced for traced in map(self._settled, middle) if traced.fits]
            best = min(settled, key=lambda traced: traced.step_time_s, default=None)
        best = best or self._without_units(families[0]) or self._least(families)
        if best is None:
            raise smallest_plans.without_plan(self.joint, self.traced, self.allow)
        return self._in_faster_precision(best, families), chosen

    def _evener(self, best: TracedPlan | None, families: Sequence[Plan]) -> TracedPlan | None:
        """A plan that treats all units alike, if one fits that promises to be faster: its fragments are its own."""
        for _ in range(_MOST_HOPES):
            limit = float("inf") if best is None else best.step_time_s
            known = [
                one for one in families if family_of(one) in self.joint.known_families and self._is_below(one, limit)
            ]
            forms = [form for family in known for form in self.joint.variants(family)]
            choice = self._fastest([one for form in forms for one in self.joint.evenly(form)], best, _FASTER_RUNG)
            traced = None if choice is None else self._attempt(choice)
            if traced is not None and traced.fits and traced.step_time_s < limit:
                best = traced
        return best

    def _is_below(self, family: Plan, seconds: float) -> bool:
        """Whether the whole batch at once with nothing recomputed, which is the fastest of a family, takes less."""
        whole = self.traced.get(family)
        return whole is None or whole.step_time_s < seconds

    def _in_faster_precision(self, best: TracedPlan, families: Sequence[Plan]) -> TracedPlan:
        """The same plan in another precision in which the whole batch is faster, if it fits and is faster as well.

        The chains of a job that is mostly launches say little of that.
        """
        own = self.traced.get(replace(self.first, precision=best.plan.precision))
        for family in families:
            whole = self.traced.get(family)
            if own is None or whole is None or whole.step_time_s >= _FASTER * own.step_time_s:
                continue
            with suppress(SnugfitError):
                alike = replace(best.plan, precision=family.precision)
                if family_of(alike) in self.joint.known_families and not self._may_fit(alike):
                    continue
                other = self.traced.of(alike)
                if other.fits and other.step_time_s < best.step_time_s:
                    return other
        return best

    def _may_fit(self, plan: Plan) -> bool:
        """Whether a plan, or one like it that recomputes other units, is predicted to fit."""
        return self.joint.least_needed(plan) <= self.budget_bytes

    def _with_faster_update(self, whole: TracedPlan) -> TracedPlan:
        """The whole batch with the optimizer's fused form, if it has one that is faster and fits."""
        if "optimizer_impl" in self.fixed:
            return whole
        try:
            fused = self.traced.of(replace(whole.plan, optimizer_impl="fused"))
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
                traced = self.traced.of(replace(like, micro_batch_size=size, recompute=blocks))
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
            if not self._is_below(family, min((choice.step_time_s for choice in found), default=float("inf"))):
                continue
            self.progress(f"micro-batches and segments, {options.short(family.precision)}")
            found += self.joint.fastest(family)
        return self._fastest(found, best, _FASTER) or self._hoped_for(families, best)

    def _hoped_for(self, families: Sequence[Plan], best: TracedPlan | None) -> Choice | None:
        """The fastest choice if plans of which none was traced that is alike need no more than predicted."""
        partly = [family for family in families if self.joint.learnt.is_partly_expected(family_of(family))]
        with self.joint.knowing(replace(self.joint.learnt, expected={})):
            found = [choice for family in partly for choice in self.joint.fastest(family)]
        return self._fastest(found, best, _FASTER_RUNG)

    def _fastest(self, found: Sequence[Choice], best: TracedPlan | None, worth: float) -> Choice | None:
        limit = float("inf") if best is None else best.step_time_s * worth
        untraced = [choice for choice in found if choice.plan not in self.traced and choice.step_time_s < limit]
        return min(untraced, key=lambda choice: choice.step_time_s, default=None)

    def _attempt(self, choice: Choice) -> TracedPlan | None:
        """The choice traced as it is; None where it cannot run, which is remembered.

        Its micro-batches are too small for BatchNorm, or units that are recomputed as one are no chain.
        """
        try:
            return self.traced.of(choice.plan)
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
        self._teach(self.joint.learnt, choice, traced)

    def _teach(self, learnt: Learnt, choice: Choice, traced: TracedPlan) -> None:
        learnt.learn(
            choice.kind,
            beyond_bytes=traced.memory.peak_reserved_bytes - choice.allocated_bytes,
            over_bytes=traced.memory.needed_bytes - self.budget_bytes,
            pace=traced.step_time_s / choice.step_time_s,
        )

    def _has_room(self, traced: TracedPlan) -> bool:
        """Whether a plan that fits leaves room that could make it faster."""
        if traced.plan.accumulation_steps == 1 and not traced.plan.recompute:
            return False
        unused = self.budget_bytes - traced.memory.needed_bytes
        return unused > _MUCH * self.joint.allowed_bytes

    def memory_of(self, plan: Plan) -> MemoryReport:
        """What a plan needs by its own trace."""
        return self.traced.of(plan).memory

    def _least(self, families: Sequence[Plan]) -> TracedPlan | None:
        """About the fastest of the plans that are predicted to need least, if one of them fits after all."""
        found = []
        for like in families:
            for form in self.joint.variants(like):
                traced = self._attempt(self.joint.smallest(form))
                if traced is not None and traced.fits:
                    found.append((traced, form))
        if not found:
            return None
        fastest, form = min(found, key=lambda each: each[0].step_time_s)
        return self._larger(fastest, form, ANY, worth=_AS_FAST)


_MOST_TRACES = 8
"Choices that are traced before the search is content with what fits."
_MOST_OF_A_RUNG = 5
_MOST_HOPES = 2
_FASTER, _AS_FAST, _MUCH_FASTER, _FASTER_RUNG = 0.995, 1.01, 0.9, 0.97
"Ratio of step times below which another trace is worth making; a rung is to show what a technique costs."
_STRIDE = 3
"Of the sizes that are traced by themselves."
_MUCH = 0.04
"Share of the room for tensors that is worth another trace."
