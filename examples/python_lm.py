"""A byte-level GPT on real text that every machine has: the source files of Python's standard library.

What it shows: a job with real data, token counts and a metric, whose memory is nearly all saved tensors, so that a
small cap is met by smaller micro-batches and recomputation. 2.8 million parameters, 32 x 256 bytes per step.

How to run::

    snugfit plan examples/python_lm.py --device cpu --budget 500MiB
    snugfit train examples/python_lm.py --steps 40 --memory-cap 900MiB --run-dir runs/python_lm

Expected output: the plan with its ladder; then a loss that falls from 5.8 to below 3 nats within 40 steps.
"""

import functools
import itertools
import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import snugfit

VOCABULARY = 256
CONTEXT = 256
WIDTH = 192
LAYERS = 6
HEADS = 4
BATCH_SIZE = 32
LEARNING_RATE = 1e-3
VALIDATION_EVERY = 20
SEED = 0


class Block(nn.Module):
    """Pre-norm transformer block: causal attention, then a feed-forward layer four times as wide."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.feed_forward_norm = nn.LayerNorm(WIDTH)
        self.expand = nn.Linear(WIDTH, 4 * WIDTH)
        self.contract = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(num_samples, length, WIDTH)`` to the same shape."""
        n, length, _ = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(n, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(n, length, WIDTH))
        return x + self.contract(F.gelu(self.expand(self.feed_forward_norm(x))))


class ByteGPT(nn.Module):
    """Predicts the next byte from up to ``CONTEXT`` bytes before it."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map ``(num_samples, length)`` byte values to logits ``(num_samples, length, VOCABULARY)``."""
        x = self.token(input_ids) + self.position(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def source_files(*, validation: bool) -> list[Path]:
    """Files of the standard library, sorted; every ``VALIDATION_EVERY``-th one is for validation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
    files = [path for path in sorted(root.rglob("*.py")) if not left_out & set(path.relative_to(root).parts)]
    return [path for i, path in enumerate(files) if (i % VALIDATION_EVERY == 0) == validation]


@functools.cache
def corpus(*, validation: bool) -> Tensor:
    """All bytes of one part, uint8 of shape ``(num_bytes,)``: an eighth of what int64 would hold."""
    return torch.frombuffer(
        bytearray().join(path.read_bytes() for path in source_files(validation=validation)), dtype=torch.uint8
    )


def block_batch(text: Tensor, blocks: list[int]) -> dict[str, Tensor]:
    """Inputs and the bytes after them, int64 of shape ``(len(blocks), CONTEXT)`` each."""
    rows = torch.stack([text[i * CONTEXT : i * CONTEXT + CONTEXT + 1] for i in blocks]).long()
    return {"input_ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def num_blocks(text: Tensor) -> int:
    """Whole blocks of ``CONTEXT`` bytes that also have a byte after them."""
    return (len(text) - 1) // CONTEXT


def batches(batch_size: int) -> Iterator[dict[str, Tensor]]:
    """One pass over the training part in full batches, in an order that is the same on every run."""
    text = corpus(validation=False)
    order = torch.randperm(num_blocks(text), generator=torch.Generator().manual_seed(SEED)).tolist()
    for start in range(0, len(order) - batch_size + 1, batch_size):
        yield block_batch(text, order[start : start + batch_size])


def loss(model: nn.Module, micro_batch: dict[str, Tensor]) -> snugfit.Loss:
    """Cross-entropy in nats, a mean over bytes; the metric is the same in bits per byte."""
    logits = model(micro_batch["input_ids"])
    total = F.cross_entropy(logits.flatten(0, 1).float(), micro_batch["labels"].flatten(), reduction="sum")
    bits = total.detach() / math.log(2)
    return snugfit.Loss(total, metrics={"bits_per_byte": (bits, micro_batch["labels"].numel())})


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)


def validation_bits_per_byte(model: nn.Module, num_batches: int = 4) -> float:
    """Bits per byte on the first batches of the validation part; the model's mode is left as it was."""
    text, was_training, total = corpus(validation=True), model.training, 0.0
    device = next(model.parameters()).device
    model.eval()
    with torch.no_grad():
        for i in range(num_batches):
            batch = block_batch(text, list(range(i * BATCH_SIZE, (i + 1) * BATCH_SIZE)))
            logits = model(batch["input_ids"].to(device)).flatten(0, 1).float()
            total += F.cross_entropy(logits, batch["labels"].to(device).flatten()).item()
    model.train(was_training)
    return total / num_batches / math.log(2)


def job(batch_size: int = BATCH_SIZE) -> snugfit.Job:
    return snugfit.Job(
        ByteGPT,
        loss,
        optimizer,
        lambda num_samples: block_batch(corpus(validation=False), list(range(num_samples))),
        count=snugfit.tokens(),
        data=lambda: batches(batch_size),
        max_grad_norm=1.0,
        seed=SEED,
    )


if __name__ == "__main__":  # the plain loop, for comparison
    torch.manual_seed(SEED)
    plain_model = ByteGPT()
    plain_optimizer = optimizer(plain_model)
    for step, full_batch in enumerate(itertools.islice(batches(BATCH_SIZE), 40), start=1):
        result = loss(plain_model, full_batch)
        mean = result.total / full_batch["labels"].numel()
        mean.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        print(f"step {step}: {mean.item():.4f} nats")
    print(f"validation: {validation_bits_per_byte(plain_model):.3f} bits per byte")
