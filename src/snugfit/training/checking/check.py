"""Proves on a user's own job that splitting and recomputing change no number, and names what would.

Entry point: ``check``. Comparisons are ``full_batch``'s and ``repetition``'s; the model, its optimizer and the random
states stay as they are, for only copies run. Several ranks are checked as one.
"""

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from snugfit import hardware
from snugfit.errors import PlanError, UnsupportedError
from snugfit.jobs import Job
from snugfit.plans import Plan
from snugfit.training import build, checkpointing, example, random_states, recovery, updates
from snugfit.training.checking import full_batch, hazards, repetition
from snugfit.training.checking.comparison import Bench
from snugfit.training.checking.full_batch import Comparison
from snugfit.training.checking.hazards import Hazard as Hazard
from snugfit.training.checking.repetition import Repetition
from snugfit.training.counting import Counting
from snugfit.training.diagnosing.diagnosis import plain

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

KINDS: Mapping[str, str] = {
    "batch-norm": "normalises micro-batches instead of the batch",
    "batch-coupled-loss": "the loss compares the samples of a batch with each other",
    "batch-coupled-model": "a module's output for a sample depends on other samples",
    "wrong-count": "the loss is a mean over something else than the job counts",
    "sum-returned-as-mean": "the loss grows with the number of samples",
    "mean-returned-as-sum": "a Loss whose total is a mean",
    "several-denominators": "the loss adds means over different units",
    "carried-state": "a forward changes what the next one reads",
    "double-division": "the loss is divided by the number of micro-batches already",
    "split-changes-gradient": "the split has another gradient, for a reason that is not known",
    "random-split": "the loss draws random numbers that cannot be repeated",
    "not-compared": "nothing larger than one sample fits",
    "nothing-counted": "the whole batch counts 0",
    "batch-changed-in-place": "the loss function writes to the batch",
    "non-finite-data": "the batch holds NaN",
    "infinite-data": "the batch holds inf, and the gradient is not finite",
    "non-finite-gradient": "loss or gradient is not finite",
    "half-precision-weight": "trainable half-precision weights under 16-mixed",
    "half-range": "a value left the range of half precision",
    "fully-masked-row": "softmax over nothing but -inf",
    "undecorated-function": "a custom autograd function that autocast breaks",
    "fails-in-precision": "the loss raises in the plan's precision only",
    "two-runs-differ": "two equal runs have different gradients",
    "dropout-not-replayed": "a recomputation draws another dropout mask",
    "random-numbers-not-replayed": "a recomputed module draws from Python's random or numpy",
    "input-changed-in-place": "a recomputed module changes its input",
    "cache-under-recompute": "a recomputed module appends to a cache",
    "counted-twice": "a recomputed module counts, logs or updates something twice",
    "recompute-changes-gradient": "recomputation changes the gradient, for a reason that is not known",
    "recompute-fails": "recomputation raises",
}
"Every kind of hazard, and what it is."


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a check found."""

    ok: bool
    "All errors are within their tolerances, and there is no hazard."
    gradient_error: float
    "Relative difference between the gradient of the full batch and of the plan's split; NaN where it has none."
    recompute_error: float
    "The same between a run without and with recomputation; 0 where nothing is recomputed, NaN where it fails."
    hazards: tuple[Hazard, ...]
    repeat_error: float
    "The same between two equal runs."
    loss_error: float
    "Relative difference between the loss of the full batch and of the split."
    by_module: Mapping[str, float]
    "Module to the relative error of its gradient in the split, worst first."
    gradient_tolerance: float
    "Of gradient_error, loss_error and by_module."
    gradient_tolerance_reason: str
    recompute_tolerance: float
    "Of recompute_error and repeat_error."
    recompute_tolerance_reason: str
    num_forwards: int
    "Calls of the loss function."
    assumptions: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as built-in values, ready for JSON; None for a number that is not finite."""
        return {name: plain(value) for name, value in asdict(self).items()}


def check(job: Job, plan: Plan, device: str | hardware.Device = "auto") -> CheckReport:
    """Compare the full batch with the plan's split, recomputation with none, and two runs, and look for hazards.

    N + 1 forwards and backwards in float64 for the split of N micro-batches, as many again where tokens are counted,
    two or three times up to four in the plan's precision for the rest, and some more where something differs;
    ``num_forwards`` counts them. Model, optimizer and random states are left as they are; ``job.seed`` is used inside.

    Args:
        job: What is trained; its example batch is what is checked.
        plan: How. Of several ranks the share of one is checked, in this process.
        device: ``"auto"``, ``"cpu"`` or a device of this machine.

    Returns:
        Report; ``ok`` says whether the plan trains what the full batch would.

    Raises:
        PlanError: The job or the plan cannot be built, or the loss raises.
        BatchError: The batch cannot be cut or counted.
        UnsupportedError: The model cannot be copied, or something cannot be driven exactly.
        DeviceMemoryError: A single sample does not fit the device.
    """
    if not isinstance(job, Job):
        raise PlanError(
            "check needs a job",
            got=type(job).__name__,
            expected="a snugfit.Job",
            hint="pass snugfit.Job(model, loss, optimizer, batch)",
        )
    if not isinstance(plan, Plan):
        raise PlanError(
            "check needs a plan",
            got=type(plan).__name__,
            expected="a snugfit.Plan",
            hint="pass snugfit.Plan(batch_size=8, micro_batch_size=2), or what snugfit.plan(job) returned",
        )
    target = build.present(device).torch_device
    alone = replace(plan, batch_size=plan.samples_per_rank, world_size=1, shard="none", sync="window", uneven=False)
    with (
        _undisturbed(job.model),
        random_states.seeded(job.seed, target),
        torch.autograd.set_detect_anomaly(False),  # torch's own search for NaN would end what is to be compared
    ):
        template = job.model if isinstance(job.model, nn.Module) else build.build_model(job)
        template = checkpointing.unwrapped(template)
        _refuse_uncopied(template)
        batch = example.example_batch(job, alone.samples_per_rank)
        job, inferred = _settled(job, template, batch)
        found = hazards.of_half_weights(template, alone)
        owned, assumptions = _admitted(job, alone, template, target, accepts_weights=not found)
        if alone.accumulation_steps == 1:
            assumptions.append("nothing is split: the plan's micro-batch is the whole batch")
        assumptions += inferred
        bench = Bench(job, replace(alone, fingerprint=None), target, template, owned)
        split = full_batch.compare(bench, batch, template)
        runs = Repetition(assumptions=["runs were not repeated: there is nothing to compare"])
        if not _is_hopeless(split):
            runs = repetition.compare(
                bench,
                batch,
                split.custom_functions,
                runs_in_precision=not found,
                expects_finite=math.isfinite(split.gradient_error) and math.isfinite(split.loss_error),
            )
    found += [*split.hazards, *runs.hazards]
    if any(hazard.kind in ("fully-masked-row", "half-range") for hazard in found):  # that is the reason for the others
        found = [hazard for hazard in found if hazard.kind not in ("non-finite-gradient", "infinite-data")]
    return _report(found, split, runs, assumptions, bench.num_forwards)


