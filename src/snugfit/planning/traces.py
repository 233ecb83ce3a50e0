"""Every plan that a search has traced.

Entry point: ``Traces``. Which plans are worth a trace is ``choosing``'s; what a trace of a plan gives is
``traced_plans``'.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from snugfit.hardware import Device
from snugfit.jobs import Job
from snugfit.planning import options
from snugfit.planning.errands import apart
from snugfit.planning.traced_plans import TracedPlan, traced_plan
from snugfit.plans import Plan

_KEPT = 3
"Traces of the fastest plans that fit, one of which is chosen."


class Traces(dict[Plan, TracedPlan]):
    """Plans with what their own traces gave.

    Args:
        job: What is trained.
        device: What it is traced for.
        budget_bytes: For peak, context and margin.
        names: Of the model's units.
        progress: Told of each trace.
    """

    def __init__(
        self,
        job: Job,
        device: Device,
        budget_bytes: int,
        names: Sequence[str],
        progress: Callable[[str], None],
    ) -> None:
        super().__init__()
        self.job, self.device, self.budget_bytes = job, device, budget_bytes
        self.names, self.progress = names, progress

    def of(self, plan: Plan) -> TracedPlan:
        """A plan traced as it is."""
        if plan not in self:
            self.progress(f"trace: {options.short(plan.precision)}, micro-batch {plan.micro_batch_size}")
            self[plan] = apart(lambda: traced_plan(self.job, plan, self.device, self.budget_bytes, self.names))
        self.forget()
        return self[plan]

    def forget(self) -> None:
        """Events are large: those of the fastest plans that fit are kept, one of which is chosen."""
        fitting = sorted((one for one in self.values() if one.fits), key=lambda one: one.step_time_s)
        for known, one in self.items():
            if one.trace is not None and all(one is not kept for kept in fitting[:_KEPT]):
                self[known] = replace(one, trace=None)
