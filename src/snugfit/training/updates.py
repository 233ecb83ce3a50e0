"""Where the trained weights of an optimizer are: in the model, or, for a model of bf16 weights, beside it in fp32.

Entry points: ``of``, which every update goes through, and ``attach``. Converting a model is ``bf16_weights``'s,
skipping and clipping ``step``'s.

NOTE [Weights that are bf16 themselves]
1. bf16 keeps 8 bits: an update below 2^-9 of a weight is always rounded away. So either the optimizer holds fp32
   master weights, whose rounded copies are the model's; or each update is computed in fp32 and rounded up or down by
   chance, right on average; or it is rounded to nearest, and small updates are lost.
2. The optimizer is the user's, made over the model while that still was in full precision. Each bf16 parameter in its
   groups is then replaced in its place, so that groups, their names and options stay.
3. Without masters the stand-ins hold no memory outside of an update. Torch's optimizers pass by parameters without a
   gradient, so the update is made for a bucket of parameters after another (with masters too: temporaries of foreach
   are as large as what is updated). Numbers in a group, a step counter of some optimizers, are set back for each.
   Not for optimizers that look at all parameters at once.
4. Gradients are summed in fp32 by ``Tensor.grad_dtype`` (that of one micro-batch comes in bf16), or in bf16 and then
   cast for each bucket.
5. A weight that somebody wrote to since the last update (a loaded state, a clamp) is noticed by its version, as
   autograd does, and its master follows where the two differ. A write through ``.data`` has no version and is lost.
   (Comparing all weights at every update would notice it, and doubles the update's time on a CPU.)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from snugfit.errors import PlanError

BUCKET_BYTES = 2**26
"Weights in fp32 that are updated at once, unless one parameter alone is larger; several times that in temporaries."

_EXPONENT = 0x7F800000
"Bits of an fp32 number that are all set in inf and NaN only."


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
        for held, parameter in pairs:
            if held is not parameter:
                held.grad, parameter.grad = parameter.grad, None
        _step_in_buckets(self.optimizer, pairs, self._weights.method)
        for held, parameter in pairs:
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
        """Refuse the state of other master weights.

        Raises:
            PlanError: They are of other parameters, or there should be none.
        """
        saved: Mapping[int, Tensor] = state.get("masters", {})
        present = self._masters()
        if saved.keys() != present.keys() or any(saved[i].shape != held.shape for i, (held, _) in present.items()):
            raise PlanError(
                "a saved state has other fp32 master weights",
                got=f"{len(saved)} saved, {len(present)} here",
                expected="the same parameters under precision='bf16-true' with master weights, or none",
                hint="build the engine with the plan that the state was saved under",
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the master weights, and the model's from them; see ``check_state``."""
        self.check_state(state)
        with torch.no_grad():
            for place, (held, parameter) in self._masters().items():
                held.copy_(state["masters"][place])
                parameter.copy_(held)
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
    _attached[optimizer] = weights


def round_stochastically(values: Tensor) -> None:
    """Round fp32 values in place to bf16 ones, up or down by chance and right on average; inf and NaN stay.

    Draws from torch's default generator of the device.
    """
    bits = values.view(torch.int32)
    noise = torch.randint_like(bits, 2**16)
    noise.masked_fill_((bits & _EXPONENT) == _EXPONENT, 0)
    bits.add_(noise).bitwise_and_(-(2**16))


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
                held = nn.Parameter(_placeholder(parameter))
            held.grad_dtype = None  # holds a bf16 gradient until its bucket's turn
            group["params"][i] = held
            weights.behind[id(held)] = (held, parameter)
            weights.agree(held, parameter)
            if parameter in optimizer.state:  # some make it with the optimizer
                state = optimizer.state.pop(parameter)
                optimizer.state[held] = {name: _as_fp32(value) for name, value in state.items()}


def _as_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


def _placeholder(parameter: Tensor) -> Tensor:
    """fp32, of the same shape, and next to no memory."""
    return torch.zeros((), dtype=torch.float32, device=parameter.device).expand(parameter.shape)


@torch.optim.Optimizer.profile_hook_step
def _step_in_buckets(
    optimizer: torch.optim.Optimizer, pairs: Sequence[tuple[nn.Parameter, nn.Parameter]], method: str
) -> None:
    """Step an optimizer for one bucket of parameters after another; hooks of the optimizer run once, around it all."""
    step = _without_hooks(optimizer)
    groups = optimizer.param_groups
    numbers = [{name: v for name, v in group.items() if isinstance(v, (int, float))} for group in groups]
    gradients: list[Tensor | None] = [held.grad for held, _ in pairs]
    sizes = [_bytes_in_fp32(held, parameter) for held, parameter in pairs]
    for held, _ in pairs:
        held.grad = None
    for n, bucket in enumerate(_buckets(sizes)):
        if n:
            for group, values in zip(groups, numbers, strict=True):
                group.update(values)
        for i in bucket:
            held, parameter = pairs[i]
            gradient, gradients[i] = gradients[i], None
            assert gradient is not None
            if method == "stochastic-rounding" and held is not parameter:
                held.data = parameter.data.float()
            if held.dtype != gradient.dtype:
                held.grad_dtype = None
                gradient = gradient.to(held.dtype)
            held.grad = gradient
            del gradient
        step(optimizer)
        _write_back([pairs[i] for i in bucket], method)


def _write_back(pairs: Sequence[tuple[nn.Parameter, nn.Parameter]], method: str) -> None:
    """Bring updated values to the model's parameters, and drop gradients and fp32 copies."""
    with torch.no_grad():
        if method == "master-weights":
            apart = [(held, parameter) for held, parameter in pairs if held is not parameter]
            if apart:
                torch.ops.aten._foreach_copy_.default([p for _, p in apart], [held for held, _ in apart])
        for held, parameter in pairs:
            held.grad = None
            if held is parameter:
                if held.dtype == torch.bfloat16 and held.grad_dtype is None:
                    held.grad_dtype = torch.float32
            elif method == "stochastic-rounding":
                round_stochastically(held.data)
                parameter.copy_(held)
                held.data = _placeholder(parameter)


def _bytes_in_fp32(held: nn.Parameter, parameter: nn.Parameter) -> int:
    """What an update needs for a copy of a weight or of its gradient, or an optimizer for its temporaries."""
    is_cast = held.grad is not None and held.grad.dtype != held.dtype
    return 4 * parameter.numel() if held is not parameter or is_cast else 0


def _buckets(sizes: Sequence[int]) -> list[list[int]]:
    """Indices of parameters that are updated together, so that their copies stay within ``BUCKET_BYTES``."""
    buckets: list[list[int]] = []
    filled = 0
    for i, size in enumerate(sizes):
        if not buckets or (filled + size > BUCKET_BYTES and size):
            buckets.append([])
            filled = 0
        buckets[-1].append(i)
        filled += size
    return buckets


def _without_hooks(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The step of an optimizer's class, without what torch puts around it to call hooks."""
    step = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
