"""Is the chosen plan the fastest? The planner's choice against the best of an exhaustive measured search.

Run ``python benchmarks/planning/exhaustive.py [--jobs 1,3-5] [--rounds 7] [--rates FILE] [--quick] [--write]``. The
jobs are those of ``order.py`` whose memory depends on the plan, each with a budget between the least that any plan
needs and what the whole batch needs. The device is calibrated once. The grid is every precision that the device is fast
at, some even micro-batches down to an eighth of the batch, and: nothing recomputed, every block, the parts of every
block, every block but its products, every second block, runs of blocks (their square root), and two runs. All of it is
run for a step; from the fastest on it is asked whether a plan fits, until those within 15 % of the fastest that does
are known. These take turns, and what falls 10 % behind drops out; the time of a step is the median of its own CPU time
with one thread, which other processes do not lengthen. Then the best and the chosen plan run against each other, by two
new engines each, whose mean counts: the most that two engines of one plan differ by is the A/A band. The planner may
also run its best three itself (``--measure 3``). Target: within 5 % of the best and the band, by prediction alone.
``--write`` puts each job on the results page when it is done and keeps the rows of the others; ``--missing`` leaves out
what is there already. CPU-measured; exit status 1 when the target is missed.
"""

import argparse
import platform
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from order import jobs
from torch import nn

import snugfit
from snugfit import Job, Plan, estimate, hardware, plan, sizes
from snugfit.memory import tracing
from snugfit.planning import calibration, options, trying_out, units
from snugfit.planning.choosing import Search
from snugfit.plans import Segment
from snugfit.rates import Rates
from snugfit.training import checkpointing

PAGE = Path(__file__).resolve().parents[1] / "results" / "planning_exhaustive.md"
WITHIN = 0.05
CLOSE, BEHIND = 1.15, 1.10
"Of what the fastest takes: what is run again, and what drops out after a few rounds."
_FEW_ROUNDS = 2
PARTS = (0.25, 0.45, 0.65)
"Where between the least and the whole the budgets lie, in turn."
BATCH_SIZES = {
    "GPT, width 128, 6 layers": 16,
    "MLP, width 512, 8 layers": 2048,
    "ResNet-like, 32 channels, BatchNorm": 32,
    "BERT-like, width 128, 4 layers, dropout": 16,
    "transformer, 256 tokens, width 64": 8,
    "MLP, width 128, 24 layers": 1024,
    "conv net, 64 channels, GroupNorm": 16,
    "ConvNeXt-like, 32 channels": 16,
}
"Of the jobs whose memory depends on the plan."


@dataclass(frozen=True)
class Answer:
    """What the search found for one job."""

    name: str
    budget_bytes: int
    close: int
    "Candidates that fit and are about as fast as the fastest of these."
    candidates: int
    chosen: str
    predicted_s: float
    chosen_s: float
    best: str
    best_s: float
    band: float
    measured: str
    measured_s: float

    @property
    def behind(self) -> float:
        """How much longer the chosen plan takes than the best one."""
        return self.chosen_s / self.best_s - 1

    @property
    def held(self) -> bool:
        """Whether the target is met."""
        return self.behind <= WITHIN + self.band

    def row(self) -> str:
        return (
            f"| {self.name} | {sizes.text(self.budget_bytes)} | {self.close} of {self.candidates} | {self.chosen} "
            f"| {self.predicted_s * 1e3:.1f} ms | {self.chosen_s * 1e3:.1f} ms | {self.best} "
            f"| {self.best_s * 1e3:.1f} ms | {self.behind:+.1%} | {self.band:.1%} | {'yes' if self.held else 'no'} "
            f"| {self.measured} | {self.measured_s / self.best_s - 1:+.1%} |"
        )


