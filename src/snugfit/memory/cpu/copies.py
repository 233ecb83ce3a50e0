"""Copies that CPU kernels make of arguments that do not lie as they need them, and the like.

Entry points: ``HIDDEN`` and ``RESULTS``. Reasons stand with the entries; all were measured with torch's profiler on
single operations (``tests/test_cpu_rules.py`` measures them again).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from snugfit.memory.events import Call

CONTIGUOUS: dict[str, tuple[int, ...]] = {
    # `.contiguous()` of inputs and gradients in ATen/native: SoftMax.cpp, layer_norm.cpp, group_norm.cpp,
    # Embedding.cpp, LossNLL.cpp, Activation.cpp, ReflectionPad.cpp, ReplicationPadding.cpp,
    # Distance.cpp, ReduceAllOps.cpp, Bucketization.cpp, LossMultiMargin.cpp
    "_softmax.default": (0,),
    "_log_softmax.default": (0,),
    "_softmax_backward_data.default": (0, 1),
    "_log_softmax_backward_data.default": (0, 1),
    "native_layer_norm.default": (0, 2, 3),
    "native_layer_norm_backward.default": (0, 1, 5, 6),
    "native_group_norm.default": (0,),
    "native_group_norm_backward.default": (0, 1),
    "embedding_dense_backward.default": (0, 1),
    "nll_loss_forward.default": (0, 1),
    "nll_loss2d_forward.default": (0, 1),
    "nll_loss2d_backward.default": (0, 2),
    "reflection_pad1d.default": (0,),
    "reflection_pad1d_backward.default": (0,),
    "reflection_pad3d.default": (0,),
    "reflection_pad3d_backward.default": (0,),
    "replication_pad1d.default": (0,),
    "replication_pad1d_backward.default": (0,),
    "replication_pad3d.default": (0,),
    "replication_pad3d_backward.default": (0,),
    "upsample_nearest3d_backward.default": (0,),
    "_cdist_forward.default": (0, 1),
    "_cdist_backward.default": (1, 2),
    "log_sigmoid_forward.default": (0,),
    "max.default": (0,),
    "min.default": (0,),
    "bucketize.Tensor": (0,),
    "searchsorted.Tensor": (0, 1),
    "multi_margin_loss.default": (0,),
    "multi_margin_loss_backward.default": (1,),
    "index_add.default": (2,),
    "index_add_.default": (2,),
    "grid_sampler_2d_backward.default": (0,),
    "upsample_linear1d_backward.default": (0,),
    "upsample_bicubic2d_backward.default": (0,),
    "avg_pool3d_backward.default": (0,),
    "avg_pool3d.default": (0,),
    "fractional_max_pool2d_backward.default": (0,),
    "_upsample_bilinear2d_aa_backward.default": (0,),
}
"Arguments that a kernel copies unless they are contiguous."

CONTIGUOUS_IN_FORMAT: dict[str, tuple[int, ...]] = {
    # ATen/native/AveragePool2d.cpp, DilatedMaxPool2d.cpp, AdaptiveAveragePooling.cpp, UpSample*.cpp,
    # ReflectionPad.cpp, ReplicationPadding.cpp, PixelShuffle.cpp
    "max_pool2d_with_indices.default": (0,),
    "max_pool2d_with_indices_backward.default": (0, 7),
    "avg_pool2d.default": (0,),
    "avg_pool2d_backward.default": (0,),
    "_adaptive_avg_pool2d.default": (0,),
    "_adaptive_avg_pool2d_backward.default": (0,),
    "adaptive_max_pool2d.default": (0,),
    "adaptive_max_pool2d_backward.default": (0, 2),
    "max_pool3d_with_indices.default": (0,),
    "max_pool3d_with_indices_backward.default": (0,),
    "reflection_pad2d.default": (0,),
    "reflection_pad2d_backward.default": (0,),
    "replication_pad2d.default": (0,),
    "replication_pad2d_backward.default": (0,),
    "channel_shuffle.default": (0,),
    "pixel_shuffle.default": (0,),
    "pixel_unshuffle.default": (0,),
    "upsample_nearest2d_backward.default": (0,),
    "upsample_bilinear2d_backward.default": (0,),
    "upsample_trilinear3d_backward.default": (0,),
    "_upsample_nearest_exact2d_backward.default": (0,),
}
"Arguments that a kernel copies unless they are contiguous, or channels_last, as the input (2nd or 1st argument) is."

UPSAMPLED = (
    "upsample_nearest2d.default",
    "upsample_bilinear2d.default",
    "_upsample_nearest_exact2d.default",
)


def num_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor that lies dense."""
    return tensor.numel() * tensor.element_size()


def copied(values: Sequence[object]) -> int:
    """Bytes of the contiguous copies of those tensors that are not."""
    return sum(num_bytes(value) for value in values if isinstance(value, Tensor) and not value.is_contiguous())


def is_channels_last(tensor: Tensor) -> bool:
    """Whether a tensor of four or five dimensions lies channels_last and not contiguous."""
    if tensor.is_contiguous() or tensor.dim() not in (4, 5):
        return False
    format = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return tensor.is_contiguous(memory_format=format)


