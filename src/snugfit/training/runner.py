"""Runs windows one after the other, and keeps what lives from one to the next.

Entry point: ``Runner``, which an engine makes for itself. The arithmetic of a window is ``step``'s; cutting batches
and everything that a user calls is ``engine``'s.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from snugfit.errors import NonFiniteError, PlanError
from snugfit.plans import Plan
from snugfit.training import (
    admission,
    checkpointing,
    closures,
    commit,
    distributed,
    norm_policy,
    precision,
    recovery,
    schedules,
    splitting,
    weighting,
    windows,
)
from snugfit.training import nonfinite as nonfinite_policy
from snugfit.training.chunked_loss import Planned
from snugfit.training.counting import Counting
from snugfit.training.diagnosing.rerun import Suspect
from snugfit.training.hooks import Hooks, Observer, Outcome
from snugfit.training.precision import Scaler
from snugfit.training.state import Progress
from snugfit.training.step import run_window
from snugfit.training.weighting import Number
from snugfit.training.windows import StepResult


class Runner:
    """The windows of one engine.

    Args:
        model: What is trained; may be wrapped in DDP.
        optimizers: Over its parameters.
        schedulers: Stepped once per update.
        plan: Decides when ranks synchronise and what normalisation layers do; None: as without a plan.
        loss: ``(model, micro_batch)`` to a loss.
        counting: What the losses are means over.
        precision_name: Of the forwards.
        scaler: The fp16 loss scale, or None.
        max_grad_norm: Limit of the gradient's norm, or None.
        max_skipped_windows: Non-finite windows in a row before ``NonFiniteError``.
        nonfinite: ``"skip" "raise" "ignore"``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any],
        plan: Plan | None,
        *,
        loss: Callable[[Any, Any], Any],
        counting: Counting,
        precision_name: str,
        scaler: Scaler | None,
        max_grad_norm: float | None,
        max_skipped_windows: int,
        nonfinite: str,
    ) -> None:
        self.model, self.optimizers, self.schedulers = model, tuple(optimizers), tuple(schedulers)
        self.loss, self.counting, self.precision, self.scaler = loss, counting, precision_name, scaler
        self.device = next(model.parameters()).device
        self.progress = Progress()
        self.observer: Observer | None = None
        self._max_grad_norm, self._max_skipped_windows = max_grad_norm, max_skipped_windows
        self._chunks = Planned(1 if plan is None else plan.loss_chunks)
        self._positions = schedules.Positions()
        self._membership = admission.Membership(model, self.optimizers)
        self._in_window = self._has_begun_update = False
        self.recompute: checkpointing.Handle | None = None
        "Segments whose use has not been checked yet."
        self._wrapped = isinstance(model, nn.parallel.DistributedDataParallel)
        self.ranks = distributed.world_size() if self._wrapped else 1
        admission.warn_of_lone_ranks(self._wrapped, distributed.world_size())
        self.snapshots = recovery.Snapshots(model, self.device)
        self.norms = norm_policy.apply(model, "micro" if plan is None else plan.norm_policy)
        closes = any(map(closures.needed, self.optimizers))
        self._run_window = partial(closures.run_window, restart=self.norms.discard) if closes else run_window
        self.hooks = Hooks(
            decide=nonfinite_policy.decider(nonfinite, self._bad_gradients),
            reduce_counts=self._reduce if self.ranks > 1 else list,
            gather=distributed.gather,
            synchronises=_always if plan is not None and plan.sync == "micro" else _in_the_last,
            snapshot=self.snapshots.take,
            restore=self.snapshots.restore,
            move=self._move,
            begin_update=self._begin_update,
        )

    def run(self, micro_batches: Sequence[Any], counts: Sequence[float | None], num_dropped: int = 0) -> StepResult:
        """Run one window from micro-batches that are cut and counted; all other ways of stepping end here.

        Reads no tensor value outside of ``hooks``, and retries nothing.

        Args:
            micro_batches: On the host.
            counts: Count of each; None for a loss that reports its own.
            num_dropped: Passed through to the result.
        """
        rates = self.rates()
        with self.opened(len(micro_batches)):
            outcome = self._run_window(micro_batches, counts, loss=self.loss, **self.settings())
            return self.finish(outcome, rates, windows.samples_of(micro_batches), num_dropped)

    def attempt(
        self, micro_batches: Sequence[Any], counts: Sequence[float | None], num_dropped: int = 0
    ) -> tuple[StepResult | None, str]:
        """Run a window, or take it back to its beginning and say what ran out of memory.

        The error is dropped on return: its traceback holds the frames, and with them the tensors, that failed.
        """
        snapshot = self.hooks.snapshot()
        try:
            result = self.diagnosed(micro_batches, counts, num_dropped, snapshot)
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

    def diagnosed(
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
            loss=self.loss,
            model=checkpointing.unwrapped(self.model),
            settings=self.settings(),
            precision=self.precision,
            device=self.device,
            opened=lambda: self.opened(len(micro_batches), takes_back=False),
            restore=lambda: self.hooks.restore(snapshot),
            rank=distributed.rank(),
            step=self.progress.steps,
        )

    def settings(self) -> dict[str, Any]:
        """What ``step.Window`` needs to know."""
        return {
            "model": self.model,
            "optimizers": self.optimizers,
            "hooks": self.hooks,
            "ranks": self.ranks,
            "autocast": self._autocast,
            "device_type": self.device.type,
            "loss_scale": None if self.scaler is None else self.scaler.scale,
            "max_grad_norm": self._max_grad_norm,
            "reference": self.progress.reference,
            "observer": self.observer,
        }

    def finish(self, outcome: Outcome, rates: tuple[Any, ...], samples: int, num_dropped: int) -> StepResult:
        """Move schedulers, scale and counters for a window that is over."""
        scale = None if self.scaler is None else self.scaler.scale
        overflowed = outcome.reason == "non-finite gradient"
        self.counting.end_window(is_reported=outcome.reported_counts is not None)
        self.progress.reference = weighting.references(outcome.reported_counts, self.progress.reference)
        if outcome.reason is None:
            self._begin_update()  # an optimizer that evaluates the loss itself is done only now
            self.progress.steps += 1
            self.progress.micro_steps += outcome.num_micro_batches
            self.progress.samples += samples
            self.progress.skipped_in_a_row = 0
            self._follow_the_update()
        if self.scaler is not None and (overflowed or outcome.reason is None):
            self.scaler.update(overflowed)
        if overflowed:
            self.progress.skipped_in_a_row += 1
            if self.progress.skipped_in_a_row >= self._max_skipped_windows:
                raise nonfinite_policy.too_many_skipped(
                    self.progress.skipped_in_a_row, self.progress.steps, scale, self._bad_gradients()
                )
        return StepResult(
            step=self.progress.steps,
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

    def _begin_update(self) -> None:
        if self.recompute is not None:  # before weights move, and once
            self.recompute.check_use()
            self.recompute = None
        self._has_begun_update = True

    def _follow_the_update(self) -> None:
        """Move what moves once per update, behind the optimizers."""
        try:
            with commit.behind("updating normalisation statistics"):
                self.norms.update()
            for scheduler in self.schedulers:
                with commit.behind(f"{type(scheduler).__name__}.step"):
                    scheduler.step()
        finally:
            self._positions.note(self.schedulers)

    @contextmanager
    def opened(self, num_micro_batches: int, *, takes_back: bool = True) -> Iterator[None]:
        """Note that a window is open, so that nothing is saved or begun inside of it.

        If it begins no update, for whatever reason, buffers end as they were before it. Behind that nothing is taken
        back.

        Args:
            num_micro_batches: Of the window.
            takes_back: False where the caller keeps the buffers and puts them back.

        Raises:
            DeviceMemoryError: Memory ran out when the update had begun.
        """
        buffers = self.snapshots.buffers() if takes_back else []
        steps = self.progress.steps
        self.refuse_inside("another window")
        self._positions.check(self.schedulers)
        self._membership.check()
        self.norms.begin(num_micro_batches)
        self._in_window, self._has_begun_update = True, False
        try:
            with self._chunks.window():
                yield
        except Exception as error:
            if self._has_begun_update and recovery.is_out_of_memory(error):
                raise commit.out_of_memory(error) from error
            raise
        finally:
            self._in_window = False
            self.norms.end()
            if self.progress.steps == steps:
                self.norms.discard()
                if not self._has_begun_update:
                    self.snapshots.restore_buffers(buffers)

    def note_schedulers(self) -> None:
        """Take the schedulers' places as right, after they were loaded."""
        self._positions.note(self.schedulers)

    def refuse_inside(self, what: str) -> None:
        """Refuse what may not happen while a window is open.

        Raises:
            PlanError: A window is open.
        """
        if self._in_window:
            raise PlanError(
                f"{what} was asked for inside of a window",
                got="a window that has not made its update yet",
                expected="a call between two windows",
                hint="move the call behind the window's end",
            )

    def _autocast(self) -> AbstractContextManager[Any]:
        return self._chunks.forward(precision.autocast(self.precision, self.device))

    def _move(self, micro_batch: Any) -> Any:
        return splitting.move(micro_batch, self.device)

    def _reduce(self, values: Sequence[Number]) -> Sequence[Number]:
        return distributed.reduce_counts(values, self.device)

    def rates(self) -> tuple[Any, ...]:
        """Learning rates of all parameter groups, as they are now."""
        rates = (group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups)
        return tuple(rate.clone() if isinstance(rate, Tensor) else rate for rate in rates)

    def _bad_gradients(self) -> tuple[str, ...]:
        return nonfinite_policy.bad_gradients(checkpointing.unwrapped(self.model))


def _always(i: int, number: int) -> bool:
    return True


def _in_the_last(i: int, number: int) -> bool:
    return i == number - 1
