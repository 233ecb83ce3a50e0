"""Fine-tuning with low-rank adapters by litgpt: ``litgpt-*`` rows, allocated peak of a whole run.

Entry point: ``rows``. The first iteration is forced to hold the longest sample, so that it decides the peak: its
forward and backward are traced, from a fresh allocator. Left out: 4-bit weights (bitsandbytes), and validation,
which needs less.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from published import Options, Prediction, Row, Skipped
from published.stages import stages
from snugfit import hardware
from snugfit.memory import tracing
from snugfit.memory.cuda.target import under_torch

DEVICE = "a100-sxm-40gb"
HEAD_ROWS = 128
"Rows for which the head is computed at once."
RANK, ALPHA, DROPOUT = 8, 16, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A model as litgpt's table of configurations has it."""

    vocabulary: int
    "Padded."
    width: int
    num_layers: int
    num_heads: int = 32
    rotary_fraction: float
    head_bias: bool = False
    shared_norm: bool = False
    llama: bool = False
    "RMSNorm, gated feed-forward part of ``hidden`` and no biases, one part after the other; else GPT-NeoX's parts."
    hidden: int = 0


MODELS = {
    "phi-1.5": Sizes(
        vocabulary=51200, width=2048, num_layers=24, rotary_fraction=0.5, head_bias=True, shared_norm=True
    ),
    "StableLM-Base-Alpha-3B": Sizes(vocabulary=50688, width=4096, num_layers=16, rotary_fraction=0.25),
    "StableLM-Base-Alpha-7B": Sizes(vocabulary=50432, width=6144, num_layers=16, num_heads=48, rotary_fraction=0.25),
    "Llama-2-7B": Sizes(vocabulary=32000, width=4096, num_layers=32, rotary_fraction=1, llama=True, hidden=11008),
}


def rows(published: Sequence[Row], options: Options) -> Iterator[Prediction | Skipped]:
    """Predict the rows of unquantised models."""
    for number, row in enumerate(published):
        fields = row.fields
        sizes = MODELS.get(fields["model"])
        length = re.match(r"\d+", fields["seq_or_image"])
        if options.quick and number:
            yield Skipped(row.id, "quick run")
        elif fields["precision"] != "bf16-true":
            yield Skipped(row.id, "4-bit weights of bitsandbytes are not traced: good to ratios only")
        elif sizes is None or length is None or "LoRA" not in fields["peft"] or row.metric != "allocated":
            yield Skipped(row.id, "the model or the way it is tuned is not one of those known")
        else:
            cause = "published with three digits; cuDNN's workspace for the adapter's grouped convolution is not known"
            yield Prediction(row.id, _predict(sizes, int(fields["micro_batch"]), int(length[0]), fields), cause)


def _predict(sizes: Sizes, batch_size: int, length: int, fields: dict[str, str]) -> int:
    def make_step(_: object) -> Callable[[], object]:
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("cuda"):
                model = GPT(sizes)
        finally:
            torch.set_default_dtype(torch.float32)
        for name, parameter in model.named_parameters():
            parameter.requires_grad = "adapter" in name
        tokens = torch.randint(0, 100, (batch_size, length)).to("cuda")
        targets = torch.randint(0, 100, (batch_size, length)).to("cuda")

        def step() -> None:
            logits = [part.float() for part in model(tokens)]  # Fabric gives results in torch's default type
            logits[-1] = logits[-1][:, :-1]
            _chunked_loss(logits, targets[:, 1:]).backward()

        return step

    with under_torch(fields["torch_version"]):
        trace = tracing.record(make_step, hardware.resolve(DEVICE), 1)
    return stages(trace)[""].peak.allocated


def _chunked_loss(logits: Sequence[Tensor], targets: Tensor) -> Tensor:
    """Cross entropy of each chunk, then the mean over all positions; times a constant, for accumulation."""
    parts = targets.split(logits[0].shape[1], dim=1)
    losses = [
        F.cross_entropy(chunk.reshape(-1, chunk.shape[-1]), part.reshape(-1), ignore_index=-1, reduction="none")
        for chunk, part in zip(logits, parts, strict=True)
    ]
    return torch.cat(losses).mean() / 128


