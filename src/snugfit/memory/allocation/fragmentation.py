"""Memory that is held and not used: whether fragmentation is worth a word, and what would help.

Entry point: ``advice``. The numbers are a simulation's; a device that is almost full may flush and need less.
"""

from collections.abc import Sequence
from dataclasses import replace

from snugfit import sizes
from snugfit.memory import allocator
from snugfit.memory.allocation import allocator_settings
from snugfit.memory.allocation.allocator_settings import AllocatorSettings
from snugfit.memory.allocator import Simulation

_WORTH_A_WORD = 0.1
"Share of the reserved peak that is free then."


def advice(
    request_bytes: Sequence[int],
    events: Sequence[int],
    simulation: Simulation,
    settings: AllocatorSettings | None = None,
) -> tuple[str, ...]:
    """Say how much is reserved and free when reserved peaks, and what would hold less.

    Args:
        request_bytes: As for ``simulate``.
        events: As for ``simulate``.
        simulation: What ``simulate`` made of them.
        settings: Those of the simulation.

    Returns:
        Sentences; none where less than a tenth of what is reserved is free.
    """
    settings = settings or allocator_settings.DEFAULTS
    peak = simulation.at_reserved_peak
    if peak.free_bytes <= peak.reserved_bytes * _WORTH_A_WORD:
        return ()
    said = [
        f"when reserved memory peaks at {sizes.text(peak.reserved_bytes)}, {sizes.text(peak.free_bytes)} of it is "
        f"free ({sizes.text(peak.fragment_bytes)} beside live blocks, the largest free block "
        f"{sizes.text(peak.largest_free_bytes)}): fragmentation"
    ]
    if not settings.expandable_segments:
        expandable = allocator.simulate(request_bytes, events, settings=replace(settings, expandable_segments=True))
        saved = peak.reserved_bytes - expandable.peak_reserved_bytes
        if saved > 0:
            said.append(
                f"PYTORCH_ALLOC_CONF=expandable_segments:True would hold {sizes.text(expandable.peak_reserved_bytes)}, "
                f"{sizes.text(saved)} less (from torch's source, not verified; not together with max_split_size_mb)"
            )
    said.append("batches of one length, or of a few (buckets), fragment less than batches of any length")
    return tuple(said)
