"""The operations of a block of a recorded step, and what torch's selective checkpointing makes of a set of them.

Entry points: ``of_block``, ``Region.dropping`` and ``nanoseconds``. Times and bytes are those of the trace from which
snugfit's own options are measured, so that both are priced alike. Selective checkpointing in eager mode runs every
operation again that it does not keep, up to the last one that saves anything, and keeps all that an operation returns.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from snugfit import hardware, rates
from snugfit.memory.events import Work
from snugfit.planning import cost
from snugfit.planning.assumed_rates import assumed
from snugfit.planning.chain import NOTHING
from snugfit.planning.families import Family

_CARD = hardware.resolve("a100-sxm-80gb")
DEVICE = replace(_CARD, rates=replace(assumed(_CARD), **dict.fromkeys(rates.OVERHEADS, 0.0)))
"The card's own time alone, as its roofline says: peers are not charged for snugfit's Python."
_SMALL = 1 << 16
"Results below this size are not worth a decision: statistics of norms, casts of biases."
_ENOUGH = 0.98


@dataclass(frozen=True)
class Operation:
    """One operation of a block's forward."""

    name: str
    module: str
    "Where it ran, relative to the block."
    result_bytes: int
    saved_bytes: int
    "Of its result, what plain training keeps for backward."
    ns: int


@dataclass(frozen=True)
class Dropped:
    """What is freed, and what it costs, when some operations of a module are kept and the others run again."""

    freed_bytes: int
    again_ns: int
    kept: frozenset[tuple[str, int]]
    "Names of the operations whose results are kept, each with the number of its call among those of that name."


@dataclass(frozen=True)
class Region:
    """The operations of a module, in the order in which they run."""

    operations: tuple[Operation, ...]

    def inside(self, module: str) -> "Region":
        """Those of a module inside of this one."""
        return Region(tuple(one for one in self.operations if f"{one.module}.".startswith(f"{module}.")))

    @property
    def saved_bytes(self) -> int:
        return sum(one.saved_bytes for one in self.operations)

    def dropping(self, share: float) -> Dropped:
        """The fastest set of operations to keep that frees at least a share of what the module saves, of all sets."""
        last = max(number for number, one in enumerate(self.operations) if one.saved_bytes >= _SMALL)
        repeated = self.operations[: last + 1]
        large = [one for one in repeated if one.result_bytes >= _SMALL]
        kept = (np.arange(2 ** len(large))[:, None] >> np.arange(len(large))) & 1
        freed = self.saved_bytes - kept @ np.array([one.result_bytes for one in large])
        again = sum(one.ns for one in repeated) - kept @ np.array([one.ns for one in large])
        enough = np.flatnonzero(freed >= min(_ENOUGH * share * self.saved_bytes, freed.max()))
        best = enough[np.argmin(again[enough])]
        kept_ones = {id(one) for one, is_kept in zip(large, kept[best], strict=True) if is_kept}
        return Dropped(int(freed[best]), int(again[best]), frozenset(self._calls(kept_ones)))

    def _calls(self, wanted: set[int]) -> Iterator[tuple[str, int]]:
        calls: Counter[str] = Counter()
        for one in self.operations:
            if id(one) in wanted:
                yield one.name, calls[one.name]
            calls[one.name] += 1


def of_block(family: Family, unit: str) -> Region:
    """The operations of a block, from the trace in which one that is like it recomputes nothing."""
    place = family.probe.places[unit][NOTHING]
    trace = family.probe.traces[place.trace]
    recording, sizes = trace.base.recording, trace.birth_bytes(trace.base_size)
    element = next(one for one in family.probe.elements[place.trace] if one.unit == place.unit)
    died = {-event - 1: position for position, event in enumerate(recording.events) if event < 0}
    seconds = cost.times([work for _, work in recording.work], trace.base.device)
    found, begun = [], element.forward[0]
    for number in range(*element.forward_work):
        end, work = recording.work[number]
        born = [event - 1 for event in recording.events[begun:end] if event > 0]
        begun = end
        saved = [i for i in born if died.get(i, len(recording.events)) > element.backward[0]]
        found.append(
            Operation(
                name=work.op.partition(".")[0],
                module=recording.births[born[-1]].module.removeprefix(place.unit).lstrip(".") if born else "",
                result_bytes=sum(int(sizes[i]) for i in born if recording.births[i].category != "workspace"),
                saved_bytes=sum(int(sizes[i]) for i in saved),
                ns=round(1e9 * seconds[number]),
            )
        )
    return Region(tuple(found))


def nanoseconds(op: str, dtype: str, flops: int, num_bytes: int, device: hardware.Device = DEVICE) -> int:
    """Time of an operation of a peer's, by the cost model of the trace."""
    return round(1e9 * cost.times([Work(op, "forward", dtype, flops, num_bytes)], device)[0])
