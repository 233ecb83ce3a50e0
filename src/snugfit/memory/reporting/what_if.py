"""What other plans for the same job would free: each line is a trace of its own under the changed plan.

Entry point: ``savings``. The changes are tried in the order a person would (precision, accumulation, checkpointing,
then the optimizer's form), each on top of those before it that helped; none changes the batch size. Choosing among all
plans is the search's; what a step holds without needing it is ``advice``'s.
"""

import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from snugfit import hardware, sizes
from snugfit.errors import SnugfitError
from snugfit.jobs import Job
from snugfit.memory import tracing
from snugfit.memory.reports import MemoryReport
from snugfit.plans import Plan, Segment
from snugfit.training import checkpointing, precision

USUAL_TRACES = 3
"Traces that ``savings`` mostly makes; at most five."

_LEAST_SHARE = 0.005
"Share of the peak below which a change has no line."


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """One change of a plan, and what it frees."""

    change: str
    "In a few words, such as ``micro-batch 4``."
    plan: Plan
    "The plan with this change and those before it that helped."
    memory: MemoryReport
    "What that plan needs."
    freed_bytes: int
    "By how much its peak reserved is below that of the line before (of those that helped); negative: it needs more."

    @property
    def helps(self) -> bool:
        """Whether it frees anything; the lines after one that does not are without it."""
        return self.freed_bytes > 0

    def to_dict(self) -> dict[str, Any]:
        """The line as built-in values, ready for JSON."""
        return {
            "change": self.change,
            "freed_bytes": self.freed_bytes,
            "needed_bytes": self.memory.needed_bytes,
            "peak_allocated_bytes": self.memory.peak_allocated_bytes,
            "peak_reserved_bytes": self.memory.peak_reserved_bytes,
            "plan": self.plan.to_dict(),
        }


def savings(
    job: Job,
    plan: Plan,
    device: str | hardware.Device = "auto",
    *,
    budget: str | int | None = None,
    memory: MemoryReport | None = None,
) -> tuple[Saving, ...]:
    """Trace a job under changed plans and return what each change frees on top of those before it.

    A change that the plan, the job or the device does not allow, or that changes nothing, has no line.

    Args:
        job: What is trained.
        plan: How it is planned now.
        device: See ``estimate``.
        budget: Size or bytes; if the plan does not fit, the micro-batch is halved until it does. None means the
            device's memory.
        memory: The report of ``plan``, if it is known already.

    Raises:
        UnsupportedError: The job cannot be traced as it is planned now.
        PlanError: The job or the plan contradicts itself.
    """
    target = hardware.resolve(device)
    budget_bytes = target.memory_bytes if budget is None else sizes.parse(budget)
    now = tracing.estimate(job, plan, target) if memory is None else memory
    lines = _Lines(job, target, budget_bytes, plan, now)
    lines.add(_mixed_precision(plan, target))
    if lines.memory.peak_at.phase != "optimizer":  # else nothing that activations hold is alive at the peak
        lines.halve_micro_batch()
        lines.add(_every_block(job, lines.plan))
    if lines.memory.peak_at.phase == "optimizer" and plan.optimizer_impl == "as-given" and target.kind == "cuda":
        lines.add(("the optimizer's for-loop form", {"optimizer_impl": "for-loop"}))
    return tuple(lines)


class _Lines:
    """The lines so far, and the plan that those of them that helped add up to."""

    def __init__(self, job: Job, device: hardware.Device, budget_bytes: int, plan: Plan, memory: MemoryReport) -> None:
        self._job = job
        self._device = device
        self._budget_bytes = budget_bytes
        self._found: list[Saving] = []
        self.plan = plan
        self.memory = memory

    def __iter__(self) -> Iterator[Saving]:
        return iter(self._found)

    def add(self, change: tuple[str, dict[str, Any]] | None) -> None:
        """Try a change; it is kept for the lines after it if it frees something."""
        if change is None:
            return
        saving = self._trial(*change)
        if saving is not None and self._is_worth_a_line(saving):
            self._keep(saving)

    def halve_micro_batch(self) -> None:
        """Halve the micro-batch: once, or as often as it takes to fit; where two traces say how often."""
        size = self.plan.micro_batch_size
        if size == 1:
            return
        halved = self._trial_of_size(size // 2)
        if halved is None or not self._is_worth_a_line(halved):
            return
        if halved.helps and not halved.memory.fits(self._budget_bytes):
            slope = (self.memory.needed_bytes - halved.memory.needed_bytes) / (size - halved.plan.micro_batch_size)
            smaller = halved.plan.micro_batch_size // 2
            missing = halved.memory.needed_bytes - self._budget_bytes
            while smaller > 1 and slope * (halved.plan.micro_batch_size - smaller) < missing:
                smaller //= 2
            again = self._trial_of_size(smaller) if smaller else None
            halved = again if again is not None and again.freed_bytes > halved.freed_bytes else halved
        self._keep(halved)

    def _is_worth_a_line(self, saving: Saving) -> bool:
        return abs(saving.freed_bytes) >= max(1, int(self.memory.peak_reserved_bytes * _LEAST_SHARE))

    def _trial_of_size(self, size: int) -> Saving | None:
        return self._trial(f"micro-batch {size}", {"micro_batch_size": size})

    def _trial(self, name: str, values: dict[str, Any]) -> Saving | None:
        changed = replace(self.plan, **values)
        gc.collect()  # the last trace's tensors hold each other
        try:
            memory = tracing.estimate(self._job, changed, self._device)
        except SnugfitError:  # not possible for this job: it was traced before, as it is planned
            return None
        freed = self.memory.peak_reserved_bytes - memory.peak_reserved_bytes
        return Saving(change=name, plan=changed, memory=memory, freed_bytes=freed)

    def _keep(self, saving: Saving) -> None:
        self._found.append(saving)
        if saving.helps:
            self.plan, self.memory = saving.plan, saving.memory


def _mixed_precision(plan: Plan, device: hardware.Device) -> tuple[str, dict[str, Any]] | None:
    name = precision.resolve("auto", device)[0]
    return (name, {"precision": name}) if plan.precision == "32-true" != name else None


def _every_block(job: Job, plan: Plan) -> tuple[str, dict[str, Any]] | None:
    if plan.recompute:
        return None
    try:
        blocks: tuple[Segment, ...] = tuple(checkpointing.blocks(tracing.skeleton(job)))
    except SnugfitError:
        return None
    return (f"every block recomputed ({len(blocks)} segments)", {"recompute": blocks}) if blocks else None
