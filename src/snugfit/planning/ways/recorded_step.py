"""What every way out starts from: one trace of the job as it is, its weights, its optimizers and its time by phase.

Entry point: ``record``. A way that only moves or resizes storages is worked out on this trace, without another one.
Left out: whatever a way needs of its own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from snugfit import hardware
from snugfit.jobs import Job
from snugfit.memory import tracing
from snugfit.memory.events import Birth, Recording
from snugfit.memory.reports import margin_bytes
from snugfit.memory.traces import Trace
from snugfit.planning import cost
from snugfit.planning.errands import apart
from snugfit.planning.traced_plans import whole_window
from snugfit.planning.ways.rewriting import Rewriting
from snugfit.plans import Plan


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter of the model."""

    name: str
    module: str
    shape: tuple[int, ...]
    itemsize: int
    is_trained: bool

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Group:
    """One optimizer that the job made: its class and the options of its first group."""

    kind: type
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """A job traced under a plan: one window, of two micro-batches if the plan has as many, with the state in place."""

    job: Job
    plan: Plan
    trace: Trace
    weights: tuple[Weight, ...]
    optimizers: tuple[Group, ...] = field(default=())

    @property
    def device(self) -> hardware.Device:
        """What it is traced for."""
        return self.trace.device

    @property
    def trained(self) -> tuple[Weight, ...]:
        """The parameters that get gradients."""
        return tuple(weight for weight in self.weights if weight.is_trained)

    @property
    def weight_itemsize(self) -> int:
        """Bytes of one element of the weights that are trained."""
        if self.plan.precision == "bf16-true":
            return 2
        return max((weight.itemsize for weight in self.trained), default=4)

    @property
    def gradient_itemsize(self) -> int:
        """Bytes of one element of their gradients, summed over a window."""
        is_low = self.plan.precision == "bf16-true" and self.plan.gradient_dtype == "parameter"
        return 2 if is_low else 4

    @property
    def compute_itemsize(self) -> int:
        """Bytes of one element of what is multiplied."""
        return 4 if self.plan.precision == "32-true" else 2

    def seconds(self) -> dict[str, float]:
        """Modelled seconds of one update by phase."""
        return cost.breakdown(whole_window(self.trace, self.plan), self.device)

    def needed_bytes(self, trace: Trace) -> int:
        """Peak reserved, context and margin of a changed step, without its report."""
        reserved = trace.peaks().peak_reserved_bytes
        return reserved + self.device.context_bytes + margin_bytes(reserved, self.device.name)

    def with_recording(self, recording: Recording, *sentences: str) -> Trace:
        """The trace with another recording, and what that rests on."""
        return replace(self.trace, recording=recording, assumptions=(*self.trace.assumptions, *sentences))

    @property
    def update(self) -> tuple[int, int]:
        """Where the update begins and where it ends."""
        found = {name: position for position, name in self.trace.recording.marks}
        return found["backward end"], found["step end"]

    def end_of_micro_step(self, position: int) -> int:
        """Where the micro-batch that runs at a position is over."""
        starts = (p for p, name in self.trace.recording.marks if name == "micro-batch" and p > position)
        return min(starts, default=self.update[0])


def record(job: Job, plan: Plan, device: hardware.Device, model: nn.Module) -> RecordedStep:
    """Trace a job under a plan.

    Args:
        job: What is trained.
        plan: How.
        device: What it is traced for.
        model: The job's model, data or not: its shapes are read.
    """
    made: list[Group] = []

    def optimizer(traced: Any) -> Any:
        result = job.optimizer(traced)
        for one in result if isinstance(result, (list, tuple)) else (result,):
            options = {name: value for name, value in one.param_groups[0].items() if name != "params"}
            made.append(Group(type(one), options))
        return result

    windows = ((0,),) if plan.accumulation_steps == 1 else ((0, 1),)
    trace, groups = apart(
        lambda: (tracing.record_job(replace(job, optimizer=optimizer), plan, device, windows=windows), tuple(made))
    )
    trace = replace(trace, recording=_steady(trace.recording))
    return RecordedStep(job=job, plan=plan, trace=trace, weights=weights_of(model), optimizers=groups)


def _steady(recording: Recording) -> Recording:
    """The window as all but the first are: the optimizer's state is there from the beginning.

    And without what building a model leaves behind, such as fp32 weights that became bf16 ones: ``build`` makes and
    converts a model on the host and moves what is left, for which a trace has one place.
    """
    changed = Rewriting(recording)
    first = min(position for position, name in recording.marks if name == "window")
    for index, birth in [*changed.born(phase="build")]:
        if birth.category not in ("parameter", "buffer") and changed.ends_before(index, first):
            changed.remove(index)
    for index, birth in [*changed.born(phase="optimizer", category="optimizer")]:
        changed.remove(index)
        changed.add(birth, first)
    return changed.done()


def in_bfloat16(plan: Plan) -> Plan:
    """The plan with least memory for weights and gradients: both in bf16, updated without fp32 masters."""
    return replace(plan, precision="bf16-true", gradient_dtype="parameter", bf16_update="stochastic-rounding")


def weights_of(model: nn.Module) -> tuple[Weight, ...]:
    """The parameters of a model, tied ones once."""
    return tuple(
        Weight(name, name.rpartition(".")[0], tuple(p.shape), p.element_size(), p.requires_grad)
        for name, p in model.named_parameters()
    )


def made(num_bytes: int, category: str, phase: str, op: str) -> Birth:
    """A storage that a way adds."""
    return Birth(num_bytes, category, phase, "", op, 1)
