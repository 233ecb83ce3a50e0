"""Predicts the memory of a training step without running it: the step's own code, under fake tensors.

Entry points: ``trace`` for any step, ``estimate`` for a job under a plan. Both record two windows, because from the
second on the optimizer's state is there. Left out: library workspaces that only a GPU can tell (cuDNN), and what
other processes hold.
"""

import gc
import logging
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from snugfit import hardware
from snugfit.errors import PlanError
from snugfit.jobs import Job
from snugfit.memory import torch_private
from snugfit.memory.cpu import random_states as cpu_random_states
from snugfit.memory.cpu.rules import CpuRules
from snugfit.memory.cuda.rules import Rules
from snugfit.memory.cuda.semantics import cuda_semantics
from snugfit.memory.cuda.target import target_of
from snugfit.memory.known_values import reading
from snugfit.memory.recording import Recorder
from snugfit.memory.reporting import offload_gain
from snugfit.memory.reports import MemoryReport
from snugfit.memory.steps import (
    compilation,
    cuda_functions,
    data_parallel,
    inference,
    leftovers,
    library_rules,
    loaders,
    on_target,
    opaque,
    places,
    pretrained_weights,
    refusals,
    surroundings,
    training_nothing,
    twins,
)
from snugfit.memory.steps.placement import Placement
from snugfit.memory.traces import Trace
from snugfit.plans import Plan
from snugfit.training import (
    admission,
    build,
    checkpointing,
    closures,
    example,
    nonfinite,
    random_states,
    splitting,
    updates,
)

_FULL_MICRO_BATCHES = 2
_MOST_MICRO_BATCHES = 64
"Traced in full where what they leave alive adds up; beyond, it is multiplied, which takes it as even."
_WINDOWS = 2
_POINTER = "Accessing the data pointer of FakeTensor"
"A warning of torch's own code, which copies fake tensors."

NO_DEVICE = (
    'the step never names "cuda": it is counted as if all that it makes were on the card; as it is written it would '
    "run on the host"
)


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
        UnsupportedError: The step decides by values that only the weights give, or runs what has no fake kernel; names
            operation, module and line. ``snugfit.opaque`` declares such parts.
        PlanError: Unknown device.
    """
    if not callable(make_step):
        raise PlanError(
            "make_step cannot be called",
            got=type(make_step).__name__,
            expected="a function that builds everything and returns the step",
            hint="pass the function itself: snugfit.trace(make_step)",
        )
    target = hardware.resolve(device)
    recorders: list[Recorder] = []

    def make(recorder: Recorder) -> Callable[[], object]:
        recorders.append(recorder)
        return make_step()

    traced = record(make, target)
    if target.kind == "cuda" and not recorders[0].places.names_device:
        traced = replace(traced, assumptions=(*traced.assumptions, NO_DEVICE))
    return traced.report()


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
    target = hardware.resolve(device)
    report = record_job(job, plan, target).report()
    return offload_gain.told(report, plan, target.kind, lambda other: record_job(job, other, target).report())


@surroundings.default_modes()
def record_job(
    job: Job,
    plan: Plan,
    device: hardware.Device,
    windows: Sequence[Sequence[int]] | None = None,
    *,
    with_update: bool = True,
) -> Trace:
    """Record the step that ``build(job, plan)`` makes.

    Args:
        job: What is trained.
        plan: How.
        device: What it is traced for.
        windows: For each window the indices of the micro-batches that it runs. By default two windows of two full
            ones and the tail: later full ones repeat the second. Where what they leave alive adds up, all of them.
        with_update: False leaves the optimizers' steps out: for traces of which only micro-steps are looked at.
    """
    surroundings.refuse_nested()
    admission.check_job(job)
    admission.check_is_plan(plan)
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
        windows = [shown] * _WINDOWS
        are_others_like = len(shown) < plan.accumulation_steps
        if are_others_like:
            assumptions.append(
                f"of {plan.accumulation_steps} micro-batches {len(shown)} are traced; the others repeat the second one"
            )
    steps = iter(windows)
    made = ExitStack()

    def make_step(recorder: Recorder) -> Callable[[], object]:
        def move(micro_batch: Any) -> Any:
            recorder.mark("micro-batch")
            # On the CPU nothing is moved: the batch on the host, which the recorder has seen, is what the step reads.
            return micro_batch if device.kind == "cpu" else splitting.map_tensors(recorder.moved, micro_batch)

        traced, own_plan = data_parallel.over_ranks(job, plan, lambda module: twins.of_module(module, recorder))
        # On the CPU everything lies in one place, which nothing has to name.
        with recorder.on_device() if device.kind == "cuda" else nullcontext():
            engine = build.construct(traced, own_plan, torch.device(device.kind))
        made.callback(engine.close)  # what it turned off may be the user's: a configuration that models share
        recorder.adopt(checkpointing.unwrapped(engine.model))
        for optimizer in engine.optimizers:
            recorder.adopt_masters(updates.of(optimizer).pairs())
        fakes = [splitting.map_tensors(recorder.faked, micro_batch) for micro_batch in micro_batches]
        steps_anyway = with_update or any(map(closures.needed, engine.optimizers))  # of which micro-steps are a part

        def decide(found_inf: Tensor | None, _: object) -> str | None:
            return None if steps_anyway or found_inf is None else _ended(recorder, engine.optimizers)

        engine.runner.hooks = replace(engine.runner.hooks, decide=decide, move=move)

        def step() -> object:
            shown = next(steps)
            if are_others_like and engine.num_denominators > 1:  # the last one holds less than those before it
                shown = [*shown[:_FULL_MICRO_BATCHES], 1, *shown[_FULL_MICRO_BATCHES:]]
            result = engine.runner.run([fakes[i] for i in shown], [counts[i] for i in shown])
            training_nothing.refuse(result.reason, [counts[i] for i in shown])
            return result

        return step

    with made:
        trace = record(make_step, device, len(windows))
    recording = places.built_on_host(trace.recording) if device.kind == "cuda" else trace.recording
    trace = replace(trace, recording=recording, assumptions=(*trace.assumptions, *assumptions))
    if not are_others_like or not leftovers.grows(trace.recording):
        return trace
    missing = plan.accumulation_steps - len(shown)
    everyone = [*shown[:2], *[1] * missing, *shown[2:]] if traced_samples < share else range(len(micro_batches))
    return _with_leftovers(trace, missing, lambda: record_job(job, plan, device, [everyone] * _WINDOWS), len(everyone))


def _ended(recorder: Recorder, optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Write down that the backward of a window is over, as where an optimizer steps; gives why none does."""
    recorder.mark("backward end")
    for update in map(updates.of, optimizers):
        recorder.categorise_gradients(
            parameter
            for parameter in update.parameters
            if update.is_attached or parameter.grad is None or parameter.grad.dtype == parameter.dtype  # else a sum
        )
    return "not asked for"


