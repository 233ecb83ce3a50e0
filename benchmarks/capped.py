"""Does a plan made for a hard memory cap run inside of it, every time, and does it use what it is allowed?

Run ``python benchmarks/capped.py [--times 5] [--steps 5] [--write]``. Each run is a fresh child under ``RLIMIT_DATA``
with recovery off, so that a plan that is too large fails instead of shrinking. CPU-measured.
"""

import argparse
import platform
import sys
import tempfile
from pathlib import Path

import torch

from snugfit import capped, estimate, plan, sizes
from snugfit.memory.measuring import measure
from snugfit.targets import load_target

TARGET = str(Path(__file__).parents[1] / "examples" / "python_lm.py")
BATCH_SIZE = 32
ALLOWED = (200 * sizes.MIB, 300 * sizes.MIB, 400 * sizes.MIB)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/capped.md")
    arguments = parser.parse_args()
    job = load_target(TARGET)
    lines = [
        "| allowed | plan | predicted peak | measured peak | error | of allowed | one sample more | runs completed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    held = True
    for allowed in ALLOWED:
        found = plan(job, "cpu", batch_size=BATCH_SIZE, budget=allowed)
        measured = measure(job, found.plan, "cpu").peak_allocated_bytes
        error = found.memory.peak_allocated_bytes / measured - 1
        larger = _one_more(job, found, allowed)
        completed = sum(_runs(found.plan, allowed, arguments.steps) for _ in range(arguments.times))
        share = measured / allowed
        held = held and completed == arguments.times and abs(error) <= 0.01 and (share >= 0.85 or larger != "fits")
        recompute = f", {len(found.plan.recompute)} segments recomputed" if found.plan.recompute else ""
        shape = f"{found.plan.accumulation_steps} x {found.plan.micro_batch_size}{recompute}"
        predicted = sizes.text(found.memory.peak_allocated_bytes)
        lines.append(
            f"| {sizes.text(allowed)} | {shape} | {predicted} | {sizes.text(measured)} | {error:+.3%} | {share:.0%} "
            f"| {larger} | {completed} of {arguments.times} |"
        )
        print(lines[-1], flush=True)
    if arguments.write:
        header = (
            f"# Plans under a hard cap\n\nCPU-measured, `python benchmarks/capped.py --times {arguments.times} --steps "
            f"{arguments.steps} --write`, python_lm, batch {BATCH_SIZE}, torch {torch.__version__}, Python "
            f"{platform.python_version()}.\n\n"
        )
        path = Path(__file__).parent / "results" / "capped.md"
        path.write_text(header + "\n".join(lines) + "\n", encoding="utf-8")
    return 0 if held else 1


def _one_more(job, found, allowed: int) -> str:
    """Whether a micro-batch of one sample more would be predicted to fit."""
    import dataclasses

    size = found.plan.micro_batch_size
    if size == BATCH_SIZE:
        return "whole batch"
    larger = dataclasses.replace(found.plan, micro_batch_size=size + 1)
    return "fits" if estimate(job, larger, "cpu").fits(allowed) else "does not fit"


def _runs(chosen, allowed: int, steps: int) -> bool:
    """One capped run in a fresh child; whether it completed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        chosen.save(path)
        cap = capped.measure_baseline(TARGET) + capped.RESERVE_BYTES + allowed
        status = capped.run_capped(
            TARGET, path, cap_bytes=cap, steps=steps, run_dir=Path(folder) / "run", recover=False
        )
    return status == 0


if __name__ == "__main__":
    sys.exit(main())
