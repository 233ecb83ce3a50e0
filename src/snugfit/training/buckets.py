"""One update of weights that an optimizer does not hold itself: for all parameters at once, or bucket after bucket.

Entry points: ``step``, ``takes_parameters_one_by_one`` and ``round_stochastically``. What stands in an optimizer's
groups for which weight is ``updates``'s.

NOTE [Buckets]
1. Torch's optimizers pass by parameters without a gradient, so an update is made for a bucket of parameters after
   another. Without masters only one bucket has fp32 copies then; with masters too temporaries of foreach are as large
   as what is updated.
2. That is right only for optimizers that treat each parameter by itself, which is known of torch's own and torchao's.
   Any other one (global norms, counters in groups, a step of one's own) has one bucket of all parameters, and so has
   one whose hooks would meet a stand-in without values.
3. After an error masters and weights agree, whatever had moved; no gradient and no fp32 copy is left.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

BUCKET_BYTES = 2**26
"Weights in fp32 that are updated at once, unless one parameter alone is larger; several times that in temporaries."

_NAMES = "SGD Adam AdamW NAdam RAdam Adamax Adadelta Adagrad RMSprop ASGD Rprop Adafactor Muon"
_ONE_BY_ONE = tuple(getattr(torch.optim, name) for name in _NAMES.split() if hasattr(torch.optim, name))
"Torch's optimizers that update each parameter from nothing but itself; of subclasses it is not known."
_TORCHAO = "torchao.optim.adam"
"Home of torchao's optimizers of low-bit state: one parameter after another, those without a gradient passed by."

_EXPONENT = 0x7F800000
"Bits of an fp32 number that are all set in inf and NaN only."


def takes_parameters_one_by_one(optimizer: torch.optim.Optimizer, method: str) -> bool:
    """Whether an update may be made for some parameters after others."""
    kind = type(optimizer)
    is_known = kind in _ONE_BY_ONE or kind.__module__ == _TORCHAO
    return is_known and not _is_called_whole(optimizer, method)


def step(optimizer: torch.optim.Optimizer, pairs: Sequence[tuple[nn.Parameter, nn.Parameter]], method: str) -> None:
    """Step an optimizer for all parameters at once, or in buckets where these are too many and it can be divided."""
    if _is_called_whole(optimizer, method):
        for held, parameter in pairs:
            gradient, held.grad = held.grad, None
            assert gradient is not None
            _prepare(held, parameter, gradient, method)
            del gradient
        optimizer.step()
        write_back(pairs, method)
        return
    is_divided = takes_parameters_one_by_one(optimizer, method)
    sizes = [_bytes_in_fp32(held, parameter) for held, parameter in pairs]
    _step_in_buckets(optimizer, pairs, _divided(sizes) if is_divided else [range(len(pairs))], method)


def _is_called_whole(optimizer: torch.optim.Optimizer, method: str) -> bool:
    """Whether somebody set a ``step`` of his own, or hooks that must not meet stand-ins without values."""
    own = optimizer.__dict__.get("step")
    is_set = own is not None and getattr(own, "__wrapped__", None) is not type(optimizer).step  # as a scheduler does
    has_hooks = bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
    return is_set or (has_hooks and method == "stochastic-rounding")


def round_stochastically(values: Tensor) -> None:
    """Round fp32 values in place to bf16 ones, up or down by chance and right on average; inf and NaN stay.

    Draws from torch's default generator of the device.
    """
    bits = values.view(torch.int32)
    noise = torch.randint_like(bits, 2**16)
    noise.masked_fill_((bits & _EXPONENT) == _EXPONENT, 0)
    bits.add_(noise).bitwise_and_(-(2**16))


@torch.optim.Optimizer.profile_hook_step
def _step_in_buckets(
    optimizer: torch.optim.Optimizer,
    pairs: Sequence[tuple[nn.Parameter, nn.Parameter]],
    buckets: Sequence[Sequence[int]],
    method: str,
) -> None:
    """Step an optimizer for one bucket of parameters after another; hooks of the optimizer run once, around it all."""
    own_step = _without_hooks(optimizer)
    gradients: list[Tensor | None] = [held.grad for held, _ in pairs]
    for held, _ in pairs:
        held.grad = None
    for bucket in buckets:
        for i in bucket:
            gradient, gradients[i] = gradients[i], None
            if gradient is not None:  # a hook may have taken it away
                _prepare(*pairs[i], gradient, method)
            del gradient
        own_step(optimizer)
        write_back([pairs[i] for i in bucket], method)


def _prepare(held: nn.Parameter, parameter: nn.Parameter, gradient: Tensor, method: str) -> None:
    """Let what an optimizer holds have its values and its gradient, in its own type."""
    if method == "stochastic-rounding" and held is not parameter:
        held.data = parameter.data.float()
    if held.dtype != gradient.dtype:
        held.grad_dtype = None
        gradient = gradient.to(held.dtype)
    held.grad = gradient


def write_back(pairs: Sequence[tuple[nn.Parameter, nn.Parameter]], method: str) -> None:
    """Bring updated values to the model's parameters, and drop gradients and fp32 copies."""
    with torch.no_grad():
        if method == "master-weights":
            apart = [(held, parameter) for held, parameter in pairs if held is not parameter]
            if apart:
                torch.ops.aten._foreach_copy_.default([p for _, p in apart], [held for held, _ in apart])
        for held, parameter in pairs:
            held.grad = None
            if method == "stochastic-rounding" and held is not parameter and _has_values(held):
                round_stochastically(held.data)
                parameter.copy_(held)
            let_go(held, parameter, method)


def let_go(held: nn.Parameter, parameter: nn.Parameter, method: str) -> None:
    """Leave no gradient, no fp32 copy and no other type of gradient behind, also after an error."""
    held.grad = None
    if held is parameter:
        if held.dtype == torch.bfloat16 and held.grad_dtype is None:
            held.grad_dtype = torch.float32
    elif method == "stochastic-rounding" and _has_values(held):
        held.data = placeholder(parameter)


def placeholder(parameter: Tensor) -> Tensor:
    """fp32, of the same shape, and next to no memory."""
    return torch.zeros((), dtype=torch.float32, device=parameter.device).expand(parameter.shape)


def _has_values(held: Tensor) -> bool:
    """Whether a stand-in holds an fp32 copy at the moment."""
    return not held.dim() or any(held.stride())


def _bytes_in_fp32(held: nn.Parameter, parameter: nn.Parameter) -> int:
    """What an update needs for a copy of a weight or of its gradient, or an optimizer for its temporaries."""
    is_cast = held.grad is not None and held.grad.dtype != held.dtype
    return 4 * parameter.numel() if held is not parameter or is_cast else 0


def _divided(sizes: Sequence[int]) -> list[list[int]]:
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
