"""What snugfit's planner chooses for a GPT-2-small step, beside what its peers choose, on one cost and memory model.

Run ``python benchmarks/planning/peers.py [--quick] [--slow] [--write]`` (needs ``requirements.txt``). The model is the
chain that snugfit measures in its trace of the step: batch 8 x 1024, bf16-mixed, fused attention, dropout 0.1, A100,
with and without the loss in chunks. Peers decide with their own code; what they decide is priced here, with the bytes
and the times of the same trace. Modelled; exit status 1 when a peer is faster than snugfit at equal peak.
"""

import argparse
import math
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(Path(__file__).resolve().parent)]

import gpt2  # noqa: E402
from operations import DEVICE, Region, of_block  # noqa: E402
from partitioner import partitioned  # noqa: E402
from rotor import rotor  # noqa: E402
from sac_peer import decided, graph_of  # noqa: E402

from chains import simulate  # noqa: E402
from snugfit import Job, Plan, estimate  # noqa: E402
from snugfit.memory import tracing  # noqa: E402
from snugfit.planning import nested, options, probing, solver, units  # noqa: E402
from snugfit.planning.chain import NOTHING, Solution, Span, Unit  # noqa: E402
from snugfit.planning.families import Chain, Family  # noqa: E402

BLOCKS, BATCH, CHUNKS = gpt2.SMALL.layers, 8, 8
GIB = 2**30


@dataclass(frozen=True)
class Point:
    """One plan of one planner."""

    planner: str
    plan: str
    saved_bytes: int
    peak_bytes: int
    extra_ns: int


