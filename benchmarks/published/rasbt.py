"""GPT-2 small written from scratch and sped up step by step: ``rasbtgpt-*`` rows, memory reserved after an epoch.

Entry point: ``rows``. Each row adds one technique to the one before; which, its text says. What a compiler does to a
step is left out: such rows are predicted as if they ran eagerly, which holds to their ratios only.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import snugfit
from published import Options, Prediction, Row, Skipped
from snugfit import hardware
from snugfit.memory import tracing
from snugfit.memory.cuda.target import under_torch

DEVICE = "a100-sxm-80gb"
_QUICK = 3
"Rows of a quick run."


@dataclass(frozen=True, slots=True)
class Script:
    """One step of the ladder."""

    vocabulary: int
    batch_size: int
    length: int
    width: int = 768
    num_layers: int = 12
    num_heads: int = 12
    dropout: float = 0.1
    mask: str = "registered"
    "``registered`` in every layer, or made ``on the fly``."
    bfloat16: bool = False
    fused_optimizer: bool = False
    torch_modules: bool = False
    "LayerNorm and GELU are torch's."
    sdpa: bool = False


def rows(published: Sequence[Row], options: Options) -> Iterator[Prediction | Skipped]:
    """Predict the rows: reserved after an epoch, or allocated after its last step."""
    for number, row in enumerate(published):
        script = _script(row)
        if options.quick and number >= _QUICK:
            yield Skipped(row.id, "quick run")
        elif script is None or row.metric not in ("reserved", "allocated"):
            yield Skipped(row.id, "the vocabulary, the batch or the step of the ladder is not one of those known")
        else:
            is_compiled = "compile" in row.fields["config_details"] or "compile" in row.fields["attention"]
            cause = "compiled in the source, traced eagerly: ratios only" if is_compiled else ""
            yield Prediction(row.id, _predict(script, row), cause)


def _predict(script: Script, row: Row) -> int:
    version = row.fields["torch_version"].partition("+")[0]
    with under_torch(version.rpartition(".")[0]):
        if row.metric == "reserved":
            return snugfit.trace(_make_step(script), DEVICE).peak_reserved_bytes
        trace = tracing.record(lambda _: _make_step(script)(), hardware.resolve(DEVICE))
    blocks, live = trace.peaks().block_bytes, 0
    for event in trace.recording.events:
        live += blocks[event - 1] if event > 0 else -blocks[-event - 1]
    return live


def _script(row: Row) -> Script | None:
    text = row.fields["config_details"]
    steps = ("mask created", "tensor cores", "fused AdamW", "pinned", "cast to bf16", "torch LayerNorm", "F.scaled_dot")
    step = re.search(r"step of the ladder: (.*)", text)
    vocabulary = re.search(r"vocab (?:size )?(\d+)", step[1] if step and "vocab" in step[1] else text)
    if vocabulary is None or not row.fields["micro_batch"]:
        return None
    return Script(
        vocabulary=int(vocabulary[1]),
        batch_size=int(row.fields["micro_batch"]),
        length=int(row.fields["seq_or_image"]),
        mask="registered" if step is None or "baseline" in step[1] else "on the fly",
        bfloat16="bf16" in row.fields["precision"],
        fused_optimizer="fused" in row.fields["optimizer"],
        torch_modules=step is not None and not any(word in step[1] for word in ("baseline", *steps[:5])),
        sdpa="sdpa" in row.fields["attention"],
    )


def _make_step(script: Script) -> Callable[[], Callable[[], None]]:
    def make() -> Callable[[], None]:
        model = _GPT(script).to("cuda")
        if script.bfloat16:
            model.to(torch.bfloat16)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=5e-4, weight_decay=0.1, fused=script.fused_optimizer or None
        )
        on_host = torch.zeros(script.batch_size, script.length, dtype=torch.long)
        held: list[Tensor] = []

        def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
            inputs, targets = inputs.to("cuda"), targets.to("cuda")
            logits = model(inputs)
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

        def step() -> None:
            optimizer.zero_grad()
            held[:] = [loss_of(on_host, on_host)]
            held[0].backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                loss_of(on_host, on_host)
            model.train()

        return step

    return make


class _LayerNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.eps = 1e-5
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        var = x.var(dim=-1, keepdim=True, unbiased=False)
        normed = (x - mean) / torch.sqrt(var + self.eps)
        return self.scale * normed + self.shift


class _GELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(torch.sqrt(torch.tensor(2.0 / torch.pi)) * (x + 0.044715 * torch.pow(x, 3))))


class _Attention(nn.Module):
    """The first rows': scores, mask, softmax and dropout one by one."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.script = script
        self.W_query, self.W_key, self.W_value = (nn.Linear(script.width, script.width, bias=False) for _ in range(3))
        self.out_proj = nn.Linear(script.width, script.width)
        self.dropout = nn.Dropout(script.dropout)
        if script.mask == "registered":
            ones = torch.ones(script.length, script.length)
            self.register_buffer("mask", torch.triu(ones, diagonal=1))

    def forward(self, x: Tensor) -> Tensor:
        batch_size, length, width = x.shape
        heads = (batch_size, length, self.script.num_heads, width // self.script.num_heads)
        keys, queries, values = self.W_key(x), self.W_query(x), self.W_value(x)
        keys, values, queries = keys.view(heads), values.view(heads), queries.view(heads)
        keys, queries, values = keys.transpose(1, 2), queries.transpose(1, 2), values.transpose(1, 2)
        scores = queries @ keys.transpose(2, 3)
        if self.script.mask == "registered":
            mask = self.mask.bool()[:length, :length]
        else:
            mask = torch.triu(torch.ones(length, length, device=x.device), diagonal=1).bool()
        scores.masked_fill_(mask, -torch.inf)
        weights = torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)
        weights = self.dropout(weights)
        context = (weights @ values).transpose(1, 2)
        context = context.reshape(batch_size, length, width)
        result: Tensor = self.out_proj(context)
        return result


