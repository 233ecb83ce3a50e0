"""Normalisation layers under accumulation: BatchNorm sees micro-batches, not the batch, and what can be done about it.

Entry points: ``freeze``, ``to_group_norm``, ``to_sync``, ``set_momentum`` and ``window_statistics``, which is
``running_statistics``'s. What an engine does with them is ``norm_policy``'s. Normalising with the statistics of all
micro-batches would need a second forward, and is left out.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn

from snugfit.errors import PlanError, UnsupportedError, warn
from snugfit.training import distributed
from snugfit.training.holders import Holders, let_go
from snugfit.training.running_statistics import (
    BATCH_NORM,
    INSTANCE_NORM,
    plain,
    pooled,
    refuse_lazy,
    release_copied,
    tracking_layers,
)
from snugfit.training.running_statistics import window_statistics as window_statistics

_USUAL_WEIGHT_OF_OLD = 0.9
_SHOWN = 8
_Model = TypeVar("_Model", bound=nn.Module)


class Frozen:
    """Handle of ``freeze``.

    Args:
        layers: What is frozen, by name.
        copies: Whether copies of the layers are frozen too; else only those that are copied with this handle.
    """

    def __init__(self, layers: dict[str, "_EvaluationMode"], *, copies: bool = True) -> None:
        self._layers, self._copies = layers, copies
        self.layers = tuple(layers)
        "Names of the frozen layers."
        self._note()

    def remove(self) -> None:
        """Let the layers follow ``train()`` and ``eval()`` again, if nothing else freezes them.

        A second call does nothing.
        """
        layers, self._layers = list(self._layers.values()), {}
        for layer, is_free in zip(layers, let_go(self, [layer.holders for layer in layers]), strict=True):
            if is_free:
                layer.uninstall()

    def _note(self) -> None:
        for layer in self._layers.values():
            layer.holders.add(self)
            layer.stays_in_copies = layer.stays_in_copies or self._copies
            layer.install()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._note()


def freeze(model: nn.Module) -> Frozen:
    """Freeze the running statistics of all layers that keep them, and normalise with them, in training too.

    Each sample is then normalised by itself: micro-batches give the gradient of the full batch. The layers stay in
    evaluation mode whatever ``model.train()`` says. Weight and bias of the layers are still trained; to stop that as
    well, set their ``requires_grad`` to False. The statistics should be trained ones: those of a new layer normalise
    nothing. Freezing again changes nothing.

    Args:
        model: Changed in place; may be wrapped in DDP.

    Returns:
        Handle with ``remove()`` and ``layers``.

    Raises:
        PlanError: A BatchNorm layer keeps no running statistics.
        UnsupportedError: A lazy layer.
    """
    return frozen(model, copies=True)


def frozen(model: nn.Module, *, copies: bool) -> Frozen:
    """Freeze the layers of a model; see ``freeze``.

    Args:
        model: Changed in place.
        copies: Whether copies of the model are frozen too.
    """
    untracked = [name for name, layer in batch_norms(model) if layer.running_mean is None]
    if untracked:
        raise PlanError(
            "these layers have no running statistics that could be frozen",
            got=f"track_running_stats=False of {', '.join(untracked)}",
            expected="BatchNorm layers with running statistics",
            hint="build them with track_running_stats=True, or use snugfit.norms.to_group_norm(model, groups)",
            names=tuple(untracked),
        )
    layers = {}
    for name, layer in tracking_layers(model):
        present = layer.__dict__.get("train")
        layers[name] = present if isinstance(present, _EvaluationMode) else _EvaluationMode(layer)
    if not layers:
        warn_of_no_effect("freeze")
    return Frozen(layers, copies=copies)


def to_group_norm(model: _Model, groups: int) -> _Model:
    """Replace every BatchNorm layer by a GroupNorm, which normalises each sample by itself.

    Weight and bias stay the same parameters, so an optimizer made before stays valid; running statistics are dropped.
    A layer that is used in several places stays one layer.

    Args:
        model: Changed in place, before it is wrapped or recomputed.
        groups: Number of groups of channels; 1 is LayerNorm over channels and positions.

    Returns:
        The model; another module only if it is a BatchNorm itself.

    Raises:
        PlanError: Groups that do not divide the channels of a layer, or a model that is wrapped or recomputed already.
        UnsupportedError: A lazy layer, or a layer with a forward of its own.
    """
    layers = _replaceable(model, "to_group_norm")
    for name, layer in layers:
        channels = layer.num_features
        if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1 or channels % groups:
            divisors = [d for d in range(1, channels + 1) if channels % d == 0]
            raise PlanError(
                f"groups does not divide the channels of the layer {name!r}",
                got=f"groups={groups!r}, {channels} channels",
                expected=f"one of {', '.join(map(str, divisors))}",
                hint=f"use groups={math.gcd(*(layer.num_features for _, layer in layers))} or a divisor of it: "
                "that fits all layers",
                module=name,
                divisors=tuple(divisors),
            )
    narrow = [n for n, layer in layers if isinstance(layer, nn.BatchNorm1d) and layer.num_features == groups]
    if narrow:
        warn(
            f"to_group_norm(groups={groups}) leaves one channel per group in {', '.join(narrow)}: an input of shape "
            "(N, C) becomes 0 there; use fewer groups",
        )

    def converted(layer: Any) -> nn.Module:
        norm = nn.GroupNorm(groups, layer.num_features, layer.eps, affine=False)
        norm.affine, norm.weight, norm.bias = layer.affine, layer.weight, layer.bias
        return norm.train(layer.training)

    replaced: _Model = _replaced(model, [layer for _, layer in layers], converted)
    return replaced


def to_sync(model: _Model) -> _Model:
    """Replace every BatchNorm layer by torch's SyncBatchNorm, which computes statistics over all ranks.

    It synchronises ranks, not micro-batches: on one device it changes nothing. Parameters and buffers stay the same
    objects. Training on several ranks needs GPUs, as torch has it for no CPU.

    Args:
        model: Changed in place, before it is wrapped or recomputed.

    Returns:
        The model; another module only if it is a BatchNorm itself.

    Raises:
        PlanError: A model that is wrapped or recomputed already.
        UnsupportedError: A lazy layer, or a layer with a forward of its own.
    """
    layers = [layer for _, layer in _replaceable(model, "to_sync") if not isinstance(layer, nn.SyncBatchNorm)]
    if layers and distributed.world_size() == 1:
        warn(
            "to_sync synchronises ranks, not micro-batches: on one device it changes nothing; use "
            'norm_policy="window" or snugfit.norms.to_group_norm(model, groups)',
        )
    replaced: _Model = _replaced(model, layers, nn.SyncBatchNorm.convert_sync_batchnorm)
    return replaced


def set_momentum(model: nn.Module, value: float | None, weight_of: str = "new") -> None:
    """Set the momentum of all layers that keep running statistics.

    Torch's momentum is the weight of the NEW value, 0.1 by default. Many texts mean the weight of the OLD one, where
    0.9 to 0.99 is usual: say ``weight_of="old"`` and it is translated to 1 - value.

    Args:
        model: Changed in place; may be wrapped in DDP.
        value: 0 to 1, or None for the average over all batches.
        weight_of: ``"new"`` (torch) or ``"old"``.

    Raises:
        PlanError: Not such a number, an unknown convention, or None where it would mean that nothing moves.

    Example:
        >>> layer = nn.BatchNorm1d(4)
        >>> set_momentum(layer, 0.75, weight_of="old")
        >>> layer.momentum
        0.25
    """
    if not isinstance(weight_of, str) or weight_of not in ("new", "old") or (value is None and weight_of == "old"):
        raise PlanError(
            "unknown convention of a momentum",
            got=f"value={value!r}, weight_of={weight_of!r}",
            expected='a number with weight_of="new" (torch) or "old"; None (the average over all batches) with "new"',
            hint='torch\'s 0.1 is value=0.9, weight_of="old"',
        )
    if value is not None:
        _check_fraction(value)
        if weight_of == "old":
            value = 1 - value
        elif _USUAL_WEIGHT_OF_OLD <= value < 1:
            warn(
                f"set_momentum(model, {value:g}) makes a new batch count {value:g} and everything before "
                f"{1 - value:g}; where {value:g} is the weight of the old value, pass weight_of='old'",
            )
    layers = list(tracking_layers(model))
    for name, layer in layers:
        if value is None and isinstance(layer, INSTANCE_NORM):
            raise PlanError(
                f"the layer {name!r} would not move its running statistics at all",
                got=f"momentum=None of {type(layer).__name__}, which torch takes as 0",
                expected="0 to 1",
                hint="pass a number such as 0.1",
                module=name,
            )
    for _, layer in layers:
        layer.momentum = value
    if not layers:
        warn_of_no_effect("set_momentum")


def corrected_momentum(momentum: float, accumulation_steps: int) -> float:
    """The momentum with which statistics that move once per micro-batch forget as much in a window as in one step.

    1 - (1 - momentum) ** (1 / accumulation_steps). It corrects the speed only: the variance between micro-batches is
    still missing, and later micro-batches count slightly more. ``window_statistics`` has neither fault.

    Args:
        momentum: Weight of the new value, for a whole window.
        accumulation_steps: Micro-batches of a window.

    Raises:
        PlanError: Not 0 to 1, or less than one micro-batch.

    Example:
        >>> round(corrected_momentum(0.1, 2), 5)
        0.05132
    """
    _check_fraction(momentum)
    if isinstance(accumulation_steps, bool) or not isinstance(accumulation_steps, int) or accumulation_steps < 1:
        raise PlanError(
            "accumulation_steps must be a whole number of at least 1",
            got=f"accumulation_steps={accumulation_steps!r}",
            expected=">= 1",
            hint="pass plan.accumulation_steps",
        )
    return float(1 - (1 - momentum) ** (1 / accumulation_steps))


def batch_coupled(model: nn.Module) -> tuple[str, ...]:
    """Names of the BatchNorm layers that normalise with their micro-batch: not equivalent to the full batch."""
    return tuple(name for name, layer in batch_norms(model) if couples(layer))


def listed(names: Sequence[str], most: int = _SHOWN) -> str:
    """The first of some layers by name, and how many more there are."""
    shown = ", ".join(name or "the model itself" for name in names[:most])
    return f"{shown} and {len(names) - most} more layers" if len(names) > most else shown


def couples(layer: Any) -> bool:
    """Whether a BatchNorm layer normalises with its micro-batch."""
    return bool(layer.training or layer.running_mean is None)


class _EvaluationMode:
    """Stands in for ``train`` of one layer; an object, so that a deep copy of the model refers to the copy.

    A copy of what an engine has frozen follows ``train`` like any other layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer, self._asked = layer, layer.training
        self.holders = Holders()
        self._is_on = self.stays_in_copies = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_is_on": self._is_on and self.stays_in_copies}

    def install(self) -> None:
        self._is_on = True
        self._layer.__dict__["train"] = self
        self._layer.training = False

    def uninstall(self) -> None:
        if self._layer.__dict__.get("train") is self:
            del self._layer.__dict__["train"]
            self._layer.train(self._asked)

    @staticmethod
    def release_copied(layer: nn.Module) -> None:
        """Take what froze the original of a copied layer off the copy."""
        present = layer.__dict__.get("train")
        if isinstance(present, _EvaluationMode) and not present._is_on:
            del layer.__dict__["train"]

    def __call__(self, mode: bool = True) -> nn.Module:
        self._asked = mode
        self._layer.training = mode and not self._is_on
        return self._layer


