"""Running statistics of a whole window: what normalisation layers saw in its micro-batches, pooled into one update.

Entry point: ``window_statistics``, public as ``snugfit.norms.window_statistics``. Activations themselves are still
normalised per micro-batch; only what evaluation will use is that of one big batch.

NOTE [How a window is pooled]
1. During a layer's forward in training mode its buffers are swapped for scratch ones and its momentum is 1, so torch
   itself writes the micro-batch's mean and unbiased variance there: nothing is computed twice.
2. Pooled are the count of elements n, the mean, and the sum of squared deviations S. For a micro-batch with k, mean m,
   variance v: d = m - mean; S += v * (k - 1) + d * d * n * k / (n + k); mean += d * k / (n + k). That is the law of
   total variance without its cancellation. Counts come from shapes, so nothing waits for the device.
3. At the window's end the variance is S / (n - 1), and the buffers move once, with the layer's own momentum.
4. InstanceNorm's running statistics are means over the instances, of mean and of variance, so both are pooled as means.
5. Over ranks the same with sums: of the counts and of count * mean, then of S + count * (its mean - the mean of all)^2.
6. A recomputed forward is swapped as well, so that no buffer moves, but not counted, whoever recomputes it.
7. Under ``window_statistics`` a layer is pooled until its handle is removed; for an engine only inside of its windows.
   Outside of them, and in a deep copy (an average of weights, whose statistics ``update_bn`` computes), the layer is
   torch's, unless handle or engine are copied with it.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from snugfit.errors import UnsupportedError
from snugfit.jobs import check_module
from snugfit.training.holders import Holders, let_go
from snugfit.training.recomputation import is_recomputing
from snugfit.training.torch_private import in_backward

BATCH_NORM: Any = nn.BatchNorm1d.__base__
"Of all BatchNorm layers, SyncBatchNorm and their subclasses."
INSTANCE_NORM: Any = nn.InstanceNorm1d.__base__
"Of all InstanceNorm layers."
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
Number: TypeAlias = int | Tensor
"A count of the host, or one that only the device knows."
_OF_TORCH = (BATCH_NORM.forward, nn.SyncBatchNorm.forward, INSTANCE_NORM.forward)


def plain(model: nn.Module) -> nn.Module:
    """The module inside of DDP.

    Raises:
        PlanError: The model is none.
    """
    check_module(model, "there is no model to look through for normalisation layers")
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def tracking_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and layers that keep running statistics, each layer once.

    Raises:
        UnsupportedError: A lazy layer, whose statistics have no size yet.
    """
    for name, module in plain(model).named_modules():
        if isinstance(module, (BATCH_NORM, INSTANCE_NORM)) and module.track_running_stats:
            refuse_lazy(name, module)
            if module.running_mean is not None:
                yield name, module


def refuse_lazy(name: str, module: nn.Module) -> None:
    """Refuse a layer that does not know its channels yet.

    Raises:
        UnsupportedError: Names it.
    """
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
        raise UnsupportedError(
            f"the normalisation layer {name!r} does not know its channels yet",
            got=f"{type(module).__name__} before its first forward",
            expected="a layer that is initialised",
            hint="run the model once before, on one sample",
            module=name,
        )


class WindowStatistics:
    """Handle of ``window_statistics``: call ``update`` after a window that was used, ``discard`` after another.

    Args:
        layers: What is pooled.
        always: Whether that is so until ``remove``; else between ``begin`` and ``end``.
    """

    def __init__(self, layers: Sequence["Pooled"], *, always: bool = True) -> None:
        self._layers, self._always = tuple(layers), always
        self.layers = tuple(layer.name for layer in layers)
        "Names of the layers that are pooled."
        self._note()

    def begin(self) -> None:
        """Pool what comes, if that is not done always."""
        for layer in self._layers:
            layer.is_open = True

    def end(self) -> None:
        """Forget what is left, and let the layers be torch's again, if they are not pooled always."""
        for layer in self._layers:
            layer.discard()
            layer.is_open = False

    def update(self) -> None:
        """Move running statistics by what was seen since the last call, as one batch; without any, nothing moves."""
        for layer in self._layers:
            layer.update()

    def discard(self) -> None:
        """Forget what was seen since the last call; nothing moves."""
        for layer in self._layers:
            layer.discard()

    def remove(self) -> None:
        """Give the layers their own behaviour back; what was not used for an update is lost.

        Where another handle or engine needs them they stay for it; a second call does nothing.
        """
        layers, self._layers = self._layers, ()
        for layer, is_free in zip(layers, let_go(self, [layer.holders for layer in layers]), strict=True):
            layer.is_open = False
            layer.is_always = layer.is_always and not self._always
            if is_free:
                layer.uninstall()

    def _note(self) -> None:
        for layer in self._layers:
            layer.holders.add(self)
            layer.is_always = layer.is_always or self._always

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)  # of a copy: its layers are driven by nobody else
        self._note()


