"""One trace for every micro-batch size: event streams whose sizes are affine in the number of samples.

Entry point: ``ScaledTrace.record``. Two traces at different micro-batch sizes give each storage and each kernel a
constant and a part per sample; rounding happens per storage, after the sum. What is traced for the chosen plan itself
is exact; this is for the search.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from snugfit.errors import SnugfitError
from snugfit.hardware import Device
from snugfit.jobs import Job
from snugfit.memory.events import Birth, Recording, Work
from snugfit.memory.steps import leftovers
from snugfit.memory.traces import Trace
from snugfit.memory.tracing import record_job
from snugfit.planning.errands import apart, errand
from snugfit.plans import Plan


class NotAffineError(SnugfitError):
    """The two traces do not run the same operations: sizes cannot be interpolated; trace each candidate."""


_Item = TypeVar("_Item", Birth, Work)
_Told = TypeVar("_Told")
_Kind: TypeAlias = tuple[str, ...]
_Slopes: TypeAlias = tuple[float, float]
_MOST_LOST = {Birth: 0.1, Work: 0.02}
"""Share of the bytes of a micro-step that may be without a counterpart at another size.

Storages more than work: some kernels split what they do if there is little of it, and need room for the parts.
"""
_BLOCK_BYTES = 512
"Blocks of CUDA's caching allocator are multiples of it."
_WINDOWS = ((0,), (0, 1))
"One of a single micro-batch, which makes the optimizer's state, and one of two, the second onto gradients."


@dataclass(frozen=True, slots=True)
class ScaledTrace:
    """A family of steps that differ in micro-batch size and number of micro-batches only."""

    base: Trace
    "Windows of one and of two micro-batches, recorded at ``base_size`` samples."
    base_size: int
    births: npt.NDArray[np.float64]
    "Bytes of each birth of ``base``, and bytes per sample."
    kinds: tuple[tuple[Work, _Slopes], ...]
    "What is done in ``base``, whatever is alike once, with FLOPs and bytes per sample."
    kind_of: npt.NDArray[np.int64]
    "Of each piece of work of ``base``, which of ``kinds`` it is."
    events: npt.NDArray[np.int64]
    "The events of ``base``."
    worked_at: npt.NDArray[np.int64]
    "Of each piece of its work, the position in them."
    steps: tuple[tuple[int, int], ...]
    "Events of each micro-step of ``base``: first and one past the last."
    adds_up: bool = False
    "Whether what a micro-batch leaves alive is there once for each of them."

    @classmethod
    def record(
        cls, job: Job, plan: Plan, device: Device, sizes: tuple[int, int], windows: Sequence[Sequence[int]] = _WINDOWS
    ) -> "ScaledTrace":
        """Trace a plan at two micro-batch sizes.

        Args:
            job: What is trained.
            plan: Everything but the micro-batch size.
            device: What it is traced for.
            sizes: Two micro-batch sizes; the first one is traced in full. Equal ones: the trace holds for this size.
            windows: The micro-batches of each window that is traced in full; a single one ends without an update.

        Raises:
            NotAffineError: The operations depend on the micro-batch size.
        """
        return cls.told(job, plan, device, sizes, windows, lambda: None)[0]

    @classmethod
    def told(
        cls,
        job: Job,
        plan: Plan,
        device: Device,
        sizes: tuple[int, int],
        windows: Sequence[Sequence[int]],
        tell: Callable[[], _Told],
    ) -> tuple["ScaledTrace", _Told]:
        """Trace a plan at two micro-batch sizes, and what is told of it then.

        Args:
            job: As for ``record``, like those that follow.
            plan: The same.
            device: The same.
            sizes: The same.
            windows: The same.
            tell: Called where the trace in full was made.
        """
        begun = None
        if sizes[0] != sizes[1]:
            smaller = replace(plan, micro_batch_size=sizes[1])
            begun = errand(lambda: record_job(job, smaller, device, windows=((0,),), with_update=False))
        larger = replace(plan, micro_batch_size=sizes[0])
        updates = len(windows) > 1  # of a lone window nobody looks at the update
        base, told = apart(lambda: (record_job(job, larger, device, windows=windows, with_update=updates), tell()))
        return cls._between(base, None if begun is None else begun.result(), sizes), told

    @classmethod
    def _between(cls, base: Trace, other: Trace | None, sizes: tuple[int, int]) -> "ScaledTrace":
        births, work, steps = base.recording.births, base.recording.work, micro_steps(base.recording)
        birth_slopes, work_slopes = [0.0] * len(births), [(0.0, 0.0)] * len(work)
        if other is not None:
            reference = micro_steps(other.recording)[0]
            distance = sizes[1] - sizes[0]
            for step in steps:
                for index, there in _pairs(_births(base.recording, step), _births(other.recording, reference)):
                    birth_slopes[index] = (there.num_bytes - births[index].num_bytes) / distance
                for index, done in _pairs(_work(base.recording, step), _work(other.recording, reference)):
                    here = work[index][1]
                    work_slopes[index] = ((done.flops - here.flops) / distance, (done.bytes - here.bytes) / distance)
        numbers: dict[tuple[Work, _Slopes], int] = {}
        kind_of = [
            numbers.setdefault((item, slopes), len(numbers))
            for (_, item), slopes in zip(work, work_slopes, strict=True)
        ]
        return cls(
            base,
            sizes[0],
            np.array([[birth.num_bytes for birth in births], birth_slopes]),
            tuple(numbers),
            np.array(kind_of, dtype=np.int64),
            np.array(base.recording.events, dtype=np.int64),
            np.array([position for position, _ in work], dtype=np.int64),
            steps,
            other is not None and leftovers.grows(base.recording),
        )

    def birth_bytes(self, micro_batch_size: int) -> npt.NDArray[np.int64]:
        """Bytes of the block of every birth of ``base`` at another micro-batch size."""
        moved = self.births[0] + self.births[1] * (micro_batch_size - self.base_size)
        asked: npt.NDArray[np.int64] = np.maximum(np.rint(moved), 0).astype(np.int64)
        if self.base.device.kind == "cuda":
            asked = -(-asked // _BLOCK_BYTES) * _BLOCK_BYTES
        return asked

    def work(self, micro_batch_size: int) -> list[Work]:
        """Each of ``kinds`` at another micro-batch size."""
        distance = micro_batch_size - self.base_size
        return [item if slopes == (0.0, 0.0) else _moved(item, slopes, distance) for item, slopes in self.kinds]

    def in_last_step(self) -> npt.NDArray[np.bool_]:
        """Of each piece of work of ``base``, whether its last micro-step does it."""
        start, end = self.steps[-1]
        found: npt.NDArray[np.bool_] = (start < self.worked_at) & (self.worked_at <= end)
        return found


def _moved(work: Work, slopes: _Slopes, distance: int) -> Work:
    flops, num_bytes = (round(slope * distance) for slope in slopes)
    return work._replace(flops=max(0, work.flops + flops), bytes=max(0, work.bytes + num_bytes))


def micro_steps(recording: Recording) -> tuple[tuple[int, int], ...]:
    """Events of each micro-step: from its move to the device to the end of its backward, all that it makes included."""
    starts = [position for position, name in recording.marks if name == "micro-batch"]
    steps = []
    for start in starts:
        later = [p for p, name in recording.marks if p > start and name in ("micro-batch", "backward end", "step end")]
        border = min(later, default=len(recording.events))
        backward = (p for p, item in recording.work if start < p <= border and item.phase == "backward")
        end = max(backward, default=border)
        made = ((p, event) for p, event in enumerate(recording.events[end:border], start=end + 1) if event > 0)
        within = (p for p, event in made if recording.births[event - 1].phase == "backward")  # of its last operation
        steps.append((start, max(within, default=end)))
    return tuple(steps)


def _births(recording: Recording, step: tuple[int, int]) -> list[tuple[int, Birth]]:
    """A micro-step's births, workspaces left out: only the first micro-step meets them."""
    indices = (event - 1 for event in recording.events[step[0] : step[1]] if event > 0)
    return [(i, recording.births[i]) for i in indices if recording.births[i].category != "workspace"]


