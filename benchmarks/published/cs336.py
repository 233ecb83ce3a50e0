"""The language model of Stanford's course CS336, op by op as its words describe it, and its hand-written AdamW.

Entry points: ``LanguageModel``, ``AdamW``, ``cross_entropy`` and ``SIZES``; the rows are predicted by ``cs336_rows``.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 10_000


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one model."""

    d_model: int
    d_ff: int
    layers: int
    heads: int
    context: int = 0
    gathers_positions: bool = False
    "Whether the rotary embedding picks cos and sin by position index, as in the hand-out of 2025."

    def at(self, context: int) -> "Shape":
        """The same model for a context length."""
        return replace(self, context=context)


SIZES = {
    "small": Shape(768, 3072, 12, 12),
    "medium": Shape(1024, 4096, 24, 16),
    "large": Shape(1280, 5120, 36, 20),
    "xl-2025": Shape(1600, 6400, 48, 25),
    "xl-2026": Shape(2560, 10240, 32, 32),
    "2.7b": Shape(2560, 10240, 32, 32),
}


class Linear(nn.Module):
    """A map without bias, by einsum."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Embedding(nn.Module):
    """Rows of a table, picked by indexing."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width))

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids, :]


class RMSNorm(nn.Module):
    """In float32, whatever comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(dtype)


class Rotary(nn.Module):
    """Turns pairs of neighbours by their position; one table for the whole model."""

    def __init__(self, context: int, width: int, gathers: bool) -> None:
        super().__init__()
        angles = torch.arange(context)[:, None] * 10_000 ** -(torch.arange(0, width, 2) / width)
        self.register_buffer("table", torch.stack((angles.cos(), angles.sin())), persistent=False)
        self.gathers = gathers

    def forward(self, x: Tensor, positions: Tensor | None) -> Tensor:
        first, second = x.unflatten(-1, (-1, 2)).movedim(-1, 0).unbind()
        table: Any = self.table
        cos, sin = table[:, positions, :] if self.gathers else table[:, : x.shape[-2], :]
        turned = cos * first - sin * second
        other = sin * first + cos * second
        return torch.stack((turned, other), dim=-1).flatten(-2)


class Attention(nn.Module):
    """Causal self-attention whose scores are all there."""

    def __init__(self, shape: Shape, rotary: Rotary) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q_proj, self.k_proj, self.v_proj, self.output_proj = (Linear(shape.d_model, shape.d_model) for _ in "qkvo")
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (q, k, v))
        positions = torch.arange(x.shape[1], device=x.device) if self.rotary.gathers else None
        q = self.rotary(q, positions)
        k = self.rotary(k, positions)
        order = torch.arange(x.shape[1], device=x.device)
        mask = order[:, None] >= order[None, :]
        attended = attend(q, k, v, mask)
        attended = attended.transpose(1, 2).flatten(2).contiguous()
        return self.output_proj(attended)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Scaled dot-product attention with every step written out."""
    scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(k.shape[-1])
    if mask is not None:
        scores = torch.where(mask, scores, -math.inf)
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, v)


def softmax(x: Tensor) -> Tensor:
    """Of the last dimension: subtract the largest, exponentiate, divide by the sum."""
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    exponents = torch.exp(shifted)
    return exponents / torch.sum(exponents, dim=-1, keepdim=True)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over all positions, the log-softmax written out."""
    return torch.mean(torch.gather(-_log_softmax(logits), -1, labels.unsqueeze(-1)))


def _log_softmax(x: Tensor) -> Tensor:
    largest = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - largest
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


class SwiGLU(nn.Module):
    """Gated feed-forward layer, its SiLU written as ``x * sigmoid(x)``."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = Linear(d_model, d_ff), Linear(d_ff, d_model), Linear(d_model, d_ff)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(_silu(self.w1(x)) * self.w3(x))


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Block(nn.Module):
    """Attention, then the feed-forward layer, each on a normed input and added to it."""

    def __init__(self, shape: Shape, rotary: Rotary) -> None:
        super().__init__()
        self.attn = Attention(shape, rotary)
        self.ffn = SwiGLU(shape.d_model, shape.d_ff)
        self.ln1, self.ln2 = RMSNorm(shape.d_model), RMSNorm(shape.d_model)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attn(self.ln1(x))
        attention_sublayer = x + attended
        fed = self.ffn(self.ln2(attention_sublayer))
        return attention_sublayer + fed


class LanguageModel(nn.Module):
    """The whole model.

    Args:
        shape: Its sizes.
        every: Wrap each run of so many blocks in torch's checkpoint; 0 for none.
    """

    def __init__(self, shape: Shape, every: int = 0) -> None:
        super().__init__()
        self.token_embeddings = Embedding(VOCABULARY, shape.d_model)
        rotary = Rotary(shape.context, shape.d_model // shape.heads, shape.gathers_positions)
        self.positional_encoder = rotary
        self.layers = nn.ModuleList(Block(shape, rotary) for _ in range(shape.layers))
        self.ln_final = RMSNorm(shape.d_model)
        self.lm_head = Linear(shape.d_model, VOCABULARY)
        self.every = every

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.token_embeddings(ids)  # a name of its own: it lives as long as this function runs
        x = embedded
        if self.every:
            for start in range(0, len(self.layers), self.every):
                x = checkpoint(_in_turn(self.layers[start : start + self.every]), x, use_reentrant=False)
        else:
            for layer in self.layers:
                x = layer(x)
        x = self.ln_final(x)
        return self.lm_head(x)


def _in_turn(layers: Iterable[nn.Module]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    return run


class AdamW(torch.optim.Optimizer):
    """A loop over parameters, every step of it out of place."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-3, decays_last: bool = False) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01})
        self.decays_last = decays_last

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, grad, share = self.state[p], p.grad.data, lr * group["weight_decay"]
                if not self.decays_last:
                    p.data -= share * p.data
                # The default is made whether it is needed or not, and both old moments live until the next parameter.
                old_m = state.get("m", torch.zeros_like(grad))
                old_v = state.get("v", torch.zeros_like(grad))
                t = state.get("t", 1)
                m = beta1 * old_m + (1 - beta1) * grad
                v = beta2 * old_v + (1 - beta2) * torch.square(grad)
                rate = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
                p.data -= rate * m / (torch.sqrt(v) + group["eps"])
                if self.decays_last:
                    p.data -= share * p.data
                state["m"], state["v"], state["t"] = m, v, t + 1
