"""Temporaries of convolutions: copies of input, weight and output in oneDNN's layouts, and its scratchpads.

Entry points: ``HIDDEN``. oneDNN computes contiguous tensors in blocks of channels, so both directions copy everything
there and back; channels_last tensors it takes as they are. Which convolutions go to oneDNN: ``use_mkldnn`` in
ATen/native/Convolution.cpp; what goes on there: ATen/native/mkldnn/Conv.cpp and ideep, in this order of events:

1. forward: blocked input, weight and output; then the output as it is handed out.
2. gradient of the input: blocked gradient, weight and result; then the result.
3. gradient of weight and bias: blocked gradient and input, scratchpad, blocked result; then the result.

Block sizes and scratchpads were measured with AVX-512 and one or two threads (see tests/test_cpu_rules.py). Left out:
scratchpads of transposed convolutions (up to 0.3 MiB), kernels along the depth only, and scratchpads of a few KiB.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snugfit.memory.cpu.copies import copied, is_channels_last, num_bytes
from snugfit.memory.events import Call

_BLOCK = 16
"Channels of one block with AVX-512."
_FIRST_LAYER = 16
"Inputs of fewer channels are read as they are."
_SMALL_INPUT = 20480


class _Convolution(NamedTuple):
    """One convolution; a transposed one is described by the one whose input gradient it is.

    Args:
        given: What the operation is given, of whose place and size it depends who computes.
        weight: As it is given.
        input_shape: What is convolved; of a transposed one, its result.
        output_shape: What comes out; of a transposed one, what it is given.
        stride: Of every dimension of an image.
        padding: Likewise.
        dilation: Likewise.
        groups: Of channels.
    """

    given: Tensor
    weight: Tensor
    input_shape: torch.Size
    output_shape: torch.Size
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def element(self) -> int:
        return self.given.element_size()

    @property
    def input_bytes(self) -> int:
        return prod(self.input_shape) * self.element

    @property
    def output_bytes(self) -> int:
        return prod(self.output_shape) * self.element

    @property
    def in_channels(self) -> int:
        return self.input_shape[1]

    @property
    def out_channels(self) -> int:
        return self.output_shape[1]

    @property
    def kernel(self) -> int:
        return prod(self.weight.shape[2:])

    @property
    def is_depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.in_channels == self.out_channels

    @property
    def is_pointwise(self) -> bool:
        return self.kernel == 1

    @property
    def is_plain(self) -> bool:
        """Whether groups are no whole blocks, so that some kernels are missing."""
        return self.groups > 1 and not self.is_depthwise and any(channels % _BLOCK for channels in self._per_group)

    @property
    def is_product(self) -> bool:
        """Whether groups have one channel on a side: a product of matrices, nothing copied into blocks."""
        return self.is_plain and min(self._per_group) == 1

    @property
    def _per_group(self) -> tuple[int, int]:
        return self.in_channels // self.groups, self.out_channels // self.groups

    @property
    def is_channels_last(self) -> bool:
        return is_channels_last(self.given) or is_channels_last(self.weight)

    @property
    def is_blocked(self) -> bool:
        """Whether channels are filled up to whole blocks."""
        return self.groups == 1 or self.is_depthwise

    @property
    def uses_onednn(self) -> bool:
        if not _has_onednn():
            return False
        if self.given.dtype == torch.bfloat16:
            return True
        if self.given.dtype != torch.float32:
            return False
        worthwhile = (
            any(step > 1 for step in (*self.stride, *self.dilation))
            or self.given.shape[0] >= 16
            or not self.is_pointwise
            or torch.get_num_threads() > 1
        )
        large = (
            self.groups > 1
            or (len(self.weight.shape) > 3 and all(size > 3 for size in self.weight.shape[-2:]))
            or self.given.shape[0] > 1
            or prod(self.given.shape[:4]) > _SMALL_INPUT  # of five dimensions, too
        )
        return worthwhile and large

    def blocked_input(self, least: int = _BLOCK) -> int:
        return self._blocked(self.in_channels, least) * self.input_bytes // self.in_channels

    def blocked_output(self) -> int:
        return self._blocked(self.out_channels) * self.output_bytes // self.out_channels

    def blocked_weight(self) -> int:
        if self.is_depthwise:
            return self._blocked(self.out_channels) * self.kernel * self.element
        if not self.is_blocked:
            return num_bytes(self.weight)
        inputs = self.in_channels
        if inputs >= _FIRST_LAYER:
            inputs = self._blocked(inputs)
        elif self.element == 2:
            inputs = _multiple(inputs, 2)  # bfloat16 is multiplied in pairs
        return inputs * self._blocked(self.out_channels) * self.kernel * self.element

    def _blocked(self, channels: int, least: int = _BLOCK) -> int:
        return _multiple(channels, least) if self.is_blocked else channels


def _has_onednn() -> bool:
    backend: Any = torch.backends.mkldnn
    return bool(backend.is_available() and backend.enabled)


def _of(given: Tensor, weight: Tensor, other_shape: torch.Size, rest: tuple) -> _Convolution:  # type: ignore[type-arg]
    stride, padding, dilation, transposed, _, groups = rest
    shapes = (other_shape, given.shape) if transposed else (given.shape, other_shape)
    return _Convolution(given, weight, *shapes, tuple(stride), tuple(padding), tuple(dilation), groups)


def _forward(call: Call) -> int:
    given, weight, transposed = call.args[0], call.args[1], bool(call.args[6])
    conv = _of(given, weight, call.result.shape, tuple(call.args[3:9]))
    gathered = _in_format(conv, [given, weight])
    if not conv.uses_onednn:
        return gathered + _columns(conv) + (num_bytes(call.result) if conv.groups > 1 else 0)
    if conv.is_channels_last:
        return gathered + conv.blocked_weight()
    if transposed and call.args[2] is not None and max(conv.stride) == 1:  # the result is there before its bias
        before_bias = conv.input_bytes if conv.element == 2 else 0
        return gathered + conv.blocked_output() + conv.blocked_weight() + conv.blocked_input() + before_bias
    if transposed:
        return gathered + _input_gradient(conv) - conv.input_bytes
    return gathered + _convolved(conv) - conv.output_bytes


def _convolved(conv: _Convolution) -> int:
    """The worst moment of a convolution: everything in blocks, then the result once more as it is handed out."""
    if conv.is_product:
        return conv.output_bytes + max(_image_columns(conv), conv.output_bytes)
    source = 0 if conv.in_channels < _FIRST_LAYER and conv.groups == 1 else conv.blocked_input()
    computed = _pointwise_sums(conv) + source + conv.blocked_weight() + conv.blocked_output()
    return max(computed, conv.blocked_output() + conv.output_bytes)


def _backward(call: Call) -> int:
    gradient, given, weight = call.args[:3]
    transposed = bool(call.args[7])
    conv = _of(given, weight, gradient.shape, tuple(call.args[4:10]))
    wants_input, wants_weight, wants_bias = call.args[10]
    bias = gradient.shape[1] * conv.element if wants_bias else 0
    results = num_bytes(given) * wants_input + num_bytes(weight) * wants_weight + bias
    gathered = _in_format(conv, [gradient, given, weight])
    if not conv.uses_onednn:
        return gathered + _columns_backward(conv, results, wants_input) + (results if conv.groups > 1 else 0)
    if conv.is_channels_last:
        dense = conv.is_depthwise and (_unfolds(conv) or _is_low(conv))
        weights = _dense_groups(conv) if dense else conv.blocked_weight()
        scratchpad = _weight_scratchpad(conv, dense)
        return max(weights + num_bytes(weight) + bias, weights + scratchpad - num_bytes(weight)) + gathered
    peaks = [0]
    if wants_input:
        peaks.append(_convolved(conv) if transposed else _input_gradient(conv))
    if wants_weight:
        there = num_bytes(given) * wants_input + bias
        peaks.append(there + _weight_gradient(conv))
        if not _unfolds(conv):
            peaks.append(there + bias + conv.blocked_weight() + num_bytes(weight))
    return int(gathered + max(peaks) - results)


def _input_gradient(conv: _Convolution) -> int:
    """The worst moment of the gradient of the input."""
    is_strided = max(conv.stride) > 1
    if conv.is_product or (conv.is_plain and is_strided):
        return conv.input_bytes + max(_image_columns(conv), conv.input_bytes)
    there = conv.blocked_output() + conv.blocked_weight()
    if is_strided and not (conv.is_depthwise and conv.element == 4):
        return max(there + conv.input_bytes, 3 * conv.input_bytes)  # channels_last inside, then two plain ones
    return conv.blocked_input() + max(there + _pointwise_float32(conv, conv.in_channels), conv.input_bytes)


def _weight_gradient(conv: _Convolution) -> int:
    """The worst moment of the gradient of the weights."""
    if _unfolds(conv):
        return num_bytes(conv.weight) + _unfolded(conv)
    source = 0
    if conv.in_channels >= _FIRST_LAYER or conv.groups > 1:
        source = conv.blocked_input()
    elif conv.in_channels > 3 and conv.element == 4:
        source = conv.blocked_input(8)
    weight = conv.blocked_weight()
    if 3 < conv.in_channels < _FIRST_LAYER and conv.groups == 1 and conv.element == 4:
        weight = weight // conv.in_channels * _multiple(conv.in_channels, 8)
    return conv.blocked_output() + source + weight + _weight_scratchpad(conv)


def _unfolds(conv: _Convolution) -> bool:
    """Whether oneDNN unfolds the input instead, for want of a kernel in blocks."""
    if conv.is_depthwise:
        return conv.weight.shape[-1] > 3
    return conv.is_plain or (conv.element == 4 and (conv.weight.shape[-1] > 14 or _reaches_beyond(conv)))


def _reaches_beyond(conv: _Convolution) -> bool:
    """Whether a kernel is as deep as a volume with its padding in front, as in the last layers of video networks."""
    if len(conv.input_shape) < 5 or not conv.padding[0]:
        return False
    if max(conv.stride) == 1 and prod(conv.weight.shape[3:]) == 1:  # along the depth only: another kernel
        return False
    return conv.weight.shape[2] >= conv.input_shape[2] + conv.padding[0]


def _is_low(conv: _Convolution) -> bool:
    """Whether an image has fewer lines than the kernel, for which channels_last depthwise kernels are missing."""
    return len(conv.input_shape) > 3 and conv.input_shape[-2] < conv.weight.shape[-2]


def _unfolded(conv: _Convolution) -> int:
    """One image's columns of one group, and four copies of the weights in float32."""
    return _image_columns(conv) + 16 * conv.weight.numel()


