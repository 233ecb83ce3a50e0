"""Predicted against measured peaks on the CPU: every model x precision x recomputation x number of micro-batches.

``python benchmarks/cpu_accuracy.py`` prints the table, ``--write`` stores it in benchmarks/results/cpu_accuracy.md,
``--quick`` (CI) takes one row of each model. ``estimate`` traces the engine under fake tensors, ``measure`` runs the
same engine and reads torch's profiler, temporaries of kernels included. Errors are signed: negative is the dangerous
side. This validates the tracer, the optimizers and the CPU's rules; it says nothing about CUDA's.
"""

import argparse
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snugfit import Job, Plan, checkpointing, hardware, sizes
from snugfit.memory.measuring import measure
from snugfit.memory.tracing import estimate

BATCH = 8
PRECISIONS = ("32-true", "bf16-mixed")
RECOMPUTED = ("none", "every block")
MICRO_BATCHES = (1, 4)
MEDIAN_LIMIT, WORST_LIMIT = 0.001, 0.01


class Row(NamedTuple):
    """One job under one plan, with what is predicted and measured for it."""

    model: str
    precision: str
    recomputed: str
    micro_batches: int
    predicted: int
    measured: int

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


class Residual(nn.Module):
    """Two linear layers around a GELU, added to the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Perceptron(nn.Module):
    """Residual linear blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(128) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Recurrent(nn.Module):
    """Token embedding, layers of one recurrent kind, head."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 96)
        self.layers = nn.ModuleList(kind(96, 96, batch_first=True) for _ in range(3))
        self.head = nn.Linear(96, 500)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x)


class ConvolutionBlock(nn.Module):
    """Convolution, normalisation, activation."""

    def __init__(self, inputs: int, outputs: int, norm: Callable[[int], nn.Module], **arguments: Any) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, bias=False, **arguments)
        self.norm = norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.convolution(x)))


class Depthwise(nn.Module):
    """Inverted residual block of MobileNet: expand, depthwise convolution, contract."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 4 * width
        self.expand = ConvolutionBlock(width, wide, nn.BatchNorm2d, kernel_size=1)
        self.depthwise = ConvolutionBlock(wide, wide, nn.BatchNorm2d, kernel_size=3, padding=1, groups=wide)
        self.contract = nn.Conv2d(wide, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.contract(self.depthwise(self.expand(x)))


class ImageClassifier(nn.Module):
    """First convolution, equal blocks, pooling and head."""

    def __init__(self, width: int, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class UNet(nn.Module):
    """Two levels down by pooling, two up by transposed convolutions, with skips."""

    def __init__(self) -> None:
        super().__init__()
        pairs = ((3, 32), (32, 64), (64, 128))
        self.down = nn.ModuleList(self._pair(a, b) for a, b in pairs)
        self.grow = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in ((64, 128), (32, 64)))
        self.up = nn.ModuleList(self._pair(2 * a, a) for a in (64, 32))
        self.head = nn.Conv2d(32, 4, 1)

    @staticmethod
    def _pair(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level, pair in enumerate(self.down):
            x = pair(x)
            if level < 2:
                kept.append(x)
                x = F.max_pool2d(x, 2)
        for grow, pair in zip(self.grow, self.up, strict=True):
            x = pair(torch.cat([grow(x), kept.pop()], 1))
        return self.head(x)


class BagOfWords(nn.Module):
    """Mean of word vectors, residual blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20000, 64, mode="mean")
        self.blocks = nn.ModuleList(Residual(64) for _ in range(2))
        self.head = nn.Linear(64, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.bag(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Translator(nn.Module):
    """``nn.Transformer`` over two embedded sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(400, 128)
        self.transformer = nn.Transformer(128, 4, 2, 2, 256, dropout=0.1, batch_first=True)
        self.head = nn.Linear(128, 400)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.transformer(x, x, tgt_mask=mask, tgt_is_causal=True))


class Squared(torch.autograd.Function):
    """A user's own function, which saves one tensor and makes two in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0) ** 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 2 * x.clamp(min=0)


class OwnFunction(nn.Module):
    """Linear layers with a user's own activation."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = Squared.apply(block(x))
        return x


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def regression(model: Callable[[], nn.Module], *shape: int) -> Job:
    """Mean squared error against random targets of the input's shape."""
    return Job(
        model,
        lambda module, batch: F.mse_loss(module(batch["inputs"]), batch["targets"]),
        momentum,
        lambda n: {"inputs": torch.rand(n, *shape), "targets": torch.rand(n, *shape)},
    )


def images(model: Callable[[], nn.Module], size: int, optimizer: Any = adamw) -> Job:
    """Cross entropy of images, of each pixel where the model gives one."""

    def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        scores = module(batch["images"])
        scores = scores if isinstance(scores, Tensor) else scores.logits
        labels = batch["labels"] if scores.dim() == 2 else batch["labels"][:, None, None].expand(-1, *scores.shape[2:])
        return F.cross_entropy(scores, labels)

    return Job(
        model,
        loss,
        optimizer,
        lambda n: {"images": torch.rand(n, 3, size, size), "labels": torch.zeros(n, dtype=torch.long)},
    )


def tokens(model: Callable[[], nn.Module], length: int) -> Job:
    """Cross entropy of every next token, for a model of our own."""

    def loss(module: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(module(ids).flatten(0, -2), ids.flatten())

    return Job(model, loss, adamw, lambda n: torch.randint(0, 400, (n, length)), max_grad_norm=1.0)


def bags(model: Callable[[], nn.Module], length: int) -> Job:
    return Job(
        model,
        lambda module, batch: F.cross_entropy(module(batch["ids"]), batch["labels"]),
        adamw,
        lambda n: {"ids": torch.randint(0, 20000, (n, length)), "labels": torch.zeros(n, dtype=torch.long)},
    )


def causal(build: Callable[[], nn.Module], length: int) -> Job:
    """A causal language model of transformers, its own loss."""
    return Job(
        build,
        lambda model, ids: model(input_ids=ids, labels=ids, use_cache=False).loss,
        adamw,
        lambda n: torch.randint(0, 400, (n, length)),
        max_grad_norm=1.0,
    )


def labelled(build: Callable[[], nn.Module], batch: Callable[[int], dict[str, Tensor]]) -> Job:
    """A model of transformers whose batch holds its labels."""
    return Job(build, lambda model, micro_batch: model(**micro_batch).loss, adamw, batch)


def models() -> dict[str, Job]:
    """The jobs, small enough for a minute in all; attention has its dropout where the model has one."""
    import transformers as hf

    def ids(n: int, length: int) -> Tensor:
        return torch.randint(0, 400, (n, length))

    def group_norm(channels: int) -> nn.Module:
        return nn.GroupNorm(8, channels)

    def normalised(norm: Callable[[int], nn.Module]) -> Callable[[], nn.Module]:
        def block() -> nn.Module:
            return ConvolutionBlock(48, 48, norm, kernel_size=3, padding=1)

        return lambda: ImageClassifier(48, block)

    small = {"vocab_size": 500, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    decoder = {**small, "intermediate_size": 256, "num_key_value_heads": 2, "max_position_embeddings": 256}
    gpt2 = hf.GPT2Config(vocab_size=500, n_positions=128, n_embd=128, n_layer=3, n_head=4, bos_token_id=0)
    gpt2.eos_token_id = gpt2.pad_token_id = 0

    def lora() -> nn.Module:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.05)
        return get_peft_model(hf.LlamaForCausalLM(hf.LlamaConfig(**decoder)), config)

    whisper = hf.WhisperConfig(
        vocab_size=500,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        num_mel_bins=80,
        max_source_positions=100,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=1,
    )
    t5 = hf.T5Config(vocab_size=500, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4)
    t5.decoder_start_token_id = 0
    return {
        "MLP": regression(Perceptron, 64, 128),
        "own autograd function": regression(OwnFunction, 256, 256),
        "ResNet": images(
            lambda: hf.ResNetForImageClassification(
                hf.ResNetConfig(
                    embedding_size=32, hidden_sizes=[64, 128], depths=[2, 2], layer_type="basic", num_labels=10
                )
            ),
            64,
            momentum,
        ),
        "ConvNeXt": images(
            lambda: hf.ConvNextForImageClassification(
                hf.ConvNextConfig(hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 2, 2], num_labels=10)
            ),
            64,
        ),
        "ViT": images(
            lambda: hf.ViTForImageClassification(
                hf.ViTConfig(
                    hidden_size=128,
                    num_hidden_layers=3,
                    num_attention_heads=4,
                    intermediate_size=256,
                    image_size=64,
                    patch_size=8,
                    num_labels=10,
                )
            ),
            64,
        ),
        "U-Net": images(UNet, 32),
        "depthwise": images(lambda: ImageClassifier(32, lambda: Depthwise(32)), 48),
        "GroupNorm": images(normalised(group_norm), 48),
        "BatchNorm": images(normalised(nn.BatchNorm2d), 48),
        "BERT": labelled(
            lambda: hf.BertForSequenceClassification(hf.BertConfig(**small, intermediate_size=256)),
            lambda n: {"input_ids": ids(n, 96), "labels": torch.zeros(n, dtype=torch.long)},
        ),
        "DistilBERT": labelled(
            lambda: hf.DistilBertForSequenceClassification(
                hf.DistilBertConfig(vocab_size=500, dim=128, n_layers=3, n_heads=4, hidden_dim=256)
            ),
            lambda n: {"input_ids": ids(n, 96), "labels": torch.zeros(n, dtype=torch.long)},
        ),
        "GPT-2": causal(lambda: hf.GPT2LMHeadModel(gpt2), 96),
        "Llama": causal(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**decoder)), 96),
        "Mistral": causal(lambda: hf.MistralForCausalLM(hf.MistralConfig(**decoder, sliding_window=64)), 96),
        "Mixtral": causal(
            lambda: hf.MixtralForCausalLM(
                hf.MixtralConfig(**decoder, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
            ),
            96,
        ),
        "LoRA": causal(lora, 96),
        "T5": labelled(
            lambda: hf.T5ForConditionalGeneration(t5), lambda n: {"input_ids": ids(n, 64), "labels": ids(n, 64)}
        ),
        "Whisper": labelled(
            lambda: hf.WhisperForConditionalGeneration(whisper),
            lambda n: {"input_features": torch.rand(n, 80, 200), "labels": ids(n, 64)},
        ),
        "nn.Transformer": tokens(Translator, 64),
        "LSTM": tokens(lambda: Recurrent(nn.LSTM), 64),
        "GRU": tokens(lambda: Recurrent(nn.GRU), 64),
        "EmbeddingBag": bags(BagOfWords, 64),
    }


