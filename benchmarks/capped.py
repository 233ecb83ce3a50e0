"""Does a plan made for a hard memory cap run inside of it at the first try, and does it use what it is allowed?

Run ``python benchmarks/capped.py [--pairs 40] [--steps 2] [--times 5] [--workers 2] [--quick] [--write]``. Forty pairs
of a small job (``capped_jobs.py``) and a cap are drawn, what the cap allows evenly between the least that any plan of
the job needs and the peak of its whole batch with nothing recomputed. The planner's choice is run in a fresh child
under ``RLIMIT_DATA``, with recovery off, so that a plan that is too large fails instead of shrinking. Where less than
85 % is used, the next larger candidate is run under the same cap: of all plans that the planner knows to be faster, the
one that needs least; where none is, the same plan at the next larger even micro-batch. It must fail, or its tensors
alone take more than what is allowed. Then three caps of ``examples/python_lm.py``, ``--times`` runs each. CPU-measured;
exit status 1 when a target is missed.
"""

import argparse
import contextlib
import io
import itertools
import json
import multiprocessing
import os
import platform
import random
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from snugfit import Job, Plan, capped, estimate, runs, sizes
from snugfit.errors import InfeasibleError
from snugfit.memory import tracing
from snugfit.memory.measuring import measure
from snugfit.planning import solver
from snugfit.planning.choosing import Search
from snugfit.planning.learning import family_of
from snugfit.planning.plan_report import PlanReport
from snugfit.targets import load_target

sys.path.insert(0, str(Path(__file__).parent))
import capped_jobs

SEED = 6
USED = 0.85
FASTER = 0.99
"Ratio of modelled times from which on a plan counts as faster."
FILE = str(Path(__file__).parent / "capped_jobs.py")
LANGUAGE = str(Path(__file__).parents[1] / "examples" / "python_lm.py")
LANGUAGE_BATCH_SIZE = 32
LANGUAGE_ALLOWED = (200 * sizes.MIB, 300 * sizes.MIB, 400 * sizes.MIB)


@dataclass(frozen=True)
class Outcome:
    """What a plan did under a cap."""

    target: str
    job: Job
    plan: Plan
    allowed_bytes: int
    status: int
    resident_bytes: int
    "Most that was resident above the start of the run; 0 if it did not end."
    tensor_bytes: int
    "Peak of tensors, measured without a cap."

    @property
    def share(self) -> float:
        """Share of what is allowed that tensors took."""
        return self.tensor_bytes / self.allowed_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--times", type=int, default=5, help="runs of each cap of python_lm")
    parser.add_argument("--workers", type=int, default=2, help="pairs that run at the same time")
    parser.add_argument("--only", type=int, help="one of the pairs, by its number")
    parser.add_argument("--quick", action="store_true", help="five pairs, python_lm once")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/capped.md")
    arguments = parser.parse_args()
    start = time.perf_counter()
    pairs = _drawn(5 if arguments.quick else arguments.pairs)
    if arguments.only is not None:
        pairs = [pairs[arguments.only - 1]]
    drawn, failures = _run_drawn(pairs, arguments.steps, arguments.workers)
    minutes = (time.perf_counter() - start) / 60
    repeated: list[str] = []
    if arguments.only is None:
        repeated, missed = _run_repeated(1 if arguments.quick else arguments.times, arguments.steps)
        failures += missed
    verdict = f"{len(pairs)} pairs in {minutes:.0f} minutes. Targets: {'missed: ' if failures else 'met.'}"
    verdict += "; ".join(failures)
    print(verdict)
    if arguments.write:
        _write(arguments, drawn, repeated, verdict)
    return 1 if failures else 0


def _drawn(count: int) -> list[tuple[str, int, float]]:
    """Jobs, batch sizes, and where between the least and the whole what is allowed lies."""
    draw = random.Random(SEED)
    names: list[str] = []
    while len(names) < count:
        names += draw.sample(capped_jobs.NAMES, len(capped_jobs.NAMES))
    return [(name, draw.choice(capped_jobs.BATCH_SIZES), draw.random()) for name in names[:count]]