def _image_columns(conv: _Convolution) -> int:
    channels = conv.in_channels // conv.groups
    pixels = prod(conv.output_shape[-2:]) if len(conv.output_shape) > 3 else conv.output_shape[-1]
    return channels * conv.kernel * pixels * conv.element


def _pointwise_sums(conv: _Convolution) -> int:
    """Kernels of one pixel gather the pixels of a strided input, and sum bfloat16 in float32; per image and thread."""
    if conv.element != 2:
        return _pointwise_gathered(conv)
    return _pointwise_gathered(conv) + _pointwise_float32(conv, conv.out_channels)


def _pointwise_gathered(conv: _Convolution) -> int:
    if not conv.is_pointwise or conv.groups > 1 or max(conv.stride) == 1:
        return 0
    return conv.in_channels * prod(conv.output_shape[2:]) * conv.element * torch.get_num_threads()


def _pointwise_float32(conv: _Convolution, channels: int) -> int:
    if not conv.is_pointwise or conv.groups > 1 or conv.element != 2:
        return 0
    return 4 * _padded(channels) * prod(conv.output_shape[2:]) * torch.get_num_threads()


def _weight_scratchpad(conv: _Convolution, dense: bool = False) -> int:
    """float32 sums of bfloat16 weights, and transposed copies of one image and its gradient.

    Args:
        conv: The convolution.
        dense: Whether every group is filled up to a block; see ``_dense_groups``.
    """
    threads = torch.get_num_threads()
    # Threads share out the images, each with weights of its own, unless the weights are the larger part.
    shares = threads if conv.input_bytes + conv.blocked_output() > conv.blocked_weight() else 1
    if conv.element == 4:
        if shares == 1 or conv.is_pointwise or conv.is_depthwise:
            return _pointwise_sums(conv)
        return (shares - 1) * conv.blocked_weight() + 8320 + 4 * conv.out_channels
    outputs, inputs = conv.out_channels, conv.in_channels
    if dense:
        pixels = prod(conv.input_shape[2:-1]) * _line(conv, conv.input_shape) + prod(conv.output_shape[2:])
        return 2 * _dense_groups(conv) + 2 * _BLOCK * outputs * pixels + 8580 + 4 * _BLOCK * outputs
    if inputs >= _FIRST_LAYER and conv.is_blocked:
        inputs = _padded(inputs)
    sums = 4 * _padded(outputs) * (1 if conv.is_depthwise else inputs // conv.groups) * conv.kernel
    if conv.is_depthwise:
        return sums + 8 * outputs
    if conv.is_pointwise:
        return sums + 4 * outputs + _pointwise_gathered(conv) + _pointwise_transposed(conv)
    image, gradient = conv.input_shape, conv.output_shape
    lines = inputs * prod(image[2:-1]) * _line(conv, image) if inputs >= _FIRST_LAYER or conv.is_channels_last else 0
    each = sums + 2 * (lines + _padded(outputs) * prod(gradient[2:])) + 4 * conv.out_channels
    return shares * each + 8580 + (8192 if shares < threads else 0)


def _pointwise_transposed(conv: _Convolution) -> int:
    """Small images are transposed, a block of channels of the input and of the gradient, pixels in pairs."""
    pixels = prod(conv.output_shape[2:])
    if pixels > _SMALL_IMAGE:
        return 0
    block = _block(conv.in_channels, 8) + _block(conv.out_channels, 16)
    return 2 * _multiple(pixels, 2) * block


_SMALL_IMAGE = 200


def _block(channels: int, most: int) -> int:
    """Channels of one block: blocks of 16 in equal parts, unless these are too small a part."""
    blocks = _padded(channels) // _BLOCK
    if blocks <= most:
        return blocks * _BLOCK
    part = max(count for count in range(1, most + 1) if blocks % count == 0)
    return (part if 2 * part > most else blocks) * _BLOCK


def _line(conv: _Convolution, image: Sequence[int]) -> int:
    """Pixels of one line of a transposed image."""
    return _multiple(image[-1] + conv.padding[-1] + 1, 2 * conv.stride[-1])


def _dense_groups(conv: _Convolution) -> int:
    """channels_last depthwise kernels above 3 pixels fill every group up to a block: weights of 16 x 16 channels."""
    return conv.out_channels * _BLOCK * _BLOCK * conv.kernel * conv.element


def _padded(channels: int) -> int:
    return _multiple(channels, _BLOCK)


def _multiple(number: int, step: int) -> int:
    return -(-number // step) * step


def _columns(conv: _Convolution) -> int:
    """ATen's own kernel unfolds the whole batch, unless pixels are taken one by one (ConvolutionMM2d.cpp)."""
    if conv.is_pointwise and max(conv.stride) == 1 and not any(conv.padding):
        return 0
    return _all_columns(conv)


def _columns_backward(conv: _Convolution, results: int, wants_input: bool) -> int:
    """In three dimensions the gradient of the input is made of columns always (ConvolutionMM3d.cpp)."""
    if wants_input and len(conv.input_shape) == 5:
        return max(_columns(conv), _all_columns(conv) + conv.input_bytes - results)
    return _columns(conv)


def _all_columns(conv: _Convolution) -> int:
    return conv.input_shape[0] * conv.in_channels * conv.kernel * prod(conv.output_shape[2:]) * conv.element


def _in_format(conv: _Convolution, tensors: Sequence[Tensor]) -> int:
    """Bytes of the copies of those tensors that do not lie as the convolution's format wants them."""
    if not conv.is_channels_last:
        return copied(tensors)
    format = torch.channels_last if conv.given.dim() == 4 else torch.channels_last_3d
    return sum(num_bytes(tensor) for tensor in tensors if not tensor.is_contiguous(memory_format=format))


HIDDEN: dict[str, Callable[[Call], int]] = {
    "convolution.default": _forward,
    "convolution_backward.default": _backward,
}
