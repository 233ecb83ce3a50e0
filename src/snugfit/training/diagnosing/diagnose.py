"""Runs a job until a window goes wrong, and finds out why.

Entry point: ``diagnose``. What is found out about the window is ``diagnosis``'s; a window of a run is in the file
that ``saved_window`` reads. Nothing of the user's is changed.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from snugfit import hardware
from snugfit.errors import PlanError
from snugfit.jobs import Job
from snugfit.plans import Plan
from snugfit.training import build, example, random_states, recovery
from snugfit.training.diagnosing import diagnosis, rerun, saved_window
from snugfit.training.diagnosing.diagnosis import Diagnosis
from snugfit.training.engine import Engine

NUM_STEPS = 3

_NEVER = 2**31


def diagnose(
    job: Job,
    plan: Plan,
    device: str | hardware.Device = "auto",
    *,
    steps: int = NUM_STEPS,
    window: str | os.PathLike[str] | None = None,
) -> Diagnosis:
    """Find the first value that is not finite in a job, and the cheapest remedy.

    Windows of ``job.data()``, or of the example batch, are run and updated on a copy until one goes wrong; that one
    is run again under watch and then with what might help. A given module and its buffers, and the random states, are
    left bit-equal. A job in which all is finite gets the cause ``"none"``, with the head-room of its exponentials.

    Args:
        job: What is trained; its data and seed are used, its policy for non-finite windows is not.
        plan: How. Ranks run by themselves.
        device: ``"auto"``, ``"cpu"`` or a CUDA device of this machine.
        steps: Number of windows to look at.
        window: A file that ``train`` wrote (``nonfinite.pt`` in its run folder); only that window is looked at.

    Returns:
        What was found; ``str`` of it is for people.

    Raises:
        PlanError: ``steps`` below 1, a file that is not a window of this job, or a plan that contradicts the job.
        DeviceMemoryError: Memory ran out.
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise PlanError(
            "steps must be a whole number of at least 1", got=f"steps={steps!r}", expected=">= 1", hint="pass steps=3"
        )
    target = build.present(device)
    saved = None if window is None else saved_window.load(window)
    job = replace(job, nonfinite="skip", max_skipped_windows=_NEVER)
    naming = recovery.memory_errors_named(
        "diagnosing", hint="use a smaller micro_batch_size, which does not change the window's gradient"
    )
    with random_states.seeded(job.seed, target.torch_device), naming:
        if isinstance(job.model, nn.Module):
            job = replace(job, model=build.copied(job.model))
        engine = build.construct(job, plan, target.torch_device)
        try:
            if saved is None:
                return _of_job(engine, job, plan, steps)
            return _of_saved(engine, saved, target.torch_device)
        finally:
            engine.close()


def _of_job(engine: Engine, job: Job, plan: Plan, steps: int) -> Diagnosis:
    """The first window that goes wrong, else the last one.

    A loss scale that is too high at first is what fp16 training begins with: it is let come down, and reported only
    if nothing else is found.
    """
    too_high: Diagnosis | None = None
    for batch, is_last in _marked(_batches(job, plan, steps)):
        micro_batches, counts = engine.prepare(batch, plan.micro_batch_size)
        suspect = engine.runner.suspect(micro_batches, counts, engine.runner.hooks.snapshot())
        with rerun.kept(suspect) as beginning:
            is_finite = rerun.run(suspect, beginning, loss_scale=suspect.loss_scale, precision_name=suspect.precision)
        if not is_finite:
            found = diagnosis.of_window(suspect)
            if found.finite_loss_scale is None:
                return found
            too_high = too_high or found
        if not is_last:
            _update(engine, micro_batches, counts)
    return too_high or diagnosis.of_window(suspect)


def _update(engine: Engine, micro_batches: Sequence[Any], counts: Sequence[float | None]) -> None:
    """Run a window until it is not skipped: each time it is, the loss scale comes down."""
    scale = math.inf
    while True:
        result = engine.runner.run(micro_batches, counts)
        if not result.skipped or result.loss_scale is None or result.loss_scale == scale:
            return
        scale = result.loss_scale


def _marked(batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Each batch, and whether it is the last one."""
    batch = next(batches, None)
    while batch is not None:
        following = next(batches, None)
        yield batch, following is None
        batch = following


def _of_saved(engine: Engine, saved: saved_window.SavedWindow, device: torch.device) -> Diagnosis:
    saved.put_into(engine.model, device)
    snapshots = recovery.Snapshots(engine.model, device)
    beginning = snapshots.take()
    suspect = engine.runner.suspect(saved.micro_batches, saved.counts, None)
    settings = {**suspect.settings, "reference": saved.reference}
    if suspect.loss_scale is not None and saved.loss_scale is not None:
        settings["loss_scale"] = saved.loss_scale
    return diagnosis.of_window(
        replace(suspect, settings=settings, step=saved.step, restore=lambda: snapshots.restore(beginning))
    )


def _batches(job: Job, plan: Plan, steps: int) -> Iterator[Any]:
    """The first full batches of the job's data, or its example batch again and again.

    Raises:
        PlanError: The data is empty.
    """
    if job.data is None:
        batch = example.example_batch(job, plan.samples_per_rank)
        yield from (batch for _ in range(steps))
        return
    number = 0
    for number, batch in enumerate(job.data(), start=1):
        yield batch
        if number == steps:
            return
    if number == 0:
        raise PlanError(
            "the job's data has no batch",
            got="job.data() returned an iterable without elements",
            expected="at least one full batch",
            hint="look at what data() returns; a generator must be made anew at each call",
        )
