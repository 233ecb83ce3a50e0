"""Tries plans out: a few windows of each on the real device, timed, with all of the user's objects left as they are.

Entry point: ``run``. The windows are the engine's own, on the job's example. Plans take turns, so that what disturbs
the machine meets all of them; one that runs out of memory says so and the others go on. Choosing what to try is
``search``'s.
"""

import gc
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from snugfit import hardware
from snugfit.errors import DeviceMemoryError, PlanError, SnugfitError, UnsupportedError
from snugfit.jobs import Job
from snugfit.memory import measuring
from snugfit.plans import Plan
from snugfit.training import build, copies, example, random_states, recovery

TURNS = 2
"How often each plan is built and timed."
MEMORY_WINDOWS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one plan did when it was run."""

    plan: Plan
    step_time_s: float | None
    "Median over the windows; None if memory ran out."
    spread: float
    "Half of the range that holds the middle half of the windows, relative to the median."
    seconds: tuple[float, ...]
    "Of each window, in the order in which they ran."
    peak_bytes: int | None
    "Measured peak of allocated memory; None if memory ran out."
    out_of_memory: str | None
    "What ran out; None if nothing did."


def run(job: Job, plans: Sequence[Plan], device: str | hardware.Device = "auto", windows: int = 3) -> tuple[Trial, ...]:
    """Run some windows under each plan and return what they took, in the order of the plans.

    The job's module, optimizer, scheduler and random states are left as they are: copies are trained (see
    ``copies``), random states are set to ``job.seed`` inside and put back. On the CPU a peak is measured in windows of
    their own, for counting allocations takes time.

    Args:
        job: What is trained.
        plans: How.
        device: ``"auto"``, ``"cpu"`` or a CUDA device of this machine.
        windows: Timed updates per plan and turn, after one that is not timed.

    Raises:
        UnsupportedError: A device that is not in this machine.
        PlanError: No window is to be timed.
        SnugfitError: Whatever else a plan's run raises; the message names the plan.
    """
    target = hardware.resolve(device)
    if target.kind == "cuda" and target.index is None:
        raise UnsupportedError(
            "plans can only be tried out on a device of this machine",
            got=f"device={target.name!r}",
            expected='"auto", "cpu", or a CUDA device that torch finds here',
            hint="leave --measure out: times are predicted",
        )
    if not isinstance(windows, int) or isinstance(windows, bool) or windows < 1:
        raise PlanError(
            "windows must be a whole number of at least 1", got=f"windows={windows!r}", expected=">= 1", hint="pass 3"
        )
    seconds: dict[int, list[float]] = {i: [] for i in range(len(plans))}
    failed: dict[int, str] = {}
    peaks: dict[int, int] = {}
    for turn in range(TURNS):
        for i, plan in enumerate(plans):
            if i in failed:
                continue
            try:
                with _named(plan), warnings.catch_warnings():
                    # Of a copied scheduler, whose optimizer is a copy without the mark that torch leaves on it.
                    warnings.filterwarnings("ignore", message="Seems like `optimizer.step")
                    seconds[i] += _timed(job, plan, target, windows)
                    if turn == 0:
                        peaks[i] = measuring.measure(job, plan, target, windows=MEMORY_WINDOWS).peak_allocated_bytes
            except DeviceMemoryError as error:
                failed[i] = error.got or error.what
            _forget(target)
    return tuple(_trial(plan, seconds[i], peaks.get(i), failed.get(i)) for i, plan in enumerate(plans))


def _timed(job: Job, plan: Plan, device: hardware.Device, windows: int) -> list[float]:
    with random_states.seeded(job.seed), recovery.memory_errors_named("trying a plan out"):
        batch = example.example_batch(job, plan.samples_per_rank)
        engine = build.build(copies.on_copies(job), plan, device)
        micro_batches, counts = engine.prepare(batch, plan.micro_batch_size)
        seconds = []
        for _ in range(1 + windows):
            start = time.perf_counter()
            engine.runner.run(micro_batches, counts)
            if device.kind == "cuda":
                torch.cuda.synchronize(device.torch_device)
            seconds.append(time.perf_counter() - start)
        engine.close()
        return seconds[1:]


def _forget(device: hardware.Device) -> None:
    gc.collect()  # engines and their models refer to each other
    if device.kind == "cuda":
        torch.cuda.empty_cache()


def _trial(plan: Plan, seconds: Sequence[float], peak_bytes: int | None, out_of_memory: str | None) -> Trial:
    if out_of_memory is not None:
        return Trial(plan=plan, step_time_s=None, spread=0.0, seconds=(), peak_bytes=None, out_of_memory=out_of_memory)
    median = statistics.median(seconds)
    lower, _, upper = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else (median,) * 3
    return Trial(
        plan=plan,
        step_time_s=median,
        spread=(upper - lower) / 2 / median,
        seconds=tuple(seconds),
        peak_bytes=peak_bytes,
        out_of_memory=None,
    )


@contextmanager
def _named(plan: Plan) -> Iterator[None]:
    """Let what a plan's run raises say which plan it was."""
    try:
        yield
    except DeviceMemoryError:
        raise
    except Exception as error:
        ours = error if isinstance(error, SnugfitError) else None
        facts: dict[str, Any] = {} if ours is None else dict(vars(ours))
        for part in ("what", "got", "expected", "hint"):
            facts.pop(part, None)
        reason = type(error).__name__ if ours is None else ours.what
        raise (SnugfitError if ours is None else type(ours))(
            f"{_described(plan)} failed when it was tried out: {reason}",
            got=str(error) if ours is None else ours.got,
            expected="a job that runs under this plan" if ours is None else ours.expected,
            hint="run it alone to see where: snugfit train --plan" if ours is None else ours.hint,
            **facts,
        ) from error


def _described(plan: Plan) -> str:
    policies = sorted({segment.policy for segment in plan.recompute})
    again = f", {len(plan.recompute)} segments ({', '.join(policies)})" if policies else ""
    return f"the plan with micro_batch_size={plan.micro_batch_size}, {plan.precision}{again}"
