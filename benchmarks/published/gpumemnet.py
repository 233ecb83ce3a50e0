"""The other jobs of GPUMemNet: ``gmnmlp-*`` (MLPs), ``gmntf-*`` (transformer encoders), ``gmncnn-*`` (CNNs).

Entry point: ``rows``. All are what nvidia-smi showed on the machine of the MLP jobs: their context is taken over. The
CNNs are torchvision's or timm's where these are installed. Left out: the workspaces of cuDNN, which nobody publishes.
"""

import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import snugfit
from published import MIB, Options, Prediction, Row, Skipped, mlp
from snugfit.memory.cuda.target import under_torch

_QUICK = 1
"Rows of a quick run in each family."
_CNN_CAUSE = "; cuDNN's workspaces are not known, and nvidia-smi shows the largest that was ever tried"
_ENCODER_CAUSE = ", whose kernels are fewer; the number of samples, so the smaller last batch, is not published"
_MODEL_MODULES = {
    "vgg16": "torchvision.models",
    "resnet50": "torchvision.models",
    "mobilenet_v2": "torchvision.models",
    "efficientnet_b0": "torchvision.models",
    "inception_v3": "torchvision.models",
    "xception": "timm.models",
}
_ENCODER = re.compile(
    r"embedding (\d+) x (\d+), learned position parameter \((\d+) x \d+\), nn.TransformerEncoder of (\d+) post-norm "
    r"layers, (\d+) heads, feed-forward (\d+), .* linear to (\d+) classes"
)
_MLP = re.compile(
    r"input (\d+), output (\d+), (\d+) hidden layers, architecture rule '(\w+)', activation (\w+), dropout (\w+), "
    r"batchnorm (\w+)"
)


def rows(published: Sequence[Row], options: Options) -> Iterator[Prediction | Skipped]:
    """Predict the rows of all three families."""
    context = mlp.context_of(options.groundtruth)
    seen: dict[str, int] = {}
    for row in published:
        seen[row.family] = seen.get(row.family, 0) + 1
        if options.quick and seen[row.family] > _QUICK:
            yield Skipped(row.id, "quick run")
            continue
        predict = {"gmnmlp": _mlp, "gmntf": _encoder, "gmncnn": _cnn}[row.family]
        found = predict(row)
        if isinstance(found, str):
            yield Skipped(row.id, found)
        else:
            cause = f"context of {context // MIB} MiB, from the MLP jobs"
            cause += {"gmncnn": _CNN_CAUSE, "gmntf": _ENCODER_CAUSE}.get(row.family, "")
            yield Prediction(row.id, found + context, cause)


def _mlp(row: Row) -> int | str:
    found = _MLP.search(row.fields["config_details"])
    if found is None or found[6] != "False":  # the rate is not published here
        return "the text does not say enough"
    return mlp.reserved_bytes(
        mlp.MLP(
            num_inputs=int(found[1]),
            num_outputs=int(found[2]),
            num_hidden=int(found[3]),
            architecture=found[4],
            batch_size=int(row.fields["micro_batch"]),
            activation=found[5],
            batch_norm=found[7] == "True",
        )
    )


class _Encoder(nn.Module):
    def __init__(self, vocabulary: int, width: int, length: int, layers: int, heads: int, inner: int, out: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positional_encoding = nn.Parameter(torch.zeros(1, length, width))
        layer = nn.TransformerEncoderLayer(width, heads, inner, dropout=0.1, batch_first=True)
        self.model = nn.TransformerEncoder(layer, num_layers=layers)
        self.fc_out = nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) + self.positional_encoding
        x = self.model(x)
        x = x.mean(dim=1)
        output: Tensor = self.fc_out(x)
        return output


def _encoder(row: Row) -> int | str:
    found = _ENCODER.search(row.fields["config_details"])
    if found is None:
        return "the text does not say enough"
    sizes = [int(number) for number in found.groups()]
    batch_size, length = int(row.fields["micro_batch"]), int(row.fields["seq_or_image"])

    def make() -> Callable[[], None]:
        model = _Encoder(*sizes).to("cuda")
        mock = torch.zeros(batch_size, length, dtype=torch.long).to("cuda")  # stays alive, like the script's
        model(mock)
        model(mock)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
        batch = (torch.zeros(batch_size, length, dtype=torch.long), torch.zeros(batch_size, dtype=torch.long))
        return _training(model, optimizer, batch, {"mock": mock})

    return _reserved(make)


def _cnn(row: Row) -> int | str:
    name = row.fields["model"].lower()
    if name not in _MODEL_MODULES:
        return f"model {name} is not one of those known"
    library = _MODEL_MODULES[name]
    try:
        build = getattr(importlib.import_module(library), name)
    except (ImportError, RuntimeError) as error:  # torchvision raises the latter when it is of another torch
        return f"needs {library.partition('.')[0]} ({type(error).__name__}: {str(error)[:60]})"
    options: dict[str, Any] = {"aux_logits": False} if name == "inception_v3" else {}
    side = int(row.fields["seq_or_image"].partition("x")[0])
    batch_size = int(row.fields["micro_batch"])

    def make() -> Callable[[], None]:
        model = build(**options).to("cuda")
        model(torch.rand(2, 3, side, side).to("cuda"))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
        batch = (torch.rand(batch_size, 3, side, side), torch.zeros(batch_size, dtype=torch.long))
        return _training(model, optimizer, batch, {})

    return _reserved(make)


def _training(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], held: dict[str, Tensor]
) -> Callable[[], None]:
    """The loop of these scripts: a batch on the host takes the names of the one on the card before it is moved."""
    criterion = nn.CrossEntropyLoss()

    def step() -> None:
        held["inputs"], held["labels"] = batch
        held["inputs"], held["labels"] = held["inputs"].to("cuda"), held["labels"].to("cuda")
        optimizer.zero_grad()
        held["outputs"] = model(held["inputs"])
        held["loss"] = criterion(held["outputs"], held["labels"])
        held["loss"].backward()
        optimizer.step()

    return step


def _reserved(make: Callable[[], Callable[[], None]]) -> int:
    with under_torch(mlp.TORCH):
        return snugfit.trace(make, mlp.DEVICE).peak_reserved_bytes
