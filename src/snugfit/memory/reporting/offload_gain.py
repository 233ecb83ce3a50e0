"""Whether moving saved tensors to the host lowers a plan's peak: its report beside that of the plan that leaves them.

Entry points: ``told``, which adds a sentence to a report, and ``refuse_useless`` for plans that are to fit. A peak that
sits where none of the moved tensors would be alive is not lowered. What the copies cost in time is the planner's.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from snugfit import sizes
from snugfit.errors import PlanError
from snugfit.memory.reports import MemoryReport
from snugfit.plans import Plan, Segment
from snugfit.training import offloading

_POLICY = "offload"


@dataclass(frozen=True, slots=True)
class _Pair:
    """A plan with offloaded segments, what it needs, and what it needs where these segments are left alone."""

    plan: Plan
    moved: MemoryReport
    left: MemoryReport

    @property
    def lowers_peak(self) -> bool:
        return self.moved.peak_allocated_bytes < self.left.peak_allocated_bytes

    @property
    def peaks(self) -> str:
        return (
            f"{sizes.text(self.moved.peak_allocated_bytes)} allocated with it, "
            f"{sizes.text(self.left.peak_allocated_bytes)} without"
        )

    @property
    def reason(self) -> str:
        """Why the peak is not lower."""
        saved = [report.at("forward end").get("saved", 0) for report in (self.moved, self.left)]
        at = self.moved.peak_at
        if self.moved.device == "cpu":
            return "the saved tensors are on the host already"
        if saved[0] >= saved[1]:
            return (
                "none of their saved tensors is moved: parameters, buffers and tensors below "
                f"{sizes.text(offloading.MIN_BYTES)} stay"
            )
        around = _around(at.module, self.plan.recompute)
        if at.phase == "backward" and around is not None and around.policy == _POLICY:
            return f"the peak lies in the backward of {at.module}, where its tensors are back on the device"
        if at.phase == "backward" and around is not None:
            return f"the peak lies in the recomputation of {', '.join(around.modules)}, which offloading does not lower"
        where = f"{at.op} of {at.module or 'the step itself'}"
        return f"the peak lies in {at.phase}, {where}, where none of the moved tensors would be alive"


def told(report: MemoryReport, plan: Plan, device_kind: str, estimate: Callable[[Plan], MemoryReport]) -> MemoryReport:
    """The report of a plan, with a sentence where offloading does not lower its peak.

    Args:
        report: Of the plan.
        plan: May offload segments or not.
        device_kind: On ``"cpu"`` nothing is moved, which a warning says.
        estimate: Makes the report of another plan.
    """
    if device_kind == "cpu" or not _moves(plan):
        return report
    pair = _Pair(plan, report, estimate(_without(plan)))
    if pair.lowers_peak:
        return report
    sentence = f"offloading does not lower the peak ({pair.peaks}): {pair.reason}; leave these segments out"
    return replace(report, advice=(*report.advice, sentence))


def refuse_useless(report: MemoryReport, plan: Plan, estimate: Callable[[Plan], MemoryReport]) -> None:
    """Refuse a plan whose offloading does not lower its peak.

    Args:
        report: Of the plan.
        plan: May offload segments or not.
        estimate: Makes the report of another plan.

    Raises:
        PlanError: The peak is as high as without; ``.moved_bytes`` and ``.left_bytes`` are the two.
    """
    if not _moves(plan):
        return
    pair = _Pair(plan, report, estimate(_without(plan)))
    if pair.lowers_peak:
        return
    names = [name for segment in plan.recompute if segment.policy == _POLICY for name in segment.modules]
    raise PlanError(
        f"segments are offloaded and the peak is not lower for it: {pair.reason}",
        got=f"{', '.join(names)} offloaded: {pair.peaks}",
        expected="a lower peak than that of the same plan whose offloaded segments are left alone",
        hint="leave recompute to the search, recompute these segments instead, or leave them out",
        moved_bytes=pair.moved.peak_allocated_bytes,
        left_bytes=pair.left.peak_allocated_bytes,
    )


def _moves(plan: Plan) -> bool:
    return any(segment.policy == _POLICY for segment in plan.recompute)


def _without(plan: Plan) -> Plan:
    return replace(plan, recompute=tuple(segment for segment in plan.recompute if segment.policy != _POLICY))


def _around(module: str, segments: tuple[Segment, ...]) -> Segment | None:
    """The innermost segment that a module lies in."""
    found = [
        (len(name), segment) for segment in segments for name in segment.modules if f"{module}.".startswith(f"{name}.")
    ]
    return max(found, key=lambda one: one[0])[1] if found else None