HEAD = (
    "| job | budget | close and fit, of the grid | chosen | predicted | measured | best | measured | behind | A/A band "
    "| held | chosen with --measure 3 | behind |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
)
HELD = [cell.strip() for cell in HEAD[0].split("|")].index("held")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", help="numbers of jobs from 1, such as 1,3-5; else all of them")
    parser.add_argument("--missing", action="store_true", help="only jobs that are not on the results page yet")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rates", type=Path, help="what snugfit calibrate wrote; else this calibrates first")
    parser.add_argument(
        "--quick", action="store_true", help="two rounds, and the first two jobs unless --jobs are given"
    )
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/planning_exhaustive.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rates = calibration.calibrate("cpu") if arguments.rates is None else Rates.load(arguments.rates)
    device = calibration.calibrated("cpu", rates)
    rounds = 2 if arguments.quick else arguments.rounds
    rows = _rows_of_page(head := _head(rounds, rates))
    known, own = jobs(), {}
    print(*HEAD, sep="\n")
    for number in _numbers(arguments.jobs or ("1,2" if arguments.quick else f"1-{len(BATCH_SIZES)}")):
        name = list(BATCH_SIZES)[number - 1]
        if arguments.missing and name in rows:
            continue
        start = time.perf_counter()
        answer = _answer(name, known[name][0], BATCH_SIZES[name], device, PARTS[(number - 1) % len(PARTS)], rounds)
        own[name] = answer.row()
        print(own[name], f"{time.perf_counter() - start:.0f} s", sep="\n", flush=True)
        if arguments.write:
            rows[name] = own[name]
            PAGE.write_text("\n".join([*head, *HEAD, *_in_order(rows), "", _verdict(rows), ""]), encoding="utf-8")
    shown = rows if arguments.write else own
    print(_verdict(shown))
    return 1 if any(_missed(row) for row in shown.values()) else 0


def _numbers(text: str) -> list[int]:
    """Numbers and ranges of them."""
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return [number for first, *last in ends for number in range(first, (last or [first])[0] + 1)]


def _head(rounds: int, rates: Rates) -> list[str]:
    """What the page says of how its rows were made; rows that were made in another way are not kept."""
    return [
        "# The chosen plan against the best of an exhaustive measured search",
        "",
        f"CPU-measured, `OMP_NUM_THREADS=1 python benchmarks/planning/exhaustive.py --rounds {rounds} --write`, torch "
        f"{torch.__version__}, Python {platform.python_version()}, one thread of {rates.processor}. Times are medians "
        "of a step's own CPU time; plans: micro-batches x samples, segments by policy, runs of so many modules. "
        "Behind: how much longer than the best of the grid and of the planner's own.",
        "",
    ]


def _rows_of_page(head: list[str]) -> dict[str, str]:
    """The rows that the page has already, by job."""
    lines = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    if lines[: len(head)] != head:
        return {}
    return {name: line for line in lines for name in BATCH_SIZES if line.startswith(f"| {name} |")}


def _in_order(rows: dict[str, str]) -> list[str]:
    return [rows[name] for name in BATCH_SIZES if name in rows]


def _missed(row: str) -> bool:
    return [cell.strip() for cell in row.split("|")][HELD] == "no"


def _verdict(rows: dict[str, str]) -> str:
    missed = [name for name, row in rows.items() if _missed(row)]
    return (
        f"{len(rows) - len(missed)} of {len(rows)} chosen plans are within {WITHIN:.0%} of the best and the band. "
        f"Target: {'missed by ' + '; '.join(missed) if missed else 'met'}."
    )


def _answer(name: str, job: Job, batch_size: int, device: hardware.Device, part: float, rounds: int) -> Answer:
    budget = _budget(job, batch_size, device, part)
    found = plan(job, device, batch_size, budget)
    tried = trying_out.measured(job, found, device, 3, windows=2)
    grid = _grid(job, found.plan, device)
    close = _close(job, grid, device, budget)
    ours = f"{_shape(found.plan)} (chosen)"
    theirs = f"{_shape(tried.plan)} (measured)"
    own = {ours: found.plan, theirs: tried.plan}
    took = _taken(job, {**close, **own}, rounds, stay=tuple(own))
    best = min(took, key=took.__getitem__)
    duel = {ours: found.plan, theirs: tried.plan, best: {**close, **own}[best]}
    first, second = _taken_twice(job, duel, rounds)
    return Answer(
        name=name,
        budget_bytes=budget,
        close=len(close),
        candidates=len(grid),
        chosen=_shape(found.plan),
        predicted_s=found.step_time_s,
        chosen_s=(first[ours] + second[ours]) / 2,
        best=best,
        best_s=(first[best] + second[best]) / 2,
        band=max(abs(first[key] / second[key] - 1) for key in duel),
        measured=_shape(tried.plan),
        measured_s=(first[theirs] + second[theirs]) / 2,
    )


def _budget(job: Job, batch_size: int, device: hardware.Device, part: float) -> int:
    search = Search(job, device, batch_size, None, 1, {}, (), lambda _: None)
    with tracing.collector_off():
        least = search.joint.needed_bytes(search.joint.smallest(search.first))
    whole = estimate(job, search.first, device).needed_bytes
    return least + round(part * (whole - least))


