"""snugfit's plans and those of its peers, executed on the real CPU: peak and time of each.

Run ``python benchmarks/planning/measured.py [--rounds 5] [--quick] [--write]`` (needs ``requirements.txt``). A peer's
plan is run as its own library runs it: the usual forms and rotor's as checkpointed segments, ``sac_milp``'s by torch's
selective checkpointing, the partitioner's compiled (its graphs run operation by operation, without fused kernels). Its
measured peak is then snugfit's budget, and the fastest plan whose own trace needs no more is run as well; times rest on
a calibration. Peaks are measured from the profiler's memory events; times are medians over rounds of a step's own CPU
time over that of the plain steps around it. CPU-measured; exit status 1 when a peer is faster than snugfit's plan by
more than plain steps differ from each other, or snugfit's peak is higher.
"""

import argparse
import os
import platform
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpt2  # noqa: E402
from operations import of_block  # noqa: E402
from rotor import rotor  # noqa: E402
from sac_peer import decided, graph_of  # noqa: E402

import snugfit  # noqa: E402
from snugfit import Job, Plan, Segment, hardware, sizes  # noqa: E402
from snugfit.memory import tracing  # noqa: E402
from snugfit.planning import calibration, probing, solver, units  # noqa: E402
from snugfit.planning.families import Family  # noqa: E402
from snugfit.training import checkpointing  # noqa: E402

SHAPE = gpt2.Shape(layers=6, width=128, heads=4, context=128, vocabulary=512, dropout=0.0)
BATCH = 16
PLAIN = Plan(batch_size=BATCH, micro_batch_size=BATCH)
_MOST_TRACES = 4
"Of plans that are tried for one budget."
_SLACK = 0.02
"Of a step's time, beside what plain steps differ by."


@dataclass(frozen=True)
class Contestant:
    """A job and a plan to run it under; compiled under a budget of the partitioner's where there is one."""

    job: Job
    plan: Plan = PLAIN
    share: float | None = None


class Selective(nn.Module):
    """A block that torch's selective checkpointing recomputes but for the results of some calls."""

    def __init__(self, block: nn.Module, kept: frozenset[tuple[str, int]]) -> None:
        super().__init__()
        self.block, self.kept = block, kept

    def forward(self, x: Tensor) -> Tensor:
        counts = Counter[tuple[bool, str]]()

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            name = op._schema.name.partition("::")[2]
            call = name, counts[context.is_recompute, name]
            counts[context.is_recompute, name] += 1
            return CheckpointPolicy.MUST_SAVE if call in self.kept else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(self.block, x, use_reentrant=False, context_fn=contexts)


class Chooser:
    """snugfit's chain of the job on this machine, and what it says of budgets."""

    def __init__(self, job: Job, device: hardware.Device) -> None:
        self.job, self.device, model = job, device, tracing.skeleton(job)
        traced = Plan(batch_size=2 * BATCH, micro_batch_size=BATCH)
        self.family = Family(probing.probe(job, traced, device, model, units.named(model), (BATCH, BATCH)))
        self.chain = self.family.chain(BATCH, 1)
        self.frontier = solver.frontier(self.chain.units, floor_bytes=self.chain.floor_bytes)

    def within(self, peak_bytes: int) -> Plan | None:
        """The fastest plan whose own trace needs no more; by how much the chain is off is learnt from each trace."""
        off = 0
        for _ in range(_MOST_TRACES):
            solution = self.frontier.within(peak_bytes + off)
            if solution is None:
                return None
            plan = replace(PLAIN, recompute=self.family.segments(self.chain, solution.choices))
            traced = snugfit.estimate(self.job, plan, "cpu").peak_allocated_bytes
            if traced <= peak_bytes:
                return plan
            off = min(off, solution.needed_bytes - traced) - 1
        return None


def usual_forms(job: Job) -> Iterator[tuple[str, Contestant]]:
    """What people write by hand."""
    model = tracing.skeleton(job)
    blocks = [segment.modules[0] for segment in checkpointing.blocks(model)]
    forms = {
        "every block": checkpointing.blocks(model),
        "every 2. block": checkpointing.every(model, 2),
        "sqrt segments": checkpointing.segments(model),
    }
    for n in (2, 3):
        length = len(blocks) // n
        cut = [tuple(blocks[k * length : (k + 1) * length]) for k in range(n - 1)]  # the last one keeps everything
        forms[f"checkpoint_sequential, {n} segments"] = tuple(Segment(names) for names in cut)
    for name, form in forms.items():
        yield name, Contestant(job, replace(PLAIN, recompute=form))


def rotors(job: Job, chooser: Chooser) -> Iterator[tuple[str, Contestant]]:
    """Between the least and the whole, by its own plan of the same chain."""
    least, *_, (whole, _) = chooser.frontier.points
    for share in (0.3, 0.6):
        spans = rotor(chooser.chain.units, round(least[0] + share * (whole - least[0])))
        if spans is not None:
            segments = chooser.family.segments(chooser.chain, spans)
            yield f"rotor, {share:.0%} between least and whole", Contestant(job, replace(PLAIN, recompute=segments))


def selective(chooser: Chooser) -> Iterator[tuple[str, Contestant]]:
    """What ``sac_milp`` drops of whole blocks, done by the best set of operations that torch can keep."""
    block = of_block(chooser.family, f"blocks.{SHAPE.layers // 2}")
    graph = graph_of(SHAPE, BATCH, chooser.device, autocasts=False)
    plain = snugfit.estimate(chooser.job, PLAIN, "cpu").peak_allocated_bytes
    for share in (0.8, 0.6):
        found = decided(graph, share * plain)
        if found is not None:
            dropped = {name.split(".", 1)[1]: part for name, part in found.discarded.items() if name.count(".") == 2}
            kept = {name: block.dropping(part).kept for name, part in dropped.items()}
            yield f"sac_milp, {share:.0%} of the plain peak", Contestant(_rewritten(kept))


