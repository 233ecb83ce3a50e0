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
from typing import Any

import numpy as np
import numpy.typing as npt

from snugfit.hardware import Device
from snugfit.memory.events import Work
from snugfit.planning import cost
from snugfit.planning.cutting import Element, Sizes
from snugfit.planning.scaling import ScaledTrace

_Seconds = npt.NDArray[np.float64]
_Flags = npt.NDArray[np.bool_]
_ANY = Work("", "forward", "float32", 0, 0)
_WATCHED = _ANY._replace(is_watched=True)
"Watching takes as long for any operation."


@dataclass(frozen=True, slots=True)
class Spent:
    """Nanoseconds of each piece of a trace's work."""

    as_traced: Sizes
    if_repeated: Sizes
    "Of what forward runs, once more in backward."
    by_watching: Sizes
    "What keeping some results of forward adds to each of its pieces."

    def of_step(self, trace: ScaledTrace) -> int:
        """Nanoseconds of the last micro-step of a trace, without what it recomputes."""
        is_added = _flags(_is_added(item) for item, _ in trace.kinds)
        is_watched = _flags(item.is_watched for item, _ in trace.kinds)
        own = trace.in_last_step() & ~is_added[trace.kind_of]
        watched = own & is_watched[trace.kind_of]
        return int(self.as_traced[own].sum() - self.by_watching[watched].sum())


def spent(trace: ScaledTrace, micro_batch_size: int, elements: Sequence[Element]) -> Spent:
    """What each piece of a trace's work takes at another micro-batch size; see the NOTE.

    Args:
        trace: Of all of it.
        micro_batch_size: In samples.
        elements: Of its last micro-step; those with a name could be recomputed.
    """
    traced, device = trace.work(micro_batch_size), trace.base.device
    work = [item._replace(is_watched=False) for item in traced]
    again = [item._replace(is_repeated=True, begins="") for item in work]
    card, host = _taken(work, device)
    card_again, host_again = _taken(again, device)
    card_watched, host_watched = (after - before for before, after in _taken([_ANY, _WATCHED], device))

    times_run = np.bincount(trace.kind_of[trace.in_last_step()], minlength=len(work))  # by the last micro-step
    is_added, is_watched = _flags(map(_is_added, work)), _flags(item.is_watched for item in traced)
    begins = _flags(item.begins == "segment" for item in work)
    units = [element for element in elements if element.unit]
    pieces = [i for unit in units for i in range(*unit.forward_work)]
    forward = np.bincount(trace.kind_of[pieces], minlength=len(work))

    seconds, spare = card, {}
    for phase in {item.phase for item in work}:
        own = _flags(item.phase == phase for item in work) & ~is_added
        spare[phase] = float(times_run[own] @ (card - host)[own])
        if spare[phase] < 0:
            seconds = np.where(own, host, seconds)
    added = forward @ host_again + len(units) * float((host - host_again)[begins].max(initial=0.0))
    unseen = _share_unseen(spare.get("backward", 0.0), added)
    if (1 - unseen) * added > forward @ card_again:
        card_again, seconds = (1 - unseen) * host_again, np.where(is_added, (1 - unseen) * host, seconds)
    unseen = _share_unseen(spare.get("forward", 0.0), forward.sum() * host_watched)
    watching = np.full(len(work), card_watched + (1 - unseen) * host_watched)
    seconds = seconds + np.where(is_watched, watching, 0.0)
    return Spent(*(np.rint(1e9 * each).astype(np.int64)[trace.kind_of] for each in (seconds, card_again, watching)))


def _taken(work: Sequence[Work], device: Device) -> tuple[_Seconds, _Seconds]:
    """Seconds of each piece on the device, and those of the host beside a card, for which each micro-step is alike."""
    alike = [item._replace(begins="micro-batch") if item.begins == "window" else item for item in work]
    return np.array(cost.times(work, device)), np.array(cost.host_times(alike, device))


def _share_unseen(spare: float, added: Any) -> float:
    """The share of what is added for the host that a card hides which has as much more to do."""
    return min(max(spare, 0.0) / added, 1.0) if added else 0.0


def _is_added(work: Work) -> bool:
    """Whether something runs for recomputation only."""
    return work.is_repeated or work.begins == "segment"


def _flags(values: Iterable[bool]) -> _Flags:
    return np.fromiter(values, dtype=np.bool_)
