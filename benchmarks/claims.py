"""The figures claimed for accumulation, checkpointing and mixed precision, beside what is predicted or measured.

Run ``python benchmarks/claims.py [--only F6] [--write]``; ``docs/claims.md`` says what follows from the numbers. Sizes
of cards are modelled; training is measured, on the CPU. The status is 1 where a sum of our own does not come out.
"""

import argparse
import gc
import importlib.util
import os
import platform
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import nn

import snugfit
from snugfit import Job, MemoryReport, Plan, checkpointing, hardware, sizes
from snugfit.integrations.known_models import known_job
from snugfit.memory import tracing
from snugfit.memory.events import Work
from snugfit.planning import cost
from snugfit.planning.traced_plans import whole_window

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "benchmarks" / "results" / "claims.md"
A100 = "a100-sxm-80gb"
GB = 10**9


@dataclass(frozen=True)
class Predicted:
    """One plan, traced as it is."""

    memory: MemoryReport
    seconds: float
    tf32_seconds: float
    "The same where fp32 products may use TF32."
    work: Counter[Work]

    def seconds_on(self, device: str) -> float:
        """Time of the same operations on another card."""
        return cost.step_time(self.work, hardware.resolve(device))

    @property
    def saved_bytes(self) -> int:
        """Alive between forward and backward of a micro-batch."""
        return self.memory.at("forward end").get("saved", 0)


def predict(job: Job, plan: Plan, device: str) -> Predicted:
    """Memory and time of a plan on a card, both modelled."""
    gc.collect()  # a trace's tensors hold each other
    card = hardware.resolve(device)
    trace = tracing.record_job(job, plan, card)
    work = whole_window(trace, plan)
    seconds = [cost.step_time(work, card, tf32=allowed) for allowed in (False, True)]
    return Predicted(trace.report(), *seconds, work)


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """Rows as Markdown."""
    names = list(head)
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    return lines + [f"| {' | '.join(map(str, row))} |" for row in rows]


def gib(size: int) -> str:
    """GiB with two digits."""
    return f"{size / sizes.GIB:.2f}"


def activations() -> list[str]:
    """F1, F7, F8."""
    job = known_job("bert-large", seq=512)
    whole = Plan(batch_size=32, micro_batch_size=32)
    full = predict(job, whole, A100)
    mixed = Plan(batch_size=32, micro_batch_size=8, precision="bf16-mixed")
    rows = []
    for name, plan in (
        ("1 x 32, fp32", whole),
        ("2 x 16, fp32", replace(whole, micro_batch_size=16)),
        ("4 x 8, fp32", replace(whole, micro_batch_size=8)),
        ("8 x 4, fp32", replace(whole, micro_batch_size=4)),
        ("1 x 32, bf16-mixed", replace(mixed, micro_batch_size=32)),
        ("4 x 8, bf16-mixed", mixed),
    ):
        found = predict(job, plan, A100)
        peak = found.memory.peak_allocated_bytes
        ratios = (found.saved_bytes / full.saved_bytes, peak / full.memory.peak_allocated_bytes)
        times = (found.seconds / full.seconds, found.tf32_seconds / full.tf32_seconds)
        shown = (gib(found.saved_bytes), f"{ratios[0]:.3f}", gib(peak), f"{ratios[1]:.3f}")
        rows.append((name, *shown, *(f"{time:.2f}" for time in times)))
    return [
        f"BERT-large, 512 tokens, batch 32, AdamW, on {A100}. Time against the first row: fp32 products without "
        "TF32, torch's default, and with it.",
        "",
        *table(
            ("plan", "saved for backward", "of the first", "peak allocated", "of the first", "time", "with TF32"), rows
        ),
    ]


def segments() -> list[str]:
    """F2 on a card; on the CPU it is measured in checkpointing.md."""
    job = known_job("bert-large", seq=512)
    model = tracing.skeleton(job)
    plan = Plan(batch_size=8, micro_batch_size=8, precision="bf16-mixed")
    plain = predict(job, plan, A100)
    rows = []
    for number in (1, 4, 6, 8, 24):
        found = predict(job, replace(plan, recompute=checkpointing.segments(model, number)), A100)
        peak = found.memory.peak_allocated_bytes
        above = [one.memory.peak_allocated_bytes - one.memory.static_bytes for one in (found, plain)]
        less = (1 - peak / plain.memory.peak_allocated_bytes, 1 - above[0] / above[1])
        time = found.seconds / plain.seconds - 1
        rows.append((number, gib(peak), f"{less[0]:.1%}", f"{less[1]:.1%}", f"{time:+.1%}"))
    return [
        f"BERT-large, 24 blocks, 8 x 512 tokens, bf16-mixed, on {A100}; without segments "
        f"{gib(plain.memory.peak_allocated_bytes)} GiB, of which {gib(plain.memory.static_bytes)} are static.",
        "",
        *table(("segments", "peak allocated", "saved of the peak", "saved above static", "time"), rows),
    ]


