"""Runs windows of a job, each on a copy of its model, and keeps what a comparison needs of them.

Entry point: ``Bench``. It is ``build``'s engine that runs, which is stopped before its update. Comparing
is ``agreement``'s.
"""

import copy
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from snugfit.errors import DeviceMemoryError, PlanError, SnugfitError
from snugfit.jobs import Count, Job, Loss, LossScale
from snugfit.plans import Plan
from snugfit.training import build, caches, norms, random_states, recovery, splitting, torch_private
from snugfit.training.checking import agreement, reached, side_effects
from snugfit.training.checking.observing import ModuleNames, Observer

COMPARED = "compared"
"Reason of a window that was stopped before its update."


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a window is run."""

    precision: str
    dtype: torch.dtype | None = None
    "What model and data are converted to; None: as they are."
    is_steady: bool = False
    "Whether random operations give constants."
    recomputes: bool = False
    "Whether anything is recomputed, by the plan or by the model itself."
    keeps_batch_norms: bool = True
    "Else they are in evaluation mode, so that they couple nothing."
    loss_scale: float | None = None


@dataclass(slots=True, eq=False)
class Trial:
    """What one window did before it was stopped; tensors are on the host, in float64."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    loss: float = float("nan")
    count: float = float("nan")
    reason: str | None = None
    "Why it made no update: ``COMPARED``, or what the engine says."
    error: Exception | None = None
    failed_in: str = ""
    "Module in which it was raised, where an observer watched."
    state: Any = None
    "What ``look`` made of the model afterwards."
    changed: list[str] = field(default_factory=list)
    "Tensors of a micro-batch that were changed in place."
    coarsest: torch.dtype = torch.float64
    "Of the types that the gradients were summed in."
    drawn: set[str] = field(default_factory=set)
    "Random operations that gave constants."
    drawn_elsewhere: set[str] = field(default_factory=set)
    "Where random numbers came from that were no constants."
    redrawn: set[str] = field(default_factory=set)
    "See ``torch_private.Steady``."

    @property
    def is_finite(self) -> bool:
        """Whether it ran and all its numbers are finite."""
        values = [self.loss, *(float(g.abs().sum()) for g in self.gradients.values())]
        return self.error is None and bool(np.isfinite(values).all())

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether memory ran out before its end."""
        return self.error is not None and recovery.is_out_of_memory(self.error)


class Bench:
    """Runs windows of a job, each from the same weights and random states.

    Args:
        job: Its model is never run, only copies of it.
        plan: For one rank.
        device: Where.
        template: The model, of which each window gets a copy.
        owned: Names of the parameters that the job's optimizers hold.
    """

    def __init__(self, job: Job, plan: Plan, device: torch.device, template: nn.Module, owned: Sequence[str]) -> None:
        self.job, self.plan, self.device = job, plan, device
        self._template, self._owned = template, owned
        self.num_forwards = 0

    def trained(self, model: nn.Module) -> list[str]:
        """Names of the parameters of a model that the job's optimizers hold and that are not frozen."""
        known = dict(model.named_parameters())
        return [name for name in self._owned if known[name].requires_grad]

    def cut(
        self, batch: Any, micro_batch_size: int | None, count: "Count | None" = None
    ) -> tuple[list[Any], list[float]]:
        """Micro-batches of a batch and their counts; None leaves it whole."""
        job = self.job if count is None else replace(self.job, count=count)
        if micro_batch_size is None:
            micro_batch_size = splitting.num_samples(batch) if job.split is None else self.plan.samples_per_rank
        return build.prepare(job, batch, micro_batch_size)

    def run(
        self,
        parts: Sequence[Any],
        counts: Sequence[float | None],
        setting: Setting,
        *,
        observer: Observer | None = None,
        names: ModuleNames | None = None,
        around_checkpoints: Callable[[torch_private.CheckpointCall], Callable[[], None]] | None = None,
        on_loss: Callable[[Any], None] | None = None,
        around_model: Callable[[nn.Module], AbstractContextManager[Any]] | None = None,
        look: Callable[[nn.Module], Any] | None = None,
    ) -> Trial:
        """Run one window up to its update.

        Args:
            parts: Micro-batches on the host; copies of them are used.
            counts: Of each.
            setting: How.
            observer: Watches the forward.
            names: Learns which module runs.
            around_checkpoints: See ``torch_private.checkpoint_calls``.
            on_loss: Told of what each call of the loss function returned.
            around_model: Makes a context from the model, entered for the window.
            look: Makes ``Trial.state`` of the model when all gradients are there.

        Returns:
            What it did; an error of the user's code is in ``.error``, one of snugfit is raised.
        """
        trial, steady = Trial(), torch_private.Steady()
        with ExitStack() as stack:
            stack.enter_context(random_states.seeded(self.job.seed, self.device))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(_default_dtype(setting.dtype))
            try:
                engine = self._engine(setting, names, observer, on_loss)
                self._hook(engine, trial, setting, look)
                if names is not None:
                    stack.enter_context(names.of(engine.model))
                if around_model is not None:
                    stack.enter_context(around_model(engine.model))
                around = around_checkpoints or _unwatched
                stack.enter_context(torch_private.checkpoint_calls(around, plain=not setting.recomputes))
                outside = random.getstate(), random_states.numpy_state()
                generators = reached.Generators(engine.model, [self.job.loss])
                stack.enter_context(steady if setting.is_steady else nullcontext())
                result = engine.runner.run(_copied(parts), counts)
                trial.reason, trial.loss, trial.count = result.reason, float(result.loss), float(result.count)
                trial.drawn |= steady.seen
                trial.drawn_elsewhere |= steady.unknown | _drawn_outside(outside) | generators.moved()
                trial.redrawn |= steady.redrawn
            except SnugfitError as error:
                if recovery.is_out_of_memory(error.__cause__ or error):
                    trial.error = error
                elif setting.recomputes and isinstance(error.__cause__, Exception):  # it may be what is looked for
                    trial.error = error.__cause__
                else:
                    raise
            except Exception as error:
                trial.error = error
                trial.failed_in = observer.failed_in if observer is not None else ""
        if trial.error is not None and trial.ran_out_of_memory:
            trial.error.__traceback__ = None  # its frames hold the tensors that failed
        return trial

    def _engine(
        self,
        setting: Setting,
        names: ModuleNames | None,
        observer: Observer | None,
        on_loss: Callable[[Any], None] | None,
    ) -> Any:
        model = build.copied(self._template)
        if self.plan.recompute:  # also where nothing is recomputed, so that two runs differ in nothing else
            known = dict(model.named_modules())
            wanted = (name for segment in self.plan.recompute for name in segment.modules)
            caches.turned_off(model, [known[name] for name in wanted if name in known])
        if setting.dtype is not None:
            _convert(model, setting.dtype)
        if not setting.keeps_batch_norms:
            for _, layer in norms.batch_norms(model):
                layer.eval()

        def loss(model: nn.Module, micro_batch: Any) -> Any:
            self.num_forwards += 1
            with observer or nullcontext():
                value = self.job.loss(model, micro_batch)
            if names is not None:
                names.end_forward(losses_of(value))
            if on_loss is not None:
                on_loss(value)
            return value

        scale = setting.loss_scale
        job = replace(
            self.job,
            model=lambda: model,
            loss=loss,
            optimizer=self._optimizer,
            scheduler=None,
            max_grad_norm=None,
            nonfinite="skip",
            loss_scale=self.job.loss_scale if scale is None else LossScale(init_scale=scale, floor=min(scale, 1.0)),
        )
        plan = replace(
            self.plan,
            precision=setting.precision,
            recompute=self.plan.recompute if setting.recomputes else (),
            optimizer_impl="as-given",
        )
        return build.construct(job, plan, self.device)

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        known = dict(model.named_parameters())
        return torch.optim.SGD([known[name] for name in self.trained(model)], lr=0.0)

    def _hook(self, engine: Any, trial: Trial, setting: Setting, look: Callable[[nn.Module], Any] | None) -> None:
        own = engine.runner.hooks
        moved: list[tuple[str, Tensor, Tensor]] = []

        def look_at_moved() -> None:
            for path, tensor, kept in moved:
                if path not in trial.changed and not side_effects.same_values(tensor, kept):
                    trial.changed.append(path)
            moved.clear()

        def move(micro_batch: Any) -> Any:
            look_at_moved()
            found = own.move(micro_batch)
            dtype = setting.dtype
            if dtype is not None:
                found = splitting.map_tensors(lambda tensor: _as(tensor, dtype), found)
            moved.extend((path, tensor, tensor.detach().clone()) for path, tensor in splitting.named_tensors(found))
            return found

        def decide(found_inf: Tensor | None, count: Any) -> str | None:
            reason: str | None = own.decide(None, count)
            if found_inf is None or reason is not None:
                return reason
            look_at_moved()
            trial.state = None if look is None else look(engine.model)  # the engine takes buffers back afterwards
            found = {
                name: parameter.grad
                for name, parameter in engine.model.named_parameters()
                if parameter.grad is not None and name in self._owned
            }
            trial.gradients = {name: _on_host(gradient) for name, gradient in found.items()}
            trial.coarsest = agreement.coarsest([gradient.dtype.to_real() for gradient in found.values()])
            return COMPARED

        engine.runner.hooks = replace(own, move=move, decide=decide)


