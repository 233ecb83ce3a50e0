"""Normalisation and convolutions on CUDA: saved statistics, fused kernels, and what is said not to be known."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import snugfit
from snugfit import hardware
from snugfit.memory import torch_private, tracing
from snugfit.memory.cuda import semantics, target

ROWS, WIDTH = 96, 64


def saved_by(function, version="2.13"):
    saved = []
    with (
        target.under_torch(version),
        semantics.cuda_semantics((8, 0)),
        torch_private.FakeMode(),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        result = function()
    return sorted(t.numel() * t.element_size() for t in saved), result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_one_kernel_that_saves_input_weight_and_deviations(dtype):
    def norm():
        value = torch.zeros(ROWS, WIDTH, dtype=dtype, requires_grad=True)
        return F.rms_norm(value, (WIDTH,), torch.ones(WIDTH, dtype=dtype, requires_grad=True))

    saved, result = saved_by(norm)
    assert saved == sorted([ROWS * WIDTH * dtype.itemsize, WIDTH * dtype.itemsize, ROWS * 4])
    assert result.dtype == dtype
    with torch_private.FakeMode(), semantics.cuda_semantics((8, 0)):
        result = norm()
        result.sum().backward()


def test_rms_norm_of_older_torch_or_with_a_weight_of_another_type_saves_a_tensor_per_step():
    def norm(weight_dtype=torch.bfloat16):
        value = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        return F.rms_norm(value, (WIDTH,), torch.ones(WIDTH, dtype=weight_dtype, requires_grad=True))

    assert saved_by(norm, "2.6")[0].count(ROWS * WIDTH * 4) >= 2
    saved, result = saved_by(lambda: norm(torch.float32))
    assert saved.count(ROWS * WIDTH * 4) >= 2
    assert result.dtype == torch.bfloat16


def test_rms_norm_gives_gradients_of_input_and_weight():
    def make_step():
        norm = nn.RMSNorm(WIDTH)
        value = torch.zeros(ROWS, WIDTH, requires_grad=True)

        def step():
            norm(value).sum().backward()
            shapes.append((value.grad.shape, norm.weight.grad.shape))

        return step

    shapes = []
    snugfit.trace(make_step, "a100-sxm-40gb")
    assert shapes[0] == ((ROWS, WIDTH), (WIDTH,))


def test_batch_norm_saves_input_weight_and_statistics_of_every_channel():
    def norm():
        layer = nn.BatchNorm2d(8)
        return layer(torch.zeros(4, 8, 16, 16, requires_grad=True))

    saved, _ = saved_by(norm)
    assert saved[-1] == 4 * 8 * 16 * 16 * 4
    assert saved.count(8 * 4) >= 3  # weight, mean, inverse deviation
    real = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: real.append(t) or t, lambda t: t):
        norm()
    assert sorted(t.numel() * t.element_size() for t in real) == saved


def test_c096_the_workspace_of_convolutions_is_a_line_of_its_own_with_a_bound():
    def trace(layout, search):
        def make_step():
            layer = nn.Conv2d(16, 32, 3, padding=1).to("cuda", memory_format=layout)
            value = torch.zeros(8, 16, 32, 32, device="cuda").contiguous(memory_format=layout)
            return lambda: layer(value).sum().backward()

        before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, search
        try:
            return snugfit.trace(make_step, "a100-sxm-40gb").assumptions
        finally:
            torch.backends.cudnn.benchmark = before

    for layout in (torch.contiguous_format, torch.channels_last):
        for search in (False, True):
            said = [sentence for sentence in trace(layout, search) if "cuDNN's workspace" in sentence]
            # 16 * 9 inputs for each of 8 * 32 * 32 positions, 4 bytes each: 4.5 MiB.
            assert len(said) == 1
            assert "4.50 MiB" in said[0]
            assert ("search: on" in said[0]) is search


def test_a_step_without_convolutions_says_nothing_about_cudnn():
    report = snugfit.trace(lambda: lambda: torch.zeros(4, 4) @ torch.zeros(4, 4), "a100-sxm-40gb")
    assert not any("cuDNN" in sentence for sentence in report.assumptions)


def test_group_norm_takes_scale_and_shift_per_channel():
    def make_step(recorder):
        layer = nn.GroupNorm(4, 16).to("cuda")
        return lambda: layer(torch.zeros(2, 16, 8, 8, device="cuda"))

    recording = tracing.record(make_step, hardware.resolve("a100-sxm-40gb"), 1).recording
    made = [b.num_bytes for b in recording.births if b.op.startswith("native_group_norm")]
    assert made == [2 * 16 * 64 * 4, 2 * 4 * 4, 2 * 4 * 4, 2 * 16 * 4, 2 * 16 * 4]