def _run_drawn(pairs: list[tuple[str, int, float]], steps: int, workers: int) -> tuple[list[str], list[str]]:
    """The rows of the table, and what was missed."""
    lines = [
        "| job | batch | cap | allowed | plan | predicted peak | measured peak | resident | used | result "
        "| next larger candidate |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    failures: list[str] = []
    errors: list[float] = []
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for line, failure, error in pool.map(_row, pairs, itertools.repeat(steps)):
            lines.append(line)
            failures += [failure] if failure else []
            errors.append(error)
            print(line, flush=True)
    lines += ["", f"Predicted against measured peaks: {min(errors):+.2%} to {max(errors):+.2%}."]
    print(lines[-1])
    return lines, failures


def _row(pair: tuple[str, int, float], steps: int) -> tuple[str, str, float]:
    """The row of a pair, what was missed, and the error of the predicted peak."""
    name, batch_size, part = pair
    target = f"{FILE}:{name}"
    job = load_target(target)
    least, whole = _range(name, batch_size)
    allowed = least + round(part * (whole - least))
    begun = f"| {name} | {batch_size} | {sizes.text(_cap(target, allowed))} | {sizes.text(allowed)} "
    try:
        search, found = _planned(job, batch_size, _budget(target, allowed))
    except InfeasibleError as error:
        return f"{begun}| {error.what} | | | | | | |", f"{name}: no plan for {sizes.text(allowed)}", 0.0
    ran = _outcome(target, job, found.plan, allowed, steps)
    beside = "" if ran.share >= USED else _next_larger(search, found, ran, steps)
    failure = ""
    if ran.status:
        failure = f"{name}: {_said(ran.status)}"
    elif beside.startswith("runs"):
        failure = f"{name}: {ran.share:.0%} used, and the next larger candidate {beside}"
    row = (
        f"{begun}| {_shape(found.plan)} | {sizes.text(found.memory.peak_allocated_bytes)} "
        f"| {sizes.text(ran.tensor_bytes)} | {sizes.text(ran.resident_bytes)} | {ran.share:.0%} "
        f"| {_said(ran.status)} | {beside} |"
    )
    return row, failure, found.memory.peak_allocated_bytes / ran.tensor_bytes - 1


@cache
def _range(name: str, batch_size: int) -> tuple[int, int]:
    """The peaks of the smallest plan of a job, and of its whole batch with nothing recomputed, in bytes."""
    job = load_target(f"{FILE}:{name}")
    with tracing.collector_off():
        search = Search(job, "cpu", batch_size, None, 1, {}, (), lambda _: None)
        joint = search.joint
        least = min(joint.smallest(like).allocated_bytes for like in joint.variants(search.first))
        return least, max(least, estimate(job, search.first, "cpu").peak_allocated_bytes)


def _planned(job: Job, batch_size: int, budget: int) -> tuple[Search, PlanReport]:
    """As ``snugfit.plan`` does, and the search itself."""
    search = Search(job, "cpu", batch_size, budget, 1, {}, (), lambda _: None)
    with tracing.collector_off():
        return search, search.run()


def _next_larger(search: Search, found: PlanReport, ran: Outcome, steps: int) -> str:
    """What happens to the next larger candidate, see the top of this file."""
    larger = _least_of_faster(search, found) or _larger_micro_batch(search, found.plan)
    if larger is None:
        return "there is none"
    other = _outcome(ran.target, ran.job, larger, ran.allowed_bytes, steps)
    if other.status:
        return f"{_shape(larger)}: {_said(other.status)}"
    if other.share > 1:
        return f"{_shape(larger)}: takes {other.share:.0%} of what is allowed"
    return f"runs: {_shape(larger)}, {other.share:.0%}"


def _least_of_faster(search: Search, found: PlanReport) -> Plan | None:
    joint, best = search.joint, None
    for size in joint.sizes(family_of(found.plan)):
        plan = replace(found.plan, micro_batch_size=size, recompute=())
        chain = joint.chain(plan)
        points = solver.frontier(chain.units, floor_bytes=chain.floor_bytes, runs=joint.runs)
        for index in range(len(points.points)):
            solution = points.solution(index)
            choice = joint.choice(plan, chain, solution.choices, solution.extra_ns)
            is_larger = choice.allocated_bytes > found.memory.peak_allocated_bytes
            if is_larger and choice.step_time_s < FASTER * found.step_time_s:  # the first: points need more and more
                if best is None or joint.needed_bytes(choice) < joint.needed_bytes(best):
                    best = choice
                break
    return None if best is None else best.plan


def _larger_micro_batch(search: Search, plan: Plan) -> Plan | None:
    above = [size for size in search.joint.sizes(family_of(plan)) if size > plan.micro_batch_size]
    return replace(plan, micro_batch_size=min(above)) if above else None


def _outcome(target: str, job: Job, plan: Plan, allowed: int, steps: int) -> Outcome:
    """One run in a fresh child under the cap that allows so much, and one without for the peak of tensors."""
    with tempfile.TemporaryDirectory() as folder:
        path, run_dir = Path(folder) / "plan.json", Path(folder) / "run"
        plan.save(path)
        with _silent():
            status = capped.run_capped(
                target, path, cap_bytes=_cap(target, allowed), steps=steps, run_dir=run_dir, recover=False
            )
        report = run_dir / runs.REPORT
        resident = json.loads(report.read_text(encoding="utf-8"))["peak_memory_bytes"] if report.is_file() else 0
    with contextlib.redirect_stderr(io.StringIO()):
        tensors = measure(job, plan, "cpu").peak_allocated_bytes
    return Outcome(target, job, plan, allowed, status, resident, tensors)


@contextlib.contextmanager
def _silent():
    """Let a child print to nowhere: progress bars, and errors that are expected."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@cache
def _baseline(target: str) -> int:
    return capped.measure_baseline(target)


def _cap(target: str, allowed: int) -> int:
    return _baseline(target) + capped.RESERVE_BYTES + allowed


def _budget(target: str, allowed: int) -> int:
    return capped.budget_under_cap(_cap(target, allowed), _baseline(target))


def _said(status: int) -> str:
    known = {capped.EXIT_DONE: "completed", capped.EXIT_OUT_OF_MEMORY: "out of memory"}
    return known.get(status, f"exit status {status}")


def _shape(plan: Plan) -> str:
    """A plan in a few words."""
    parts = [f"{plan.accumulation_steps} x {plan.micro_batch_size}"]
    in_runs = [segment for segment in plan.recompute if len(segment.modules) > 1]
    policies = [segment.policy for segment in plan.recompute if len(segment.modules) == 1]
    parts += [f"{policies.count(policy)} {policy}" for policy in sorted(set(policies))]
    if in_runs:
        parts.append(f"{len(in_runs)} runs of {sum(len(segment.modules) for segment in in_runs)}")
    if plan.optimizer_impl != "as-given":
        parts.append(plan.optimizer_impl)
    if plan.loss_chunks > 1:
        parts.append(f"{plan.loss_chunks} chunks")
    return ", ".join(parts)


def _run_repeated(times: int, steps: int) -> tuple[list[str], list[str]]:
    """The rows of python_lm's table, and what was missed."""
    job = load_target(LANGUAGE)
    lines = [
        "| allowed | plan | predicted peak | measured peak | error | used | next larger candidate | completed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    failures = []
    for allowed in LANGUAGE_ALLOWED:
        search, found = _planned(job, LANGUAGE_BATCH_SIZE, _budget(LANGUAGE, allowed))
        ran = [_outcome(LANGUAGE, job, found.plan, allowed, steps) for _ in range(times)]
        completed = sum(one.status == capped.EXIT_DONE for one in ran)
        beside = "" if ran[0].share >= USED else _next_larger(search, found, ran[0], steps)
        error = found.memory.peak_allocated_bytes / ran[0].tensor_bytes - 1
        if completed < times or abs(error) > 0.01 or beside.startswith("runs"):
            failures.append(f"python_lm in {sizes.text(allowed)}")
        lines.append(
            f"| {sizes.text(allowed)} | {_shape(found.plan)} | {sizes.text(found.memory.peak_allocated_bytes)} "
            f"| {sizes.text(ran[0].tensor_bytes)} | {error:+.3%} | {ran[0].share:.0%} | {beside} "
            f"| {completed} of {times} |"
        )
        print(lines[-1], flush=True)
    return lines, failures


def _write(arguments: argparse.Namespace, drawn: list[str], repeated: list[str], verdict: str) -> None:
    text = [
        "# Plans under a hard cap",
        "",
        f"CPU-measured, `OMP_NUM_THREADS=1 python benchmarks/capped.py --pairs {arguments.pairs} --steps "
        f"{arguments.steps} --times {arguments.times} --write`, torch {torch.__version__}, Python "
        f"{platform.python_version()}. Allowed: the cap without what the process has before the first tensor and "
        f"without {sizes.text(capped.RESERVE_BYTES)}. Peaks are those of tensors. Resident: most that the capped "
        "process itself had above its start. Used: measured peak over allowed. Plans: micro-batches x samples, "
        "segments by policy, runs of so many modules.",
        "",
        verdict,
        "",
        *drawn,
        "",
        f"examples/python_lm.py, batch {LANGUAGE_BATCH_SIZE}:",
        "",
        *repeated,
        "",
    ]
    (Path(__file__).parent / "results" / "capped.md").write_text("\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
