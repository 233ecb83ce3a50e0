"""What the losses of a window add up to: one sum and one count for every denominator.

Entry point: ``Losses``, which a window asks for the weight of each loss and, at its end, for the ratios. Running
backward is ``step``'s, and the algebra of one denominator ``weighting``'s.

NOTE [Several denominators]
1. A loss is known by its place in the sequence that a loss function returns. Without a count of its own it belongs to
   the job's denominator, whose window count is known beforehand. With one it has a denominator of its own, which is
   known when the last micro-batch has run. Losses that report the very same tensor share one.
2. sum_k(T_k / C_k) cannot be had from one running sum of gradients while the C_k are unknown. So until the last
   micro-batch the gradients of each denominator are summed apart: in ``.grad`` those of the first, in one further set
   of gradients each further one. The price is that memory, and one backward per denominator and micro-batch.
3. When the last micro-batch has run forward, all counts are known. The sets are folded into ``.grad``, each times
   R_k * ranks / C_k, and the losses of the last micro-batch go through one backward with their true weights. A
   window of one micro-batch thus costs nothing more, and DDP reduces once, what it always reduces.
4. Counting first, in a forward without graph, would cost no gradient but run the user's function twice: its side
   effects would have to be undone, and a loop that is written by hand cannot be run twice at all.
5. R_k is near the last window's C_k, in the first window near what its first micro-batch foretells.
6. A count on the device is asked whether it is 0 before its loss is back-propagated, for 0 * NaN is NaN: the one
   synchronisation within a micro-step, for each such tensor. ``nonfinite="ignore"`` asks nothing.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from snugfit.errors import PlanError
from snugfit.training.metrics import Metrics
from snugfit.training.weighting import Number, Reduce, Term, Weighting, as_float, power_of_two


@dataclass(slots=True, eq=False)
class Denominator:
    """Losses of a window that are divided by one count; see the NOTE."""

    own: bool
    "Whether the losses report it; else it is the job's."
    reference: Number | None
    "R; None until a first count is seen."
    reported: Number = 0.0
    "Sum of what was reported on this rank."
    loss: Number = 0.0
    "Sum of the weighted losses of this rank."
    total: Number | None = None
    "Count of the window over all ranks, once it is known."
    factor: Number = 1.0
    "What its gradients are multiplied by, once the total is known."
    micro_batch: int = -1
    "The micro-batch that was counted last,"
    counts_nothing: bool = False
    "whether its count was 0,"
    seen: "weakref.ref[Tensor] | None" = None
    "and the tensor that said so."


class Losses:
    """Weights the losses of a window and adds them up.

    Args:
        counts: Count of each micro-batch; None where only the loss knows.
        shares: How the job's denominator is weighted.
        decide: Says ``"empty"`` of a count of the device that is 0.
        reduce_counts: Sums over all ranks.
        gather: The names that every rank has.
        ranks: Their number.
        references: R of the denominators that losses report, in the order of their places; None: not known yet.
    """

    def __init__(
        self,
        counts: Sequence[float | None],
        shares: Weighting,
        decide: Callable[[Tensor | None, Number], str | None],
        reduce_counts: Reduce,
        gather: Callable[[list[str]], Sequence[list[str]]],
        ranks: int,
        references: Sequence[Number | None] | None,
    ) -> None:
        self._counts, self._shares, self._ranks = counts, shares, ranks
        self._decide, self._reduce = decide, reduce_counts
        self._references = references
        self.denominators: list[Denominator] = []
        self._places: list[Denominator] = []
        self._micro_batch = -1
        self._place = self._first = 0
        self._metrics, self._gather = Metrics(ranks), gather

    def weigh(self, i: int, terms: Sequence[Term], *, complete: bool) -> list[tuple[Tensor | None, Denominator]]:
        """What to back-propagate for the losses of micro-batch i, and the denominator of each.

        Args:
            i: The micro-batch.
            terms: Losses of it; None is back-propagated for one that counts nothing.
            complete: Whether these are all of its losses; a loop by hand may bring more.

        Raises:
            PlanError: Losses contradict those of the micro-batches before.
        """
        if i != self._micro_batch:
            self._check_complete()
            if self._micro_batch < 0:
                self._first = i
            self._micro_batch, self._place = i, 0
            if complete and i != self._first and len(terms) != len(self._places):
                raise self._another_number(len(terms))
        if complete and i == self._first and self._references is None and self._ranks > 1:
            self._check_ranks(terms)
        weighted = []
        for term in terms:
            self._metrics.add(term.metrics)
            denominator = self._denominator(term)
            self._place += 1
            tensor = self._weighted_by_report(term, denominator) if denominator.own else self._weighted(term)
            if tensor is not None:
                value = tensor.detach()
                denominator.loss = denominator.loss + value if isinstance(denominator.loss, Tensor) else value
            weighted.append((tensor, denominator))
        return weighted

    def can_go_on(self, *, is_last: bool) -> bool:
        """Whether this rank can take part in what the others wait for, although a micro-batch brought no losses.

        In an engine's first window the others ask at their first micro-batch, and are told here that it cannot. Later
        they count what they counted before; several denominators are not known to a rank that has none in this window.

        Args:
            is_last: Whether there is no further micro-batch, which may bring some.
        """
        if self.denominators:
            return True
        if self._references is None:
            with suppress(PlanError):  # others raise it
                self._check_ranks([])
            return False
        return not is_last or len(self._references) <= 1

    def settle(self) -> None:
        """Fix the total and the factor of every denominator, with one message among ranks where losses report any."""
        own = [denominator for denominator in self.denominators if denominator.own]
        totals = iter(self._reduce([denominator.reported for denominator in own]) if own else ())
        for denominator in self.denominators:
            total = next(totals) if denominator.own else self._shares.total
            assert total is not None
            self._fix(denominator, total)

    def totals(
        self, nothing: Tensor, settled: Callable[[float], bool], flag: float
    ) -> tuple[Tensor, dict[str, Number], Number, bool]:
        """Loss, metrics and count of the window over all ranks, and whether any of them refused it.

        The count is the job's where that is known, else the first that a loss reports; it is 0 only if all are.

        Args:
            nothing: A loss of 0, of the device and the type of losses: what a rank brings that ran none.
            settled: Whether any rank refuses the window, from the sum of all flags.
            flag: What this rank tells the others in the same message.

        Raises:
            PlanError: A micro-batch brought fewer losses than others.
        """
        self._check_complete()
        if not self.denominators:  # nothing ran
            self.denominators.append(Denominator(False, self._shares.reference))
        lone = self.denominators[0] if len(self.denominators) == 1 else None
        losses = [one.loss if isinstance(one.loss, Tensor) else nothing for one in self.denominators]
        reported = [lone.reported] if lone is not None else []
        sums = list(self._reduce([*losses, *reported, *self._metrics.digest(), flag]))
        is_refused = settled(float(sums.pop()))
        self._metrics.agree([float(number) for number in sums[len(losses) + len(reported) :]], self._gather)
        metrics = self._metrics.means(self._reduce)
        if lone is not None:
            known = self._shares.total
            self._fix(lone, sums[1] if lone.own or known is None else known)
        count = self._count()
        if is_zero(count):
            return torch.full_like(losses[0], math.nan), metrics, count, is_refused
        loss: Tensor | None = None
        for total, own, denominator in zip(sums, losses, self.denominators, strict=False):
            assert isinstance(total, Tensor)
            if is_zero(denominator.total):
                continue
            factor = denominator.factor
            if self._ranks > 1:
                factor = factor / self._ranks
            ratio = (total if not isinstance(factor, Tensor) and factor == 1 else total * factor).to(own.dtype)
            loss = ratio if loss is None else loss + ratio
        assert loss is not None
        if isinstance(self.counted, Tensor):
            loss = torch.where(self.counted == 0, math.nan, loss)
        return loss, metrics, count, is_refused

    def mean_of(self, i: int) -> tuple[Number, Number]:
        """Count of the only micro-batch that ran, i, and what makes its gradient that of a mean; one denominator."""
        (lone,) = self.denominators
        known = self._counts[i]
        count = lone.reported if lone.own or known is None else known
        if not lone.own and self._shares.equal:
            return count, float(len(self._counts))
        return count, 1.0 if is_zero(count) or lone.reference is None else lone.reference / count

    @property
    def counted(self) -> Number:
        """Sum over all denominators: 0 if there was nothing to train on."""
        totals = [denominator.total for denominator in self.denominators if denominator.total is not None]
        number: Number = 0.0
        for total in totals:
            number = number + total
        return number

    @property
    def reported_counts(self) -> tuple[Number, ...] | None:
        """Count per rank of the denominators that losses report; None if they report none."""
        own = [denominator.total for denominator in self.denominators if denominator.own]
        return tuple(total / self._ranks for total in own if total is not None) if own else None

    def _denominator(self, term: Term) -> Denominator:
        """The denominator of the loss at the present place, a new one in the first micro-batch."""
        own = term.count is not None
        if self._place < len(self._places):
            found = self._places[self._place]
            if found.own != own:
                raise PlanError(
                    "losses of one window contradict each other on their count",
                    got=f"loss {self._place} of micro-batch {self._micro_batch} "
                    f"{'reports a count of its own' if own else 'reports none'}, before it was the other way",
                    expected="one kind at each place of the sequence, in all micro-batches of a window",
                    hint="return snugfit.Loss(total, count) always or never; a count may be 0",
                )
            return found
        if self._micro_batch != self._first and (own or self._reports):
            raise self._another_number()
        known = self._counts[self._micro_batch]
        if not own and (known is None or self._shares.total is None):
            raise PlanError(
                "the count of a micro-batch is not known",
                got=f"a loss without a count for micro-batch {self._micro_batch}, in a window whose count is not known",
                expected="a count of the job, or a Loss that reports one",
                hint="return snugfit.Loss(total, count)",
            )
        denominator = self._shared(term.count) if own else next((d for d in self.denominators if not d.own), None)
        if denominator is None:
            k, references = sum(d.own for d in self.denominators), self._references or ()
            last = references[k] if k < len(references) else None
            denominator = Denominator(own, last if own else self._shares.reference)
            self.denominators.append(denominator)
        self._places.append(denominator)
        return denominator

    def _shared(self, count: Number | None) -> Denominator | None:
        """The denominator whose count was this very tensor in the present micro-batch."""
        if not isinstance(count, Tensor):
            return None
        present = [d for d in self.denominators if d.seen is not None and d.micro_batch == self._micro_batch]
        return next((d for d in present if d.seen is not None and d.seen() is count), None)

    def _weighted(self, term: Term) -> Tensor | None:
        """A loss of the job's denominator."""
        known, number, shares = self._counts[self._micro_batch], len(self._counts), self._shares
        assert known is not None
        if known == 0:
            return None
        if term.is_sum:
            return term.value / (known * number if shares.equal else shares.reference)
        if shares.equal:
            return term.value / number if number > 1 else term.value
        return term.value * (known / shares.reference)

    def _weighted_by_report(self, term: Term, denominator: Denominator) -> Tensor | None:
        """A loss with a denominator of its own."""
        count = term.count
        assert count is not None
        if denominator.micro_batch == self._micro_batch:
            if denominator.seen is None or denominator.seen() is not count:
                raise PlanError(
                    "losses that shared one count report two",
                    got=f"loss {self._place - 1} of micro-batch {self._micro_batch} reports another tensor than the "
                    "loss that it shared its count with before",
                    expected="the same tensor in all micro-batches of a window, or in none",
                    hint="give each loss a tensor of its own: snugfit.Loss(total, count.clone())",
                )
        else:
            self._add_count(count, denominator)
        if denominator.counts_nothing:
            return None
        value = term.value if term.is_sum else term.value * _detached(count)
        assert denominator.reference is not None
        return (value / denominator.reference).to(term.value.dtype)

    def _add_count(self, count: Number, denominator: Denominator) -> None:
        checked = _detached(count)
        denominator.micro_batch = self._micro_batch
        denominator.seen = weakref.ref(count) if isinstance(count, Tensor) else None
        if isinstance(checked, Tensor):
            denominator.counts_nothing = self._decide(None, checked) == "empty"
        else:
            denominator.counts_nothing = checked == 0
        if denominator.reference is None and (self._ranks > 1 or not denominator.counts_nothing):
            foretold = self._reduce([checked * len(self._counts)])[0]
            denominator.reference = power_of_two(foretold / self._ranks)
        if not denominator.counts_nothing:
            denominator.reported = denominator.reported + checked

    def _fix(self, denominator: Denominator, total: Number) -> None:
        denominator.total = total
        if is_zero(total) or (not denominator.own and self._shares.equal):
            denominator.factor = 1.0
            return
        reference = denominator.reference
        factor: Number = (1.0 if reference is None else reference) / total * self._ranks
        denominator.factor = torch.where(total == 0, 0.0, factor) if isinstance(total, Tensor) else factor

    def _count(self) -> Number:
        totals = [denominator.total for denominator in self.denominators if denominator.total is not None]
        if all(map(is_zero, totals)):
            return 0.0
        if len(totals) == 1:
            return totals[0]
        return totals[0] if self._shares.total is None else self._shares.total

    @property
    def _reports(self) -> bool:
        return any(denominator.own for denominator in self.denominators)

    def _check_complete(self) -> None:
        """Check that a micro-batch of a loop by hand brought the losses of the first, where places matter."""
        if self._micro_batch >= 0 and self._place != len(self._places) and self._reports:
            raise self._another_number()

    def _another_number(self, found: int | None = None) -> PlanError:
        return PlanError(
            "micro-batches of one window have another number of losses",
            got=f"{self._place if found is None else found} losses of micro-batch {self._micro_batch}, "
            f"{len(self._places)} of the first",
            expected="as many in all micro-batches of a window: a loss is known by its place",
            hint="return a Loss with a count of 0 where there is nothing to count",
        )

    def _check_ranks(self, terms: Sequence[Term]) -> None:
        """Check, in an engine's first window, that all ranks have the same losses."""
        sizes = [float(len(terms)), float(sum(term.count is not None for term in terms))]
        sums = [float(value) for value in self._reduce([*sizes, *(size * size for size in sizes)])]
        # equal on all ranks: sums and sums of squares agree only then (Cauchy and Schwarz)
        if any(self._ranks * square != total * total for total, square in zip(sums[:2], sums[2:], strict=True)):
            raise PlanError(
                "the ranks have another number of losses",
                got=f"{len(terms)} losses here, {int(sizes[1])} with a count of their own; {sums[0]:g} and {sums[1]:g} "
                f"on all {self._ranks} ranks",
                expected="as many, of the same kinds, on every rank",
                hint="return a Loss with a count of 0 where there is nothing to count; a rank whose loss function "
                "fails in the first window has 0, and raises its own error",
            )


def is_zero(count: Number | None) -> bool:
    """Whether a count is known on the host to be 0."""
    return not isinstance(count, Tensor) and count == 0


def _detached(count: Number) -> Number:
    """A reported count, checked as far as the host can see it.

    Raises:
        PlanError: Not a number to divide by.
    """
    if isinstance(count, Tensor) and count.dim() == 0 and not count.is_complex():
        return as_float(count.detach())
    if isinstance(count, (int, float)) and math.isfinite(count) and count >= 0:
        return float(count)
    raise PlanError(
        "the count of a loss is not a number to divide by",
        got=f"a tensor of shape {tuple(count.shape)}" if isinstance(count, Tensor) else f"count={count!r}",
        expected=">= 0, finite; a number, or a 0-dimensional tensor",
        hint="return snugfit.Loss(total, count=number of counted units)",
    )
