"""Runs a window twice, and once with recomputation, as the plan says: the same numbers, and the same side effects.

Entry point: ``compare``. Precision, loss scale and dropout are the plan's here; whether the split is exact is
``full_batch``'s.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from snugfit.training.checking import hazards, side_effects
from snugfit.training.checking.agreement import Tolerance, errors
from snugfit.training.checking.comparison import Bench, Setting, Trial, raised, short, too_large
from snugfit.training.checking.hazards import Hazard
from snugfit.training.checking.observing import ModuleNames, Observer
from snugfit.training.checking.replays import Replays, place
from snugfit.training.torch_private import CheckpointCall

_MAX_MICRO_BATCHES = 4
_SAME = {
    "32-true": Tolerance(1e-5, 1e-3, "the same float32 operations; only sums of gradients may run in another order"),
    "16-mixed": Tolerance(1e-2, 1e-2, "the same float16 operations; only sums of gradients may run in another order"),
}
_SAME_BF16 = Tolerance(2e-2, 1e-2, "the same bfloat16 operations; only sums of gradients may run in another order")
_NO_KERNEL = ("not implemented for", "could not create a primitive", "mkldnn", "onednn", "not supported on CPU")
_LOSS_SCALES = (None, 1024.0, 1.0)


@dataclass(slots=True)
class Repetition:
    """How far two runs, and a run with recomputation, are from the first."""

    repeat_error: float = float("nan")
    recompute_error: float = float("nan")
    tolerance: Tolerance = _SAME["32-true"]
    hazards: list[Hazard] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)


def compare(
    bench: Bench,
    batch: Any,
    custom_functions: Mapping[str, tuple[type, str]],
    *,
    runs_in_precision: bool,
    expects_finite: bool,
) -> Repetition:
    """Run the first micro-batches of the plan's split twice without recomputation, and once with it.

    Args:
        bench: Runs windows of the job.
        batch: The full batch of one rank.
        custom_functions: Custom autograd functions that the loss went through.
        runs_in_precision: Whether the plan's precision accepts the model; else float32 is taken.
        expects_finite: Whether gradients were finite before.

    Raises:
        PlanError: The loss raises.
        DeviceMemoryError: A single sample does not fit.
    """
    plan = bench.plan
    result = Repetition(tolerance=_SAME.get(plan.precision, _SAME_BF16))
    setting = Setting(precision=plan.precision)
    if not runs_in_precision:
        setting = Setting(precision="32-true", dtype=torch.float32)
        result.tolerance = _SAME["32-true"]
        result.assumptions.append(f"{plan.precision} does not accept this model: the rest was run in float32")
    names = ModuleNames()
    observer = Observer(names, watches_ranges=True)
    checkpointed: list[str] = []
    parts, counts, first = _first(bench, batch, setting, observer, names, checkpointed, result)
    left = list(observer.out_of_range.values())
    trained_on = [one for one in left if one.is_trained_on]
    result.hazards += hazards.of_ranges(trained_on or ([] if first.is_finite else left), setting.precision)
    if first.error is not None and setting.precision != "32-true":
        result.hazards += _failures(first, custom_functions, setting.precision, bench.device)
        setting = Setting(precision="32-true", dtype=torch.float32)
        result.tolerance = _SAME["32-true"]
        result.assumptions.append(f"the loss raises under {plan.precision}: runs were compared in float32")
        first = bench.run(parts, counts, setting, around_model=_remembering, look=_left_behind)
    if first.error is not None:
        raise raised(first.error, f"under {setting.precision}") from first.error
    if first.reason == "empty":
        result.repeat_error = result.recompute_error = 0.0
        result.assumptions.append("runs were not compared: the micro-batches that were run count nothing")
        return result
    first, setting = _at_a_finite_scale(bench, parts, counts, first, setting, result)
    again = bench.run(parts, counts, setting, around_model=_remembering, look=_left_behind)
    if again.error is not None:
        raise raised(again.error, "when it was run a second time") from again.error
    if not first.is_finite:
        if expects_finite and not result.hazards:
            result.hazards.append(_not_finite(first, setting.precision))
        return result
    result.repeat_error, by_module = errors(first.gradients, again.gradients, result.tolerance.floor)
    if not all(error <= result.tolerance.relative for error in by_module.values()):
        result.hazards.append(_unlike(by_module))
    if not plan.recompute and not checkpointed:
        result.recompute_error = 0.0
        result.assumptions.append("nothing is recomputed")
        return result
    _recomputed(bench, parts, counts, setting, first, again, result)
    return result


def _first(
    bench: Bench,
    batch: Any,
    setting: Setting,
    observer: Observer,
    names: ModuleNames,
    checkpointed: list[str],
    result: Repetition,
) -> tuple[Sequence[Any], Sequence[float], Trial]:
    """The first run, of micro-batches that fit without recomputation; notes what the model itself checkpoints."""

    def note(call: CheckpointCall) -> Callable[[], None]:
        checkpointed.append(names.called(call.function))
        return lambda: None

    size = bench.plan.micro_batch_size
    while True:
        parts, counts = bench.cut(batch, size)
        if len(parts) > _MAX_MICRO_BATCHES:
            chosen = [i for i, count in enumerate(counts) if count][:_MAX_MICRO_BATCHES]
            parts, counts = [parts[i] for i in chosen], [counts[i] for i in chosen]
        trial = bench.run(
            parts,
            counts,
            setting,
            observer=observer,
            names=names,
            around_checkpoints=note,
            around_model=_remembering,
            look=_left_behind,
        )
        if not trial.ran_out_of_memory:
            break
        if size == 1:
            raise too_large(trial.error, "a single sample without recomputation") from trial.error
        size = -(-size // 2)
        result.assumptions.append(f"without recomputation only {size} samples fit: those were compared")
    if len(parts) < bench.plan.accumulation_steps and size == bench.plan.micro_batch_size:
        result.assumptions.append(
            f"runs were compared over {len(parts)} of {bench.plan.accumulation_steps} micro-batches"
        )
    return parts, counts, trial


def _at_a_finite_scale(
    bench: Bench, parts: Sequence[Any], counts: Sequence[float], first: Trial, setting: Setting, result: Repetition
) -> tuple[Trial, Setting]:
    """Under fp16, back off the loss scale until gradients are finite, as training does."""
    if setting.precision != "16-mixed" or not np.isfinite(first.loss):
        return first, setting
    for scale in _LOSS_SCALES[1:]:
        if first.is_finite:
            break
        setting = replace(setting, loss_scale=scale)
        first = bench.run(parts, counts, setting, around_model=_remembering, look=_left_behind)
        result.assumptions.append(f"gradients overflow at the first loss scale; tried {scale:g}")
    return first, setting


def _recomputed(
    bench: Bench,
    parts: Sequence[Any],
    counts: Sequence[float],
    setting: Setting,
    first: Trial,
    again: Trial,
    result: Repetition,
) -> None:
    names = ModuleNames()
    replays = Replays(names, bench.device)
    trial = bench.run(
        parts,
        counts,
        replace(setting, recomputes=True),
        names=names,
        around_checkpoints=replays.around,
        around_model=replays.watching(_remembering),
        look=_left_behind,
    )
    result.hazards += replays.hazards.values()
    if trial.error is not None:
        if trial.ran_out_of_memory:
            raise too_large(trial.error, "the window with recomputation") from trial.error
        if not replays.hazards:
            result.hazards.append(
                Hazard(
                    "recompute-fails",
                    "",
                    f"with recomputation the window raises {type(trial.error).__name__}: "
                    f"{str(trial.error).strip()[:400]}; recompute other modules, or find what differs in the second "
                    "forward (caches, in-place changes, flags)",
                )
            )
        return
    result.recompute_error, by_module = errors(first.gradients, trial.gradients, result.tolerance.floor)
    allowed = max(result.tolerance.relative, 10 * result.repeat_error)
    worst = next(iter(by_module), "")
    if not by_module.get(worst, 0.0) <= allowed and not replays.hazards:
        result.hazards.append(
            Hazard(
                "recompute-changes-gradient",
                worst,
                f"recomputation changes the gradient of {worst or 'the model'} by {by_module[worst]:.3g} (relative): "
                "its second forward is another function than the first; look for random numbers that are not torch's, "
                "state that the forward changes, or a use_reentrant=True checkpoint without a trained input",
            )
        )
    for left, left_again, left_recomputed in zip(first.state, again.state, trial.state, strict=True):
        for module, name in side_effects.differing(left, left_again, left_recomputed):
            result.hazards.append(
                Hazard(
                    "counted-twice",
                    module,
                    f"{name} of {place(module)} ends with another value when the module is recomputed: its forward "
                    "changes it, and runs twice; put `if not snugfit.is_recomputing():` in front of the change",
                )
            )


@contextmanager
def _remembering(model: nn.Module) -> Iterator[None]:
    model.__dict__["_snugfit_outside"] = side_effects.outside(model)
    yield


def _left_behind(model: nn.Module) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Attributes and buffers of a model after a window, and what the window added to what lies outside of it."""
    before = model.__dict__.pop("_snugfit_outside")
    return side_effects.state(model), side_effects.change(before, side_effects.outside(model))