def _contiguous(call: Call) -> int:
    positions = CONTIGUOUS[call.name]
    return copied([call.args[i] for i in positions if i < len(call.args)])


def _contiguous_in_format(call: Call) -> int:
    backward = "backward" in call.name and isinstance(call.args[1], Tensor)
    like = call.args[1] if backward else call.args[0]
    if not is_channels_last(like):
        return copied([call.args[i] for i in CONTIGUOUS_IN_FORMAT[call.name] if i < len(call.args)])
    values = [call.args[i] for i in CONTIGUOUS_IN_FORMAT[call.name] if i < len(call.args)]
    return sum(num_bytes(value) for value in values if isinstance(value, Tensor) and not is_channels_last(value))


def _transposing(call: Call) -> int:
    """A copy of a transposed matrix goes through a buffer of 60 x 60 elements (ATen/native/Copy.cpp)."""
    target, source = (call.result, call.args[0]) if call.name == "clone.default" else call.args[:2]
    if source.dim() != 2 or target.dim() != 2 or source.numel() < _BUFFER or source.dtype != target.dtype:
        return 0
    transposed = source.stride(0) == 1 and source.stride(1) == source.shape[0] and target.is_contiguous()
    return _BUFFER * source.element_size() if transposed and source.shape == target.shape else 0


_BUFFER = 60 * 60


def _gelu_backward(call: Call) -> int:
    """OneDNN's kernel copies a gradient and a result that lie otherwise than a contiguous input (Activation.cpp)."""
    gradient, value = call.args[:2]
    exact = call.kwargs.get("approximate", "none") == "none"
    if not exact or value.dtype != torch.float32 or not value.is_contiguous():
        return 0
    return copied([gradient, call.result])


def _layer_norm_backward(call: Call) -> int:
    """The sums for weight and bias are made per thread: ATen/native/cpu/layer_norm_kernel.cpp."""
    weight = call.args[5]
    mask = call.args[7]
    buffers = 2 * torch.get_num_threads() * num_bytes(weight) if isinstance(weight, Tensor) and any(mask[1:]) else 0
    return _contiguous(call) + buffers


def _group_norm_backward(call: Call) -> int:
    """Two float32 sums per sample and channel: ATen/native/cpu/group_norm_kernel.cpp."""
    samples, channels = call.args[5], call.args[6]
    return _contiguous(call) + 2 * 4 * int(samples * channels)


def _batch_norm(call: Call) -> int:
    """Sums of every channel in float32 (ATen/native/Normalization.cpp)."""
    return 2 * 4 * int(call.args[0].shape[1])


def _batch_norm_backward(call: Call) -> int:
    """Contiguous tensors take a kernel that makes the input's gradient a second time; others do not (measured)."""
    gradient, value = call.args[0], call.args[1]
    return num_bytes(value) if gradient.is_contiguous() and value.is_contiguous() else 0


def _upsample(call: Call) -> int:
    """A small result is computed channels_last: copies of input and result that lie otherwise (UpSampleKernel.cpp)."""
    value = call.args[0]
    is_small = sum(call.result.shape[-2:]) <= _SMALL_IMAGE
    has_kernel_of_its_own = call.name == "upsample_bilinear2d.default" and value.shape[1] == 3 and value.is_contiguous()
    if is_channels_last(value) or not (is_small or has_kernel_of_its_own):
        return 0
    return num_bytes(value) + num_bytes(call.result)


_SMALL_IMAGE = 128
"Height and width of the result together."


def _dropout_backward(call: Call) -> int:
    """The gradient without what was dropped, before it is scaled (ATen/native/Dropout.cpp)."""
    return num_bytes(call.result)


def _unfold(call: Call) -> int:
    """im2col pads and copies its input once, once more when it is not contiguous (ATen/native/Im2Col.cpp)."""
    return num_bytes(call.args[0]) + copied(call.args[:1])


def _col2im_result(call: Call) -> dict[int, int]:
    """col2im keeps the storage of its input's size (measured: ATen/native/Col2Im.cpp resizes its output)."""
    return {0: num_bytes(call.args[0])}


HIDDEN: dict[str, Callable[[Call], int]] = {
    **dict.fromkeys(CONTIGUOUS, _contiguous),
    **dict.fromkeys(CONTIGUOUS_IN_FORMAT, _contiguous_in_format),
    **dict.fromkeys(UPSAMPLED, _upsample),
    **dict.fromkeys(("clone.default", "copy_.default"), _transposing),
    "gelu_backward.default": _gelu_backward,
    "native_layer_norm_backward.default": _layer_norm_backward,
    "native_group_norm_backward.default": _group_norm_backward,
    "native_dropout_backward.default": _dropout_backward,
    "aminmax.default": lambda call: copied(call.args[:1]) if call.kwargs.get("dim") is None else 0,
    "native_batch_norm.default": _batch_norm,
    "native_batch_norm_backward.default": _batch_norm_backward,
    "im2col.default": _unfold,
    "col2im.default": lambda call: copied(call.args[:1]),
}

RESULTS: dict[str, Callable[[Call], dict[int, int]]] = {
    "col2im.default": _col2im_result,
}
