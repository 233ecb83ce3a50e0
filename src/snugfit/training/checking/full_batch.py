"""Compares the split of a plan with one full batch: the same gradient, or the reason why not.

Entry point: ``compare``. In which type this is asked, and within which tolerance, is in ``agreement``'s NOTE.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from snugfit.errors import PlanError
from snugfit.jobs import Loss
from snugfit.training.checking import alternatives, coupling, hazards
from snugfit.training.checking.agreement import PARTLY_FLOAT32, TOLERANCES, Tolerance, coarsest, errors, loss_error
from snugfit.training.checking.comparison import Bench, Setting, Trial, losses_of, raised, short, too_large
from snugfit.training.checking.divisions import Division, verdict
from snugfit.training.checking.hazards import Hazard
from snugfit.training.checking.observing import ModuleNames, Observer

_MAX_FLOAT64 = 2**27
"Parameters of a model up to which it is run in float64: 1 GiB."


@dataclass(slots=True)
class Comparison:
    """What a split does to gradient and loss."""

    gradient_error: float = float("nan")
    loss_error: float = float("nan")
    by_module: dict[str, float] = field(default_factory=dict)
    tolerance: Tolerance = TOLERANCES[torch.float64]
    hazards: list[Hazard] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
    custom_functions: dict[str, tuple[type, str]] = field(default_factory=dict)
    "Custom autograd functions that the loss goes through: name to class and module."

    @property
    def agrees(self) -> bool:
        """Whether all errors are within the tolerance."""
        found = [self.gradient_error, self.loss_error, *self.by_module.values()]
        return all(error <= self.tolerance.relative for error in found)  # NaN is none

    def take(self, full: Trial, split: Trial) -> None:
        """Keep the errors of a comparison if they are worse than those there are."""
        overall, by_module = errors(full.gradients, split.gradients, self.tolerance.floor)
        if not self.gradient_error >= overall:  # also for NaN
            self.gradient_error, self.by_module = overall, by_module
        of_loss = loss_error(full.loss, split.loss)
        if not self.loss_error >= of_loss:
            self.loss_error = of_loss


@dataclass(slots=True)
class _Watched:
    """The forwards of one run, and whether each divides its loss by the number of micro-batches."""

    number: int
    names: ModuleNames = field(default_factory=lambda: ModuleNames(finds_functions=True))
    observer: Observer = field(init=False)
    divisions: list[Division | None] = field(default_factory=list)
    reports_count: bool = False
    "Whether a loss said itself what it is a mean over."

    def __post_init__(self) -> None:
        self.observer = Observer(self.names, watches_ranges=False, divisor=self.number)

    def note(self, value: Any) -> None:
        self.divisions.append(self.observer.division(losses_of(value)))
        given = value if isinstance(value, (list, tuple)) else [value]
        self.reports_count = self.reports_count or any(isinstance(one, Loss) and one.count is not None for one in given)


def compare(bench: Bench, batch: Any, model: nn.Module) -> Comparison:
    """Run the full batch and the plan's split from the same weights, and explain a difference.

    Args:
        bench: Runs windows of the job.
        batch: The full batch of one rank.
        model: The job's model, which is only looked at.

    Raises:
        PlanError: The loss raises, or reaches no parameter of an optimizer.
        DeviceMemoryError: One micro-batch of the plan does not fit.
    """
    result, size = Comparison(), bench.plan.micro_batch_size
    result.hazards += hazards.of_batch_norms(model, bench.plan)
    watched = _Watched(bench.plan.accumulation_steps), _Watched(bench.plan.accumulation_steps)
    full, setting, whole = _reference(bench, batch, model, watched[0], result)
    if full is None:
        return result
    result.custom_functions = watched[0].names.custom_functions
    if full.reason == "empty":
        result.hazards.append(_nothing_counted(bench))
        return result
    if full.reason == "no gradients":
        raise PlanError(
            "the loss reaches no parameter that an optimizer holds",
            got="a backward after which none of them has a gradient",
            expected="a loss of the model that the loss function is given",
            hint="use the loss function's first argument, not a model from outside; look at requires_grad",
        )
    unreached = [name for name in bench.trained(model) if name not in full.gradients]
    if unreached:
        result.assumptions.append(
            f"the loss reaches {len(unreached)} trained parameters not at all (first: {unreached[0]}): they stay as "
            "they are"
        )
    if whole is not None and whole <= size:
        size = max(whole // 2, 1)
    split = bench.run(*bench.cut(batch, size), setting, observer=watched[1].observer, on_loss=watched[1].note)
    if split.error is not None:
        if split.ran_out_of_memory:
            raise too_large(split.error, f"a micro-batch of {size} samples") from split.error
        raise raised(split.error, f"with micro_batch_size={size}, though not with the whole batch") from split.error
    summed_in = full.coarsest, split.coarsest
    result.tolerance = _tolerance([*summed_in, *(one.observer.lowest for one in watched)], setting)
    _say_what_was_random(full.drawn | split.drawn, result)
    for path in dict.fromkeys([*full.changed, *split.changed]):
        result.hazards.append(_changed(path))
    _look_at_divisions(watched, bench.plan.accumulation_steps, result)
    result.hazards += [_redrawn(name) for name in sorted(full.redrawn | split.redrawn)]
    if not full.is_finite:
        others = alternatives.countable(batch, lambda other: bench.cut(batch, size, other))
        ignored = any(sum(counts) == 0 for *_, counts in others)
        found = [_nothing_counted(bench)] if ignored else hazards.of_data(batch)
        result.hazards += found or [_not_finite(full, "the full batch")]
        return result
    result.take(full, split)
    if not result.agrees:
        result.hazards += _reasons(bench, batch, size, full, split, setting, result)
        if any(hazard.kind == "sum-returned-as-mean" for hazard in result.hazards):  # which no division mends
            result.hazards = [hazard for hazard in result.hazards if hazard.kind != "double-division"]
    elif any(hazard.kind == "batch-norm" for hazard in result.hazards):
        result.assumptions.append("on this batch BatchNorm made no difference")
    else:
        if not watched[1].reports_count:
            _compare_ragged(bench, batch, size, setting, result)
    return result


def _reference(
    bench: Bench, batch: Any, model: nn.Module, watched: _Watched, result: Comparison
) -> tuple[Trial | None, Setting, int | None]:
    """The window that others are compared with: the full batch, in the finest type that works.

    Returns:
        Window, how it was run, and the micro-batch size where the full batch did not fit.
    """
    last: Exception | None = None
    beyond: tuple[Trial, Setting, int | None] | None = None
    for setting, sizes in _settings(bench, model):
        for size in sizes:
            watched.divisions.clear()
            trial = bench.run(
                *bench.cut(batch, size),
                setting,
                observer=watched.observer,
                names=watched.names,
                on_loss=watched.note,
            )
            is_beyond = (
                setting.dtype == torch.float64 and trial.reason not in ("empty", "no gradients") and not trial.is_finite
            )
            if trial.error is None and is_beyond:  # masks of float32's least number, for example, overflow elsewhere
                beyond = trial, setting, size
                break
            if trial.error is None and beyond is not None and not trial.is_finite:
                return beyond
            if trial.error is None:
                result.assumptions += _remarks(setting, size, bench, last, is_beyond=beyond is not None)
                if size == 1:
                    result.hazards.append(Hazard("not-compared", "", "nothing but single samples fits the device"))
                    return None, setting, None
                return trial, setting, size
            last = trial.error
            if not trial.ran_out_of_memory:
                break
    if beyond is not None:
        return beyond
    assert last is not None
    if Trial(error=last).ran_out_of_memory:
        raise too_large(last, f"a micro-batch of {bench.plan.micro_batch_size} samples") from last
    raise raised(last, "with the whole batch") from last


def _settings(bench: Bench, model: nn.Module) -> Iterator[tuple[Setting, list[int | None]]]:
    """Ways to run the full batch, the finest first, and the micro-batch sizes to try where it does not fit."""
    plan = bench.plan
    smaller: list[int] = []
    size = plan.samples_per_rank
    while size > plan.micro_batch_size:
        size = max(-(-size // 2), plan.micro_batch_size)
        smaller.append(size)
    finest = Setting(precision="32-true", dtype=torch.float64, is_steady=True)
    if sum(parameter.numel() for parameter in model.parameters()) <= _MAX_FLOAT64 and bench.device.type != "mps":
        yield finest, [None]
    single = replace(finest, dtype=torch.float32)
    if plan.recompute:
        yield single, [None]
        single = replace(single, recomputes=True)
    yield single, [None, *smaller]
    yield replace(single, precision=plan.precision, dtype=None), [None, *smaller]


def _remarks(setting: Setting, size: int | None, bench: Bench, last: Exception | None, *, is_beyond: bool) -> list[str]:
    found = []
    if setting.dtype != torch.float64:
        where = "in the plan's precision" if setting.dtype is None else "in float32"
        why = f": what was tried before raised {short(last)}" if last is not None else ""
        why = ": in float64, which training does not use, the full batch is not finite" if is_beyond else why
        with_recompute = ", with recomputation" if setting.recomputes else ""
        found.append(f"split and full batch were compared {where}{with_recompute}{why}")
    if size is not None and size > bench.plan.micro_batch_size:
        found.append(
            f"the full batch of {bench.plan.samples_per_rank} samples does not fit: the split was compared with "
            f"micro-batches of {size} samples"
        )
    elif size is not None:
        found.append(f"nothing larger than micro_batch_size={size} fits: it was compared with half of it")
    return found


def _tolerance(types: Iterable[torch.dtype], setting: Setting) -> Tolerance:
    """That of the coarsest type that took part."""
    found = coarsest([*types, setting.dtype or torch.float32])
    if setting.dtype == torch.float64 and found == torch.float32:
        return PARTLY_FLOAT32
    return TOLERANCES.get(found, TOLERANCES[torch.bfloat16])


def _reasons(
    bench: Bench, batch: Any, size: int, full: Trial, split: Trial, setting: Setting, result: Comparison
) -> list[Hazard]:
    """Why a split differs; something is always named."""
    if any(hazard.kind == "batch-norm" for hazard in result.hazards):
        setting = replace(setting, keeps_batch_norms=False)
        full, split = bench.run(*bench.cut(batch, None), setting), bench.run(*bench.cut(batch, size), setting)
        if coupling.agree(full, split, result.tolerance):
            result.assumptions.append("with BatchNorm in evaluation mode the split is exact (tried)")
            return []
    elsewhere = full.drawn_elsewhere | split.drawn_elsewhere
    if elsewhere:
        return [_random(elsewhere)]
    again = bench.run(*bench.cut(batch, None), setting)
    if not coupling.agree(full, again, result.tolerance) and again.is_finite and setting.keeps_batch_norms:
        return [_random(set())]
    found = coupling.explain(bench, batch, size, full, setting, result.tolerance)
    if found:
        return found
    if not split.is_finite:
        return [_not_finite(split, f"the split into micro-batches of {size}")]
    worst = next(iter(result.by_module), "")
    return [
        Hazard(
            "split-changes-gradient",
            worst,
            f"the gradient of {worst or 'the model'} differs by {result.by_module.get(worst, 0):.3g} (relative) "
            f"between the full batch and micro-batches of {size}; look for something in the loss that depends on "
            "the number of samples",
        )
    ]


def _compare_ragged(bench: Bench, batch: Any, size: int, setting: Setting, result: Comparison) -> None:
    """Where the example hides what tokens are counted, compare again with labels of different lengths."""
    count: Any = bench.job.count
    counts = bench.cut(batch, size)[1]
    if len(counts) < 2:
        return
    ragged = _ragged(bench, batch, size, counts)
    full = Trial() if ragged is None else bench.run(*bench.cut(ragged, None), setting)
    split = Trial() if ragged is None else bench.run(*bench.cut(ragged, size), setting)
    if full.is_finite and split.is_finite:
        result.assumptions.append("labels were also compared with the ends of some ignored, so that counts differ")
        result.take(full, split)
        if not result.agrees:
            result.hazards += _reasons(bench, ragged, size, full, split, setting, result)
        return
    others = alternatives.alike(batch, count, alternatives.ratios(counts), lambda other: bench.cut(batch, size, other))
    if others:
        result.assumptions.append(
            f"the micro-batches of the example weigh the same by {', '.join(others)}, so a wrong count could not "
            "show: give an example whose labels have different lengths"
        )


def _ragged(bench: Bench, batch: Any, size: int, counts: Sequence[float]) -> Any:
    """The batch with labels of different lengths; None where the job's count does not depend on them."""
    count: Any = bench.job.count
    keys = [count.key] if hasattr(count, "key") else [] if isinstance(count, str) else alternatives.keys(batch)
    for key in keys:
        other = alternatives.ragged(batch, key, getattr(count, "ignore_index", -100))
        if other is None:
            continue
        try:
            ignoring = bench.cut(other, size)[1]
        except Exception:  # a count of the user's that takes no ignored labels
            continue
        if hasattr(count, "key") or ignoring != counts:
            return other
    return None


