"""What is trained: the ``Job`` and the values its loss may return.

Entry point: ``Job``. A job says nothing about how it is run; that is the plan's.
Nothing here calls the user's callables or allocates a tensor.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any, TypeAlias

from torch import Tensor, nn

from snugfit.errors import PlanError

NONFINITE_POLICIES = ("skip", "raise", "ignore")

Count: TypeAlias = "str | Callable[[Any], float]"
"What a mean is taken over: ``samples``, ``snugfit.tokens(...)``, or a function of a micro-batch."


class _Unsaid(str):
    """A value that nobody gave, so that it may be inferred; otherwise the string that it is."""

    __slots__ = ()


UNSAID = _Unsaid("samples")
"The default of ``count``: samples, or the tokens of a model that is known to average over them."


def is_unsaid(count: Count) -> bool:
    """Whether nobody said what a loss is a mean over."""
    return isinstance(count, _Unsaid)


@dataclass(frozen=True, slots=True, eq=False)
class Loss:
    """A loss that says what it is a mean of.

    Several of them from one loss function are ratios of their own over the window; their sum is trained on. Each is
    known by its place, so all micro-batches of a window return as many. One whose count is 0 is not back-propagated,
    whatever its value. Counts that differ from each other cost memory and time: each further one holds one more
    gradient of every parameter it reaches, and one more backward per micro-batch, but for a window's last (losses
    that count alike share one: leave count out where it is the job's, or give them the very same tensor).

    Args:
        total: Sum over the counted units, a 0-dimensional tensor.
        count: Its denominator; None means the job's count of the micro-batch.
        metrics: Name to (sum, count), averaged over the window by their counts.
        only: Parameters, or the module, that this loss may reach; None means all.
    """

    total: Tensor
    count: float | Tensor | None = None
    metrics: Mapping[str, tuple[Any, Any]] | None = None
    only: "nn.Module | Sequence[nn.Parameter] | None" = None


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """A value inside a batch that every micro-batch gets whole; the micro-batch holds the bare value."""

    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """Dynamic loss scale for fp16: backed off when a window overflows, grown after a run of clean windows.

    Constant within a window. Defaults are those of ``torch.amp.GradScaler``, with a floor and a cap.

    Raises:
        PlanError: A value outside of its range.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    floor: float = 1.0
    cap: float = 2.0**24

    def __post_init__(self) -> None:
        for field_ in fields(self):
            value = getattr(self, field_.name)
            whole = field_.name == "growth_interval"
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not isfinite(value):
                raise PlanError(
                    f"LossScale.{field_.name} is not a number to work with",
                    got=f"{field_.name}={value!r}",
                    expected="a whole number" if whole else "a finite number",
                    hint="leave it out for its default",
                )
        rules = (
            ("init_scale", self.floor <= self.init_scale <= self.cap, "floor <= init_scale <= cap"),
            ("growth_factor", self.growth_factor >= 1, ">= 1"),
            ("backoff_factor", 0 < self.backoff_factor < 1, "between 0 and 1"),
            ("growth_interval", self.growth_interval >= 1, ">= 1"),
            ("floor", self.floor > 0, "> 0"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise PlanError(
                    f"LossScale.{name} is outside of its range",
                    got=f"{name}={getattr(self, name)!r}",
                    expected=rule,
                    hint="leave it out for its default",
                )


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One training job: what is trained, on what, with which loss and optimizer.

    Args:
        model: The module, or a function that builds it (preferred: then nothing is allocated while planning).
        loss: ``(model, micro_batch)`` to a scalar mean over the counted units, a ``Loss``, or several of them.
        optimizer: ``(model)`` to an optimizer or a sequence of them; parameter groups are the user's.
        batch: Example of the full batch of one rank (nested tensors, dim 0 is samples), a function of the number
            of samples that makes one, or a DataLoader.
        count: What the loss is a mean over: ``"samples"``, ``snugfit.tokens(...)`` or a function of a micro-batch.
            Left out it is samples, or the shifted labels of a causal language model of transformers (and a warning
            says so).
        data: Function that returns an iterable of full batches, for ``train``.
        scheduler: ``(optimizer)`` to a scheduler, stepped once per real update.
        max_grad_norm: Limit of the gradient's norm, clipped once per window after unscaling.
        loss_scale: The fp16 loss scale; None means ``LossScale()``.
        max_skipped_windows: Windows that may be skipped in a row before ``NonFiniteError``.
        nonfinite: ``"skip" "raise" "ignore"`` a window whose gradient is not finite.
        split: ``(batch, micro_batch_size)`` to a list of micro-batches, for batches that snugfit cannot cut.
        seed: Seed of ``train`` and of forked random states; never set on the user's own.

    Raises:
        PlanError: An argument of the wrong kind.
    """

    model: nn.Module | Callable[[], nn.Module]
    loss: Callable[[Any, Any], Any]
    optimizer: Callable[[Any], Any]
    batch: Any
    count: Count = field(default=UNSAID, kw_only=True)
    data: Callable[[], Any] | None = field(default=None, kw_only=True)
    scheduler: Callable[[Any], Any] | None = field(default=None, kw_only=True)
    max_grad_norm: float | None = field(default=None, kw_only=True)
    loss_scale: LossScale | None = field(default=None, kw_only=True)
    max_skipped_windows: int = field(default=50, kw_only=True)
    nonfinite: str = field(default="skip", kw_only=True)
    split: Callable[[Any, int], list[Any]] | None = field(default=None, kw_only=True)
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if hasattr(self.optimizer, "param_groups"):
            raise PlanError(
                "Job.optimizer is an optimizer, not a function that makes one",
                got=type(self.optimizer).__name__,
                expected="(model) -> torch.optim.Optimizer",
                hint="write optimizer=lambda model: torch.optim.AdamW(model.parameters())",
            )
        for name, form in (
            ("model", "a module, or () -> module"),
            ("loss", "(model, micro_batch) -> scalar"),
            ("optimizer", "(model) -> torch.optim.Optimizer"),
        ):
            check_callable(f"Job.{name}", getattr(self, name), form)
        for name, form in (
            ("data", "() -> iterable of full batches"),
            ("scheduler", "(optimizer) -> scheduler"),
            ("split", "(batch, micro_batch_size) -> list of micro-batches"),
        ):
            if getattr(self, name) is not None:
                check_callable(f"Job.{name}", getattr(self, name), form)
        check_training_options(self.count, self.max_grad_norm, self.max_skipped_windows, self.nonfinite)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**64:
            raise PlanError(
                "Job.seed is not a seed",
                got=f"seed={self.seed!r}",
                expected="a whole number of 64 bits",
                hint="leave it out for 0",
            )


def check_callable(name: str, value: object, form: str) -> None:
    """Check that an argument is a function.

    Raises:
        PlanError: It cannot be called.
    """
    if not callable(value):
        raise PlanError(
            f"{name} cannot be called",
            got=type(value).__name__,
            expected=form,
            hint=f"pass a function as {name.rpartition('.')[2]}",
        )


def check_module(value: object, what: str) -> None:
    """Check that something is a model.

    Args:
        value: What was given.
        what: What the model is for, as the beginning of a message: ``"Engine needs a model"``.

    Raises:
        PlanError: It is no module.
    """
    if isinstance(value, nn.Module):
        return
    is_class = isinstance(value, type) and issubclass(value, nn.Module)
    raise PlanError(
        what,
        got=f"the class {value.__name__}" if isinstance(value, type) else f"{type(value).__name__}",
        expected="a torch.nn.Module",
        hint="make one of the class first" if is_class else "pass the model itself, as in model = MyModel()",
    )


def check_training_options(
    count: object, max_grad_norm: object, max_skipped_windows: object, nonfinite: object
) -> None:
    """Check the options that ``Job`` and ``Engine`` share.

    Raises:
        PlanError: An option outside of its range.
    """
    if not callable(count) and not (isinstance(count, str) and count == "samples"):
        raise PlanError(
            "unknown count",
            got=f"count={count!r}",
            expected='"samples", snugfit.tokens(...) or a function of a micro-batch',
            hint='pass count="samples"',
        )
    is_limit = isinstance(max_grad_norm, (int, float)) and max_grad_norm > 0 and not isinstance(max_grad_norm, bool)
    if max_grad_norm is not None and not is_limit:
        raise PlanError(
            "max_grad_norm must be positive",
            got=f"max_grad_norm={max_grad_norm!r}",
            expected="a number > 0 (inf clips nothing), or None",
            hint="pass max_grad_norm=1.0, or leave it out",
        )
    skipped = max_skipped_windows
    if not isinstance(skipped, int) or isinstance(skipped, bool) or skipped < 1:
        raise PlanError(
            "max_skipped_windows must be at least 1",
            got=f"max_skipped_windows={max_skipped_windows!r}",
            expected=">= 1",
            hint="leave it out for its default",
        )
    if not isinstance(nonfinite, str) or nonfinite not in NONFINITE_POLICIES:
        raise PlanError(
            "unknown policy for non-finite gradients",
            got=f"nonfinite={nonfinite!r}",
            expected=" | ".join(map(repr, NONFINITE_POLICIES)),
            hint='pass nonfinite="skip"',
        )