def batch_norms(model: nn.Module) -> list[tuple[str, Any]]:
    """Names and BatchNorm layers of all kinds, each layer once."""
    return [(name, layer) for name, layer in plain(model).named_modules() if isinstance(layer, BATCH_NORM)]


def _replaceable(model: nn.Module, function: str) -> list[tuple[str, Any]]:
    """The BatchNorm layers of a model that may still be changed."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise PlanError(
            f"{function} needs the model before it is wrapped",
            got=type(model).__name__,
            expected="the plain module: DDP has noted its buffers",
            hint=f"call snugfit.norms.{function} first, then wrap the model",
        )
    layers = batch_norms(model)
    for name, layer in layers:
        refuse_lazy(name, layer)
        release_copied(layer)
        _EvaluationMode.release_copied(layer)
        if type(layer).forward not in (BATCH_NORM.forward, nn.SyncBatchNorm.forward):
            raise UnsupportedError(
                f"{function} would lose what the layer {name!r} does besides",
                got=f"{type(layer).__module__}.{type(layer).__name__}, which has a forward of its own",
                expected="BatchNorm layers of torch",
                hint="replace this layer yourself",
                module=name,
            )
        if "forward" in layer.__dict__ or "train" in layer.__dict__ or pooled(layer) is not None:
            raise PlanError(
                f"{function} needs the layer {name!r} as it was built",
                got="a layer that is recomputed, frozen or under window statistics",
                expected="a layer without handles",
                hint=f"call snugfit.norms.{function} first, or remove() the handle",
                module=name,
            )
    if not layers:
        warn_of_no_effect(function)
    return layers


def _replaced(model: Any, layers: Sequence[nn.Module], convert: Callable[[Any], nn.Module]) -> Any:
    """The model with other layers in all places of the given ones."""
    new = {id(layer): convert(layer) for layer in layers}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if id(child) in new:
                parent._modules[name] = new[id(child)]
    return new.get(id(model), model)


def _check_fraction(value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise PlanError(
            "a momentum is a weight",
            got=f"momentum={value!r}",
            expected="a number from 0 to 1",
            hint="torch's default is 0.1, the weight of the new value",
        )


def warn_of_no_effect(what: str) -> None:
    """Warn that a setting is for layers that the model does not have."""
    warn(f"{what} has no effect: the model has no layer that keeps running statistics; leave it out")
