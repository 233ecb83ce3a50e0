"""How each system is driven: one loop per system, the one that its own documentation shows, used by all cases.

Entry point: ``drive``. A case hands in model, loss, optimizer and batches; what the optimizer was given is seen by
``Recorder``. Nothing is tuned for or against a system; where a page leaves something open, a comment says what is
done here.
"""

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

SYSTEMS = ("snugfit", "accelerate", "trainer", "lightning", "fabric")


class CannotError(Exception):
    """The system has nothing to run for this case; the text says why."""


class NotAskedError(Exception):
    """The case is about another system."""


class Recorder(torch.optim.SGD):
    """SGD that keeps the gradients of every update that it is asked to make."""

    def __init__(self, model: nn.Module, lr: float = 0.0) -> None:
        super().__init__(model.parameters(), lr=lr)
        self.seen: list[list[torch.Tensor]] = []

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        value = None if closure is None else closure()
        grads = (p.grad for group in self.param_groups for p in group["params"])
        self.seen.append([g.detach().clone() for g in grads if g is not None])
        super().step()
        return value


class Weight(nn.Module):
    """One scalar weight; the loss of a sample x is w * x, so that the gradient is the mean of x."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x


def mean_product(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["x"]).mean()


@dataclass
class Task:
    """What is trained, in the words of plain PyTorch."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], torch.Tensor]
    optimizer: torch.optim.Optimizer
    batches: Iterable[Any]
    "Micro-batches: a DataLoader."
    window: int
    epochs: int = 1
    max_steps: int = -1
    "For the Trainer, which wants it where a loader has no length."
    scheduler: Any = None
    max_norm: float | None = None
    scale: float | None = None
    "First loss scale of fp16; None: fp32."
    count: Any = "samples"
    "snugfit's: what the loss is a mean over."
    plan: Any = None
    "snugfit's: norm policy and recompute."
    ema: Any = None
    "An AveragedModel, updated where the loop updates it."
    debug: bool = False
    "Whether the system's own search for non-finite values is switched on."


@dataclass
class Observed:
    """What a system says about itself afterwards."""

    updates: int | None = None
    logged: list[float] = field(default_factory=list)
    scale: float | None = None
    ema_updates: int | None = None


def drive(system: str, task: Task) -> Observed:
    return _LOOPS[system](task)


def _scaler(task: Task) -> Any:
    return None if task.scale is None else torch.amp.GradScaler("cpu", init_scale=task.scale)


def run_snugfit(task: Task) -> Observed:
    import snugfit

    model: nn.Module = task.model
    if torch.distributed.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    engine = snugfit.Engine(
        model,
        task.optimizer,
        task.plan,
        loss=task.loss,
        count=task.count,
        precision="32-true" if task.scale is None else "16-mixed",
        loss_scale=None if task.scale is None else snugfit.LossScale(init_scale=task.scale),
        scheduler=task.scheduler,
        max_grad_norm=task.max_norm,
    )
    logged, averaged = [], 0
    for _ in range(task.epochs):
        for window in engine.windows(task.batches, task.window):
            result = engine.step_window(window)
            logged.append(float(result.loss))
            if task.ema is not None and not result.skipped:
                task.ema.update_parameters(task.model)
                averaged += 1
    scale = engine.state_dict()["scaler"]["scale"] if task.scale is not None else None
    return Observed(engine.step_count, logged, scale, averaged)


