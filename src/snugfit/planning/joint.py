"""Searches precision, micro-batch and recomputation together: the fastest choice that is predicted to fit.

Entry point: ``JointSearch``. For each precision one probe gives the chain of units at any micro-batch size; for each
size the solver gives the fastest way to run that chain within the budget. What is chosen is traced as it is by
``choosing``, which says by how much the prediction was off; then the search goes on with that.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from snugfit.errors import BatchError, SnugfitError
from snugfit.hardware import Device
from snugfit.jobs import Job
from snugfit.memory.reports import MemoryReport, margin_bytes
from snugfit.planning import links, nested, options, probing, solver, units
from snugfit.planning.chain import NOTHING, Solution, Span
from snugfit.planning.families import Chain, Family
from snugfit.planning.learning import Kind, Learnt, family_of, kind_of
from snugfit.planning.scaling import NotAffineError
from snugfit.planning.variants import Heads, Updates
from snugfit.plans import Plan

ANY, NONE, BLOCKS = "any", "none", "blocks"
"What may be recomputed: whatever is fastest, nothing, or every unit as a whole."

_EQUAL_TIME = 1.01
"Ratio up to which two modelled step times are taken as equal."
_HELD_ROUNDS = 4
_MUCH_TIME, _MUCH, _MUCH_OF_HEAD = 0.03, 0.9, 0.15
"Share of a step that an update takes, of the room that it needs, and that the last piece needs, to look for others."
_CHUNKS = (4, 16)
_LEAST_PROBED, _BY_RECOMPUTING = 4, 4
"The smallest size of the larger traces of a pair, and how many times as many samples may fit as without recomputation."
_IMPLEMENTATIONS = ("fused", "for-loop")
"Of the optimizer, the first one that there is."
_WORSE_IN_A_ROW = 4
"Sizes without a chance after which smaller ones are not looked at."


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan that the chain of its family is predicted to fit."""

    plan: Plan
    step_time_s: float
    allocated_bytes: int
    "Predicted from the chain."
    chain: Chain
    spans: tuple[Span, ...]

    @property
    def kind(self) -> Kind:
        """See ``Kind``."""
        return kind_of(self.plan, self.plan.recompute)


