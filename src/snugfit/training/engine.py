"""The engine: takes a full batch, or a list of micro-batches, and makes one update of it.

Entry point: ``Engine``. It holds what lives from one window to the next (loss scale, counters, handles); the
arithmetic of a window is ``step``'s. Making model and optimizer in the right order is ``build``'s.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from snugfit.errors import NonFiniteError
from snugfit.jobs import UNSAID, Count, LossScale, check_callable, check_training_options
from snugfit.plans import Plan
from snugfit.training import (
    admission,
    bf16_weights,
    checkpointing,
    closures,
    distributed,
    failures,
    fingerprint,
    precision,
    recovery,
    schedules,
    splitting,
    weighting,
    windows,
)
from snugfit.training import nonfinite as nonfinite_policy
from snugfit.training.counting import Counting
from snugfit.training.hooks import Outcome
from snugfit.training.precision import scaler as scaler_of
from snugfit.training.runner import Runner
from snugfit.training.state import Parts, collect, load
from snugfit.training.step import Window
from snugfit.training.windows import HandWindow, MicroBatches, StepResult


class Engine:
    """Exact accumulation: many micro-batches, one update, the numbers of the full batch.

    Args:
        model: What is trained, on its device; may already be wrapped in DDP.
        optimizer: The optimizer, or several, over its parameters.
        plan: Sets micro-batch size, precision and what is recomputed. Its batch size is what memory and time were
            planned for and is not enforced: a batch of any size is one update.
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
        self.plan = plan
        optimizers = tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)
        schedulers = schedules.accepted(scheduler, optimizers)
        size, asked = admission.size_and_precision(plan, micro_batch_size, precision)
        self.precision, self.precision_reason = admission.precision_on_its_device(asked, model)
        weighting.check_function(loss)
        admission.check(model, optimizers, plan, self.precision, nonfinite)
        if plan is not None:
            fingerprint.check(plan, model, optimizers)
        self._split, self._is_size_given = split, micro_batch_size is not None
        self.runner = Runner(
            model,
            optimizers,
            schedulers,
            plan,
            loss=loss,
            counting=Counting(count, model),
            precision_name=self.precision,
            scaler=scaler_of(self.precision, loss_scale),
            max_grad_norm=max_grad_norm,
            max_skipped_windows=max_skipped_windows,
            nonfinite=nonfinite,
        )
        self._progress = self.runner.progress
        self._progress.micro_batch_size = size
        self._bf16 = bf16_weights.hold(model, optimizers) if self.precision == "bf16-true" else None
        self._recompute = checkpointing.apply(model, plan.recompute) if plan is not None and plan.recompute else None
        self.runner.recompute = self._recompute

    @property
    def model(self) -> nn.Module:
        """What is trained, as it was given."""
        return self.runner.model

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Stepped together or not at all."""
        return self.runner.optimizers

    @property
    def schedulers(self) -> tuple[Any, ...]:
        """Stepped once per update."""
        return self.runner.schedulers

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
            result, failure = self.runner.attempt(parts, counts)
            if result is not None:
                self._progress.micro_batch_size = size
                return result
            tried = max(parts.sizes) if parts.sizes else size or recovery.largest([batch], self._split)
            size = recovery.halved(tried, failure)

    def step_window(self, micro_batches: Iterable[Any]) -> StepResult:
        """Make one update from a list of micro-batches; out-of-memory errors are treated as in ``step``.

        Micro-batches of windows to come are then cut to what was found to fit.

        Raises:
            BatchError: The list is one batch, or a micro-batch cannot be counted or cut.
            DeviceMemoryError: See ``step``.
            NonFiniteError: See ``step``.
        """
        given = windows.listed(micro_batches)
        dropped = micro_batches.num_dropped if isinstance(micro_batches, MicroBatches) else 0
        limit = self._progress.micro_batch_limit
        try:
            while True:
                parts, counts = (given, self._counts_of(given)) if limit is None else self._cut(given, limit)
                result, failure = self.runner.attempt(parts, counts, dropped)
                if result is not None:
                    self._progress.micro_batch_limit = limit
                    return result
                limit = recovery.halved(recovery.largest(given, self._split) if limit is None else limit, failure)
        except Exception as error:
            failures.note_a_batch(error, given)
            raise

    def _cut(self, given: Sequence[Any], size: int) -> tuple[MicroBatches, list[float]]:
        """Micro-batches and their counts, the larger ones of them cut."""
        parts, counts = MicroBatches(), list[float]()
        sizes: list[int] = []
        for whole in given:
            if self._split is None and splitting.samples_or_none(whole) == 0:  # there is nothing to cut
                parts.append(whole)
                counts += self._counts_of([whole])
                sizes.append(0)
                continue
            some, theirs = self.prepare(whole, size)
            parts += some
            counts += theirs
            sizes += some.sizes or ()
        parts.sizes = tuple(sizes) if len(sizes) == len(parts) else None
        return parts, counts

    def prepare(self, batch: Any, micro_batch_size: int | None = None) -> tuple[MicroBatches, list[float]]:
        """Cut a batch on the host into micro-batches and count each; None leaves it whole.

        Raises:
            BatchError: The batch cannot be cut or counted.
        """
        return windows.prepare(batch, micro_batch_size, self.runner.counting.of(batch), self._split)

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
        steps = windows.length(accumulation_steps, self.plan)
        return windows.grouped(loader, steps, tail, uneven, self.runner.hooks.reduce_counts, self.runner.ranks)

    @contextmanager
    def window(self, batch_or_micro_batches: Any) -> Iterator[HandWindow]:
        """Drive one window by hand: several optimizers, losses that need each other.

        Args:
            batch_or_micro_batches: A list is taken as micro-batches; anything else as a batch, which is cut.

        Raises:
            PlanError: The loop over the micro-batches was left early.
            BatchError: The list is one batch, or a micro-batch cannot be counted or cut.
            DeviceMemoryError: The device ran out of memory; nothing is retried here.
        """
        closures.refuse_by_hand(self.optimizers)
        if isinstance(batch_or_micro_batches, list):
            micro_batches = MicroBatches(windows.listed(batch_or_micro_batches))
            counts = self._counts_of(micro_batches)
        else:
            micro_batches, counts = self.prepare(batch_or_micro_batches, self._progress.micro_batch_size)
        rates, samples = self.runner.rates(), windows.samples_of(micro_batches)

        def finish(outcome: Outcome) -> StepResult:
            return self.runner.finish(outcome, rates, samples, 0)

        driven = HandWindow(Window(counts, **self.runner.settings()), micro_batches, finish)
        try:
            with self.runner.opened(len(micro_batches)), driven as window:
                yield window
        except NonFiniteError as error:
            raise nonfinite_policy.explained_by_hand(error) from error

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Evaluate: modules in evaluation mode, the engine's precision, no gradients; modes are restored afterwards."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad(), precision.autocast(self.precision, self.runner.device, cache_enabled=False):
                yield self.model
        finally:
            for module, mode in modes:
                module.training = mode

    def state_dict(self, model: bool = True) -> dict[str, Any]:
        """Everything that the next windows depend on, as tensors and built-in values (``weights_only`` loads them).

        A copy on the host, which no update changes: it costs the memory of weights and optimizer state once more.

        Args:
            model: Whether the weights are included.

        Raises:
            PlanError: Inside of a window, or a scheduler without ``state_dict``.
        """
        self.runner.refuse_inside("state_dict")
        return collect(self._parts(), self._progress, model)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned, random states included.

        A ``micro_batch_size`` that this engine was given stays; else it is the saved one.

        Raises:
            PlanError: Inside of a window, or the state of something else; nothing is changed then.
        """
        self.runner.refuse_inside("load_state_dict")
        size = self._progress.micro_batch_size
        load(self._parts(), self._progress, state)
        if self._is_size_given:
            self._progress.micro_batch_size = size
        self.runner.note_schedulers()

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
        self.runner.norms.remove()
        if self._bf16 is not None:
            self._bf16.release()
        return checkpointing.unwrapped(self.model)

    def _counts_of(self, micro_batches: Sequence[Any]) -> list[float]:
        counting = self.runner.counting
        return windows.counts_of(micro_batches, counting.of(*micro_batches)) if micro_batches else []

    def _parts(self) -> Parts:
        model = checkpointing.unwrapped(self.model)
        model = getattr(model, "_orig_mod", model)  # torch.compile's: a state fits with and without it
        return Parts(model, self.optimizers, self.schedulers, self.runner.scaler, self.runner.device)
