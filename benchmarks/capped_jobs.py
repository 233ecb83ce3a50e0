"""Twenty small jobs that differ in what fills their memory, for training under hard caps.

Entry points: a function per job, ``NAMES`` and ``BATCH_SIZES``. Each module is built like one that people train: blocks
in a list, skips over the chain, tied weights, recurrent layers, BatchNorm, large tables, large logits.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snugfit import Job, Loss, chunked_cross_entropy

BATCH_SIZES = (16, 24, 29, 32, 48)
"A prime among them."
CLASSES = 10


class Residual(nn.Module):
    """A function added to its input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Attention(nn.Module):
    """Attention to itself, or to a second sequence."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.queries, self.keys_values = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        q = self.queries(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        both = self.keys_values(x if other is None else other).unflatten(-1, (2, self.heads, -1))
        k, v = both.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Stack(nn.Module):
    """A stem, blocks in a list, and a head; the head's weight may be the stem's."""

    def __init__(self, stem: nn.Module, blocks: list[nn.Module], head: nn.Module, *, tied: bool = False) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = stem, nn.ModuleList(blocks), head
        if tied:
            self.head.weight = self.stem.weight  # type: ignore[assignment]

    def hidden(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x))


class Translator(nn.Module):
    """Encoder and decoder, each block of the decoder attending to the encoder's result."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList(_transformer_block(width, 4, causal=False) for _ in range(layers))
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        source = self.table(ids)
        for block in self.encoder:
            source = block(source)
        x = self.table(ids.flip(1))
        for block in self.decoder:
            x = block(x, source)
        return self.head(x)


class UNet(nn.Module):
    """Half resolution by half resolution down and up again, with skips between both sides."""

    def __init__(self, channels: int, levels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        widths = [channels * (1 + level) for level in range(levels + 1)]
        self.down = nn.ModuleList(_conv_block(a, b) for a, b in pairwise(widths))
        self.up = nn.ModuleList(_conv_block(a + b, b) for b, a in pairwise(widths))
        self.head = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        skips = []
        for block in self.down:
            skips.append(x)
            x = block(F.avg_pool2d(x, 2))
        for block, skip in zip(reversed(self.up), reversed(skips), strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skip], 1))
        return self.head(x)