def _rewritten(kept: dict[str, frozenset[tuple[str, int]]]) -> Job:
    def model() -> nn.Module:
        found = gpt2.GPT(SHAPE)
        for name, results in kept.items():
            found.set_submodule(name, Selective(found.get_submodule(name), results))
        return found

    return replace(gpt2.job(SHAPE), model=model)


def partitions() -> Iterator[tuple[str, Contestant]]:
    job = gpt2.job(SHAPE)

    def model() -> nn.Module:
        return torch.compile(gpt2.GPT(SHAPE), backend="aot_eager_decomp_partition")

    for share in (0.5, 0.2):
        yield f"torch's partitioner, budget {share}", Contestant(replace(job, model=model), share=share)


class Stepper:
    """One engine whose steps are timed."""

    def __init__(self, contestant: Contestant) -> None:
        _under(contestant)
        self.engine = snugfit.build(contestant.job, contestant.plan, "cpu")
        self.batch = contestant.job.batch(BATCH)
        for _ in range(2):
            self.engine.step(self.batch)

    def seconds(self) -> float:
        start = time.process_time()
        self.engine.step(self.batch)
        return time.process_time() - start


def _under(contestant: Contestant) -> None:
    """Compile what is compiled from now on under a contestant's budget."""
    torch._dynamo.reset()
    torch._functorch.config.activation_memory_budget = 1.0 if contestant.share is None else contestant.share


def peak_of(contestant: Contestant) -> int:
    _under(contestant)
    return snugfit.measure(contestant.job, contestant.plan, "cpu").peak_allocated_bytes


def relative_times(steppers: dict[str, Stepper], rounds: int) -> dict[str, float]:
    """Median over rounds of each time over that of the plain steps around it."""
    found = defaultdict(list)
    for _ in range(rounds):
        before = steppers["plain"].seconds()
        for name, stepper in steppers.items():
            spent = stepper.seconds()
            after = steppers["plain"].seconds()
            found[name].append(2 * spent / (before + after))
            before = after
    return {name: statistics.median(values) for name, values in found.items()}


def table(rounds: int, *, quick: bool) -> tuple[list[str], bool]:
    job = gpt2.job(SHAPE)
    chooser = Chooser(job, calibration.calibrated("cpu", calibration.calibrate("cpu")))
    peers = dict([*usual_forms(job), *rotors(job, chooser), *selective(chooser), *partitions()])
    if quick:
        peers = {name: peers[name] for name in list(peers)[::4]}
    peaks = {"plain": peak_of(Contestant(job))}
    running = {"plain": Stepper(Contestant(job)), "plain again": Stepper(Contestant(job))}
    plans: dict[str, Plan | None] = {}
    for name, peer in peers.items():
        peaks[name] = peak_of(peer)
        running[name] = Stepper(peer)
        plans[name] = plan = chooser.within(peaks[name])
        if plan is not None:
            peaks[f"snugfit for {name}"] = peak_of(Contestant(job, plan))
            running[f"snugfit for {name}"] = Stepper(Contestant(job, plan))
        print(f"{name}: {sizes.text(peaks[name])}", flush=True)
    times = relative_times(running, rounds)
    band = abs(times["plain again"] - 1) + _SLACK
    lines = ["| peer | peak | time | snugfit's peak | time | its plan |", "|---" * 6 + "|"]
    held = True
    for name, plan in plans.items():
        begun = f"| {name} | {sizes.text(peaks[name])} | {times[name] - 1:+.1%} |"
        if plan is None:
            lines.append(f"{begun} does not fit | | |")
            continue
        ours = f"snugfit for {name}"
        held = held and peaks[ours] <= peaks[name] and times[ours] <= times[name] + band
        lines.append(f"{begun} {sizes.text(peaks[ours])} | {times[ours] - 1:+.1%} | {_shape(plan)} |")
    print(*lines, sep="\n")
    lines += ["", f"Plain: {sizes.text(peaks['plain'])}; plain against plain {times['plain again'] - 1:+.1%}."]
    return lines, held


def _shape(plan: Plan) -> str:
    """Segments in a few words: modules of each, and policies."""
    kinds = Counter((len(segment.modules), segment.policy) for segment in plan.recompute)
    return ", ".join(f"{count} x {length} {policy}" for (length, policy), count in sorted(kinds.items())) or "nothing"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="every fourth peer")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/planning_measured.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    lines, held = table(arguments.rounds, quick=arguments.quick)
    verdict = f"Never a higher peak, never slower beyond the band: {'held' if held else 'NOT held'}."
    print(lines[-1], verdict, f"{time.perf_counter() - start:.0f} s", sep="\n")
    if arguments.write:
        text = [
            "# snugfit's plans and those of its peers, executed",
            "",
            f"CPU-measured, `python benchmarks/planning/measured.py --rounds {arguments.rounds} --write`, torch "
            f"{torch.__version__}, Python {platform.python_version()}, one thread, load {os.getloadavg()[0]:.1f}. GPT "
            f"of {SHAPE.layers} layers, width {SHAPE.width}, {BATCH} x {SHAPE.context} tokens, fp32, AdamW. Times are "
            "beside a plain step. The partitioner's graphs are compiled, and run operation by operation.",
            "",
            *lines,
            "",
            verdict,
            "",
        ]
        (ROOT / "benchmarks" / "results" / "planning_measured.md").write_text("\n".join(text), encoding="utf-8")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
