"""Counts that a job could have meant, and labels of other lengths, on which counts that are alike can be told apart.

Entry points: ``countable``, ``ragged`` and ``alike``. Trying them is ``coupling``'s and ``full_batch``'s.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from snugfit.errors import BatchError
from snugfit.jobs import Count
from snugfit.training.counting import tokens

_LABELS = ("labels", "label", "targets", "target", "y")
_MASKS = ("attention_mask", "mask", "loss_mask")


def countable(
    batch: Any, cut: Callable[[Count], tuple[list[Any], list[float]]], ignored: int = -100
) -> Iterator[tuple[str, Count, list[Any], list[float]]]:
    """Counts that losses are usually means over, by what the user would write, with what they cut and count.

    Those that cannot count the micro-batches are left out: what the user's own split makes need not be alike to the
    batch, and its samples are known to the user alone.

    Args:
        batch: The batch.
        cut: Cuts it, and counts its micro-batches by another count than the job's.
        ignored: Label that the job's count leaves out.
    """
    for text, count in _candidates(batch, ignored):
        with suppress(BatchError):
            yield text, count, *cut(count)


def _candidates(batch: Any, ignored: int) -> Iterator[tuple[str, Count]]:
    for key in keys(batch):
        labels = batch[key]
        other = [] if ignored == -100 else [f"ignore_index={ignored}"]
        place = [] if key == "labels" else [f"key={key!r}"]
        if labels.dim() > 1:
            text = ", ".join([*other, "shift=True", *place])
            yield f"snugfit.tokens({text})", tokens(ignored, shift=True, key=key)
        yield f"snugfit.tokens({', '.join([*other, *place])})", tokens(ignored, key=key)
    yield '"samples"', "samples"
    for key in _MASKS:
        mask = batch.get(key) if isinstance(batch, Mapping) else None
        if isinstance(mask, Tensor) and mask.dim() > 1 and bool(((mask == 0) | (mask == 1)).all()):
            yield f"lambda b: b[{key!r}].sum()", _mask_counter(key, 0)
            yield f"lambda b: b[{key!r}][..., 1:].sum()", _mask_counter(key, 1)


def _mask_counter(key: str, start: int) -> Callable[[Any], float]:
    return lambda micro_batch: float(micro_batch[key][..., start:].sum())


def keys(batch: Any) -> list[Any]:
    """Where a batch holds labels."""
    found: list[Any] = []
    if isinstance(batch, Mapping):
        found = [key for key in _LABELS if key in batch]
    elif isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        found = list(range(len(batch)))
    labels = [(key, batch[key]) for key in found]
    return [key for key, one in labels if isinstance(one, Tensor) and not one.is_floating_point() and one.dim()]


def ragged(batch: Any, key: Any, ignored: int) -> Any:
    """The batch with labels of which later samples keep more; None where that cannot be made."""
    if isinstance(batch, Mapping):
        labels = batch.get(key)
    else:
        labels = batch[key] if isinstance(batch, (list, tuple)) and isinstance(key, int) else None
    if not isinstance(labels, Tensor) or labels.dim() != 2 or labels.shape[1] < 3 or labels.shape[0] < 2:
        return None
    counted = labels[labels != ignored]
    if not counted.numel():
        return None
    number, length = labels.shape
    filled = torch.where(labels == ignored, counted[0], labels).cpu()
    kept = [2 + (length - 2) * i // (number - 1) for i in range(number)]
    positions = torch.arange(length).expand(number, length)
    cut = torch.where(positions < torch.tensor(kept)[:, None], filled, ignored).to(labels.device)
    if isinstance(batch, Mapping):
        changed: Any = copy.copy(batch)
        changed[key] = cut
        return changed
    values = [cut if i == key else value for i, value in enumerate(batch)]
    make: Any = getattr(type(batch), "_make", type(batch))
    return make(values)


def alike(
    batch: Any, count: Count, weights: Sequence[float], cut: Callable[[Count], tuple[list[Any], list[float]]]
) -> list[str]:
    """Other counts that weigh the micro-batches of a batch of token labels as the job's does.

    Args:
        batch: The batch.
        count: The job's.
        weights: See ``ratios``; of the job's count.
        cut: Cuts it, and counts its micro-batches by another count.
    """
    if not any(batch[key].dim() > 1 for key in keys(batch)):
        return []
    others = countable(batch, cut, getattr(count, "ignore_index", -100))
    return [text for text, other, _, counts in others if other != count and ratios(counts) == weights]


def ratios(counts: Sequence[float]) -> list[float]:
    """Shares of counts in their sum, rounded so that equal ones are equal."""
    total = sum(counts)
    return [round(count / total, 12) if total else 0.0 for count in counts]
