"""Cases 1 to 3: is the accumulated gradient that of the full batch, at a loader's end too?"""

from collections.abc import Iterator
from typing import Any

import torch
from systems import (
    NotAskedError,
    Recorder,
    Task,
    Weight,
    drive,
    mean_product,
    run_accelerate,
    run_fabric,
    run_lightning,
)
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

WINDOW = 4
FLOAT32 = 1e-5
"Relative error of a gradient that is summed in another order."


def ragged_samples(number: int) -> list[dict[str, torch.Tensor]]:
    """Sequences of eight tokens, of whose labels one to seven count."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for i in range(number):
        ids = torch.randint(0, 16, (8,), generator=generator)
        labels = ids.clone()
        labels[: 1 + (i * 3) % 7] = -100
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def gpt2(**settings: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **dropout, **ends, "use_cache": False, **settings}))


class Tagger(nn.Module):
    """A module that nobody knows: an embedding and a head, one label per token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))


def own_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's own loss: a mean over the labels that are not ignored, each predicted one position before."""
    return model(input_ids=batch["input_ids"], labels=batch["labels"]).loss


def tagging_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def relative_error(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    difference = sum(float((a - b).square().sum()) for a, b in zip(found, wanted, strict=True))
    return (difference / sum(float(b.square().sum()) for b in wanted)) ** 0.5


def _ragged(system: str, model: nn.Module, loss: Any, shift: bool, **how: Any) -> tuple[str, bool]:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    samples = ragged_samples(2 * WINDOW * ranks)
    whole = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    wanted = list(torch.autograd.grad(loss(model, whole), list(model.parameters())))
    optimizer = Recorder(model)
    sampler = None
    count: Any = "samples"
    if system == "snugfit":
        import snugfit

        count = snugfit.tokens(shift=shift)
        sampler = DistributedSampler(samples, shuffle=False) if ranks > 1 else None
    task = Task(model, loss, optimizer, DataLoader(samples, batch_size=2, sampler=sampler), WINDOW, count=count)
    if ranks > 1 and system in ("lightning", "fabric"):
        how = {"devices": ranks, "strategy": "ddp"}
        run_lightning(task, **how) if system == "lightning" else run_fabric(task, **how)
    elif how:
        run_accelerate(task, **how)
    else:
        drive(system, task)
    assert len(optimizer.seen) == 1, f"{len(optimizer.seen)} updates"
    error = relative_error(optimizer.seen[0], wanted)
    return f"relative error {error:.1e}", error <= FLOAT32


def ragged_labels(system: str) -> tuple[str, bool]:
    return _ragged(system, gpt2(), own_loss, shift=True)


def ragged_labels_recipe(system: str) -> tuple[str, bool]:
    if system != "accelerate":
        raise NotAskedError("its page has one loop")
    return _ragged(system, gpt2(), own_loss, shift=True, variable_size=True)


def ragged_labels_plain_module(system: str) -> tuple[str, bool]:
    return _ragged(system, Tagger(), tagging_loss, shift=False)


def _numbers(number: int) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.tensor(float(x))} for x in range(1, number + 1)]


def short_last_window(system: str) -> tuple[str, bool]:
    model = Weight()
    optimizer = Recorder(model)
    drive(system, Task(model, mean_product, optimizer, DataLoader(_numbers(10), batch_size=1), WINDOW))
    found = [float(seen[0]) for seen in optimizer.seen]
    return f"gradients {found}", found == [2.5, 6.5, 9.5]


class Stream(IterableDataset):
    """Ten samples and no length."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from _numbers(10)


def iterable_loader(system: str) -> tuple[str, bool]:
    model = Weight()
    optimizer = Recorder(model)
    updates_before: list[int] = []

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        updates_before.append(len(optimizer.seen))
        return mean_product(model, batch)

    batches = DataLoader(Stream(), batch_size=1)
    drive(system, Task(model, loss, optimizer, batches, WINDOW, epochs=2, max_steps=6))
    if len(updates_before) <= 10:
        return f"no second epoch after {len(updates_before)} micro-batches", False
    found = [float(seen[0]) for seen in optimizer.seen]
    first = found[updates_before[10]]
    return f"first gradient of the second epoch {first} (all: {found})", first == 2.5
