"""A plan's ``norm_policy``: what an engine does with normalisation layers around each window.

Entry points: ``apply`` and ``pool_over_ranks``. ``"micro"`` is torch's own behaviour, with a warning; ``"window"``
moves running statistics once per window; ``"frozen"`` never. What they do to a layer is ``norms``'s.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from snugfit.errors import warn
from snugfit.training import norms
from snugfit.training.norms import Frozen
from snugfit.training.running_statistics import (
    BATCH_NORM,
    INSTANCE_NORM,
    Pooled,
    WindowStatistics,
    pooled,
    pooled_in_windows,
)


def apply(model: nn.Module, policy: str) -> "Policy":
    """Make a model's normalisation layers follow a policy; doing so again changes nothing.

    Args:
        model: Changed in place; may be wrapped in DDP.
        policy: ``"micro" "window" "frozen"``.

    Raises:
        PlanError: Nothing to freeze in a BatchNorm layer.
        UnsupportedError: A lazy layer.
    """
    if policy == "micro":
        return Policy(model, None)
    if not any(isinstance(module, (BATCH_NORM, INSTANCE_NORM)) for module in model.modules()):
        norms.warn_of_no_effect(f"norm_policy={policy!r}")
        return Policy(model, None)
    return Policy(model, norms.frozen(model, copies=False) if policy == "frozen" else pooled_in_windows(model))


class Policy:
    """Drives the layers of one engine, also those that are under ``window_statistics`` by the user's own call.

    Between windows, and in a deep copy of the model, the layers under ``"window"`` are torch's; those under
    ``"frozen"`` stay frozen between windows, but not in a copy.
    """

    def __init__(self, model: nn.Module, handle: Frozen | WindowStatistics | None) -> None:
        self._model, self._handle = model, handle
        self._layers = [module for module in model.modules() if isinstance(module, (BATCH_NORM, INSTANCE_NORM))]
        self._has_warned = isinstance(handle, WindowStatistics)

    def begin(self, num_micro_batches: int) -> None:
        """Before a window: forget what was seen outside of it, and warn once of what it does to BatchNorm."""
        if isinstance(self._handle, WindowStatistics):
            self._handle.begin()
        self.discard()
        if num_micro_batches > 1 and not self._has_warned and any(map(_is_affected, self._layers)):
            self._has_warned = True
            warn(
                f"BatchNorm makes {num_micro_batches} micro-batches not equivalent to the full batch: "
                "norm_policy='micro' normalises each by itself and moves running statistics for each, in "
                f"{norms.listed([name for name, layer in norms.batch_norms(self._model) if _is_affected(layer)])}; use "
                "norm_policy='window' (statistics move once per window), 'frozen' (equivalent), or "
                "snugfit.norms.to_group_norm",
            )

    def update(self) -> None:
        """After an update: running statistics that belong to the window, over all ranks, move once."""
        layers = self._pooled()
        if layers and isinstance(self._model, nn.parallel.DistributedDataParallel):
            pool_over_ranks(layers)
        for layer in layers:
            layer.update()

    def discard(self) -> None:
        """After a window that made no update."""
        for layer in self._pooled():
            layer.discard()

    def end(self) -> None:
        """After a window, whatever became of it."""
        if isinstance(self._handle, WindowStatistics):
            self._handle.end()

    def remove(self) -> None:
        """Give the layers their own behaviour back."""
        if self._handle is not None:
            self._handle.remove()

    def _pooled(self) -> list[Pooled]:
        return [found for layer in self._layers if (found := pooled(layer)) is not None]


def _is_affected(layer: Any) -> bool:
    """Whether a window of several micro-batches changes what a layer does, and nothing is done about it."""
    return isinstance(layer, BATCH_NORM) and norms.couples(layer) and pooled(layer) is None


@torch.no_grad()
def pool_over_ranks(layers: Sequence[Pooled]) -> None:
    """Pool what layers have seen since the last update with what they have seen on all other ranks; see the NOTE of
    ``running_statistics``, 5.

    Two messages for all layers together; nothing waits for the device.

    Args:
        layers: The same, in the same order, on every rank. SyncBatchNorm, which has pooled already, is left out.
    """
    layers = [layer for layer in layers if not isinstance(layer.module, nn.SyncBatchNorm)]
    if not layers:
        return
    seen = [layer.seen() for layer in layers]
    counts = torch.stack([mean.new_tensor(count, dtype=torch.float64) for count, mean, _ in seen])
    sums = torch.cat([counts, *(mean.double() * count for count, mean, _ in seen)])
    torch.distributed.all_reduce(sums)
    totals = sums[: len(layers)]
    sizes = [mean.numel() for _, mean, _ in seen]
    sums_of_means = torch.split_with_sizes(sums[len(layers) :], sizes)
    means = [weighted / total.clamp(min=1) for weighted, total in zip(sums_of_means, totals, strict=True)]
    parts = []
    for layer, (count, own_mean, spread), mean in zip(layers, seen, means, strict=True):
        is_instance = isinstance(layer.module, INSTANCE_NORM)
        part = spread.double() * count if is_instance else spread.double() + count * (own_mean.double() - mean) ** 2
        parts.append(part)
    spreads = torch.cat(parts)
    torch.distributed.all_reduce(spreads)
    summed = torch.split_with_sizes(spreads, sizes)
    for layer, (_, own, _), total, mean, spread in zip(layers, seen, totals, means, summed, strict=True):
        pooled_spread = spread / total.clamp(min=1) if isinstance(layer.module, INSTANCE_NORM) else spread
        layer.pool(total.to(own.dtype), mean.to(own.dtype), pooled_spread.to(own.dtype))
