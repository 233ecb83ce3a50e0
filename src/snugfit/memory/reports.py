"""What a step needs: the ``MemoryReport`` that estimate, trace and measure all return.

Entry point: ``MemoryReport``. Whatever its label, it has the same fields, so that comparing an estimate with a
measurement is a subtraction. ``str`` is a summary; tables are the command line's.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from snugfit import sizes
from snugfit.errors import PlanError

PHASES = ("forward end", "backward end", "step end")

MARGIN_FRACTION = 0.05
MARGIN_BYTES = 6 * sizes.GIB // 10
CPU_MARGIN_FRACTION = 0.05
_TOP = 5
"Holders that a summary shows."


def margin_bytes(peak_reserved_bytes: int, device: str, label: str = "modelled") -> int:
    """What is kept free beside a peak, in bytes.

    ``max(5 %, 0.6 GiB)`` on an accelerator, and 5 % on the CPU, whose heap needs 1 to 5 % more than the tensors in it
    (measured under hard caps; what a process needs beside is not a share); nothing for a measurement on an accelerator.
    """
    if label == "GPU-measured":
        return 0
    if device == "cpu":
        return int(peak_reserved_bytes * CPU_MARGIN_FRACTION)
    return max(int(peak_reserved_bytes * MARGIN_FRACTION), MARGIN_BYTES)


@dataclass(frozen=True, slots=True)
class PeakAt:
    """The moment of the peak: which window (from 1), phase, module (fully qualified name) and operation."""

    window: int
    phase: str
    module: str
    op: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Storages that are alive at the peak and alike: same origin, category and size, in repeated modules or in one."""

    num_bytes: int
    "Of all of them together."
    num_storages: int
    category: str
    module: str
    "Fully qualified name; of several modules with the indices as stars, ``encoder.layer.*``."
    op: str
    "What made them."
    phase: str
    "When: ``build``, ``forward``, ``backward`` or ``optimizer``."
    window: int
    "In which window, from 1; 0 before the first."


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPeak:
    """The peak of one traced window: the first makes the optimizer's state, the last is the steady state."""

    window: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    "Largest reserved bytes within the window; a caching allocator keeps what earlier windows reserved."
    peak_at: PeakAt
    by_phase: Mapping[str, int]
    "Phase (``forward``, ``backward``, ``optimizer``) to its largest allocated bytes."


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Memory of a training step on one device, all sizes in bytes.

    ``peak_allocated_bytes`` counts what tensors and workspaces hold after the allocator's rounding,
    ``peak_reserved_bytes`` what the caching allocator holds from the driver for them; on the CPU, which has no
    caching allocator, they are equal. Neither includes ``context_bytes``.
    """

    device: str
    "Name of the device, as in the catalogue, or ``cpu``."
    label: str
    '``"modelled"``, ``"CPU-measured"`` or ``"GPU-measured"``.'
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    static_bytes: int
    "Parameters, buffers, gradients and optimizer state."
    context_bytes: int
    "Held by the device outside of the allocator (driver, loaded kernels)."
    by_category: Mapping[str, int]
    """Category to bytes at the moment of the peak; the sum is ``peak_allocated_bytes``.

    Keys, of which only those with bytes are there: ``parameter buffer gradient optimizer saved temporary autocast
    workspace input other``.
    """
    by_module: Mapping[str, Mapping[str, int]]
    "Module to category to bytes at the moment of the peak."
    peak_at: PeakAt
    phases: Mapping[str, Mapping[str, int]]
    "Phase to category to bytes; read with ``at``."
    assumptions: tuple[str, ...] = field(default=())
    "Sentences: what the numbers rest on."
    holders: tuple[Holder, ...] = field(default=())
    "Everything that is alive at the peak, what holds most first; the sum is ``peak_allocated_bytes``."
    windows: tuple[WindowPeak, ...] = field(default=())
    "The peak of each traced window: the first, and the steady state."
    unused_bytes: int = 0
    "Reserved beyond the live blocks of that moment, when the reserved bytes first reach their peak."
    fragmentation_bytes: int = 0
    """The part of ``unused_bytes`` that lies beside live blocks, so that the driver cannot have it back.

    It serves later requests only if they fit into it; the other part is given back before memory runs out.
    """
    advice: tuple[str, ...] = field(default=())
    "Sentences: what could be freed without changing the plan, with numbers of this trace."

    def at(self, phase: str) -> Mapping[str, int]:
        """Categories and bytes at ``"forward end"``, ``"backward end"`` or ``"step end"`` of the last window.

        Raises:
            PlanError: Unknown phase.
        """
        if phase not in self.phases:
            raise PlanError(
                "unknown phase", got=repr(phase), expected=" | ".join(map(repr, self.phases)), hint='use "forward end"'
            )
        return self.phases[phase]

    @property
    def margin_bytes(self) -> int:
        """What is kept free beside the peak because a modelled number may be too small; see ``margin_bytes``."""
        return margin_bytes(self.peak_reserved_bytes, self.device, self.label)

    @property
    def needed_bytes(self) -> int:
        """Peak reserved, context and margin: what a budget must hold."""
        return self.peak_reserved_bytes + self.context_bytes + self.margin_bytes

    def fits(self, budget: str | int) -> bool:
        """Whether a budget (a size, or bytes) holds the peak, the context and the margin."""
        return self.needed_bytes <= sizes.parse(budget)

    def __str__(self) -> str:
        """A summary of about 12 lines; ``repr`` and ``to_dict`` have everything."""
        at = self.peak_at
        made = [name for name, num_bytes in sorted(self.by_category.items(), key=lambda entry: -entry[1]) if num_bytes]
        lines = [
            f"{self.device}, {self.label}",
            f"  peak allocated  {sizes.text(self.peak_allocated_bytes)}",
            f"  peak reserved   {sizes.text(self.peak_reserved_bytes)}",
            f"  needed          {sizes.text(self.needed_bytes)}, with context and margin",
            f"  by category     {', '.join(f'{name} {sizes.text(self.by_category[name])}' for name in made)}",
            f"  peak in         {at.phase} of window {at.window}, {at.module or '(no module)'}, {at.op or '(no op)'}",
        ]
        for number, holder in enumerate(self.holders[:_TOP]):
            made_by = f"{holder.op} of {holder.module}" if holder.module else holder.op
            what = f"{sizes.text(holder.num_bytes)} {holder.category}, {holder.num_storages} of {holder.phase}"
            lines.append(f"  {'held by' if not number else '':<16}{what}: {made_by}")
        lines.append(f"  assumptions     {len(self.assumptions)}, listed in .assumptions")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The report as built-in values, ready for JSON."""
        return {
            "device": self.device,
            "label": self.label,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "static_bytes": self.static_bytes,
            "context_bytes": self.context_bytes,
            "margin_bytes": self.margin_bytes,
            "by_category": dict(self.by_category),
            "by_module": {module: dict(categories) for module, categories in self.by_module.items()},
            "peak_at": asdict(self.peak_at),
            "holders": [asdict(holder) for holder in self.holders],
            "phases": {phase: dict(categories) for phase, categories in self.phases.items()},
            "windows": [asdict(window) for window in self.windows],
            "unused_bytes": self.unused_bytes,
            "fragmentation_bytes": self.fragmentation_bytes,
            "advice": list(self.advice),
            "assumptions": list(self.assumptions),
        }
