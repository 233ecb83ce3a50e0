"""What every form of activation checkpointing saves and costs on a 24-layer GPT: predicted beside measured.

Run ``python benchmarks/checkpointing.py [--rounds 5] [--quick] [--write]``. Peaks are measured from the profiler's
memory events, times as the median over rounds of (form / the plain steps before and after it), so that a noisy
machine hits both. Predicted times are those of the planner's time model at the rates that ``snugfit calibrate``
measures here, which knows nothing of these models. CPU-measured; exit status 1 when a target is missed.
"""

import argparse
import functools
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import snugfit
from snugfit import Job, Plan, Segment, sizes
from snugfit.memory.tracing import record_job
from snugfit.planning import calibration, cost
from snugfit.training import checkpointing

WIDTH, LAYERS, HEADS, CONTEXT, VOCABULARY, BATCH = 192, 24, 4, 128, 256, 8
PEAK_LIMIT, TIME_LIMIT = 0.01, 0.05
LOSS_LIMIT, GRADIENT_LIMIT, GRADIENT_LIMIT_64 = 1e-6, 1e-7, 1e-12

Loss = Callable[[Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """Causal self-attention behind a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))


class FeedForward(nn.Module):
    """Two linear layers and a GELU behind a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.expand = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.contract = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.contract(F.gelu(self.expand(self.norm(x))))


class Block(nn.Module):
    """Attention, then the feed-forward layer, each with its residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.ff = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.ff(x)


class GPT(nn.Module):
    """Pre-norm decoder without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def job() -> Job:
    def loss(model: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    return Job(
        GPT,
        loss,
        lambda model: torch.optim.AdamW(model.parameters()),
        lambda n: torch.randint(VOCABULARY, (n, CONTEXT), generator=torch.Generator().manual_seed(0)),
    )


def forms(model: nn.Module, *, quick: bool) -> dict[str, tuple[Segment, ...]]:
    found: dict[str, tuple[Segment, ...]] = {"plain": ()}
    for n in (4, 24) if quick else (1, 2, 4, 6, 8, 12, 24):
        chain = [segment.modules[0] for segment in checkpointing.blocks(model)]
        cuts = [len(chain) * i // n for i in range(n + 1)]
        found[f"{n} segments"] = tuple(Segment(tuple(chain[cuts[i] : cuts[i + 1]])) for i in range(n))
    for k in () if quick else (2, 3, 4):
        found[f"every {k}. block"] = checkpointing.every(model, k)
    found["attention only"] = checkpointing.match(model, "*.attn")
    found["feed-forward only"] = checkpointing.match(model, "*.ff")
    found["keep-attention"] = checkpointing.blocks(model, "keep-attention")
    found["keep-matmul"] = checkpointing.blocks(model, "keep-matmul")
    return found


def plan_of(recompute: Sequence[Segment]) -> Plan:
    return Plan(batch_size=BATCH, micro_batch_size=BATCH, recompute=tuple(recompute))


class Stepper:
    """One engine whose windows are timed."""

    def __init__(self, plan: Plan) -> None:
        self.job = job()
        self.engine = snugfit.build(self.job, plan, "cpu")
        self.batch = self.job.batch(BATCH)
        for _ in range(2):
            self.engine.step(self.batch)

    def seconds(self) -> float:
        """Of this thread's own, which other processes do not lengthen; the step runs on it alone."""
        start = time.thread_time()
        self.engine.step(self.batch)
        return time.thread_time() - start


def table(rounds: int, *, quick: bool) -> tuple[list[str], bool, float]:
    """Rows, whether all targets are met, and the A/A band of the measured times."""
    chosen = forms(GPT(), quick=quick)
    cpu = calibration.calibrated("cpu", calibration.calibrate("cpu"))
    lines = [
        "| form | predicted peak | measured peak | error | extra time predicted | measured | middle half "
        "| forwards run again |",
        "|---|---|---|---|---|---|---|---|",
    ]
    steppers = {name: Stepper(plan_of(recompute)) for name, recompute in chosen.items()}
    again = Stepper(plan_of(()))
    times: dict[str, list[float]] = defaultdict(list)
    same = []
    for _ in range(rounds):
        before = steppers["plain"].seconds()
        same.append(abs(again.seconds() / before - 1))
        for name, stepper in steppers.items():
            now = stepper.seconds()
            after = steppers["plain"].seconds()
            times[name].append(now / statistics.mean((before, after)) - 1)
            before = after
    traced = {name: record_job(job(), plan_of(recompute), cpu).work for name, recompute in chosen.items()}
    base = cost.step_time(traced["plain"], cpu)
    held = True
    for name, recompute in chosen.items():
        predicted = snugfit.estimate(job(), plan_of(recompute), "cpu").peak_allocated_bytes
        measured = snugfit.measure(job(), plan_of(recompute), "cpu").peak_allocated_bytes
        error = predicted / measured - 1
        extra = cost.step_time(traced[name], cpu) / base - 1
        lower, took, upper = statistics.quantiles(times[name], n=4, method="inclusive")
        held = held and abs(error) <= PEAK_LIMIT and abs(extra - took) <= TIME_LIMIT
        repeated = sum(w.flops for w in traced[name]) / sum(w.flops for w in traced["plain"]) - 1
        lines.append(
            f"| {name} | {sizes.text(predicted)} | {sizes.text(measured)} | {error:+.3%} | {extra:+.1%} | {took:+.1%} "
            f"| {lower:+.1%} to {upper:+.1%} | {repeated * 3:.2f} of one |"
        )
        print(lines[-1], flush=True)
    return lines, held, statistics.median(same)


def overhead(rounds: int) -> tuple[float, float]:
    """Milliseconds more that a block of four tokens takes when it is recomputed, by us and by torch."""
    models = {name: nn.Sequential(*(Block() for _ in range(12))) for name in ("plain", "ours", "torch's")}
    checkpointing.apply(models["ours"], checkpointing.blocks(models["ours"]))
    for block in models["torch's"]:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    times: dict[str, list[float]] = defaultdict(list)
    x = torch.randn(1, 4, WIDTH)
    for _ in range(rounds):
        for name, model in models.items():
            start = time.thread_time()
            model(x).sum().backward()
            times[name].append((time.thread_time() - start) / len(model) * 1e3)
    quiet = {name: statistics.quantiles(found, n=10)[0] for name, found in times.items()}
    return quiet["ours"] - quiet["plain"], quiet["torch's"] - quiet["plain"]


class Head:
    """A last layer and labels, and what losses of it give.

    Args:
        spread: Standard deviation of the weights.
    """

    def __init__(self, rows: int, features: int, classes: int, spread: float) -> None:
        torch.manual_seed(0)
        self.hidden, self.weight = torch.randn(rows, features), torch.randn(classes, features) * spread
        self.labels = torch.randint(classes, (rows,))
        self.labels[::7] = -100

    def plain(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight), self.labels)

    def in_chunks(self, chunks: int) -> Loss:
        return lambda hidden, weight: snugfit.chunked_cross_entropy(hidden, weight, self.labels, chunks=chunks)

    def results(self, loss: Loss, dtype: torch.dtype) -> list[Tensor]:
        """The loss and both gradients."""
        given = [one.to(dtype).clone().requires_grad_() for one in (self.hidden, self.weight)]
        value = loss(*given)
        return [value.detach().double(), *(one.double() for one in torch.autograd.grad(value, given))]

    def of_fp32_logits(self) -> list[Tensor]:
        """The same in float64 from logits that were rounded to float32: no float32 loss can know better."""
        logits = F.linear(self.hidden, self.weight).double().requires_grad_()
        value = F.cross_entropy(logits, self.labels)
        slope = torch.autograd.grad(value, logits)[0]
        return [value.detach(), slope @ self.weight.double(), slope.t() @ self.hidden.double()]

    def part_of_peak(self, loss: Loss) -> int:
        """What a traced step needs beside inputs and gradients."""
        shapes = self.hidden.shape, self.weight.shape

        def make_step() -> Callable[[], None]:
            hidden, weight = torch.zeros(shapes[0], requires_grad=True), nn.Parameter(torch.zeros(shapes[1]))

            def step() -> None:
                hidden.grad = weight.grad = None
                loss(hidden, weight).backward()

            return step

        fixed = 2 * 4 * (shapes[0].numel() + shapes[1].numel())
        return snugfit.trace(make_step, "cpu").peak_allocated_bytes - fixed


def apart(found: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """How far the gradients lie apart, relative to the norm of the right one; the farther of the two."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found[1:], right[1:], strict=True))


def chunked(*, quick: bool) -> tuple[list[str], bool]:
    """The loss in chunks against the plain one: numbers, and the logits' part of the peak."""
    rows, features, classes = (512, 64, 4096) if quick else (2048, 128, 16384)
    lines = [
        "| logits | chunks | loss | gradients, fp32, from float64 | allowed | plain's from float64 | the two apart "
        "| gradients, fp64 | logits' part of the peak | limit |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    held = True
    for spread in (0.05, 0.5):
        head = Head(rows, features, classes, spread)
        exact, usual = head.results(head.plain, torch.float64), head.results(head.plain, torch.float32)
        rounding = apart(head.of_fp32_logits(), exact)
        allowed = GRADIENT_LIMIT + (rounding if rounding > GRADIENT_LIMIT else 0)
        whole = head.part_of_peak(head.plain)
        for chunks in (2, 8) if quick else (2, 4, 8, 16, 32):
            loss = head.in_chunks(chunks)
            ours, ours_64 = head.results(loss, torch.float32), head.results(loss, torch.float64)
            needed, limit = head.part_of_peak(loss), (whole + 4 * rows * classes) // chunks
            off = float(abs(ours[0] - exact[0]))
            lines.append(
                f"| {spread * features**0.5:.1f} | {chunks} | {off:.1e} | {apart(ours, exact):.1e} | {allowed:.1e} "
                f"| {apart(usual, exact):.1e} | {apart(ours, usual):.1e} | {apart(ours_64, exact):.1e} "
                f"| {sizes.text(needed)} of {sizes.text(whole)} | {sizes.text(limit)} |"
            )
            print(lines[-1], flush=True)
            held = held and off <= LOSS_LIMIT * max(1.0, float(exact[0])) and needed <= limit
            held = held and apart(ours, exact) <= allowed and apart(ours_64, exact) <= GRADIENT_LIMIT_64
    return lines, held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a few forms and small sizes")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/checkpointing.md")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds must be at least 2, for the spread")
    torch.set_num_threads(1)
    lines, held, band = table(arguments.rounds, quick=arguments.quick)
    print(f"A/A band: {band:.1%}")
    ours, theirs = overhead(50 if arguments.quick else 300)
    beside = (
        f"Where there is next to no work to repeat (4 tokens) a recomputed block takes {ours:.2f} ms more than a plain "
        f"one, and {theirs:.2f} ms more under torch.utils.checkpoint, which repeats no numbers of Python and numpy."
    )
    print(beside)
    chunk_lines, chunks_held = chunked(quick=arguments.quick)
    if arguments.write:
        text = [
            "# Activation checkpointing, every form",
            "",
            f"CPU-measured, `python benchmarks/checkpointing.py --rounds {arguments.rounds} --write`, torch "
            f"{torch.__version__}, Python {platform.python_version()}, one thread. GPT of {LAYERS} layers, "
            f"width {WIDTH}, {BATCH} x {CONTEXT} tokens, fp32, AdamW.",
            "",
            *lines,
            "",
            f"Two engines of the plain step are {band:.1%} apart (median over the rounds): no measured time is better "
            "known than that.",
            "",
            beside,
            "",
            f"Targets: peaks within {PEAK_LIMIT:.0%}, extra time within {TIME_LIMIT * 100:.0f} percentage points: "
            + ("met." if held else "missed."),
            "",
            "## The loss in chunks",
            "",
            "*logits* is their standard deviation. Distances of gradients are relative to the norm, the farther one of "
            "the two; the plain loss in float64 is the truth. *Allowed* is 1e-7 where the logits let it be, and 1e-7 "
            "more than what the rounding of the logits to float32 does by itself where that is larger: those "
            "gradients are the best that any loss in float32 can give. Peaks from the trace.",
            "",
            *chunk_lines,
            "",
            "Targets: loss to 1e-6 (of itself where it is above 1), fp32 gradients as allowed, float64 gradients to "
            "1e-12, the logits' part at most 1/chunks of the plain one's and one chunk: "
            + ("met." if chunks_held else "missed."),
            "",
        ]
        Path(__file__).with_name("results").joinpath("checkpointing.md").write_text("\n".join(text), encoding="utf-8")
    return 0 if held and chunks_held else 1


if __name__ == "__main__":
    sys.exit(main())
