"""A recorded step, replayed through its device's allocator: the peak, its moment, and who holds it.

Entry point: ``Trace``. The sums are ``attribution``'s, the sentences ``advice``'s.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from snugfit import hardware
from snugfit.memory import allocator
from snugfit.memory.allocation import allocator_settings, fragmentation
from snugfit.memory.events import Recording, Work
from snugfit.memory.reporting import advice, attribution
from snugfit.memory.reports import PHASES, MemoryReport, margin_bytes

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
        return self._replay(self.recording)

    def report(self) -> MemoryReport:
        """Name the peak and who holds it."""
        recording = self.recording
        replayed = self.peaks()
        births, blocks, at = recording.births, replayed.block_bytes, replayed.peak_index
        timeline = attribution.Timeline(recording, blocks)
        moments = {name: _last(recording, name) for name in PHASES}
        alive = timeline.alive([at + 1, *moments.values()])
        phases = {name: attribution.by_category(births, blocks, alive[p]) for name, p in moments.items()}
        return MemoryReport(
            device=self.device.name,
            label="modelled",
            peak_allocated_bytes=replayed.peak_allocated_bytes,
            peak_reserved_bytes=replayed.peak_reserved_bytes,
            static_bytes=sum(phases["backward end"].get(category, 0) for category in _STATIC),
            context_bytes=self.device.context_bytes,
            by_category=attribution.by_category(births, blocks, alive[at + 1]),
            by_module=attribution.by_module(births, blocks, alive[at + 1]),
            peak_at=timeline.at(at),
            holders=attribution.holders(births, blocks, alive[at + 1]),
            phases=phases,
            windows=timeline.windows(replayed.reserved_changes),
            unused_bytes=replayed.at_reserved_peak.free_bytes,
            fragmentation_bytes=replayed.at_reserved_peak.fragment_bytes,
            advice=(
                *advice.sentences(recording, replayed, alive[at + 1], self._replay),
                *self._on_fragmentation(replayed),
            ),
            assumptions=(*self.assumptions, *self._settings().sentences()),
        )

    def _on_fragmentation(self, replayed: allocator.Simulation) -> tuple[str, ...]:
        lost = replayed.peak_reserved_bytes - replayed.peak_allocated_bytes  # the most that another setting could save
        if lost <= margin_bytes(replayed.peak_reserved_bytes, self.device.name):
            return ()  # less than what is kept free anyway
        requested = [birth.num_bytes for birth in self.recording.births]
        return fragmentation.advice(requested, self.recording.events, replayed, self._settings())

    def _settings(self) -> allocator_settings.AllocatorSettings:
        """What the environment asks of the caching allocator; the CPU has none."""
        return allocator_settings.from_environment() if self.device.kind == "cuda" else allocator_settings.DEFAULTS

    def _replay(self, recording: Recording) -> allocator.Simulation:
        sizes = [birth.num_bytes for birth in recording.births]
        if self.device.kind == "cuda":
            return allocator.simulate(sizes, recording.events, settings=self._settings())
        peak, at = _peak(sizes, recording.events)
        return allocator.Simulation(peak, peak, at, sizes)


def _peak(sizes: Sequence[int], events: Sequence[int]) -> tuple[int, int]:
    current = peak = 0
    at = -1
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