def _look_at_divisions(watched: tuple[_Watched, _Watched], number: int, result: Comparison) -> None:
    seen = [division for one in watched for division in one.divisions]
    found = [division for division in seen if division is not None]
    if not found or len(found) < len(seen):
        return
    verdicts = [verdict(division, number) for division in found]
    if None in verdicts:
        return
    division = found[0]
    if "remark" not in verdicts:
        result.hazards.append(hazards.of_division(division, number))
    else:
        result.assumptions.append(
            f"the loss is multiplied by 1 / {number} at {division.where} ({division.text}), and {number} is also the "
            "number of micro-batches: if that is what it is for, remove it, for the engine averages by itself"
        )


def _say_what_was_random(drawn: set[str], result: Comparison) -> None:
    names = sorted(drawn)
    if names:
        result.assumptions.append(
            f"while the split was compared, random operations gave constants (dropout kept all): {', '.join(names)}"
        )


def _random(drawn: set[str]) -> Hazard:
    sources = " and ".join(sorted(drawn))
    seen = f"random numbers of {sources}" if sources else "something that is random beyond torch's seeds"
    return Hazard(
        "random-split",
        "",
        f"the loss of a sample depends on {seen}: split and full batch cannot be compared because of that, as a "
        "batch that is cut draws others; draw them with torch's rand, randn, normal or bernoulli and its default "
        "generator, or make them in the data",
    )


