"""What the mean of a loss is taken over: samples, tokens or a weight of one's own.

Entry points: ``tokens``, ``Counting`` and ``resolve``. Counts are taken on the host copy of a micro-batch, before it
moves. Weighting gradients by them is ``step``'s.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from snugfit.errors import BatchError, PlanError, SnugfitError, warn
from snugfit.jobs import Count, is_unsaid

_IGNORED_LABEL = -100
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_SHIFTING = {"loss_function", "shift_labels", "shift_logits", "shifted_logits", "shifted_prediction_scores"}
"What the forwards of transformers 4.43 to 5 name where they compare position i with label i + 1."


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Counts the labels of a micro-batch that are not ignored; made by ``tokens``."""

    ignore_index: int
    shift: bool
    key: str | int

    def __call__(self, micro_batch: Any) -> float:
        labels = self._labels(micro_batch)
        if self.shift:
            labels = labels[..., 1:]
        return float((labels != self.ignore_index).sum())

    def _labels(self, micro_batch: Any) -> Tensor:
        found = _entry(micro_batch, self.key)
        if not isinstance(found, Tensor):
            raise BatchError(
                f"no labels to count tokens in: {self.key!r} is not a tensor of the micro-batch",
                got=f"{_contents(micro_batch)}; {self.key!r} is {type(found).__name__}",
                expected="a tensor of labels",
                hint='name where the labels are: snugfit.tokens(key="labels"), or key=1 for a pair (inputs, labels)',
            )
        return found


def tokens(
    ignore_index: int = _IGNORED_LABEL, shift: bool = False, key: str | int = "labels"
) -> Callable[[Any], float]:
    """Count a micro-batch's tokens: its labels that are not ``ignore_index``.

    Args:
        ignore_index: Label that the loss leaves out.
        shift: Whether the loss compares position i with label i + 1, as causal language models do, so that the
            first label of every sequence counts for nothing.
        key: Key, index or attribute of the labels in a micro-batch.

    Returns:
        Function of a micro-batch, to be given as ``count``.

    Raises:
        PlanError: An argument of another kind.

    Example:
        >>> import torch
        >>> tokens(shift=True)({"labels": torch.tensor([[7, 8, -100], [7, -100, -100]])})
        1.0
    """
    checks = (
        ("ignore_index", ignore_index, isinstance(ignore_index, int) and not isinstance(ignore_index, bool)),
        ("shift", shift, isinstance(shift, bool)),
        ("key", key, isinstance(key, (str, int)) and not isinstance(key, bool)),
    )
    for name, value, is_right in checks:
        if not is_right:
            raise PlanError(
                f"tokens cannot count by this {name}",
                got=f"{name}={value!r}",
                expected="ignore_index a whole number, shift True or False, key a name or an index",
                hint='write snugfit.tokens(ignore_index=-100, shift=False, key="labels")',
            )
    return _Tokens(ignore_index, shift, key)


class InCode(NamedTuple):
    """A count of tokens as it is written in a script."""

    of_batch: tuple[str, str]
    "In front of and behind the name of a batch."
    argument: str
    "What is given as ``count``."


def in_code(count: Count, batch: Any) -> InCode | None:
    """What ``tokens`` made, as code; None for anything else.

    Args:
        count: As it was given or settled.
        batch: One of the kind that it counts in.

    Example:
        >>> in_code(tokens(shift=True), {"labels": ...}).of_batch
        ('(', '["labels"][..., 1:] != -100).sum()')
    """
    if not isinstance(count, _Tokens):
        return None
    key = count.key
    found = f".{key}" if isinstance(key, str) and not isinstance(batch, Mapping) else f"[{key}]"
    if isinstance(key, str) and isinstance(batch, Mapping):
        found = f'["{key}"]'
    said = {"ignore_index": str(count.ignore_index), "shift": str(count.shift), "key": f'"{key}"'}
    usual = {"ignore_index": str(_IGNORED_LABEL), "shift": "False", "key": '"labels"'}
    if not isinstance(key, str):
        said["key"] = str(key)
    given = ", ".join(f"{name}={value}" for name, value in said.items() if value != usual[name])
    shift = "[..., 1:]" if count.shift else ""
    return InCode(("(", f"{found}{shift} != {count.ignore_index}).sum()"), f"snugfit.tokens({given})")


def resolve(count: Count, num_samples: Callable[[Any], int]) -> Callable[[Any], float]:
    """Turn a job's ``count`` into a function of a micro-batch that returns a finite number of at least 0.

    Args:
        count: ``"samples"`` or a function of a micro-batch.
        num_samples: How the samples of a micro-batch are counted.

    Raises:
        BatchError: When called: the count is not a finite number >= 0, or the function fails.
    """
    counter: Callable[[Any], Any] = num_samples if isinstance(count, str) else count

    def counted(micro_batch: Any) -> float:
        try:
            value = counter(micro_batch)
        except SnugfitError:
            raise
        except Exception as error:
            raise BatchError(
                "the function given as count failed on a micro-batch",
                got=f"{type(error).__name__}: {error}",
                expected=f"a number for each micro-batch, here of {_contents(micro_batch)}",
                hint="count gets a micro-batch as it is on the host, before the loss function sees it",
            ) from error
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise _bad_count(value) from error
        if not math.isfinite(number) or number < 0:
            raise _bad_count(value)
        return number

    return counted


