"""Tries what might make a window finite, cheapest first, by running it again with it.

Entry points: ``probed`` and ``find``. Order: a smaller loss scale, bf16, an fp32 island, full precision; where none
of them applies, what to look at. A lower learning rate cannot be tried on one window.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from snugfit.errors import PlanError
from snugfit.training import precision, recovery
from snugfit.training.diagnosing import advice, rerun, updating
from snugfit.training.diagnosing.origins import Origin
from snugfit.training.diagnosing.probes import Watch
from snugfit.training.diagnosing.rerun import Suspect

_MAX_ISLANDS = 4


@dataclass(frozen=True, slots=True)
class Tried:
    """One remedy and what came of it."""

    remedy: str
    outcome: str
    is_finite: bool


@dataclass(frozen=True, slots=True)
class Probed:
    """One run under watch."""

    watch: Watch
    is_finite: bool


@dataclass(frozen=True, slots=True)
class Found:
    """The origin as it is to be reported, and what helps."""

    origin: Origin
    phase: str
    cause: str
    remedy: str
    tried: tuple[Tried, ...]
    finite_loss_scale: float | None


def probed(suspect: Suspect, beginning: Callable[[], None], loss_scale: float | None, name: str) -> Probed:
    """Run the window once under watch."""
    watch = Watch(suspect.model, suspect.loss)
    with watch.installed():
        is_finite = rerun.run(suspect, beginning, loss_scale=loss_scale, precision_name=name, watch=watch)
    return Probed(watch, is_finite and watch.found is None)


def find(suspect: Suspect, beginning: Callable[[], None], origin: Origin) -> Found:
    """Find the cheapest remedy of a window.

    Args:
        suspect: The window.
        beginning: The way back to its beginning.
        origin: What the first run under watch found.
    """
    attempts = _Attempts(suspect, beginning)
    optimizers = suspect.settings["optimizers"]
    if origin.kind == "weights" and updating.is_odd(optimizers):
        cause = f"{origin.cause}; an update by {updating.settings(optimizers)} can make them so"
        remedy = f"{updating.remedy(optimizers)}, and {_look_at(origin)}"
        return Found(origin, origin.phase, cause, remedy, (), None)
    if origin.kind in ("data", "weights", "buffers", "operand") or (origin.evidence and origin.evidence.counted):
        return Found(origin, origin.phase, origin.cause, _look_at(origin), (), None)
    scale = suspect.loss_scale
    if scale is not None and origin.phase == "backward":
        largest = _finite_scale(attempts, scale)
        if largest is not None:
            cause = (
                f"loss scale too high: repeated at scale 1 the gradient is finite, and so it is up to scale "
                f"{largest:g}; at {scale:g} {origin.cause}"
            )
            remedy = (
                f"loss_scale=snugfit.LossScale(init_scale={largest:g}), or go on: every skipped window halves the scale"
            )
            return Found(origin, "loss scale", cause, remedy, tuple(attempts.tried), largest)
        if scale != 1:
            origin = attempts.origin(1.0) or origin
    remedy = _in_another_precision(attempts, origin) or _look_at(origin)
    return Found(origin, origin.phase, origin.cause, remedy, tuple(attempts.tried), None)


class _Attempts:
    """Runs of the window with a remedy, and what came of them.

    Args:
        suspect: The window.
        beginning: The way back to its beginning.
    """

    def __init__(self, suspect: Suspect, beginning: Callable[[], None]) -> None:
        self.suspect, self.beginning = suspect, beginning
        self.tried: list[Tried] = []

    def origin(self, loss_scale: float | None) -> Origin | None:
        """Who is to blame at another loss scale, or with what is installed on the model; None where a run fails."""
        try:
            return probed(self.suspect, self.beginning, loss_scale, self.suspect.precision).watch.found
        except Exception:  # what was found before is worth more than an error here
            return None

    def make(self, remedy: str, *, loss_scale: float | None, name: str) -> bool:
        """Run the window with a remedy and note what came of it."""
        try:
            is_finite = rerun.run(self.suspect, self.beginning, loss_scale=loss_scale, precision_name=name)
            outcome = "finite" if is_finite else "not finite"
        except Exception as error:
            is_finite = False
            kind = "out of memory" if recovery.is_out_of_memory(error) else "failed"
            outcome = f"{kind}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        self.tried.append(Tried(remedy, outcome, is_finite))
        return is_finite


def _finite_scale(attempts: _Attempts, scale: float) -> float | None:
    """The largest power of two below a scale at which the window is finite, or None if it is not even at 1.

    Halving the distance of the exponents, for what overflows at one scale does so at all larger ones.
    """
    name = attempts.suspect.precision
    if scale <= 1 or not attempts.make("loss scale 1", loss_scale=1.0, name=name):
        return None
    finite, broken = 0, math.ceil(math.log2(scale))
    while broken - finite > 1:
        middle = (finite + broken) // 2
        if attempts.make(f"loss scale {2**middle}", loss_scale=2.0**middle, name=name):
            finite = middle
        else:
            broken = middle
    return 2.0**finite


def _in_another_precision(attempts: _Attempts, origin: Origin) -> str:
    """Sentence of the first precision that works, or an empty one."""
    suspect = attempts.suspect
    if suspect.precision not in ("16-mixed", "bf16-mixed"):
        return ""
    works = []
    if suspect.precision == "16-mixed" and attempts.make('precision="bf16-mixed"', loss_scale=None, name="bf16-mixed"):
        works.append('use precision="bf16-mixed"')
    islands = _islands(attempts, origin) if origin.module else ()
    if islands:
        names = ", ".join(f'"{name}"' for name in islands)
        works.append(f"keep {names} in fp32: snugfit.precision.keep_fp32(model, {names})")
    if works:
        return "; or ".join(works)
    if attempts.make('precision="32-true"', loss_scale=None, name="32-true"):
        return f'compute this in fp32, outside of autocast, or use precision="32-true"; {_look_at(origin)}'
    return ""


def _islands(attempts: _Attempts, origin: Origin) -> tuple[str, ...]:
    """Modules that have to be kept in fp32: the one that is to blame, then the next one, until the window is finite."""
    suspect, scale = attempts.suspect, attempts.suspect.loss_scale
    scale = None if scale is None else 1.0
    names: list[str] = []
    while len(names) < _MAX_ISLANDS and origin.module and origin.module not in names:
        names.append(origin.module)
        try:
            handle = precision.keep_fp32(suspect.model, *names)
        except PlanError as error:  # weights that are half precision themselves
            attempts.tried.append(Tried(f"fp32 for {', '.join(names)}", f"failed: {error.what}", False))
            break
        try:
            if attempts.make(f"fp32 for {', '.join(names)}", loss_scale=scale, name=suspect.precision):
                return tuple(names)
            if attempts.tried[-1].outcome != "not finite":
                break
            again = attempts.origin(scale)
        finally:
            handle.remove()
        if again is None:
            break
        origin = again
    return ()


def _look_at(origin: Origin) -> str:
    """What to change where no other precision helps."""
    if origin.kind == "data":
        place = origin.op.removeprefix("input ")
        return (
            f"look at the data: drop or repair the samples of micro-batch {origin.micro_batch} with {place} not finite"
        )
    if origin.kind == "buffers":
        return "look at where the buffer is made or changed, or go back to a saved state from before"
    if origin.kind == "weights":
        return "go back to a saved state from before, with a lower learning rate or max_grad_norm=1.0"
    if origin.kind == "operand":
        return "look at where that operand is from: no operation of the window made it"
    if origin.kind == "hook":
        return "look at what the hook does to the gradient, or remove it"
    if origin.kind == "recomputation":
        return "let the forward do the same each time, repeated or not; snugfit.check(job, plan) compares the two"
    return advice.of(origin)
