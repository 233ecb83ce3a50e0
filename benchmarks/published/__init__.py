"""Published measurements of GPU memory, and how a family of them is predicted.

Entry points: ``read`` for the rows; ``Row``, ``Prediction`` and ``Skipped`` are what a family module takes and gives.
A family module has ``rows(published, options) -> Iterator[Prediction | Skipped]``; ``families`` says which module
serves which rows. The files are not part of the project: where they are absent, all is skipped with that reason.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

MIB = 1 << 20
GROUNDTRUTH = Path(__file__).resolve().parents[3] / "shared" / "groundtruth"
"Where the files lie unless ``--groundtruth`` says otherwise: beside the checkout."


@dataclass(frozen=True, slots=True)
class Row:
    """One published value and the configuration it was measured for."""

    id: str
    family: str
    "The id without its number: ``enzo-001`` is of ``enzo``; all MLP jobs are of ``mlpjobs``."
    metric: str
    "``allocated``, ``requested``, ``reserved``, ``active``, ``nvidia-smi`` or ``unknown``."
    num_bytes: int
    "The published value (MiB in the file)."
    scope: str
    "``peak``, ``peak of one stage``, ``resident before backward`` and so on; the notes name the stage."
    grade: str
    "A: every size is known; B: one or two things are assumed; C: for ratios only."
    fields: Mapping[str, str] = field(repr=False)
    "The row as the file has it: text by column name."


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the product says for a row."""

    id: str
    num_bytes: int
    cause: str = ""
    "What was assumed, and why the row is off where it is: one sentence."
    fitted: bool = False
    "Whether the row served to fit a context offset: it is then left out of every statistic."


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that is not predicted, and why."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Options:
    """What a run of the benchmark was asked for."""

    groundtruth: Path = GROUNDTRUTH
    quick: bool = False
    "Every family takes a few rows only; the rest are ``Skipped``."
    python_446: str = ""
    "Interpreter with transformers 4.46.3; without it its rows are ``Skipped``."
    python_443: str = ""
    "Interpreter with transformers 4.43.4."


class Family(Protocol):
    """What a family module offers."""

    def rows(self, published: Sequence[Row], options: Options) -> Iterator[Prediction | Skipped]:
        """Predict rows, in any order, each of them once; see ``families``."""


def read(groundtruth: Path) -> list[Row]:
    """All published rows: those of ``measurements.csv``, then the MLP jobs as ``mlpjobs-0001`` and so on.

    Raises:
        FileNotFoundError: The folder is absent.
    """
    with (groundtruth / "measurements.csv").open(newline="", encoding="utf-8") as file:
        published = [_measured(fields) for fields in csv.DictReader(file)]
    with (groundtruth / "mlp_jobs_nvidia_smi.csv").open(newline="", encoding="utf-8") as file:
        jobs = [_mlp_job(number, fields) for number, fields in enumerate(csv.DictReader(file), 1)]
    return published + jobs


def _measured(fields: Mapping[str, str]) -> Row:
    return Row(
        id=fields["id"],
        family=fields["id"].rpartition("-")[0],
        metric=fields["metric"],
        num_bytes=round(float(fields["value_MiB"]) * MIB),
        scope=fields["metric_scope"],
        grade=fields["reproducibility"],
        fields=dict(fields),
    )


def _mlp_job(number: int, fields: Mapping[str, str]) -> Row:
    return Row(
        id=f"mlpjobs-{number:04d}",
        family="mlpjobs",
        metric="nvidia-smi",
        num_bytes=round(float(fields["nvidia_smi_max_MiB"]) * MIB),
        scope="peak",
        grade="A",
        fields=dict(fields),
    )
