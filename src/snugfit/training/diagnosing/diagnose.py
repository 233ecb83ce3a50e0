"""Runs a job until a window goes wrong, and finds out why.

Entry point: ``diagnose``. What is found out about the window is ``diagnosis``'s; a window of a run is in the file
that ``saved_window`` reads. Nothing of the user's is changed.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from snugfit import hardware
from snugfit.errors import BatchError, PlanError, SnugfitError, UnsupportedError
from snugfit.jobs import Job
from snugfit.plans import Plan
from snugfit.training import build, checkpointing, example, random_states, recovery, splitting
from snugfit.training.diagnosing import diagnosis, rerun, saved_window, updating
from snugfit.training.diagnosing.diagnosis import Diagnosis
from snugfit.training.engine import Engine

NUM_STEPS = 3
"Of the example batch, which is always the same."
NUM_STEPS_OF_DATA = 20
_END: Any = object()

_NEVER = 2**31


def diagnose(
    job: Job,
    plan: Plan,
    device: str | hardware.Device = "auto",
    *,
    steps: int | None = None,
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
        steps: Number of windows to look at; None: 20 of the job's data, 3 of its example batch.
        window: A file that ``train`` wrote (``nonfinite.pt`` in its run folder); only that window is looked at.

    Returns:
        What was found; ``str`` of it is for people.

    Raises:
        PlanError: ``steps`` below 1, a file that is not a window of this job, or a plan that contradicts the job.
        BatchError: A batch that cannot be cut, counted or trained on.
        UnsupportedError: A model that cannot be copied or watched.
        DeviceMemoryError: Memory ran out.
    """
    _check_arguments(job, plan, steps)
    if steps is None:
        steps = NUM_STEPS if job.data is None else NUM_STEPS_OF_DATA
    target = build.present(device)
    saved = None if window is None else saved_window.load(window)
    job = replace(job, nonfinite="skip", max_skipped_windows=_NEVER)
    naming = recovery.memory_errors_named(
        "diagnosing", hint="use a smaller micro_batch_size, which does not change the window's gradient"
    )
    # torch's own search for NaN would end what is to be watched
    with random_states.seeded(job.seed, target.torch_device), naming, torch.autograd.set_detect_anomaly(False):
        job = _own_model(job)
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
    model = checkpointing.unwrapped(engine.model)
    for number, (batch, is_last) in enumerate(_marked(_batches(job, plan, steps)), start=1):
        micro_batches, counts = _prepared(engine, batch, plan)
        # all buffers are copied, whatever the windows before did to them: this one is run many times
        snapshots = recovery.Snapshots(model, engine.runner.device)
        suspect = engine.runner.suspect(micro_batches, counts, None)
        suspect = replace(suspect, restore=partial(snapshots.restore, snapshots.take()))
        with rerun.kept(suspect) as beginning:
            is_finite = rerun.run(suspect, beginning, loss_scale=suspect.loss_scale, precision_name=suspect.precision)
        found = diagnosis.of_window(suspect) if is_last or not is_finite else None
        if not is_finite and found is not None:
            found = replace(found, num_windows=number)
            if found.finite_loss_scale is None:
                return found
            too_high = too_high or found
        before = updating.spoiled(model)
        _update(engine, micro_batches, counts)
        spoiled = [name for name in updating.spoiled(model) if name not in before]
        if spoiled:
            return replace(diagnosis.of_update(suspect, spoiled), num_windows=number)
    assert found is not None, "there is a last window"
    return too_high or replace(found, num_windows=number)


def _prepared(engine: Engine, batch: Any, plan: Plan) -> tuple[Sequence[Any], Sequence[float | None]]:
    """The micro-batches of a batch and their counts.

    Raises:
        BatchError: The batch cannot be cut, counted or trained on.
    """
    micro_batches, counts = engine.prepare(batch, plan.micro_batch_size)
    for i, micro_batch in enumerate(micro_batches):
        for path, tensor in splitting.named_tensors(micro_batch):
            if tensor.is_inference():
                raise BatchError(
                    "a batch holds a tensor of inference mode, which cannot be trained on",
                    got=f"{path} of micro-batch {i}",
                    expected="tensors that were made outside of torch.inference_mode()",
                    hint="make the data without torch.inference_mode(), or clone its tensors outside of it",
                    path=path,
                )
    return micro_batches, counts


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
    batch = next(batches, _END)
    while batch is not _END:
        following = next(batches, _END)
        yield batch, following is _END
        batch = following


def _check_arguments(job: Job, plan: Plan, steps: int | None) -> None:
    """Check what was passed.

    Raises:
        PlanError: An argument of another kind.
    """
    for name, value, kind in (("job", job, Job), ("plan", plan, Plan)):
        if not isinstance(value, kind):
            raise PlanError(
                f"diagnose needs a {name}",
                got=f"{name} of type {type(value).__name__}",
                expected=f"snugfit.{kind.__name__}",
                hint="call snugfit.diagnose(job, snugfit.Plan(batch_size=8, micro_batch_size=2))",
            )
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise PlanError(
            "steps must be a whole number of at least 1", got=f"steps={steps!r}", expected=">= 1", hint="pass steps=3"
        )


def _own_model(job: Job) -> Job:
    """The job with a model of its own, which can be watched.

    Raises:
        UnsupportedError: Names a TorchScript module.
    """
    model = job.model if isinstance(job.model, nn.Module) else build.build_model(job)
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(
                "a TorchScript module cannot be watched",
                got=f"{name or 'the model itself'}: {type(module).__name__}",
                expected="plain modules, whose operations and hooks torch shows",
                hint="diagnose the module that was scripted, without torch.jit.script",
                module=name,
            )
    return replace(job, model=build.copied(model) if model is job.model else model)


def _of_saved(engine: Engine, saved: saved_window.SavedWindow, device: torch.device) -> Diagnosis:
    """What is found out about a window of a file.

    Raises:
        PlanError: The window is of another job.
    """
    saved.put_into(engine.model, device)
    snapshots = recovery.Snapshots(engine.model, device)
    beginning = snapshots.take()
    suspect = engine.runner.suspect(saved.micro_batches, saved.counts, None)
    settings = {**suspect.settings, "reference": saved.reference}
    if suspect.loss_scale is not None and saved.loss_scale is not None:
        settings["loss_scale"] = saved.loss_scale
    suspect = replace(suspect, settings=settings, step=saved.step, restore=lambda: snapshots.restore(beginning))
    try:
        return diagnosis.of_window(suspect)
    except Exception as error:
        if isinstance(error, SnugfitError) or recovery.is_out_of_memory(error):
            raise
        raise PlanError(
            "the job does not run on the micro-batches of the saved window",
            got=f"{type(error).__name__}: {error}",
            expected="micro-batches as the job's loss takes them",
            hint="diagnose with the job that wrote the window",
        ) from error


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
    for number, batch in enumerate(_iterated(job.data()), start=1):
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


def _iterated(data: Any) -> Iterator[Any]:
    """An iterator over what ``job.data()`` returned.

    Raises:
        PlanError: It cannot be iterated over.
    """
    try:
        return iter(data)
    except TypeError as error:
        raise PlanError(
            "the job's data cannot be iterated over",
            got=f"job.data() returned {type(data).__name__}",
            expected="an iterable of full batches",
            hint="return a list, a DataLoader or a generator of batches from data()",
        ) from error
