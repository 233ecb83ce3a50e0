"""One trace for every micro-batch size: event streams whose sizes are affine in the number of samples.

Entry point: ``ScaledTrace.record``. Two traces at different micro-batch sizes give each storage and each kernel a
constant and a part per sample; any size in between, and any number of micro-batches, is put together from them and
replayed through the allocator. Rounding happens per storage, after the sum. What is traced for the chosen plan
itself is exact; this is for the search.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from snugfit.errors import SnugfitError
from snugfit.hardware import Device
from snugfit.jobs import Job
from snugfit.memory.recording import Recording, Work
from snugfit.memory.reports import MemoryReport
from snugfit.memory.tracing import Trace, record_job
from snugfit.planning import cost
from snugfit.plans import Plan


class NotAffineError(SnugfitError):
    """The two traces do not run the same operations: sizes cannot be interpolated; trace each candidate."""


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
            births, others = _births(base.recording, step), _births(other.recording, reference)
            _require_same(base.recording, births, other.recording, others)
            for index, counterpart in zip(births, others, strict=True):
                difference = other.recording.births[counterpart].num_bytes - base.recording.births[index].num_bytes
                birth_slopes[index] = difference / distance
            for index, there in _aligned(base.recording, step, other.recording, reference):
                here = base.recording.work[index][1]
                work_slopes[index] = ((there.flops - here.flops) / distance, (there.bytes - here.bytes) / distance)
        return cls(base, sizes[0], tuple(birth_slopes), tuple(work_slopes), steps[-1])

    def report(self, micro_batch_size: int, num_micro_batches: int) -> MemoryReport:
        """The report of a window of that many micro-batches of that size."""
        return self._trace(micro_batch_size, num_micro_batches).report()

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
        return replace(self.base, recording=Recording(births, list(events), list(marks)))

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


def _births(recording: Recording, step: tuple[int, int]) -> list[int]:
    """Indices of a micro-step's births, workspaces left out: only the first micro-step meets them."""
    indices = (event - 1 for event in recording.events[step[0] : step[1]] if event > 0)
    return [index for index in indices if recording.births[index].category != "workspace"]


def _aligned(
    here: Recording, step: tuple[int, int], there: Recording, reference: tuple[int, int]
) -> Iterator[tuple[int, Work]]:
    """Pairs of the same work in two micro-steps; a later one also adds to gradients, which has no counterpart."""
    others = iter([item for position, item in there.work if reference[0] < position <= reference[1]])
    other = next(others, None)
    for index, (position, item) in enumerate(here.work):
        if other is not None and step[0] < position <= step[1] and item.op == other.op:
            yield index, other
            other = next(others, None)
    if other is not None:
        raise NotAffineError("the step runs other operations at another micro-batch size")


def _require_same(here: Recording, births: list[int], there: Recording, others: list[int]) -> None:
    ops = [here.births[index].op for index in births]
    other_ops = [there.births[index].op for index in others]
    if ops != other_ops:
        raise NotAffineError("the step runs other operations at another micro-batch size")
