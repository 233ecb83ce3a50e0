"""Where the trained weights of an optimizer are: in the model, or, for a model of bf16 weights, beside it in fp32.

Entry points: ``of``, which every update goes through, and ``attach``. Converting a model is ``bf16_weights``'s,
skipping and clipping ``step``'s.

NOTE [Weights that are bf16 themselves]
1. bf16 keeps 8 bits: an update below 2^-9 of a weight is always rounded away. So either the optimizer holds fp32
   master weights, whose rounded copies are the model's; or each update is computed in fp32 and rounded up or down by
   chance, right on average; or it is rounded to nearest, and small updates are lost.
2. The optimizer is the user's, made over the model while that still was in full precision. Each bf16 parameter in its
   groups is then replaced in its place, so that groups, their names and options stay.
3. Without masters the stand-ins hold no memory outside of an update, which is ``buckets``'s.
4. Gradients are summed in fp32 by ``Tensor.grad_dtype`` (that of one micro-batch comes in bf16), or in bf16 and then
   cast for each bucket.
5. A weight that somebody wrote to since the last update (a loaded state, a clamp) is noticed by its version, as
   autograd does, and its master follows where the two differ. A write through ``.data`` has no version and is lost.
   (Comparing all weights at every update would notice it, and doubles the update's time on a CPU.)
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from snugfit.errors import PlanError
from snugfit.training import buckets


@dataclass(frozen=True, slots=True)
class _Weights:
    """What stands in the groups of an optimizer for the bf16 weights of a model."""

    method: str
    behind: dict[int, tuple[nn.Parameter, nn.Parameter]] = field(default_factory=dict)
    "id(held) to (held by the optimizer, the model's)."
    versions: dict[int, int] = field(default_factory=dict)
    "id(held) to the version of the model's parameter that agrees with its master."

    def agree(self, held: nn.Parameter, parameter: nn.Parameter) -> None:
        """Note that a master and its parameter agree now."""
        self.versions[id(held)] = parameter._version

    def follow(self, master: nn.Parameter, parameter: nn.Parameter) -> None:
        """Let a master follow its weight wherever somebody else has written to that."""
        if self.versions.get(id(master)) != parameter._version:
            with torch.no_grad():
                same = master.to(parameter.dtype) == parameter
                torch.where(same, master, parameter.float(), out=master)
            self.agree(master, parameter)


_attached: WeakKeyDictionary[torch.optim.Optimizer, _Weights] = WeakKeyDictionary()


class Update:
    """The update of one optimizer, wherever the weights are that it trains; made by ``of``.

    Args:
        optimizer: The user's.
        weights: None for one that holds the model's own parameters.
    """

    __slots__ = ("_weights", "optimizer")

    def __init__(self, optimizer: torch.optim.Optimizer, weights: _Weights | None) -> None:
        self.optimizer, self._weights = optimizer, weights

    @property
    def is_attached(self) -> bool:
        """Whether the optimizer is set up for bf16 weights."""
        return self._weights is not None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The model's parameters that this optimizer trains."""
        return [parameter for _, parameter in self.pairs()]

    def step(self) -> None:
        """Update the model's parameters from their gradients; those without one stay."""
        if self._weights is None:
            self.optimizer.step()
            return
        _adopt(self.optimizer, self._weights, {})
        for held, parameter in self._masters().values():
            self._weights.follow(held, parameter)
        pairs = [(held, parameter) for held, parameter in self.pairs() if parameter.grad is not None]
        try:
            for held, parameter in pairs:
                if held is not parameter:
                    held.grad, parameter.grad = parameter.grad, None
            buckets.step(self.optimizer, pairs, self._weights.method)
        except BaseException:
            if self._weights.method == "master-weights":
                buckets.write_back(pairs, self._weights.method)  # what of them has moved
            raise
        finally:
            for held, parameter in pairs:
                buckets.let_go(held, parameter, self._weights.method)
                self._weights.agree(held, parameter)
        self.optimizer.__dict__["_opt_called"] = True  # a scheduler warns where optimizer.step itself was not called

    def state_dict(self) -> dict[str, Any]:
        """The fp32 master weights by their place in the groups; empty where there are none."""
        masters = {}
        for place, (held, parameter) in self._masters().items():
            self._own.follow(held, parameter)
            masters[place] = held.detach()
        return {"masters": masters} if masters else {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse the master weights of other parameters.

        Raises:
            PlanError: There are more than the optimizer has parameters, or they have other shapes.
        """
        saved: Mapping[int, Tensor] = state.get("masters", {})
        here = [tuple(parameter.shape) for parameter in self.parameters]
        other = [i for i, master in saved.items() if i >= len(here) or tuple(master.shape) != here[i]]
        if other:
            first = other[0]
            raise PlanError(
                "a saved state has fp32 master weights of other parameters",
                got=f"{len(saved)} saved, {len(here)} parameters here; number {first} is saved with the shape "
                f"{tuple(saved[first].shape)}, here {here[first] if first < len(here) else 'there is none'}",
                expected="the parameters of the optimizer that was saved, in their order",
                hint="build the engine with the model and the optimizer's groups that the state was saved with",
            )

    def load_state_dict(self, state: Mapping[str, Any], weights: Mapping[int, Tensor] | None = None) -> None:
        """Set the trained weights from saved masters; see ``check_state``.

        A state of fp32 weights has none: masters then take these, unrounded. Those of which neither was saved begin
        as the model's weights are. Saved masters that have no place here go to the weights themselves.

        Args:
            state: Of ``state_dict``.
            weights: What was saved of the model's parameters, by their ids.
        """
        self.check_state(state)
        saved: Mapping[int, Tensor] = state.get("masters", {})
        masters, weights = self._masters(), weights or {}
        with torch.no_grad():
            for place, (held, parameter) in enumerate(self.pairs()):
                value = saved.get(place, weights.get(id(parameter)) if place in masters else None)
                if value is not None:
                    parameter.copy_(value)
                if place in masters:
                    held.copy_(parameter if value is None else value)
                    self._own.agree(held, parameter)

    @property
    def _own(self) -> _Weights:
        assert self._weights is not None
        return self._weights

    def _masters(self) -> dict[int, tuple[nn.Parameter, nn.Parameter]]:
        if self._weights is None or self._weights.method != "master-weights":
            return {}
        _adopt(self.optimizer, self._weights, {})
        return {place: pair for place, pair in enumerate(self.pairs()) if pair[0] is not pair[1]}

    def pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """What the optimizer holds, and the parameter of the model that it stands for; mostly the same."""
        behind = {} if self._weights is None else self._weights.behind
        for group in self.optimizer.param_groups:
            for held in group["params"]:
                yield behind.get(id(held), (held, held))


def of(optimizer: torch.optim.Optimizer) -> Update:
    """The update of an optimizer; one that was never attached holds the model's own parameters."""
    return Update(optimizer, _attached.get(optimizer))


def attach(optimizer: torch.optim.Optimizer, method: str, originals: Mapping[int, Tensor]) -> None:
    """Set an optimizer up for a model whose weights are bf16 now.

    Args:
        optimizer: Made before the weights were converted.
        method: ``"master-weights"``, ``"stochastic-rounding"`` or ``"nearest"``.
        originals: What the weights were, by the id of the parameter; the masters take it over.
    """
    weights = _Weights(method)
    _adopt(optimizer, weights, originals)
    _attach(optimizer, weights)


def detach(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer hold the model's own parameters again, so that a plain loop trains them.

    Its state takes their type, as in torch's ``load_state_dict``; counters stay.
    """
    weights = _attached.pop(optimizer, None)
    if weights is None:
        return
    optimizer.__dict__.pop("__deepcopy__", None)
    for group in optimizer.param_groups:
        group["params"] = [weights.behind.get(id(held), (held, held))[1] for held in group["params"]]
    for held, parameter in weights.behind.values():
        held.grad = None
        if held in optimizer.state:
            state = optimizer.state.pop(held)
            optimizer.state[parameter] = {
                name: value.to(parameter.dtype) if isinstance(value, Tensor) and _is_like_a_weight(value) else value
                for name, value in state.items()
            }


def _attach(optimizer: torch.optim.Optimizer, weights: _Weights) -> None:
    _attached[optimizer] = weights
    optimizer.__dict__["__deepcopy__"] = _Copying(optimizer)


class _Copying:
    """Copies an optimizer with what it is attached to; torch copies no more than groups and state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = ref(optimizer)

    def __call__(self, memo: dict[int, Any]) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        weights = _attached[optimizer]
        del optimizer.__dict__["__deepcopy__"]
        try:
            twin = copy.deepcopy(optimizer, memo)
        finally:
            optimizer.__dict__["__deepcopy__"] = self
        copied = _Weights(weights.method)
        for held, parameter in Update(optimizer, weights).pairs():
            twins = copy.deepcopy((held, parameter), memo)
            for one, own in zip(twins, (held, parameter), strict=True):
                one.grad, one.grad_dtype = None, own.grad_dtype
            if held is not parameter:
                copied.behind[id(twins[0])] = twins
                buckets.let_go(*twins, weights.method)
                copied.agree(*twins)
        _attach(twin, copied)
        return twin


def _adopt(optimizer: torch.optim.Optimizer, weights: _Weights, originals: Mapping[int, Tensor]) -> None:
    """Replace trainable bf16 parameters in an optimizer's groups, also those that came later."""
    if weights.method == "nearest":
        return
    for group in optimizer.param_groups:
        for i, parameter in enumerate(group["params"]):
            if parameter.dtype != torch.bfloat16 or not parameter.requires_grad:
                continue
            if weights.method == "master-weights":
                original = originals.get(id(parameter), parameter.data)
                held = nn.Parameter(original.to(torch.float32))
            else:
                held = nn.Parameter(buckets.placeholder(parameter))
            held.grad_dtype = None  # holds a bf16 gradient until its bucket's turn
            group["params"][i] = held
            weights.behind[id(held)] = (held, parameter)
            weights.agree(held, parameter)
            if parameter in optimizer.state:  # some make it with the optimizer
                state = optimizer.state.pop(parameter)
                optimizer.state[held] = {name: _as_fp32(value) for name, value in state.items()}


def _as_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


def _is_like_a_weight(value: Tensor) -> bool:
    return value.is_floating_point() and value.dim() > 0
