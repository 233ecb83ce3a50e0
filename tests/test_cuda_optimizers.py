"""Optimizers on CUDA: the forms that torch chooses there, their temporaries, and what is alive when."""

import pytest
import torch

import snugfit
from snugfit import hardware
from snugfit.memory import tracing

COUNT, SIZE = 100, 10000
EACH = -(-SIZE * 4 // 512) * 512  # a tensor's block
MIB = 2**20


def report(optimizer, **options):
    """One million weights in 100 equal tensors, gradients given."""

    def make_step():
        weights = [torch.nn.Parameter(torch.empty(SIZE, device="cuda")) for _ in range(COUNT)]
        made = optimizer(weights, **options)

        def step():
            for weight in weights:
                weight.grad = torch.empty(SIZE, device="cuda")
            made.step()
            made.zero_grad(set_to_none=True)

        return step

    return snugfit.trace(make_step, "a100-sxm-40gb")


def test_c086_the_grouped_update_takes_four_megabytes_and_one_by_one_next_to_nothing():
    steady = 4 * COUNT * EACH  # weights, gradients, two moments: 16 MB
    assert steady == pytest.approx(16e6, rel=0.02)
    grouped = report(torch.optim.Adam).peak_allocated_bytes
    one_by_one = report(torch.optim.Adam, foreach=False).peak_allocated_bytes
    assert grouped - steady == COUNT * EACH  # the roots of the second moments: 4 MB
    # A root, its quotient, and the quotient of the weight before, which a local name still holds.
    assert one_by_one - steady == 3 * EACH
    assert report(torch.optim.Adam, fused=True).peak_allocated_bytes == steady + COUNT * 512  # step counts on the card


@pytest.mark.parametrize(
    ("optimizer", "options", "temporaries"),
    [
        (torch.optim.SGD, {"lr": 0.1}, 0),
        (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}, 1),  # gradients with decay
        (torch.optim.AdamW, {"weight_decay": 0.1}, 1),  # decay in place, roots
        (torch.optim.Adam, {"weight_decay": 0.1}, 1),  # gradients with decay are let go before the roots come
        (torch.optim.RMSprop, {}, 1),  # roots
        (torch.optim.Adagrad, {}, 2),  # roots, scaled gradients
    ],
)
def test_grouped_updates_hold_lists_of_temporaries(optimizer, options, temporaries):
    made = report(optimizer, **options)
    state = made.phases["step end"].get("optimizer", 0)
    assert made.peak_allocated_bytes == (2 + temporaries) * COUNT * EACH + state


def test_c087_the_moments_of_the_first_update_are_there_in_the_second_window():
    weights, activations = 4 * MIB, 16 * MIB

    def peak(set_to_none):
        def make_step():
            weight = torch.nn.Parameter(torch.empty(weights // 4, device="cuda"))
            value = torch.empty(activations // 4, device="cuda")
            made = torch.optim.Adam([weight], foreach=False)

            def step():
                # Two results of exp are saved beside the input; backward holds one gradient of their size.
                (weight.sum() * value).exp().exp().sum().backward()
                made.step()
                made.zero_grad(set_to_none=set_to_none)

            return step

        return snugfit.trace(make_step, "a100-sxm-40gb")

    static = 3 * weights
    kept, dropped = peak(False), peak(True)
    assert dropped.peak_at.window == kept.peak_at.window == 2
    few = 64 * 1024  # losses and sums
    assert static + 4 * activations <= dropped.peak_allocated_bytes <= static + 4 * activations + few
    assert kept.peak_allocated_bytes - dropped.peak_allocated_bytes == weights


def test_clipping_takes_a_norm_per_gradient_and_a_number_per_chunk():
    def make_step(recorder):
        weights = [torch.nn.Parameter(torch.empty(SIZE, device="cuda")) for _ in range(COUNT)]

        def step():
            for weight in weights:
                weight.grad = torch.empty(SIZE, device="cuda")
            torch.nn.utils.clip_grad_norm_(weights, 1.0)

        return step

    recording = tracing.record(make_step, hardware.resolve("a100-sxm-40gb"), 1).recording
    norms = [b.num_bytes for b in recording.births if b.op.startswith("_foreach_norm")]
    assert norms == [*[4] * COUNT, 4 * COUNT]  # one chunk of 65,536 elements each
    assert any(b.op.startswith("stack") and b.num_bytes == 4 * COUNT for b in recording.births)


def test_steps_of_fused_and_capturable_optimizers_live_on_the_card():
    for options in ({"fused": True}, {"capturable": True}):
        state = report(torch.optim.AdamW, **options).phases["step end"]["optimizer"]
        assert state == COUNT * (2 * EACH + 512)
    assert report(torch.optim.AdamW).phases["step end"]["optimizer"] == COUNT * 2 * EACH
