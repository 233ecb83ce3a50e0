"""A recorded step, replayed through its device's allocator: the peak, its moment, and who holds it.

Entry point: ``Trace``.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from snugfit import hardware
from snugfit.memory import allocator
from snugfit.memory.events import Birth, Recording, Work
from snugfit.memory.reports import PHASES, MemoryReport, PeakAt

_STATIC = ("parameter", "buffer", "gradient", "optimizer")


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded step and the device it was recorded for."""

    recording: Recording
    device: hardware.Device
    assumptions: tuple[str, ...]

    @property
    def work(self) -> tuple[Work, ...]:
        """What every kernel of the last window does, in order."""
        start = max(position for position, name in self.recording.marks if name == "window")
        return tuple(work for position, work in self.recording.work if position >= start)

    @property
    def micro_batch_starts(self) -> tuple[int, ...]:
        """For each micro-batch of the last window the index in ``work`` at which it begins (jobs only)."""
        window = max(position for position, name in self.recording.marks if name == "window")
        positions = [position for position, _ in self.recording.work if position >= window]
        starts = [p for p, name in self.recording.marks if name == "micro-batch" and p >= window]
        return tuple(bisect_right(positions, start) for start in starts)

    def peaks(self) -> allocator.Simulation:
        """Replay the events through the device's allocator; the CPU has none, there blocks are what was asked for."""
        sizes = [birth.num_bytes for birth in self.recording.births]
        if self.device.kind == "cuda":
            return allocator.simulate(sizes, self.recording.events)
        peak, at = _peak(sizes, self.recording.events)
        return allocator.Simulation(peak, peak, at, sizes)

    def report(self) -> MemoryReport:
        """Name the peak and who holds it."""
        recording = self.recording
        replay = self.peaks()
        blocks, at = replay.block_bytes, replay.peak_index
        phases = {name: _by_category(recording, blocks, _last(recording, name)) for name in PHASES}
        nothing = Birth(0, "other", "build", "", "nothing", 0)
        birth = recording.births[recording.events[at] - 1] if recording.births else nothing
        return MemoryReport(
            device=self.device.name,
            label="modelled",
            peak_allocated_bytes=replay.peak_allocated_bytes,
            peak_reserved_bytes=replay.peak_reserved_bytes,
            static_bytes=sum(phases["backward end"].get(category, 0) for category in _STATIC),
            context_bytes=self.device.context_bytes,
            by_category=_by_category(recording, blocks, at + 1),
            by_module=_by_module(recording, blocks, at + 1),
            peak_at=PeakAt(window=birth.window, phase=birth.phase, module=birth.module, op=birth.op),
            phases=phases,
            assumptions=self.assumptions,
        )


def _peak(sizes: Sequence[int], events: Sequence[int]) -> tuple[int, int]:
    current = peak = at = 0
    for position, event in enumerate(events):
        if event > 0:
            current += sizes[event - 1]
            if current > peak:
                peak, at = current, position
        else:
            current -= sizes[-event - 1]
    return peak, at


def _last(recording: Recording, mark: str) -> int:
    positions = [position for position, name in recording.marks if name == mark]
    return positions[-1] if positions else len(recording.events)


def _alive(recording: Recording, position: int) -> set[int]:
    """Indices of the births that are alive before the event at ``position``."""
    alive: set[int] = set()
    for event in recording.events[:position]:
        if event > 0:
            alive.add(event - 1)
        else:
            alive.discard(-event - 1)
    return alive


def _by_category(recording: Recording, blocks: Sequence[int], position: int) -> dict[str, int]:
    totals: dict[str, int] = {}
    for index in _alive(recording, position):
        category = recording.births[index].category
        totals[category] = totals.get(category, 0) + blocks[index]
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _by_module(recording: Recording, blocks: Sequence[int], position: int) -> dict[str, dict[str, int]]:
    totals: dict[str, dict[str, int]] = {}
    for index in _alive(recording, position):
        birth = recording.births[index]
        module = totals.setdefault(birth.module, {})
        module[birth.category] = module.get(birth.category, 0) + blocks[index]
    return dict(sorted(totals.items(), key=lambda item: -sum(item[1].values())))
