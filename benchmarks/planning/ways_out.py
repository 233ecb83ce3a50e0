"""Ways out for Llama-2-7B where full fine-tuning does not fit: known answers, what a real trace says, and the cost.

Run ``python benchmarks/planning/ways_out.py [--quick] [--write]``; the results go to ``benchmarks/results``.
"""

import argparse
import gc
import os
import platform
import resource
import sys
import time
import warnings
from pathlib import Path

import peft
import torch
import torchao
import transformers

from snugfit import Plan, checkpointing, estimate, hardware, sizes
from snugfit.integrations.known_models import known_job
from snugfit.memory import tracing
from snugfit.planning.ways_out import WayOut, ways_out

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S, LIMIT_BYTES = 12.0, sizes.GIB
"""CPU seconds of all five rows, where nothing else runs: what three plain estimates of the job took when it was set.
They take 7 s now; the rows, of which each is a program of its own, became quicker by less."""
SETTINGS = (
    ("rtx-3090", "24GiB", 2048, 1024, {"lora", "host-offload", "fsdp"}),
    ("a100-sxm-80gb", "80GiB", 2048, 64, {"8bit-optimizer", "lora", "host-offload", "fsdp"}),
)
"Card, budget, tokens, batch size, and the ways that are expected to fit."


def table(found: tuple[WayOut, ...]) -> list[str]:
    """The rows as Markdown."""
    lines = ["| way | needs | cards | fits | time | snugfit runs it | what changes |", "|---|---|---|---|---|---|---|"]
    for way in found:
        needed = "-" if way.needed_bytes is None else sizes.text(way.needed_bytes)
        relative = "-" if way.relative_time is None else f"{way.relative_time:.2f}"
        fits, runs = ("yes" if value else "no" for value in (way.fits, way.executed_by_snugfit))
        lines.append(f"| {way.name} | {needed} | {way.world_size} | {fits} | {relative} | {runs} | {way.change} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first card only, without the real trace")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/planning_ways_out.md")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    lines, held = [], True
    for name, budget, tokens, batch_size, expected in SETTINGS[: 1 if arguments.quick else None]:
        card = hardware.resolve(name)
        job = known_job("llama-2-7b", seq=tokens)
        model = tracing.skeleton(job)
        blocks = checkpointing.blocks(model)
        plan = Plan(batch_size=batch_size, micro_batch_size=1, precision="bf16-mixed", recompute=blocks)
        gc.collect()
        start = time.process_time()
        found = ways_out(job, plan, card, sizes.parse(budget), model=model)
        seconds = time.process_time() - start
        fitting = {way.name for way in found if way.fits}
        start = time.process_time()
        estimate(job, plan, card)
        alone = time.process_time() - start
        lines += ["", f"## {name}, budget {budget}, {tokens} tokens, batch size {batch_size}", "", *table(found), ""]
        held &= fitting == expected and seconds <= LIMIT_S
        lines += [
            f"{seconds:.1f} s of CPU time for all rows (limit {LIMIT_S:.0f}), {seconds / alone:.1f} times that of one "
            f"estimate of the job ({alone:.1f} s)."
        ]
        if not arguments.quick:
            way = next(way for way in found if way.name == "8bit-optimizer")
            traced = estimate(way.job, way.plan, card)
            allocated = way.memory.peak_allocated_bytes / traced.peak_allocated_bytes
            held &= 0.98 <= allocated <= 1.05
            lines += ["", f"The 8-bit job, really traced, needs {sizes.text(traced.needed_bytes)}: row / trace"]
            lines += [f"{allocated:.3f} allocated, {way.needed_bytes / traced.needed_bytes:.3f} needed."]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * sizes.KIB
    held &= peak <= LIMIT_BYTES
    lines += ["", f"Largest resident set {sizes.text(peak)} (limit {sizes.text(LIMIT_BYTES)})."]
    lines += ["", f"All targets {'met' if held else 'NOT met'}."]
    print(*lines, sep="\n")
    if arguments.write:
        versions = ", ".join(f"{m.__name__} {m.__version__}" for m in (torch, transformers, peft, torchao))
        head = [
            "# Ways out when nothing fits",
            "",
            f"Modelled, `python benchmarks/planning/ways_out.py --write`, {versions}, "
            f"Python {platform.python_version()}, one thread, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}.",
        ]
        target = ROOT / "benchmarks" / "results" / "planning_ways_out.md"
        target.write_text("\n".join([*head, *lines, ""]), encoding="utf-8")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
