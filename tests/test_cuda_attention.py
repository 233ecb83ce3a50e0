"""Attention on CUDA: which kernel runs, what it saves, and what it takes for its own length, worked out by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import snugfit
from snugfit import hardware
from snugfit.memory import torch_private, tracing
from snugfit.memory.cuda import attention_choice, semantics, target
from snugfit.memory.cuda.attention_choice import Kernel

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def chosen(
    capability=(8, 0),
    dtype=BF16,
    head_dim=64,
    heads=(8, 8),
    lengths=(128, 128),
    mask=None,
    dropout_p=0.0,
    is_causal=False,
    enable_gqa=False,
    version="2.13",
    gradient=True,
):
    with torch_private.FakeMode(), target.under_torch(version):
        query = torch.zeros(2, heads[0], lengths[0], head_dim, dtype=dtype, requires_grad=gradient)
        key = torch.zeros(2, heads[1], lengths[1], head_dim, dtype=dtype)
        bias = None if mask is None else torch.zeros(mask, dtype=dtype)
        asked = attention_choice.Attention(query, key, key, bias, dropout_p, is_causal, enable_gqa)
        return attention_choice.choose(asked, target.of_capability(capability))


@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        (Kernel.FLASH, {}),
        (Kernel.FLASH, {"head_dim": 60}),
        (Kernel.FLASH, {"heads": (8, 2), "enable_gqa": True}),
        (Kernel.FLASH, {"capability": (12, 0), "head_dim": 192}),
        (Kernel.FLASH, {"capability": (8, 6), "head_dim": 256}),
        (Kernel.MEMORY_EFFICIENT, {"capability": (8, 6), "head_dim": 256, "dropout_p": 0.1}),
        (Kernel.MEMORY_EFFICIENT, {"capability": (8, 9), "head_dim": 208}),
        (Kernel.FLASH, {"capability": (8, 9), "head_dim": 208, "gradient": False}),
        (Kernel.MEMORY_EFFICIENT, {"dtype": FP32}),
        (Kernel.MEMORY_EFFICIENT, {"is_causal": True, "lengths": (64, 128)}),
        (Kernel.MEMORY_EFFICIENT, {"mask": (128, 128)}),
        (Kernel.MEMORY_EFFICIENT, {"capability": (7, 5), "dtype": FP16}),
        (Kernel.MEMORY_EFFICIENT, {"capability": (6, 1), "dtype": FP32, "head_dim": 63}),
        (Kernel.MATH, {"capability": (7, 5), "dtype": BF16}),
        (Kernel.MATH, {"dtype": FP32, "head_dim": 62}),
        (Kernel.MATH, {"dtype": FP32, "heads": (8, 2), "enable_gqa": True}),
        (Kernel.MEMORY_EFFICIENT, {"dtype": FP32, "heads": (8, 2), "enable_gqa": True, "version": "2.14"}),
        (Kernel.MATH, {"dtype": torch.float64}),
        (Kernel.CUDNN, {"capability": (9, 0)}),
        (Kernel.CUDNN, {"capability": (10, 0), "mask": (128, 128)}),
        (Kernel.FLASH, {"capability": (9, 0), "version": "2.10"}),
        (Kernel.FLASH, {"capability": (9, 0), "dropout_p": 0.1}),
        (Kernel.CUDNN, {"capability": (9, 0), "dropout_p": 0.125}),
        (Kernel.FLASH, {"capability": (9, 0), "head_dim": 256}),
        (Kernel.MATH, {"capability": (13, 0)}),
        (Kernel.MATH, {"heads": (8, 1)}),
        (Kernel.FLASH, {"heads": (8, 1), "version": "2.14"}),
    ],
)
def test_the_kernel_follows_card_types_sizes_and_torch(kernel, options):
    assert chosen(**options) is kernel


def test_the_switches_of_torch_count():
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert chosen() is Kernel.MEMORY_EFFICIENT
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert chosen() is Kernel.MATH
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        assert chosen() is Kernel.MEMORY_EFFICIENT
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


@pytest.mark.parametrize(("version", "fused"), [("2.13", False), ("2.14", True)])
def test_inputs_without_a_batch_are_fused_since_torch_2_14(version, fused):
    def make_step(recorder):
        tensor = torch.zeros(4, 64, 32, dtype=BF16)
        return lambda: shapes.append(F.scaled_dot_product_attention(tensor, tensor, tensor).shape)

    shapes = []
    with target.under_torch(version):
        recording = tracing.record(make_step, hardware.resolve("a100-sxm-40gb"), 1).recording
    assert any("flash" in birth.op for birth in recording.births) is fused
    assert shapes == [(4, 64, 32)]


def test_kernels_that_cannot_do_it_are_refused_by_name():
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(snugfit.UnsupportedError) as caught:
        chosen(dtype=FP32)
    assert "scaled_dot_product_attention" in str(caught.value)


def births(shape, card="a100-sxm-40gb", dtype=BF16, key_heads=None, mask=None, **options):
    """Name and bytes of everything that attention and its backward allocate, inputs excepted."""
    recordings = []

    def make_step(recorder):
        recordings.append(recorder.recording)
        batch, heads, length, size = shape
        # As linear layers give them: heads and elements of a position lie together.
        query = torch.zeros(batch, length, heads, size, dtype=dtype).transpose(1, 2).requires_grad_()
        key = torch.zeros(batch, length, key_heads or heads, size, dtype=dtype).transpose(1, 2).requires_grad_()
        bias = mask() if mask else None
        gradient = torch.zeros(batch, length, heads, size, dtype=dtype).transpose(1, 2)
        recorder.mark("begin")

        def step():
            F.scaled_dot_product_attention(query, key, key, attn_mask=bias, **options).backward(gradient)

        return step

    tracing.record(make_step, hardware.resolve(card), 1)
    recording = recordings[0]
    start = next(position for position, name in recording.marks if name == "begin")
    made = [recording.births[event - 1] for event in recording.events[start:] if event > 0]
    return [(birth.op.split(".")[0].removeprefix("_scaled_dot_product_"), birth.num_bytes) for birth in made]


def sizes(made, name):
    return [num_bytes for op, num_bytes in made if op == name]


def test_flash_saves_a_row_sum_and_accumulates_the_gradient_of_the_queries_in_single_precision():
    batch, heads, length, size = 4, 16, 500, 64
    made = births((batch, heads, length, size))
    whole = batch * heads * length * size * 2
    assert sizes(made, "flash_attention") == [whole, batch * heads * length * 4, 16, 8, 0]
    # Rows rounded up to 128: 512; flash_api.cpp, mha_bwd.
    row_sum, accumulator = batch * heads * 512 * 4, batch * heads * 512 * 64 * 4
    assert sizes(made, "flash_attention_backward") == [whole, whole, whole, row_sum, accumulator]


def test_flash_copies_outputs_and_gradients_that_lie_head_by_head():
    def make_step(recorder):
        recordings.append(recorder.recording)
        tensor = torch.zeros(4, 16, 512, 64, dtype=BF16, requires_grad=True)
        return lambda: F.scaled_dot_product_attention(tensor, tensor, tensor).backward(torch.zeros_like(tensor))

    recordings = []
    tracing.record(make_step, hardware.resolve("a100-sxm-40gb"), 1)
    backward = [b.num_bytes for b in recordings[0].births if "attention_backward" in b.op]
    whole = 4 * 16 * 512 * 64 * 2
    assert backward == [*[whole] * 3, whole, whole, 4 * 16 * 512 * 4, 2 * whole]


def test_flash_expands_the_gradients_of_grouped_keys():
    batch, heads, length, size = 4, 16, 512, 64
    made = sizes(births((batch, heads, length, size), key_heads=4, enable_gqa=True), "flash_attention_backward")
    whole = batch * heads * length * size * 2
    assert made == [whole, whole // 4, whole // 4, batch * heads * length * 4, 2 * whole, whole, whole]


def test_flash_splits_the_keys_of_few_blocks():
    # 12 heads of 8 blocks leave most of 2 * 108 idle; two blocks of 256 keys fill it to 89 %.
    made = sizes(births((1, 12, 512, 64)), "flash_attention")
    assert made[-2:] == [2 * 12 * 512 * 4, 2 * 12 * 512 * 64 * 4]


def test_flash_pads_heads_to_eight_elements():
    made = births((4, 16, 128, 60))
    assert sizes(made, "constant_pad_nd")[:3] == [4 * 16 * 128 * 64 * 2] * 3
    assert sizes(made, "flash_attention")[0] == 4 * 16 * 128 * 64 * 2


def test_the_memory_efficient_kernel_pads_row_sums_to_32_and_stages_gradients():
    batch, heads, length, size = 2, 4, 500, 64
    made = births((batch, heads, length, size), dtype=FP32)
    whole = batch * heads * length * size * 4
    assert sizes(made, "efficient_attention") == [whole, batch * heads * 512 * 4, 0, 0]  # seeds stay on the host
    # Blocks of 64 rows and 64 keys: 8 tiles of 64 * 64 floats and 4 words; kernel_backward.h, workspace_elements_gq.
    staging = batch * heads * 8 * (64 * 64 + 4) * 4
    assert sizes(made, "efficient_attention_backward") == [whole, whole, whole, batch * heads * length * 4, staging]


def test_the_staging_area_follows_the_block_that_fits_the_card():
    def staging(card):
        return sizes(births((2, 4, 256, 128), card, dtype=FP32), "efficient_attention_backward")[-1]

    assert staging("a100-sxm-40gb") == 2 * 4 * (2 * 2) * (128 * 64 + 4) * 4  # 128 rows
    assert staging("rtx-3090") == 2 * 4 * (4 * 2) * (64 * 64 + 4) * 4  # 64 rows: less shared memory


def test_a_mask_whose_rows_are_not_aligned_is_padded_before_it_is_expanded():
    made = births((2, 4, 50, 64), mask=lambda: torch.zeros(50, 50, dtype=BF16))
    assert sizes(made, "constant_pad_nd") == [50 * 56 * 2]
    aligned = births((2, 4, 48, 64), mask=lambda: torch.zeros(48, 48, dtype=BF16))
    assert sizes(aligned, "constant_pad_nd") == []


def test_without_a_fused_kernel_scores_are_masked_in_place_and_kept_once():
    saved = []
    with (
        semantics.cuda_semantics((4, 0)),
        torch_private.FakeMode(),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        query = torch.zeros(1, 2, 64, 8, requires_grad=True)
        F.scaled_dot_product_attention(query, query, query, attn_mask=torch.zeros(64, 64))
    scores = {t.untyped_storage()._cdata for t in saved if t.shape[-2:] == (64, 64)}
    assert len(scores) == 1  # the weights; the real CPU kernel of _scaled_dot_product_attention_math saves one as well
    made = births((1, 2, 64, 8), "p40", dtype=torch.float64, mask=lambda: torch.zeros(64, 64, dtype=torch.float64))
    quadratic = [op for op, num_bytes in made if num_bytes == 2 * 64 * 64 * 8]
    assert quadratic[:2] == ["bmm", "_safe_softmax"]  # no sum of scores and mask


@pytest.mark.parametrize(("dtype", "quadratic"), [(BF16, False), (torch.float64, True)])
def test_a_transformer_layer_takes_the_kernels_of_cuda(dtype, quadratic):
    def make_step():
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dtype=dtype)
        return lambda: layer(torch.zeros(2, 256, 64, dtype=dtype)).sum().backward()

    with torch.random.fork_rng():
        trace = tracing.record(lambda _: make_step(), hardware.resolve("a100-sxm-40gb"), 1)
    scores = 2 * 4 * 256 * 256 * dtype.itemsize
    assert any(b.num_bytes == scores for b in trace.recording.births) is quadratic
