"""The engine: takes a full batch, or a list of micro-batches, and makes one update of it.

Entry point: ``Engine``. It holds what lives from one window to the next (loss scale, counters, handles); the
arithmetic of a window is ``step``'s. Making model and optimizer in the right order is ``build``'s.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from snugfit.errors import NonFiniteError, PlanError
from snugfit.jobs import UNSAID, Count, LossScale, check_callable, check_training_options
from snugfit.plans import Plan
from snugfit.training import (
    admission,
    bf16_weights,
    checkpointing,
    closures,
    counting,
    distributed,
    fingerprint,
    norm_policy,
    precision,
    recovery,
    schedules,
    splitting,
    weighting,
    windows,
)
from snugfit.training import nonfinite as nonfinite_policy
from snugfit.training.precision import scaler as scaler_of
from snugfit.training.rerun import Suspect
from snugfit.training.state import Parts, Progress, collect, load
from snugfit.training.step import Hooks, Observer, Outcome, Window, run_window
from snugfit.training.weighting import Number
from snugfit.training.windows import HandWindow, MicroBatches, StepResult


class Engine:
    """Exact accumulation: many micro-batches, one update, the numbers of the full batch.

    Args:
        model: What is trained, on its device; may already be wrapped in DDP.
        optimizer: The optimizer, or several, over its parameters.
        plan: Sets micro-batch size, precision and what is recomputed.
        loss: ``(model, micro_batch)`` to a scalar mean over the counted units, a ``Loss``, or several of them.
        count: What the loss is a mean over, see ``Job``.
        micro_batch_size: Samples of one forward and backward; None: the plan's, or the whole batch.
        precision: ``"32-true" "16-mixed" "bf16-mixed"``, or ``"auto"``: what the model's device is good at, with the
            reason in ``precision_reason``. The plan's if there is one.
        scheduler: The scheduler, or several; stepped once per update.
        max_grad_norm: Limit of the gradient's norm.
        loss_scale: The fp16 loss scale; None means ``LossScale()``.
        max_skipped_windows: Non-finite windows in a row before ``NonFiniteError``.
        nonfinite: ``"skip" "raise" "ignore"`` a window whose gradient is not finite.
        split: ``(batch, micro_batch_size)`` to a list of micro-batches, for batches that snugfit cannot cut.

    Known limitations: a loss that reports its own count as a tensor costs one synchronisation per micro-step; a norm
    that overflows counts as non-finite; under DDP an out-of-memory error is not retried.

    Raises:
        PlanError: Arguments contradict each other or the model.
        UnsupportedError: A plan that replaces parameters, or an optimizer, scheduler or model that cannot be driven.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        plan: Plan | None = None,
        *,
        loss: Callable[[Any, Any], Any],
        count: Count = UNSAID,
        micro_batch_size: int | None = None,
        precision: str = "32-true",
        scheduler: Any = None,
        max_grad_norm: float | None = None,
        loss_scale: LossScale | None = None,
        max_skipped_windows: int = 50,
        nonfinite: str = "skip",
        split: Callable[[Any, int], list[Any]] | None = None,
    ) -> None:
        check_training_options(count, max_grad_norm, max_skipped_windows, nonfinite)
        check_callable("loss", loss, "(model, micro_batch) -> scalar")
        if split is not None:
            check_callable("split", split, "(batch, micro_batch_size) -> list of micro-batches")
        self.model, self.plan = model, plan
        self.optimizers = tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)
        self.schedulers = schedules.accepted(scheduler)
        size, asked = admission.size_and_precision(plan, micro_batch_size, precision)
        self.precision, self.precision_reason = admission.precision_on_its_device(asked, model)
        weighting.check_function(loss)
        admission.check(model, self.optimizers, plan, self.precision, nonfinite)
        if plan is not None:
            fingerprint.check(plan, model)
        self._progress = Progress(micro_batch_size=size)
        self._loss, self._count, self._split = loss, count, split
        self._max_grad_norm = max_grad_norm
        self._max_skipped_windows = max_skipped_windows
        self._scaler = scaler_of(self.precision, loss_scale)
        self._positions = schedules.Positions()
        self.observer: Observer | None = None
        self._in_window = self._is_count_settled = self._is_count_doubtful = False
        self._device = next(model.parameters()).device
        self._wrapped = isinstance(model, nn.parallel.DistributedDataParallel)
        self._ranks = distributed.world_size() if self._wrapped else 1
        admission.warn_of_lone_ranks(self._wrapped, distributed.world_size())
        self._snapshots = recovery.Snapshots(model, self._device)
        self._norms = norm_policy.apply(model, "micro" if plan is None else plan.norm_policy)
        closes = any(map(closures.needed, self.optimizers))
        self._run_window = partial(closures.run_window, restart=self._norms.discard) if closes else run_window
        self._recompute = checkpointing.apply(model, plan.recompute) if plan is not None and plan.recompute else None
        self.hooks = Hooks(
            decide=nonfinite_policy.decider(nonfinite, self._bad_gradients),
            reduce_counts=self._reduce if self._ranks > 1 else list,
            synchronises=_always if plan is not None and plan.sync == "micro" else _in_the_last,
            snapshot=self._snapshots.take,
            restore=self._snapshots.restore,
            move=self._move,
        )

    @property
    def step_count(self) -> int:
        """Updates done; schedules and logs count these."""
        return self._progress.steps

    @property
    def micro_step_count(self) -> int:
        """Micro-batches that went into updates."""
        return self._progress.micro_steps

    @property
    def sample_count(self) -> int:
        """Samples of this rank that went into updates."""
        return self._progress.samples

    @property
    def num_denominators(self) -> int:
        """Losses with counts of their own, of the windows so far."""
        return len(self._progress.reference or ())

    @property
    def micro_batch_size(self) -> int | None:
        """Samples of a micro-batch of ``step``; smaller after an out-of-memory error. None: the whole batch."""
        return self._progress.micro_batch_size

    def step(self, batch: Any) -> StepResult:
        """Make one update from the full batch of this rank, which is cut here and moved piece by piece.

        An out-of-memory error in forward or backward restarts the window with half the micro-batch size, which then
        stays: same samples, same weights.

        Raises:
            BatchError: The batch cannot be cut or counted.
            DeviceMemoryError: A single sample does not fit, or the optimizer's update ran out of memory.
            NonFiniteError: See ``nonfinite`` and ``max_skipped_windows``.
        """
        size = self._progress.micro_batch_size
        while True:
            parts, counts = self.prepare(batch, size)
            result, failure = self._attempt(parts, counts)
            if result is not None:
                self._progress.micro_batch_size = size
                return result
            size = recovery.halved(max(parts.sizes or (size or 1,)), failure)

    def step_window(self, micro_batches: Iterable[Any]) -> StepResult:
        """Make one update from a list of micro-batches; out-of-memory errors are treated as in ``step``."""
        given = windows.listed(micro_batches)
        dropped = micro_batches.num_dropped if isinstance(micro_batches, MicroBatches) else 0
        parts, counts = given, self._counts_of(given)
        size = None
        while True:
            result, failure = self._attempt(parts, counts, dropped)
            if result is not None:
                return result
            size = recovery.halved(max(map(splitting.num_samples, given)) if size is None else size, failure)
            cut = [self.prepare(whole, size) for whole in given]
            parts, counts = [part for some, _ in cut for part in some], [count for _, some in cut for count in some]

    def prepare(self, batch: Any, micro_batch_size: int | None = None) -> tuple[MicroBatches, list[float]]:
        """Cut a batch on the host into micro-batches and count each; None leaves it whole.

        Raises:
            BatchError: The batch cannot be cut or counted.
        """
        self._settle_count(batch)
        return windows.prepare(batch, micro_batch_size, self._count, self._split)

    def run(self, micro_batches: Sequence[Any], counts: Sequence[float | None], num_dropped: int = 0) -> StepResult:
        """Run one window from micro-batches that are cut and counted; all other ways of stepping end here.

        Reads no tensor value outside of ``hooks``, and retries nothing.

        Args:
            micro_batches: On the host.
            counts: Count of each; None for a loss that reports its own.
            num_dropped: Passed through to the result.
        """
        rates = self._rates()
        with self._opened(len(micro_batches)):
            outcome = self._run_window(micro_batches, counts, loss=self._loss, **self._settings())
            return self._finish(outcome, rates, windows.samples_of(micro_batches), num_dropped)

    def windows(
        self, loader: Iterable[Any], accumulation_steps: int | None = None, tail: str = "flush", uneven: str = "use"
    ) -> Iterator[MicroBatches]:
        """Group a loader of micro-batches into windows for ``step_window``.

        That makes ``ceil(len(loader) / accumulation_steps)`` updates per epoch, with ``tail="drop"`` the floor: the
        horizon of a schedule. Errors of the loader pass through.

        Args:
            loader: Read no further than the window at hand needs.
            accumulation_steps: Micro-batches of a window; None: the plan's.
            tail: ``"flush"`` makes a short window of what is left at the end, ``"drop"`` leaves it out.
            uneven: On several ranks, when one rank's loader ends first: ``"use"`` what is left on the others, which
                is refused for now where it happens, or ``"cut"`` it off on all ranks.

        Raises:
            PlanError: Neither a plan nor ``accumulation_steps``, or an unknown ``tail`` or ``uneven``.
            UnsupportedError: Ranks have another number of windows, on all ranks when they find out.
        """
        if accumulation_steps is None:
            if self.plan is None:
                raise PlanError(
                    "the length of a window is not known",
                    got="accumulation_steps=None and no plan",
                    expected="one of the two",
                    hint="pass accumulation_steps=4",
                )
            accumulation_steps = self.plan.accumulation_steps
        return windows.grouped(loader, accumulation_steps, tail, uneven, self.hooks.reduce_counts, self._ranks)

    @contextmanager
    def window(self, batch_or_micro_batches: Any) -> Iterator[HandWindow]:
        """Drive one window by hand: several optimizers, losses that need each other.

        Args:
            batch_or_micro_batches: A list is taken as micro-batches; anything else as a batch, which is cut.

        Raises:
            PlanError: The loop over the micro-batches was left early.
            DeviceMemoryError: The device ran out of memory; nothing is retried here.
        """
        closures.refuse_by_hand(self.optimizers)
        if isinstance(batch_or_micro_batches, list):
            micro_batches = MicroBatches(batch_or_micro_batches)
            counts = self._counts_of(micro_batches)
        else:
            micro_batches, counts = self.prepare(batch_or_micro_batches, self._progress.micro_batch_size)
        rates, samples = self._rates(), windows.samples_of(micro_batches)

        def finish(outcome: Outcome) -> StepResult:
            return self._finish(outcome, rates, samples, 0)

        driven = HandWindow(Window(counts, **self._settings()), micro_batches, finish)
        try:
            with self._opened(len(micro_batches)), driven as window:
                yield window
        except NonFiniteError as error:
            raise nonfinite_policy.explained_by_hand(error) from error

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Evaluate: modules in evaluation mode, the engine's precision, no gradients; modes are restored afterwards."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad(), precision.autocast(self.precision, self._device, cache_enabled=False):
                yield self.model
        finally:
            for module, mode in modes:
                module.training = mode

    def state_dict(self, model: bool = True) -> dict[str, Any]:
        """Everything that the next windows depend on, as tensors and built-in values (``weights_only`` loads them).

        Args:
            model: Whether the weights are included.

        Raises:
            PlanError: Inside of a window.
        """
        self._refuse_inside("state_dict")
        return collect(self._parts(), self._progress, model)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned, random states included.

        Raises:
            PlanError: Inside of a window, or a state of another number of optimizers or schedulers.
        """
        self._refuse_inside("load_state_dict")
        load(self._parts(), self._progress, state)
        self._positions.note(self.schedulers)

    def check_ranks(self) -> None:
        """Check that all ranks hold the same weights, bit for bit.

        Raises:
            PlanError: They do not; names them.
        """
        distributed.check_ranks(self.model)

    def close(self) -> nn.Module:
        """Take everything off the model that the engine put on it, and return the plain module."""
        if self._recompute is not None:
            self._recompute.remove()
            self._recompute = None
        self._norms.remove()
        if self.precision == "bf16-true":
            bf16_weights.release(self.model)
        return checkpointing.unwrapped(self.model)

    def _attempt(
        self, micro_batches: Sequence[Any], counts: Sequence[float | None], num_dropped: int = 0
    ) -> tuple[StepResult | None, str]:
        """Run a window, or take it back to its beginning and say what ran out of memory.

        The error is dropped on return: its traceback holds the frames, and with them the tensors, that failed.
        """
        snapshot = self.hooks.snapshot()
        try:
            result = self.run_diagnosed(micro_batches, counts, num_dropped, snapshot)
        except Exception as error:
            if not recovery.is_out_of_memory(error):
                raise
            if self._wrapped:
                raise recovery.not_retried(error, "under DDP, whose ranks would have to agree on it") from error
            failure = f"{type(error).__name__}: {error}"
        else:
            return result, ""
        self.hooks.restore(snapshot)
        return None, failure

    def run_diagnosed(
        self,
        micro_batches: Sequence[Any],
        counts: Sequence[float | None],
        num_dropped: int = 0,
        snapshot: Any = None,
    ) -> StepResult:
        """Run one window as ``run`` does; a ``NonFiniteError`` comes with the diagnosis of that window.

        Args:
            micro_batches: On the host.
            counts: Count of each.
            num_dropped: Passed through to the result.
            snapshot: Of ``hooks.snapshot()``, if it was taken.
        """
        snapshot = self.hooks.snapshot() if snapshot is None else snapshot
        suspect = self.suspect(micro_batches, counts, snapshot)
        try:
            return self.run(micro_batches, counts, num_dropped)
        except NonFiniteError as error:
            failed = error.with_traceback(None)  # its frames hold gradients
        raise nonfinite_policy.explained(failed, suspect) from failed

    def suspect(self, micro_batches: Sequence[Any], counts: Sequence[float | None], snapshot: Any) -> Suspect:
        """A window before it runs, so that it can be diagnosed if it goes wrong.

        Args:
            micro_batches: On the host.
            counts: Count of each.
            snapshot: Of ``hooks.snapshot()``, at the window's beginning.
        """
        return Suspect(
            micro_batches=micro_batches,
            counts=counts,
            loss=self._loss,
            model=checkpointing.unwrapped(self.model),
            settings=self._settings(),
            precision=self.precision,
            device=self._device,
            opened=lambda: self._opened(len(micro_batches)),
            restore=lambda: self.hooks.restore(snapshot),
            rank=distributed.rank(),
            step=self.step_count,
        )

    def _bad_gradients(self) -> tuple[str, ...]:
        return nonfinite_policy.bad_gradients(checkpointing.unwrapped(self.model))

    def _settle_count(self, batch: Any) -> None:
        """Decide at the first batch what is counted, where nobody said it."""
        if not self._is_count_settled:
            self._is_count_settled = True
            self._count = counting.settled(self._count, self.model, batch)
            self._is_count_doubtful = counting.is_doubtful(self._count, batch)

    def _counts_of(self, micro_batches: Sequence[Any]) -> list[float]:
        if micro_batches:
            self._settle_count(micro_batches[0])
        return windows.counts_of(micro_batches, self._count)

    def _settings(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizers": self.optimizers,
            "hooks": self.hooks,
            "ranks": self._ranks,
            "autocast": self._autocast,
            "device_type": self._device.type,
            "loss_scale": None if self._scaler is None else self._scaler.scale,
            "max_grad_norm": self._max_grad_norm,
            "reference": self._progress.reference,
            "observer": self.observer,
        }

    def _finish(self, outcome: Outcome, rates: tuple[Any, ...], samples: int, num_dropped: int) -> StepResult:
        """Move schedulers, scale and counters for a window that is over."""
        scale = None if self._scaler is None else self._scaler.scale
        overflowed = outcome.reason == "non-finite gradient"
        if self._is_count_doubtful and outcome.reported_counts is None:
            counting.warn_of_ignored_labels()
        self._is_count_doubtful = False
        self._progress.reference = weighting.references(outcome.reported_counts, self._progress.reference)
        if outcome.reason is None:
            self._progress.steps += 1
            self._progress.micro_steps += outcome.num_micro_batches
            self._progress.samples += samples
            self._progress.skipped_in_a_row = 0
            self._norms.update()
            for scheduler in self.schedulers:
                scheduler.step()
            self._positions.note(self.schedulers)
        if self._scaler is not None and (overflowed or outcome.reason is None):
            self._scaler.update(overflowed)
        if overflowed:
            self._progress.skipped_in_a_row += 1
            if self._progress.skipped_in_a_row >= self._max_skipped_windows:
                raise nonfinite_policy.too_many_skipped(
                    self._progress.skipped_in_a_row, self.step_count, scale, self._bad_gradients()
                )
        return StepResult(
            step=self.step_count,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            lr=rates,
            loss_scale=scale,
            count=outcome.count,
            num_micro_batches=outcome.num_micro_batches,
            num_dropped=num_dropped,
            skipped=outcome.reason is not None,
            reason=outcome.reason,
            metrics=outcome.metrics,
        )

    @contextmanager
    def _opened(self, num_micro_batches: int) -> Iterator[None]:
        """Note that a window is open, so that nothing is saved or begun inside of it.

        If it makes no update, for whatever reason, buffers end as they were before it.
        """
        buffers, steps = self._snapshots.buffers(), self.step_count
        self._refuse_inside("another window")
        self._positions.check(self.schedulers)
        self._norms.begin(num_micro_batches)
        self._in_window = True
        try:
            yield
        finally:
            self._in_window = False
            if self.step_count == steps:
                self._norms.discard()
                self._snapshots.restore_buffers(buffers)

    def _refuse_inside(self, what: str) -> None:
        if self._in_window:
            raise PlanError(
                f"{what} was asked for inside of a window",
                got="a window that has not made its update yet",
                expected="a call between two windows",
                hint="move the call behind the window's end",
            )

    def _parts(self) -> Parts:
        model = checkpointing.unwrapped(self.model)
        return Parts(model, self.optimizers, self.schedulers, self._scaler, self._device)

    def _autocast(self) -> AbstractContextManager[Any]:
        return precision.autocast(self.precision, self._device)

    def _move(self, micro_batch: Any) -> Any:
        return splitting.move(micro_batch, self._device)

    def _reduce(self, values: Sequence[Number]) -> Sequence[Number]:
        return distributed.reduce_counts(values, self._device)

    def _rates(self) -> tuple[Any, ...]:
        rates = (group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups)
        return tuple(rate.clone() if isinstance(rate, Tensor) else rate for rate in rates)


def _always(i: int, number: int) -> bool:
    return True


def _in_the_last(i: int, number: int) -> bool:
    return i == number - 1
