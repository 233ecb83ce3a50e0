"""Compiled steps on the CPU: what is saved and the peak, predicted beside what the compiler's own code takes.

Run ``python benchmarks/compiled.py [--quick] [--write]``; it needs a C++ compiler, for ``torch.compile`` generates
code. Saved bytes are counted by hooks on saved tensors, beside weights and inputs, and are to be equal; the peak is
that of the profiler's allocations in one forward and backward. Convolutions are left out of the target: Inductor saves
copies of their operands in channels_last, which a trace does not make. Exit status 1 when saved bytes differ.
"""

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import snugfit
from snugfit.memory import torch_private
from snugfit.memory.steps import compilation

Run = Callable[[], Tensor]
WITHIN = 0.01
LOSS_AND_SEED = 2 * 4
"In a trace the loss and the gradient that backward starts from are alive as well."


class Block(nn.Module):
    """A layer of a transformer, with both kinds of normalisation."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + F.dropout(self.out(attended), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_2(x)))), self.dropout, self.training)


class LanguageModel(nn.Module):
    """Two layers between an embedding and a head of the same weights, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(500, 64), nn.Sequential(*(Block(64, 0.1) for _ in range(2)))
        self.head = nn.Linear(64, 500, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.embed(ids))).float().flatten(0, 1), ids.flatten())


def blocks(number: int, dropout: float, *, whole: bool = False, bf16: bool = False) -> Callable[[], tuple[Any, Run]]:
    def build() -> tuple[Any, Run]:
        model = nn.Sequential(*(Block(64, dropout) for _ in range(number)))
        x = torch.zeros(8, 128, 64)
        run = torch.compile(model) if whole else nn.Sequential(*(torch.compile(block) for block in model))

        def loss() -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
                return run(x).float().sum()

        return (model, x), loss

    return build


def language_model() -> tuple[Any, Run]:
    model, ids = LanguageModel(), torch.zeros(4, 64, dtype=torch.long)
    compiled = torch.compile(model)
    return (model, ids), lambda: compiled(ids)


def loss_alone() -> tuple[Any, Run]:
    model, x, labels = nn.Linear(64, 500), torch.zeros(256, 64), torch.zeros(256, dtype=torch.long)
    compiled = torch.compile(lambda logits, labels: F.cross_entropy(logits.float(), labels))
    return (model, x, labels), lambda: compiled(model(x), labels)


CASES = {
    "a block": blocks(1, 0.1),
    "three blocks, each compiled": blocks(3, 0.1),
    "three blocks, each compiled, no dropout": blocks(3, 0.0),
    "two blocks as one": blocks(2, 0.1, whole=True),
    "three blocks as one, no dropout": blocks(3, 0.0, whole=True),
    "two blocks as one, bf16 autocast": blocks(2, 0.1, whole=True, bf16=True),
    "language model with tied weights": language_model,
    "cross entropy alone": loss_alone,
}


def measured(build: Callable[[], tuple[Any, Run]]) -> tuple[int, int]:
    """Saved bytes and peak of a real step, after it has been compiled."""
    torch.compiler.reset()
    (model, *inputs), run = build()
    run().backward()
    outside = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *inputs)}
    sizes: dict[int, int] = {}
    held = []

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    held.clear()
    model.zero_grad()
    with torch_private.profiled_memory("snugfit") as events:
        run().backward()
    alive: dict[int, int] = {}
    peak = 0
    for event in events:
        if event.num_bytes > 0:
            alive[event.address] = event.num_bytes
            peak = max(peak, sum(alive.values()))
        else:
            alive.pop(event.address, None)
    return sum(sizes.values()), peak


def predicted(build: Callable[[], tuple[Any, Run]]) -> tuple[int, int]:
    """The same two numbers from a trace."""

    def make_step() -> Callable[[], None]:
        (model, *_), run = build()

        def step() -> None:
            run().backward()
            model.zero_grad()

        return step

    report = snugfit.trace(make_step, "cpu")
    assert compilation.EAGER not in report.assumptions
    held = report.at("forward end")
    outside = held.get("parameter", 0) + held.get("input", 0)
    return held["saved"] + held.get("autocast", 0) - LOSS_AND_SEED, report.peak_allocated_bytes - outside


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first two cases")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/compiled.md")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    lines = ["| step | saved, measured | predicted | peak, measured | predicted | error |", "|---|---|---|---|---|---|"]
    held = True
    for name, build in list(CASES.items())[: 2 if arguments.quick else None]:
        (saved, peak), (our_saved, our_peak) = measured(build), predicted(build)
        held = held and saved == our_saved and abs(our_peak / peak - 1) <= WITHIN
        lines.append(
            f"| {name} | {saved:,} | {our_saved:,} | {peak:,} | {our_peak:,} | {100 * (our_peak / peak - 1):+.1f} % |"
        )
    lines += ["", f"Target (saved bytes equal, peak within {WITHIN:.0%}): " + ("met." if held else "missed.")]
    print("\n".join(lines))
    if arguments.write:
        text = [
            "# Compiled steps",
            "",
            f"CPU-measured, `python benchmarks/compiled.py --write`, torch {torch.__version__}, Inductor with its C++ "
            f"code, {torch.get_num_threads()} thread(s). Bytes beside weights and inputs.",
            "",
            *lines,
            "",
        ]
        (Path(__file__).parent / "results" / "compiled.md").write_text("\n".join(text), encoding="utf-8")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
