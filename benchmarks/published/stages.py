"""A traced step through the allocator stage by stage, with what scripts that measure do in between.

Entry points: ``stages`` and its results. A step names its stages with ``recorder.mark("stage: NAME")``, which is where
a script resets the peak, and says ``recorder.mark("empty cache")`` where it empties the allocator's cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from snugfit.memory.allocator import CachingAllocator
from snugfit.memory.traces import Trace

EMPTY_CACHE = "empty cache"
STAGE = "stage: "


@dataclass(slots=True)
class Figures:
    """Requested, allocated and reserved bytes at one moment, or the largest of each."""

    requested: int = 0
    allocated: int = 0
    reserved: int = 0

    def include(self, other: "Figures") -> None:
        self.requested = max(self.requested, other.requested)
        self.allocated = max(self.allocated, other.allocated)
        self.reserved = max(self.reserved, other.reserved)

    def of(self, metric: str) -> int:
        """One of the three, by the name that rows use."""
        return {"requested": self.requested, "allocated": self.allocated, "reserved": self.reserved}[metric]


@dataclass(slots=True)
class Stage:
    """What lies between two marks."""

    peak: Figures
    end: Figures


def stages(trace: Trace) -> Mapping[str, Stage]:
    """Replay a trace from an empty allocator: its stages by name, the last one where a name comes again.

    A stage ends where the next one begins. ``""`` is what comes before the first.
    """
    sizes = [birth.num_bytes for birth in trace.recording.births]
    marks = [*trace.recording.marks, (len(trace.recording.events), STAGE)]
    allocator = CachingAllocator()
    now = Figures()
    found: dict[str, Stage] = {}
    name, peak, position = "", Figures(), 0
    for until, mark in marks:
        for event in trace.recording.events[position:until]:
            if event > 0:
                allocator.malloc(event, sizes[event - 1])
                now.requested += sizes[event - 1]
            else:
                allocator.free(-event)
                now.requested -= sizes[-event - 1]
            now.allocated, now.reserved = allocator.allocated_bytes, allocator.reserved_bytes
            peak.include(now)
        position = until
        if mark == EMPTY_CACHE:
            allocator.empty_cache()
            now.reserved = allocator.reserved_bytes
        elif mark.startswith(STAGE):
            found[name] = Stage(peak, Figures(now.requested, now.allocated, now.reserved))
            name, peak = mark.removeprefix(STAGE), Figures(now.requested, now.allocated, now.reserved)
    return found
