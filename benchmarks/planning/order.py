"""Whether calibrated times put candidates in the right order: predicted beside measured steps on the real CPU.

Run ``python benchmarks/planning/order.py [--rounds 5] [--rates FILE] [--quick] [--write]``. Ten jobs, each under many
micro-batch sizes and forms of recomputation; candidates of a job take turns, and a step's time is the median of its
own CPU time with one thread, which other processes do not lengthen. The A/A band is what two engines of one plan
differ by. Target: of pairs of a job's candidates that are measured more than 10 % apart, at least 95 % are predicted
in that order. CPU-measured; exit status 1 when it is missed.
"""

import argparse
import itertools
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import snugfit
from snugfit import Job, Plan, hardware
from snugfit.memory.events import Work
from snugfit.memory.tracing import record_job
from snugfit.planning import calibration, cost
from snugfit.rates import Rates
from snugfit.training import checkpointing

APART, RIGHT = 0.10, 0.95


class Residual(nn.Module):
    """A function added to its input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Attention(nn.Module):
    """Self-attention, causal or not."""

    def __init__(self, width: int, heads: int, is_causal: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.is_causal = heads, is_causal

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class Layers(nn.Module):
    """A stem, blocks in a list, and a head."""

    def __init__(self, stem: nn.Module, blocks: list[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = stem, nn.ModuleList(blocks), head

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def transformer(width: int, layers: int, heads: int, vocabulary: int, *, causal: bool, dropout: float = 0.0) -> Layers:
    def block() -> nn.Module:
        attention = Residual(nn.LayerNorm(width), Attention(width, heads, causal), nn.Dropout(dropout))
        grown = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        return nn.Sequential(attention, Residual(nn.LayerNorm(width), *grown, nn.Dropout(dropout)))

    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))
    return Layers(nn.Embedding(vocabulary, width), [block() for _ in range(layers)], head)


def perceptron(width: int, layers: int, activation: Callable[[], nn.Module]) -> Layers:
    blocks: list[nn.Module] = [nn.Sequential(nn.Linear(width, width), activation()) for _ in range(layers)]
    return Layers(nn.Linear(64, width), blocks, nn.Linear(width, 10))


def convolutional(channels: int, layers: int, *, norm: Callable[[int], nn.Module], depthwise: bool = False) -> Layers:
    def block() -> nn.Module:
        if depthwise:
            wide = nn.Conv2d(channels, channels, 7, padding=3, groups=channels), norm(channels)
            grown = nn.Conv2d(channels, 4 * channels, 1), nn.GELU(), nn.Conv2d(4 * channels, channels, 1)
            return Residual(*wide, *grown)
        first = nn.Conv2d(channels, channels, 3, padding=1), norm(channels), nn.ReLU()
        return Residual(*first, nn.Conv2d(channels, channels, 3, padding=1), norm(channels))

    stem = nn.Sequential(nn.Conv2d(3, channels, 3, stride=2, padding=1), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    return Layers(stem, [block() for _ in range(layers)], head)


def tokens(model: Callable[[], nn.Module], length: int, vocabulary: int) -> Job:
    def loss(m: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
        return F.cross_entropy(m(ids).flatten(0, 1), ids.flatten())

    return Job(
        model,
        loss,
        lambda m: torch.optim.AdamW(m.parameters()),
        lambda n: torch.randint(vocabulary, (n, length), generator=torch.Generator().manual_seed(0)),
        count="samples",
    )


def classes(model: Callable[[], nn.Module], *shape: int) -> Job:
    def loss(m: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(m(batch[0]), batch[1])

    def batch(n: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(n, *shape, generator=generator), torch.randint(10, (n,), generator=generator)

    return Job(model, loss, lambda m: torch.optim.SGD(m.parameters(), 0.01, momentum=0.9), batch, count="samples")


def group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(4, channels)


def jobs() -> dict[str, tuple[Job, int]]:
    """Name to a job and its batch size."""
    return {
        "GPT, width 128, 6 layers": (tokens(lambda: transformer(128, 6, 4, 512, causal=True), 64, 512), 16),
        "MLP, width 512, 8 layers": (classes(lambda: perceptron(512, 8, nn.ReLU), 64), 256),
        "ResNet-like, 32 channels, BatchNorm": (
            classes(lambda: convolutional(32, 4, norm=nn.BatchNorm2d), 3, 32, 32),
            32,
        ),
        "GPT, width 256, 4 layers, vocabulary 8192": (
            tokens(lambda: transformer(256, 4, 4, 8192, causal=True), 32, 8192),
            8,
        ),
        "BERT-like, width 128, 4 layers, dropout": (
            tokens(lambda: transformer(128, 4, 2, 512, causal=False, dropout=0.1), 64, 512),
            16,
        ),
        "transformer, 256 tokens, width 64": (tokens(lambda: transformer(64, 4, 2, 128, causal=False), 256, 128), 8),
        "MLP, width 128, 24 layers": (classes(lambda: perceptron(128, 24, nn.GELU), 64), 1024),
        "MLP, width 1024, 4 layers": (classes(lambda: perceptron(1024, 4, nn.SiLU), 64), 128),
        "conv net, 64 channels, GroupNorm": (classes(lambda: convolutional(64, 3, norm=group_norm), 3, 32, 32), 16),
        "ConvNeXt-like, 32 channels": (
            classes(lambda: convolutional(32, 3, norm=group_norm, depthwise=True), 3, 32, 32),
            16,
        ),
    }


def plans(job: Job, batch_size: int, *, quick: bool) -> dict[str, Plan]:
    """Candidates by name: micro-batch sizes and forms of recomputation."""
    model = job.model()
    forms = {
        "nothing": (),
        "blocks": checkpointing.blocks(model),
        "every 2. block": checkpointing.every(model, 2),
        "blocks keep-matmul": checkpointing.blocks(model, "keep-matmul"),
    }
    cuts = (1, 8) if quick else (1, 2, 4, 8)
    norm_policy = "window" if any(isinstance(m, nn.BatchNorm2d) for m in model.modules()) else "micro"
    return {
        f"{cut} x {batch_size // cut}, {name}": Plan(
            batch_size=batch_size, micro_batch_size=batch_size // cut, recompute=form, norm_policy=norm_policy
        )
        for cut in cuts
        for name, form in forms.items()
        if not (quick and name == "every 2. block")
    }


def measured(job: Job, candidates: dict[str, Plan], rounds: int) -> tuple[dict[str, float], float]:
    """Seconds of a step of each candidate, and the A/A band: how far two engines of one plan are apart."""
    batch = job.batch(next(iter(candidates.values())).batch_size)
    first = next(iter(candidates))
    engines = {name: snugfit.build(job, plan, "cpu") for name, plan in candidates.items()}
    engines["A/A"] = snugfit.build(job, candidates[first], "cpu")
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(rounds + 1):
        for name, engine in engines.items():
            start = time.thread_time()
            engine.step(batch)
            if turn:  # the first one warms up
                seconds[name].append(time.thread_time() - start)
    band = max(abs(a / b - 1) for a, b in zip(seconds[first], seconds["A/A"], strict=True))
    return {name: statistics.median(seconds[name]) for name in candidates}, band


def work_of(job: Job, plan: Plan, device: hardware.Device) -> list[Work]:
    """The work of a whole window, whose later micro-batches repeat the second one."""
    steps = plan.accumulation_steps
    trace = record_job(job, plan, device, windows=((0,), (0,) if steps == 1 else (0, 1)))
    work = list(trace.work)
    if steps == 1:
        return work
    end = max(i for i, item in enumerate(work) if item.phase == "backward") + 1
    return work + work[trace.micro_batch_starts[1] : end] * (steps - 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rates", type=Path, help="what snugfit calibrate wrote; else this calibrates first")
    parser.add_argument("--quick", action="store_true", help="three jobs, six candidates each, two rounds")
    parser.add_argument("--each", action="store_true", help="print every candidate")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/planning_order.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    rates = calibration.calibrate("cpu") if arguments.rates is None else Rates.load(arguments.rates)
    taken = time.perf_counter() - start
    device = calibration.calibrated("cpu", rates)
    assumed = replace(hardware.resolve("cpu"), rates=None)
    chosen = list(jobs().items())[: 3 if arguments.quick else None]
    lines = [
        "| job | candidates | fastest to slowest | pairs more than 10 % apart | in the right order "
        "| without calibration | predicted / measured | A/A band |",
        "|---|---|---|---|---|---|---|---|",
    ]
    total = right = right_assumed = 0
    wrong: list[str] = []
    errors: list[float] = []
    for name, (job, batch_size) in chosen:
        candidates = plans(job, batch_size, quick=arguments.quick)
        took, band = measured(job, candidates, 2 if arguments.quick else arguments.rounds)
        works = {key: work_of(job, plan, device) for key, plan in candidates.items()}
        times = {key: cost.step_time(work, device) for key, work in works.items()}
        guessed = {key: cost.step_time(work, assumed) for key, work in works.items()}
        pairs = [sorted(pair, key=took.__getitem__) for pair in itertools.combinations(candidates, 2)]
        pairs = [(a, b) for a, b in pairs if took[b] > (1 + APART) * took[a]]
        misses = [(a, b) for a, b in pairs if times[a] >= times[b]]
        good, good_assumed = len(pairs) - len(misses), sum(guessed[a] < guessed[b] for a, b in pairs)
        ratios = [times[key] / took[key] for key in candidates]
        if arguments.each:
            for key, ratio in zip(candidates, ratios, strict=True):
                print(f"  {key}: {took[key] * 1e3:.1f} ms, predicted / measured {ratio:.2f}")
        errors += [abs(ratio - 1) for ratio in ratios]
        total, right, right_assumed = total + len(pairs), right + good, right_assumed + good_assumed
        wrong += [
            f"- {name}: {a} took {took[a] * 1e3:.1f} ms, {b} {took[b] * 1e3:.1f} ms; predicted {times[a] * 1e3:.1f} "
            f"and {times[b] * 1e3:.1f} ms"
            for a, b in misses
        ]
        lines.append(
            f"| {name} | {len(candidates)} | {min(took.values()) * 1e3:.0f} to {max(took.values()) * 1e3:.0f} ms "
            f"| {len(pairs)} | {good} | {good_assumed} | {min(ratios):.2f} to {max(ratios):.2f} | {band:.1%} |"
        )
        print(lines[-1], *wrong[len(wrong) - len(misses) :], sep="\n", flush=True)
    held = right >= RIGHT * total
    middle, late = statistics.median(errors), statistics.quantiles(errors, n=10)[-1]
    summary = (
        f"{right} of {total} pairs more than {APART:.0%} apart are in the right order ({right / total:.1%}; without "
        f"calibration {right_assumed / total:.1%}). Times are off by {middle:.1%} in the median and by {late:.1%} at "
        f"the 90th percentile. Target {RIGHT:.0%}: {'met' if held else 'missed'}."
    )
    print(summary)
    if arguments.write:
        calibrated_in = "" if arguments.rates else f" Calibrated in {taken:.0f} s."
        text = [
            "# The order of candidates after calibration",
            "",
            f"CPU-measured, `python benchmarks/planning/order.py --rounds {arguments.rounds} --write`, torch "
            f"{torch.__version__}, Python {platform.python_version()}, one thread of {rates.processor}.{calibrated_in}",
            "",
            *lines,
            "",
            summary,
            *(["", "In the wrong order:", "", *wrong] if wrong else []),
            "",
        ]
        results = Path(__file__).resolve().parents[1] / "results"
        results.joinpath("planning_order.md").write_text("\n".join(text), encoding="utf-8")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
