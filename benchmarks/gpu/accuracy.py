"""Predicted against measured peaks for a fixed matrix of jobs, on the CPU or on a GPU.

Run ``python benchmarks/gpu/accuracy.py --device cpu --quick`` (CI does) or ``--device cuda --write`` on a machine with
a GPU. Every row is one job under one plan: ``estimate`` and ``measure`` run the same step, so the difference is the
error of the prediction. Signed: negative is the dangerous side. Rows of the CPU say nothing about CUDA.
"""

import argparse
import platform
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from snugfit import Job, Plan, hardware, sizes
from snugfit.memory.measuring import measure
from snugfit.memory.tracing import estimate
from snugfit.training import checkpointing

CPU_LIMIT = 0.01
"Largest error that CI accepts on the CPU; on a GPU the table itself is the result."


class Row(NamedTuple):
    """One job under one plan."""

    name: str
    job: Job
    plan: Plan


def perceptron(width: int, depth: int) -> Job:
    """Linear layers and ReLU, mean squared error."""

    def model() -> nn.Module:
        return nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())))

    return Job(
        model,
        lambda module, batch: F.mse_loss(module(batch["inputs"]), batch["targets"]),
        lambda module: torch.optim.AdamW(module.parameters()),
        lambda n: {"inputs": torch.zeros(n, width), "targets": torch.zeros(n, width)},
    )


def language_model(width: int, depth: int, length: int, vocabulary: int = 512) -> Job:
    """GPT-2 of transformers, built from its configuration, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=length,
        n_embd=width,
        n_layer=depth,
        n_head=max(1, width // 64),
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )

    def loss(model: Callable[..., torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    return Job(
        lambda: GPT2LMHeadModel(config),
        loss,
        lambda module: torch.optim.AdamW(module.parameters()),
        lambda n: torch.zeros(n, length, dtype=torch.long),
        max_grad_norm=1.0,
    )


def classifier(hidden: int, layers: int, length: int) -> Job:
    """BERT of transformers, sequence classification, with its dropout."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64, intermediate_size=4 * hidden
    )
    return Job(
        lambda: BertForSequenceClassification(config),
        lambda model, batch: model(**batch).loss,
        lambda module: torch.optim.AdamW(module.parameters()),
        lambda n: {"input_ids": torch.ones(n, length, dtype=torch.long), "labels": torch.zeros(n, dtype=torch.long)},
    )


def rows(scale: str) -> list[Row]:
    """The matrix: the same jobs small (CPU) or at their real size (GPU)."""
    if scale == "small":
        mlp, gpt, bert = perceptron(256, 6), language_model(128, 4, 128), classifier(128, 3, 64)
        batch, mixed = 16, ()
    else:
        mlp, gpt, bert = perceptron(4096, 12), language_model(768, 12, 1024, 50257), classifier(1024, 24, 512)
        batch, mixed = 32, ("bf16-mixed", "16-mixed")
    matrix = []
    for name, job in (("perceptron", mlp), ("gpt", gpt), ("bert", bert)):
        blocks = () if name == "perceptron" else tuple(checkpointing.blocks(job.model()))
        for precision in ("32-true", *mixed):
            for size in (batch // 2, batch // 4, batch // 4 - 1):
                plan = Plan(batch_size=batch, micro_batch_size=size, precision=precision)
                matrix.append(Row(name, job, plan))
            if blocks:
                plan = Plan(batch_size=batch, micro_batch_size=batch // 2, precision=precision, recompute=blocks)
                matrix.append(Row(name, job, plan))
    return matrix


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="every third row only")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/accuracy_<device>.md")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no GPU found: nothing measured")
        return 0
    warnings.filterwarnings("ignore", category=FutureWarning)
    device = hardware.resolve("auto" if arguments.device == "cuda" else "cpu")
    label = "GPU-measured" if arguments.device == "cuda" else "CPU-measured"
    lines = [
        "| job | precision | micro-batch | recompute | predicted | measured | error |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    errors = []
    matrix = rows("small" if arguments.device == "cpu" else "real")
    for row in matrix[:: 3 if arguments.quick else 1]:
        predicted = estimate(row.job, row.plan, device).peak_allocated_bytes
        measured = measure(row.job, row.plan, device).peak_allocated_bytes
        errors.append(predicted / measured - 1)
        recompute = f"{len(row.plan.recompute)} blocks" if row.plan.recompute else "-"
        lines.append(
            f"| {row.name} | {row.plan.precision} | {row.plan.micro_batch_size} of {row.plan.batch_size} | {recompute} "
            f"| {sizes.text(predicted)} | {sizes.text(measured)} | {errors[-1]:+.3%} |"
        )
        print(lines[-1], flush=True)
    worst = max(errors, key=abs)
    lines.append(f"\nWorst error {worst:+.3%} in {len(errors)} rows.")
    print(lines[-1])
    if arguments.write:
        name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
        command = f"`python benchmarks/gpu/accuracy.py --device {arguments.device} --write`"
        header = (
            f"# Predicted against measured peak allocated bytes, {name}\n\n{label}, {command}, "
            f"torch {torch.__version__}, Python {platform.python_version()}.\n\n"
        )
        path = Path(__file__).parents[1] / "results" / f"accuracy_{arguments.device}.md"
        path.write_text(header + "\n".join(lines) + "\n", encoding="utf-8")
    return 0 if arguments.device == "cuda" or abs(worst) <= CPU_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