def _grid(job: Job, like: Plan, device: hardware.Device) -> dict[str, Plan]:
    """All candidates by name; what is no micro-batch or recomputation is as in the chosen plan."""
    model = job.model()
    forms = {
        "nothing": (),
        "blocks": checkpointing.blocks(model),
        "parts": _parts(model),
        "keep-matmul": checkpointing.blocks(model, "keep-matmul"),
        "every 2. block": checkpointing.every(model, 2),
        "runs": checkpointing.segments(model),
        "two runs": checkpointing.segments(model, 2),
    }
    cut = {-(-like.batch_size // number) for number in (1, 2, 3, 4, 8)}
    return {
        f"{options.short(precision)}, {-(-like.batch_size // size)} x {size}, {name}": replace(
            like, precision=precision, micro_batch_size=size, recompute=form
        )
        for precision, _ in options.precisions(device, {})
        for size in sorted(cut, reverse=True)
        for name, form in forms.items()
    }


def _close(job: Job, grid: dict[str, Plan], device: hardware.Device, budget: int) -> dict[str, Plan]:
    """The candidates that are predicted to fit and take about as long as the fastest of them, by one step of each.

    What fits at one micro-batch size fits at every smaller one, so few of them have to be traced.
    """
    once = _taken(job, grid, 1)
    close: dict[str, Plan] = {}
    largest: dict[tuple[str, tuple[Segment, ...]], int] = {}
    least: dict[tuple[str, tuple[Segment, ...]], int] = {}
    for name in sorted(grid, key=once.__getitem__):
        one = grid[name]
        form, size = (one.precision, one.recompute), one.micro_batch_size
        if close and once[name] > CLOSE * once[next(iter(close))]:
            break
        if size >= least.get(form, one.batch_size + 1):
            continue
        if size <= largest.get(form, 0) or estimate(job, one, device).fits(budget):
            largest[form] = max(size, largest.get(form, 0))
            close[name] = one
        else:
            least[form] = size
    return close


def _parts(model: nn.Module) -> tuple[Segment, ...]:
    """Every part of every block as a segment of its own; the blocks themselves where they have no parts."""
    modules = dict(model.named_modules())
    found: list[Segment] = []
    for segment in checkpointing.blocks(model):
        (name,) = segment.modules
        options = units.options_of(modules[name], offload=False)
        found += options.of(name, units.CHILDREN if units.CHILDREN in options.segments else units.FULL)
    return tuple(found)


def _taken(job: Job, plans: dict[str, Plan], rounds: int, stay: tuple[str, ...] | None = None) -> dict[str, float]:
    """The median of the seconds of a step of each plan, which take turns; the first step is not counted.

    Args:
        job: What is trained.
        plans: How, by name.
        rounds: Steps of each.
        stay: Names of those that run to the end; others drop out when they are clearly slower. None: all of them.
    """
    batch = job.batch(next(iter(plans.values())).batch_size)
    engines = {name: snugfit.build(job, one, "cpu") for name, one in plans.items()}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(rounds + 1):
        for name, engine in engines.items():
            start = time.thread_time()
            engine.step(batch)
            if turn:
                seconds[name].append(time.thread_time() - start)
        if turn >= _FEW_ROUNDS and stay is not None:
            least = min(min(seconds[name]) for name in engines)
            engines = {k: one for k, one in engines.items() if k in stay or min(seconds[k]) <= BEHIND * least}
    return {name: statistics.median(seconds[name]) for name in engines}


def _taken_twice(job: Job, plans: dict[str, Plan], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """The same by two engines of each plan: where its tensors lie in memory makes one slower than the other."""
    both = {(name, turn): one for turn in range(2) for name, one in plans.items()}
    took = _taken(job, {f"{turn} {name}": one for (name, turn), one in both.items()}, rounds)
    first, second = ({name: took[f"{turn} {name}"] for name in plans} for turn in range(2))
    return first, second


def _shape(chosen: Plan) -> str:
    """A plan in a few words."""
    parts = [f"{options.short(chosen.precision)}, {chosen.accumulation_steps} x {chosen.micro_batch_size}"]
    in_runs = [segment for segment in chosen.recompute if len(segment.modules) > 1]
    policies = Counter(segment.policy for segment in chosen.recompute if len(segment.modules) == 1)
    parts += [f"{count} {policy}" for policy, count in sorted(policies.items())]
    for policy in sorted({segment.policy for segment in in_runs}):
        lengths = [len(segment.modules) for segment in in_runs if segment.policy == policy]
        parts.append(f"{len(lengths)} runs of {sum(lengths)}" + (f" {policy}" if policy != "full" else ""))
    if chosen.optimizer_impl != "as-given":
        parts.append(chosen.optimizer_impl)
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
