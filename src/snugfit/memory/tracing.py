"""Predicts the memory of a training step without running it: the step's own code, under fake tensors.

Entry points: ``trace`` for any step, ``estimate`` for a job under a plan. Both record two windows, because from the
second on the optimizer's state is there. Left out: library workspaces that only a GPU can tell (cuDNN), and what
other processes hold.
"""

import copy
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from snugfit import hardware
from snugfit.errors import PlanError
from snugfit.jobs import Job
from snugfit.memory import library_rules, torch_private
from snugfit.memory.cuda.semantics import cuda_semantics
from snugfit.memory.cuda.workspaces import Workspaces
from snugfit.memory.placement import Placement, cuda_functions_without_a_card
from snugfit.memory.recording import Recorder
from snugfit.memory.reports import MemoryReport
from snugfit.memory.traces import Trace
from snugfit.plans import Plan
from snugfit.training import build, example, nonfinite, precision, random_states, splitting, updates

_FULL_MICRO_BATCHES = 2
_WINDOWS = 2


def trace(make_step: Callable[[], Callable[[], object]], device: str | hardware.Device = "auto") -> MemoryReport:
    """Predict what a training step needs on a device, by running it twice under fake tensors.

    ``make_step`` and the step run in this process, but no tensor holds data: nothing is allocated or computed, and
    ``.cuda()`` needs no GPU.

    Args:
        make_step: Builds model, optimizer and batch as always and returns a function that runs one whole update.
        device: Name from the catalogue, ``"auto"``, ``"cpu"`` or a size such as ``"24GiB"``.

    Returns:
        Report with label ``"modelled"``.

    Raises:
        UnsupportedError: An operation that needs values (``.item()``) or has no fake kernel; names it and its module.
        PlanError: Unknown device.
    """
    if not callable(make_step):
        raise PlanError(
            "make_step cannot be called",
            got=type(make_step).__name__,
            expected="a function that builds everything and returns the step",
            hint="pass the function itself: snugfit.trace(make_step)",
        )
    return record(lambda _: make_step(), hardware.resolve(device)).report()


def estimate(job: Job, plan: Plan, device: str | hardware.Device = "auto") -> MemoryReport:
    """Predict what a job needs under a plan: the trace of the step that ``build(job, plan)`` makes.

    The job's model, optimizer and random states are left as they are.

    Args:
        job: What is trained.
        plan: How.
        device: Name from the catalogue, ``"auto"``, ``"cpu"`` or a size such as ``"24GiB"``.

    Returns:
        Report with label ``"modelled"``.

    Raises:
        UnsupportedError: An operation that cannot be traced; names it and its module.
        PlanError: The job or the plan contradicts itself.
        BatchError: The batch cannot be cut.
    """
    return record_job(job, plan, hardware.resolve(device)).report()


def record_job(job: Job, plan: Plan, device: hardware.Device, windows: Sequence[Sequence[int]] | None = None) -> Trace:
    """Record the step that ``build(job, plan)`` makes.

    Args:
        job: What is trained.
        plan: How.
        device: What it is traced for.
        windows: For each window the indices of the micro-batches that it runs. By default two windows, the first
            of two micro-batches, the second of two full ones and the tail: later full ones repeat the second.
    """
    if not isinstance(plan, Plan):
        raise PlanError(
            "this is not a plan",
            got=type(plan).__name__,
            expected="snugfit.Plan",
            hint="pass the plan itself: snugfit.plan(...).plan",
        )
    size, share = plan.micro_batch_size, plan.samples_per_rank
    traced_samples = share if share <= 2 * size else _FULL_MICRO_BATCHES * size + share % size
    if device.kind == "cpu" or job.split is not None:  # the whole batch lies in the same memory, or cannot be resized
        traced_samples = share
    with random_states.seeded(job.seed):
        batch = example.example_batch(job, traced_samples)
        micro_batches, counts = build.prepare(job, batch, size)
    assumptions: list[str] = []
    are_others_like = False
    if windows is None:
        shown = _representative(len(micro_batches), plan)
        windows = [shown[:_FULL_MICRO_BATCHES], shown]
        are_others_like = len(shown) < plan.accumulation_steps
        if are_others_like:
            assumptions.append(
                f"of {plan.accumulation_steps} micro-batches {len(shown)} are traced; the others repeat the second one"
            )
    steps = iter(windows)

    def make_step(recorder: Recorder) -> Callable[[], object]:
        def move(micro_batch: Any) -> Any:
            recorder.mark("micro-batch")
            # On the CPU nothing is moved: the batch on the host, which the recorder has seen, is what the step reads.
            return micro_batch if device.kind == "cpu" else splitting.map_tensors(recorder.moved, micro_batch)

        traced = replace(job, model=_fake_copy(job.model)) if isinstance(job.model, nn.Module) else job
        with recorder.on_device():
            engine = build.construct(traced, plan, torch.device("cpu"))
        recorder.adopt(engine.model)
        for optimizer in engine.optimizers:
            recorder.adopt_masters(updates.of(optimizer).pairs())
        fakes = [splitting.map_tensors(recorder.from_tensor, micro_batch) for micro_batch in micro_batches]
        engine.runner.hooks = replace(engine.runner.hooks, decide=lambda found_inf, count: None, move=move)

        def step() -> object:
            shown = next(steps)
            if are_others_like and engine.num_denominators > 1:  # the last one holds less than those before it
                shown = [*shown[:_FULL_MICRO_BATCHES], 1, *shown[_FULL_MICRO_BATCHES:]]
            return engine.runner.run([fakes[i] for i in shown], [counts[i] for i in shown])

        return step

    trace = record(make_step, device, len(windows))
    return replace(trace, assumptions=(*trace.assumptions, *assumptions))


