"""What surrounds a trace: the caller's modes, other traces, other devices. None leaks in, none is changed."""

import pytest
import torch
from torch import nn

import snugfit
from snugfit.memory import tracing

CARD = "rtx-3090"


def make_step(device="cuda"):
    model = nn.Linear(256, 256).to(device)
    x = torch.zeros(64, 256, device=device)
    return lambda: model(x).square().mean().backward()


def peak(device="cuda"):
    return snugfit.trace(lambda: make_step(device), CARD if device == "cuda" else "cpu").peak_allocated_bytes


def autocast_state():
    torch.autocast_increment_nesting()
    devices = ("cpu", "cuda")
    return (
        torch.autocast_decrement_nesting(),
        torch.is_autocast_cache_enabled(),
        *map(torch.is_autocast_enabled, devices),
        *map(torch.get_autocast_dtype, devices),
    )


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize(
    "context",
    [
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        torch.no_grad,
        torch.inference_mode,
    ],
    ids=["autocast", "no_grad", "inference_mode"],
)
def test_the_callers_modes_do_not_change_a_trace_and_last(context, device):
    alone = peak(device)
    with context():
        before = autocast_state(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        assert peak(device) == alone
        assert before == (autocast_state(), torch.is_grad_enabled(), torch.is_inference_mode_enabled())


def test_a_step_that_enters_autocast_by_hand_and_raises_leaves_it_off():
    before = autocast_state()

    def make():
        torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False).__enter__()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        snugfit.trace(make, CARD)
    assert autocast_state() == before == (0, True, False, False, *before[4:])


def test_traces_cannot_be_nested():
    def nested():
        return lambda: snugfit.trace(make_step, CARD)

    job = snugfit.Job(
        lambda: nn.Linear(2, 2),
        lambda model, x: model(x).mean(),
        lambda model: torch.optim.SGD(model.parameters(), 0.1),
        lambda n: torch.zeros(n, 2),
    )
    plan = snugfit.Plan(batch_size=2, micro_batch_size=1)
    for make in (nested, lambda: lambda: snugfit.estimate(job, plan, "cpu")):
        with pytest.raises(snugfit.UnsupportedError, match="traces cannot be nested"):
            snugfit.trace(make, CARD)
    assert peak() > 0  # and one after the other they run


def test_a_default_device_that_holds_nothing_is_refused():
    with torch.device("meta"), pytest.raises(snugfit.PlanError, match="default device"):
        snugfit.trace(make_step, CARD)


@pytest.mark.parametrize("target", [CARD, "cpu"])
@pytest.mark.parametrize("name_it", [lambda: torch.zeros(2, device="mps"), lambda: torch.zeros(2).to("xpu:0")])
def test_a_device_of_another_kind_is_refused_by_name(name_it, target):
    with pytest.raises(snugfit.UnsupportedError, match=r"device of type (mps|xpu)"):
        snugfit.trace(name_it, target)


def test_a_step_that_names_no_card_is_told_that_it_is_counted_as_if_it_did():
    assert tracing.NO_DEVICE in snugfit.trace(lambda: make_step("cpu"), CARD).assumptions
    assert tracing.NO_DEVICE not in snugfit.trace(make_step, CARD).assumptions
    assert tracing.NO_DEVICE not in snugfit.trace(lambda: make_step("cpu"), "cpu").assumptions