def window_statistics(model: nn.Module) -> WindowStatistics:
    """Let running statistics move once per window, as those of one big batch over the same activations.

    Covers BatchNorm, SyncBatchNorm, and InstanceNorm with running statistics, in training mode; a layer that is called
    several times in a micro-batch counts each call, one that is not called does not move. Statistics are pooled in
    single precision at least; torch rounds those of a micro-batch to the type of the layer's buffers.
    ``num_batches_tracked`` moves by one. Calling this again takes the layers over as they are. An ``Engine`` of such a
    model updates and discards by itself.

    On several ranks each handle pools its own micro-batches; the engine of a model in DDP pools those of all ranks.
    SyncBatchNorm's are those of all ranks anyway, if all have the same number of elements.

    Args:
        model: Changed in place; may be wrapped in DDP.

    Returns:
        Handle with ``update()``, ``discard()``, ``remove()`` and ``layers``.

    Raises:
        UnsupportedError: A lazy layer; at its first forward, a layer whose own forward uses running statistics
            otherwise than ``batch_norm`` does.
    """
    return _installed(model, always=True)


def pooled_in_windows(model: nn.Module) -> WindowStatistics:
    """The same for an engine: pooled between ``begin`` and ``end`` only."""
    return _installed(model, always=False)


def _installed(model: nn.Module, *, always: bool) -> WindowStatistics:
    layers = [_stand_in(module) or Pooled(name, module) for name, module in tracking_layers(model)]
    for layer in layers:
        layer.install()
    return WindowStatistics(layers, always=always)


def pooled(module: nn.Module) -> "Pooled | None":
    """What pools the statistics of a layer at the moment, if anything does."""
    found = _stand_in(module)
    return found if found is not None and found.is_active else None


def release_copied(module: nn.Module) -> None:
    """Take what was pooling the original of a copied layer off the copy."""
    found = _stand_in(module)
    if found is not None and not (found.is_active or found.holders):
        found.uninstall()


def _stand_in(module: nn.Module) -> "Pooled | None":
    return next((one for one in _stand_ins(module) if isinstance(one, Pooled)), None)


def _stand_ins(module: nn.Module) -> list[Any]:
    """What stands in for a module's forward, outermost first; each knows what it replaced as ``own``."""
    found: list[Any] = [module.__dict__.get("forward")]
    while hasattr(found[-1], "own"):
        found.append(found[-1].own)
    return found


