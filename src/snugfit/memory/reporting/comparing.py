"""An estimate beside a measurement of the same job: the differences, in bytes and as a share of what was measured.

Entry point: ``compare``. Positive means that the estimate is higher.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from snugfit.memory.reporting.attribution import CATEGORIES
from snugfit.memory.reports import MemoryReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One number, estimated and measured."""

    estimated_bytes: int
    measured_bytes: int

    @property
    def num_bytes(self) -> int:
        """Estimated minus measured."""
        return self.estimated_bytes - self.measured_bytes

    @property
    def percent(self) -> float | None:
        """The difference in percent of what was measured; None where nothing was."""
        return 100 * self.num_bytes / self.measured_bytes if self.measured_bytes else None

    def to_dict(self) -> dict[str, Any]:
        """The numbers as built-in values, ready for JSON."""
        return {
            "estimated_bytes": self.estimated_bytes,
            "measured_bytes": self.measured_bytes,
            "difference_bytes": self.num_bytes,
            "difference_percent": self.percent,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two reports of one job under one plan."""

    estimated: MemoryReport
    measured: MemoryReport
    peak_allocated: Difference
    peak_reserved: Difference
    by_category: Mapping[str, Difference]
    "At the moment of either peak; they differ where the two peaks are not at the same moment."
    phases: Mapping[str, Mapping[str, Difference]]
    "Phase to category, for the phases that both reports have."

    def to_dict(self) -> dict[str, Any]:
        """The comparison as built-in values, ready for JSON."""
        return {
            "peak_allocated": self.peak_allocated.to_dict(),
            "peak_reserved": self.peak_reserved.to_dict(),
            "by_category": {name: difference.to_dict() for name, difference in self.by_category.items()},
            "phases": {
                phase: {name: difference.to_dict() for name, difference in differences.items()}
                for phase, differences in self.phases.items()
            },
        }


def compare(estimated: MemoryReport, measured: MemoryReport) -> Comparison:
    """Subtract a measurement from an estimate, category by category; the differences of a moment add up to its own."""
    return Comparison(
        estimated=estimated,
        measured=measured,
        peak_allocated=Difference(
            estimated_bytes=estimated.peak_allocated_bytes, measured_bytes=measured.peak_allocated_bytes
        ),
        peak_reserved=Difference(
            estimated_bytes=estimated.peak_reserved_bytes, measured_bytes=measured.peak_reserved_bytes
        ),
        by_category=_by_category(estimated.by_category, measured.by_category),
        phases={
            phase: _by_category(categories, measured.phases[phase])
            for phase, categories in estimated.phases.items()
            if phase in measured.phases
        },
    )


def _by_category(estimated: Mapping[str, int], measured: Mapping[str, int]) -> dict[str, Difference]:
    return {
        name: Difference(estimated_bytes=estimated.get(name, 0), measured_bytes=measured.get(name, 0))
        for name in CATEGORIES
        if estimated.get(name) or measured.get(name)
    }