def precision() -> list[str]:
    """F3."""
    rows = []
    for name, length, batch in (
        ("bert-large", 32, 1),
        ("bert-base", 128, 8),
        ("bert-large", 512, 8),
        ("gpt2", 1024, 8),
    ):
        job = known_job(name, seq=length)
        plan = Plan(batch_size=batch, micro_batch_size=batch)
        fp32, bf16 = (predict(job, replace(plan, precision=one), A100) for one in ("32-true", "bf16-mixed"))
        peaks = [one.memory.peak_allocated_bytes for one in (fp32, bf16)]
        ratios = (peaks[1] / peaks[0], bf16.saved_bytes / fp32.saved_bytes)
        ratios += (fp32.seconds / bf16.seconds, fp32.tf32_seconds / bf16.seconds)
        ratios += (fp32.seconds_on("rtx-3060-12gb") / bf16.seconds_on("rtx-3060-12gb"),)
        rows.append((name, f"{batch} x {length}", *map(gib, peaks), *(f"{ratio:.2f}" for ratio in ratios)))
    head = ("model", "batch", "fp32 peak", "bf16-mixed peak", "ratio", "ratio of saved")
    head += ("speed on an A100", "against TF32", "speed on an RTX 3060")
    return ["AdamW; the saved of bf16-mixed include cast copies of the weights.", "", *table(head, rows)]


def seven_billion() -> list[str]:
    """F4."""
    job = known_job("llama-2-7b", seq=2048)
    model = tracing.skeleton(job)
    count = sum(parameter.numel() for parameter in model.parameters())
    low = Plan(batch_size=64, micro_batch_size=8, precision="bf16-true", bf16_update="nearest")
    fours, blocks = checkpointing.segments(model, 8), checkpointing.blocks(model)
    rows = []
    for name, plan in (
        ("8 x 8", low),
        ("8 x 8, runs of 4 layers", replace(low, recompute=fours)),
        ("8 x 8, every layer", replace(low, recompute=blocks)),
        ("64 x 1", replace(low, micro_batch_size=1)),
        ("64 x 1, runs of 4 layers", replace(low, micro_batch_size=1, recompute=fours)),
        ("64 x 1, sums in bf16", replace(low, micro_batch_size=1, gradient_dtype="parameter")),
        (
            "64 x 1, runs of 4 layers, sums in bf16",
            replace(low, micro_batch_size=1, recompute=fours, gradient_dtype="parameter"),
        ),
    ):
        found = predict(job, plan, A100).memory
        gradient = found.at("backward end").get("gradient", 0)
        peaks = (found.peak_allocated_bytes, found.peak_reserved_bytes, found.needed_bytes)
        fits = "yes" if found.fits(_memory(A100)) else "no"
        rows.append((name, gib(found.static_bytes), gib(gradient), *map(gib, peaks), fits))
    floor = 4 * 2 * count
    return [
        f"Llama-2-7B's shape ({count:,} parameters), 2,048 tokens, batch 64, AdamW, on {A100} "
        f"({gib(_memory(A100))} GiB). Weights, gradients and both moments in bf16 alone: {floor / GB:.1f} GB, "
        f"{gib(floor)} GiB; all in fp32 {2 * floor / GB:.1f} GB. All rows bf16-true, updates rounded to the nearest; "
        "gradients are summed in fp32 where nothing is said.",
        "",
        *table(("plan", "static", "gradients", "allocated", "reserved", "needed", "fits"), rows),
    ]


def _memory(device: str) -> int:
    return hardware.resolve(device).memory_bytes


