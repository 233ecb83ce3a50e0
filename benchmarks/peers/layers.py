"""Cases 6 and 7: dropout and BatchNorm, without and with activation checkpointing."""

from collections.abc import Callable
from typing import Any

import torch
from gradients import FLOAT32, gpt2, own_loss, ragged_samples, relative_error
from systems import CannotError, Recorder, Task, drive, run_trainer
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader


class Block(nn.Module):
    """A layer and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(16, 16), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)))


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(16, 1))


def gradient(model: nn.Module, backward: Callable[[torch.Tensor], None] = torch.Tensor.backward) -> list[torch.Tensor]:
    """The gradient at a seed that is the same every time."""
    model.zero_grad()
    torch.manual_seed(1)
    backward(model(torch.ones(4, 16)).square().mean())
    return [p.grad.clone() for p in model.parameters()]


def dropout(system: str) -> tuple[str, bool]:
    paths = {
        "snugfit": _snugfit_paths,
        "accelerate": _accelerate_paths,
        "trainer": _trainer_paths,
        "lightning": _lightning_paths,
        "fabric": _fabric_paths,
    }
    errors = paths[system]()
    return ", ".join(f"{name} {error:.1e}" for name, error in errors.items()), max(errors.values()) <= FLOAT32


def _snugfit_paths() -> dict[str, float]:
    import snugfit
    from snugfit import checkpointing

    errors = {}
    for policy in ("full", "keep-matmul", "keep-attention", "offload"):
        model = blocks()
        wanted = gradient(model)
        try:
            handle = checkpointing.apply(model, [snugfit.Segment(name, policy) for name in "01"])
        except snugfit.UnsupportedError:
            continue  # refused by name: not built yet
        errors[policy] = relative_error(gradient(model), wanted)
        handle.remove()
    model = blocks()
    wanted = gradient(model)
    plan = snugfit.Plan(batch_size=4, micro_batch_size=4, recompute=checkpointing.match(model, "[01]"))
    optimizer = Recorder(model)
    engine = snugfit.Engine(model, optimizer, plan, loss=lambda m, x: m(x).square().mean())
    torch.manual_seed(1)
    engine.step(torch.ones(4, 16))
    return {**errors, "plan": relative_error(optimizer.seen[0], wanted)}


def _accelerate_paths() -> dict[str, float]:
    # huggingface.co/docs/accelerate/usage_guides/fsdp: fsdp_activation_checkpointing, the only way that Accelerate
    # itself applies activation checkpointing. On a CPU it makes DDP of FSDP, so the function that prepare() calls on
    # its FSDP2 path to wrap the layers is called here by itself.
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_apply_ac

    model = blocks()
    wanted = gradient(model)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        activation_checkpointing=True,
    )
    plugin.set_auto_wrap_policy(model)
    accelerator = Accelerator(cpu=True)
    accelerator.state.fsdp_plugin = plugin
    wrapped = fsdp2_apply_ac(accelerator, model)
    assert "Checkpoint" in type(wrapped[0]).__name__
    return {"the wrapper of its FSDP2 path": relative_error(gradient(wrapped, accelerator.backward), wanted)}


def _trainer_paths() -> dict[str, float]:
    # huggingface.co/docs/transformers/grad_checkpointing (gradient_checkpointing=True), both forms of it.
    pdrop = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "non-reentrant": {"gradient_checkpointing": True},
        "reentrant": {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": True},
        },
    }
    found = {}
    for name, way in ways.items():
        model = gpt2(**pdrop)
        optimizer = Recorder(model)
        task = Task(model, own_loss, optimizer, DataLoader(ragged_samples(4), batch_size=4), 1)
        run_trainer(task, seed=1, **way)
        found[name] = optimizer.seen[0]
    return {name: relative_error(found[name], found["plain"]) for name in ways if name != "plain"}


def _lightning_paths() -> dict[str, float]:
    # lightning.ai/docs/pytorch/stable/advanced/model_parallel/fsdp.html: activation_checkpointing_policy of the
    # FSDP strategy, the only way that Lightning itself applies activation checkpointing.
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import FSDPStrategy

    try:
        strategy = FSDPStrategy(activation_checkpointing_policy={Block})
        pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_checkpointing=False)
    except Exception as error:
        raise CannotError(f"its own way is the FSDP strategy, which says here: {error}") from error
    raise AssertionError("FSDP runs on this machine: this case has to be written")


def _fabric_paths() -> dict[str, float]:
    # lightning.ai/docs/fabric/stable/advanced/model_parallel/fsdp.html, as above.
    import lightning
    from lightning.fabric.strategies import FSDPStrategy

    try:
        strategy = FSDPStrategy(activation_checkpointing_policy={Block})
        lightning.Fabric(accelerator="cpu", devices=1, strategy=strategy)
    except Exception as error:
        raise CannotError(f"its own way is the FSDP strategy, which says here: {error}") from error
    raise AssertionError("FSDP runs on this machine: this case has to be written")


class Normed(nn.Module):
    """BatchNorm between two layers; torch's own checkpoint around it on demand."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.norm, self.head, self.recompute = nn.BatchNorm1d(4), nn.Linear(4, 1), recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.norm, x.requires_grad_(), use_reentrant=False) if self.recompute else self.norm(x)
        return self.head(y)


def batchnorm(system: str) -> tuple[str, bool]:
    found = []
    for recompute in (False, True):
        # The peers apply nothing here but around layers of their own, so the model calls torch's checkpoint.
        model = Normed(recompute and system != "snugfit")
        plan = None
        if system == "snugfit":
            import snugfit

            plan = snugfit.Plan(
                batch_size=16,
                micro_batch_size=4,
                norm_policy="window",
                recompute=(snugfit.Segment(("norm",)),) if recompute else (),
            )
        samples = [{"x": torch.full((4,), float(i))} for i in range(16)]
        loader = DataLoader(samples, batch_size=4)
        drive(system, Task(model, lambda m, b: m(b["x"]).mean(), Recorder(model), loader, 4, plan=plan))
        found.append(int(model.norm.num_batches_tracked))
    return f"{found[0]} and {found[1]}", found == [1, 1]
