"""One trace for every micro-batch size: event streams whose sizes are affine in the number of samples.

Entry point: ``ScaledTrace.record``. Two traces at different micro-batch sizes give each storage and each kernel a
constant and a part per sample; any size in between, and any number of micro-batches, is put together from them and
replayed through the allocator. Rounding happens per storage, after the sum. What is traced for the chosen plan
itself is exact; this is for the search.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from snugfit.errors import SnugfitError
from snugfit.hardware import Device
from snugfit.jobs import Job
from snugfit.memory.events import Birth, Recording, Work
from snugfit.memory.reports import MemoryReport, margin_bytes
from snugfit.memory.steps import leftovers
from snugfit.memory.traces import Trace
from snugfit.memory.tracing import record_job
from snugfit.planning import cost
from snugfit.plans import Plan


class NotAffineError(SnugfitError):
    """The two traces do not run the same operations: sizes cannot be interpolated; trace each candidate."""


_Item = TypeVar("_Item", Birth, Work)


@dataclass(frozen=True, slots=True)
class ScaledTrace:
    """A family of steps that differ in micro-batch size and number of micro-batches only."""

    base: Trace
    "Windows of one and of two micro-batches, recorded at ``base_size`` samples."
    base_size: int
    birth_slopes: tuple[float, ...]
    "Bytes per sample of each birth of ``base``."
    work_slopes: tuple[tuple[float, float], ...]
    "FLOPs and bytes per sample of each piece of work of ``base``."
    second: tuple[int, int]
    "Events of the second micro-batch of the last window: first and one past the last."
    adds_up: bool = False
    "Whether what a micro-batch leaves alive is there once for each of them."

    @classmethod
    def record(cls, job: Job, plan: Plan, device: Device, sizes: tuple[int, int]) -> "ScaledTrace":
        """Trace a plan at two micro-batch sizes.

        Args:
            job: What is trained.
            plan: Everything but the micro-batch size.
            device: What it is traced for.
            sizes: Two different micro-batch sizes; the first one is traced in full. Twice the first must not exceed
                a rank's samples.

        Raises:
            NotAffineError: The operations depend on the micro-batch size.
        """
        base = record_job(job, replace(plan, micro_batch_size=sizes[0]), device, windows=((0,), (0, 1)))
        other = record_job(job, replace(plan, micro_batch_size=sizes[1]), device, windows=((0,),))
        steps = _micro_steps(base.recording)
        reference = _micro_steps(other.recording)[0]
        birth_slopes = [0.0] * len(base.recording.births)
        work_slopes = [(0.0, 0.0)] * len(base.recording.work)
        distance = sizes[1] - sizes[0]
        for step in steps:
            for index, there in _pairs(_births(base.recording, step), _births(other.recording, reference)):
                birth_slopes[index] = (there.num_bytes - base.recording.births[index].num_bytes) / distance
            for index, done in _pairs(_work(base.recording, step), _work(other.recording, reference)):
                here = base.recording.work[index][1]
                work_slopes[index] = ((done.flops - here.flops) / distance, (done.bytes - here.bytes) / distance)
        adds_up = leftovers.grows(base.recording)
        return cls(base, sizes[0], tuple(birth_slopes), tuple(work_slopes), steps[-1], adds_up)

    def report(self, micro_batch_size: int, num_micro_batches: int) -> MemoryReport:
        """The report of a window of that many micro-batches of that size."""
        return self._trace(micro_batch_size, num_micro_batches).report()

    def needed_bytes(self, micro_batch_size: int, num_micro_batches: int) -> int:
        """``needed_bytes`` of that report, without making it."""
        reserved = self._trace(micro_batch_size, num_micro_batches).peaks().peak_reserved_bytes
        device = self.base.device
        return reserved + device.context_bytes + margin_bytes(reserved, device.name)

    def step_time(self, micro_batch_sizes: Sequence[int]) -> float:
        """Modelled seconds of one update made of micro-batches of these sizes."""
        start, end = self.second
        window = _window_start(self.base.recording)
        work = self._work(micro_batch_sizes[0])
        first = [item for position, item in work if window < position <= start or position > end]
        seconds = cost.step_time(first, self.base.device)
        for size, times in Counter(micro_batch_sizes[1:]).items():
            again = [item for position, item in self._work(size) if start < position <= end]
            seconds += times * cost.step_time(again, self.base.device)
        return seconds

    def _work(self, micro_batch_size: int) -> list[tuple[int, Work]]:
        distance = micro_batch_size - self.base_size
        return [
            (position, item if slopes == (0.0, 0.0) else _moved(item, slopes, distance))
            for (position, item), slopes in zip(self.base.recording.work, self.work_slopes, strict=True)
        ]

    def _trace(self, micro_batch_size: int, num_micro_batches: int) -> Trace:
        recording = self.base.recording
        distance = micro_batch_size - self.base_size
        births = [
            birth if slope == 0 else replace(birth, num_bytes=max(0, round(birth.num_bytes + slope * distance)))
            for birth, slope in zip(recording.births, self.birth_slopes, strict=True)
        ]
        events, marks = recording.events, recording.marks
        if num_micro_batches == 1:
            events, marks = self._without_second()
        scaled = Recording(births, list(events), list(marks), list(recording.work) if num_micro_batches > 1 else [])
        if num_micro_batches > 2 and self.adds_up:
            scaled = leftovers.multiplied(scaled, num_micro_batches - 2)
        return replace(self.base, recording=scaled)

    def _without_second(self) -> tuple[list[int], list[tuple[int, str]]]:
        """The stream without the second micro-batch; what the first left dies where the second would have begun."""
        start, end = self.second
        events = self.base.recording.events
        born = {event for event in events[start:end] if event > 0}
        inherited = [event for event in events[start:end] if event < 0 and -event not in born]
        later = [event for event in events[end:] if event > 0 or -event not in born]
        removed = len(events) - start - len(inherited) - len(later)

        def moved(position: int) -> int:
            return position if position <= start else max(start, position - removed)

        marks = [(moved(p), name) for p, name in self.base.recording.marks if not start <= p < end]
        return [*events[:start], *inherited, *later], marks


def _moved(work: Work, slopes: tuple[float, float], distance: int) -> Work:
    flops, num_bytes = (round(slope * distance) for slope in slopes)
    return work._replace(flops=max(0, work.flops + flops), bytes=max(0, work.bytes + num_bytes))


def _window_start(recording: Recording) -> int:
    return max(position for position, name in recording.marks if name == "window")


def _micro_steps(recording: Recording) -> list[tuple[int, int]]:
    """Events of each micro-step: from its move to the device to the end of its backward."""
    starts = [position for position, name in recording.marks if name == "micro-batch"]
    steps = []
    for start in starts:
        later = [p for p, name in recording.marks if p > start and name in ("micro-batch", "backward end", "step end")]
        border = min(later, default=len(recording.events))
        backward = (p for p, item in recording.work if start < p <= border and item.phase == "backward")
        steps.append((start, max(backward, default=border)))
    return steps


def _births(recording: Recording, step: tuple[int, int]) -> list[tuple[int, Birth]]:
    """A micro-step's births, workspaces left out: only the first micro-step meets them."""
    indices = (event - 1 for event in recording.events[step[0] : step[1]] if event > 0)
    return [(i, recording.births[i]) for i in indices if recording.births[i].category != "workspace"]


def _work(recording: Recording, step: tuple[int, int]) -> list[tuple[int, Work]]:
    return [(i, work) for i, (position, work) in enumerate(recording.work) if step[0] < position <= step[1]]


def _pairs(here: list[tuple[int, _Item]], there: list[tuple[int, _Item]]) -> Iterator[tuple[int, _Item]]:
    """Pairs what happens in a micro-step with the same in the reference, which is a window of its own.

    A micro-step of a longer window does a little more (it weighs its loss, adds to gradients): operations without a
    counterpart keep their size.
    """
    others = iter(there)
    _, other = next(others, (0, None))
    for index, item in here:
        if other is not None and (item.op, item.phase) == (other.op, other.phase):
            yield index, other
            _, other = next(others, (0, None))
    if other is not None:
        raise NotAffineError("the step runs other operations at another micro-batch size")