def largest_batches() -> list[str]:
    """F5 and F6."""
    base = tracing.skeleton(known_job("bert-base"))
    count = sum(parameter.numel() for parameter in base.parameters())
    cards = ("rtx-3060-6gb", "rtx-3060-8gb", "rtx-3060-12gb")
    rows, holds = [], []
    for attention in ("sdpa", "eager"):
        for length in (128, 256, 320, 384, 448, 512):
            job = known_job("bert-base", seq=length, attention=attention)
            needs = _Needs(job)
            largest = [needs.largest(_memory(card)) for card in cards]
            at_8, at_16, four = needs.of(8), needs.of(16), needs.of(32, 8)
            under = max(at_8.peak_reserved_bytes, four.peak_reserved_bytes) < 5 * GB
            names = [
                f"{_gigabytes(card)} GB"
                for card in cards
                if under and max(at_8.needed_bytes, four.needed_bytes) <= _memory(card) < at_16.needed_bytes
            ]
            holds += [f"{attention} at {length} tokens on {name}" for name in names]
            reserved = [gib(one.peak_reserved_bytes) for one in (at_8, four, at_16)]
            shown = ("yes" if under else "no", *largest, ", ".join(names) or "-")
            rows.append((attention, length, *reserved, *shown))
    head = ["attention", "tokens", "reserved at 8", "at 4 x 8", "at 16", "under 5 GB"]
    head += [f"largest, {_gigabytes(card)} GB" for card in cards]
    return [
        f"BERT-base as a classifier has {count:,} parameters, {4 * count / 1e6:.0f} MB in fp32 (F5). fp32, AdamW, RTX "
        "3060; largest: about the largest batch that fits at once, context and margin counted. The claim holds where "
        "8 fits and 16 does not, 4 x 8 fits, and both stay under 5 GB (10^9).",
        "",
        *table((*head, "the sentence holds on"), rows),
        "",
        f"It holds for: {'; '.join(holds) or 'none of these'}.",
    ]


def _gigabytes(card: str) -> str:
    return card.rpartition("-")[2].removesuffix("gb")