def settled(count: Count, model: nn.Module, batch: Any) -> Count:
    """What is counted, now that a first batch is there; a warning tells what was inferred.

    Args:
        count: As it was given.
        model: What is trained; wrappers of DDP and of adapter libraries are looked through.
        batch: A batch or micro-batch on the host.

    Returns:
        The shifted labels of a causal language model of transformers, where nobody said what is counted and the
        batch has labels; else ``count``.
    """
    labels = _entry(batch, "labels")
    if not isinstance(count, str) or not isinstance(labels, Tensor) or labels.dim() < 2:
        return count
    if is_unsaid(count) and _is_causal(model):
        warn(
            "count inferred: a causal language model of transformers averages over its shifted labels, so these are "
            'counted; pass count=snugfit.tokens(shift=True) to say so, or count="samples" where the loss is a mean '
            "over samples",
        )
        return tokens(shift=True)
    return count


class Counting:
    """What one engine counts: settled at its first batch, and doubted once, at the first that looks wrong.

    Args:
        count: As it was given.
        model: What is trained.
    """

    def __init__(self, count: Count, model: nn.Module) -> None:
        self._count, self._model = count, model
        self._is_settled = self._is_doubtful = self._is_judged = False

    def of(self, batch: Any, *more: Any) -> Count:
        """What is counted in a batch that lies on the host, or in the micro-batches of a window."""
        if not self._is_settled:
            self._is_settled = True
            self._count = settled(self._count, self._model, batch)
        if not self._is_judged and not self._is_doubtful:
            self._is_doubtful = any(is_doubtful(self._count, one) for one in (batch, *more))
        return self._count

    @property
    def unit(self) -> str:
        """What is counted, as it is written in a script."""
        tokens_in_code = in_code(self._count, None)
        if tokens_in_code is not None:
            return tokens_in_code.argument
        return str(self._count) if isinstance(self._count, str) else getattr(self._count, "__qualname__", "a function")

    def end_window(self, *, is_reported: bool) -> None:
        """Warn, once, after a window in which a mean over tokens was weighted as if all had the same number of them.

        Args:
            is_reported: Whether the losses of the window said what they are a mean over.
        """
        self._is_judged |= is_reported or self._is_doubtful
        if self._is_doubtful and not is_reported:
            warn(
                f'labels hold {_IGNORED_LABEL} but count is "samples": a loss that is a mean over tokens is then not '
                "the mean of the full batch; pass count=snugfit.tokens() (shift=True for causal language models), or "
                "silence this if the loss is a mean over samples",
            )
        self._is_doubtful = False


def is_doubtful(count: Count, batch: Any) -> bool:
    """Whether samples are counted although labels of tokens are ignored."""
    labels = _entry(batch, "labels")
    is_on_host = isinstance(labels, Tensor) and labels.device.type == "cpu"  # asking a device would wait for it
    return isinstance(count, str) and is_on_host and labels.dim() >= 2 and bool((labels == _IGNORED_LABEL).any())


def _is_causal(model: nn.Module) -> bool:
    """Whether a model is one of transformers' that shift their labels themselves.

    Told by its name and by what its forward names: decoders of translation models (BART, Pegasus, TrOCR), XLNet and XLM
    are called alike, and take labels that are shifted already.
    """
    for name in ("_orig_mod", "module", "_orig_mod"):  # torch.compile and DDP, in either order
        inner = getattr(model, name, None)
        model = inner if isinstance(inner, nn.Module) else model
    unwrap = getattr(model, "get_base_model", None)  # peft
    found = type(model if unwrap is None else unwrap())
    is_theirs = any(kind.__module__.partition(".")[0] == "transformers" for kind in found.__mro__)
    return is_theirs and any(kind.__name__.endswith(_CAUSAL) and _shifts_labels(kind) for kind in found.__mro__)


def _shifts_labels(kind: Any) -> bool:
    """Whether the forward of a class shifts labels; taken for granted where there is no code to look at."""
    forward = getattr(kind, "forward", None)
    if forward is None:
        return False
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is None or not _SHIFTING.isdisjoint((*code.co_names, *code.co_varnames))


def _entry(batch: Any, key: str | int) -> Any:
    """What a batch holds under a key, an index or as an attribute; None where there is no such thing."""
    if isinstance(batch, Mapping) or not isinstance(key, str):
        try:
            return batch[key]
        except (KeyError, IndexError, TypeError):
            return None
    return getattr(batch, key, None)


def _contents(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"{type(batch).__name__} with keys {', '.join(map(repr, batch))}"
    return type(batch).__name__


def _bad_count(value: Any) -> BatchError:
    return BatchError(
        "the count of a micro-batch is not a number to divide by",
        got=f"{value!r} of type {type(value).__name__}",
        expected="a finite number >= 0",
        hint="return a float, for example float(mask.sum())",
        count=value,
    )
