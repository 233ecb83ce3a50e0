"""GPT-2 as a job: pre-norm blocks, fused causal attention, dropout on the residual stream, tied head.

``job(SMALL)`` is the small model at 1,024 tokens a sample. The loss calls ``chunked_cross_entropy``, so that a plan may
cut it into chunks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import snugfit
from snugfit import Job


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    context: int = 1024
    vocabulary: int = 50257
    dropout: float = 0.1


SMALL = Shape()


class Attention(nn.Module):
    """Causal self-attention behind a LayerNorm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm = nn.LayerNorm(shape.width)
        self.qkv, self.out = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(n, length, -1))


class FeedForward(nn.Module):
    """Two linear layers and a GELU behind a LayerNorm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm, self.expand = nn.LayerNorm(shape.width), nn.Linear(shape.width, 4 * shape.width)
        self.contract = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.contract(F.gelu(self.expand(self.norm(x))))


class Block(nn.Module):
    """Attention, then the feed-forward layer, each with dropout and its residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attn, self.drop_attn = Attention(shape), nn.Dropout(shape.dropout)
        self.ff, self.drop_ff = FeedForward(shape), nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_attn(self.attn(x))
        return x + self.drop_ff(self.ff(x))


class GPT(nn.Module):
    """Returns hidden states; the head's weight is the embedding's."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.position, self.drop = nn.Embedding(shape.context, shape.width), nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.embedding(ids) + self.position(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def job(shape: Shape, *, can_chunk: bool = True) -> Job:
    """The job, with AdamW; its loss is torch's own where it is not to be cut into chunks."""

    def loss(model: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
        hidden = model(ids).flatten(0, 1)
        weight = snugfit.checkpointing.unwrapped(model).embedding.weight
        if can_chunk:
            return snugfit.chunked_cross_entropy(hidden, weight, ids.flatten(), chunks=None)
        return F.cross_entropy(F.linear(hidden, weight), ids.flatten())

    return Job(
        lambda: GPT(shape),
        loss,
        lambda model: torch.optim.AdamW(model.parameters()),
        lambda n: torch.randint(shape.vocabulary, (n, shape.context), generator=torch.Generator().manual_seed(0)),
    )
