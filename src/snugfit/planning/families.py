"""All plans that differ in the micro-batch and in what is recomputed only: their chain of units at any size.

Entry point: ``Family``. It turns what a probe measured into the units of ``chain``, and an answer of the solvers into
the segments of a plan. Which plan is taken is the search's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from snugfit.memory.events import Work
from snugfit.memory.steps import leftovers
from snugfit.planning import cost, held_up, units
from snugfit.planning.chain import NOTHING, Option, Span, Unit
from snugfit.planning.cutting import Element, Measures, measure
from snugfit.planning.held_up import Spent
from snugfit.planning.kept_results import keeping_products, kept_in_runs
from snugfit.planning.probing import Probe
from snugfit.planning.scaling import ScaledTrace
from snugfit.planning.unit_runs import kept_by_policy, run_prices
from snugfit.plans import Segment


@dataclass(frozen=True, slots=True)
class Chain:
    """The steps of a family at one micro-batch size, as the solvers see them."""

    units: tuple[Unit, ...]
    names: tuple[str, ...]
    "Of each unit; empty for what runs between those that have options."
    floor_bytes: int
    "Most alive outside of the micro-batches: during the update."
    plain_ns: int
    "One micro-batch without recomputation."
    update_ns: int
    "The rest of a step."
    held: tuple[Mapping[str, int], ...]
    "Of each unit and option: what its forward leaves for the rest of forward only (autocast's casts of weights)."
    carried: tuple[str, ...]
    "Option of each unit in the trace in which its surroundings were measured."

    def needed_bytes(self, choices: Sequence[Span]) -> int:
        """The smallest budget into which the chain fits if its units run in this way; no segments inside of others."""
        moved = self.holding(choices).units
        kept, needed = 0, self.floor_bytes
        for span in choices:
            unit = moved[span.first]
            if span.option is None:
                prices = run_prices(moved, span.first, kept_by_policy(moved, span.policy))
                price = next(islice(prices, span.last - span.first - 1, None))
                own, more = price.need_bytes, price.kept_bytes
            else:
                option = next(option for option in unit.options if option.name == span.option)
                forward = unit.forward_static_bytes + option.forward_bytes
                own = max(forward, unit.backward_static_bytes + option.backward_bytes)
                more = option.kept_bytes
            needed = max(needed, kept + own)
            kept += more
        return needed

    def all_by(self, name: str) -> tuple[Span, ...]:
        """Every unit that has an option of that name run by it, the others plainly."""
        return tuple(
            Span(i, i, name if any(option.name == name for option in unit.options) else NOTHING)
            for i, unit in enumerate(self.units)
        )

    def extra_ns(self, choices: Sequence[Span]) -> int:
        """Time of one micro-batch beside that of recomputing nothing; of single units only."""
        return sum(
            next(option.extra_ns for option in self.units[span.first].options if option.name == span.option)
            for span in choices
        )

    def holding(self, choices: Sequence[Span]) -> "Chain":
        """The chain whose forward holds what it does if the units run in this way."""
        surplus = 0
        moved = []
        for number, option in enumerate(_options(choices)):
            unit = self.units[number]
            moved.append(replace(unit, forward_static_bytes=unit.forward_static_bytes + surplus))
            held = self.held[number]
            surplus += held.get(option, 0) - held.get(self.carried[number], 0)
        return replace(self, units=tuple(moved))


class Family:
    """What a probe measured, at any micro-batch size."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self._measured: dict[tuple[int, int, bool], dict[str, Measures]] = {}
        self._chains: dict[tuple[int, int], Chain] = {}
        self._steps: dict[int, int] = {}
        self._last_spent: tuple[int, Spent] | None = None

    def chain(self, micro_batch_size: int, num_micro_batches: int) -> Chain:
        """The chain of a window of that many micro-batches of that size, while it runs the last of them."""
        key = (micro_batch_size, min(num_micro_batches, 2) if not self._base.adds_up else num_micro_batches)
        if key not in self._chains:
            self._chains[key] = self._build(*key)
        return self._chains[key]

    @property
    def updates_in_lists(self) -> bool:
        """Whether the optimizer updates lists of parameters by one operation each (torch's foreach form)."""
        work = self._base.base.recording.work
        return any(item.phase == "optimizer" and item.op.startswith("_foreach") for _, item in work)

    def num_micro_steps(self, num_samples: int, micro_batch_size: int) -> float:
        """Number of micro-batches of a batch, the last smaller one counted by the time that it takes of a full one."""
        full, rest = divmod(num_samples, micro_batch_size)
        if not rest:
            return full
        whole = self._step_ns(micro_batch_size)
        return full + (self._step_ns(rest) / whole if whole else 1)

    def _step_ns(self, micro_batch_size: int) -> int:
        if micro_batch_size not in self._steps:
            self._steps[micro_batch_size] = self._spent(micro_batch_size).of_step(self._base)
        return self._steps[micro_batch_size]

    def _spent(self, size: int) -> Spent:
        """What the work of the first trace takes; that of one size is asked for several times on end."""
        if self._last_spent is None or self._last_spent[0] != size:
            self._last_spent = size, held_up.spent(self._base, size, self._elements(0, first=False))
        return self._last_spent[1]

    def segments(self, chain: Chain, choices: Sequence[Span]) -> tuple[Segment, ...]:
        """The segments of a plan in which the units of a chain run in this way."""
        return tuple(self._segments(chain, choices))

    def _segments(self, chain: Chain, choices: Sequence[Span]) -> Iterator[Segment]:
        for span in choices:
            if span.option is None:
                yield Segment(chain.names[span.first : span.last + 1], span.policy or units.FULL)
                yield from self._segments(chain, span.inner)
            elif span.option != NOTHING:
                name = chain.names[span.first]
                yield from self.probe.options[name].of(name, span.option)

    @property
    def _base(self) -> ScaledTrace:
        return self.probe.traces[0]

    def _build(self, size: int, number: int) -> Chain:
        first = number == 1
        elements = self._elements(0, first)
        surroundings = self._of_trace(0, size, first)
        sizes, spent = self._base.birth_bytes(size), self._spent(size)
        built, held = [], []
        left_alive = self._left_alive(size, number)
        for place, element in enumerate(elements):
            own = surroundings[_key(place, element)]
            options, holds = self._options(element.unit, own, size, first)
            plain = options[0]
            full = next((option for option in options if option.name == units.FULL), None)
            after = elements[place + 1].unit if place + 1 < len(elements) else ""
            # What a recomputation runs again is more than the forward: casts of weights, launches.
            forward_ns = int(spent.if_repeated[slice(*element.forward_work)].sum())
            again_ns = forward_ns if full is None else max(forward_ns, full.extra_ns)
            in_runs = kept_in_runs(self._base.base.recording, element, sizes, spent, again_ns, options)
            if full is not None and self._lacks(element.unit, units.KEEP_PRODUCTS):
                derived = keeping_products(in_runs, plain, full, again_ns)
                if derived is not None:
                    options, holds[derived.name] = [*options, derived], holds[units.FULL]
            built.append(
                Unit(
                    options=_undominated(options),
                    input_bytes=plain.kept_bytes if full is None else full.kept_bytes,
                    forward_static_bytes=own.forward_static_bytes + left_alive,
                    backward_static_bytes=own.backward_static_bytes + left_alive,
                    forward_ns=again_ns,
                    joins_next=full is not None and (element.unit, after) in self.probe.joined,
                    tail_ns=0 if full is None else again_ns - full.extra_ns,
                    in_runs=in_runs,
                )
            )
            held.append(holds)
        plain_ns = sum(
            plain.forward_ns + plain.backward_ns
            for place, element in enumerate(elements)
            for plain in [self._plain(element.unit, surroundings[_key(place, element)], size, first)]
        )
        floor, update_ns = update(self._base, size)
        return Chain(
            units=tuple(built),
            names=tuple(element.unit for element in elements),
            floor_bytes=floor + left_alive,
            plain_ns=plain_ns,
            update_ns=update_ns,
            held=tuple(held),
            carried=tuple(self.probe.carried.get(element.unit, NOTHING) for element in elements),
        )

    def _options(self, unit: str, own: Measures, size: int, first: bool) -> tuple[list[Option], dict[str, int]]:
        """The options of a unit, and what each holds; those of a piece without a name are itself as it was measured."""
        if unit not in self.probe.places:
            return [_option(NOTHING, own, 0, 0, 0)], {NOTHING: own.held_bytes}
        plain = self._plain(unit, own, size, first)
        more = self._beside_alike(unit, own, size, first)
        options, held = [], {}
        for name, place in self.probe.places[unit].items():
            found = self._of_trace(place.trace, size, first)[place.unit]
            # Gradients: a trace of one micro-batch makes them, later micro-batches add to those that are there.
            less = 0
            if place.trace and not first:
                less = self._plain(unit, own, size, True).backward_bytes - plain.backward_bytes
            time = found.forward_ns + found.backward_ns - plain.forward_ns - plain.backward_ns
            options.append(_option(name, found, max(time, 0), less, more))
            held[name] = found.held_bytes
        if units.OFFLOAD in self.probe.options[unit].segments:
            offloaded = self._offloaded(options, plain.small_bytes)
            options, held[units.OFFLOAD] = [*options, offloaded], held.get(units.FULL, 0)
        return sorted(options, key=lambda option: option.name != NOTHING), held

    def _lacks(self, unit: str, option: str) -> bool:
        """Whether an option of a unit was not measured, for want of alike ones."""
        return option in self.probe.options[unit].segments and option not in self.probe.places[unit]

    def _offloaded(self, options: Sequence[Option], small_bytes: int) -> Option:
        """A unit whose saved tensors go to the host and come back, all of them before its backward goes on.

        By formula: which of them are large enough to be moved depends on the micro-batch. Of the copies one way counts,
        as if a half were not hidden behind computation: no card has measured it, and the host's memory is not free.

        Args:
            options: Of the unit, plain and recomputed as a whole.
            small_bytes: Of what it keeps, what is not moved.
        """
        known = {option.name: option for option in options}
        plain, full = known[NOTHING], known.get(units.FULL, known[NOTHING])
        moved = max(plain.kept_bytes - full.kept_bytes - small_bytes, 0)
        copy = Work("_to_copy.default", "forward", "float32", 0, 2 * moved, is_copy=True)
        return Option(
            name=units.OFFLOAD,
            kept_bytes=plain.kept_bytes - moved,
            forward_bytes=plain.forward_bytes,
            backward_bytes=plain.backward_bytes,
            extra_ns=round(1e9 * cost.step_time([copy], self._base.base.device)),
        )

    def _beside_alike(self, unit: str, own: Measures, size: int, first: bool) -> int:
        """What a unit keeps beyond one that is alike and was run in the same way: the first one's input is not its."""
        place = self.probe.places[unit][self.probe.carried[unit]]
        return own.kept_bytes - self._of_trace(place.trace, size, first)[place.unit].kept_bytes

    def _plain(self, unit: str, own: Measures, size: int, first: bool) -> Measures:
        """What a unit needs that recomputes nothing."""
        if unit not in self.probe.places:
            return own
        place = self.probe.places[unit][NOTHING]
        return self._of_trace(place.trace, size, first)[place.unit]

    def _elements(self, trace: int, first: bool) -> tuple[Element, ...]:
        return self.probe.first_step if first and trace == 0 else self.probe.elements[trace]

    def _of_trace(self, trace: int, size: int, first: bool) -> dict[str, Measures]:
        key = (trace, size, first and trace == 0)
        if key not in self._measured:
            elements = self._elements(trace, first)
            names = [_key(place, element) for place, element in enumerate(elements)]
            of_trace = self.probe.traces[trace]
            spent = held_up.spent(of_trace, size, elements) if trace or first else self._spent(size)
            found = measure(of_trace.events, elements, of_trace.birth_bytes(size), spent.as_traced)
            self._measured[key] = dict(zip(names, found, strict=True))
        return self._measured[key]

    def _left_alive(self, size: int, number: int) -> int:
        """What micro-batches that were not traced leave alive."""
        if number <= 2 or not self._base.adds_up:
            return 0
        births, sizes = self._base.base.recording.births, self._base.birth_bytes(size)
        added = leftovers.added(self._base.base.recording)
        each = sum(more * int(sizes[index]) / births[index].num_bytes for index, more in added.items())
        return round((number - 2) * each)


