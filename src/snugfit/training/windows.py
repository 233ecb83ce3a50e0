"""What goes into a window and what comes out: cutting and counting a batch, grouping a loader, loops by hand.

Entry points: ``prepare``, ``grouped``, ``HandWindow`` and ``StepResult``. Running a window is ``step``'s, and
counting updates is ``engine``'s.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from snugfit.errors import BatchError, PlanError, UnsupportedError
from snugfit.jobs import Count
from snugfit.plans import Plan
from snugfit.training import counting, failures, recovery, splitting
from snugfit.training.hooks import Outcome
from snugfit.training.step import Window
from snugfit.training.weighting import Number, Reduce

TAILS = ("flush", "drop")
UNEVEN = ("use", "cut")


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one window did. The tensors are 0-dimensional, detached, and wait for the device only when they are read."""

    step: int
    "Updates done so far, this one included."
    loss: Tensor
    "Mean over the counted units of the window, over all ranks; NaN for an empty window."
    grad_norm: Tensor
    "Norm of the averaged, unscaled gradient over all optimizers, before clipping."
    lr: tuple[Any, ...]
    "Learning rate of every parameter group, the one used."
    loss_scale: float | None
    "The factor of this window's losses; None without fp16."
    count: Number
    "Counted units over all ranks."
    num_micro_batches: int
    num_dropped: int
    "Micro-batches of the loader's tail that were dropped behind this window; 0 where the loader has no length."
    skipped: bool
    reason: str | None
    'None, or ``"empty" "non-finite gradient" "no gradients" "refused"``.'
    metrics: Mapping[str, Number]


class MicroBatches(list[Any]):
    """The micro-batches of one window, and what is known about them besides."""

    sizes: tuple[int, ...] | None = None
    "Samples of each, where snugfit cut them; a shared value in them may have another first dimension."
    num_dropped: int = 0
    "How many a loader left over behind them."


def prepare(
    batch: Any,
    micro_batch_size: int | None,
    count: Count,
    split: Callable[[Any, int], list[Any]] | None,
) -> tuple[MicroBatches, list[float]]:
    """Cut a batch that lies on the host and count its micro-batches.

    Args:
        batch: The full batch of one rank.
        micro_batch_size: None leaves the batch whole.
        count: What is counted: ``"samples"`` or a function of a micro-batch.
        split: Cuts batches that snugfit cannot.

    Returns:
        Micro-batches and the count of each.

    Raises:
        BatchError: The batch cannot be cut or counted.
    """
    if split is not None:
        parts = MicroBatches([batch] if micro_batch_size is None else _cut_by(split, batch, micro_batch_size))
        return parts, counts_of(parts, count)
    number = splitting.num_samples(batch)
    size = number if micro_batch_size is None else micro_batch_size
    parts = MicroBatches(splitting.split(batch, size))
    parts.sizes = tuple(min(size, number - start) for start in range(0, number, size))
    return parts, counts_of(parts, count)


def _cut_by(split: Callable[[Any, int], list[Any]], batch: Any, micro_batch_size: int) -> list[Any]:
    """What the user's own split returns.

    Raises:
        BatchError: It is no list of micro-batches.
    """
    found = split(batch, micro_batch_size)
    if isinstance(found, (str, Tensor, Mapping)) or not isinstance(found, Iterable):
        raise BatchError(
            "split did not return a list of micro-batches",
            got=f"{type(found).__name__} from split(batch, {micro_batch_size})",
            expected="a list of micro-batches",
            hint="return a list: split=lambda batch, size: [batch[i : i + size] for i in range(0, len(batch), size)]",
        )
    return list(found)


def counts_of(micro_batches: Sequence[Any], count: Count) -> list[float]:
    """Count micro-batches on the host; samples are known where snugfit cut them.

    Raises:
        BatchError: The samples of a micro-batch cannot be told, or its count is not a number to divide by.
    """
    sizes = sizes_of(micro_batches)
    if count == "samples" and sizes is not None:
        return [float(size) for size in sizes]
    if count == "samples":  # which are not those of a shared tensor
        return [float(_samples_of_given(micro_batch)) for micro_batch in micro_batches]
    counter = counting.resolve(count, splitting.samples_or_none)
    return [counter(splitting.bare(micro_batch)) for micro_batch in micro_batches]


def _samples_of_given(micro_batch: Any) -> int:
    """Samples of a micro-batch that snugfit did not cut.

    Raises:
        BatchError: They cannot be told; the way out is not the one of a batch that is still to be cut.
    """
    try:
        return splitting.samples_or_none(micro_batch)
    except BatchError as error:
        raise BatchError(
            "the samples of a micro-batch that snugfit did not cut cannot be counted",
            got=f"{error.what}: {error.got}",
            expected=error.expected,
            hint="pass count=, a function of such a micro-batch: count=lambda micro_batch: len(micro_batch['labels'])",
        ) from error


