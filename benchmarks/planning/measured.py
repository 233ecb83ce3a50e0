"""snugfit's plans and the usual forms of checkpointing, executed on the real CPU: peak and time of each.

Run ``python benchmarks/planning/measured.py [--rounds 9] [--quick] [--write]``. At the peak of every usual form, the
planner's chain is solved for the fastest plan that needs no more; both are run. Peaks are measured from the profiler's
memory events; times are the median over rounds of (plan / plain within one round). CPU-measured; exit status 1 when a
usual form is faster than snugfit's plan at equal peak by more than two plain plans differ from each other.
"""

import argparse
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpt2  # noqa: E402

import snugfit  # noqa: E402
from snugfit import Job, Plan, Segment, hardware, sizes  # noqa: E402
from snugfit.memory import tracing  # noqa: E402
from snugfit.planning import probing, solver, units  # noqa: E402
from snugfit.planning.families import Chain, Family  # noqa: E402
from snugfit.training import checkpointing  # noqa: E402

BATCH = 16
PLAIN = Plan(batch_size=BATCH, micro_batch_size=BATCH)


def usual_forms(job: Job) -> dict[str, tuple[Segment, ...]]:
    """What people write by hand."""
    model = tracing.skeleton(job)
    blocks = [segment.modules[0] for segment in checkpointing.blocks(model)]
    found = {
        "every block": checkpointing.blocks(model),
        "every 2. block": checkpointing.every(model, 2),
        "every 4. block": checkpointing.every(model, 4),
        "sqrt segments": checkpointing.segments(model),
    }
    for n in (2, 3, 4):
        length = len(blocks) // n
        cut = [tuple(blocks[k * length : (k + 1) * length]) for k in range(n - 1)]  # the last one keeps everything
        found[f"checkpoint_sequential, {n} segments"] = tuple(Segment(names) for names in cut)
    return found


class Chooser:
    """The planner's chain of a job on this machine, and what it says of budgets."""

    def __init__(self, job: Job) -> None:
        self.job, self.device = job, hardware.resolve("cpu")
        model = tracing.skeleton(job)
        traced = Plan(batch_size=2 * BATCH, micro_batch_size=BATCH)
        self.family = Family(probing.probe(job, traced, self.device, model, units.named(model), (BATCH, BATCH)))
        self.chain: Chain = self.family.chain(BATCH, 1)
        self.frontier = solver.frontier(self.chain.units, floor_bytes=self.chain.floor_bytes)

    def within(self, peak_bytes: int) -> Plan:
        """The fastest plan whose own trace needs no more; by how much the chain is off is learnt from each trace."""
        off, best, seen = 0, None, set()
        if self.frontier.within(peak_bytes) is None:
            off = self.frontier.points[0][0] - peak_bytes
        while (solution := self.frontier.within(peak_bytes + off)) is not None and solution not in seen:
            seen.add(solution)
            plan = replace(PLAIN, recompute=self.family.segments(self.chain, solution.choices))
            traced = snugfit.estimate(self.job, plan, "cpu").peak_allocated_bytes
            if traced <= peak_bytes and (best is None or solution.extra_ns < best[0]):
                best = solution.extra_ns, plan
            off = solution.needed_bytes - traced
        if best is None:
            raise SystemExit(f"no plan of {sizes.text(peak_bytes)} was found")
        return best[1]


class Stepper:
    """One engine whose steps are timed."""

    def __init__(self, job: Job, plan: Plan) -> None:
        self.engine, self.batch = snugfit.build(job, plan, "cpu"), job.batch(BATCH)
        for _ in range(2):
            self.engine.step(self.batch)

    def seconds(self) -> float:
        start = time.perf_counter()
        self.engine.step(self.batch)
        return time.perf_counter() - start


def ratios(steppers: dict[str, Stepper], rounds: int) -> dict[str, float]:
    """Median over rounds of each time over that of the plain steps around it."""
    found = defaultdict(list)
    for _ in range(rounds):
        before = steppers["plain"].seconds()
        for name, stepper in steppers.items():
            spent = stepper.seconds()
            after = steppers["plain"].seconds()
            found[name].append(spent / statistics.mean((before, after)))
            before = after
    return {name: statistics.median(values) for name, values in found.items()}


def table(rounds: int, names: Sequence[str] | None) -> tuple[list[str], bool]:
    job = gpt2.job(gpt2.TINY)
    chooser = Chooser(job)
    plans = {"plain": PLAIN, "plain again": PLAIN}
    forms = {name: form for name, form in usual_forms(job).items() if names is None or name in names}
    for name, form in forms.items():
        plans[name] = replace(PLAIN, recompute=form)
        peak = snugfit.estimate(job, plans[name], "cpu").peak_allocated_bytes
        plans[f"snugfit for {name}"] = chooser.within(peak)
    peaks = {name: snugfit.measure(job, plan, "cpu").peak_allocated_bytes for name, plan in plans.items()}
    times = ratios({name: Stepper(job, plan) for name, plan in plans.items()}, rounds)
    band = abs(times["plain again"] - 1) + 0.02
    lines = ["| form | peak | time | snugfit's peak | time | segments |", "|---" * 6 + "|"]
    held = True
    for name in forms:
        ours = f"snugfit for {name}"
        held = held and peaks[ours] <= peaks[name] and times[ours] <= times[name] + band
        segments = len(plans[ours].recompute)
        lines.append(
            f"| {name} | {sizes.text(peaks[name])} | {times[name] - 1:+.1%} | {sizes.text(peaks[ours])} "
            f"| {times[ours] - 1:+.1%} | {segments} |"
        )
        print(lines[-1], flush=True)
    lines += ["", f"Plain: {sizes.text(peaks['plain'])}; plain against plain {times['plain again'] - 1:+.1%}."]
    print(lines[-1])
    return lines, held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="two forms")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/planning_measured.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines, held = table(arguments.rounds, ("every block", "sqrt segments") if arguments.quick else None)
    if arguments.write:
        shape = gpt2.TINY
        text = [
            "# The planner's choices, executed",
            "",
            f"CPU-measured, `python benchmarks/planning/measured.py --rounds {arguments.rounds} --write`, torch "
            f"{torch.__version__}, Python {platform.python_version()}, one thread, load {os.getloadavg()[0]:.1f}. GPT "
            f"of {shape.layers} layers, width {shape.width}, {BATCH} x {shape.context} tokens, fp32, AdamW. Times "
            "beside a plain step.",
            "",
            *lines,
            "",
            f"Never a higher peak, never slower beyond the band: {'held' if held else 'NOT held'}.",
            "",
        ]
        (ROOT / "benchmarks" / "results" / "planning_measured.md").write_text("\n".join(text), encoding="utf-8")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
