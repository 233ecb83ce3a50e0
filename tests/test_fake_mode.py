"""What is remembered of torch's operations serves no other trace whose results differ."""

import pytest
import torch
from torch import nn

from snugfit import hardware
from snugfit.memory import tracing
from snugfit.memory.cuda import attention_buffers
from snugfit.memory.recording import Recorder

VOLUME, FILTERS = (1, 4, 8, 8, 8), (4, 1, 1, 1, 1)
CONTIGUOUS, CHANNELS_LAST = (2048, 512, 64, 8, 1), (2048, 1, 256, 32, 4)


def convolved(dtype=torch.bfloat16):
    """Strides of a grouped convolution of a volume whose channels come last, in a trace of its own."""
    with Recorder(host_scalars=False):
        volume = torch.zeros(VOLUME, dtype=dtype).to(memory_format=torch.channels_last_3d)
        return nn.functional.conv3d(volume, torch.zeros(FILTERS, dtype=dtype), groups=4).stride()


def test_a_convolutions_layout_follows_whether_onednn_is_on_within_a_trace_and_after_it():
    with Recorder(host_scalars=False):
        volume = torch.zeros(VOLUME, dtype=torch.bfloat16).to(memory_format=torch.channels_last_3d)
        weight = torch.zeros((4, 4, 1, 1, 1), dtype=torch.bfloat16)
        strides = []
        try:
            for enabled in (False, True, False):
                torch._C._set_mkldnn_enabled(enabled)
                strides.append(nn.functional.conv3d(volume, weight).stride())
        finally:
            torch._C._set_mkldnn_enabled(True)
    assert strides == [CONTIGUOUS, CHANNELS_LAST, CONTIGUOUS]


def test_a_convolutions_layout_follows_the_number_of_threads():
    before = torch.get_num_threads()
    strides = []
    try:
        for number in (2, 1, 2):
            torch.set_num_threads(number)
            strides.append(convolved(torch.float32))
    finally:
        torch.set_num_threads(before)
    assert strides == [CHANNELS_LAST, CONTIGUOUS, CHANNELS_LAST]


def test_a_tensor_that_torch_knows_to_be_zero_is_so_each_time():
    with Recorder(host_scalars=False):
        made = [torch._efficientzerotensor([3]) for _ in range(3)]
    assert [tensor._is_zerotensor() for tensor in made] == [True] * 3


def test_both_windows_of_a_hessian_are_the_same():
    def make_step(_):
        weight, x = torch.zeros(4, 4), torch.zeros(4)
        return lambda: torch.func.hessian(lambda x: (x @ weight).square().sum())(x)

    births = tracing.record(make_step, hardware.resolve("cpu")).recording.births
    first, second = ([(birth.op, birth.num_bytes) for birth in births if birth.window == i] for i in (1, 2))
    assert first == second
    assert [op for op, _ in first].count("zeros.default") == 2  # of two products with what torch knows to be zero


@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (2, 2, 0, 8), (2, 0, 5, 8)])
def test_attention_copies_nothing_of_no_elements(shape):
    batch, heads, length, size = shape
    assert attention_buffers._copy(torch.zeros(shape)) == []
    assert attention_buffers._copy(torch.zeros(batch, length, heads, size).transpose(1, 2)) == []