def sizes_of(micro_batches: Sequence[Any]) -> tuple[int, ...] | None:
    """Samples of micro-batches that snugfit cut; None for others."""
    return micro_batches.sizes if isinstance(micro_batches, MicroBatches) else None


def samples_of(micro_batches: Sequence[Any]) -> int:
    """Samples of a window, for counters; none are counted in micro-batches that only the user understands."""
    sizes = sizes_of(micro_batches)
    try:
        return sum(map(splitting.samples_or_none, micro_batches)) if sizes is None else sum(sizes)
    except BatchError:
        return 0


def listed(micro_batches: Iterable[Any]) -> list[Any]:
    """The micro-batches of a window as a list.

    Raises:
        BatchError: What was given is a batch.
    """
    if isinstance(micro_batches, (Tensor, Mapping, str)) or not isinstance(micro_batches, Iterable):
        raise BatchError(
            "step_window takes a list of micro-batches",
            got=type(micro_batches).__name__,
            expected="a list, or what engine.windows(loader) yields",
            hint="pass [micro_batch], or call engine.step(batch), which cuts a batch",
        )
    found = list(micro_batches)
    if not isinstance(micro_batches, MicroBatches):
        failures.refuse_a_batch(found)
    return found


def length(accumulation_steps: int | None, plan: Plan | None) -> int:
    """Micro-batches of a window: as given, else the plan's.

    Raises:
        PlanError: Neither is there.
    """
    if accumulation_steps is not None:
        return accumulation_steps
    if plan is None:
        raise PlanError(
            "the length of a window is not known",
            got="accumulation_steps=None and no plan",
            expected="one of the two",
            hint="pass accumulation_steps=4",
        )
    return plan.accumulation_steps


def grouped(
    loader: Iterable[Any],
    accumulation_steps: int,
    tail: str,
    uneven: str = "use",
    reduce_counts: Reduce | None = None,
    ranks: int = 1,
) -> Iterator[MicroBatches]:
    """Group a loader's micro-batches into windows, reading no further than the window at hand.

    With ``tail="drop"`` the last, incomplete window is left out: the window before it says so if the loader has a
    length, else nothing can.

    Args:
        loader: Of micro-batches of this rank.
        accumulation_steps: Micro-batches of a window.
        tail: What becomes of a short last window.
        uneven: What happens when one rank's loader ends before another's.
        reduce_counts: Sums over all ranks.
        ranks: Their number.

    Raises:
        PlanError: ``accumulation_steps`` below 1, an unknown ``tail`` or ``uneven``.
        BatchError: The loader is a batch, or cannot be iterated over.
    """
    if isinstance(accumulation_steps, bool) or not isinstance(accumulation_steps, int) or accumulation_steps < 1:
        raise PlanError(
            "accumulation_steps must be a whole number of at least 1",
            got=f"accumulation_steps={accumulation_steps!r}",
            expected=">= 1",
            hint="pass accumulation_steps=1 or more",
        )
    if isinstance(loader, (Tensor, Mapping, str, bytes)) or not is_iterable(loader):
        raise BatchError(
            "this is not a loader of micro-batches",
            got=type(loader).__name__,
            expected="an iterable of micro-batches, such as a DataLoader or a list",
            hint="pass the loader itself; engine.step(batch) cuts a batch",
        )
    if not isinstance(tail, str) or tail not in TAILS:
        raise PlanError("unknown tail", got=f"tail={tail!r}", expected=" | ".join(map(repr, TAILS)), hint='use "flush"')
    if not isinstance(uneven, str) or uneven not in UNEVEN:
        raise PlanError(
            "unknown uneven", got=f"uneven={uneven!r}", expected=" | ".join(map(repr, UNEVEN)), hint='use "cut"'
        )
    own = _windows(loader, accumulation_steps, tail)
    return own if reduce_counts is None or ranks == 1 else _together(own, uneven, reduce_counts, ranks)


def _together(own: Iterator[MicroBatches], uneven: str, reduce_counts: Reduce, ranks: int) -> Iterator[MicroBatches]:
    """This rank's windows, as long as all ranks have one; each asks the others before it yields."""
    while True:
        window = next(own, None)
        number = int(reduce_counts([float(window is not None)])[0])
        if number < ranks and uneven == "use" and number > 0:
            raise UnsupportedError(
                "the loader of one rank ended before that of another",
                got=f"another window on {number} of {ranks} ranks",
                expected="as many windows on all ranks: a rank without a window cannot take part in the reduction of "
                "gradients yet",
                hint='pass uneven="cut" to stop where the shortest loader ends, or give every rank as many',
            )
        if window is None or number < ranks:
            return
        yield window
        del window


