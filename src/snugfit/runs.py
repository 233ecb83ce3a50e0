"""Trains a job under a plan for some steps and leaves a run folder that says what happened.

Entry point: ``train``. The folder holds ``plan.json``, ``metrics.jsonl`` (one line per step, written as it ends) and
``report.json`` (written last). Left out: saving and resuming a training state.
"""

import gc
import json
import math
import os
import platform
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from snugfit import hardware, run_progress, sizes
from snugfit.errors import BatchError, PlanError, UnsupportedError
from snugfit.jobs import Job
from snugfit.plans import Plan, write_atomically
from snugfit.training import admission, build, example, random_states, recovery, splitting, windows
from snugfit.training.diagnosing import saved_window

METRICS, REPORT, PLAN = "metrics.jsonl", "report.json", "plan.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a finished run reports; the same values are in ``report.json``."""

    run_dir: str
    steps: int
    "Updates asked for; skipped ones are among them."
    skipped: int
    seconds: float
    "Wall time of the steps, without building the model."
    first_loss: float | None
    last_loss: float | None
    "Loss of the first and of the last step; None where it was not finite."
    peak_memory_bytes: int | None
    peak_memory_source: str
    "What was read, in one sentence."
    counted: str
    "What losses are means over."
    predicted: Mapping[str, Any] | None
    "The predicted ``MemoryReport`` as a dictionary, where one was given."
    notes: tuple[str, ...]
    "Sentences that a reader of the numbers must know."


def train(
    job: Job,
    plan: Plan,
    *,
    steps: int,
    run_dir: str | os.PathLike[str],
    resume: bool = False,
    device: str | hardware.Device = "auto",
    predicted: Mapping[str, Any] | None = None,
    recover: bool = True,
) -> RunResult:
    """Build the engine, run some steps, and write the run folder; a given module is trained in place.

    Batches come from ``job.data()``, called again whenever it is used up, else the example batch is used again and
    again. Random states are set to ``job.seed`` inside and put back. Files of an earlier run are replaced.

    Args:
        job: What is trained.
        plan: How.
        steps: Number of windows, skipped ones included.
        run_dir: Folder of the run; made if it is not there.
        resume: Not supported yet.
        device: ``"auto"``, ``"cpu"`` or a CUDA device of this machine.
        predicted: ``MemoryReport.to_dict()`` of the prediction, kept in the report.
        recover: Whether a window that runs out of memory is run again in smaller micro-batches.

    Returns:
        What ``report.json`` holds.

    Raises:
        UnsupportedError: ``resume=True``.
        PlanError: ``steps`` below 1, a folder that cannot be made, or the job contradicts the plan.
        BatchError: ``job.data()`` has no batch.
        NonFiniteError: See ``Job.nonfinite``; the window is then saved in the folder, for ``diagnose``.
        DeviceMemoryError: Out of memory; the folder then has no report.
    """
    if resume:
        raise UnsupportedError(
            "train cannot resume yet",
            got="resume=True",
            expected="resume=False: this version saves no training state",
            hint="start afresh with resume=False",
        )
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise PlanError(
            "steps must be a whole number of at least 1", got=f"steps={steps!r}", expected=">= 1", hint="pass steps=100"
        )
    admission.check_job(job)
    admission.check_is_plan(plan)
    target = build.present(device)
    folder = _made(run_dir)
    for name in (REPORT, METRICS, saved_window.FILE):
        (folder / name).unlink(missing_ok=True)
    plan.save(folder / PLAN)
    if target.kind == "cpu":
        warm_up()
    gc.collect()  # what is freed during the run must not be in its baseline
    memory = _PeakMemory(target.torch_device)
    notes = []
    if job.data is None:
        notes.append("the job has no data: every step trained on its example batch")
    with random_states.seeded(job.seed), recovery.memory_errors_named("training"):
        engine = build.build(job, plan, target)
        batches = _batches(job, plan)
        losses: list[float | None] = []
        skipped = 0
        with (
            run_progress.shown(steps, plan.accumulation_steps) as progress,
            (folder / METRICS).open("a", encoding="utf-8", buffering=1) as metrics,
        ):
            engine.runner.loss = progress.following(engine.runner.loss)
            start = time.perf_counter()
            for step in range(steps):
                batch = next(batches)
                if step == 0 and job.split is None:
                    _check_size(batch, plan)
                before, samples_before = time.perf_counter(), engine.sample_count
                with saved_window.kept_beside(folder):
                    if recover:
                        result = engine.step(batch)
                    else:
                        result = engine.runner.diagnosed(*engine.prepare(batch, plan.micro_batch_size))
                losses.append(_finite(result.loss))
                skipped += result.skipped
                line = {
                    "step": len(losses),
                    "loss": losses[-1],
                    "lr": list(result.lr),
                    "grad_norm": _finite(result.grad_norm),
                    "samples_per_s": (engine.sample_count - samples_before) / (time.perf_counter() - before),
                    "peak_memory_bytes": memory.peak_bytes(),
                    "skipped": result.skipped,
                    "reason": result.reason,
                    "metrics": {name: _finite(value) for name, value in result.metrics.items()},
                }
                metrics.write(json.dumps(line) + "\n")
                progress.updated(line)
            seconds = time.perf_counter() - start
        counted = engine.runner.counting.unit
        if engine.num_denominators:
            counted = f"{engine.num_denominators} counts that losses report themselves, else {counted}"
        engine.close()
    outcome = RunResult(
        run_dir=str(folder),
        steps=steps,
        skipped=skipped,
        seconds=seconds,
        first_loss=losses[0],
        last_loss=losses[-1],
        peak_memory_bytes=memory.peak_bytes(),
        peak_memory_source=memory.source,
        counted=counted,
        predicted=predicted,
        notes=tuple(notes),
    )
    report = {**asdict(outcome), "seed": job.seed, "device": target.name, "versions": versions()}
    write_atomically(folder / REPORT, json.dumps(report, indent=2) + "\n")
    return outcome


