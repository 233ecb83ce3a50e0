"""Cases 10 and 11: a window without anything to learn from, and finding where a NaN was born."""

import contextlib
import io
import logging
import sys
from typing import Any

import torch
from gradients import Tagger, gpt2, own_loss
from systems import Task, drive
from torch import nn
from torch.utils.data import DataLoader

EMPTY = [{"input_ids": torch.arange(8), "labels": torch.full((8,), -100)} for _ in range(4)]


def _empty(system: str, model: nn.Module, loss: Any) -> tuple[str, bool]:
    count: Any = "samples"
    if system == "snugfit":
        import snugfit

        count = snugfit.tokens()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    observed = drive(system, Task(model, loss, optimizer, DataLoader(EMPTY, batch_size=2), 2, count=count))
    after = [p.detach() for p in model.parameters()]
    if all(map(torch.equal, before, after)):
        weights = "weights stay"
    else:
        weights = "weights move" if all(p.isfinite().all() for p in after) else "weights become NaN"
    return f"{weights}, log {observed.logged}", weights == "weights stay" and 0.0 not in observed.logged


def empty_fused(system: str) -> tuple[str, bool]:
    return _empty(system, gpt2(), own_loss)


def masked_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    mask = (batch["labels"] != -100).float()
    labels = batch["labels"].clamp(min=0)
    losses = nn.functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


def empty_masked(system: str) -> tuple[str, bool]:
    return _empty(system, Tagger(), masked_loss)


class Root(nn.Module):
    """Takes a square root, which is NaN below 0."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x.sqrt()


class Layers(nn.Module):
    """Three layers, of which the second makes a NaN out of a negative input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity(), Root(), nn.Linear(1, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def planted_nan(system: str) -> tuple[str, bool]:
    # What each offers: snugfit nonfinite="raise"; the Trainer debug="underflow_overflow"; Lightning
    # detect_anomaly=True; Accelerate and Fabric nothing of their own.
    model = Layers()
    samples = [{"x": torch.tensor([x])} for x in (1.0, 4.0, -1.0, 9.0)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(samples, batch_size=1)
    text = io.StringIO()
    logging.basicConfig(stream=text, level=logging.WARNING)
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            if system == "snugfit":
                _raise(model, optimizer, loader)
            else:
                drive(system, Task(model, lambda m, b: m(b["x"]).mean(), optimizer, loader, 4, debug=True))
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=text)
    said = text.getvalue()
    print(said, file=sys.stderr)
    layer = "layers.1" in said
    place = any(words in said for words in ("micro-batch 3", "micro-batch 2", "micro_batch=2", "batch number=2"))
    named = [name for name, found in (("the layer", layer), ("the micro-batch", place)) if found]
    weights = "finite" if all(p.isfinite().all() for p in model.parameters()) else "NaN"
    return f"names {' and '.join(named) or 'neither'}; weights {weights} afterwards", layer and place


def _raise(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    import snugfit

    engine = snugfit.Engine(model, optimizer, loss=lambda m, b: m(b["x"]).mean(), nonfinite="raise")
    for window in engine.windows(loader, 4):
        engine.step_window(window)
