"""Five tiny models that the suite trains, and the losses that go with them."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 6
VOCABULARY = 11


class LinearStack(nn.Module):
    """Linear layers of one width, so that every size can be computed by hand."""

    def __init__(self, depth=3, width=WIDTH):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return torch.tanh(x)


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, width, heads=2, dropout=0.0):
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.dropout(self.attn(y, y, y, need_weights=False)[0])
        return x + self.dropout(self.ff(self.norm_2(x)))


class Transformer(nn.Module):
    """Embedding, blocks, head; with tied weights on demand."""

    def __init__(self, depth=2, width=WIDTH, tied=False, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, dropout=dropout) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ConvBatchNorm(nn.Module):
    """Convolutions with BatchNorm; couples the samples of a micro-batch."""

    def __init__(self, channels=4):
        super().__init__()
        layers = [
            nn.Sequential(nn.Conv2d(3 if i == 0 else channels, channels, 3), nn.BatchNorm2d(channels), nn.ReLU())
            for i in range(2)
        ]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, 2)

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


class WithDropout(nn.Module):
    """Linear layers with dropout between them."""

    def __init__(self, width=WIDTH, p=0.5):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Dropout(p)) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Weight(nn.Module):
    """One scalar weight w; the loss of a sample x is w * x."""

    def __init__(self, value=1.0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(float(value)))

    def forward(self, x):
        return self.w * x


def mean_product(model, micro_batch):
    """Mean of w * x over the samples: its gradient is the mean of x."""
    return model(micro_batch).mean()


def squared_error(model, micro_batch):
    return F.mse_loss(model(micro_batch["x"]), micro_batch["y"])


def token_loss(model, micro_batch):
    """Mean cross-entropy over the labels that are not ignored."""
    return F.cross_entropy(model(micro_batch["ids"]).flatten(0, 1), micro_batch["labels"].flatten())


def shifted_token_loss(model, micro_batch):
    """The same for a causal model: position i predicts label i + 1."""
    logits, labels = model(micro_batch["ids"])[:, :-1], micro_batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def regression_batch(size, dtype=torch.float32):
    return {"x": torch.randn(size, WIDTH, dtype=dtype), "y": torch.randn(size, WIDTH, dtype=dtype)}


def token_batch(size, length=5, ignored=0.3):
    ids = torch.randint(VOCABULARY, (size, length))
    return {"ids": ids, "labels": torch.where(torch.rand(size, length) < ignored, -100, ids)}


def gradients(model):
    """Name to a copy of the gradient."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def state_of(*objects):
    """Every tensor and number in the state of models, optimizers and schedulers, flat, for comparison bit by bit."""
    flat = []

    def walk(value):
        if isinstance(value, dict):
            for item in value.values():
                walk(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(item)
        elif isinstance(value, torch.Tensor):
            flat.append(value.detach().clone())
        elif isinstance(value, (int, float)):
            flat.append(torch.tensor(value, dtype=torch.float64))

    for one in objects:
        walk(one.state_dict())
    return flat


def same_bits(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