class Pooled:
    """Stands in for the forward of one layer, and keeps what it has seen since the last update.

    It lies beneath a recomputed segment's own stand-in, whichever came first. A deep copy belongs to the copied layer.
    """

    def __init__(self, name: str, module: Any) -> None:
        self.name, self.module = name, module
        self.own: Any = None
        self.holders = Holders()
        self.is_always = self.is_open = False
        self._scratch: dict[str, Tensor | None] = {}
        self.discard()

    @property
    def is_active(self) -> bool:
        """Whether forwards are pooled at the moment."""
        return self.is_always or self.is_open

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "is_always": False, "is_open": False}  # of a copy; see the NOTE, 7

    def install(self) -> None:
        """Take the forward's place; once there it stays."""
        *outer, innermost = _stand_ins(self.module)
        if self in outer:
            return
        self.own = innermost
        if outer:
            outer[-1].own = self
        else:
            self.module.__dict__["forward"] = self

    def uninstall(self) -> None:
        """Give the forward back."""
        self.discard()
        around = _stand_ins(self.module)
        if self not in around:
            return
        place = around.index(self)
        if place:
            around[place - 1].own = self.own
        elif self.own is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self.own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's own forward, with scratch buffers: see the NOTE, 1."""
        module = self.module
        if not self.is_active or not module.training or not module.track_running_stats or module.running_mean is None:
            return self._plain(*args, **kwargs)
        own, momentum = {name: module._buffers.get(name) for name in _BUFFERS}, module.momentum
        if not self._scratch:
            self._scratch = {name: None if old is None else torch.zeros_like(old) for name, old in own.items()}
        is_of_torch = self.own is None and type(module).forward in _OF_TORCH
        witness = None if is_of_torch else _Witness(self._scratch["running_mean"])
        module._buffers.update(self._scratch)
        module.momentum = 1.0
        try:
            with witness or nullcontext():
                result = self._plain(*args, **kwargs)
        finally:
            module._buffers.update(own)
            module.momentum = momentum
        if witness is not None and len(witness.shapes) != 1:
            raise self._unlike_batch_norm()
        if not is_recomputing() and not in_backward():
            self._add(witness.shapes[0] if witness else (args[0] if args else next(iter(kwargs.values()))).shape)
        return result

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        return self.own(*args, **kwargs) if self.own else type(self.module).forward(self.module, *args, **kwargs)

    def discard(self) -> None:
        """Forget what was seen."""
        self._count: Number = 0
        self._mean: Tensor | None = None
        self._spread: Tensor | None = None
        self._scratch = {}  # a NaN in there would stay: torch adds 0 times the old value

    @torch.no_grad()
    def update(self) -> None:
        """See the NOTE, 3."""
        module, mean, spread = self.module, self._mean, self._spread
        if mean is not None and spread is not None:
            is_instance = isinstance(module, INSTANCE_NORM)
            variance = spread if is_instance else spread / (self._count - 1)
            weight: Any = module.momentum
            is_seen: Any = 1 if isinstance(self._count, int) else self._count > 0  # by any rank
            if not is_instance and module.num_batches_tracked is not None:
                module.num_batches_tracked.add_(is_seen)
            if weight is None:  # torch: the average over all batches; of InstanceNorm, no update
                weight = 0.0 if is_instance else 1.0 / module.num_batches_tracked.to(mean.dtype)
            if not isinstance(self._count, int):
                weight = torch.where(is_seen, torch.as_tensor(weight, dtype=mean.dtype, device=mean.device), 0.0)
            for buffer, new in ((module.running_mean, mean), (module.running_var, variance)):
                buffer.copy_(buffer.to(new.dtype) * (1.0 - weight) + new * weight)
        self.discard()

    def seen(self) -> tuple[Number, Tensor, Tensor]:
        """Count, mean and spread since the last update; zeros for a layer that was not called."""
        if self._mean is None or self._spread is None:
            nothing = torch.zeros_like(self.module.running_mean, dtype=_wide(self.module.running_mean))
            return 0, nothing, nothing
        return self._count, self._mean, self._spread

    def pool(self, count: Tensor, mean: Tensor, spread: Tensor) -> None:
        """Take what all ranks have seen for what this one has."""
        self._count, self._mean, self._spread = count, mean, spread

    @torch.no_grad()
    def _add(self, shape: torch.Size) -> None:
        """See the NOTE, 2 and 4."""
        mean, variance = self._scratch["running_mean"], self._scratch["running_var"]
        assert mean is not None
        assert variance is not None
        is_instance = isinstance(self.module, INSTANCE_NORM)
        count = _instances(self.module, shape) if is_instance else _elements(self.module, shape)
        if count == 0:
            return
        kind = _wide(mean)
        before = self._count
        assert isinstance(before, int), "pooled over ranks, and not used yet"
        self._count = before + count
        share = count / self._count
        if self._mean is None or self._spread is None:
            self._mean = mean.to(kind, copy=True)
            self._spread = variance.to(kind, copy=True) if is_instance else variance.to(kind) * (count - 1)
            return
        moved = mean - self._mean
        self._mean.add_(moved, alpha=share)
        if is_instance:
            self._spread.add_(variance - self._spread, alpha=share)
        else:
            self._spread.add_(variance, alpha=count - 1).addcmul_(moved, moved, value=before * share)

    def _unlike_batch_norm(self) -> UnsupportedError:
        kind = type(self.module)
        return UnsupportedError(
            f"the running statistics of the layer {self.name!r} cannot be pooled over a window",
            got=f"{kind.__module__}.{kind.__name__}, whose own forward does not hand them to one call of batch_norm",
            expected="a BatchNorm layer of torch, or a forward that calls torch.nn.functional.batch_norm once",
            hint='use norm_policy="micro" or "frozen", or a layer of torch',
            module=self.name,
        )


class _Witness(TorchFunctionMode):
    """Watches a forward that is not torch's: whether it hands the scratch buffers to ``batch_norm``, and with what."""

    def __init__(self, running_mean: Tensor | None) -> None:
        super().__init__()
        self._expected = running_mean
        self.shapes: list[torch.Size] = []
        "Of what was normalised, call by call."

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func in (F.batch_norm, torch.batch_norm):
            running_mean = args[1] if len(args) > 1 else given.get("running_mean")
            if running_mean is self._expected:
                self.shapes.append((args[0] if args else given["input"]).shape)
        return func(*args, **given)


def _wide(values: Tensor) -> torch.dtype:
    """The type to pool in: single precision at least."""
    return torch.promote_types(values.dtype, torch.float32)


def _elements(module: Any, shape: torch.Size) -> int:
    """Elements per channel that went into the statistics."""
    count = math.prod(shape) // shape[1]
    group = torch.distributed
    if isinstance(module, nn.SyncBatchNorm) and group.is_available() and group.is_initialized():
        count *= group.get_world_size(module.process_group)
    return count


def _instances(module: Any, shape: torch.Size) -> int:
    return 1 if len(shape) == module._get_no_batch_dim() else shape[0]
