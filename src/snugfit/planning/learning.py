"""What traced plans teach a search about the next ones: how far the chain of units was off.

Entry point: ``Learnt``. Fragments of the allocator and launches of the host are no part of the chain; plans of one kind
have about as much of both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from snugfit.plans import Plan

_OF_ANOTHER_SIZE = 1.25
"Of what one size reserved beyond its prediction: fragments differ by about a quarter (7B shape, micro-batches 2 to 8)."


class Kind(NamedTuple):
    """What plans have in common whose prediction is off by about the same: fragments are as large as tensors are."""

    family: str
    micro_batch_size: int
    is_recomputed: bool


def family_of(plan: Plan) -> str:
    """The family of a plan: what needs a probe of its own."""
    return f"{plan.precision} {plan.sync}"


def kind_of(plan: Plan, recomputed: Sequence[object]) -> Kind:
    """The kind of a plan, if something is recomputed or nothing is."""
    return Kind(family_of(plan), plan.micro_batch_size, bool(recomputed))


@dataclass(slots=True)
class Learnt:
    """What was seen of some kinds, and what that says of others."""

    surplus: dict[Kind, int] = field(default_factory=dict)
    "What a traced plan of a kind reserved beyond what its chain predicted."
    pace: dict[tuple[str, bool], float] = field(default_factory=dict)
    "What a traced plan took, over what its chain predicted, by family and whether anything is recomputed."
    expected: dict[str, int] = field(default_factory=dict)
    "By family, what is expected where none was traced that is alike."

    def copy(self) -> "Learnt":
        """The same, to be taught further by itself."""
        return Learnt(dict(self.surplus), dict(self.pace), dict(self.expected))

    def add(self, other: "Learnt") -> None:
        """Take over what was learnt elsewhere of kinds that nothing is known of here."""
        self.surplus = {**other.surplus, **self.surplus}
        self.pace = {**other.pace, **self.pace}

    def of(self, kind: Kind) -> "Learnt":
        """What was seen of one kind alone."""
        return Learnt({kind: self.surplus[kind]} if kind in self.surplus else {}, dict(self.pace))

    def is_only_expected(self, family: str) -> bool:
        """Whether what is taken as beyond predictions of a family was not seen in any of its plans."""
        return bool(self.expected.get(family)) and not self._seen(family)

    def is_partly_expected(self, family: str) -> bool:
        """Whether it was not seen in plans that recompute, or not in those that do not."""
        return bool(self.expected.get(family)) and len(self._seen(family)) < 2

    def _seen(self, family: str) -> set[bool]:
        return {known.is_recomputed for known in self.surplus if known.family == family}

    def beyond(self, kind: Kind) -> int:
        """Bytes that a plan of a kind is expected to reserve beyond its prediction: as the nearest size, or more."""
        alike = [
            known for known in self.surplus if (known.family, known.is_recomputed) == (kind.family, kind.is_recomputed)
        ]
        if not alike:
            return self.expected.get(kind.family, 0)
        nearest = min(alike, key=lambda known: abs(known.micro_batch_size - kind.micro_batch_size))
        if nearest == kind:
            return self.surplus[kind]
        smaller = min(kind.micro_batch_size / nearest.micro_batch_size, 1.0)  # smaller tensors, smaller fragments
        return round(_OF_ANOTHER_SIZE * smaller * self.surplus[nearest])

    def pace_of(self, kind: Kind) -> float:
        """Factor to the predicted time of a plan of a kind."""
        return self.pace.get((kind.family, kind.is_recomputed), 1.0)

    def learn(self, kind: Kind, *, beyond_bytes: int, over_bytes: int, pace: float) -> None:
        """Remember by how much a prediction was off.

        Args:
            kind: Of the plan.
            beyond_bytes: What it reserved more than predicted.
            over_bytes: By how much it exceeds the budget; at most 0 where it fits.
            pace: Its time over the predicted one.
        """
        group = kind.family, kind.is_recomputed
        self.pace[group] = self.pace.get(group, 1.0) * pace
        if over_bytes > 0:  # never twice the same room
            beyond_bytes = max(beyond_bytes, self.surplus.get(kind, 0) + over_bytes)
        self.surplus[kind] = beyond_bytes
