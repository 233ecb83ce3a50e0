"""A training step as a chain of units, each with the ways in which it can be run: what the solvers solve.

Entry points: ``Option`` and ``Unit`` (the question), ``Span`` and ``Solution`` (the answer).
Cutting a trace into units is ``units.py``'s, choosing is ``solver.py``'s and ``nested.py``'s.
"""

from dataclasses import dataclass

NOTHING = "nothing"
"Name of the option that recomputes nothing; the first one of every unit."


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to run one unit; all sizes are above what was alive before the unit's forward."""

    name: str
    'What is recomputed: ``"nothing"``, ``"full"``, ``"attention"``, ...; what it means for a plan is the search\'s.'
    kept_bytes: int
    "Alive from the unit's forward to its backward: saved tensors, its input among them where it keeps it."
    forward_bytes: int
    "Most alive during its forward."
    backward_bytes: int
    "Most alive during its backward, recomputation included."
    extra_ns: int
    'Time beside that of ``"nothing"``.'


@dataclass(frozen=True, slots=True)
class KeptInRun:
    """What a unit keeps in a run whose segment has a policy, and what is run again of it."""

    policy: str
    kept_bytes: int
    "Results that are kept, beside the input of the run."
    again_ns: int
    "Time of its repetition: its forward without the operations of these results."
    last_ns: int
    "The same where it is the last unit of the run, behind whose last saved tensor nothing is run again."


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One link of the chain.

    With S the kept bytes of all units before it, a unit fits into a budget iff
    ``S + max(forward_static_bytes + forward_bytes, backward_static_bytes + backward_bytes) <= budget``.
    """

    options: tuple[Option, ...]
    'Pareto list; the first is ``"nothing"``.'
    input_bytes: int
    "What it is called with: what a segment that begins with it keeps, and nothing else."
    forward_static_bytes: int
    "Absolute: what else is alive during its forward: parameters, gradients, optimizer state, workspaces, its input."
    backward_static_bytes: int
    "Absolute: the same during its backward, the gradients of later units and of its output included."
    forward_ns: int
    "Time of its forward: what recomputing it costs."
    joins_next: bool
    "Whether a segment may run over the border to the next unit."
    tail_ns: int = 0
    "Part of ``forward_ns`` that is not run again where recomputation ends with this unit, as nothing needs it."
    in_runs: tuple[KeptInRun, ...] = ()
    "Policies that a run of such units may have."

    def __post_init__(self) -> None:
        assert self.options, "a unit can be run in at least one way"
        assert self.options[0].name == NOTHING, "the first option recomputes nothing"

    @property
    def plain(self) -> Option:
        """The option that recomputes nothing."""
        return self.options[0]


@dataclass(frozen=True, slots=True)
class Span:
    """How the units ``first`` to ``last`` (inclusive) run: one unit by an option, or all as one segment."""

    first: int
    last: int
    option: str | None = None
    "Name of the option of the one unit; None: the units are recomputed as one segment."
    inner: tuple["Span", ...] = ()
    "How the units of a segment run while it is recomputed; empty: all of them keep everything."
    policy: str | None = None
    "Of the segment of several units; None: it keeps its input alone."


@dataclass(frozen=True, slots=True)
class Solution:
    """One point of a frontier: a way to run the whole chain."""

    needed_bytes: int
    "The smallest budget into which it fits."
    extra_ns: int
    "Time beside that of recomputing nothing."
    choices: tuple[Span, ...]
    "Covers every unit once, in order."
