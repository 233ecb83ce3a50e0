"""Golden losses: a small language model learns the same, step by step, however its batch is cut and recomputed.

The file in ``tests/golden`` was written by a plain loop over full batches (``python tests/test_golden.py``).
"""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import snugfit
from snugfit import checkpointing
from tolerances import GOLDEN

FILE = Path(__file__).parent / "golden" / "language_model.txt"
STEPS, BATCH_SIZE, LENGTH, WIDTH = 20, 8, 32, 32
TEXT = (
    "a window is all that lies between two updates. a batch of eight may be cut into two of four, or into four of "
    "two, or into three, three and two; its gradient is one, for it is a sum, and it is divided once, by the number "
    "of all tokens that count. what is forgotten in the forward is computed again in the backward, and nobody who "
    "reads the losses can tell. short lines weigh what they weigh: a token is a token, wherever it stands.\n"
)


class Block(nn.Module):
    """Pre-norm causal attention and feed-forward."""

    def __init__(self):
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.ff = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.ff(self.norm_2(x))


class LanguageModel(nn.Module):
    """Characters in, logits of the next ones out."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch_of(step):
    """Eight lines of the text, each of another length; what is behind a line's end does not count."""
    codes = torch.tensor([ord(character) for character in TEXT])
    starts = [(37 * (BATCH_SIZE * step + i)) % (len(codes) - LENGTH - 1) for i in range(BATCH_SIZE)]
    labels = torch.stack([codes[start + 1 : start + LENGTH + 1] for start in starts])
    for i in range(BATCH_SIZE):
        labels[i, 4 + (7 * i + 5 * step) % (LENGTH - 4) :] = -100
    return {"ids": torch.stack([codes[start : start + LENGTH] for start in starts]), "labels": labels}


def token_loss(model, batch):
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def model_and_optimizer():
    torch.manual_seed(0)
    model = LanguageModel()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):  # by hand: a machine's random numbers may be its own
            if parameter.dim() > 1:
                numbers = torch.arange(parameter.numel(), dtype=torch.float64) * 0.7548776662466927 + 0.5 * i
                parameter.copy_(((numbers % 1.0) - 0.5).view_as(parameter) * (2 * parameter.shape[-1] ** -0.5))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain_losses():
    """A loop over full batches, without this library."""
    model, optimizer = model_and_optimizer()
    losses = []
    for step in range(STEPS):
        loss = token_loss(model, batch_of(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def engine_losses(micro_batch_size, recompute):
    model, optimizer = model_and_optimizer()
    segments = checkpointing.every(model, 1) if recompute else ()
    plan = snugfit.Plan(batch_size=BATCH_SIZE, micro_batch_size=micro_batch_size, recompute=segments)
    engine = snugfit.Engine(model, optimizer, plan, loss=token_loss, count=snugfit.tokens())
    results = [engine.step(batch_of(step)) for step in range(STEPS)]
    assert {result.num_micro_batches for result in results} == {-(-BATCH_SIZE // micro_batch_size)}
    return [result.loss.item() for result in results]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def plain():
    return plain_losses()


def largest_difference(found, wanted):
    """Relative."""
    assert len(found) == len(wanted) == STEPS
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("recompute", [False, True], ids=["no recompute", "every block"])
@pytest.mark.parametrize("micro_batch_size", [8, 4, 2, 3])
def test_twenty_losses_are_the_same_however_the_batch_is_cut_and_recomputed(plain, micro_batch_size, recompute):
    losses = engine_losses(micro_batch_size, recompute)
    assert largest_difference(losses, plain) <= GOLDEN
    assert largest_difference(losses, [float(line) for line in FILE.read_text().split()]) <= GOLDEN


@pytest.mark.parametrize("micro_batch_size", [8, 4, 2, 3])
def test_recomputing_changes_no_bit(micro_batch_size):
    assert engine_losses(micro_batch_size, True) == engine_losses(micro_batch_size, False)


def test_the_model_learns_and_a_mean_of_means_would_be_seen():
    golden = [float(line) for line in FILE.read_text().split()]
    assert golden[-1] < 0.8 * golden[0]
    model, optimizer = model_and_optimizer()
    engine = snugfit.Engine(model, optimizer, loss=token_loss, count=lambda batch: 1, micro_batch_size=2)
    wrong = [engine.step(batch_of(step)).loss.item() for step in range(STEPS)]
    assert largest_difference(wrong, golden) > 1000 * GOLDEN


if __name__ == "__main__":
    torch.set_num_threads(1)
    FILE.write_text("".join(f"{loss:.9g}\n" for loss in plain_losses()))