class _Needs:
    """What one job needs at any batch size: traces, each made once."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.known: dict[tuple[int, int], MemoryReport] = {}

    def of(self, batch: int, micro: int | None = None) -> MemoryReport:
        """The report of one batch, in fp32."""
        key = (batch, micro or batch)
        if key not in self.known:
            self.known[key] = predict(self.job, Plan(batch_size=batch, micro_batch_size=key[1]), "rtx-3060-12gb").memory
        return self.known[key]

    def largest(self, budget: int) -> int:
        """About the largest batch that fits at once: on the line through 32 and 64, where activations decide."""
        low, high = self.of(32).needed_bytes, self.of(64).needed_bytes
        return int(32 + 32 * (budget - low) / (high - low))


def one_billion() -> list[str]:
    """F12."""
    config = transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4
    )
    base = known_job("llama-2-7b", seq=2048)
    job = Job(lambda: transformers.LlamaForCausalLM(config), base.loss, base.optimizer, base.batch, count=base.count)
    parameters = 4 * sum(parameter.numel() for parameter in tracing.skeleton(job).parameters())
    rows = []
    for batch in (1, 4):
        cells: list[object] = [f"{batch} x 2048"]
        for kind in ("32-true", "bf16-mixed"):
            saved = predict(job, Plan(batch_size=batch, micro_batch_size=batch, precision=kind), A100).saved_bytes
            cells += [gib(saved), f"{saved / parameters:.1f}"]
        rows.append(cells)
    return [
        f"A Llama of 22 layers and width 2048: {parameters / 4:,.0f} parameters, {gib(parameters)} GiB in fp32; fused "
        "attention, nothing recomputed.",
        "",
        *table(("batch", "saved, fp32", "times the weights", "saved, bf16-mixed", "times the weights"), rows),
    ]


def _language_model() -> ModuleType:
    """The byte-level language model of the examples, small."""
    path = ROOT / "examples" / "python_lm.py"
    spec = importlib.util.spec_from_file_location("python_lm", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.WIDTH, module.LAYERS, module.CONTEXT = 64, 2, 64
    return module


def _run(module: ModuleType, batch: int, steps: int, samples: int, rate: float = 1e-3) -> tuple[list[float], Any]:
    """Losses of a run over so many samples in batches, each of so many micro-batches, and its engine."""
    job = replace_optimizer(module.job(batch_size=batch), rate)
    torch.manual_seed(job.seed)
    engine = snugfit.build(job, Plan(batch_size=batch, micro_batch_size=-(-batch // steps)), device="cpu")
    losses = []
    for number, full in enumerate(job.data()):
        if number == samples // batch:
            break
        losses.append(float(engine.step(full).loss))
    return losses, engine


def replace_optimizer(job: Job, rate: float) -> Job:
    """The same job with AdamW at another rate."""
    return Job(
        job.model,
        job.loss,
        lambda model: torch.optim.AdamW(model.parameters(), lr=rate),
        job.batch,
        count=job.count,
        data=job.data,
        seed=job.seed,
    )


def many_steps() -> tuple[list[str], bool]:
    """F13: the same batch in more steps, the same data in fewer updates, sums in bf16."""
    module = _language_model()
    samples = 1024
    rows, whole = [], None
    for steps in (1, 4, 16, 32):
        losses, engine = _run(module, 32, steps, samples)
        weights = nn.utils.parameters_to_vector(engine.model.parameters()).detach().clone()
        whole = weights if whole is None else whole
        off = float((weights - whole).norm() / whole.norm())
        rows.append([f"{steps} x {32 // steps}", len(losses), f"{sum(losses[-8:]) / 8:.4f}", f"{off:.1e}"])
    held = max(float(row[3]) for row in rows) < 1e-3
    lines = [
        "Byte-level GPT of 2 layers and width 64 on the standard library's sources, fp32, AdamW. The same batch of 32"
    ]
    lines[0] += f" in more steps, {samples} samples:"
    lines += ["", *table(("steps", "updates", "last loss", "weights differ by"), rows)]
    rows = []
    for factor in (1, 4, 16, 32):
        for rule in ("same", "sqrt", "linear"):
            rate = 1e-3 if rule == "same" else snugfit.learning_rate.scale(1e-3, factor, rule=rule)
            if factor == 1 and rule != "same":
                continue
            losses, _ = _run(module, 8 * factor, factor, samples, rate)
            tail = losses[-max(1, len(losses) // 8) :]
            rows.append([f"{factor} x 8", len(losses), rule, f"{rate:.2g}", f"{sum(tail) / len(tail):.3f}"])
    lines += ["", f"More steps of 8 samples each, so larger batches, over the same {samples} samples:"]
    lines += ["", *table(("steps", "updates", "rule", "rate", "last loss"), rows)]
    lines += ["", "Gradients of micro-batches summed in their own type, against a float64 sum (relative error):"]
    lines += ["", *_sums()]
    return lines, held


def _sums() -> list[str]:
    """How far a sum of K micro-batches' gradients is off when its type is fp32, fp16 or bf16."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(100_000, generator=generator, dtype=torch.float64)
    rows = []
    for steps in (4, 16, 64, 256):
        parts = [mean + torch.randn(len(mean), generator=generator, dtype=torch.float64) for _ in range(steps)]
        exact = sum(part / steps for part in parts)
        cells: list[object] = [steps]
        for dtype in (torch.float32, torch.bfloat16):
            total = torch.zeros(len(mean), dtype=dtype)
            for part in parts:
                total += (part / steps).to(dtype)
            cells.append(f"{float((total.double() - exact).norm() / exact.norm()):.1e}")
        rows.append(cells)
    return table(("steps", "fp32", "bf16"), rows)