class GPT(nn.Module):
    """Decoder; returns the logits in chunks of positions."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        rotary = int(sizes.rotary_fraction * sizes.width / sizes.num_heads)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=sizes.head_bias)
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes, rotary) for _ in range(sizes.num_layers))
        self.norm = _norm(sizes)
        angles = torch.outer(torch.arange(4096), torch.arange(0, rotary, 2) / rotary).repeat(1, 2)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> list[Tensor]:
        length = tokens.shape[1]
        cosine, sine = self.cosine[:length], self.sine[:length]
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, cosine, sine)
        return [self.head(part) for part in self.norm(hidden).split(HEAD_ROWS, dim=1)]


class Block(nn.Module):
    """Attention and a feed-forward part, beside each other (GPT-NeoX) or one after the other (Llama)."""

    def __init__(self, sizes: Sizes, rotary: int) -> None:
        super().__init__()
        self.is_parallel = not sizes.llama
        self.norm_1 = _norm(sizes)
        self.attention = Attention(sizes, rotary)
        self.norm_2 = None if sizes.shared_norm else _norm(sizes)
        self.feed_forward = Gated(sizes) if sizes.llama else Plain(sizes)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        normed = self.norm_1(hidden)
        attended = self.attention(normed, cosine, sine)
        if self.is_parallel:
            second = normed if self.norm_2 is None else self.norm_2(hidden)
            return self.feed_forward(second) + attended + hidden
        hidden = attended + hidden
        return self.feed_forward(self.norm_2(hidden)) + hidden


class Attention(nn.Module):
    """Causal attention whose projections are one matrix, with adapters for queries and values."""

    def __init__(self, sizes: Sizes, rotary: int) -> None:
        super().__init__()
        self.num_heads, self.rotary = sizes.num_heads, rotary
        self.inputs = AdaptedProjections(sizes)
        self.output = nn.Linear(sizes.width, sizes.width, bias=not sizes.llama)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        heads = self.inputs(hidden).view(batch, length, self.num_heads, 3, width // self.num_heads)
        query, key, value = heads.permute(0, 2, 3, 1, 4).split((1, 1, 1), dim=2)
        query, key, value = (part.reshape(batch, -1, length, width // self.num_heads) for part in (query, key, value))
        query, key = (
            torch.cat((_rotated(part[..., : self.rotary], cosine, sine), part[..., self.rotary :]), dim=-1)
            for part in (query, key)
        )
        scale = (width // self.num_heads) ** -0.5
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
        return self.output(attended.transpose(1, 2).reshape(batch, length, width))


class AdaptedProjections(nn.Module):
    """The frozen projections plus what the adapters of queries and values add to their columns."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.linear = nn.Linear(width, 3 * width, bias=not sizes.llama)
        self.adapter_down = nn.Parameter(torch.zeros(2 * RANK, width))
        self.adapter_up = nn.Parameter(torch.zeros(2 * width, RANK))
        self.columns = [*range(width), *range(2 * width, 3 * width)]

    def forward(self, hidden: Tensor) -> Tensor:
        frozen = self.linear(hidden)
        down = F.linear(F.dropout(hidden, DROPOUT, self.training), self.adapter_down)
        up = F.conv1d(down.transpose(-2, -1), self.adapter_up.unsqueeze(-1), groups=2).transpose(-2, -1)
        return frozen + self._spread(up) * (ALPHA / RANK)

    def _spread(self, up: Tensor) -> Tensor:
        """The columns of queries and values in a matrix of zeros for all three."""
        up = up.transpose(0, 1)
        spread = up.new_zeros((*up.shape[:-1], self.linear.out_features)).view(-1, self.linear.out_features)
        columns = torch.tensor(self.columns, device=spread.device)
        spread = spread.index_copy(1, columns, up.reshape(-1, up.shape[-1]))
        return spread.view(*up.shape[:-1], self.linear.out_features).transpose(0, 1)


class Plain(nn.Module):
    """GPT-NeoX's feed-forward part."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.up = nn.Linear(sizes.width, 4 * sizes.width)
        self.down = nn.Linear(4 * sizes.width, sizes.width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(hidden)))


class Gated(nn.Module):
    """Llama's feed-forward part."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class RMSNorm(nn.Module):
    """Written out, in single precision."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        single = hidden.float()
        mean = (single * single).mean(dim=-1, keepdim=True)
        return (self.weight * (single * torch.rsqrt(mean + 1e-5))).to(hidden.dtype)


def _norm(sizes: Sizes) -> nn.Module:
    return RMSNorm(sizes.width) if sizes.llama else nn.LayerNorm(sizes.width)


def _rotated(part: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    half = part.shape[-1] // 2
    turned = torch.cat((-part[..., half:], part[..., :half]), dim=-1)
    return ((part * cosine) + (turned * sine)).type_as(part)
