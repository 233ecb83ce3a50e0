"""The one forward, backward and update: a window of micro-batches into one optimizer step.

Entry point: ``run_window``; a loop that is written by hand drives a ``Window`` itself. Engine, tracer and measurement
all run this code, so nothing here reads the value of a tensor: what needs one is a function in ``Hooks``. How losses
are weighted is ``weighting``'s and ``losses``'s.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from snugfit.training import commit, failures, gradients, precision, reduction, updates, weighting, wide_sums
from snugfit.training.hooks import First, Hooks, Observer, Outcome
from snugfit.training.losses import Denominator, Losses, is_zero
from snugfit.training.rank_errors import RankErrors
from snugfit.training.weighting import Number


def run_window(
    micro_batches: Sequence[Any],
    counts: Sequence[float | None],
    *,
    loss: Callable[[Any, Any], Any],
    **settings: Any,
) -> Outcome:
    """Run one window: forward and backward of every micro-batch, then one update, or none and the reason.

    Nothing of a micro-batch outlives its backward. Gradients are released afterwards, also when this raises.

    Args:
        micro_batches: As they are on the host; each is moved when its turn comes.
        counts: Count of each; None where only the loss knows.
        loss: ``(model, micro_batch)`` to a mean, a ``Loss`` or several of them.
        **settings: See ``Window``.

    Raises:
        PlanError: The loss is not a scalar with a graph, or losses of one window contradict each other.
        DeviceMemoryError: The update itself ran out of memory; parameters may have moved.
    """
    with Window(counts, **settings) as window:
        window.micro_steps(micro_batches, loss)
        return window.finish()


class Window:
    """One window under way: a context that leaves no gradient behind.

    Args:
        counts: Count of each micro-batch; None where only the loss knows.
        model: What is trained; one that is wrapped in DDP synchronises in its last micro-step.
        optimizers: Stepped together or not at all; one without gradients is left out.
        hooks: See ``Hooks``.
        ranks: Number of ranks among which gradients are averaged.
        autocast: Makes the context of a forward.
        device_type: Of autocast.
        loss_scale: Factor of all losses of the window (fp16), else None.
        max_grad_norm: Limit of the norm over all optimizers, or None.
        reference: R of the losses that report their own counts, in their order; None in an engine's first window.
        observer: Told of the gradient's norm after the first micro-step and at the end; it adds metrics.
    """

    def __init__(
        self,
        counts: Sequence[float | None],
        *,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        hooks: Hooks,
        ranks: int,
        autocast: Callable[[], AbstractContextManager[Any]],
        device_type: str,
        loss_scale: float | None,
        max_grad_norm: float | None,
        reference: Sequence[Number | None] | None,
        observer: Observer | None = None,
    ) -> None:
        self._counts, self._model, self._optimizers, self._hooks = counts, model, optimizers, hooks
        self._ranks, self._autocast, self._device_type = ranks, autocast, device_type
        self._loss_scale, self._max_grad_norm, self._observer = loss_scale, max_grad_norm, observer
        self._forwards = reduction.Forwards(model)  # before anything that other ranks wait for
        self._weighting = weighting.agree(counts, hooks.reduce_counts, ranks)
        self._losses = Losses(
            counts, self._weighting, hooks.decide, hooks.reduce_counts, hooks.gather, ranks, reference
        )
        self._trained: Sequence[nn.Parameter] = ()  # by any of the optimizers, in the order of the model
        self._held: Sequence[nn.Parameter] = ()
        self._apart: gradients.Apart | None = None
        self._watch, self._sums = gradients.Watch(), wide_sums.WideSums()
        self._errors = RankErrors(ranks)
        self._is_folded = self._reduces = False
        self._reached: reduction.Reached | None = None  # of a backward under way in which ranks reduce
        self._guard = commit.Guard(optimizers)
        self._first: First | None = None
        self._index = -1
        self._last = max((i for i, count in enumerate(counts) if count != 0), default=-1)

    def __enter__(self) -> "Window":
        of_model = list(self._model.parameters())  # a walk through all modules, so once
        owned = {id(p): p for optimizer in self._optimizers for p in updates.of(optimizer).parameters}
        trained = [p for p in of_model if owned.pop(id(p), None) is not None]
        self._trained, self._held = [*trained, *owned.values()], [*of_model, *owned.values()]
        self._release()
        self._sums = wide_sums.opened(self._model, self._optimizers)
        self._watch.look(self._trained)
        self._guard.close(self._trained)
        self._forwards.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._guard.open()
        self._forwards.close()
        self._apart = None
        self._watch = gradients.Watch()
        self._release()
        self._sums.close()

    @property
    def is_empty(self) -> bool:
        """Whether it is known beforehand that there is nothing to train on, on any rank."""
        return self._weighting.total == 0

    def refuse(self) -> None:
        """Do not update from this window, on no rank."""
        self._errors.is_refused = True

    def micro_steps(self, micro_batches: Sequence[Any], loss: Callable[[Any, Any], Any]) -> None:
        """Forward and backward of all micro-batches that count something."""
        if self.is_empty:
            return
        for i, micro_batch in enumerate(micro_batches):
            if self._counts[i] != 0:
                self.micro_step(i, micro_batch, loss)

    def micro_step(self, i: int, micro_batch: Any, loss: Callable[[Any, Any], Any]) -> None:
        """Forward and backward of one micro-batch.

        Args:
            i: Its place in the window.
            micro_batch: As it is on the host.
            loss: ``(model, micro_batch)`` to a loss.
        """
        try:
            with self.synchronisation(i):
                try:
                    with self._autocast():
                        terms = weighting.terms(loss(self._model, self._hooks.move(micro_batch)), None, None)
                except Exception as error:
                    if not self._goes_on_without(micro_batch, error):
                        raise
                else:
                    self._backward(terms, complete=True, micro_batch=micro_batch)
        except (TypeError, ValueError) as error:
            better = self.explained(error, micro_batch)
            if better is None:
                raise
            raise better from error

    def _goes_on_without(self, micro_batch: Any, error: Exception) -> bool:
        """Take part in what other ranks wait for although a micro-step failed, if it can be; see ``RankErrors``."""
        if self._ranks == 1 or not self._forwards.can_go_on(reduces=self._reduces):
            return False
        if not self._losses.can_go_on(is_last=self._index == self._last):
            return False
        self._errors.keep(error, self.explained(error, micro_batch))
        if self._reduces:
            self._fold_and_reduce()
        return True

    def explained(self, error: Exception, micro_batch: Any) -> Exception | None:
        """A better error for one of the present micro-step, or None."""
        return failures.explained(error, micro_batch, self._index, len(self._counts), self._model)

    @contextmanager
    def synchronisation(self, i: int) -> Iterator[None]:
        """The context of forward and backward of micro-batch i: ranks reduce gradients here, or do not."""
        self._index = i
        self._forwards.begin()
        wrapped = isinstance(self._model, nn.parallel.DistributedDataParallel)
        is_possible = self._weighting.in_step or i == self._last  # else ranks would wait for a reduction too many
        self._reduces = wrapped and is_possible and self._hooks.synchronises(i, self._last + 1)
        with self._model.no_sync() if wrapped and not self._reduces else nullcontext():  # type: ignore[operator]
            yield
        if self._observer is not None and self._first is None:
            self._observe_first()

    @contextmanager
    def entered(self, i: int, micro_batch: Any) -> Iterator[Any]:
        """The context of a loop's body for micro-batch i, moved to the device."""
        with self.synchronisation(i):
            with self._autocast():
                yield self._hooks.move(micro_batch)
            if self._reduces:
                self._fold_and_reduce()

    def backward(self, value: Any, count: Number | None = None, only: Any = None) -> None:
        """Back-propagate a loss of the present micro-batch of a loop by hand; repeated calls add up.

        Args:
            value: A mean, a ``Loss`` or several of them.
            count: What a mean is taken over, where it is not the micro-batch's count.
            only: Parameters, or the module, that the loss may reach.
        """
        self._backward(weighting.terms(value, count, only), complete=False)

    def _backward(self, terms: list[weighting.Term], *, complete: bool, micro_batch: Any = None) -> None:
        """Back-propagate losses of the present micro-batch.

        Args:
            terms: The losses; emptied.
            complete: Whether these are all of its losses.
            micro_batch: On the host, to explain errors with.
        """
        self._watch.check(self._index)
        self._forwards.check(self._index)
        weighted = self._losses.weigh(self._index, terms, complete=complete)
        denominators = self._losses.denominators
        if len(denominators) > 1 and complete and self._index == self._last:
            self._fold()
        calls: list[tuple[int, Tensor, list[Tensor] | None]] = []
        is_one_set = self._is_folded or len(denominators) == 1
        for k in range(1 if is_one_set else len(denominators)):
            mine = [
                (self._finally(tensor, denominator), term.inputs)
                for (tensor, denominator), term in zip(weighted, terms, strict=True)
                if is_one_set or denominator is denominators[k]
            ]
            calls += [(k, tensor, inputs) for tensor, inputs in weighting.merged(mine)]
        terms.clear()
        del weighted
        # DDP reduces within one backward that reaches everything, so several go past it
        aside = self._reduces and not (complete and len(calls) == 1 and calls[0][::2] == (0, None))
        with precision.of_backward(self._device_type, self._loss_scale):
            try:
                self._differentiate_all(calls, aside=aside)
            except Exception as error:
                calls.clear()
                if not (complete and self._goes_on_behind(micro_batch, error)):
                    raise
            if aside and complete:
                self._reduce()
        self._watch.look(self._trained)

    def _differentiate_all(self, calls: list[tuple[int, Tensor, list[Tensor] | None]], *, aside: bool) -> None:
        """Add the gradients of weighted losses, each to its set of gradients; the list is emptied."""
        while calls:
            k, tensor, inputs = calls.pop(0)
            if self._loss_scale is not None:
                tensor = tensor * self._loss_scale
            with self._sets.summed_in(k) if k else nullcontext():
                self._differentiate(tensor, inputs, retain=bool(calls), aside=aside)
            del tensor

    def _goes_on_behind(self, micro_batch: Any, error: Exception) -> bool:
        """Take part in what other ranks wait for although a backward failed, if it can be; see ``RankErrors``."""
        if self._ranks == 1 or (self._reached is not None and not self._reached.can_complete):
            return False
        self._errors.keep(error, self.explained(error, micro_batch))
        if self._reached is not None:
            self._reached.complete(is_whole=False)
            self._reached = None
        return True

    def finish(self) -> Outcome:
        """Average and unscale the gradients, then clip and update, or skip and say why."""
        outcome = self.average()
        reason = self.decide(outcome)
        metrics = dict(outcome.metrics)
        if reason is None:
            for optimizer in self._optimizers:
                gradients.check_layouts(optimizer)
            with precision.without_autocast(self._device_type):
                self.clip(outcome.grad_norm)
                self._hooks.begin_update()
                commit.update(self._optimizers)
        if self._observer is not None:
            first = self._first if reason is None else None
            with commit.behind("the observer") if reason is None else nullcontext():
                metrics.update(self._observer(first, outcome.grad_norm, outcome.count))
        return replace(outcome, reason=reason, metrics=metrics)

    def average(self) -> Outcome:
        """Average and unscale the gradients; the reason is one that is known without reading their values."""
        self._watch.check(self._index)
        self._watch = gradients.Watch()  # which holds what it saw
        if len(self._losses.denominators) > 1 and not self._is_folded:
            self._fold()
        loss, metrics, count, is_refused = self._losses.totals(self._nothing, self._errors.settled, self._errors.flag)
        factor = 1.0 if self._is_folded else self._losses.denominators[0].factor
        is_empty = is_zero(self._losses.counted)
        parameters = [] if is_empty else [p for p in self._trained if p.grad is not None]
        gradients.coalesce(parameters)
        values = gradients.values(parameters)
        with precision.without_autocast(self._device_type):
            _multiply(values, factor if self._loss_scale is None else factor / self._loss_scale)
            norm = precision.total_norm(values)
        reason = "empty" if is_empty else "no gradients" if not values else "refused" if is_refused else None
        return Outcome(loss, norm, count, len(self._counts), reason, metrics, self._losses.reported_counts)

    def decide(self, outcome: Outcome) -> str | None:
        """Why there is to be no update from averaged gradients, or None; the one place that may wait for the device."""
        norm = outcome.grad_norm
        found_inf = norm - norm != 0  # two operations; torch.isfinite is five
        return outcome.reason or self._hooks.decide(found_inf, self._losses.counted)

    def clip(self, norm: Tensor) -> None:
        """Clip the averaged gradients, whose norm is given, if there is a limit, and give them their weights' types.

        From here on optimizers may step: the window's own, and those that it is made of.
        """
        self._guard.open()
        if self._max_grad_norm is not None:
            gradients.clip(gradients.values(self._trained), self._max_grad_norm, norm)
        self._sums.narrow()

    @property
    def _sets(self) -> gradients.Apart:
        if self._apart is None:
            self._apart = gradients.Apart([p for p in self._held if p.requires_grad])
        return self._apart

    def _fold(self) -> None:
        """Bring the gradients of several denominators together: their counts are known now."""
        self._losses.settle()
        self._sets.fold([denominator.factor for denominator in self._losses.denominators], _multiply)
        self._is_folded = True

    def _finally(self, tensor: Tensor | None, denominator: Denominator) -> Tensor | None:
        """A weighted loss, as it is to be added to gradients that are folded or not."""
        factor = denominator.factor
        if tensor is None or not self._is_folded or (not isinstance(factor, Tensor) and factor == 1.0):
            return tensor
        return (tensor * factor).to(tensor.dtype)

    def _differentiate(self, tensor: Tensor, inputs: list[Tensor] | None, *, retain: bool, aside: bool) -> None:
        """Add the gradients of a weighted loss to ``.grad``; aside of DDP, which reduces in one backward only."""
        try:
            if aside:
                everything = [p for p in self._model.parameters() if p.requires_grad]
                gradients.add(tensor, everything if inputs is None else inputs, retain_graph=retain)
                return
            self._reached = reduction.Reached(self._model) if self._reduces else None
            torch.autograd.backward(tensor, retain_graph=retain, inputs=inputs)
            if self._reached is not None:
                self._reached.complete()
                self._reached = None
        except RuntimeError as error:
            better = failures.of_backward(error, self._index)
            if better is None:
                raise
            raise better from error

    def _fold_and_reduce(self) -> None:
        """What a micro-step without a backward of its own does in place of it, where ranks reduce."""
        if self._index == self._last and len(self._losses.denominators) > 1:
            self._fold()
        self._reduce()

    def _reduce(self) -> None:
        """Let DDP reduce the gradients as they are."""
        reduction.reduce(self._model)
        self._watch.look(self._trained)

    def _observe_first(self) -> None:
        """Keep the norm of the first micro-batch's mean gradient, where ``.grad`` is that of one micro-batch."""
        if self._reduces or self._index == self._last or len(self._losses.denominators) != 1:
            return
        count, factor = self._losses.mean_of(self._index)
        if not is_zero(count):
            norm = precision.total_norm(gradients.coalesced_values(self._trained))
            self._first = (norm * (factor if self._loss_scale is None else factor / self._loss_scale), count)

    @property
    def _nothing(self) -> Tensor:
        weight = next(self._model.parameters())
        return torch.zeros((), dtype=torch.promote_types(weight.dtype, torch.float32).to_real(), device=weight.device)

    def _release(self) -> None:
        """Drop the gradients of the model and of all optimizers."""
        for parameter in self._held:
            parameter.grad = None


def _multiply(values: Sequence[Tensor], factor: Number) -> None:
    if values and (isinstance(factor, Tensor) or factor != 1.0):
        precision.multiply(values, factor)