def _work(recording: Recording, step: tuple[int, int]) -> list[tuple[int, Work]]:
    return [(i, work) for i, (position, work) in enumerate(recording.work) if step[0] < position <= step[1]]


def _pairs(here: list[tuple[int, _Item]], there: list[tuple[int, _Item]]) -> Iterator[tuple[int, _Item]]:
    """Pairs what happens in a micro-step with the same in the reference, which is a window of its own.

    A micro-step of a longer window does a little more (it weighs its loss, adds to gradients), and some kernels need
    more at some sizes only: what has no counterpart keeps its size. Where modules share a weight, what is done with
    its gradient may be one module's here and another's there: what is left between others is paired by operation.

    Raises:
        NotAffineError: Too much of it has none.
    """
    lost = whole = sum(_bytes(item) for _, item in there)
    here, there = _of_operations_in(there, here), _of_operations_in(here, there)
    named = ([_kind(item) for _, item in items] for items in (here, there))
    for start, other, length in _matching_twice(*named):
        for (index, _), (_, item) in zip(here[start : start + length], there[other : other + length], strict=True):
            lost -= _bytes(item)
            yield index, item
    if there and lost > _MOST_LOST[type(there[0][1])] * whole:
        raise NotAffineError("the step runs other operations at another micro-batch size")


def _of_operations_in(others: list[tuple[int, _Item]], items: list[tuple[int, _Item]]) -> list[tuple[int, _Item]]:
    """The items of which there are some of the same among others; sums onto gradients are all over a backward."""
    known = {_kind(item)[:2] for _, item in others}
    return [one for one in items if _kind(one[1])[:2] in known]


def _matching_twice(ours: Sequence[_Kind], theirs: Sequence[_Kind]) -> Iterator[tuple[int, int, int]]:
    """Stretches that are the same, and between them those of which only the module differs."""
    end, other_end = 0, 0
    for start, other, length in _matching(ours, theirs):
        left, there = ([kind[:2] for kind in kinds] for kinds in (ours[end:start], theirs[other_end:other]))
        yield from ((end + a, other_end + b, size) for a, b, size in _matching(left, there))
        yield start, other, length
        end, other_end = start + length, other + length


def _matching(ours: Sequence[_Kind], theirs: Sequence[_Kind]) -> list[tuple[int, int, int]]:
    """Stretches that are the same: where they begin in the one and in the other, and how long they are."""
    start = _length_alike(ours, theirs)
    end = _length_alike(ours[start:][::-1], theirs[start:][::-1])
    a, b = len(ours) - end, len(theirs) - end
    blocks = SequenceMatcher(None, ours[start:a], theirs[start:b], autojunk=False).get_matching_blocks()
    return [(0, 0, start), *((start + block.a, start + block.b, block.size) for block in blocks), (a, b, end)]


def _length_alike(ours: Sequence[_Kind], theirs: Sequence[_Kind]) -> int:
    """How many are the same from the beginning on."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(ours), len(theirs)))


def _kind(item: Birth | Work) -> _Kind:
    return item.op, item.phase, item.module if isinstance(item, Birth) else ""


def _bytes(item: Birth | Work) -> int:
    return item.num_bytes if isinstance(item, Birth) else item.bytes