class JointSearch:
    """The probes made so far, and what they say of any plan.

    Args:
        job: What is trained.
        device: What is planned for.
        first: The plan in what is not searched.
        fixed: Fields that are given.
        model: The job's model, with or without data.
        budget_bytes: For peak, context and margin.
    """

    def __init__(
        self, job: Job, device: Device, first: Plan, fixed: Mapping[str, Any], model: nn.Module, budget_bytes: int
    ) -> None:
        self.job, self.device, self.first, self.fixed, self.model = job, device, first, fixed, model
        self.names = () if "recompute" in fixed else units.named(model)
        self.budget_bytes, self.allowed_bytes = budget_bytes, options.allowed_bytes(budget_bytes, device)
        self.runs = True
        self.learnt = Learnt()
        self.updates = Updates(job, device)
        share = first.samples_per_rank
        given = "micro_batch_size" in fixed
        self._pair = (first.micro_batch_size,) * 2 if given else (max(1, share // 2), max(1, share // 4))
        self.heads = Heads(job, device, self.names, self._pair)
        self.contenders: dict[Plan, Choice] = {}
        "The last choice of every family at every micro-batch size at which one was predicted to fit."
        self._families: dict[tuple[str, int], Family] = {}
        self._not_affine: set[str] = set()
        self.reserved: dict[Plan, int] = {}
        "What the whole batch reserves, recomputing nothing, where that was traced and does not fit."
        self.forward_work: Mapping[str, int] = {}
        "What units compute, as far as a trace has told."
        self.compares_classes = False
        "Of the whole batch; see ``TracedPlan``."
        self.left_out = ""
        "Which precision is not searched, and why, where the step does not run in it."
        self.too_small: set[int] = set()
        "Micro-batch sizes at which the job cannot run (BatchNorm of one sample)."

    def aim(self, whole: MemoryReport) -> None:
        """Measure units at micro-batches about as large as those that may fit, where that is little of the whole batch.

        Sizes are affine only nearly: kernels split what they do in as many parts as they like.

        Args:
            whole: What the whole batch needs that does not fit, with nothing recomputed.
        """
        if "micro_batch_size" in self.fixed:
            return
        share, held = self.first.samples_per_rank, whole.static_bytes
        fitting = max(self.allowed_bytes - held, 0) / max(whole.peak_allocated_bytes - held, 1)
        largest = max(_LEAST_PROBED, math.ceil(_BY_RECOMPUTING * fitting * share))
        self._pair = min(self._pair[0], largest), min(self._pair[1], largest // 2)
        self.heads.pair = self._pair

    def prepare(self, whole: Plan) -> None:
        """Make the probe of a family. What goes wrong is said when the probe is needed.

        Args:
            whole: The plan of the family that was traced, without recomputation.
        """
        try:
            chain = self.chain(whole)
        except SnugfitError:
            return
        if "optimizer_impl" not in self.fixed and self._matters(whole, chain):
            self.updates.begin(replace(whole, optimizer_impl=_IMPLEMENTATIONS[0], micro_batch_size=self._pair[0]))

    @contextmanager
    def knowing(self, learnt: Learnt) -> Iterator[None]:
        """Search with what was learnt elsewhere."""
        outer, self.learnt = self.learnt, learnt
        try:
            yield
        finally:
            self.learnt = outer

    def best(self, like: Plan, recompute: str = ANY) -> Choice | None:
        """The fastest choice of a family that is predicted to fit; None if there is none.

        Args:
            like: A plan of the family.
            recompute: ``"any"``, ``"none"`` or ``"blocks"``.
        """
        found: list[Choice] = []
        in_vain = 0
        for size in self.sizes(family_of(like)):
            plan = replace(like, micro_batch_size=size)
            try:
                chain = self.chain(plan)
            except BatchError:
                self.too_small.add(size)
                continue
            best = min((choice.step_time_s for choice in found), default=float("inf"))
            if self._seconds(plan, chain, 0) > best * _EQUAL_TIME:
                in_vain += 1
                if in_vain == _WORSE_IN_A_ROW:
                    break
                continue
            spans = self._spans(plan, chain, recompute)
            if spans is not None:
                found.append(self.choice(plan, chain, *spans))
                self.contenders[replace(plan, recompute=())] = found[-1]
                in_vain = 0
        if not found:
            return self._nested(like) if recompute == ANY else None
        best = min(choice.step_time_s for choice in found)
        equals = [choice for choice in found if choice.step_time_s <= best * _EQUAL_TIME]
        return min(equals, key=self._trouble)

    def _trouble(self, choice: Choice) -> tuple[int, bool, int]:
        """Of equally fast ones those with few segments first, on a card then those whose micro-batches are of one size.

        A smaller last one leaves the blocks of the others in pieces: the 7B shape reserves 8.5 GiB beyond its peak as
        12 x 5 + 4, and 5.3 as 16 x 4 (modelled).
        """
        plan = choice.plan
        is_ragged = self.device.kind == "cuda" and plan.samples_per_rank % plan.micro_batch_size != 0
        return len(plan.recompute), is_ragged, -plan.micro_batch_size

    def fastest(self, family: Plan) -> list[Choice]:
        """The best of a family and of each of its other forms."""
        return [choice for choice in map(self.best, self.variants(family)) if choice is not None]

    def evenly(self, like: Plan) -> Iterator[Choice]:
        """Choices of a family that recompute nothing, or every unit, and fit if they reserve no more than predicted."""
        for size in self.sizes(family_of(like)):
            plan = replace(like, micro_batch_size=size)
            with suppress(BatchError):
                chain = self.chain(plan)
                for spans in dict.fromkeys((chain.all_by(NOTHING), chain.all_by(units.FULL))):
                    if chain.needed_bytes(spans) <= self.allowed_bytes:
                        yield self.choice(plan, chain, spans, chain.extra_ns(spans))

    def smallest(self, like: Plan, recompute: str = ANY) -> Choice:
        """The choice of a family that is predicted to need least: of the smallest size, or of the whole batch."""
        sizes = self.sizes(family_of(like))
        ends = [self._smallest(replace(like, micro_batch_size=size), recompute) for size in {sizes[0], sizes[-1]}]
        return min(ends, key=lambda choice: choice.allocated_bytes)

    def _smallest(self, plan: Plan, recompute: str) -> Choice:
        chain = self.chain(plan)
        if recompute == NONE:
            return self.choice(plan, chain, chain.all_by(NOTHING), 0)
        if recompute == BLOCKS:
            spans = chain.all_by(units.FULL)
            return self.choice(plan, chain, spans, chain.extra_ns(spans))
        solution = solver.frontier(chain.units, floor_bytes=chain.floor_bytes, runs=self.runs).solution(0)
        return self.choice(plan, chain, solution.choices, solution.extra_ns)

    def frontier(self, like: Plan, sizes: int) -> Iterator[Choice]:
        """Choices of a family over all budgets, at some micro-batch sizes."""
        known = self.sizes(family_of(like))
        for size in known[:: max(1, len(known) // sizes)]:
            plan = replace(like, micro_batch_size=size)
            chain = self.chain(plan)
            found = solver.frontier(chain.units, floor_bytes=chain.floor_bytes, runs=self.runs)
            count = len(found.points)
            for index in sorted({round(part * (count - 1) / _POINTS) for part in range(_POINTS + 1)}):
                solution = found.solution(index)
                yield self.choice(plan, chain, solution.choices, solution.extra_ns)

    def sizes(self, family: str) -> tuple[int, ...]:
        """Micro-batch sizes that are looked at, the largest first."""
        if "micro_batch_size" in self.fixed:
            return (self.first.micro_batch_size,)
        found = options.micro_batch_sizes(self.first.samples_per_rank)
        sizes = tuple(size for size in found if size not in self.too_small) or found[:1]
        return sizes if family not in self._not_affine else options.few_of(sizes)

    def chain(self, plan: Plan) -> Chain:
        """The chain of a plan's family at its micro-batch size."""
        chain = self._family(plan).chain(plan.micro_batch_size, plan.accumulation_steps)
        if plan.loss_chunks != self.first.loss_chunks:
            whole = self.heads.of(replace(plan, loss_chunks=self.first.loss_chunks))
            assert whole is not None, "the family's own loss was traced before"
            chain = self.heads.put_in(chain, plan, whole)
        return chain if plan.optimizer_impl == self.first.optimizer_impl else self.updates.put_in(chain, plan)

    def variants(self, like: Plan) -> Iterator[Plan]:
        """The family itself, and its other forms that may pay: a fused update, a loss in chunks.

        A form is looked at where the part that it changes takes a good share of the time, or of the room.
        """
        yield like
        size = self.sizes(family_of(like))[0]
        plan = replace(like, micro_batch_size=size)
        chain, room = self.chain(plan), self._room(plan, ())
        forms = [like]
        if "optimizer_impl" not in self.fixed and self._matters(plan, chain):
            for implementation in _IMPLEMENTATIONS:
                if implementation == "for-loop" and not self._family(plan).updates_in_lists:
                    break  # it is one already, or has no such form
                form = replace(like, optimizer_impl=implementation, micro_batch_size=self._pair[0])
                if self.updates.of(form) is not None:
                    forms.append(form)
                    yield form
                    break
        head = chain.units[-1].options[0]
        is_large = max(head.forward_bytes, head.backward_bytes) > _MUCH_OF_HEAD * room
        if "loss_chunks" not in self.fixed and is_large and self._family(plan).probe.cuts_loss:
            for chunks in _CHUNKS:
                form = replace(like, loss_chunks=chunks)
                if self.heads.of(replace(form, micro_batch_size=size)) is None:
                    break
                yield from (replace(known, loss_chunks=chunks) for known in forms)

    def _matters(self, plan: Plan, chain: Chain) -> bool:
        """Whether the update takes a good share of a step, or of the room."""
        is_long = chain.update_ns > _MUCH_TIME * self._seconds(plan, chain, 0) * 1e9
        return is_long or chain.floor_bytes > _MUCH * self._room(plan, ())

    def choice(self, plan: Plan, chain: Chain, spans: tuple[Span, ...], extra_ns: int) -> Choice:
        """A way to run a chain as a choice."""
        segments = self._family(plan).segments(chain, spans) if self.names else plan.recompute
        pace = self.learnt.pace_of(kind_of(plan, segments))
        return Choice(
            plan=replace(plan, recompute=segments),
            step_time_s=pace * self._seconds(plan, chain, extra_ns),
            allocated_bytes=self._room(plan, segments)
            if any(span.inner for span in spans)
            else chain.needed_bytes(spans),
            chain=chain,
            spans=spans,
        )

    @property
    def known_families(self) -> set[str]:
        """Families that were probed."""
        return {name for name, _ in self._families}

    def needed_bytes(self, choice: Choice) -> int:
        """What a budget must hold for a choice, as far as its chain and what its family taught say."""
        reserved = choice.allocated_bytes + self.learnt.beyond(choice.kind)
        return reserved + self.device.context_bytes + margin_bytes(reserved, self.device.name)

    def least_needed(self, plan: Plan) -> int:
        """What a budget must hold for a plan at its micro-batch size, however it recomputes."""
        chain = self.chain(plan)
        found = solver.frontier(chain.units, floor_bytes=chain.floor_bytes, runs=self.runs).solution(0)
        return self.needed_bytes(self.choice(plan, chain, found.choices, found.extra_ns))

    def _spans(self, plan: Plan, chain: Chain, recompute: str) -> tuple[tuple[Span, ...], int] | None:
        """The fastest way to run a chain that is predicted to fit, and its extra time."""
        plainly = chain.needed_bytes(chain.all_by(NOTHING))
        if recompute != BLOCKS and plainly <= self._room(plan, plan.recompute):
            return chain.all_by(NOTHING), 0
        if recompute == NONE:
            return None
        room = self._room(plan, self.names)
        if recompute == BLOCKS:
            spans = chain.all_by(units.FULL)
            return (spans, chain.extra_ns(spans)) if chain.needed_bytes(spans) <= room else None
        room = min(room, plainly - 1)  # what recomputes nothing does not fit, even where there is more room for others
        moved = chain
        for _ in range(_HELD_ROUNDS):
            solution = self._solution(moved, room)
            if solution is None:
                return None
            if chain.needed_bytes(solution.choices) <= room:
                return solution.choices, solution.extra_ns
            moved = chain.holding(solution.choices)
        return None

    def _solution(self, chain: Chain, room: int) -> Solution | None:
        if chain.floor_bytes > room:
            return None
        found = solver.frontier(chain.units, floor_bytes=chain.floor_bytes, runs=self.runs, budget_bytes=room)
        return found.within(room)

    def _nested(self, like: Plan) -> Choice | None:
        """Segments inside of segments, where one level does not fit at any size."""
        if not self.names or not self.runs:
            return None
        plan = replace(like, micro_batch_size=min(self.sizes(family_of(like))))
        chain, room = self.chain(plan), self._room(plan, self.names)
        if chain.floor_bytes > room:
            return None
        moved = chain.holding(chain.all_by(units.FULL))
        solution = nested.frontier(moved.units, floor_bytes=chain.floor_bytes, budget_bytes=room).within(room)
        return None if solution is None else self.choice(plan, chain, solution.choices, solution.extra_ns)

    def _room(self, plan: Plan, recomputed: Sequence[object]) -> int:
        """Bytes that the chain of a plan may need, if something is recomputed or nothing is."""
        return self.allowed_bytes - self.learnt.beyond(kind_of(plan, recomputed))

    def _seconds(self, plan: Plan, chain: Chain, extra_ns: int) -> float:
        rounds = self._family(plan).num_micro_steps(plan.samples_per_rank, plan.micro_batch_size)
        computing = (rounds * (chain.plain_ns + extra_ns) + chain.update_ns) / 1e9
        if plan.world_size == 1:
            return computing
        backward = _SHARE_OF_BACKWARD * (chain.plain_ns + extra_ns) / 1e9
        return computing + links.added_seconds(plan, self._gradient_bytes(plan), self.device, backward_s=backward)

    def _gradient_bytes(self, plan: Plan) -> int:
        size = 2 if plan.precision == "bf16-true" and plan.gradient_dtype == "parameter" else 4
        return size * sum(each.numel() for each in self.model.parameters() if each.requires_grad)

    def _family(self, plan: Plan) -> Family:
        """The family of a plan; one for every size where sizes cannot be interpolated."""
        name = family_of(plan)
        size = plan.micro_batch_size if name in self._not_affine else 0
        if (name, size) not in self._families:
            pair = (size, size) if size else self._pair
            own = replace(plan, optimizer_impl=self.first.optimizer_impl, loss_chunks=self.first.loss_chunks)
            try:
                with warnings.catch_warnings():  # of what its options would mean, which nobody chose
                    warnings.simplefilter("ignore")
                    probe = probing.probe(self.job, own, self.device, self.model, self.names, pair, self.forward_work)
            except (NotAffineError, BatchError):
                if size:
                    raise
                self._not_affine.add(name)
                return self._family(plan)
            self._families[name, size] = Family(probe)
            self._expect(name, size)
        return self._families[name, size]

    def _expect(self, family: str, size: int) -> None:
        """Expect that plans of a family reserve as much beyond their prediction as its whole batch did."""
        for whole, reserved_bytes in self.reserved.items():
            if family_of(whole) == family and size in (0, whole.micro_batch_size):
                chain = self.chain(whole)
                beyond = reserved_bytes - chain.needed_bytes(chain.all_by(NOTHING))
                share = min(self.allowed_bytes / reserved_bytes, 1.0)  # of a smaller plan, smaller fragments
                self.learnt.expected[family] = max(round(beyond * share), 0)


_SHARE_OF_BACKWARD = 2 / 3
"Of a micro-step: two products for each one of forward."
_POINTS = 24
"Points of a frontier at one micro-batch size."
