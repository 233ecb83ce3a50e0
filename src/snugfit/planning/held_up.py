"""What each operation of a micro-step takes, also on a card that the host may hold up.

Entry point: ``spent``. A phase takes as long as the card or as the host does, whichever is longer; a chain of units
needs that as a sum over operations. Left out: what is learnt from plans that were traced as they are (``learning``).

NOTE [Where the host is the slower one]
1. Where it is so without recomputation, every operation of that phase takes what the host needs for it.
2. What recomputing adds for the host is hidden by a card that has more to do, up to that much more. That is spread
   evenly over all that could be repeated (in backward) or watched (in forward): exact where all of it is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from snugfit.hardware import Device
from snugfit.memory.events import Work
from snugfit.planning import cost
from snugfit.planning.cutting import Sizes
from snugfit.planning.scaling import ScaledTrace

_Seconds = npt.NDArray[np.float64]
_Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Spent:
    """Nanoseconds of each piece of a trace's work."""

    as_traced: Sizes
    if_repeated: Sizes
    "Of what forward runs, once more in backward."
    by_watching: Sizes
    "What keeping some results of forward adds to each of its pieces."


def spent(trace: ScaledTrace, micro_batch_size: int) -> Spent:
    """What each piece of a trace's work takes at another micro-batch size; see the NOTE."""
    work, device = trace.work(micro_batch_size), trace.base.device
    bare = [item._replace(is_repeated=False, is_watched=False, begins="") for item in work]
    card, host = _taken(work, device)
    card_bare, host_bare = _taken(bare, device)
    card_again, host_again = _taken([item._replace(is_repeated=True) for item in bare], device)
    card_watched, host_watched = _taken([item._replace(is_watched=True) for item in bare], device)

    times_run = _times_run(trace, len(work))
    is_added = _flags(item.is_repeated or item.is_watched or item.begins == "segment" for item in work)
    is_forward = _flags(item.phase == "forward" for item in work) & ~is_added
    begins = _flags(item.begins == "segment" for item in work)
    begun = times_run[begins] @ (host - host_again)[begins] / max(times_run[is_added].sum(), 1)

    seconds = card
    seen = {
        "forward": float(times_run[is_forward] @ host_watched[is_forward]),
        "backward": float(times_run[is_forward] @ (host_again + begun)[is_forward]),
    }
    for phase in {item.phase for item in work}:
        own = _flags(item.phase == phase for item in work)
        spare = float(times_run[own & ~is_added] @ (card - host)[own & ~is_added])
        if spare < 0:
            seconds = np.where(own & ~is_added, host, seconds)
        if phase in seen:
            seen[phase] = max(1 - max(spare, 0.0) / seen[phase], 0.0) if seen[phase] else 0.0
            seconds = np.where(own & is_added, np.maximum(card, seen[phase] * host), seconds)
    again = np.maximum(card_again, seen["backward"] * host_again)
    watching = card_watched - card_bare + seen["forward"] * (host_watched - host_bare)
    return Spent(*(np.rint(1e9 * each).astype(np.int64)[trace.kind_of] for each in (seconds, again, watching)))


def _taken(work: Sequence[Work], device: Device) -> tuple[_Seconds, _Seconds]:
    """Seconds of each piece on the device, and those of the host beside a card."""
    return np.array(cost.times(work, device)), np.array(cost.host_times(work, device))


def _times_run(trace: ScaledTrace, num_kinds: int) -> Sizes:
    """How often the last micro-step of a trace runs each kind of its work."""
    start, end = trace.steps[-1]
    in_step = [start < position <= end for position, _ in trace.base.recording.work]
    found: Sizes = np.bincount(trace.kind_of[in_step], minlength=num_kinds)
    return found


def _flags(values: Iterable[bool]) -> _Flags:
    return np.fromiter(values, dtype=np.bool_)