def _failures(
    trial: Trial, custom_functions: Mapping[str, tuple[type, str]], precision: str, device: torch.device
) -> list[Hazard]:
    """What a loss that raises under mixed precision, though not in float32, shows."""
    text = short(trial.error)
    if "without overflow" in text:
        return [
            Hazard(
                "half-range",
                trial.failed_in,
                f"{place(trial.failed_in)} puts a number into a half-precision tensor that is outside of its range "
                f"({text}): make masks of the type's own range (torch.finfo(scores.dtype).min / 2), or compute it in "
                "float32",
            )
        ]
    assert trial.error is not None
    raising = {frame.f_code for frame, _ in traceback.walk_tb(trial.error.__traceback__)}
    inside = {name: one for name, one in custom_functions.items() if _codes(one[0]) & raising}
    found = hazards.of_functions(inside or custom_functions, precision, f"the window raises {text}")
    if not found and device.type == "cpu" and any(words in text for words in _NO_KERNEL):
        return [
            Hazard(
                "fails-in-precision",
                trial.failed_in,
                f"the window raises {text} under {precision} (in {place(trial.failed_in)}): the CPU of this machine "
                "has no kernel for that type, which says nothing of other devices; check there with device='cuda', or "
                "use precision='32-true' or 'bf16-mixed' here",
            )
        ]
    return found or [
        Hazard(
            "fails-in-precision",
            trial.failed_in,
            f"the window raises {text} under {precision}, though not in float32 (in {place(trial.failed_in)}); keep "
            "that part in float32, or use precision='32-true'",
        )
    ]


def _codes(function: Any) -> set[Any]:
    """The code of a custom autograd function, of its forward and its backward."""
    return {getattr(method, "__code__", None) for method in (function.forward, function.backward)}


def _not_finite(trial: Trial, precision: str) -> Hazard:
    return Hazard(
        "non-finite-gradient",
        "",
        f"under {precision} loss ({trial.loss:g}) or gradient is not finite, at any loss scale tried; "
        "snugfit.diagnose(job, plan) names the operation",
    )


def _unlike(by_module: dict[str, float]) -> Hazard:
    worst = next(iter(by_module))
    return Hazard(
        "two-runs-differ",
        worst,
        f"two runs from the same weights and seeds differ by {by_module[worst]:.3g} (relative) in {place(worst)}: "
        "something draws from a generator of its own or keeps state outside of the model, so that no run can be "
        "repeated or resumed; draw random numbers with torch's default generator",
    )
