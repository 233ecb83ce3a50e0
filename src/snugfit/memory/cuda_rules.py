"""What CUDA does differently from the CPU, imposed on fake CPU tensors while a step is traced.

Entry points: ``cuda_semantics`` (a context) and ``cublas_workspace_bytes``. The kernels that autograd sees are
replaced where composite operators branch on the device type: autocast lists with the cache of cast weights,
dropout, attention, softmax of half-precision input; optimizers take their foreach form.
Sizes of cuDNN workspaces are left out: only a GPU can tell them.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from snugfit.memory import torch_private
from snugfit.sizes import MIB

aten = torch.ops.aten

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

BANNED = frozenset(["binary_cross_entropy"])
"Operators that raise under autocast."

CUBLAS_WORKSPACE_BYTES = {9: 32 * MIB}
"cuBLAS workspace by major compute capability, per handle and stream; memory-rules.md section 3."
CUBLAS_WORKSPACE_DEFAULT_BYTES = 2 * 4 * MIB + 8 * 16 * 1024


def cublas_workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """Bytes of one cuBLAS workspace; a training step holds two, as backward runs on a thread of its own."""
    return CUBLAS_WORKSPACE_BYTES.get(compute_capability[0], CUBLAS_WORKSPACE_DEFAULT_BYTES)


@contextmanager
def cuda_semantics(
    compute_capability: tuple[int, int], on_weight_cast: Callable[[Tensor], None] = lambda cast: None
) -> Iterator[None]:
    """Make fake CPU tensors behave as CUDA tensors for as long as the context lasts.

    The kernels are replaced for the whole process (torch has one dispatcher), so nothing else should run torch
    code under CPU autocast meanwhile; all is undone at the end.

    Args:
        compute_capability: Of the target, such as ``(8, 6)``; decides which attention kernel runs.
        on_weight_cast: Called with every cast of a weight that autocast keeps.
    """
    casts = _CastCache(on_weight_cast)
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Oo]verrid.*")
        stack.callback(library._destroy)
        for name in torch_private.autocast_registrations("AutocastCPU"):
            _impose(library, name.removeprefix("aten::"), None, "AutocastCPU")
        for name in torch_private.autocast_registrations("AutocastCUDA"):
            short = name.removeprefix("aten::")
            _impose(library, short, _autocast_kernel(short, casts), "AutocastCPU")
        _impose(library, "dropout", _dropout, "AutogradCPU")
        _impose(library, "scaled_dot_product_attention", _Attention(compute_capability), "AutogradCPU")
        _impose(library, "softmax.int", _softmax(aten._softmax), "AutogradCPU")
        _impose(library, "log_softmax.int", _softmax(aten._log_softmax), "AutogradCPU")
        stack.enter_context(torch_private.foreach_for_fake_tensors())
        stack.enter_context(torch_private.autocast_as_cpu(casts.clear))
        yield


def _impose(library: Any, name: str, kernel: Callable[..., Any] | None, key: str) -> None:
    operator = _operator(name)
    if kernel is None:
        kernel = _passed_by(operator)
    library.impl(name, kernel, key, allow_override=True)


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _passed_by(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch_private.without_autocast():
            return operator(*args, **kwargs)

    return kernel


class _CastCache:
    """Casts of weights, kept until the outermost autocast context ends, as torch keeps them."""

    def __init__(self, on_weight_cast: Callable[[Tensor], None]) -> None:
        self._on_weight_cast = on_weight_cast
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}

    def clear(self) -> None:
        self._casts.clear()

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Cast a tensor (or those of a list) to the autocast type; see ``cached_cast`` in ATen/autocast_mode.cpp."""
        if isinstance(value, Tensor):
            if not _is_eligible(value) or value.dtype == dtype:
                return value
            keeps = value.is_leaf and value.requires_grad and value.dtype == torch.float32 and not value._is_view()
            if not keeps or dtype == torch.float32 or not torch.is_autocast_cache_enabled():
                return value.to(dtype)
            if id(value) not in self._casts:
                # The weight is kept as well, so that its id cannot pass on to another tensor.
                self._casts[id(value)] = (value, value.to(dtype))
                self._on_weight_cast(self._casts[id(value)][1])
            return self._casts[id(value)][1]
        if isinstance(value, (list, tuple)):
            return type(value)(self.cast(item, dtype) for item in value)
        return value