@dataclass(frozen=True)
class Model:
    """The step as snugfit's planner sees it, and the operations of one of its blocks."""

    plan: Plan

    @cached_property
    def family(self) -> Family:
        model = tracing.skeleton(self.job)
        return Family(probing.probe(self.job, self.plan, DEVICE, model, units.named(model), (BATCH, BATCH)))

    @property
    def job(self) -> Job:
        return gpt2.job(gpt2.SMALL, can_chunk=self.plan.loss_chunks > 1)

    @cached_property
    def chain(self) -> Chain:
        return self.family.chain(BATCH, 1)

    @property
    def units(self) -> tuple[Unit, ...]:
        """Embedding, blocks, and norm with the loss."""
        return self.chain.units

    @cached_property
    def block(self) -> Region:
        return of_block(self.family, self.chain.names[BLOCKS // 2])

    def point(self, planner: str, plan: str, chain: Sequence[Unit], spans: Sequence[Span]) -> Point:
        peak, extra = simulate(chain, spans, self.chain.floor_bytes)
        return Point(planner, plan, simulate(of_saved_bytes(chain), spans)[0], peak, extra)

    def shown(self, extra_ns: int) -> str:
        return f"{extra_ns / self.chain.plain_ns:+.2%}"


def spans_of(options: Sequence[str]) -> list[Span]:
    """Embedding, blocks by these options, head."""
    return [Span(k, k, name) for k, name in enumerate((NOTHING, *options, NOTHING))]


def in_runs(lengths: Sequence[int]) -> list[Span]:
    """Blocks in segments of these lengths; a negative one keeps everything."""
    spans, first = [Span(0, 0, NOTHING)], 1
    for length in lengths:
        whole = [Span(first, first, "full")] if length == 1 else [Span(first, first + length - 1)]
        spans += [Span(first + k, first + k, NOTHING) for k in range(-length)] if length < 0 else whole
        first += abs(length)
    return [*spans, Span(first, first, NOTHING)]


def usual(model: Model) -> Iterator[Point]:
    """What people write by hand."""

    def point(planner: str, plan: str, spans: Sequence[Span]) -> Point:
        return model.point(planner, plan, model.units, spans)

    yield point("nothing", "", spans_of([NOTHING] * BLOCKS))
    yield point("every block", "", spans_of(["full"] * BLOCKS))
    yield point("every block", "keep-matmul", spans_of(["keep-matmul"] * BLOCKS))
    for k in (2, 3, 4):
        chosen = ["full" if number % k == 0 else NOTHING for number in range(BLOCKS)]
        yield point(f"every {k}. block", "", spans_of(chosen))
    root = round(math.sqrt(BLOCKS))
    yield point("sqrt segments", f"{root} segments", in_runs([BLOCKS // root] * root))
    for n in (2, 3, 4, 6, 12):
        lengths = [*([BLOCKS // n] * (n - 1)), -(BLOCKS // n)]  # its last segment is not checkpointed
        yield point("checkpoint_sequential", f"{n} segments", in_runs(lengths))


def rotors(model: Model) -> Iterator[Point]:
    """Its plans for budgets between the least that any plan needs and what plain training needs."""
    highest = solver.frontier(model.units).points[-1][0]
    lowest = nested.frontier(model.units).points[0][0]
    for k in range(9):
        budget = lowest + (highest - lowest) * k // 8
        spans = rotor(model.units, budget)
        if spans is not None:
            yield model.point("rotor", f"budget {budget / GIB:.2f} GiB", model.units, spans)


def with_own(unit: Unit, kept: int, backward: int, extra_ns: int) -> Unit:
    """A block with an option of somebody else's beside that of keeping everything."""
    own = replace(unit.plain, name="own", kept_bytes=kept, backward_bytes=backward, extra_ns=extra_ns)
    return replace(unit, options=(unit.plain, own))


def sac(model: Model, decisions: Sequence[tuple[float, dict[str, float], float]]) -> Iterator[Point]:
    """A share of a module is dropped as torch's selective checkpointing can do it, by the best set of operations.

    In backward a block is taken to need the least that any of snugfit's options needs.
    """
    for budget, discarded, seconds in decisions:
        blocks = list(model.units[1:-1])
        for name, share in discarded.items():
            _, _, number, *part = name.split(".")
            region = model.block.inside(part[0]) if part else model.block
            dropped, unit = region.dropping(share), blocks[int(number)]
            least = min(option.backward_bytes for option in unit.options)
            known = unit.options[-1]  # of a part that was dropped before, or as it was
            known = known if known.name == "own" else unit.plain
            kept, extra = known.kept_bytes - dropped.freed_bytes, known.extra_ns + dropped.again_ns
            blocks[int(number)] = with_own(unit, kept, least, extra)
        chain = (model.units[0], *blocks, model.units[-1])
        spans = spans_of([unit.options[-1].name if len(unit.options) == 2 else NOTHING for unit in blocks])
        plan = f"budget {budget:.1f} GiB, solved in {seconds:.1f} s"
        yield model.point("sac_milp", plan, chain, spans)


def partitions(model: Model, shares: Sequence[float]) -> Iterator[Point]:
    """Its times are those of the whole model; its peak the higher of the head's and its backward's.

    With the whole budget it saves what plain training does; what it saves less with others is taken off the blocks.
    """
    held = model.units[1].forward_static_bytes - model.units[1].input_bytes
    whole = partitioned(gpt2.SMALL, BATCH, 1.0).saved_bytes
    for share in shares:
        found = partitioned(gpt2.SMALL, BATCH, share)
        less = -(-(whole - found.saved_bytes) // BLOCKS)
        blocks = (with_own(unit, unit.plain.kept_bytes - less, 0, 0) for unit in model.units[1:-1])
        chain = (model.units[0], *blocks, model.units[-1])
        kept = model.point("torch's partitioner", f"budget {share:.2f}", chain, spans_of(["own"] * BLOCKS))
        yield replace(kept, peak_bytes=max(kept.peak_bytes, held + found.backward_bytes), extra_ns=found.extra_ns)


def of_saved_bytes(units: Sequence[Unit]) -> tuple[Unit, ...]:
    """The chain whose peak is what it has saved at the end of forward, or while a run is recomputed."""
    flat = []
    for unit in units:
        options = tuple(
            replace(option, forward_bytes=0, backward_bytes=option.kept_bytes if unit is units[-1] else 0)
            for option in unit.options
        )
        flat.append(replace(unit, options=options, forward_static_bytes=0, backward_static_bytes=0))
    return tuple(flat)


def compared(model: Model, points: Sequence[Point]) -> tuple[list[str], list[str]]:
    """A line for every plan of a peer with the largest gap at the end, and what is wrong."""
    floor = model.chain.floor_bytes
    whole = solver.frontier(model.units, floor_bytes=floor)
    deeper = nested.frontier(model.units, floor_bytes=floor, budget_bytes=whole.points[0][0] - 1)
    saved = solver.frontier(of_saved_bytes(model.units))
    lines = [
        "| planner | plan | saved | peak | extra time | snugfit at this peak | snugfit at these saved bytes |",
        "|---" * 7 + "|",
    ]
    wrong, gaps, infeasible = [], [], []
    for one in points:
        here = whole.within(one.peak_bytes) or deeper.within(one.peak_bytes)
        there = saved.within(one.saved_bytes)
        shown = [model.shown(found.extra_ns) if found else "does not fit" for found in (here, there)]
        lines.append(
            f"| {one.planner} | {one.plan} | {one.saved_bytes / GIB:.2f} GiB | {one.peak_bytes / GIB:.2f} GiB "
            f"| {model.shown(one.extra_ns)} | {shown[0]} | {shown[1]} |"
        )
        name = f"{one.planner} {one.plan}".rstrip()
        if here is None:
            infeasible.append(name)
        else:
            gaps.append(((one.extra_ns - here.extra_ns) / (model.chain.plain_ns + here.extra_ns), name))
            if here.extra_ns > one.extra_ns:
                wrong.append(name)
    gap, name = max(gaps)
    lines += ["", f"Largest gap at equal peak: {name}, {gap:.1%} of the step."]
    lines.append("No peer is faster at equal peak." if not wrong else f"Faster at equal peak: {'; '.join(wrong)}.")
    if infeasible:
        lines.append(f"Below the least that snugfit's plans need: {'; '.join(infeasible)}.")
    return lines, wrong


def curve(model: Model) -> list[str]:
    """Saved bytes against extra time of snugfit's plans, some forty of them evenly chosen, and the peaks of these."""
    found = solver.frontier(of_saved_bytes(model.units))
    lines = ["| saved bytes | extra ns | extra time | peak of this plan | plan |", "|---" * 5 + "|"]
    for index in range(0, len(found.points), max(len(found.points) // 40, 1)):
        solution = found.solution(index)
        peak, extra = simulate(model.units, solution.choices, model.chain.floor_bytes)
        lines.append(
            f"| {solution.needed_bytes} | {extra} | {model.shown(extra)} | {peak} | {described(model, solution)} |"
        )
    return lines


def described(model: Model, solution: Solution) -> str:
    return options.describe(model.family.segments(model.chain, solution.choices))


def traced(model: Model) -> list[str]:
    """The chain's peaks beside those of traces of the very plans."""
    found = solver.frontier(model.units, floor_bytes=model.chain.floor_bytes)
    lines = ["| plan | peak by the chain | by its own trace |", "|---" * 3 + "|"]
    for index in range(0, len(found.points), max(len(found.points) // 6, 1)):
        solution = found.solution(index)
        plan = replace(model.plan, recompute=model.family.segments(model.chain, solution.choices))
        peak = estimate(model.job, plan, DEVICE).peak_allocated_bytes
        lines.append(f"| {described(model, solution)} | {solution.needed_bytes} | {peak} |")
    return lines


def section(chunks: int, decisions: Sequence[tuple[float, dict[str, float], float]]) -> tuple[list[str], list[str]]:
    model = Model(Plan(batch_size=BATCH, micro_batch_size=BATCH, precision="bf16-mixed", loss_chunks=chunks))
    shares = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
    points = [*usual(model), *rotors(model), *partitions(model, shares), *sac(model, decisions)]
    lines, wrong = compared(model, points)
    print(*lines, sep="\n", flush=True)
    title = f"## {f'Loss in {chunks} chunks' if chunks > 1 else 'Plain loss'}"
    own = ["", "The curve (bytes and ns):", "", *curve(model), "", "Some of its plans, traced:", "", *traced(model), ""]
    return [title, "", *lines, *own], wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without sac_milp")
    parser.add_argument("--slow", action="store_true", help="sac_milp at 3.5 GiB too, which takes minutes")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/planning_peers.md")
    arguments = parser.parse_args()
    decisions = []
    if not arguments.quick:
        graph = graph_of(gpt2.SMALL, BATCH)
        for budget in (4.0, *((3.5,) if arguments.slow else ()), 2.5, 2.0, 1.5):
            found = decided(graph, budget * GIB)
            if found is not None:
                decisions.append((budget, dict(found.discarded), found.seconds))
    text, wrong = [], []
    for chunks in (1, CHUNKS):
        lines, more = section(chunks, decisions)
        text, wrong = [*text, *lines], [*wrong, *more]
    if arguments.write:
        given = "".join(f" --{name}" for name in ("quick", "slow") if getattr(arguments, name))
        head = [
            "# snugfit's planner beside its peers",
            "",
            f"Modelled, `python benchmarks/planning/peers.py{given} --write`, torch {torch.__version__}, Python "
            f"{platform.python_version()}, load {os.getloadavg()[0]:.1f}. GPT-2-small, batch 8 x 1024, bf16-mixed, "
            f"fused attention, residual dropout 0.1, AdamW; {DEVICE.name}, rates assumed from its peaks.",
            "",
            "Bytes and times are those of snugfit's trace of the step, for everybody; the update is part of every "
            "peak. `sac_milp` and the partitioner decide with torch's own code on the real shape, by the same times. "
            "What `sac_milp` drops is executed as torch's selective checkpointing does it: of all sets of a module's "
            "operations the fastest one that frees the share that it asks for; each operation that is not kept runs "
            "again, up to the last one that saves anything. In backward its blocks get the least that any of "
            "snugfit's options needs. The partitioner's peak is what is alive while its backward graph runs in its "
            "own order; its operations cost what they cost in eager mode: compiled, they are fused, here as in what "
            "is not recomputed. Saved bytes are those at the end of forward, or of a run of blocks while it is "
            "recomputed.",
            "",
        ]
        (ROOT / "benchmarks" / "results" / "planning_peers.md").write_text("\n".join([*head, *text]), encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