def rows(quick: bool = False, only: Sequence[str] = ()) -> Iterator[Row]:
    """Predict and measure the matrix; with ``quick`` one combination per model, another for each."""
    device = hardware.resolve("cpu")
    combinations = [(p, r, m) for p in PRECISIONS for r in RECOMPUTED for m in MICRO_BATCHES]
    for position, (name, job) in enumerate(models().items()):
        if only and name not in only:
            continue
        chosen = [combinations[position % len(combinations)]] if quick else combinations
        segments = checkpointing.blocks(job.model())
        for precision, recomputed, micro_batches in chosen:
            plan = Plan(
                batch_size=BATCH,
                micro_batch_size=BATCH // micro_batches,
                precision=precision,
                recompute=segments if recomputed == "every block" else (),
            )
            predicted = estimate(job, plan, device).peak_allocated_bytes
            measured = measure(job, plan, device).peak_allocated_bytes
            yield Row(name, precision, recomputed, micro_batches, predicted, measured)


HEADER = (
    "| model | precision | recomputed | micro-batches | predicted | measured | error |",
    "|---|---|---|---|---|---|---|",
)


def line(row: Row) -> str:
    return (
        f"| {row.model} | {row.precision} | {row.recomputed} | {row.micro_batches} | {sizes.text(row.predicted)} "
        f"| {sizes.text(row.measured)} | {row.error:+.3%} |"
    )


