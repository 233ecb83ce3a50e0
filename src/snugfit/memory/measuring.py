"""Measures the memory of a training step by really running it: the engine's own windows, with counters on.

Entry point: ``measure``. On the CPU every allocation and free of torch's allocator is read from torch's profiler,
temporaries of kernels and oneDNN's scratchpads included; on CUDA the caching allocator's own statistics. Left out:
what libraries take from the heap past torch's allocator (MKL's packed blocks, OpenMP's stacks, compiled kernels), and
the heap's own overhead.
"""

import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from snugfit import hardware
from snugfit.errors import UnsupportedError
from snugfit.jobs import Job
from snugfit.memory import torch_private
from snugfit.memory.events import Birth, Recording
from snugfit.memory.reports import MemoryReport, PeakAt
from snugfit.memory.traces import Trace
from snugfit.plans import Plan
from snugfit.training import admission, build, copies, example, random_states, recovery, splitting, updates

NUM_WINDOWS = 2

_MARK = "snugfit mark "
_BACKWARD = "autograd::engine::evaluate_function"
_OPTIMIZER = "Optimizer.step#"
_CPU_ASSUMPTIONS = (
    "every allocation and free of torch's allocator is counted; memory that libraries take past it is not",
    "saved: made by a forward and alive when its backward began, the loss and casts of weights included",
    "temporary: made during backward or the update, tensors of a recomputation included",
)


def measure(
    job: Job, plan: Plan, device: str | hardware.Device = "auto", *, windows: int = NUM_WINDOWS
) -> MemoryReport:
    """Run some windows of a job under a plan and return what they needed.

    Model, optimizer and random states are left as they are: a given module is copied before it is trained, random
    states (Python, numpy, torch) are set to ``job.seed`` inside and put back. On CUDA that copy counts, a module
    given on the device beside it does not.

    Args:
        job: What is trained; its callables run in this process.
        plan: How.
        device: ``"auto"``, ``"cpu"`` or a CUDA device of this machine.
        windows: Number of updates; from the second on the optimizer's state is there.

    Returns:
        Report with label ``"CPU-measured"`` or ``"GPU-measured"``. Which module holds what is not measured:
        ``by_module`` has the key ``""`` only.

    Raises:
        UnsupportedError: A device that is not in this machine, or a given module that cannot be copied.
        DeviceMemoryError: The device is too small.
    """
    admission.check_job(job)
    admission.check_is_plan(plan)
    target = hardware.resolve(device)
    if target.kind == "cuda" and target.index is None:
        raise UnsupportedError(
            "only a device of this machine can be measured",
            got=f"device={target.name!r}",
            expected='"auto", "cpu", or a CUDA device that torch finds here',
            hint="predict instead: snugfit.estimate(job, plan, device)",
        )
    job = copies.on_copies(job)
    with random_states.seeded(job.seed), recovery.memory_errors_named("measuring"):
        return (_measure_on_cuda if target.kind == "cuda" else _measure_on_cpu)(job, plan, target, windows)


def _measure_on_cpu(job: Job, plan: Plan, device: hardware.Device, windows: int) -> MemoryReport:
    gc.collect()
    marks = _Marks()
    with torch_private.profiled_memory(_MARK) as events:
        batch = example.example_batch(job, plan.samples_per_rank)
        engine = build.build(job, plan, device)
        marks.take("built", _held(engine, batch))
        decide = engine.runner.hooks.decide

        def decide_and_mark(found_inf: Any, count: Any) -> Any:
            if found_inf is not None:  # once per window, with its gradients complete
                held = [parameter.grad for parameter in engine.model.parameters() if parameter.grad is not None]
                marks.take("backward end", {"gradient": held})
                del held
            return decide(found_inf, count)

        engine.runner.hooks = replace(engine.runner.hooks, decide=decide_and_mark)
        micro_batches, counts = engine.prepare(batch, plan.micro_batch_size)
        for _ in range(windows):
            marks.take("window", {})
            engine.runner.run(micro_batches, counts)
            marks.take("step end", _held(engine, batch))
        engine.close()
    recording = _recording(events, marks.taken)
    report = Trace(recording, device, _CPU_ASSUMPTIONS).report()
    return replace(report, label="CPU-measured")


def _measure_on_cuda(job: Job, plan: Plan, device: hardware.Device, windows: int) -> MemoryReport:
    index = device.torch_device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(index)
    allocated_before, reserved_before = torch.cuda.memory_allocated(index), torch.cuda.memory_reserved(index)
    batch = example.example_batch(job, plan.samples_per_rank)
    engine = build.build(job, plan, device)
    micro_batches, counts = engine.prepare(batch, plan.micro_batch_size)
    decide = engine.runner.hooks.decide
    gradients: list[int] = []

    def decide_and_count(found_inf: Any, count: Any) -> Any:
        gradients.append(_num_bytes(p.grad for p in engine.model.parameters() if p.grad is not None))
        return decide(found_inf, count)

    engine.runner.hooks = replace(engine.runner.hooks, decide=decide_and_count)
    for _ in range(windows):
        engine.runner.run(micro_batches, counts)
    torch.cuda.synchronize(index)
    peak = torch.cuda.max_memory_allocated(index) - allocated_before
    reserved = torch.cuda.max_memory_reserved(index) - reserved_before
    static = {category: _num_bytes(tensors) for category, tensors in _held(engine, None).items()}
    static["gradient"] = max(gradients, default=0)
    engine.close()
    by_category = {**static, "other": peak - sum(static.values())}
    driver = torch.version.cuda
    return MemoryReport(
        device=device.name,
        label="GPU-measured",
        peak_allocated_bytes=peak,
        peak_reserved_bytes=reserved,
        static_bytes=sum(static.values()),
        context_bytes=device.context_bytes,
        by_category=by_category,
        by_module={"": by_category},
        peak_at=PeakAt(window=windows, phase="unknown", module="", op="unknown"),
        phases={},
        assumptions=(
            f"{torch.cuda.get_device_name(index)}, torch {torch.__version__}, CUDA {driver}; the context is assumed",
            "categories are those of the objects after the last window; all else at the peak is other",
        ),
    )


