"""Predicts the MLP jobs of GPUMemNet: fully specified small networks, memory as nvidia-smi showed it.

Entry points: ``rows``, and ``make_step`` for one job. The one unknown, the CUDA context, is fitted on every tenth
usable job and taken over for the others; those that ended before they trained (``usable=no``) are left out.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import snugfit
from published import MIB, Options, Prediction, Row, Skipped, read
from snugfit.memory.cuda.target import under_torch

DEVICE = "a100-40gb"
_NUM_SAMPLES = 4096
TORCH = "2.5"
"Not stated in the source, whose data is of the winter of 2024: a version of that time, under which cuBLASLt allocates."
_FIT_EVERY = 10
_QUICK_ROWS = 40
_OFF = "rows that are off are off by whole segments, for a reason that was not found"
_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "prelu": nn.PReLU,
    "elu": nn.ELU,
    "selu": nn.SELU,
    "tanh": nn.Tanh,
    "softplus": nn.Softplus,
    "swish": nn.SiLU,
    "mish": nn.Mish,
    "gelu": nn.GELU,
    "identity": nn.Identity,
}


@dataclass(frozen=True, slots=True)
class MLP:
    """One job; the rules for its widths are in groundtruth/README.md."""

    num_inputs: int
    num_outputs: int
    num_hidden: int
    architecture: str
    batch_size: int
    activation: str = "relu"
    dropout: float | None = None
    batch_norm: bool = False
    second_set: bool = False
    "The second set flattens its input and ends in a softmax (one output: taken as a sigmoid)."

    @property
    def widths(self) -> list[int]:
        """Output widths of the hidden layers."""
        widths, width = [], self.num_inputs
        step = (self.num_inputs - self.num_outputs) // self.num_hidden
        for _ in range(self.num_hidden + (self.architecture == "bottleneck")):
            if self.architecture == "gradual":
                width = max(width - step, self.num_outputs)
            elif self.architecture != "uniform":
                width = max(width // 2, self.num_outputs)
            widths.append(width)
        return widths

    def build(self) -> nn.Sequential:
        """The network."""
        layers: list[nn.Module] = [nn.Flatten()] if self.second_set else []
        width = self.num_inputs
        for out in self.widths:
            layers.append(nn.Linear(width, out))
            if self.batch_norm:
                layers.append(nn.BatchNorm1d(out))
            layers.append(_ACTIVATIONS[self.activation]())
            if self.dropout is not None:
                layers.append(nn.Dropout(self.dropout))
            width = out
        layers.append(nn.Linear(width, self.num_outputs))
        if self.second_set:
            layers.append(nn.Sigmoid() if self.num_outputs == 1 else nn.Softmax(dim=1))
        return nn.Sequential(*layers)


def of_row(row: Row) -> MLP:
    """The job of a row of ``mlp_jobs_nvidia_smi.csv``."""
    text = row.fields
    return MLP(
        num_inputs=int(text["input"]),
        num_outputs=int(text["output"]),
        num_hidden=int(text["hidden_layers"]),
        architecture=text["architecture"],
        batch_size=int(text["batch"]),
        activation=text["activation"],
        dropout=float(text["dropout_rate"]) if text["dropout"] == "True" else None,
        batch_norm=text["batchnorm"] == "True",
        second_set=text["set"] == "2",
    )


def make_step(job: MLP) -> Callable[[], Callable[[], None]]:
    """The step of a job, for ``snugfit.trace``: the end of an epoch and the beginning of it, as its script runs them.

    Kept from the script: the summary's forward before anything else; the loader's host batch takes the name of the
    one on the card before the next one is moved; outputs and loss live until their names are taken again.
    """

    def make() -> Callable[[], None]:
        model = job.build().to("cuda")
        model(torch.rand(2, 1, job.num_inputs).to("cuda"))
        optimizer = torch.optim.Adam(model.parameters())
        criterion = nn.CrossEntropyLoss() if job.num_outputs > 1 else nn.BCEWithLogitsLoss()
        full, tail = divmod(_NUM_SAMPLES, job.batch_size)
        # Batch norm refuses a batch of one sample: such a job ended there, with its first epoch.
        has_tail = tail > 1 or (tail == 1 and not job.batch_norm)
        batch_sizes = [job.batch_size] * min(full, 2) + [tail] * has_tail
        on_host = [(torch.rand(n, job.num_inputs), torch.zeros(n, dtype=torch.long)) for n in batch_sizes]
        held: dict[str, Tensor] = {}

        def step() -> None:
            for batch in on_host:
                held["inputs"], held["labels"] = batch
                held["inputs"], held["labels"] = held["inputs"].to("cuda"), held["labels"].to("cuda")
                optimizer.zero_grad()
                held["outputs"] = model(held["inputs"])
                if job.num_outputs == 1:
                    held["labels"] = held["labels"].view(-1, 1).float()
                held["loss"] = criterion(held["outputs"], held["labels"])
                held["loss"].backward()
                optimizer.step()

        return step

    return make


def reserved_bytes(job: MLP) -> int:
    """What the allocator holds at most in a job."""
    with under_torch(TORCH):
        return snugfit.trace(make_step(job), DEVICE).peak_reserved_bytes


def context_bytes(published: Sequence[Row]) -> tuple[int, dict[str, int]]:
    """The CUDA context as nvidia-smi shows it, from every tenth job, and those jobs' reserved bytes by id."""
    reserved = {row.id: reserved_bytes(of_row(row)) for row in _to_fit(published)}
    differences = [row.num_bytes - reserved[row.id] for row in _to_fit(published)]
    return round(statistics.median(differences) / MIB) * MIB, reserved


def context_of(groundtruth: Path) -> int:
    """The context fitted on the MLP jobs of the folder: the other rows of GPUMemNet come from the same machine."""
    return context_bytes([row for row in read(groundtruth) if row.family == "mlpjobs"])[0]


def rows(published: Sequence[Row], options: Options) -> Iterator[Prediction | Skipped]:
    """Predict the jobs."""
    for row in published:
        if row.fields["usable"] != "yes":
            yield Skipped(row.id, "the job ended before it trained (usable=no)")
    usable = [row for row in published if row.fields["usable"] == "yes"]
    if options.quick:
        yield from (Skipped(row.id, "quick run") for row in usable[_QUICK_ROWS:])
        usable = usable[:_QUICK_ROWS]
    context, fitted = context_bytes(usable)
    for row in usable:
        if row.id in fitted:
            yield Prediction(row.id, fitted[row.id] + context, f"context of {context // MIB} MiB fitted", fitted=True)
            continue
        yield Prediction(row.id, reserved_bytes(of_row(row)) + context, f"context of {context // MIB} MiB; {_OFF}")


def _to_fit(published: Sequence[Row]) -> Sequence[Row]:
    return [row for row in published if row.fields["usable"] == "yes"][::_FIT_EVERY]
