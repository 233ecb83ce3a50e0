"""What a run left behind: its steps and its report, read as data from outside.

Entry point: ``read``. A run that was killed has no report and perhaps a last line that is cut off: both are said, not
refused.
"""

from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, TypeAdapter

from snugfit import runs
from snugfit.memory.reports import MemoryReport
from snugfit.page import outside

_AGAIN = "snugfit train TARGET --run-dir DIR makes such a folder"
_FINITE = ConfigDict(allow_inf_nan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One line of ``metrics.jsonl``."""

    __pydantic_config__ = _FINITE

    step: int
    loss: float | None
    "None where it was not finite."
    samples_per_s: NonNegativeFloat
    peak_memory_bytes: NonNegativeInt | None
    skipped: bool
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What ``report.json`` says of a run that ended."""

    __pydantic_config__ = _FINITE

    steps: NonNegativeInt
    skipped: NonNegativeInt
    seconds: NonNegativeFloat
    peak_memory_bytes: NonNegativeInt | None
    peak_memory_source: str
    device: str
    predicted: MemoryReport | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run folder."""

    steps: tuple[Step, ...]
    ending: Ending | None
    "None for a run that has not ended."
    notes: tuple[str, ...]
    "Sentences that a reader of the numbers must know."


_STEP, _ENDING = TypeAdapter(Step), TypeAdapter(Ending)


def read(folder: Path) -> Run:
    """Read what a run left in its folder, the plan aside.

    Raises:
        PlanError: A file is missing, or is not what snugfit writes.
    """
    metrics, report = folder / runs.METRICS, folder / runs.REPORT
    lines = outside.text(metrics, expected="one line for each step of a run", hint=_AGAIN).splitlines(keepends=True)
    notes = []
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
        notes.append(f"the last line of {runs.METRICS} is cut off and left out: the run was interrupted")
    steps = tuple(
        outside.checked(
            _STEP,
            line,
            where=f"line {number} of {str(metrics)!r}",
            expected="a step as snugfit train writes it",
            hint=_AGAIN,
        )
        for number, line in enumerate(lines, start=1)
    )
    if not steps:
        notes.append(f"{runs.METRICS} has no line: the run ended before its first step did")
    if not report.exists():
        return Run(steps=steps, ending=None, notes=(*notes, f"there is no {runs.REPORT}: the run has not ended"))
    wanted = "what snugfit train writes when a run ends"
    ending = outside.checked(
        _ENDING,
        outside.text(report, expected=wanted, hint=_AGAIN),
        where=repr(str(report)),
        expected=wanted,
        hint=_AGAIN,
    )
    return Run(steps=steps, ending=ending, notes=(*notes, *ending.notes))