class _Marks:
    """Moments of a profiled run, and which storages held what at each of them."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, dict[int, tuple[str, int]]]] = []

    def take(self, name: str, held: dict[str, list[Tensor]]) -> None:
        """Remember the category and size of each storage, by address, and leave a mark in the profile."""
        self.taken.append(
            (
                name,
                {
                    storage.data_ptr(): (category, storage.nbytes())
                    for category, tensors in held.items()
                    for storage in _storages(tensors)
                },
            )
        )
        with torch.profiler.record_function(f"{_MARK}{len(self.taken) - 1}"):
            pass


def _held(engine: Any, batch: Any) -> dict[str, list[Tensor]]:
    """Category to the tensors that the engine's objects and the batch hold."""
    states = [
        value for optimizer in engine.optimizers for state in optimizer.state.values() for value in state.values()
    ]
    masters = [held for optimizer in engine.optimizers for held, _ in updates.of(optimizer).pairs()]
    inputs: list[Tensor] = []

    def seen(tensor: Tensor) -> Tensor:
        inputs.append(tensor)
        return tensor

    splitting.map_tensors(seen, batch)
    return {
        "input": inputs,
        "optimizer": [value for value in states if isinstance(value, Tensor)],
        "buffer": list(engine.model.buffers()),
        "parameter": [*engine.model.parameters(), *masters],
    }


def _recording(
    events: Sequence[torch_private.MemoryEvent], marks: Sequence[tuple[str, dict[int, tuple[str, int]]]]
) -> Recording:
    """The profile as a recording: births with categories, events, marks.

    What the engine holds when it is built and nobody saw being allocated was there before: it is born first.
    """
    births: list[Birth] = []
    stream: list[int] = []
    named: list[tuple[int, str]] = []
    live: dict[int, int] = {}
    forward: list[int] = []
    there_before: list[int] = []
    window, previous = 0, "build"
    for event in events:
        if not event.address:
            name, held = marks[int(event.scopes[-1].removeprefix(_MARK))]
            window += name == "window"
            if name == "step end":
                _count_to_the_update(births, forward)
                forward = []
            for address, (category, num_bytes) in held.items():
                if address in live:
                    births[live[address]].category = category
                elif name == "built":
                    births.append(Birth(num_bytes, category, "build", "", "", 0))
                    there_before.append(len(births))
            named.append((len(stream), name))
            continue
        phase = _phase(event.scopes, window)
        if phase == "backward" and previous == "forward":
            named.append((len(stream), "forward end"))
            alive = set(live.values())
            for index in forward:
                if births[index].category == "other":
                    births[index].category = "saved" if index in alive else "temporary"
            forward = []
        if phase == "optimizer":
            _count_to_the_update(births, forward)
            forward = []
        previous = phase
        if event.num_bytes > 0:
            category = "temporary" if phase in ("backward", "optimizer") else "other"
            births.append(Birth(event.num_bytes, category, phase, "", _operation(event.scopes), window))
            live[event.address] = len(births) - 1
            stream.append(len(births))
            if phase == "forward":
                forward.append(len(births) - 1)
        elif event.address in live:  # else from before the profile
            stream.append(-(live.pop(event.address) + 1))
    shift = len(there_before)
    return Recording(births, [*there_before, *stream], [(position + shift, name) for position, name in named])


def _count_to_the_update(births: Sequence[Birth], after_backward: Sequence[int]) -> None:
    """What is made after the window's last backward (norms, flags) is the update's, as in a recording."""
    for index in after_backward:
        births[index].phase = "optimizer"
        if births[index].category == "other":
            births[index].category = "temporary"


def _phase(scopes: Sequence[str], window: int) -> str:
    if not window:
        return "build"
    if any(scope.startswith(_BACKWARD) for scope in scopes):
        return "backward"
    return "optimizer" if any(scope.startswith(_OPTIMIZER) for scope in scopes) else "forward"


def _operation(scopes: Sequence[str]) -> str:
    return scopes[-1].removeprefix("aten::") if scopes else ""


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors:
        if tensor.layout == torch.strided:
            yield tensor.untyped_storage()
        elif tensor.layout == torch.sparse_coo:
            yield from (part.untyped_storage() for part in torch_private.sparse_parts(tensor))


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of CUDA tensors, each counted once."""
    on_device = (tensor for tensor in tensors if tensor.is_cuda)
    return sum({storage.data_ptr(): storage.nbytes() for storage in _storages(on_device)}.values())
