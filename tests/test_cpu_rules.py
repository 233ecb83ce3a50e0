"""The CPU's rules against real kernels: what each allocates inside is measured here, with torch's profiler."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import snugfit
from snugfit import Job, Plan, checkpointing, estimate
from snugfit.memory import torch_private
from snugfit.memory.cpu import rules
from snugfit.memory.cpu.measured import WITHOUT_HIDDEN_MEMORY
from snugfit.memory.events import Call
from snugfit.memory.measuring import measure

aten = torch.ops.aten
SCALARS = 64
"Bytes of numbers (counts, means) that kernels make beside their buffers and no rule counts."
ONEDNN = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
needs_avx512 = pytest.mark.skipif(not ONEDNN, reason="oneDNN's layouts were measured on a CPU with AVX-512")


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def measured(op, *args, **kwargs):
    """Bytes that a real kernel holds at its worst moment beyond its results, and its result."""
    with torch_private.profiled_memory("kernel ") as events:
        with torch.profiler.record_function("kernel begins"):
            pass
        result = op(*args, **kwargs)
        with torch.profiler.record_function("kernel ends"):
            pass
    live, current, peak, inside = {}, 0, 0, False
    for event in events:
        if not event.address:
            inside = event.scopes[-1] == "kernel begins"
        elif inside and event.num_bytes > 0:
            live[event.address] = event.num_bytes
            current += event.num_bytes
            peak = max(peak, current)
        elif inside and event.address in live:
            current -= live.pop(event.address)
    return peak - current, result


def ruled(op, result, *args, **kwargs):
    return rules.hidden_bytes(Call(op.__name__, "forward", args, kwargs, result))


def real(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def permuted(*shape, dtype=torch.float32):
    return real(*shape[:-2], shape[-1], shape[-2], dtype=dtype).transpose(-1, -2)


def spread(*shape, dtype=torch.float32):
    """Not contiguous and not transposed either: every second number of a line."""
    return real(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]


def expanded(*shape, dtype=torch.float32):
    return torch.ones((), dtype=dtype).expand(*shape)


BF16 = torch.bfloat16
WHOLE, IMAGES = (64, 256), (4, 16, 32, 32)
INDICES = torch.arange(64 * 8).view(64, 8) % 64

EXACT = {
    "types: mixed multiplication": (aten.mul.Tensor, real(*WHOLE), real(*WHOLE, dtype=BF16)),
    "types: in-place sum of another type": (aten.add_.Tensor, real(*WHOLE), real(*WHOLE, dtype=BF16)),
    "types: in-place sum of a wider type": (aten.add_.Tensor, real(*WHOLE, dtype=BF16), real(*WHOLE)),
    "types: a mask": (aten.mul.Tensor, real(*WHOLE), real(*WHOLE) > 0),
    "types: comparison": (aten.eq.Tensor, real(*WHOLE), torch.zeros(WHOLE, dtype=torch.long)),
    "types: a number of a wider type counts for nothing": (aten.mul.Tensor, real(*WHOLE, dtype=BF16), real()),
    "types: both branches of where": (aten.where.self, real(*WHOLE) > 0, real(*WHOLE), real(*WHOLE, dtype=BF16)),
    "types: same types": (aten.add.Tensor, real(*WHOLE), permuted(*WHOLE)),
    "copies: softmax": (aten._softmax.default, spread(*WHOLE), -1, False),
    "copies: softmax backward": (
        aten._softmax_backward_data.default,
        expanded(*WHOLE),
        real(*WHOLE),
        -1,
        torch.float32,
    ),
    "copies: log-softmax backward": (
        aten._log_softmax_backward_data.default,
        expanded(*WHOLE),
        spread(*WHOLE),
        -1,
        torch.float32,
    ),
    "copies: layer norm": (aten.native_layer_norm.default, spread(*WHOLE), [256], real(256), real(256), 1e-5),
    "copies: layer norm backward": (
        aten.native_layer_norm_backward.default,
        spread(*WHOLE),
        real(*WHOLE),
        [256],
        real(64, 1),
        real(64, 1),
        real(256),
        real(256),
        [True] * 3,
    ),
    "copies: group norm backward": (
        aten.native_group_norm_backward.default,
        real(*IMAGES),
        real(*IMAGES),
        real(4, 2),
        real(4, 2),
        real(16),
        4,
        16,
        1024,
        2,
        [True] * 3,
    ),
    "copies: batch norm backward": (
        aten.native_batch_norm_backward.default,
        real(*IMAGES),
        real(*IMAGES),
        *(real(16) for _ in range(5)),
        True,
        1e-5,
        [True] * 3,
    ),
    "copies: batch norm backward of an expanded gradient": (
        aten.native_batch_norm_backward.default,
        expanded(*IMAGES),
        real(*IMAGES),
        *(real(16) for _ in range(5)),
        True,
        1e-5,
        [True] * 3,
    ),
    "copies: embedding backward": (
        aten.embedding_dense_backward.default,
        expanded(64, 8, 128),
        INDICES,
        64,
        -1,
        False,
    ),
    "copies: pooling": (aten.max_pool2d_with_indices.default, permuted(*IMAGES), [2, 2]),
    "copies: average pooling backward": (
        aten.avg_pool2d_backward.default,
        expanded(4, 16, 16, 16),
        real(*IMAGES),
        [2, 2],
        [2, 2],
        [0, 0],
        False,
        True,
        None,
    ),
    "copies: upsampling computes channels last": (aten.upsample_nearest2d.default, real(*IMAGES), [64, 64]),
    "copies: upsampling of channels last": (
        aten.upsample_bilinear2d.default,
        real(*IMAGES).contiguous(memory_format=torch.channels_last),
        [64, 64],
        False,
    ),
    "copies: unfolding": (aten.im2col.default, real(*IMAGES), [3, 3], [1, 1], [0, 0], [1, 1]),
    "copies: mean squared error": (aten.mse_loss.default, real(*WHOLE), real(*WHOLE)),
    "copies: mean squared error in bfloat16": (
        aten.mse_loss.default,
        real(*WHOLE, dtype=BF16),
        real(*WHOLE, dtype=BF16),
    ),
    "copies: cross entropy with logits": (
        aten.binary_cross_entropy_with_logits.default,
        real(*WHOLE),
        torch.rand(WHOLE),
    ),
    "copies: pixel shuffle": (aten.pixel_shuffle.default, permuted(*IMAGES), 2),
    "copies: a transposed matrix": (aten.clone.default, permuted(*WHOLE)),
    "copies: a transposed matrix into another": (aten.copy_.default, torch.zeros(WHOLE), permuted(*WHOLE)),
    "copies: transposed matrices of a batch": (aten.clone.default, permuted(4, *WHOLE)),
    "reductions: sum of a mask": (aten.sum.default, real(*WHOLE) > 0),
    "reductions: bfloat16 over two dimensions": (aten.sum.dim_IntList, real(8, 16, 32, dtype=BF16), [0, 2]),
    "reductions: bfloat16 over one dimension": (aten.sum.dim_IntList, real(*WHOLE, dtype=BF16), [0]),
    "reductions: mean in bfloat16": (aten.mean.dim, real(*WHOLE, dtype=BF16), [1]),
    "reductions: cumulative sum of a mask": (aten.cumsum.default, real(*WHOLE) > 0, 1),
    "reductions: sort": (aten.sort.default, real(*WHOLE), 1),
    "reductions: sort of another dimension": (aten.sort.default, real(*WHOLE), 0),
    "reductions: log of the sum of exponentials": (aten.logsumexp.default, real(*WHOLE), [1]),
    "reductions: k-th value": (aten.kthvalue.default, real(*WHOLE), 3),
    "reductions: gather in bfloat16": (aten.gather.default, real(*WHOLE, dtype=BF16), 1, INDICES),
    "reductions: scatter in bfloat16": (
        aten.scatter_add.default,
        real(*WHOLE, dtype=BF16),
        1,
        INDICES,
        real(64, 8, dtype=BF16),
    ),
    "reductions: bfloat16 over all dimensions, which lie behind each other": (
        aten.sum.dim_IntList,
        real(8, 16, 32, dtype=BF16),
        [0, 1, 2],
    ),
    "reductions: a bfloat16 number over its dimension": (aten.sum.dim_IntList, real(dtype=BF16), [0]),
    "copies: upsampling of three channels to a large image": (
        aten.upsample_bilinear2d.default,
        real(2, 3, 40, 40),
        [80, 80],
        False,
    ),
    "copies: gelu backward, the gradient lies otherwise": (
        aten.gelu_backward.default,
        permuted(8, *WHOLE),
        real(8, *WHOLE),
    ),
    "copies: gelu backward of what is not contiguous": (aten.gelu_backward.default, permuted(*WHOLE), permuted(*WHOLE)),
    "copies: channels last are padded as they are": (
        aten.reflection_pad2d.default,
        real(*IMAGES).contiguous(memory_format=torch.channels_last),
        [1, 1, 1, 1],
    ),
    "copies: pixels of channels last": (
        aten.pixel_unshuffle.default,
        real(*IMAGES).contiguous(memory_format=torch.channels_last),
        2,
    ),
    "copies: maximum of all": (aten.max.default, permuted(8, *WHOLE)),
    "copies: dropout backward": (aten.native_dropout_backward.default, real(*WHOLE), real(*WHOLE) > 0, 2.0),
    "copies: distances of few points": (aten._cdist_forward.default, permuted(*WHOLE), permuted(*WHOLE), 1.0, None),
    "losses: a loss of every element": (
        aten.binary_cross_entropy_with_logits.default,
        real(*WHOLE),
        torch.rand(WHOLE),
        None,
        None,
        0,
    ),
    "losses: a mean over transposed logits": (
        aten.binary_cross_entropy_with_logits.default,
        permuted(8, *WHOLE),
        torch.rand(8, *WHOLE),
    ),
    "losses: a sum in bfloat16": (aten.mse_loss.default, real(*WHOLE, dtype=BF16), real(*WHOLE, dtype=BF16), 2),
    "losses: a mean in bfloat16": (
        aten.binary_cross_entropy.default,
        torch.rand(WHOLE).to(BF16),
        torch.rand(WHOLE).to(BF16),
    ),
    "losses: soft margin backward": (aten.soft_margin_loss_backward.default, real(), real(*WHOLE), real(*WHOLE), 1),
    "losses: sequences without alignment, backward": (
        aten._ctc_loss_backward.default,
        real(6),
        real(50, 6, 20).log_softmax(-1),
        torch.ones(6, 12, dtype=torch.long),
        [50] * 6,
        [12] * 6,
        real(6),
        real(6, 50, 25),
        0,
    ),
    "lookups: by a mask of rows and columns": (aten.index.Tensor, real(*WHOLE), [torch.rand(WHOLE) > 0.5]),
    "lookups: by narrow numbers": (aten.index.Tensor, real(*WHOLE), [torch.arange(60, dtype=torch.int32)]),
    "lookups: written by a mask": (aten.index_put.default, real(*WHOLE), [torch.ones(WHOLE).bool()], real(64 * 256)),
    "lookups: what a mask selects": (aten.masked_select.default, real(*WHOLE), torch.ones(WHOLE).bool()),
    "lookups: columns of transposed matrices": (aten.index_select.default, permuted(8, *WHOLE), 1, torch.arange(8)),
    "lookups: transposed matrices": (aten.index_select.default, permuted(8, *WHOLE), 0, torch.arange(8)),
    "lookups: gather by narrow numbers": (aten.gather.default, real(*WHOLE), 1, INDICES.int()),
    "lookups: mean of what is scattered": (aten.scatter_reduce.two, real(*WHOLE), 1, INDICES, real(64, 8), "mean"),
    "transforms: roll of three dimensions": (aten.roll.default, real(8, *WHOLE), [1, 2, 3], [0, 1, 2]),
    "transforms: roll of one dimension": (aten.roll.default, real(8, *WHOLE), [1], [1]),
    "transforms: Fourier in the middle": (aten._fft_c2c.default, real(4, *WHOLE, dtype=torch.complex64), [1], 0, True),
    "transforms: Fourier at the end": (aten._fft_c2c.default, real(4, *WHOLE, dtype=torch.complex64), [1, 2], 0, True),
    "transforms: Fourier of two dimensions to real numbers": (
        aten._fft_c2r.default,
        real(4, *WHOLE, dtype=torch.complex64),
        [1, 2],
        2,
        510,
    ),
    "transforms: distances of many points": (aten._euclidean_dist.default, real(300, 40), real(200, 40)),
    "transforms: distances of long points": (aten._euclidean_dist.default, real(30, 400), real(20, 400)),
    "transforms: a sampling grid": (aten.affine_grid_generator.default, real(4, 2, 3), [4, 3, 16, 16], False),
    "matrix products: matrix and vector in bfloat16": (
        aten.mv.default,
        real(*WHOLE, dtype=BF16),
        real(256, dtype=BF16),
    ),
    "matrix products: small ones of a large batch in bfloat16": (
        aten.bmm.default,
        real(4, 64, 1, dtype=BF16),
        real(4, 1, 64, dtype=BF16),
    ),
    "matrix products: transposed operands": (aten.mm.default, permuted(64, 96), permuted(96, 32)),
    "matrix products: expanded operands": (aten.mm.default, expanded(64, 96), real(96, 32)),
    "matrix products: a batch matrix by matrix": (aten.bmm.default, expanded(8, 64, 96), real(8, 96, 32)),
    "attention": (aten._scaled_dot_product_flash_attention_for_cpu.default, *(real(2, 4, 256, 32) for _ in range(3))),
    "attention of long sequences": (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        *(real(1, 2, 1024, 16) for _ in range(3)),
    ),
    "attention in bfloat16": (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        *(real(2, 4, 128, 32, dtype=BF16) for _ in range(3)),
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_kernel_allocates_inside_what_its_rule_says(name):
    op, *args = EXACT[name]
    copies = [argument.clone() if op.__name__.startswith("add_") else argument for argument in args]
    found, result = measured(op, *copies)
    assert found == pytest.approx(ruled(op, result, *args), abs=SCALARS)


@pytest.mark.parametrize("channels", [1, 4, 32])
@pytest.mark.parametrize("op", [aten.upsample_nearest2d.default, aten.upsample_bilinear2d.default], ids=str)
def test_upsampling_to_a_large_image_makes_no_copy_of_it(op, channels):
    args = (real(2, channels, 50, 50), [100, 100], *([False] if op is aten.upsample_bilinear2d.default else []))
    found, result = measured(op, *args)
    assert ruled(op, result, *args) == 0 <= found < 0.1 * result.numel() * 4


PRODUCTS = [(64, 64, 64), (520, 128, 128), (257, 64, 96), (384, 640, 200), (128, 1056, 64), (40, 30, 8), (1576, 96, 64)]


@needs_avx512
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("left", [real, permuted], ids=["rows together", "columns together"])
@pytest.mark.parametrize("sizes", PRODUCTS, ids=str)
def test_products_of_bfloat16_pack_blocks_of_the_size_that_the_rule_says(sizes, left, threads):
    torch.set_num_threads(threads)
    rows, depth, columns = sizes
    args = left(rows, depth, dtype=BF16), real(depth, columns, dtype=BF16)
    found, result = measured(aten.mm.default, *args)
    assert found == ruled(aten.mm.default, result, *args)


CONVOLUTIONS = {
    "channels of whole blocks": ((4, 64, 32, 32), (64, 64, 3, 3), {"padding": 1}),
    "channels filled up": ((4, 24, 32, 32), (40, 24, 3, 3), {"padding": 1}),
    "strided": ((4, 64, 32, 32), (128, 64, 3, 3), {"stride": 2, "padding": 1}),
    "dilated": ((4, 32, 32, 32), (32, 32, 3, 3), {"padding": 2, "dilation": 2}),
    "few input channels": ((4, 3, 64, 64), (32, 3, 3, 3), {"padding": 1}),
    "one pixel, taken by BLAS": ((4, 64, 32, 32), (64, 64, 1, 1), {}),
    "one pixel, a large batch": ((16, 64, 32, 32), (64, 64, 1, 1), {}),
    "one small image, unfolded": ((1, 16, 32, 32), (32, 16, 3, 3), {"padding": 1}),
    "depthwise": ((4, 64, 32, 32), (64, 1, 3, 3), {"padding": 1, "groups": 64}),
    "depthwise with a wide kernel": ((4, 64, 32, 32), (64, 1, 7, 7), {"padding": 3, "groups": 64}),
    "depthwise, fewer lines than the kernel": ((8, 64, 2, 16), (64, 1, 3, 3), {"padding": 1, "groups": 64}),
    "depthwise, fewer columns than the kernel": ((8, 64, 16, 2), (64, 1, 3, 3), {"padding": 1, "groups": 64}),
    "grouped": ((4, 64, 32, 32), (64, 16, 3, 3), {"padding": 1, "groups": 4}),
    "transposed": ((4, 64, 16, 16), (64, 32, 2, 2), {"stride": 2, "transposed": True}),
    "transposed, channels filled up": ((4, 24, 16, 16), (24, 40, 2, 2), {"stride": 2, "transposed": True}),
    "one dimension": ((4, 80, 100), (64, 80, 3), {"padding": 1}),
    "three dimensions": ((2, 16, 8, 8, 8), (32, 16, 3, 3, 3), {"padding": 1}),
    "one dimension, one pixel, taken by BLAS": ((8, 64, 200), (64, 64, 1), {}),
    "three dimensions, one pixel, taken by BLAS": ((2, 32, 8, 16, 16), (8, 32, 1, 1, 1), {}),
    "three dimensions, one small image": ((1, 32, 10, 12, 12), (16, 32, 3, 3, 3), {"padding": 1}),
    "groups of four channels": ((4, 128, 28, 28), (128, 4, 3, 3), {"padding": 1, "groups": 32}),
    "groups of four channels, strided": ((4, 128, 28, 28), (128, 4, 3, 3), {"stride": 2, "padding": 1, "groups": 32}),
    "several outputs of each channel": ((8, 16, 28, 28), (96, 1, 3, 3), {"padding": 1, "groups": 16}),
    "groups of one pixel, taken by BLAS": ((4, 96, 40, 40), (64, 24, 1, 1), {"groups": 4}),
    "transposed, few output channels": ((4, 32, 16, 16), (32, 3, 2, 2), {"stride": 2, "transposed": True}),
    "transposed, few input channels": ((8, 3, 16, 16), (3, 32, 3, 3), {"stride": 2, "padding": 1, "transposed": True}),
    "transposed, not strided": ((4, 64, 32, 32), (64, 32, 3, 3), {"padding": 1, "transposed": True}),
    "three dimensions, as deep as the kernel": ((2, 64, 2, 8, 8), (64, 64, 3, 3, 3), {"padding": 1}),
    "three dimensions, flat": ((2, 64, 1, 8, 8), (128, 64, 3, 3, 3), {"stride": 2, "padding": 1}),
    "small image, many weights": ((4, 256, 8, 8), (256, 256, 3, 3), {"padding": 1}),
}

_ONLY_CONTIGUOUS = ("few", "one pixel", "channels filled", "groups of", "several outputs", "transposed, few")


def convolution_arguments(settings, dims):
    transposed = settings.get("transposed", False)
    steps = [[settings.get(name, default)] * dims for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))]
    return [*steps, transposed, [0] * dims, settings.get("groups", 1)]


@needs_avx512
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_allocates_inside_what_its_rule_says(name, dtype, format):
    input_shape, weight_shape, settings = CONVOLUTIONS[name]
    dims = len(input_shape) - 2
    if format is torch.channels_last and (dims != 2 or name.startswith(_ONLY_CONTIGUOUS)):
        pytest.skip("channels_last is of two dimensions; of these only scratchpads of up to 1 MiB differ")
    if format is torch.contiguous_format and "fewer lines" in name:
        pytest.skip("in blocks such an image takes less than the rule says")
    input = real(*input_shape, dtype=dtype).contiguous(memory_format=format)
    weight = real(*weight_shape, dtype=dtype).contiguous(memory_format=format)
    out_channels = weight_shape[1] if settings.get("transposed") else weight_shape[0]
    rest = convolution_arguments(settings, dims)
    args = (input, weight, real(out_channels, dtype=dtype), *rest)
    found, result = measured(aten.convolution.default, *args)
    whole = result.numel() * result.element_size()
    assert found == pytest.approx(ruled(aten.convolution.default, result, *args), rel=0.01, abs=0.01 * whole + 90_000)
    args = (torch.ones_like(result), input, weight, [out_channels], *rest, [True] * 3)
    found, result = measured(aten.convolution_backward.default, *args)
    whole = sum(tensor.numel() * tensor.element_size() for tensor in result)
    assert found == pytest.approx(ruled(aten.convolution_backward.default, result, *args), rel=0.02, abs=0.02 * whole)


@needs_avx512
@pytest.mark.parametrize("threads", [1, 2])
def test_products_of_pixels_in_bfloat16_are_summed_in_float32_by_each_thread(threads):
    torch.set_num_threads(threads)
    input, weight = real(4, 64, 32, 32, dtype=BF16), real(24, 64, 1, 1, dtype=BF16)
    args = (input, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    found, result = measured(aten.convolution.default, *args)
    in_blocks = 2 * (4 * 64 * 1024 + 32 * 64 + 4 * 32 * 1024)  # input, weight and result of two blocks of channels
    sums = 4 * 32 * 1024 * threads
    assert ruled(aten.convolution.default, result, *args) == in_blocks + sums - 2 * result.numel()
    assert found == pytest.approx(in_blocks + sums - 2 * result.numel(), abs=1024)


@needs_avx512
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize(("inputs", "hidden"), [(32, 64), (64, 64), (128, 64), (64, 128), (96, 96)])
def test_an_lstm_holds_the_workspace_and_the_temporaries_that_its_rules_say(inputs, hidden, dtype):
    layer = nn.LSTM(inputs, hidden).to(dtype)
    values = real(24, 8, inputs, dtype=dtype)
    state = torch.zeros(8, hidden, dtype=dtype)
    weights = [weight.detach() for weight in layer.parameters()]
    args = (values, *weights, state, state, False, [], 2, hidden, 1, True, False, False, True)
    op = aten.mkldnn_rnn_layer.default
    found, result = measured(op, *args)
    (workspace,) = rules.RESULTS[op.__name__](Call(op.__name__, "forward", args, {}, result)).values()
    real_workspace = result[3].untyped_storage().nbytes()
    assert workspace == pytest.approx(real_workspace, abs=2 * 4096)
    assert found == pytest.approx(ruled(op, result, *args), rel=0.02, abs=2 * 4096)


@needs_avx512
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("sizes", [(2, 48, 48, 24), (4, 64, 64, 32), (1, 64, 64, 64), (4, 128, 256, 8)], ids=str)
def test_each_thread_sums_weights_of_its_own_unless_these_are_the_larger_part(sizes, dtype):
    torch.set_num_threads(2)
    samples, inputs_, outputs, size = sizes
    input, weight = real(samples, inputs_, size, size, dtype=dtype), real(outputs, inputs_, 3, 3, dtype=dtype)
    gradient = real(samples, outputs, size, size, dtype=dtype)
    args = (gradient, input, weight, [outputs], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True] * 3)
    found, result = measured(aten.convolution_backward.default, *args)
    assert found == pytest.approx(ruled(aten.convolution_backward.default, result, *args), rel=0.005)


def residual():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return x + self.two(torch.tanh(self.one(x)))

    return nn.Sequential(*(Block() for _ in range(4)))


def squared(model, batch):
    return (model(batch) ** 2).mean()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def inputs(num_samples):
    return torch.rand(num_samples, 64)


def test_gradients_that_meet_are_summed_in_place_as_real_ones_are():
    job, plan = Job(residual, squared, sgd, inputs), Plan(batch_size=512, micro_batch_size=512)
    predicted, found = estimate(job, plan, "cpu"), measure(job, plan, "cpu")
    assert predicted.peak_allocated_bytes == pytest.approx(found.peak_allocated_bytes, abs=SCALARS)


@pytest.mark.parametrize(
    "make",
    [
        lambda x, i: x.gather(1, i).sum(),
        lambda x, i: x[i[:, 0]].sum(),
        lambda x, i: x.index_select(0, i[:, 0]).sum(),
        lambda x, i: x.amax(1).sum() + x.max(1)[0].sum(),
    ],
    ids=["gather", "index", "index_select", "max"],
)
def test_formulas_that_write_into_zeros_of_their_own_make_no_copy(make):
    def loss(model, batch):
        return make(model(batch), torch.zeros(256, 4, dtype=torch.long))

    def model():
        return nn.Linear(64, 256, bias=False)

    job, plan = Job(model, loss, sgd, inputs), Plan(batch_size=256, micro_batch_size=256)
    predicted, found = estimate(job, plan, "cpu"), measure(job, plan, "cpu")
    assert predicted.peak_allocated_bytes == pytest.approx(found.peak_allocated_bytes, rel=0.005)


@pytest.mark.parametrize("form", ["none", "whole", "block"])
def test_the_peaks_of_case_c072_are_those_of_a_real_step_to_the_byte(form):
    def make_step():
        blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)
        )
        inputs = torch.zeros(512, 32)

        def forward(x):
            for block in blocks:
                x = x + (checkpoint(block, x, use_reentrant=False) if form == "block" else block(x))
            return x

        def step():
            output = checkpoint(forward, inputs, use_reentrant=False) if form == "whole" else forward(inputs)
            output.sum().backward()

        return step

    with torch_private.profiled_memory("no mark") as events:
        step = make_step()
        step()
        step()
    live, current, peak = {}, 0, 0
    for event in events:
        if event.num_bytes > 0:
            live[event.address] = event.num_bytes
            current += event.num_bytes
            peak = max(peak, current)
        else:
            current -= live.pop(event.address, 0)
    assert snugfit.trace(make_step, "cpu").peak_allocated_bytes == peak


def test_every_recomputed_segment_holds_a_copy_of_the_random_state():
    job = Job(residual, squared, sgd, inputs)
    plan = Plan(batch_size=16, micro_batch_size=16, recompute=checkpointing.every(residual(), 1))
    state = torch.get_rng_state().untyped_storage().nbytes()
    predicted, found = estimate(job, plan, "cpu"), measure(job, plan, "cpu")
    assert predicted.peak_allocated_bytes == pytest.approx(found.peak_allocated_bytes, abs=SCALARS)
    assert predicted.at("forward end")["saved"] > 4 * state


def test_an_operation_that_nobody_measured_is_named_in_the_assumptions():
    name = "fft_fftfreq.default"
    assert name not in WITHOUT_HIDDEN_MEMORY
    assert name not in rules.HIDDEN
    counted = rules.CpuRules()
    counted(Call(name, "forward", (), {}, torch.ones(3)), None)
    counted(Call("view.default", "forward", (), {}, torch.ones(3)), None)
    assert counted.assumptions[-1] == f"temporaries inside of these operations are not counted: {name}"


def test_no_operation_is_both_without_hidden_memory_and_under_a_rule():
    assert WITHOUT_HIDDEN_MEMORY & rules.HIDDEN.keys() == set()


class HundredTensors(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(10_000) for _ in range(100))

    def forward(self, x):
        return sum(part.sum() for part in self.parts) * x.mean()


# One by one three tensors of 40,000 bytes: the root, its quotient, and the quotient of the parameter before.
@pytest.mark.parametrize(("foreach", "more"), [(False, 120_000), (True, 4_000_000)], ids=["one by one", "grouped"])
def test_c086_the_grouped_update_needs_four_megabytes_more_and_one_by_one_next_to_nothing(foreach, more):
    job = Job(
        HundredTensors,
        lambda model, batch: model(batch),
        lambda model: torch.optim.Adam(model.parameters(), foreach=foreach),
        lambda n: torch.ones(n, 1),
    )
    plan = Plan(batch_size=1, micro_batch_size=1)
    predicted, found = estimate(job, plan, "cpu"), measure(job, plan, "cpu")
    steady = 16_000_000
    assert found.peak_allocated_bytes - steady == pytest.approx(more, abs=10_000)
    assert predicted.peak_allocated_bytes == pytest.approx(found.peak_allocated_bytes, abs=8 * 1024)


def test_c087_the_second_update_holds_adams_moments_and_the_first_does_not():
    weights = 4 * 512 * 512
    job = Job(
        lambda: nn.Linear(512, 512, bias=False),
        lambda model, batch: F.mse_loss(model(batch), batch),
        lambda model: torch.optim.Adam(model.parameters()),
        lambda n: torch.ones(n, 512),
    )
    plan = Plan(batch_size=2, micro_batch_size=2)
    first, steady = (measure(job, plan, "cpu", windows=n) for n in (1, 2))
    predicted = estimate(job, plan, "cpu")
    assert predicted.peak_allocated_bytes == pytest.approx(steady.peak_allocated_bytes, abs=SCALARS)
    assert predicted.at("step end")["optimizer"] == pytest.approx(2 * weights, abs=SCALARS)
    assert first.at("forward end").get("optimizer", 0) == 0
    assert steady.at("forward end")["optimizer"] == pytest.approx(2 * weights, abs=SCALARS)
