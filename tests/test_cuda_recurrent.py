"""Recurrent layers as cuDNN runs them: what a training step keeps of them, in sizes that shapes alone decide."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from snugfit import hardware
from snugfit.memory import tracing

STEPS, BATCH, INPUTS, HIDDEN, LAYERS = 20, 8, 32, 64, 2


def record(make_layer, forward):
    """Births of a training step of a layer, those of the second window."""

    def make_step(recorder):
        layer = make_layer().to("cuda")
        value = torch.zeros(STEPS, BATCH, INPUTS, device="cuda")

        def step():
            layer.zero_grad(set_to_none=True)
            forward(layer, value)[0].sum().backward()

        return step

    recording = tracing.record(make_step, hardware.resolve("a100-sxm-40gb"), 2).recording
    return [birth for birth in recording.births if birth.window == 2]


@pytest.mark.parametrize(("kind", "values"), [(nn.LSTM, 6), (nn.GRU, 5), (nn.RNN, 2)])
def test_a_recurrent_layer_is_one_kernel_with_outputs_states_and_a_reserve(kind, values):
    births = record(lambda: kind(INPUTS, HIDDEN, LAYERS), lambda layer, value: layer(value))
    forward = [
        birth.num_bytes for birth in births if birth.phase == "forward" and birth.op.startswith(("new_", "empty"))
    ]
    rows = STEPS * BATCH * HIDDEN * 4
    states = LAYERS * BATCH * HIDDEN * 4
    assert forward == [rows, *[states] * (2 if kind is nn.LSTM else 1), rows * LAYERS * values]


def test_the_gradients_of_all_weights_are_one_tensor():
    layer = nn.LSTM(INPUTS, HIDDEN, LAYERS)
    births = record(lambda: nn.LSTM(INPUTS, HIDDEN, LAYERS), lambda layer, value: layer(value))
    total = sum(parameter.numel() for parameter in layer.parameters()) * 4
    assert [b.num_bytes for b in births if b.op == "new_zeros.default"] == [total]


def test_a_batch_that_comes_first_is_copied_forward_and_backward():
    births = record(
        lambda: nn.GRU(INPUTS, HIDDEN, batch_first=True),
        lambda layer, value: layer(value.transpose(0, 1).contiguous()),
    )
    copies = [
        birth for birth in births if birth.op == "clone.default" and birth.num_bytes == STEPS * BATCH * INPUTS * 4
    ]
    assert [birth.phase for birth in copies] == ["forward", "forward", "backward"]  # the first is the step's own


def test_packed_sequences_take_as_much_as_their_elements():
    def forward(layer, value):
        packed = pack_padded_sequence(value, torch.full((BATCH,), STEPS), enforce_sorted=True)
        return layer(packed)[0]

    births = record(lambda: nn.LSTM(INPUTS, HIDDEN), forward)
    assert STEPS * BATCH * HIDDEN * 4 * 6 in [birth.num_bytes for birth in births]