def _made(run_dir: object) -> Path:
    """The folder of a run, made if it is not there.

    Raises:
        PlanError: It is no path, or cannot be a folder.
    """
    try:
        folder = Path(run_dir)  # type: ignore[arg-type]
        folder.mkdir(parents=True, exist_ok=True)
    except (TypeError, OSError) as error:
        raise PlanError(
            "the folder of the run cannot be made",
            got=f"run_dir={run_dir!r}: {error}",
            expected="a path that is a folder, or where one can be made",
            hint='pass run_dir="runs/one"',
        ) from error
    return folder


def _batches(job: Job, plan: Plan) -> Iterator[Any]:
    """Full batches without end: the job's data again and again, or its example batch.

    Raises:
        BatchError: A pass over the data brings no batch, or there is nothing to pass over.
    """
    if job.data is None:
        batch = example.example_batch(job, plan.samples_per_rank)
        while True:
            yield batch
    while True:
        is_empty = True
        data = job.data()
        if not windows.is_iterable(data):
            raise BatchError(
                "the job's data cannot be gone through",
                got=f"job.data() returned {type(data).__name__}",
                expected="an iterable of full batches, such as a DataLoader",
                hint="return the loader from data(), as in data=lambda: loader",
            )
        for batch in data:
            is_empty = False
            yield batch
        if is_empty:
            raise BatchError(
                "the job's data has no batch",
                got="job.data() returned an iterable without elements",
                expected="at least one full batch",
                hint="look at what data() returns; a generator must be made anew at each call",
            )


def warm_up() -> None:
    """Start the CPU's thread pools and load what torch and the progress bar load at their first use.

    About 90 MiB of the process's memory that are not tensors. Random states are left as they are.
    """
    import rich.progress  # noqa: F401  (loaded here, so that a run's peak does not hold it)

    with random_states.seeded(0):
        model = nn.Sequential(nn.Embedding(64, 256), nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256))
        optimizer = torch.optim.AdamW(model.parameters())
        for dtype in (torch.float32, torch.bfloat16):
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                hidden = model(torch.arange(512).remainder(64).view(2, 256))
                heads = hidden.view(2, 256, 4, 64).transpose(1, 2)
                attended = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
                loss = F.cross_entropy(attended.flatten(0, 2).float(), torch.zeros(2048, dtype=torch.long))
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        images = F.conv2d(torch.rand(2, 8, 32, 32), torch.rand(8, 8, 3, 3, requires_grad=True))
        torch.autograd.backward(images.sum())


def _check_size(batch: Any, plan: Plan) -> None:
    """Refuse data whose batches are not those of the plan: its numbers would be those of another job."""
    given = splitting.num_samples(batch)
    if given != plan.samples_per_rank:
        raise BatchError(
            "job.data() yields batches of another size than the plan's",
            got=f"a first batch of {given} samples",
            expected=f"{plan.samples_per_rank} samples (batch_size={plan.batch_size} over {plan.world_size} ranks)",
            hint=f"plan with batch_size={given * plan.world_size}, or let job.data yield that many",
            num_samples=given,
        )


class _PeakMemory:
    """The largest memory of a run so far, from the cheapest counter that never misses it.

    CUDA: the allocator's own peak. Linux: the kernel's high-water mark of resident memory, above what was resident
    when the run began; resident memory is what was touched, so this holds the heap's overhead as well as the tensors.
    Elsewhere nothing is read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = 0
        self._is_read = True
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.source = "torch.cuda.max_memory_allocated"
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to VmRSS
            self._start = process_bytes("VmRSS")
            self.source = "peak resident memory of the process (VmHWM) above that at the start of the run"
        except OSError:
            self._is_read = False
            self.source = "not read: this system does not tell the peak of a process from a given moment on"

    def peak_bytes(self) -> int | None:
        """Bytes, or None where nothing is read; does not synchronise with the device."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return process_bytes("VmHWM") - self._start if self._is_read else None


def process_bytes(field: str) -> int:
    """A size from ``/proc/self/status``, such as ``VmData``, in bytes.

    Raises:
        OSError: Not on Linux.
    """
    found = re.search(rf"^{field}:\s+([0-9]+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"/proc/self/status has no {field}")
    return int(found[1]) * sizes.KIB


def _finite(value: Any) -> float | None:
    """A 0-dimensional tensor as a number that JSON has, or None."""
    number = float(value)
    return number if math.isfinite(number) else None


def versions() -> dict[str, str]:
    """The versions that a run's numbers depend on."""
    from snugfit import __version__

    return {"snugfit": __version__, "torch": torch.__version__, "python": platform.python_version()}
