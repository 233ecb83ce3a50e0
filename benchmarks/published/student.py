"""A student's own module for CS336, read off its recorded logs: the module itself is not published (grade B).

Entry points: ``LanguageModel``, ``AdamW`` and ``cross_entropy``. The architecture of ``cs336`` in other operations:
weights in front of einsum, norms from vector norms, positions assigned into slices, an optimizer in place.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from published import cs336


class Linear(nn.Module):
    """A map without bias, by einsum with the weight in front."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))

    def forward(self, x: Tensor) -> Tensor:
        return _columns(self.weight, x)


def _columns(weight: Tensor, x: Tensor) -> Tensor:
    """``einsum("oi,...i->...o", weight, x)`` as torch 2.6 did it: the result's columns lie together.

    Later torch swaps the operands, so that the rows do.
    """
    rows = x.flatten(0, -2)
    return torch.bmm(weight[None], rows.T[None]).squeeze(0).T.unflatten(0, x.shape[:-1])


class RMSNorm(nn.Module):
    """From the vector norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        rms = torch.sqrt(norm**2 / x.shape[-1] + 1e-5)
        return torch.einsum("d,...d->...d", self.weight, x / rms).to(dtype)


class Rotary(nn.Module):
    """A table per layer; rotated pairs are assigned into the slices of a new tensor."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        angles = torch.arange(context)[:, None] * 10_000 ** -(torch.arange(0, width, 2) / width)
        self.register_buffer("table", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        table: Any = self.table
        cos, sin = table[0][positions].unsqueeze(1), table[1][positions].unsqueeze(1)
        turned = torch.empty_like(x)
        turned[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
        turned[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
        return turned


class Attention(nn.Module):
    """Causal self-attention with a mask of floats, and the mask negated once more where it is used."""

    def __init__(self, shape: cs336.Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (Linear(shape.d_model, shape.d_model) for _ in "qkvo")
        self.rotary = Rotary(shape.context, shape.d_model // shape.heads)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (q, k, v))
        positions = torch.arange(length, device=x.device).expand(batch, length)
        q_turned, k_turned = self.rotary(q, positions), self.rotary(k, positions)
        mask = ~torch.triu(torch.ones(length, length, device=x.device), diagonal=1).bool()
        attended = _attend(q_turned, k_turned, v, mask.expand(batch, self.heads, length, length))
        return self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~mask, -math.inf)
    return _softmax(scores) @ v


def _softmax(x: Tensor) -> Tensor:
    largest = torch.max(x, dim=-1, keepdim=True)[0]
    exponents = torch.exp(x - largest)
    return exponents / torch.sum(exponents, dim=-1, keepdim=True)


class SwiGLU(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = Linear(d_model, d_ff), Linear(d_ff, d_model), Linear(d_model, d_ff)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.w1(x), self.w3(x)
        return self.w2(first * torch.sigmoid(first) * second)


class Block(nn.Module):
    """Pre-norm block; one name serves for all that lies between its two sums."""

    def __init__(self, shape: cs336.Shape) -> None:
        super().__init__()
        self.ln1, self.attn = RMSNorm(shape.d_model), Attention(shape)
        self.ln2, self.ffn = RMSNorm(shape.d_model), SwiGLU(shape.d_model, shape.d_ff)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln1(x)
        y = self.attn(y)
        x = x + y
        y = self.ln2(x)
        y = self.ffn(y)
        return x + y


class LanguageModel(nn.Module):
    """The whole model."""

    def __init__(self, shape: cs336.Shape) -> None:
        super().__init__()
        self.token_embeddings = cs336.Embedding(cs336.VOCABULARY, shape.d_model)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.ln_final = RMSNorm(shape.d_model)
        self.lm_head = Linear(shape.d_model, cs336.VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.ln_final(x))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean of log of the sum of exponents minus the label's logit; the rows are picked by an index on the host."""
    logits, labels = logits.flatten(0, 1), labels.flatten()
    largest = torch.max(logits, dim=-1, keepdim=True)[0]
    shifted = logits - largest
    total = torch.sum(torch.exp(shifted), dim=-1)
    picked = shifted[torch.arange(len(labels)), labels]
    losses = torch.log(total) - picked
    return losses.mean()


class AdamW(torch.optim.Optimizer):
    """A loop over parameters, moments updated in place."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, grad = self.state[p], p.grad.data
                if not state:
                    state["t"], state["m"], state["v"] = 0, torch.zeros_like(p.data), torch.zeros_like(p.data)
                state["t"] += 1
                state["m"].mul_(beta1).add_(grad, alpha=1 - beta1)
                state["v"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                rate = lr * math.sqrt(1 - beta2 ** state["t"]) / (1 - beta1 ** state["t"])
                denominator = state["v"].sqrt() + group["eps"]
                p.data.addcdiv_(state["m"], denominator, value=-rate)
                p.data.mul_(1 - lr * group["weight_decay"])