def run_accelerate(task: Task, *, variable_size: bool = False) -> Observed:
    # huggingface.co/docs/accelerate/usage_guides/gradient_accumulation: accelerator.accumulate(model) around
    # everything, step, scheduler and zero_grad in each micro-step. Counting where sync_gradients is set is what the
    # scripts of transformers ("no_trainer") and diffusers do.
    # variable_size: the same page's second recipe, for samples of variable size.
    from accelerate import Accelerator

    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=task.window,
        mixed_precision="no" if task.scale is None else "fp16",
    )
    if task.scale is not None:
        # Accelerate makes no scaler on a CPU; it is given the one that it makes elsewhere.
        accelerator.scaler, accelerator.native_amp = _scaler(task), True
    model, optimizer, loader, scheduler = accelerator.prepare(
        task.model, task.optimizer, task.batches, task.scheduler or _constant(task.optimizer)
    )
    observed = Observed(0, ema_updates=0)
    for _ in range(task.epochs):
        if variable_size:
            _variable_size_epoch(accelerator, model, optimizer, loader, task)
            continue
        for batch in loader:
            with accelerator.accumulate(model):
                loss = task.loss(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients and task.max_norm is not None:
                    accelerator.clip_grad_norm_(model.parameters(), task.max_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            observed.logged.append(float(loss.detach()))
            if accelerator.sync_gradients:
                observed.updates += 1
                if task.ema is not None:
                    task.ema.update_parameters(task.model)
                    observed.ema_updates += 1
    observed.scale = None if accelerator.scaler is None else accelerator.scaler.get_scale()
    return observed


def _variable_size_epoch(accelerator: Any, model: Any, optimizer: Any, loader: Any, task: Task) -> None:
    """The recipe: fetch a window, count its targets on all ranks, sum losses, divide by the count, undo DDP's mean."""
    from contextlib import nullcontext

    batches = list(loader)
    for start in range(0, len(batches), task.window):
        window = batches[start : start + task.window]
        own = sum((batch["labels"][:, 1:] != -100).sum() for batch in window)
        count = accelerator.gather(own).sum().item()
        for i, batch in enumerate(window):
            is_last = i == len(window) - 1
            with nullcontext() if is_last or accelerator.num_processes == 1 else accelerator.no_sync(model):
                labels = batch["labels"]
                logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
                total = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
                loss = total * accelerator.gradient_accumulation_steps * accelerator.num_processes / count
                accelerator.backward(loss)  # divides by gradient_accumulation_steps
        optimizer.step()
        optimizer.zero_grad()


class AsModel(nn.Module):
    """A model that returns its own loss, as the Trainer expects it; it takes no extra arguments."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.model, self.loss = task.model, task.loss

    def forward(self, input_ids: Any = None, x: Any = None, labels: Any = None) -> dict[str, torch.Tensor]:
        batch = {"input_ids": input_ids, "x": x, "labels": labels}
        return {"loss": self.loss(self.model, batch)}


def run_trainer(task: Task, **arguments: Any) -> Observed:
    # huggingface.co/docs/transformers/main_classes/trainer and .../grad_accumulation: gradient_accumulation_steps.
    # get_train_dataloader is the method that the page names for loaders of one's own (here: no shuffling).
    # max_grad_norm is 1.0 by default and is switched off where a case does not clip.
    from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

    observed = Observed()

    class Logs(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                observed.logged.append(float(logs["loss"]))

    class InOrder(Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(task.batches)

    model = task.model if isinstance(task.model, PreTrainedModel) else AsModel(task)
    with tempfile.TemporaryDirectory() as folder:
        trainer = InOrder(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                gradient_accumulation_steps=task.window,
                num_train_epochs=task.epochs,
                max_steps=task.max_steps,
                max_grad_norm=task.max_norm or 0.0,
                fp16=task.scale is not None,
                debug="underflow_overflow" if task.debug else "",
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                **arguments,
            ),
            train_dataset=getattr(task.batches, "dataset", task.batches),
            optimizers=(task.optimizer, task.scheduler or _constant(task.optimizer)),
            callbacks=[Logs()],
        )
        if task.scale is not None:
            # As for Accelerate, on which the Trainer stands.
            trainer.accelerator.scaler, trainer.accelerator.native_amp = _scaler(task), True
        trainer.train()
    observed.updates = trainer.state.global_step
    scaler = trainer.accelerator.scaler
    observed.scale = None if scaler is None else scaler.get_scale()
    return observed


def run_lightning(task: Task, **arguments: Any) -> Observed:
    # lightning.ai/docs/pytorch/stable/advanced/training_tricks.html: Trainer(accumulate_grad_batches=N).
    # On a CPU precision="16-mixed" is replaced by bf16 with a warning, so the plugin is given with its scaler.
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.plugins.precision import MixedPrecision

    observed = Observed()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = task.model

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = task.loss(self.net, batch)
            self.log("loss", loss, batch_size=1)
            return loss

        def configure_optimizers(self) -> Any:
            if task.scheduler is None:
                return task.optimizer
            return [task.optimizer], [{"scheduler": task.scheduler, "interval": "step"}]

    class Logs(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            observed.logged.append(float(trainer.callback_metrics["loss"]))

    callbacks: list[Any] = [Logs()]
    if task.ema is not None:
        from lightning.pytorch.callbacks import EMAWeightAveraging

        class Counted(EMAWeightAveraging):
            def on_train_end(self, trainer: Any, module: Any) -> None:
                observed.ema_updates = int(self._average_model.n_averaged)
                super().on_train_end(trainer, module)

        callbacks.append(Counted())
    plugins = [] if task.scale is None else [MixedPrecision("16-mixed", "cpu", _scaler(task))]
    trainer = pl.Trainer(
        accelerator="cpu",
        accumulate_grad_batches=task.window,
        max_epochs=task.epochs,
        gradient_clip_val=task.max_norm,
        plugins=plugins,
        detect_anomaly=task.debug,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"devices": 1, **arguments},
    )
    trainer.fit(Module(), task.batches)
    observed.updates = trainer.global_step
    if task.scale is not None:
        observed.scale = trainer.precision_plugin.scaler.get_scale()
    return observed


def run_fabric(task: Task, **arguments: Any) -> Observed:
    # lightning.ai/docs/fabric/stable/advanced/gradient_accumulation.html: no_backward_sync around forward and
    # backward, step where is_accumulating is false. Two things are repaired for it, which the page's own loop gets
    # wrong: a window ends with micro-batch N (there: with the first one), and the loss is divided by N (there: not).
    import lightning
    from lightning.fabric.plugins.precision import MixedPrecision

    plugins = [] if task.scale is None else [MixedPrecision("16-mixed", "cpu", _scaler(task))]
    fabric = lightning.Fabric(accelerator="cpu", plugins=plugins, **{"devices": 1, **arguments})
    fabric.launch()
    model, optimizer = fabric.setup(task.model, task.optimizer)
    loader = fabric.setup_dataloaders(task.batches)
    observed = Observed(0, ema_updates=0)
    for _ in range(task.epochs):
        for iteration, batch in enumerate(loader):
            is_accumulating = (iteration + 1) % task.window != 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                loss = task.loss(model, batch)
                fabric.backward(loss / task.window)
            observed.logged.append(float(loss.detach()))
            if not is_accumulating:
                if task.max_norm is not None:
                    fabric.clip_gradients(model, optimizer, max_norm=task.max_norm)
                optimizer.step()
                optimizer.zero_grad()
                if task.scheduler is not None:
                    task.scheduler.step()
                observed.updates += 1
                if task.ema is not None:
                    task.ema.update_parameters(task.model)
                    observed.ema_updates += 1
    observed.scale = None if task.scale is None else plugins[0].scaler.get_scale()
    return observed


def _constant(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


_LOOPS: dict[str, Callable[[Task], Observed]] = {
    "snugfit": run_snugfit,
    "accelerate": run_accelerate,
    "trainer": run_trainer,
    "lightning": run_lightning,
    "fabric": run_fabric,
}