def _with_leftovers(trace: Trace, missing: int, record_all: Callable[[], Trace], number: int) -> Trace:
    """The trace of a step whose micro-batches leave something alive, by as many of them as there are."""
    if number <= _MOST_MICRO_BATCHES:
        try:
            whole = record_all()
        except Exception:  # what the first trace left in the user's objects may not go together with a second one
            pass
        else:
            sentence = f"what a micro-batch leaves alive adds up: all {number} micro-batches are traced"
            return replace(whole, assumptions=(*whole.assumptions, sentence))
    counted = f"that of the second one is counted {missing} times more, as if all left the same"
    sentence = f"what a micro-batch leaves alive adds up: {counted}"
    return replace(
        trace,
        recording=leftovers.multiplied(trace.recording, missing),
        assumptions=(*trace.assumptions, sentence),
    )


def record(
    make_step: Callable[[Recorder], Callable[[], object]], device: hardware.Device, num_windows: int = _WINDOWS
) -> Trace:
    """Record some windows of a step for a device."""
    cuda = device.kind == "cuda"
    capability = device.compute_capability or (8, 0)
    rules = Rules(target_of(device)) if cuda else CpuRules()
    recorder = Recorder(on_op=rules, host_scalars=cuda)
    recorder.places.own = device.index or 0
    assume = recorder.assume
    if cuda and device.compute_capability is None:
        assume("compute capability unknown, taken as 8.0: attention kernels and workspaces follow it")
    with ExitStack() as stack:
        stack.enter_context(surroundings.alone())
        stack.enter_context(surroundings.default_modes())
        stack.enter_context(collector_off())
        stack.enter_context(random_states.seeded(0))
        if cuda:
            casts = cuda_semantics(capability, lambda cast: recorder.categorise([cast], "autocast"), assume)
            stack.enter_context(casts)
        else:
            stack.enter_context(cpu_random_states.recorded(recorder))
        # An engine that make_step builds must not read whether a gradient is finite.
        stack.enter_context(mock.patch.object(nonfinite, "decider", return_value=lambda found_inf, count: None))
        stack.enter_context(on_target.precision_of(device))
        stack.enter_context(_initialisers_off())
        placement = Placement(recorder, is_card=cuda)
        stack.enter_context(torch_private.modules_converted_in_place(placement.keep))
        stack.enter_context(torch_private.engine_entered(placement))
        stack.enter_context(compilation.kept_as_compiled(recorder))
        stack.enter_context(reading.files_not_written(assume))
        stack.enter_context(pretrained_weights.without_values(recorder))
        stack.enter_context(inference.as_without_gradients())
        stack.enter_context(loaders.loaded_for_real(recorder.faked))
        stack.enter_context(recorder.recording_on())
        stack.enter_context(mock.patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=_POINTER)
        warnings.filterwarnings("ignore", message="BatchNorm makes")  # of numbers, which a trace does not have
        functions = cuda_functions.answered_for(device, recorder, assume) if cuda else cuda_functions.absent()
        stack.enter_context(functions)
        if cuda:
            stack.enter_context(on_target.offloading_from(recorder))
        stack.enter_context(placement.answering_devices())
        stack.enter_context(torch_private.subclasses_on_host())
        stack.enter_context(placement)
        stack.enter_context(opaque.traced_by(recorder))
        stack.enter_context(data_parallel.wrapping_alone(recorder, assume))
        with _explained(recorder):
            step = make_step(recorder)
            if not callable(step):
                raise refusals.not_a_step(step)
        # Now that what make_step imports is there.
        stack.enter_context(library_rules.as_with_real_tensors(recorder))
        drawn_before = _python_draws()
        for _ in range(num_windows):
            recorder.begin_window()
            with _explained(recorder):
                step()
            recorder.end_window()
        if _python_draws() != drawn_before:
            assume("the step draws random numbers in Python or numpy: the windows are recorded as they ran with seed 0")
    for sentence in rules.assumptions:
        assume(sentence)
    recording = places.on_device_only(recorder) if cuda else recorder.recording
    return Trace(recording, device, tuple(recorder.assumptions))


