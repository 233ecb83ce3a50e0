"""Lets the real device decide: the best contenders of a search are run, and the one that took least is the plan.

Entry point: ``measured``. What ran out of memory is out of the question, however well it was predicted to fit.
"""

from dataclasses import fields, replace

from snugfit import hardware
from snugfit.errors import DeviceMemoryError, PlanError
from snugfit.jobs import Job
from snugfit.memory import tracing
from snugfit.planning import scale, trials
from snugfit.planning.plan_report import PlanReport
from snugfit.plans import Plan


def measured(job: Job, found: PlanReport, device: str | hardware.Device, number: int, windows: int = 3) -> PlanReport:
    """Run the best contenders of a search for a few windows each, and return the search's answer with what they took.

    The plan is then the fastest by measurement, the runner-up the next. All state of the job is left as it is.

    Args:
        job: What was planned.
        found: What the search found.
        device: A device of this machine.
        number: How many contenders are run.
        windows: Timed updates of each per turn, see ``trials.run``.

    Raises:
        PlanError: ``number`` is below 1, or a device that is not here.
        DeviceMemoryError: All of them ran out of memory.
    """
    if not isinstance(number, int) or number < 1:
        raise PlanError(
            "the number of contenders to run must be at least 1",
            got=f"{number!r}",
            expected="a whole number >= 1",
            hint="run three of them: --measure 3",
        )
    contenders = found.contenders[:number]
    ran = trials.run(job, [one.plan for one in contenders], device, windows)
    timed = sorted((trial for trial in ran if trial.step_time_s is not None), key=lambda trial: trial.step_time_s or 0)
    if not timed:
        raise DeviceMemoryError(
            "every contender ran out of memory",
            got=ran[0].out_of_memory or "out of memory",
            expected="a plan that this device holds with what else is running on it",
            hint="free the device, or plan with a smaller budget",
        )
    best = timed[0]
    memory, trace = found.memory, found.trace
    if best.plan != found.plan:
        trace = tracing.record_job(job, best.plan, hardware.resolve(device))
        memory = trace.report()
    others = {trial.plan: trial for trial in timed[1:]}
    reasons, advice, notes = dict(found.reasons), found.advice, found.notes
    if len(contenders) < number:
        notes = (*notes, f"{len(contenders)} plans were predicted to fit, so no more were run")
    if best.plan != found.plan:
        said = f"the fastest of the {len(timed)} plans that were run"
        changed = [
            field.name for field in fields(Plan) if getattr(best.plan, field.name) != getattr(found.plan, field.name)
        ]
        reasons |= dict.fromkeys(changed, said)
        card, model = hardware.resolve(device), tracing.skeleton(job)
        advice = scale.advice(best.plan, memory, card, model, max_grad_norm=job.max_grad_norm)
    return replace(
        found,
        reasons=reasons,
        advice=advice,
        notes=notes,
        plan=best.plan,
        runner_up=next(iter(others), found.runner_up),
        memory=memory,
        trace=trace,
        step_time_s=best.step_time_s or 0.0,
        trials=ran,
    )