def _autocast_kernel(name: str, casts: _CastCache) -> Callable[..., Any]:
    operator = _operator(name)
    if name in BANNED:

        def banned(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(f"{name} is unsafe to autocast; use its form with logits")

        return banned
    if name in FLOAT32_OUTPUT:

        def reduction(*args: Any, **kwargs: Any) -> Any:
            with torch_private.without_autocast():
                if _is_eligible(args[0]) and kwargs.get("dtype") is None and args[0].dtype != torch.float32:
                    args, kwargs = _with_float32(operator, args, kwargs)
                return operator(*args, **kwargs)

        return reduction

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch_private.without_autocast():
            if name in LOWER_PRECISION:
                dtype = torch.get_autocast_dtype("cpu")
            elif name in PROMOTE:
                tensors = [item for item in (*args, *kwargs.values()) if isinstance(item, Tensor)]
                float32 = any(tensor.dtype == torch.float32 for tensor in tensors)
                dtype = torch.float32 if float32 else torch.get_autocast_dtype("cpu")
            else:
                dtype = torch.float32
            args = casts.cast(args, dtype)
            return operator(*args, **{key: casts.cast(value, dtype) for key, value in kwargs.items()})

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


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """CUDA's dropout: one kernel, a bool mask saved."""
    if not train or p == 0:
        return input
    return torch.native_dropout(input, p, train)[0]


def _softmax(operator: Any) -> Callable[..., Tensor]:
    """CUDA's softmax: half-precision input and float32 output in one kernel, without a float32 copy of the input."""

    def kernel(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        if dtype == torch.float32 and input.dtype in (torch.float16, torch.bfloat16):
            result: Tensor = operator(input, dim, True)
        else:
            result = operator(input if dtype is None else input.to(dtype), dim, False)
        return result

    return kernel


class _Attention:
    """Chooses CUDA's kernel for scaled-dot-product attention by the target's capability, types, sizes and mask.

    Rules: ATen/native/transformers/cuda/sdp_utils.cpp; order flash, memory-efficient, math.
    """

    def __init__(self, compute_capability: tuple[int, int]) -> None:
        self._capability = compute_capability

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        head_dim = query.shape[-1]
        if self._flash(query, key, value, attn_mask, is_causal):
            padding = -head_dim % 8
            if padding:
                scale = 1 / math.sqrt(head_dim) if scale is None else scale
                query, key, value = (F.pad(tensor, (0, padding)) for tensor in (query, key, value))
            flash = aten._scaled_dot_product_flash_attention
            output: Tensor = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
            return output[..., :head_dim] if padding else output
        if self._memory_efficient(query, key, value, attn_mask, enable_gqa):
            needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
            bias = None if attn_mask is None else _bias(attn_mask, query, key)
            efficient: Tensor = aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, needs_gradient, dropout_p, is_causal, scale=scale
            )[0]
            return efficient
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = _additive(attn_mask, query.dtype)
        composite: Tensor = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
        return composite

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
        head_dim = query.shape[-1]
        return (
            query.dim() == 4
            and self._capability >= (8, 0)
            and query.dtype in (torch.float16, torch.bfloat16)
            and query.dtype == key.dtype == value.dtype
            and mask is None
            and head_dim == key.shape[-1] == value.shape[-1]
            and head_dim <= 256
            and not (is_causal and query.shape[-2] != key.shape[-2])
        )

    def _memory_efficient(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool
    ) -> bool:
        types = [torch.float32, torch.float16]
        if self._capability >= (8, 0):
            types.append(torch.bfloat16)
        alignment = 16 // query.element_size() if self._capability >= (8, 0) else 8 // query.element_size()
        return (
            query.dim() == 4
            and self._capability >= (5, 0)
            and query.dtype in types
            and query.dtype == key.dtype == value.dtype
            and not (enable_gqa and query.shape[-3] != key.shape[-3])
            and query.shape[-1] % alignment == 0
            and value.shape[-1] % alignment == 0
            and not (mask is not None and mask.requires_grad)
        )


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(mask, torch.zeros((), dtype=dtype), torch.full((), -math.inf, dtype=dtype))


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as the memory-efficient kernel takes it: additive, rows padded to 16 elements, expanded as a view."""
    if mask.dtype == torch.bool:
        mask = _additive(mask, query.dtype)
    length = mask.shape[-1]
    if length % 16:
        mask = F.pad(mask, (0, -length % 16))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[-2], key.shape[-2])