def losses_of(value: Any) -> Iterable[Tensor]:
    """The tensors of what a loss function returned."""
    for one in value if isinstance(value, (list, tuple)) else [value]:
        tensor = one.total if isinstance(one, Loss) else one
        if isinstance(tensor, Tensor):
            yield tensor


def raised(error: Exception, doing: str) -> SnugfitError:
    """The named error for a loss function that raised."""
    return PlanError(
        f"the job raised {type(error).__name__} {doing}",
        got=f"{type(error).__name__}: {str(error).strip() or 'no message'}",
        expected="a loss for every micro-batch",
        hint="call job.loss(model, micro_batch) by itself to see where it fails",
    )


def too_large(error: Exception | None, what: str) -> DeviceMemoryError:
    """The named error for something of a job that has to fit the device to be checked, and does not."""
    return DeviceMemoryError(
        f"{what} does not fit the device while the job is checked",
        got=short(error),
        expected="memory for two copies of the model, its gradients and one micro-batch",
        hint="check a smaller model or micro_batch_size: faults of a job do not depend on its size",
    )


def short(error: Exception | None) -> str:
    """An error in one line."""
    message = str(error).strip().splitlines()
    return f"{type(error).__name__}: {message[0][:160] if message else 'no message'}"


def _unwatched(call: torch_private.CheckpointCall) -> Callable[[], None]:
    return lambda: None


def _drawn_outside(before: tuple[Any, Any]) -> set[str]:
    moved = set() if random.getstate() == before[0] else {"Python's random"}
    return moved if random_states.numpy_state() == before[1] else moved | {"numpy.random"}


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _copied(parts: Sequence[Any]) -> Sequence[Any]:
    try:
        return copy.deepcopy(parts)
    except Exception:  # whatever the user's batch holds: then it is used as it is
        return parts


def _convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert weights and buffers, complex ones as well, which ``Module.double`` leaves as they are."""
    model.double() if dtype == torch.float64 else model.float()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_complex():
                parameter.data = _as(parameter.data, dtype)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_complex():
                setattr(module, name, _as(buffer, dtype))


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _on_host(gradient: Tensor) -> Tensor:
    gradient = gradient.to_dense() if gradient.layout != torch.strided else gradient
    gradient = torch.view_as_real(gradient.detach()) if gradient.is_complex() else gradient.detach()
    return gradient.to("cpu", torch.float64, copy=True)
