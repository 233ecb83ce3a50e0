"""The arithmetic of the accuracy benchmark: errors of predictions, what a family's rows amount to, targets met or not.

Entry points: ``Outcome``, ``summarise``, ``Target``. Nothing here predicts or prints.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from published import MIB, Prediction, Row, Skipped

WITHIN = 0.005
"Relative error that the share of rows counts."
NAMED_ABOVE = 0.01
"Relative error above which a row is listed with its cause."


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row and what became of it."""

    row: Row
    found: Prediction | Skipped

    @property
    def prediction(self) -> Prediction | None:
        """The prediction that counts: none of a row that was skipped or served to fit an offset."""
        return self.found if isinstance(self.found, Prediction) and not self.found.fitted else None

    @property
    def error(self) -> float:
        """Signed, relative to the published value; not a number where nothing was predicted."""
        found = self.prediction
        return math.nan if found is None else found.num_bytes / self.row.num_bytes - 1

    @property
    def error_mib(self) -> float:
        """Signed, in MiB."""
        return self.error * self.row.num_bytes / MIB


@dataclass(frozen=True, slots=True)
class Summary:
    """What some rows amount to. Errors are relative and without sign."""

    num_rows: int
    "Rows predicted, those that served to fit an offset not counted."
    median: float
    share_within: float
    "Share of the predicted rows whose error is at most ``WITHIN``."
    worst: float
    median_mib: float
    p95_mib: float


def summarise(outcomes: Sequence[Outcome]) -> Summary:
    """The figures of the rows that were predicted; of none, not numbers."""
    counted = [outcome for outcome in outcomes if outcome.prediction is not None]
    errors = [abs(outcome.error) for outcome in counted]
    if not errors:
        return Summary(0, math.nan, math.nan, math.nan, math.nan, math.nan)
    in_mib = sorted(abs(outcome.error_mib) for outcome in counted)
    return Summary(
        num_rows=len(errors),
        median=statistics.median(errors),
        share_within=sum(error <= WITHIN for error in errors) / len(errors),
        worst=max(errors),
        median_mib=statistics.median(in_mib),
        p95_mib=in_mib[math.ceil(0.95 * len(in_mib)) - 1],
    )


@dataclass(frozen=True, slots=True)
class Target:
    """A line of the table: what must be reached, what was, and how to see it again."""

    what: str
    target: str
    reached: str
    met: bool | None
    "None where it is only shown."
    label: str
    "``replay-exact``, ``modelled``, ``CPU-measured``; what the number is compared with stands in ``what``."
    command: str


@dataclass(frozen=True, slots=True)
class Bound:
    """What the rows of some families must reach; an open end is infinite."""

    median: float = math.inf
    share: float = 0.0
    worst: float = math.inf
    median_mib: float = math.inf
    p95_mib: float = math.inf
    causes: bool = False
    "Whether every row above ``NAMED_ABOVE`` must come with a cause."

    def met(self, outcomes: Sequence[Outcome]) -> bool:
        """Whether the rows reach it; none at all do not."""
        found = summarise(outcomes)
        return (
            found.num_rows > 0
            and found.median <= self.median
            and found.share_within >= self.share
            and found.worst <= self.worst
            and found.median_mib <= self.median_mib
            and found.p95_mib <= self.p95_mib
            and not (self.causes and unexplained(outcomes))
        )


def unexplained(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The rows that are off by more than ``NAMED_ABOVE`` and say no cause."""
    return [outcome for outcome in named(outcomes) if outcome.prediction and not outcome.prediction.cause]


def named(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The rows that are off by more than ``NAMED_ABOVE``."""
    return [outcome for outcome in outcomes if abs(outcome.error) > NAMED_ABOVE]


def grouped(outcomes: Sequence[Outcome], key: Callable[[Outcome], object]) -> dict[object, list[Outcome]]:
    """Outcomes by a property, in the order in which it first comes."""
    groups: dict[object, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(key(outcome), []).append(outcome)
    return groups
