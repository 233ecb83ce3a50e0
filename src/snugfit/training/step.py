"""The one forward, backward and update: a window of micro-batches into one optimizer step.

Entry point: ``run_window``; a loop that is written by hand drives a ``Window`` itself. Engine, tracer and measurement
all run this code, so nothing here reads the value of a tensor: what needs one is a function in ``Hooks``. How losses
are weighted is ``weighting``'s.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from snugfit.errors import DeviceMemoryError, PlanError, UnsupportedError
from snugfit.training import precision, recovery, weighting
from snugfit.training.weighting import Number, Term, as_float


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a window needs beyond tensor arithmetic: values of tensors, and other ranks."""

    decide: Callable[[Tensor | None, Number], str | None]
    "(whether a gradient is not finite, count) to the reason to skip, or None; the flag is None for one loss's count."
    reduce_counts: Callable[[Sequence[Number]], Sequence[Number]]
    "Sums over all ranks; numbers stay numbers, tensors stay on their device."
    synchronises: Callable[[int, int], bool]
    "(i, n): whether ranks reduce gradients in micro-step i of n."
    snapshot: Callable[[], Any]
    "What a window changes before its update: random states and buffers."
    restore: Callable[[Any], None]
    "Undo a window that failed before its update."
    move: Callable[[Any], Any]
    "A micro-batch on the device."


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a window did; tensors are 0-dimensional and detached."""

    loss: Tensor
    grad_norm: Tensor
    count: Number
    num_micro_batches: int
    reason: str | None
    "Why the update was skipped; None: it was done."
    metrics: Mapping[str, Number]
    reported_count: Number | None
    "Count per rank of a loss that reports its own: the next window's R."


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
        if not window.is_empty:
            for i, micro_batch in enumerate(micro_batches):
                if counts[i] != 0:
                    window.micro_step(i, micro_batch, loss)
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
        reference: R of a loss that reports its own count.
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
        reference: Number,
    ) -> None:
        self._counts, self._model, self._optimizers, self._hooks = counts, model, optimizers, hooks
        self._ranks, self._autocast, self._device_type = ranks, autocast, device_type
        self._loss_scale, self._max_grad_norm = loss_scale, max_grad_norm
        self._weighting = weighting.agree(counts, hooks.reduce_counts, ranks)
        self._reference = reference
        self._reports: bool | None = None
        self._reported: Number = 0.0
        self._reported_in = -1
        self._loss: Number = math.nan
        self._metrics: dict[str, tuple[Number, Number]] = {}
        self._index = -1
        self._watched: tuple[nn.Parameter, Tensor | None, int] | None = None
        self._refused = False
        self._last = max((i for i, count in enumerate(counts) if count != 0), default=-1)

    def __enter__(self) -> "Window":
        self._release()
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    @property
    def is_empty(self) -> bool:
        """Whether it is known beforehand that there is nothing to train on, on any rank."""
        return self._weighting.total == 0

    def refuse(self) -> None:
        """Do not update from this window."""
        self._refused = True

    def micro_step(self, i: int, micro_batch: Any, loss: Callable[[Any, Any], Any]) -> None:
        """Forward and backward of one micro-batch.

        Args:
            i: Its place in the window.
            micro_batch: As it is on the host.
            loss: ``(model, micro_batch)`` to a loss.
        """
        with self.synchronisation(i):
            with self._autocast():
                value = loss(self._model, self._hooks.move(micro_batch))
            self.backward(value)

    @contextmanager
    def synchronisation(self, i: int) -> Iterator[None]:
        """The context of forward and backward of micro-batch i: ranks reduce gradients here, or do not."""
        self._index = i
        wrapped = isinstance(self._model, nn.parallel.DistributedDataParallel)
        synchronises = self._hooks.synchronises(i, self._last + 1)
        with self._model.no_sync() if wrapped and not synchronises else nullcontext():  # type: ignore[operator]
            yield

    @contextmanager
    def entered(self, i: int, micro_batch: Any) -> Iterator[Any]:
        """The context of a loop's body for micro-batch i, moved to the device."""
        with self.synchronisation(i), self._autocast():
            yield self._hooks.move(micro_batch)

    def backward(self, value: Any, count: Number | None = None, only: Any = None) -> None:
        """Back-propagate what a loss function returned for the present micro-batch; repeated calls add up.

        Args:
            value: A mean, a ``Loss`` or several of them.
            count: What a mean is taken over, where it is not the micro-batch's count.
            only: Parameters, or the module, that the loss may reach.
        """
        self._check_watched()
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        terms = [weighting.term(value, count, only) for value in values]
        weighted = [self._weighted(term, single=len(terms) == 1) for term in terms]
        backwards = weighting.merged([(tensor, term.inputs) for tensor, term in zip(weighted, terms, strict=True)])
        del values, terms, weighted, value
        with precision.without_autocast(self._device_type):
            for i, (tensor, inputs) in enumerate(backwards):
                scaled = tensor if self._loss_scale is None else tensor * self._loss_scale
                torch.autograd.backward(scaled, retain_graph=i + 1 < len(backwards), inputs=inputs)
        self._watch()

    def finish(self) -> Outcome:
        """Average and unscale the gradients, then clip and update, or skip and say why."""
        self._check_watched()
        loss, metrics, count, factor = self._totals()
        parameters = [] if _is_zero(count) else [p for p in self._parameters() if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        reason = "empty" if _is_zero(count) else None if gradients else "no gradients"
        with precision.without_autocast(self._device_type):
            if self._loss_scale is not None:
                factor = factor / self._loss_scale
            if isinstance(factor, Tensor) or factor != 1.0:
                precision.multiply(gradients, factor)
            norm = get_total_norm(gradients)
            if reason is None:
                reason = "refused" if self._refused else self._hooks.decide(~torch.isfinite(norm), count)
            if reason is None:
                del gradients
                if self._max_grad_norm is not None:
                    clip_grads_with_norm_(parameters, self._max_grad_norm, norm)
                self._update()
        reported = count / self._ranks if self._reports else None
        return Outcome(loss, norm, count, len(self._counts), reason, metrics, reported)

    def _weighted(self, term: Term, *, single: bool) -> Tensor | None:
        """What to back-propagate for one loss; None where it counts nothing."""
        self._add_metrics(term.metrics)
        known = self._counts[self._index]
        if term.count is not None and (single or not _is_same(term.count, known)):
            return self._reporting(term, term.count, single)
        if known is None:
            raise PlanError(
                "the count of a micro-batch is not known",
                got=f"a loss without a count for micro-batch {self._index}, whose own count is None",
                expected="a count of the job, or a Loss that reports one",
                hint="return snugfit.Loss(total, count)",
            )
        self._expect(reports=False)
        if known == 0:
            return None
        number, shares = len(self._counts), self._weighting
        if term.is_sum:
            weighted = term.value / (known * number if shares.equal else shares.reference)
        elif shares.equal:
            weighted = term.value / number if number > 1 else term.value
        else:
            weighted = term.value * (known / shares.reference)
        self._add_loss(weighted)
        return weighted

    def _reporting(self, term: Term, count: Number, single: bool) -> Tensor | None:
        if not single or self._reported_in == self._index:
            raise UnsupportedError(
                "several losses with counts of their own are not supported yet",
                got=f"count={'a tensor' if isinstance(count, Tensor) else count} of one loss of micro-batch "
                f"{self._index}, whose own count is {self._counts[self._index]}",
                expected="count=None, or the number that the job counts, in all of them",
                hint="leave count out and scale the totals, or return one Loss",
            )
        self._expect(reports=True)
        self._reported_in = self._index
        if isinstance(count, Tensor):
            count = as_float(count.detach())
            if self._hooks.decide(None, count) == "empty":
                return None
        elif not (math.isfinite(count) and count >= 0):
            raise PlanError(
                "the count of a loss is not a number to divide by",
                got=f"count={count!r}",
                expected=">= 0, finite",
                hint="return Loss(total, count=number of counted units)",
            )
        elif count == 0:
            return None
        self._reported = self._reported + count
        weighted = (term.value if term.is_sum else term.value * count) / self._reference
        weighted = weighted.to(term.value.dtype)
        self._add_loss(weighted)
        return weighted

    def _expect(self, *, reports: bool) -> None:
        if self._reports is not None and self._reports != reports:
            raise PlanError(
                "losses of one window contradict each other on their count",
                got="some report a count of their own, others do not",
                expected="one kind in all micro-batches of a window",
                hint="return snugfit.Loss(total, count) always or never",
            )
        self._reports = reports

    def _add_loss(self, weighted: Tensor) -> None:
        value = weighted.detach()
        self._loss = self._loss + value if isinstance(self._loss, Tensor) else value

    def _add_metrics(self, metrics: Mapping[str, tuple[Any, Any]]) -> None:
        for name, pair in metrics.items():
            total, count = (v.detach() if isinstance(v, Tensor) else float(v) for v in pair)
            sums = self._metrics.get(name, (0.0, 0.0))
            self._metrics[name] = (sums[0] + total, sums[1] + count)

    def _totals(self) -> tuple[Tensor, dict[str, Number], Number, Number]:
        """Loss, metrics and count of the window over all ranks, and the factor of its gradients."""
        shares = self._weighting
        names = sorted(self._metrics)
        loss = self._loss if isinstance(self._loss, Tensor) else torch.zeros((), device=self._device)
        count: Number = self._reported if self._reports or shares.total is None else shares.total
        sums = self._hooks.reduce_counts([loss, self._reported, *(v for name in names for v in self._metrics[name])])
        if self._reports:
            count = sums[1]
        pairs = zip(names, sums[2::2], sums[3::2], strict=True)
        metrics = {name: _ratio(total, number) for name, total, number in pairs}
        if _is_zero(count):
            return torch.full_like(loss, math.nan), metrics, count, 1.0
        if not self._reports and shares.equal:
            average = loss if self._ranks == 1 else _tensor(sums[0] / self._ranks).to(loss.dtype)
            return average, metrics, count, 1.0
        reference = self._reference if self._reports else shares.reference
        scale: Number = reference / count
        if isinstance(scale, Tensor):
            scale = torch.where(_tensor(count) > 0, scale, 0.0)
        return _tensor(sums[0] * scale).to(loss.dtype), metrics, count, scale * self._ranks

    def _update(self) -> None:
        """Step every optimizer that has gradients."""
        for optimizer in self._optimizers:
            if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                try:
                    optimizer.step()
                except Exception as error:
                    if not recovery.is_out_of_memory(error):
                        raise
                    raise DeviceMemoryError(
                        "the device ran out of memory inside of the optimizer's update",
                        got=f"{type(optimizer).__name__}: {error}",
                        expected="memory for the optimizer's state and its temporaries",
                        hint="parameters may have moved, so start again from a saved state; optimizer_impl='for-loop' "
                        "needs least",
                    ) from error
        torch.clear_autocast_cache()  # casts of the old weights, where the caller's own autocast is still open

    def _parameters(self) -> list[nn.Parameter]:
        """Parameters of all optimizers once, in the order of the model."""
        owned = {id(p): p for optimizer in self._optimizers for g in optimizer.param_groups for p in g["params"]}
        ordered = [p for p in self._model.parameters() if owned.pop(id(p), None) is not None]
        return [*ordered, *owned.values()]

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _release(self) -> None:
        """Drop the gradients of the model and of all optimizers."""
        self._watched = None
        for parameter in self._model.parameters():
            parameter.grad = None
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _watch(self) -> None:
        """Remember one gradient, to notice when someone clears or changes it inside of the window."""
        if self._watched is None or self._watched[1] is None:
            found = next((p for o in self._optimizers for g in o.param_groups for p in g["params"] if _has(p)), None)
        else:
            found = self._watched[0]
        if found is not None and found.grad is not None:
            self._watched = (found, found.grad, found.grad._version)

    def _check_watched(self) -> None:
        if self._watched is None:
            return
        parameter, gradient, version = self._watched
        if parameter.grad is not gradient or (gradient is not None and gradient._version != version):
            raise PlanError(
                "gradients were cleared or changed inside of a window",
                got=f"another gradient than micro-batch {self._index}'s backward left"
                if parameter.grad is not None
                else "no gradient where backward had left one: zero_grad() was called",
                expected="gradients that only backward adds to until the window's update",
                hint="remove optimizer.zero_grad() from the loop; the engine clears gradients after each update",
            )


def _is_same(count: Number, known: float | None) -> bool:
    return not isinstance(count, Tensor) and count == known


def _is_zero(count: Number) -> bool:
    return not isinstance(count, Tensor) and count == 0


def _has(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None


def _tensor(value: Number) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def _ratio(total: Number, count: Number) -> Number:
    return math.nan if _is_zero(count) else total / count