def _redrawn(name: str) -> Hazard:
    return Hazard(
        "dropout-not-replayed",
        "",
        f"the backward of {name} runs a forward again that draws random numbers (dropout), from another random state "
        "than the first time: the gradient belongs to another mask than the loss; use torch.utils.checkpoint, or keep "
        "the random state in its forward and set it in its backward (torch.random.fork_rng)",
    )


def _changed(path: str) -> Hazard:
    return Hazard(
        "batch-changed-in-place",
        "",
        f"the loss function changes {path} in place: what was counted is no longer what is trained on, and the next "
        "epoch sees changed data; work on a copy (.clone(), or an operation without a trailing underscore)",
    )


def _nothing_counted(bench: Bench) -> Hazard:
    return Hazard(
        "nothing-counted",
        "",
        "no label of the whole batch counts (all are ignored), so its loss is a mean over nothing and no window can "
        f"make an update; the job counts {bench.job.count!r}",
    )


def _not_finite(trial: Trial, what: str) -> Hazard:
    bad = [name for name, gradient in trial.gradients.items() if not bool(torch.isfinite(gradient).all())]
    module = bad[0].rpartition(".")[0] if bad else ""
    return Hazard(
        "non-finite-gradient",
        module,
        f"loss {trial.loss:g} and the gradients of {len(bad)} of {len(trial.gradients)} parameters of {what} are not "
        "finite, though the batch is; a mean over nothing (all labels ignored) is NaN; snugfit.diagnose(job, plan) "
        "names the operation",
    )
