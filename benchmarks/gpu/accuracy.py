"""Predicted against measured peaks for a fixed matrix of jobs on a GPU.

Run ``python benchmarks/gpu/accuracy.py --write`` on a machine with a GPU; elsewhere it says so and ends. Every row is
one job under one plan: ``estimate`` and ``measure`` run the same step, so the difference is the error of the
prediction. Signed: negative is the dangerous side. The CPU's table is ``benchmarks/cpu_accuracy.py``.
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


def rows() -> list[Row]:
    """The matrix."""
    mlp, gpt, bert = perceptron(4096, 12), language_model(768, 12, 1024, 50257), classifier(1024, 24, 512)
    batch = 32
    matrix = []
    for name, job in (("perceptron", mlp), ("gpt", gpt), ("bert", bert)):
        blocks = () if name == "perceptron" else checkpointing.blocks(job.model())
        for precision in ("32-true", "bf16-mixed", "16-mixed"):
            for size in (batch // 2, batch // 4, batch // 4 - 1):
                plan = Plan(batch_size=batch, micro_batch_size=size, precision=precision)
                matrix.append(Row(name, job, plan))
            for policy in ("full", "keep-matmul", "keep-attention", "offload") if blocks else ():
                recompute = checkpointing.blocks(job.model(), policy)
                plan = Plan(batch_size=batch, micro_batch_size=batch // 2, precision=precision, recompute=recompute)
                matrix.append(Row(name, job, plan))
    return matrix


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/accuracy_cuda.md")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU found: nothing measured")
        return 0
    warnings.filterwarnings("ignore", category=FutureWarning)
    device = hardware.resolve("auto")
    lines = [
        "| job | precision | micro-batch | recompute | predicted | measured | error |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    errors = []
    for row in rows():
        predicted = estimate(row.job, row.plan, device).peak_allocated_bytes
        measured = measure(row.job, row.plan, device).peak_allocated_bytes
        errors.append(predicted / measured - 1)
        recompute = row.plan.recompute
        form = f"{len(recompute)} blocks, {recompute[0].policy}" if recompute else "-"
        lines.append(
            f"| {row.name} | {row.plan.precision} | {row.plan.micro_batch_size} of {row.plan.batch_size} | {form} "
            f"| {sizes.text(predicted)} | {sizes.text(measured)} | {errors[-1]:+.3%} |"
        )
        print(lines[-1], flush=True)
    lines.append(f"\nWorst error {max(errors, key=abs):+.3%} in {len(errors)} rows.")
    print(lines[-1])
    if arguments.write:
        header = (
            f"# Predicted against measured peak allocated bytes, {torch.cuda.get_device_name()}\n\nGPU-measured, "
            f"`python benchmarks/gpu/accuracy.py --write`, torch {torch.__version__}, Python "
            f"{platform.python_version()}.\n\n"
        )
        path = Path(__file__).parents[1] / "results" / "accuracy_cuda.md"
        path.write_text(header + "\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
