"""Puts what a search found into a report: the ladder, the frontier, the contenders and the reasons.

Entry point: ``assembled``. The search itself is ``choosing``'s; the words of reasons and advice are ``explain``'s and
``scale``'s.
"""

from collections.abc import Mapping
from typing import Any

from snugfit.planning import explain, options, scale
from snugfit.planning.joint import Choice, JointSearch
from snugfit.planning.ladder import Candidate, Rung
from snugfit.planning.learning import family_of
from snugfit.planning.own_loop import own_loop
from snugfit.planning.plan_report import PlanReport
from snugfit.planning.traced_plans import TracedPlan, as_candidate, undominated
from snugfit.plans import Plan


def assembled(
    joint: JointSearch,
    traced: Mapping[Plan, TracedPlan],
    chosen: TracedPlan,
    choice: Choice | None,
    rungs: Mapping[str, TracedPlan],
    precision: options.Option,
) -> PlanReport:
    """The report of a search.

    Args:
        joint: What the chains of units say.
        traced: Every plan that was traced.
        chosen: The fastest of them that fits.
        choice: The chain's choice that it comes from; None where it is a rung of the ladder.
        rungs: By their names, from the full batch on.
        precision: The last one that was considered, with its reason.
    """
    first = next(iter(rungs.values()))
    ladder = tuple(_rung(name, traced_rung, first) for name, traced_rung in rungs.items())
    reasons = explain.reasons(
        chosen.plan,
        chosen.memory,
        joint.fixed,
        joint.budget_bytes,
        precision,
        joint.model,
        joint if choice is not None else None,
        {plan: one.memory for plan, one in traced.items()},
    )
    return PlanReport(
        plan=chosen.plan,
        runner_up=_runner_up(chosen, traced),
        ladder=ladder,
        frontier=_frontier(joint, chosen, traced),
        contenders=_contenders(joint, chosen, traced),
        reasons=reasons,
        memory=chosen.memory,
        step_time_s=chosen.step_time_s,
        budget_bytes=joint.budget_bytes,
        notes=explain.notes(ladder, chosen.plan, joint, chosen.offloaded_bytes),
        advice=scale.advice(
            chosen.plan, chosen.memory, joint.device, joint.model, max_grad_norm=joint.job.max_grad_norm
        ),
        loop=own_loop(joint.job, joint.model),
        trace=traced[chosen.plan].trace,
    )


def _rung(name: str, traced: TracedPlan, first: TracedPlan) -> Rung:
    return Rung(
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


def _runner_up(chosen: TracedPlan, traced: Mapping[Plan, TracedPlan]) -> Plan | None:
    others = [one for one in traced.values() if one.fits and _kind(one.plan) != _kind(chosen.plan)]
    return min(others, key=lambda one: one.step_time_s).plan if others else None


def _kind(plan: Plan) -> tuple[Any, ...]:
    return plan.precision, plan.recompute


def _contenders(joint: JointSearch, chosen: TracedPlan, traced: Mapping[Plan, TracedPlan]) -> tuple[Candidate, ...]:
    """The plans worth trying out: those that were traced, and the choices at other sizes."""
    found = {one.plan: as_candidate(one) for one in traced.values() if one.fits}
    for choice in joint.contenders.values():
        if choice.plan not in traced and joint.needed_bytes(choice) <= joint.budget_bytes:
            found[choice.plan] = _candidate(joint, choice)
    return tuple(sorted(found.values(), key=lambda one: (one.plan != chosen.plan, one.step_time_s)))


def _candidate(joint: JointSearch, choice: Choice) -> Candidate:
    needed = joint.needed_bytes(choice)
    return Candidate(
        plan=choice.plan,
        needed_bytes=needed,
        peak_allocated_bytes=choice.allocated_bytes,
        fits=needed <= joint.budget_bytes,
        step_time_s=choice.step_time_s,
    )


def _frontier(joint: JointSearch, chosen: TracedPlan, traced: Mapping[Plan, TracedPlan]) -> tuple[Candidate, ...]:
    """What the chains say of other budgets, and every plan that was traced."""
    found = [as_candidate(one) for one in traced.values()]
    if family_of(chosen.plan) in joint.known_families:
        for choice in joint.frontier(chosen.plan, _FRONTIER_SIZES):
            candidate = _candidate(joint, choice)
            is_untried = candidate.fits and candidate.step_time_s < chosen.step_time_s
            if choice.plan not in traced and not is_untried:
                found.append(candidate)
    return undominated(found, chosen.plan)


_FRONTIER_SIZES = 6
"Micro-batch sizes of a frontier."