def _report(
    found: list[Hazard], split: Comparison, runs: Repetition, assumptions: list[str], num_forwards: int
) -> CheckReport:
    limit = runs.tolerance.relative
    close = runs.repeat_error <= limit and runs.recompute_error <= max(limit, 10 * runs.repeat_error)
    unique = tuple(dict.fromkeys(found))
    return CheckReport(
        ok=split.agrees and close and not unique,
        gradient_error=split.gradient_error,
        recompute_error=runs.recompute_error,
        hazards=unique,
        repeat_error=runs.repeat_error,
        loss_error=split.loss_error,
        by_module=split.by_module,
        gradient_tolerance=split.tolerance.relative,
        gradient_tolerance_reason=split.tolerance.reason,
        recompute_tolerance=limit,
        recompute_tolerance_reason=runs.tolerance.reason,
        num_forwards=num_forwards,
        assumptions=tuple(dict.fromkeys([*assumptions, *split.assumptions, *runs.assumptions])),
    )


def _refuse_uncopied(model: nn.Module) -> None:
    """Refuse models that have no weights to copy, or that forget when they are copied which weights are trained.

    Raises:
        UnsupportedError: It is on the meta device, or of TorchScript.
    """
    empty = [name for name, tensor in model.named_parameters() if tensor.device.type == "meta"]
    scripted = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if not empty and not scripted:
        return
    place = (empty or scripted)[0]
    raise UnsupportedError(
        "a check runs the model, and this one cannot be run on a copy",
        got=f"{place} has no values, on the meta device" if empty else f"{place or 'the model'} is made by torch.jit",
        expected="a module of Python with real weights",
        hint="load its weights, or Job(lambda: MyModel(), ...)" if empty else "check it before torch.jit is applied",
    )


def _settled(job: Job, template: nn.Module, batch: Any) -> tuple[Job, list[str]]:
    """The job with what an engine settles at its first batch, and a remark if it inferred what is counted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said in the report
        count = Counting(job.count, template).of(batch)
    if count is job.count:
        return job, []
    return replace(job, count=count), [
        "count was not given: a causal language model of transformers averages over its shifted labels, so "
        "snugfit.tokens(shift=True) was counted, as training does; pass count= to say what the loss is a mean over"
    ]


def _admitted(
    job: Job, plan: Plan, template: nn.Module, device: torch.device, *, accepts_weights: bool
) -> tuple[list[str], list[str]]:
    """Build the engine once as training would; return the names of the parameters it trains, and remarks.

    Raises:
        PlanError: Training would be refused.
        UnsupportedError: Training would be refused.
    """
    model = build.copied(template)
    precision = plan.precision if accepts_weights else "32-true"
    with warnings.catch_warnings():
        if not accepts_weights:
            warnings.filterwarnings("ignore", ".*trained weights of torch")  # found already, and reported as a hazard
        engine = build.construct(replace(job, model=lambda: model), replace(plan, precision=precision), device)
    held = {id(p) for optimizer in engine.optimizers for p in updates.of(optimizer).parameters}
    names = [name for name, p in engine.model.named_parameters() if id(p) in held]
    engine.close()
    left = [name for name, p in engine.model.named_parameters() if p.requires_grad and id(p) not in held]
    remarks = []
    if left:
        remarks.append(
            f"{len(left)} trainable parameters are in no optimizer and were not compared (first: {left[0]}); "
            "requires_grad_(False) saves their gradients"
        )
    if not model.training and any(isinstance(module, _DROPOUTS) and module.p for module in model.modules()):
        remarks.append("the model is in evaluation mode, so its dropout is off: call model.train() if it should not be")
    return names, remarks


def _is_hopeless(split: Comparison) -> bool:
    return any(hazard.kind in ("nothing-counted", "not-compared") for hazard in split.hazards)


@contextmanager
def _undisturbed(model: Any) -> Iterator[None]:
    """Keep gradients, modes and buffers of a given module, which the loss function may reach past its argument."""
    if not isinstance(model, nn.Module):
        yield
        return
    snapshots = recovery.Snapshots(model, torch.device("cpu"))
    before = snapshots.take()
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, mode in modes:
            module.training = mode
        snapshots.restore(before)