def summary(measured: Sequence[Row]) -> str:
    """Median and worst error over all rows, in one sentence."""
    errors = [row.error for row in measured]
    worst = max(measured, key=lambda row: abs(row.error))
    return (
        f"{len(measured)} rows, {len({row.model for row in measured})} models: median error "
        f"{median(map(abs, errors)):.4%}, worst {worst.error:+.3%} ({worst.model}, {worst.precision}, "
        f"{worst.recomputed}, {worst.micro_batches} micro-batches)."
    )


def by_model(measured: Sequence[Row]) -> list[str]:
    lines = ["| model | rows | median | lowest | highest |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(row.model for row in measured):
        errors = [row.error for row in measured if row.model == name]
        lines.append(
            f"| {name} | {len(errors)} | {median(map(abs, errors)):.4%} | {min(errors):+.3%} | {max(errors):+.3%} |"
        )
    return lines


def write(measured: Sequence[Row]) -> None:
    header = [
        "# Predicted against measured peak allocated bytes, CPU",
        "",
        f"CPU-measured, `OMP_NUM_THREADS={torch.get_num_threads()} python benchmarks/cpu_accuracy.py --write`, "
        f"torch {torch.__version__}, Python {platform.python_version()}, "
        f"{torch.backends.cpu.get_cpu_capability()}. {summary(measured)}",
        "",
        *by_model(measured),
        "",
        *HEADER,
    ]
    path = Path(__file__).parent / "results" / "cpu_accuracy.md"
    path.write_text("\n".join([*header, *map(line, measured)]) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one row of each model")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/cpu_accuracy.md")
    parser.add_argument("--only", nargs="*", default=(), metavar="MODEL", help="these models alone")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # what a kernel allocates depends on it
    print("\n".join(HEADER))
    measured = []
    for row in rows(arguments.quick, arguments.only):
        measured.append(row)
        print(line(row), flush=True)
    print(f"\n{summary(measured)}")
    if arguments.write:
        write(measured)
    errors = [abs(row.error) for row in measured]
    return 0 if median(errors) <= MEDIAN_LIMIT and max(errors) <= WORST_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