def noise() -> list[str]:
    """F14: the scatter of losses and gradients of one batch and of its parts."""
    module = _language_model()
    job = module.job(batch_size=32)
    torch.manual_seed(0)
    model = job.model()
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    text = module.corpus(validation=False)
    shuffled = torch.randperm(
        module.num_blocks(text), generator=torch.Generator().manual_seed(0)
    )  # files are correlated
    full = module.block_batch(text, shuffled[: 32 * 32].tolist())
    for size in (8, 32):
        gradients, losses = [], []
        for start in range(0, 32 * 32, size):
            part = {name: value[start : start + size] for name, value in full.items()}
            mean = job.loss(model, part).total / part["labels"].numel()
            gradient = torch.autograd.grad(mean, list(model.parameters()))
            gradients.append(nn.utils.parameters_to_vector(gradient))
            losses.append(mean.detach())
        found[size] = torch.stack(gradients), torch.stack(losses)
    rows = []
    for size, (vectors, losses) in found.items():
        centre = vectors.mean(0)
        scatter = float((vectors - centre).norm(dim=1).square().mean().sqrt() / centre.norm())
        rows.append([size, len(losses), f"{float(losses.std()):.4f}", f"{scatter:.2f}"])
    ratios = [float(rows[0][column]) / float(rows[1][column]) for column in (2, 3)]
    engine = snugfit.build(job, Plan(batch_size=32, micro_batch_size=8), device="cpu")
    snugfit.gradient_noise.track(engine, decay=0.98)
    scale = float("nan")
    for number, batch in enumerate(job.data()):
        result = engine.step(batch)
        if number == 100:
            scale = float(result.metrics["gradient_noise_scale"])
            break
    return [
        "The same model at its start, 1,024 samples in batches of 8 and of 32:",
        "",
        *table(("batch", "batches", "scatter of the loss", "scatter of the gradient, of its mean's norm"), rows),
        "",
        f"Ratios {ratios[0]:.2f} and {ratios[1]:.2f}; sqrt(32 / 8) = 2 is predicted. `gradient_noise_scale` after 100 "
        f"windows of 4 x 8: {scale:,.0f} tokens, {scale / module.CONTEXT:.0f} samples.",
    ]


def exploding() -> tuple[list[str], bool]:
    """F15: the norm of the gradient with and without the division."""
    module = _language_model()
    job = module.job(batch_size=32)
    torch.manual_seed(0)
    model = job.model()
    batch = module.block_batch(module.corpus(validation=False), list(range(0, 64 * 7, 7)))
    rows, kept = [], []
    for steps in (1, 4, 8, 16, 32, 64):
        parts = [{name: value.chunk(steps)[i] for name, value in batch.items()} for i in range(steps)]
        norms = []
        for divisor in (steps, 1):
            model.zero_grad()
            for part in parts:
                (job.loss(model, part).total / part["labels"].numel() / divisor).backward()
            norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        kept.append(norms[0])
        rows.append([f"{steps} x {64 // steps}", f"{norms[0]:.4f}", f"{norms[1]:.3f}", f"{norms[1] / norms[0]:.2f}"])
    held = max(kept) / min(kept) - 1 < 1e-4
    head = ("steps", "norm, mean over the batch", "norm, division forgotten", "ratio")
    return ["The same model, one batch of 64 cut into more and more micro-batches:", "", *table(head, rows)], held


_FIGURES: dict[str, Callable[[], list[str] | tuple[list[str], bool]]] = {
    "F1, F7, F8: accumulation and mixed precision": activations,
    "F2: segments": segments,
    "F3: mixed precision": precision,
    "F4: 7B on one A100": seven_billion,
    "F5, F6: BERT-base on an RTX 3060": largest_batches,
    "F12: activations of a model of 1B parameters": one_billion,
    "F13: many accumulation steps": many_steps,
    "F14: noise": noise,
    "F15: norms": exploding,
}
_MEASURED = ("F13", "F14", "F15")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="F", help="figures that begin so, such as F6")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/claims.md")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    held = True
    for name, figure in _FIGURES.items():
        if arguments.only != "F" and arguments.only not in re.split(r"[,: ]+", name):
            continue
        made = figure()
        lines, fine = made if isinstance(made, tuple) else (made, True)
        held &= fine
        label = "CPU-measured" if name.startswith(_MEASURED) else "Modelled"
        lines = [
            f"{label}, `python benchmarks/claims.py --only {name.partition(':')[0].partition(',')[0]}`.",
            "",
            *lines,
        ]
        print(f"\n## {name}\n", *lines, sep="\n", flush=True)
        if arguments.write:
            write(name, lines)
    return 0 if held else 1


def write(name: str, lines: list[str]) -> None:
    """Put one section into the page."""
    known = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:] if PAGE.exists() else []
    sections = {section.partition("\n")[0]: section.partition("\n")[2].strip() for section in known}
    sections[name] = "\n".join(lines)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    head = [
        "# The claimed figures, predicted or measured",
        "",
        f"`python benchmarks/claims.py --write`, {versions}, one thread of {os.cpu_count()}. Sizes in GiB unless said. "
        "What follows is said in [docs/claims.md](../../docs/claims.md).",
    ]
    text = "\n".join(head) + "".join(f"\n\n## {one}\n\n{sections[one]}" for one in _FIGURES if one in sections) + "\n"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
