"""Who holds what: the storages of a recorded step, summed by category, by module and by what made them.

Entry points: ``Timeline`` and the sums ``by_category``, ``by_module`` and ``holders``. Every sum counts whole blocks
as the allocator hands them out, so that each adds up to the allocated bytes of that moment. When the peak is, and what
to do about it, is ``traces``'s and ``advice``'s.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from snugfit.memory.events import Birth, Recording
from snugfit.memory.reports import Holder, PeakAt, WindowPeak

CATEGORIES = (
    "parameter",
    "buffer",
    "gradient",
    "optimizer",
    "saved",
    "temporary",
    "autocast",
    "workspace",
    "input",
    "other",
)
"What a storage can be; see the NOTE in ``recording``."

_NOTHING = Birth(0, "other", "build", "", "nothing", 0)


def by_category(births: Sequence[Birth], blocks: Sequence[int], alive: Iterable[int]) -> dict[str, int]:
    """Category to bytes, the largest first; a category without bytes is left out."""
    totals: dict[str, int] = {}
    for index in alive:
        if blocks[index]:
            category = births[index].category
            totals[category] = totals.get(category, 0) + blocks[index]
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def by_module(births: Sequence[Birth], blocks: Sequence[int], alive: Iterable[int]) -> dict[str, dict[str, int]]:
    """Module to category to bytes, the module that holds most first."""
    members: dict[str, list[int]] = {}
    for index in alive:
        if blocks[index]:
            members.setdefault(births[index].module, []).append(index)
    totals = {module: by_category(births, blocks, indices) for module, indices in members.items()}
    return dict(sorted(totals.items(), key=lambda item: -sum(item[1].values())))


def holders(births: Sequence[Birth], blocks: Sequence[int], alive: Iterable[int]) -> tuple[Holder, ...]:
    """What is alive, storages that differ in a module's index only taken together; what holds most comes first."""
    groups: dict[tuple[str, str, str, str, int, int], list[int]] = {}
    for index in alive:
        birth = births[index]
        if blocks[index]:
            key = (pattern(birth.module), birth.op, birth.category, birth.phase, birth.window, blocks[index])
            groups.setdefault(key, []).append(index)
    found = [
        Holder(
            num_bytes=block * len(indices),
            num_storages=len(indices),
            category=category,
            module=module if len(indices) > 1 else births[indices[0]].module,
            op=op,
            phase=phase,
            window=window,
        )
        for (module, op, category, phase, window, block), indices in groups.items()
    ]
    return tuple(sorted(found, key=lambda holder: (-holder.num_bytes, holder.module, holder.op, holder.category)))


def pattern(module: str) -> str:
    """A module's name with its indices as stars: ``layer.0`` and ``layer.1`` are both ``layer.*``."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


@dataclass(frozen=True, slots=True)
class Timeline:
    """The allocated bytes of a recording at every event, and what is alive at chosen ones.

    Args:
        recording: What happened.
        blocks: Block size of each birth.
    """

    recording: Recording
    blocks: Sequence[int]

    def alive(self, positions: Collection[int]) -> dict[int, frozenset[int]]:
        """For each position the births that are alive before the event there."""
        wanted = sorted(set(positions))
        found: dict[int, frozenset[int]] = {}
        live: set[int] = set()
        start = 0
        for position in wanted:
            for event in self.recording.events[start:position]:
                if event > 0:
                    live.add(event - 1)
                else:
                    live.discard(-event - 1)
            found[position] = frozenset(live)
            start = position
        return found

    def at(self, position: int) -> PeakAt:
        """Window, phase, module and operation of the birth at an event."""
        births, events = self.recording.births, self.recording.events
        birth = births[events[position] - 1] if births and 0 <= position < len(events) else _NOTHING
        return PeakAt(window=birth.window, phase=birth.phase, module=birth.module, op=birth.op)

    def windows(self, reserved_changes: Sequence[tuple[int, int]]) -> tuple[WindowPeak, ...]:
        """The peak of each window, as a whole and of each phase.

        Args:
            reserved_changes: Index of an event and the reserved bytes after it, for each event that changed them.
        """
        births, blocks, events = self.recording.births, self.blocks, self.recording.events
        starts = [position for position, name in self.recording.marks if name == "window"]
        found: list[WindowPeak] = []
        current = 0
        for event in events[: starts[0] if starts else len(events)]:
            current += blocks[event - 1] if event > 0 else -blocks[-event - 1]
        for number, start in enumerate(starts, start=1):
            end = starts[number] if number < len(starts) else len(events)
            peak, at, phases = current, start, dict[str, int]()
            for position in range(start, end):
                event = events[position]
                if event < 0:
                    current -= blocks[-event - 1]
                    continue
                current += blocks[event - 1]
                phase = births[event - 1].phase
                if current > phases.get(phase, 0):
                    phases[phase] = current
                    if current > peak:
                        peak, at = current, position
            before = [reserved for position, reserved in reserved_changes if position < start][-1:]
            within = [reserved for position, reserved in reserved_changes if start <= position < end]
            found.append(
                WindowPeak(
                    window=number,
                    peak_allocated_bytes=peak,
                    peak_reserved_bytes=max([*before, *within], default=peak),
                    peak_at=self.at(at),
                    by_phase=phases,
                )
            )
        return tuple(found)