def _windows(loader: Iterable[Any], accumulation_steps: int, tail: str) -> Iterator[MicroBatches]:
    length = _length(loader)
    window = MicroBatches()
    for i, micro_batch in enumerate(loader, start=1):
        window.append(micro_batch)
        if len(window) == accumulation_steps:
            if tail == "drop" and length is not None and length - i < accumulation_steps:
                window.num_dropped = max(length - i, 0)
            yield window
            window = MicroBatches()
    if window and tail == "flush":
        yield window


def is_iterable(value: object) -> bool:
    """Whether a ``for`` loop goes through something: also through a data set that is asked item by item."""
    return isinstance(value, Iterable) or hasattr(type(value), "__getitem__")


def _length(loader: Iterable[Any]) -> int | None:
    """Length of a loader; None where it has none, or says so only when asked (torch's, over an iterable data set)."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except (TypeError, NotImplementedError):
        return None


class HandWindow:
    """A window driven by the user's own loop; made by ``Engine.window``.

    Entering a micro-batch of the loop sets precision and synchronisation for the loop's body.
    """

    def __init__(
        self,
        window: Window,
        micro_batches: Sequence[Any],
        finish: Callable[[Outcome], StepResult],
    ) -> None:
        self._window, self._micro_batches, self._finish = window, micro_batches, finish
        self._position = -1
        self._is_over = False
        self._result: StepResult | None = None
        self._loop: Generator[Any, None, None] | None = None

    def __enter__(self) -> "HandWindow":
        self._window.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._loop is not None:
            self._loop.close()  # whoever holds on to it
        try:
            if error is not None:
                if recovery.is_out_of_memory(error):
                    raise recovery.not_retried(error, "inside of a window that is driven by hand") from error
                self._explain(error)
                return
            if not self._is_over:
                raise PlanError(
                    "a window was left before its last micro-batch",
                    got=f"{self._position + 1} of {len(self._micro_batches)} micro-batches",
                    expected="all of them; to update nothing call window.skip(reason) and go on",
                    hint="iterate over the whole window; of two windows, zip(a, b, strict=True) ends both",
                )
            self._result = self._finish(self._window.finish())
        finally:
            self._window.__exit__()

    def _explain(self, error: BaseException) -> None:
        """Raise a better error for one of the loop's body, if there is one."""
        if not isinstance(error, Exception) or self._position < 0:
            return
        better = self._window.explained(error, self._micro_batches[self._position])
        if better is not None:
            raise better from error
        failures.note_a_batch(error, self._micro_batches)

    def __iter__(self) -> Iterator[Any]:
        if self._loop is not None:
            raise PlanError(
                "the micro-batches of a window were asked for twice",
                got="a second loop over the window",
                expected="one loop, in which each micro-batch is run once",
                hint="call window.backward several times in the body of one loop",
            )
        self._loop = self._micro_steps()
        return self._loop

    def _micro_steps(self) -> Generator[Any, None, None]:
        for i, micro_batch in enumerate(self._micro_batches):
            self._position = i
            with self._window.entered(i, micro_batch) as moved:
                yield moved
                del moved
        self._is_over = True

    def backward(self, loss: Any, count: Number | None = None, only: Any = None) -> None:
        """Back-propagate a loss of the present micro-batch; repeated calls add up.

        Args:
            loss: As a loss function returns it: a mean, a ``Loss`` or several of them.
            count: What the mean is taken over, where it is not the micro-batch's count.
            only: Parameters, or the module, that the loss may reach.

        Raises:
            PlanError: Outside of the loop over micro-batches, or not a scalar that can be back-propagated.
        """
        if self._position < 0 or self._is_over:
            raise PlanError(
                "window.backward was called outside of the loop over micro-batches",
                got="no micro-batch at hand",
                expected="a call in the body of `for micro_batch in window`",
                hint="move the call into the loop",
            )
        self._window.backward(loss, count, only)

    def skip(self, reason: str) -> None:
        """Do not update from this window; the result says ``"refused"`` and the loss scale stays.

        One rank that says so is enough: no rank updates then.

        Args:
            reason: Why, for whoever reads the loop.
        """
        del reason
        self._window.refuse()

    @property
    def result(self) -> StepResult:
        """What the window did, once it is over.

        Raises:
            PlanError: The window is still open, or failed.
        """
        if self._result is None:
            raise PlanError(
                "window.result was read before the window's end",
                got="a window that is open, or failed",
                expected="a window whose with block has ended",
                hint="read it after the with block",
            )
        return self._result