class DenseNet(nn.Module):
    """Each layer sees the results of all before it."""

    def __init__(self, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_conv_block(3 + i * growth, growth) for i in range(layers))
        self.head = nn.Linear(3 + layers * growth, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    """Layers of a recurrent network, which are one operation each."""

    def __init__(self, kind: type[nn.RNNBase], width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(kind(width, width, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x)


class Mixer(nn.Module):
    """A block that mixes along the sequence, then along the width."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.norm, self.along = nn.LayerNorm(width), nn.Sequential(*_grown(length, 2))
        self.across = Residual(nn.LayerNorm(width), *_grown(width, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.along(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return self.across(x)


class Patches(nn.Module):
    """Images as sequences of patches."""

    def __init__(self, width: int, side: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, side, stride=side)

    def forward(self, x: Tensor) -> Tensor:
        return self.cut(x).flatten(2).transpose(1, 2)


class Mean(nn.Module):
    """The mean along a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def _grown(width: int, factor: int) -> tuple[nn.Module, ...]:
    return nn.Linear(width, factor * width), nn.GELU(), nn.Linear(factor * width, width)


def _transformer_block(width: int, heads: int, *, causal: bool, dropout: float = 0.0) -> nn.Module:
    attention = Residual(nn.LayerNorm(width), Attention(width, heads, causal=causal), nn.Dropout(dropout))
    return nn.Sequential(attention, Residual(nn.LayerNorm(width), *_grown(width, 4), nn.Dropout(dropout)))


def _conv_block(inputs: int, outputs: int) -> nn.Module:
    first = nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(1, outputs), nn.SiLU()
    return nn.Sequential(*first, nn.Conv2d(outputs, outputs, 3, padding=1), nn.SiLU())


def _batch_norm_block(channels: int) -> nn.Module:
    first = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
    return Residual(*first, nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))


def _tokens(length: int, vocabulary: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randint(vocabulary, (n, length), generator=torch.Generator().manual_seed(0))


def _token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.01)


_Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


def _language(model: Callable[[], nn.Module], length: int, vocabulary: int, optimizer: _Optimizer = _adamw) -> Job:
    return Job(model, _token_loss, optimizer, _tokens(length, vocabulary), count="samples", max_grad_norm=1.0)


def _classifier(model: Callable[[], nn.Module], *shape: int, optimizer: _Optimizer = _sgd) -> Job:
    def loss(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(m(batch[0]), batch[1])

    def batch(n: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(n, *shape, generator=generator), torch.randint(CLASSES, (n,), generator=generator)

    return Job(model, loss, optimizer, batch, count="samples")


def _stack_of(stem: Callable[[], nn.Module], block: Callable[[], nn.Module], count: int, head: Callable[[], nn.Module]):
    return lambda: Stack(stem(), [block() for _ in range(count)], head())


def encoder() -> Job:
    block = partial(_transformer_block, 128, 4, causal=False, dropout=0.1)
    return _language(_stack_of(lambda: nn.Embedding(512, 128), block, 6, lambda: nn.Linear(128, 512)), 96, 512)


def decoder() -> Job:
    block = partial(_transformer_block, 160, 4, causal=True)
    return _language(_stack_of(lambda: nn.Embedding(1000, 160), block, 8, lambda: nn.Linear(160, 1000)), 80, 1000)


def tied_decoder() -> Job:
    def model() -> Stack:
        blocks = [_transformer_block(128, 4, causal=True) for _ in range(4)]
        return Stack(nn.Embedding(4096, 128), blocks, nn.Linear(128, 4096, bias=False), tied=True)

    return _language(model, 64, 4096)


def chunked_decoder() -> Job:
    def model() -> Stack:
        blocks = [_transformer_block(96, 4, causal=True) for _ in range(4)]
        return Stack(nn.Embedding(8192, 96), blocks, nn.Linear(96, 8192, bias=False), tied=True)

    def loss(m: nn.Module, ids: Tensor) -> Tensor:
        return chunked_cross_entropy(m.hidden(ids), m.head.weight, ids, chunks=None)

    return Job(model, loss, _adamw, _tokens(64, 8192), count="samples")


def torch_encoder() -> Job:
    block = partial(nn.TransformerEncoderLayer, 128, 4, 512, dropout=0.1, batch_first=True)
    stem = partial(nn.Embedding, 512, 128)
    return _language(_stack_of(stem, block, 5, lambda: nn.Linear(128, 512)), 64, 512, _adafactor)


def translator() -> Job:
    return _language(lambda: Translator(128, 4, 1024), 64, 1024)


def image_transformer() -> Job:
    block = partial(_transformer_block, 128, 4, causal=False)
    head = partial(nn.Sequential, nn.LayerNorm(128), Mean(), nn.Linear(128, CLASSES))
    return _classifier(_stack_of(lambda: Patches(128, 8), block, 8, head), 3, 72, 72, optimizer=_adamw)


def mixer() -> Job:
    head = partial(nn.Sequential, Mean(), nn.Linear(128, CLASSES))
    return _classifier(_stack_of(lambda: Patches(128, 8), lambda: Mixer(81, 128), 10, head), 3, 72, 72)


def residual_batch_norm() -> Job:
    stem = partial(nn.Conv2d, 3, 32, 3, padding=1)
    head = partial(nn.Sequential, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES))
    return _classifier(_stack_of(stem, lambda: _batch_norm_block(32), 5, head), 3, 40, 40)


def stages_batch_norm() -> Job:
    def model() -> nn.Module:
        blocks: list[nn.Module] = []
        for channels in (24, 48, 96):
            blocks += [_batch_norm_block(channels) for _ in range(2)]
            blocks.append(nn.Sequential(nn.Conv2d(channels, 2 * channels, 2, stride=2), nn.BatchNorm2d(2 * channels)))
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(192, CLASSES))
        return Stack(nn.Conv2d(3, 24, 3, padding=1), blocks, head)

    return _classifier(model, 3, 48, 48, optimizer=_adamw)


def plain_convolutions() -> Job:
    def model() -> nn.Module:
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 32), (32, 32), (32, 64), (64, 64)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, CLASSES))

    return _classifier(model, 3, 64, 64)