class _FusedAttention(nn.Module):
    def __init__(self, script: Script) -> None:
        super().__init__()
        self.script = script
        self.qkv = nn.Linear(script.width, 3 * script.width, bias=False)
        self.proj = nn.Linear(script.width, script.width)

    def forward(self, x: Tensor) -> Tensor:
        batch_size, length, width = x.shape
        qkv = self.qkv(x)
        qkv = qkv.view(batch_size, length, 3, self.script.num_heads, width // self.script.num_heads)
        qkv = qkv.permute(2, 0, 3, 1, 4)
        queries, keys, values = qkv
        dropout = self.script.dropout if self.training else 0.0
        context = F.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=True)
        context = context.transpose(1, 2).contiguous().view(batch_size, length, width)
        result: Tensor = self.proj(context)
        return result


class _Block(nn.Module):
    def __init__(self, script: Script) -> None:
        super().__init__()
        width = script.width
        norm: Callable[[int], nn.Module] = nn.LayerNorm if script.torch_modules else _LayerNorm
        gelu = nn.GELU(approximate="tanh") if script.torch_modules else _GELU()
        self.att = _FusedAttention(script) if script.sdpa else _Attention(script)
        self.ff = nn.Sequential(nn.Linear(width, 4 * width), gelu, nn.Linear(4 * width, width))
        self.norm1, self.norm2 = norm(width), norm(width)
        self.drop_shortcut = nn.Dropout(script.dropout)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.norm1(x)
        x = self.att(x)
        x = self.drop_shortcut(x)
        x = x + shortcut
        shortcut = x
        x = self.norm2(x)
        x = self.ff(x)
        x = self.drop_shortcut(x)
        return x + shortcut


class _GPT(nn.Module):
    def __init__(self, script: Script) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(script.vocabulary, script.width)
        self.pos_emb = nn.Embedding(script.length, script.width)
        self.drop_emb = nn.Dropout(script.dropout)
        self.trf_blocks = nn.Sequential(*[_Block(script) for _ in range(script.num_layers)])
        self.final_norm = nn.LayerNorm(script.width) if script.torch_modules else _LayerNorm(script.width)
        self.out_head = nn.Linear(script.width, script.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        token = self.tok_emb(tokens)
        position = self.pos_emb(torch.arange(tokens.shape[1], device=tokens.device))
        x = token + position
        x = self.drop_emb(x)
        x = self.trf_blocks(x)
        x = self.final_norm(x)
        logits: Tensor = self.out_head(x)
        return logits
