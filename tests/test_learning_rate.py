"""Learning rates for another batch size, warm-up in updates, and the gradient's norm over many micro-batches."""

import doctest

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, ReduceLROnPlateau, StepLR

from models import Weight, mean_product
from snugfit import Engine, PlanError, learning_rate
from tolerances import EXACT_VALUE, FLOAT64

positive = st.floats(1e-3, 1e3)


def optimizer_of(model, lr=0.6):
    return torch.optim.SGD(model.parameters(), lr=lr)


def rates_used(scheduler, updates):
    """The rate of each update, with one scheduler step after each."""
    used = []
    for _ in range(updates):
        used.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return used


def test_the_examples_of_the_documentation_are_true():
    failed, attempted = doctest.testmod(learning_rate)
    assert failed == 0
    assert attempted > 3


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_a_batch_four_times_as_large_scales_the_rate(rule, factor):
    assert learning_rate.scale(0.1, 4, rule) == pytest.approx(0.1 * factor, rel=FLOAT64)


@given(positive, positive, st.sampled_from(learning_rate.RULES))
def test_scaling_there_and_back_is_the_identity_and_factors_multiply(first, second, rule):
    there = learning_rate.scale(learning_rate.scale(0.3, first, rule), second, rule)
    assert there == pytest.approx(learning_rate.scale(0.3, first * second, rule), rel=FLOAT64)
    back = learning_rate.scale(learning_rate.scale(0.3, first, rule), 1 / first, rule)
    assert back == pytest.approx(0.3, rel=FLOAT64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.1, 2, "cubic"), "rule='cubic'"),
        ((0.1, 0), "factor=0"),
        ((0.1, -2), "factor=-2"),
        ((0.1, float("nan")), "factor=nan"),
        ((0.1, float("inf")), "factor=inf"),
        ((0.1, True), "factor=True"),
        ((0.1, "2"), "factor='2'"),
        ((-0.1, 2), "lr=-0.1"),
        (([0.1, 0.2], 2), "lr=[0.1, 0.2]"),
    ],
)
def test_what_cannot_be_scaled_is_refused_with_its_value(arguments, message):
    with pytest.raises(PlanError) as caught:
        learning_rate.scale(*arguments)
    assert message in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("after", [None, lambda o: LambdaLR(o, lambda k: 1 / (1 + k))])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_kth_update_of_a_warm_up_uses_k_of_steps_of_the_rate(steps, after):
    optimizer = optimizer_of(Weight())
    scheduler = learning_rate.warmup(optimizer, steps, None if after is None else after(optimizer))
    rising = [0.6 * k / steps for k in range(1, steps + 1)]
    falling = [0.6 / (1 + k) for k in range(3)] if after else [0.6] * 3
    assert rates_used(scheduler, steps + 3) == pytest.approx([*rising, *falling], rel=FLOAT64)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: CosineAnnealingLR(o, T_max=6),
        lambda o: ExponentialLR(o, 0.5),
        lambda o: StepLR(o, 2, 0.1),
        lambda o: LambdaLR(o, lambda k: 0.5 / (1 + k)),
    ],
)
def test_what_follows_a_warm_up_gives_the_rates_that_it_gives_alone(make):
    alone = rates_used(make(optimizer_of(Weight())), 5)
    optimizer = optimizer_of(Weight())
    followed = rates_used(learning_rate.warmup(optimizer, 3, make(optimizer)), 8)
    assert followed[3:] == pytest.approx(alone, rel=FLOAT64)


def test_every_parameter_group_warms_up_to_its_own_rate():
    model = torch.nn.Linear(2, 1)
    groups = [{"params": [model.weight], "lr": 0.8}, {"params": [model.bias], "lr": 0.2}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    learning_rate.warmup(optimizer, 4)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.05], rel=FLOAT64)


def test_a_skipped_window_does_not_move_a_warm_up():
    model = Weight()
    optimizer = optimizer_of(model)
    scheduler = learning_rate.warmup(optimizer, 3, ExponentialLR(optimizer, 0.5))
    engine = Engine(model, optimizer, loss=mean_product, scheduler=scheduler, micro_batch_size=1)
    good, bad = torch.tensor([1.0, 1.0]), torch.tensor([1.0, torch.nan])
    results = [engine.step(batch) for batch in (good, bad, good, bad, good, good, good)]
    used = [result.lr[0] for result in results]
    assert [result.skipped for result in results] == [False, True, False, True, False, False, False]
    assert used == pytest.approx([0.2, 0.4, 0.4, 0.6, 0.6, 0.6, 0.3], rel=FLOAT64)


def test_a_warm_up_goes_on_from_a_saved_state():
    def make():
        model = Weight()
        optimizer = optimizer_of(model)
        scheduler = learning_rate.warmup(optimizer, 3, CosineAnnealingLR(optimizer, T_max=4))
        return Engine(model, optimizer, loss=mean_product, scheduler=scheduler)

    def used(engine, number):
        return [engine.step(torch.ones(2)).lr[0] for _ in range(number)]

    whole = used(make(), 6)
    first, second = make(), make()
    begun = used(first, 2)
    second.load_state_dict(first.state_dict())
    assert begun + used(second, 4) == whole


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, None])
def test_a_warm_up_of_no_whole_number_of_updates_is_refused(steps):
    with pytest.raises(PlanError, match="whole number of updates"):
        learning_rate.warmup(optimizer_of(Weight()), steps)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: ExponentialLR(optimizer_of(Weight()), 0.5),  # over another optimizer
        ReduceLROnPlateau,
        lambda o: "cosine",
        lambda o: ExponentialLR,
    ],
)
def test_what_cannot_follow_a_warm_up_is_refused(make):
    optimizer = optimizer_of(Weight())
    after = make(optimizer)
    with pytest.raises(PlanError, match="cannot follow a warm-up"):
        learning_rate.warmup(optimizer, 3, after)


@pytest.mark.parametrize("steps", [1, 8, 32, 128])
def test_the_norm_of_the_averaged_gradient_does_not_grow_with_the_number_of_micro_batches(steps):
    """Claims F15 and T6: only a forgotten division explodes, and it grows the norm exactly N-fold."""
    model = Weight()
    engine = Engine(model, optimizer_of(model, lr=1.0), loss=mean_product, max_grad_norm=1.0)
    micro_batches = [torch.full((2,), 3.0) for _ in range(steps)]
    result = engine.step_window(micro_batches)
    assert float(result.grad_norm) == pytest.approx(3.0, abs=EXACT_VALUE)
    assert model.w.item() == pytest.approx(1.0 - 1.0, abs=EXACT_VALUE)  # one clip per window, to a norm of 1
    forgotten = Weight()
    for micro_batch in micro_batches:
        mean_product(forgotten, micro_batch).backward()
    assert float(forgotten.w.grad) == pytest.approx(3.0 * steps, abs=EXACT_VALUE)