def depthwise_convolutions() -> Job:
    def block() -> nn.Module:
        wide = nn.Conv2d(48, 48, 7, padding=3, groups=48), nn.GroupNorm(1, 48)
        return Residual(*wide, nn.Conv2d(48, 192, 1), nn.GELU(), nn.Conv2d(192, 48, 1))

    head = partial(nn.Sequential, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, CLASSES))
    return _classifier(_stack_of(lambda: nn.Conv2d(3, 48, 4, stride=2), block, 5, head), 3, 65, 65, optimizer=_adamw)


def _restored(model: Callable[[], nn.Module], side: int) -> Job:
    def loss(m: nn.Module, images: Tensor) -> Tensor:
        return F.mse_loss(m(images), images)

    def batch(n: int) -> Tensor:
        return torch.randn(n, 3, side, side, generator=torch.Generator().manual_seed(0))

    return Job(model, loss, _adamw, batch, count="samples")


def unet() -> Job:
    return _restored(lambda: UNet(16, 3), 64)


def autoencoder() -> Job:
    def model() -> nn.Module:
        down = [nn.Sequential(nn.Conv2d(a, b, 4, 2, 1), nn.SiLU()) for a, b in ((3, 32), (32, 48), (48, 64))]
        up = [nn.Sequential(nn.ConvTranspose2d(a, b, 4, 2, 1), nn.SiLU()) for a, b in ((64, 48), (48, 32), (32, 16))]
        return nn.Sequential(*down, *up, nn.Conv2d(16, 3, 3, padding=1))

    return _restored(model, 96)


def dense_net() -> Job:
    return _classifier(lambda: DenseNet(12, 10), 3, 40, 40)


def deep_perceptron() -> Job:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU())

    job = _classifier(_stack_of(lambda: nn.Linear(64, 256), block, 16, lambda: nn.Linear(256, CLASSES)), 96, 64)

    def loss(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(m(batch[0]).mean(1), batch[1])

    return Job(job.model, loss, _sgd, job.batch, count="samples")


def wide_perceptron() -> Job:
    """Weights and optimizer state beside what is saved."""

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(768, 768), nn.ReLU())

    def head() -> nn.Module:
        return nn.Sequential(Mean(), nn.Linear(768, CLASSES))

    return _classifier(_stack_of(lambda: nn.Linear(256, 768), block, 5, head), 32, 256, optimizer=_adamw)


def long_short_term_memory() -> Job:
    return _language(lambda: Recurrent(nn.LSTM, 160, 3, 1000), 128, 1000)


def gated_recurrent() -> Job:
    return _language(lambda: Recurrent(nn.GRU, 192, 2, 1000), 32, 1000, _sgd)


def large_table() -> Job:
    """Mostly an embedding, whose gradient is as large as itself."""

    def loss(m: nn.Module, ids: Tensor) -> Loss:
        logits = m(ids)
        total = F.cross_entropy(logits.flatten(0, 1), ids.remainder(64).flatten(), reduction="sum")
        return Loss(total, metrics={"nats": (total.detach(), ids.numel())})

    block = partial(_transformer_block, 64, 2, causal=False)
    model = _stack_of(lambda: nn.Embedding(60_000, 64), block, 6, lambda: nn.Linear(64, 64))
    return Job(model, loss, _adamw, _tokens(96, 60_000), count=lambda ids: ids.numel())


NAMES = (
    "encoder",
    "decoder",
    "tied_decoder",
    "chunked_decoder",
    "torch_encoder",
    "translator",
    "image_transformer",
    "mixer",
    "residual_batch_norm",
    "stages_batch_norm",
    "plain_convolutions",
    "depthwise_convolutions",
    "unet",
    "autoencoder",
    "dense_net",
    "deep_perceptron",
    "wide_perceptron",
    "long_short_term_memory",
    "gated_recurrent",
    "large_table",
)
