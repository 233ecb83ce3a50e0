"""Training under a hard memory cap: a child process with ``RLIMIT_DATA``, and how much of the cap a plan may use.

Entry points: ``measure_baseline`` and ``budget_under_cap`` before planning, ``run_capped`` to train. Linux only. The
child imports its job again, so a job that exists in memory only is refused.

    NOTE [What counts against the cap]
    1. ``RLIMIT_DATA`` limits private writable mappings (``VmData``): heap, anonymous memory, stacks of threads.
       Whether pages were touched does not matter. torch's allocator raises its own error at the limit.
    2. glibc keeps large blocks in its heap when they are freed and the process then needs 32 to 97 % more than its
       tensors. With both thresholds of ``_HEAP`` at 128 KiB every larger block is a mapping of its own: 4 to 10 %.
    3. libgomp ends the process when it cannot start a thread. So every thread pool and library is started, and the
       job's data is opened, before the limit is set.
    4. What a process needs beside its tensors hardly depends on how large they are: the interpreter's growth, small
       blocks, and kernels that oneDNN compiles for every shape of a convolution (measured: 4 to 7 MiB for
       transformers of 60 to 370 MiB, 24 to 40 MiB for convolutional nets of 25 to 270 MiB). So the baseline is what a
       process has once it has run a tiny window of the job, with two micro-batch sizes as in a window with a tail.
    5. A plan's tensors may take the cap without the baseline and without ``RESERVE_BYTES`` for what differs between
       runs. The planner's own margin is for the same thing, so what is kept free is the larger of both, not their sum.
"""

import argparse
import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from snugfit import runs, sizes
from snugfit.errors import DeviceMemoryError, InfeasibleError, PlanError, SnugfitError, UnsupportedError
from snugfit.jobs import Job
from snugfit.memory.reports import MemoryReport, margin_bytes
from snugfit.plans import Plan, write_atomically
from snugfit.targets import load_target
from snugfit.training import build, example, random_states

RESERVE_BYTES = 16 * sizes.MIB
EXIT_DONE, EXIT_USER_ERROR, EXIT_OUT_OF_MEMORY = 0, 2, 3

_HEAP = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
_TINY = Plan(batch_size=5, micro_batch_size=3)
"Of the window that is run for the baseline: micro-batches of three and of two samples."
_REFUSED = ("could not create a primitive", "could not execute a primitive")
"What oneDNN says when an allocation is refused."
_STATIC = ("parameter", "buffer", "gradient", "optimizer")


