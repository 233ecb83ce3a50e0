"""Cases 4, 5 and 9: fp16's loss scale, what moves when a window overflows, and what clipping sees."""

import math
from typing import Any

import torch
from systems import CannotError, Recorder, Task, Weight, drive, mean_product
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

FLOAT32 = 1e-5


def overflow(system: str) -> tuple[str, bool]:
    """One window of two micro-batches, the first of which is infinite."""
    model = Weight()
    optimizer = Recorder(model, lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / 4)
    ema = None if system == "trainer" else AveragedModel(model)  # the Trainer keeps no average
    samples = [{"x": torch.tensor(math.inf)}, {"x": torch.tensor(1.0)}]
    loader = DataLoader(samples, batch_size=1)
    task = Task(model, mean_product, optimizer, loader, 2, scheduler=scheduler, scale=8.0, ema=ema)
    observed = drive(system, task)
    rate, weight = optimizer.param_groups[0]["lr"], float(model.w.detach())
    average = "no average" if system == "trainer" else f"average {observed.ema_updates} times"
    value = f"rate {rate}, counter {observed.updates}, {average}, weight {weight}, scale 8 to {observed.scale:g}"
    right = (rate, observed.updates, weight, observed.scale) == (1.0, 0, 1.0, 4.0)
    return value, right and observed.ema_updates in (0, None)


class Pair(nn.Module):
    """Two weights, an optimizer for each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a + self.b) * x


def two_optimizers(system: str) -> tuple[str, bool]:
    if system == "trainer":
        raise CannotError("the Trainer takes one optimizer")
    model = Pair()
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in (model.a, model.b)]
    batch = torch.tensor([math.inf])
    scale = {"snugfit": _snugfit, "accelerate": _accelerate, "lightning": _lightning, "fabric": _fabric}[system](
        model, optimizers, batch
    )
    moved = sum(float(weight.detach()) != 1.0 for weight in (model.a, model.b))
    return f"scale 8 to {scale:g}, {moved} of 2 updated", (scale, moved) == (4.0, 0)


def _snugfit(model: nn.Module, optimizers: list[Any], batch: torch.Tensor) -> float:
    import snugfit

    engine = snugfit.Engine(
        model,
        optimizers,
        loss=lambda m, x: m(x).mean(),
        precision="16-mixed",
        loss_scale=snugfit.LossScale(init_scale=8.0),
    )
    engine.step(batch)
    return engine.state_dict()["scaler"]["scale"]


def _accelerate(model: nn.Module, optimizers: list[Any], batch: torch.Tensor) -> float:
    # The loop of .../docs/accelerate/quicktour, with prepare() for both, as its pages on several models do.
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=8.0), True
    model, first, second = accelerator.prepare(model, *optimizers)
    accelerator.backward(model(batch).mean())
    for optimizer in (first, second):
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.scaler.get_scale()


def _lightning(model: nn.Module, optimizers: list[Any], batch: torch.Tensor) -> float:
    # lightning.ai/docs/pytorch/stable/common/optimization.html: several optimizers mean manual optimization.
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.precision import MixedPrecision

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.automatic_optimization = model, False

        def training_step(self, x: torch.Tensor, index: int) -> None:
            first, second = self.optimizers()
            self.manual_backward(self.net(x).mean())
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            return optimizers

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(batch, batch_size=1))
    return trainer.precision_plugin.scaler.get_scale()


def _fabric(model: nn.Module, optimizers: list[Any], batch: torch.Tensor) -> float:
    # lightning.ai/docs/fabric/stable/fundamentals/convert.html, with setup() for both optimizers.
    import lightning
    from lightning.fabric.plugins.precision import MixedPrecision

    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    fabric.launch()
    model, first, second = fabric.setup(model, *optimizers)
    fabric.backward(model(batch).mean())
    for optimizer in (first, second):
        optimizer.step()
        optimizer.zero_grad()
    return plugin.scaler.get_scale()


def clip(system: str) -> tuple[str, bool]:
    """8192 * 6 is the largest product here, and fp16 holds it."""
    found = []
    for scale in (None, 1.0, 64.0, 8192.0):
        model = Weight()
        optimizer = Recorder(model)
        loader = DataLoader([{"x": torch.tensor(4.0)}, {"x": torch.tensor(6.0)}], batch_size=1)
        drive(system, Task(model, mean_product, optimizer, loader, 2, max_norm=1.0, scale=scale))
        found.append(float(optimizer.seen[0][0]))
        _forget()
    shown = ", ".join(f"{value:.6g}" for value in found)
    return shown, all(abs(value - 1.0) <= FLOAT32 for value in found)


def _forget() -> None:
    """Accelerate's state is one for a process; its own tests reset it this way."""
    import sys

    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
