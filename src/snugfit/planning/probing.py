"""Measures every option of every unit in few traces: alike units carry different options in one trace.

Entry point: ``probe``. Each trace is made at two micro-batch sizes, so that what is measured holds for any. Options
that the job refuses (a policy that changes nothing, a module that cannot be recomputed) are left out.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, TypeVar

from torch import nn

from snugfit.errors import PlanError, UnsupportedError
from snugfit.hardware import Device
from snugfit.jobs import Job
from snugfit.planning import joining, units
from snugfit.planning.chain import NOTHING
from snugfit.planning.cutting import Element, cut, forward_work
from snugfit.planning.scaling import NotAffineError, ScaledTrace
from snugfit.plans import Plan
from snugfit.training import segments
from snugfit.training.chunked_loss import Planned

_MOST_TRACES = 3
"Traces that are made for the options; what small groups of alike units then lack is left out."
_ONE_MICRO_BATCH: Sequence[Sequence[int]] = ((0,),)
_UNKNOWN: Mapping[str, int] = {}

_Item = TypeVar("_Item")
_Told = TypeVar("_Told")


@dataclass(frozen=True, slots=True)
class Place:
    """Where an option was measured: on a unit of a trace."""

    trace: int
    unit: str


@dataclass(frozen=True, slots=True)
class Probe:
    """What was traced, and where in it each option of each unit is found."""

    traces: tuple[ScaledTrace, ...]
    "The first one holds every phase of a step; the others a single micro-batch."
    elements: tuple[tuple[Element, ...], ...]
    "Of each trace: the elements of its last micro-step."
    first_step: tuple[Element, ...]
    "Of the first trace: those of the first micro-step of its last window."
    options: Mapping[str, units.Options]
    "By unit."
    places: Mapping[str, Mapping[str, Place]]
    "By unit and option."
    carried: Mapping[str, str]
    "Option of each unit in the first trace."
    joined: frozenset[tuple[str, str]]
    "Pairs of units of which the second takes the first's output as it is."
    cuts_loss: bool
    "Whether the loss may be computed in chunks: it calls ``chunked_cross_entropy``."


def probe(
    job: Job,
    plan: Plan,
    device: Device,
    model: nn.Module,
    names: Sequence[str],
    sizes: tuple[int, int],
    done: Mapping[str, int] = _UNKNOWN,
) -> Probe:
    """Trace a job with the options of its units spread over those that are alike.

    Args:
        job: What is trained.
        plan: Everything but the micro-batch size and what is recomputed.
        device: What it is traced for.
        model: The job's model, with or without data.
        names: The units; none: the step is one piece.
        sizes: Two micro-batch sizes, see ``ScaledTrace.record``.
        done: What units compute in forward, where that is known: what is alike computes as much.

    Raises:
        NotAffineError: The operations depend on the micro-batch size.
        UnsupportedError: The job cannot be traced.
    """
    modules = dict(segments.unwrapped(model).named_modules())
    options = {name: units.options_of(modules[name], offload=device.kind == "cuda") for name in names}
    plain = {name: of_unit.only(NOTHING, units.FULL) for name, of_unit in options.items()}
    refused: Exception | None = None
    for tried in (options, plain, {}):
        try:
            kinds = {name: (kind, done.get(name)) for name, kind in units.alike(model, tuple(tried)).items()}
            return _Probing(job, plan, device, sizes, kinds, tried).run()
        except NotAffineError:
            raise
        except (PlanError, UnsupportedError) as error:  # of a segment, or of the job itself: then the last one says so
            refused = error
    assert refused is not None
    raise refused


class _Probing:
    """One probe as it grows, trace by trace."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        device: Device,
        sizes: tuple[int, int],
        kinds: Mapping[str, Hashable],
        options: Mapping[str, units.Options],
    ) -> None:
        self.job, self.plan, self.device, self.sizes = job, plan, device, sizes
        self.kinds, self.options = dict(kinds), options
        # What Python does around each operation that keeping results watches counts on a CPU, and only a trace tells.
        self.essential = units.ESSENTIAL if device.kind == "cuda" else (*units.ESSENTIAL, units.KEEP_PRODUCTS)
        self.traces: list[ScaledTrace] = []
        self.elements: list[tuple[Element, ...]] = []
        self.places: dict[Hashable, dict[str, Place]] = defaultdict(dict)

    def run(self) -> Probe:
        """Make the traces."""
        carried = self._spread()
        chunks = Planned(self.plan.loss_chunks)
        job = self.job if chunks.chunks > 1 else _with_loss_in(self.job, chunks)  # which the plan's own would not see
        with joining.watched(job, list(self.kinds)) as (watched, seen):
            joined, cuts_loss = self._trace(
                watched, carried, self._windows(), lambda: (seen(), chunks.chunks > 1 or chunks.is_used)
            )
        base = self.traces[0]
        first_step = cut(base.base.recording, base.steps[1], list(self.kinds))
        self._tell_apart()
        self._note(carried)
        while len(self.traces) < _MOST_TRACES and self._lacks_essentials():
            more = self._spread()
            try:
                self._trace(self.job, more, _ONE_MICRO_BATCH, lambda: None)
            except (PlanError, UnsupportedError):  # what is known so far will do
                break
            self._note(more)
        return Probe(
            tuple(self.traces),
            tuple(self.elements),
            first_step,
            {name: self.options[name] for name in self.kinds},
            {name: self.places[kind] for name, kind in self.kinds.items()},
            carried,
            joined,
            cuts_loss,
        )

    def _windows(self) -> Sequence[Sequence[int]]:
        """A window that makes the optimizer's state, and one whose last micro-batch is a full one, on gradients."""
        number = -(-self.plan.samples_per_rank // self.sizes[0])
        is_ragged = self.plan.samples_per_rank % self.sizes[0] != 0
        return ((0,), (0,)) if number == 1 else ((0,), (1, 0)) if number == 2 and is_ragged else ((0,), (0, 1))

    def _spread(self) -> dict[str, str]:
        """An option for each unit: as many as possible that were not measured yet, those in the middle first."""
        groups: dict[Hashable, list[str]] = defaultdict(list)
        for name, kind in self.kinds.items():
            groups[kind].append(name)
        carried = {}
        for kind, names in groups.items():
            offered = [option for option in self.options[names[0]].segments if option != units.OFFLOAD]
            missing = [option for option in offered if option not in self.places[kind]]
            for name, option in zip_longest(_from_the_middle(names), missing[: len(names)], fillvalue=NOTHING):
                carried[name] = option
        return carried

    def _lacks_essentials(self) -> bool:
        return any(
            option in self.options[name].segments and option not in self.places[kind]
            for name, kind in self.kinds.items()
            for option in self.essential
        )

    def _trace(
        self, job: Job, carried: Mapping[str, str], windows: Sequence[Sequence[int]], tell: Callable[[], _Told]
    ) -> _Told:
        recompute = tuple(
            segment for name, option in carried.items() for segment in self.options[name].of(name, option)
        )
        planned = replace(self.plan, recompute=recompute) if self.kinds else self.plan
        trace, told = ScaledTrace.told(job, planned, self.device, self.sizes, windows, tell)
        self.traces.append(trace)
        self.elements.append(cut(trace.base.recording, trace.steps[-1], list(self.kinds)))
        return told

    def _tell_apart(self) -> None:
        """Alike are only units that compute as much, or move as much; those that do not run once are no units."""
        done = forward_work(self.traces[0].base.recording, self.elements[0])
        self.kinds = {name: (kind, done[name]) for name, kind in self.kinds.items() if name in done}

    def _note(self, carried: Mapping[str, str]) -> None:
        trace = len(self.traces) - 1
        for number in _from_the_middle(range(len(self.elements[trace]))):
            name = self.elements[trace][number].unit
            if name in self.kinds:
                self.places[self.kinds[name]].setdefault(carried[name], Place(trace, name))


def _with_loss_in(job: Job, chunks: Planned) -> Job:
    """A job whose loss is computed in a window of its own."""

    def loss(model: Any, micro_batch: Any) -> Any:
        with chunks.window():
            return job.loss(model, micro_batch)

    return replace(job, loss=loss)


def _from_the_middle(items: Sequence[_Item]) -> list[_Item]:
    """The items, those in the middle first: the ends of a chain are the least like the others."""
    middle = (len(items) - 1) / 2
    return [items[i] for i in sorted(range(len(items)), key=lambda i: abs(i - middle))]