def measured(trace: ScaledTrace, elements: Sequence[Element], micro_batch_size: int) -> tuple[Measures, ...]:
    """The measures of the elements of a trace at another micro-batch size."""
    work_ns = held_up.spent(trace, micro_batch_size, elements).as_traced
    return measure(trace.events, elements, trace.birth_bytes(micro_batch_size), work_ns)


def update(trace: ScaledTrace, micro_batch_size: int) -> tuple[int, int]:
    """Most bytes alive behind the last micro-batch of a trace, and the nanoseconds of what runs there.

    What the micro-batch leaves is freed before the update makes something, and is the micro-batch's.
    """
    events, sizes = trace.events, trace.birth_bytes(micro_batch_size)
    alive = np.cumsum(np.sign(events) * sizes[np.abs(events) - 1])
    behind = trace.steps[-1][1]
    kinds = trace.work(micro_batch_size)
    spent = [kinds[kind] for kind in trace.kind_of[trace.worked_at > behind].tolist()]
    floor = alive[behind:][events[behind:] > 0].max(initial=0)
    return int(floor), round(1e9 * cost.step_time(spent, trace.base.device))


def _key(place: int, element: Element) -> str:
    """Names a unit by itself and what lies between units by its place."""
    return element.unit or f"#{place}"


def _option(name: str, found: Measures, extra_ns: int, less_in_backward: int, more_kept: int) -> Option:
    return Option(
        name=name,
        kept_bytes=max(found.kept_bytes + more_kept, 0),
        forward_bytes=found.forward_bytes,
        backward_bytes=max(found.backward_bytes + more_kept - less_in_backward, 0),
        extra_ns=extra_ns,
    )


def _undominated(options: Sequence[Option]) -> tuple[Option, ...]:
    """The first option, and of the others those that no other one equals or beats in everything."""

    def costs(option: Option) -> tuple[int, int, int, int]:
        return option.kept_bytes, option.forward_bytes, option.backward_bytes, option.extra_ns

    kept = [options[0]]
    for option in sorted(options[1:], key=costs):
        if not any(all(a <= b for a, b in zip(costs(other), costs(option), strict=True)) for other in kept):
            kept.append(option)
    return tuple(kept)


def _options(choices: Sequence[Span]) -> Iterator[str]:
    """The option of each unit; those of a run keep no more than when each is recomputed."""
    for span in choices:
        for _ in range(span.first, span.last + 1):
            yield units.FULL if span.option is None else span.option