def measure_baseline(target: str, options: Mapping[str, Any] | None = None, *, cap_bytes: int | None = None) -> int:
    """Start the child, let it do what a run does beside its tensors, and return what it has then.

    It imports, warms up, opens the job's data and runs a window of five samples, whose tensors it drops again.

    Args:
        target: What ``load_target`` takes, ``file.py:name`` for example.
        options: Further arguments of ``load_target``, such as ``{"seq": 512}``.
        cap_bytes: Limit of the window; a job that does not even fit with five samples then goes without it.

    Returns:
        ``VmData`` of the child in bytes.

    Raises:
        PlanError: A job that exists in memory only, or a target that the child cannot load.
        UnsupportedError: Not on Linux.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "baseline.json"
        child = _child(
            {
                "target": _importable(target),
                "options": dict(options or {}),
                "answer": str(answer),
                "cap_bytes": cap_bytes,
            },
            quiet=True,
        )
        if child.returncode or not answer.is_file():
            raise PlanError(
                "the child process could not load the job",
                got=(child.stderr or "").strip() or f"exit status {child.returncode}",
                expected="a target that can be imported in a process of its own",
                hint=f"try it alone: python {target.partition(':')[0]}",
            )
        return int(json.loads(answer.read_text(encoding="utf-8"))["baseline_bytes"])


def budget_under_cap(cap_bytes: int, baseline_bytes: int) -> int:
    """What a plan may need under a cap, the planner's margin included, in bytes.

    Its tensors then take no more than the cap without the baseline and the reserve.

    Raises:
        InfeasibleError: Nothing is left; ``.cap_bytes``, ``.baseline_bytes``.
    """
    allowed = cap_bytes - baseline_bytes - RESERVE_BYTES
    if allowed <= 0:
        raise InfeasibleError(
            "the memory cap leaves nothing for tensors",
            got=f"cap {sizes.text(cap_bytes)}",
            expected=f"more than {sizes.text(baseline_bytes)} that the process has before the first tensor, and "
            f"{sizes.text(RESERVE_BYTES)} in reserve",
            hint=f"use a cap above {sizes.text(baseline_bytes + RESERVE_BYTES)}",
            cap_bytes=cap_bytes,
            baseline_bytes=baseline_bytes,
        )
    return min(cap_bytes - baseline_bytes, allowed + margin_bytes(allowed, "cpu"))


def check_static(report: MemoryReport, allowed_bytes: int) -> None:
    """Refuse a cap that parameters, buffers, gradients and optimizer state alone exceed, whatever the plan.

    Args:
        report: Prediction of any plan of the job.
        allowed_bytes: See ``budget_under_cap``.

    Raises:
        InfeasibleError: They do; ``.smallest`` is the report, ``.budget_bytes`` what is allowed.
    """
    if report.static_bytes <= allowed_bytes:
        return
    held = report.phases.get("backward end", report.by_category)
    parts = ", ".join(f"{category} {sizes.text(held[category])}" for category in _STATIC if held.get(category))
    raise InfeasibleError(
        "the memory cap is smaller than what the job holds all the time",
        got=f"{sizes.text(report.static_bytes)} of static memory: {parts}",
        expected=f"static memory within the {sizes.text(allowed_bytes)} that the cap allows, with room for the step",
        hint="use a larger cap, a smaller model, or an optimizer with less state",
        smallest=report,
        budget_bytes=allowed_bytes,
    )


def run_capped(
    target: str,
    plan_path: str | os.PathLike[str],
    *,
    cap_bytes: int,
    steps: int,
    run_dir: str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
    predicted: Mapping[str, Any] | None = None,
    recover: bool = True,
) -> int:
    """Train in a child process that cannot have more than ``cap_bytes`` of private memory, and return its status.

    The child prints to this process's terminal: the progress bar, and one four-part message when it fails.

    Args:
        target: What ``load_target`` takes, ``file.py:name`` for example.
        plan_path: File that ``Plan.save`` wrote.
        cap_bytes: Limit of the whole process (``RLIMIT_DATA``), the interpreter and its libraries included.
        steps: See ``runs.train``.
        run_dir: See ``runs.train``.
        options: Further arguments of ``load_target``, such as ``{"seq": 512}``.
        predicted: See ``runs.train``.
        recover: See ``runs.train``.

    Returns:
        0 done, 2 user error, 3 out of memory; negative when a signal ended the child (a library that could not take
        a refused allocation), as in ``subprocess``.

    Raises:
        PlanError: A job that exists in memory only.
        UnsupportedError: Not on Linux.
    """
    request = {
        "target": _importable(target),
        "options": dict(options or {}),
        "plan": os.fspath(plan_path),
        "cap_bytes": cap_bytes,
        "steps": steps,
        "run_dir": os.fspath(run_dir),
        "predicted": predicted,
        "recover": recover,
    }
    return _child(request, quiet=False).returncode


def _end_with_parent() -> None:
    """Let the kernel end this process when the one that started it is gone, however that ended (Linux)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def main(arguments: Sequence[str] | None = None) -> int:
    """The child: read the request, do it, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m snugfit.capped", description="A run under a memory cap.")
    parser.add_argument("request", help="JSON file that run_capped or measure_baseline wrote")
    request = json.loads(Path(parser.parse_args(arguments).request).read_text(encoding="utf-8"))
    _end_with_parent()
    try:
        job = load_target(request["target"], **request["options"])
        _open(job)
        if "answer" in request:
            with _limit(request["cap_bytes"]), suppress(Exception):  # planning says what is wrong with the job
                _run_tiny(job)
            gc.collect()
            write_atomically(Path(request["answer"]), json.dumps({"baseline_bytes": runs.process_bytes("VmData")}))
            return EXIT_DONE
        plan = Plan.load(request["plan"])
        with _limit(request["cap_bytes"]):
            runs.train(
                job,
                plan,
                steps=request["steps"],
                run_dir=request["run_dir"],
                device="cpu",
                predicted=request["predicted"],
                recover=request["recover"],
            )
    except DeviceMemoryError as error:
        print(error, file=sys.stderr)
        return EXIT_OUT_OF_MEMORY
    except SnugfitError as error:
        print(error, file=sys.stderr)
        return EXIT_USER_ERROR
    except RuntimeError as error:
        if not str(error).startswith(_REFUSED):
            raise
        print(_refused(error, request["cap_bytes"]), file=sys.stderr)
        return EXIT_OUT_OF_MEMORY
    return EXIT_DONE


@contextmanager
def _limit(cap_bytes: int | None) -> Iterator[None]:
    """Let this process have no more than that for a while."""
    import resource  # not on every system

    if cap_bytes is None:
        yield
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (cap_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _refused(error: RuntimeError, cap_bytes: int) -> DeviceMemoryError:
    return DeviceMemoryError(
        "out of memory while training",
        got=f"oneDNN: {error}",
        expected=f"room for the kernels that oneDNN compiles, within the cap of {sizes.text(cap_bytes)}",
        hint="use a larger cap, or let snugfit plan it: snugfit train TARGET --memory-cap SIZE",
    )


def _importable(target: object) -> str:
    if not sys.platform.startswith("linux"):
        raise UnsupportedError(
            "a memory cap needs Linux",
            got=f"platform {sys.platform}",
            expected="RLIMIT_DATA and /proc",
            hint="train without a cap",
        )
    if not isinstance(target, str):
        raise PlanError(
            "a job that exists in memory only cannot run under a memory cap",
            got=type(target).__name__,
            expected='a target that the child process can import, such as "file.py:name"',
            hint="put the job into a file with a function job(), and pass the file",
        )
    return target


def _child(request: Mapping[str, Any], *, quiet: bool) -> "subprocess.CompletedProcess[str]":
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "request.json"
        path.write_text(json.dumps(request), encoding="utf-8")
        return subprocess.run(
            [sys.executable, "-m", "snugfit.capped", str(path)],
            env={**os.environ, **_HEAP},
            stdout=subprocess.DEVNULL if quiet else None,
            stderr=subprocess.PIPE if quiet else None,
            text=True,
            check=False,
        )


def _open(job: Job) -> None:
    """Start what takes memory once and is not a tensor of the step; see rule 3 of the NOTE at the top of this file."""
    runs.warm_up()
    with random_states.seeded(job.seed):
        example.example_batch(job, 1)
        if job.data is not None:
            next(iter(job.data()), None)


def _run_tiny(job: Job) -> None:
    """One window of the job, so that what its operations compile and keep is there."""
    with random_states.seeded(job.seed):
        engine = build.build(job, _TINY, "cpu")
        engine.runner.run(*engine.prepare(example.example_batch(job, _TINY.batch_size), _TINY.micro_batch_size))
        engine.close()


if __name__ == "__main__":
    sys.exit(main())