@contextmanager
def _explained(recorder: Recorder) -> Iterator[None]:
    """What leaves the step is the user's own exception or a refusal by name, never a traceback into fake tensors."""
    try:
        yield
    except Exception as error:
        explained = refusals.escaped(error, recorder.last_op, recorder.name_of)
        if explained is error:
            raise
        raise explained from error


def _python_draws() -> tuple[Any, Any]:
    return random.getstate(), random_states.numpy_state()


def skeleton(job: Job) -> nn.Module:
    """The job's model without data: its modules, names and shapes; a given module is returned as it is.

    Raises:
        PlanError: The model cannot be built.
    """
    if isinstance(job.model, nn.Module):
        return job.model
    with random_states.seeded(job.seed), _initialisers_off(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_POINTER)
        recorder = Recorder(host_scalars=False)
        placement = Placement(recorder)  # a model that is built on a card is built here
        with recorder, torch_private.modules_converted_in_place(placement.keep), placement:
            return build.build_model(job)


@contextmanager
def _initialisers_off() -> Iterator[None]:
    """Build modules without initialising weights, which hold no data (and some initialisers read values)."""

    def keep(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        return tensor

    # The hidden ones are behind names that code has imported before.
    names = [name for name in dir(nn.init) if (name.endswith("_") and name[:1] != "_") or name.startswith("_no_grad_")]
    replaced: dict[str, Any] = dict.fromkeys(names, keep)
    with mock.patch.multiple(nn.init, **replaced):
        yield


_is_collector_off = [False]


@contextmanager
def collector_off() -> Iterator[None]:
    """Keep Python's cycle collector out, so that a trace does not depend on when it runs.

    What was there before is set aside meanwhile, so that collecting what traces left is quick.
    """
    if _is_collector_off[0]:  # to ask how much is set aside takes long
        return (yield)
    was_enabled, frozen_before = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    if not frozen_before:
        gc.freeze()
    _is_collector_off[0] = True
    try:
        yield
    finally:
        _is_collector_off[0] = False
        if not frozen_before:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def _representative(num_micro_batches: int, plan: Plan) -> list[int]:
    """Indices of the micro-batches that are traced: two full ones and the tail."""
    has_tail = plan.samples_per_rank % plan.micro_batch_size != 0
    full = num_micro_batches - has_tail
    return [*range(min(full, _FULL_MICRO_BATCHES)), *([num_micro_batches - 1] if has_tail else [])]