def record(
    make_step: Callable[[Recorder], Callable[[], object]], device: hardware.Device, num_windows: int = _WINDOWS
) -> Trace:
    """Record some windows of a step for a device."""
    cuda = device.kind == "cuda"
    capability = device.compute_capability or (8, 0)
    recorder = Recorder(on_op=Workspaces(capability) if cuda else None, host_scalars=cuda)
    assumptions = []
    if cuda and device.compute_capability is None:
        assumptions.append("compute capability unknown, taken as 8.0: attention kernels and workspaces follow it")
    with ExitStack() as stack:
        stack.enter_context(collector_off())
        stack.enter_context(random_states.seeded(0))
        if cuda:
            stack.enter_context(cuda_semantics(capability, lambda cast: recorder.categorise([cast], "autocast")))
        # An engine that make_step builds must not read whether a gradient is finite.
        stack.enter_context(mock.patch.object(nonfinite, "decider", return_value=lambda found_inf, count: None))
        stack.enter_context(_precision_of(device))
        stack.enter_context(_initialisers_off())
        stack.enter_context(torch_private.modules_converted_in_place())
        stack.enter_context(recorder.recording_on())
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # torch's own, of ours
        warnings.filterwarnings("ignore", message="BatchNorm makes")  # of numbers, which a trace does not have
        if cuda:
            stack.enter_context(cuda_functions_without_a_card())
        stack.enter_context(Placement(recorder))
        step = make_step(recorder)
        if not callable(step):
            raise PlanError(
                "make_step did not return a step",
                got=type(step).__name__,
                expected="a function without arguments that runs one whole update",
                hint="return the inner function: `return step`, not `return step()`",
            )
        # Now that what make_step imports is there.
        assumptions += stack.enter_context(library_rules.as_with_real_tensors())
        for _ in range(num_windows):
            recorder.begin_window()
            step()
            recorder.end_window()
    recording = recorder.recording_on_device() if cuda else recorder.recording
    return Trace(recording, device, tuple(assumptions))


def skeleton(job: Job) -> nn.Module:
    """The job's model without data: its modules, names and shapes; a given module is returned as it is.

    Raises:
        PlanError: The model cannot be built.
    """
    if isinstance(job.model, nn.Module):
        return job.model
    with random_states.seeded(job.seed), _initialisers_off(), Recorder(host_scalars=False):
        return build.build_model(job)


@contextmanager
def _precision_of(device: hardware.Device) -> Iterator[None]:
    """Let ``precision="auto"`` be that of the traced device, wherever the tensors lie."""
    resolve = precision.resolve
    with mock.patch.object(precision, "resolve", lambda name, _: resolve(name, device)):
        yield


@contextmanager
def _initialisers_off() -> Iterator[None]:
    """Build modules without initialising weights, which hold no data (and some initialisers read values)."""

    def keep(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        return tensor

    names = [name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]
    replaced: dict[str, Any] = dict.fromkeys(names, keep)
    with mock.patch.multiple(nn.init, **replaced):
        yield


@contextmanager
def collector_off() -> Iterator[None]:
    """Keep Python's cycle collector out, so that a trace does not depend on when it runs.

    What was there before is set aside meanwhile, so that collecting what traces left is quick.
    """
    was_enabled, frozen_before = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    if not frozen_before:
        gc.freeze()
    try:
        yield
    finally:
        if not frozen_before:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def _fake_copy(module: nn.Module) -> Callable[[], nn.Module]:
    """A builder of the module's twin whose parameters and buffers are fake; the module is not touched."""

    def twin() -> nn.Module:
        memo: dict[int, Any] = {}
        for parameter in module.parameters():
            fake = nn.Parameter(_empty_like(parameter), requires_grad=parameter.requires_grad)
            memo[id(parameter)] = fake
        for buffer in module.buffers():
            memo[id(buffer)] = _empty_like(buffer)
        return copy.deepcopy(module, memo)

    return twin


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")


def _representative(num_micro_batches: int, plan: Plan) -> list[int]:
    """Indices of the micro-batches that are traced: two full ones and the tail."""
    has_tail = plan.samples_per_rank % plan.micro_batch_size != 0
    full = num_micro_batches - has_tail
    return [*range(min(full, _FULL_MICRO_BATCHES)), *([num_micro_batches - 1] if has_tail else [])]
