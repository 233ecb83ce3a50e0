"""CUDA's autocast: which operators run in which type, and the cache of cast weights.

Entry points: ``CastCache``, ``kernel_for`` and, for the operators of other libraries, ``of_other_libraries``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import fallthrough_kernel

from snugfit.memory import torch_private

_TO: Any = Tensor.to
"As it is outside of traces, which look at it for names of devices."

LOWER_PRECISION = frozenset(
    """_convolution _convolution.deprecated _scaled_dot_product_flash_attention addbmm addmm addmv addr baddbmm bmm
    chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input
    convolution cudnn_convolution cudnn_convolution_transpose einsum gru_cell linalg_multi_dot linalg_vecdot linear
    lstm_cell matmul mm mv prelu rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention
    _thnn_fused_gru_cell _thnn_fused_lstm_cell""".split()
)
"Operators that run in the autocast type. Source: the documentation of torch.amp and the dispatcher's own table."

PROMOTE = frozenset(
    "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot".split()
)
"Operators that run in the widest type of their inputs."

FLOAT32_OUTPUT = frozenset(
    """cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log_softmax.int prod
    prod.dim_int softmax.int sum sum.dim_IntList""".split()
)
"Reductions that keep their input's type and compute a float32 result (unless a dtype is given)."

FLOAT32_NORM = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"Norms that become those with a dtype, here float32: no copy of the input in that type is made."

NOT_IMPOSED = frozenset(["_cudnn_rnn"])
"Registered by builds with cuDNN only; ``recurrent`` casts what goes there."

BANNED = frozenset(["binary_cross_entropy"])
"Operators that raise under autocast."


class CastCache:
    """Casts of weights, kept until the outermost autocast context ends, as torch keeps them."""

    def __init__(self, on_weight_cast: Callable[[Tensor], None]) -> None:
        self._on_weight_cast = on_weight_cast
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}

    def clear(self) -> None:
        """Let go of all casts: the outermost autocast context has ended."""
        self._casts.clear()

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Cast a tensor (or those of a list) to the autocast type; see ``cached_cast`` in ATen/autocast_mode.cpp."""
        if isinstance(value, Tensor):
            if not _is_eligible(value) or value.dtype == dtype:
                return value
            keeps = value.is_leaf and value.requires_grad and value.dtype == torch.float32 and not value._is_view()
            if not keeps or dtype == torch.float32 or not torch.is_autocast_cache_enabled():
                return _TO(value, dtype)
            if id(value) not in self._casts:
                # The weight is kept as well, so that its id cannot pass on to another tensor.
                self._casts[id(value)] = (value, _TO(value, dtype))
                self._on_weight_cast(self._casts[id(value)][1])
            return self._casts[id(value)][1]
        if isinstance(value, (list, tuple)):
            return type(value)(self.cast(item, dtype) for item in value)
        return value


def kernel_for(name: str, casts: CastCache) -> Callable[..., Any]:
    """The kernel of an operator that autocast of CUDA treats, by its name with overload."""
    operator = torch_private.operator(name)
    if name in BANNED:

        def banned(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(f"{name} is unsafe to autocast; use its form with logits")

        return banned
    if name in FLOAT32_NORM:
        with_dtype = torch_private.operator(FLOAT32_NORM[name])

        def norm(*args: Any, **kwargs: Any) -> Any:
            with torch_private.without_autocast():
                if not _is_eligible(args[0]):
                    return operator(*args, **kwargs)
                defaults = {argument.name: argument.default_value for argument in operator._schema.arguments}
                given = dict(zip(defaults, args, strict=False), **kwargs)
                return with_dtype(**{"p": 2, **defaults, **given}, dtype=torch.float32)

        return norm

    if name in FLOAT32_OUTPUT:

        def reduction(*args: Any, **kwargs: Any) -> Any:
            with torch_private.without_autocast():
                if _is_eligible(args[0]) and kwargs.get("dtype") is None and args[0].dtype != torch.float32:
                    args, kwargs = _with_float32(operator, args, kwargs)
                return operator(*args, **kwargs)

        return reduction

    is_lower, promotes = name in LOWER_PRECISION, name in PROMOTE

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch_private.without_autocast():
            if is_lower:
                dtype = torch.get_autocast_dtype("cpu")
            elif promotes:
                tensors = [item for item in (*args, *kwargs.values()) if isinstance(item, Tensor)]
                float32 = any(tensor.dtype == torch.float32 for tensor in tensors)
                dtype = torch.float32 if float32 else torch.get_autocast_dtype("cpu")
            else:
                dtype = torch.float32
            args = casts.cast(args, dtype)
            if not kwargs:
                return operator(*args)
            return operator(*args, **{key: casts.cast(value, dtype) for key, value in kwargs.items()})

    return kernel


def of_other_libraries(assume: Callable[[str], None]) -> dict[str, dict[str, Callable[..., Any]]]:
    """Kernels for operators of other libraries whose autocast differs between CPU and CUDA, by namespace and name.

    What has a kernel for both (torchvision's ``nms``) keeps that of the CPU. What has one for the CPU only is let pass,
    as on CUDA. What has one for CUDA only would cast CUDA tensors and nothing else, so it runs without, and says so.
    """
    on_cpu = torch_private.foreign_autocast_registrations("AutocastCPU")
    on_cuda = torch_private.foreign_autocast_registrations("AutocastCUDA")
    found: dict[str, dict[str, Callable[..., Any]]] = {}
    for namespace, name in set(on_cpu) - set(on_cuda):
        found.setdefault(namespace, {})[name] = fallthrough_kernel
    for namespace, name in set(on_cuda) - set(on_cpu):
        found.setdefault(namespace, {})[name] = _without_its_casts(namespace, name, assume)
    return found


def _without_its_casts(namespace: str, name: str, assume: Callable[[str], None]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        operator = torch_private.operator(name, namespace)  # which a library need not have defined
        assume(f"{namespace}::{name}: what its own kernel for autocast casts on CUDA is not known and not counted")
        with torch_private.without_autocast():
            return operator(*args, **kwargs)

    return kernel


def _with_float32(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Ask a reduction for a float32 result, whether its dtype is given by position or by name."""
    names = [argument.name for argument in operator._schema.arguments]
    position = names.index("dtype")
    if position < len(args):
        if args[position] is not None:
            return args, kwargs
        return (*args[:position], torch.float32, *args[position + 1 :]), kwargs
    return args, {**kwargs, "dtype": torch.float32}


def _is_eligible(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64
