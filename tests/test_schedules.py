"""Schedules, counters and averages of weights follow real updates, and nobody else's."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, OneCycleLR, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from models import Weight, mean_product
from snugfit import Engine, PlanError

NAN = torch.tensor([float("nan")])


def make(**settings):
    model = Weight(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return Engine(model, optimizer, loss=mean_product, **settings), optimizer


def decaying(kind, optimizer):
    if kind == "sequential":
        parts = [LinearLR(optimizer, 0.5, 1.0, total_iters=2), StepLR(optimizer, 1)]
        return SequentialLR(optimizer, parts, milestones=[2])
    if kind == "one-cycle":
        return OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    return LambdaLR(optimizer, lambda step: 1 - step / 10)


@pytest.mark.parametrize("kind", ["lambda", "sequential", "one-cycle"])
def test_a_scheduler_that_the_loop_steps_as_well_is_named(kind):
    engine, optimizer = make()
    engine.runner.schedulers = (scheduler := decaying(kind, optimizer),)
    engine.step(torch.ones(1))
    scheduler.step()
    before = engine.model.w.detach().clone()
    with pytest.raises(PlanError, match="stepped outside of the engine") as caught:
        engine.step(torch.ones(1))
    assert type(scheduler).__name__ in caught.value.got
    assert torch.equal(engine.model.w, before)
    assert engine.step_count == 1


def test_a_scheduler_that_was_loaded_or_set_back_is_taken_as_it_stands():
    engine, optimizer = make()
    engine.runner.schedulers = (scheduler := decaying("lambda", optimizer),)
    start = scheduler.state_dict()
    for _ in range(2):
        engine.step(torch.ones(1))
    saved = engine.state_dict()
    scheduler.load_state_dict(start)
    engine.step(torch.ones(1))
    engine.load_state_dict(saved)
    engine.step(torch.ones(1))
    assert scheduler.last_epoch == 3


@pytest.mark.parametrize("scheduler", [3, "cosine", LambdaLR, [object()]])
def test_what_is_no_scheduler_is_refused_at_once(scheduler):
    with pytest.raises(PlanError, match="not a learning-rate scheduler"):
        make(scheduler=scheduler)


def test_c025_an_action_every_two_updates_and_an_average_of_weights_follow_updates_only():
    engine, _ = make()
    average = AveragedModel(engine.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    acted, weights = [], []
    for value in (torch.ones(1), NAN, torch.ones(1), NAN, torch.ones(1), torch.ones(1)):
        result = engine.step_window([value] * 4)
        if not result.skipped:
            average.update_parameters(engine.model)
            weights.append(float(average.module.w.detach()))
            if result.step % 2 == 0:
                acted.append(result.step)
    assert acted == [2, 4]
    assert (engine.step_count, engine.micro_step_count, engine.sample_count) == (4, 16, 16)
    assert weights == [-1.0, -1.5, -2.25, -3.125]
    assert int(average.n_averaged) == 4


def test_a_skipped_window_says_what_it_is_and_its_number_is_that_of_the_last_update():
    engine, optimizer = make(max_grad_norm=1.0)
    engine.runner.schedulers = (LambdaLR(optimizer, lambda step: 1 - step / 10),)
    done, skipped = engine.step(torch.ones(1)), engine.step(NAN)
    assert (done.step, done.skipped, done.reason) == (1, False, None)
    assert (skipped.step, skipped.skipped, skipped.reason) == (1, True, "non-finite gradient")
    assert torch.isnan(skipped.loss)
    assert torch.isnan(skipped.grad_norm)
    assert skipped.lr == (0.9,) == (optimizer.param_groups[0]["lr"],)


def test_metrics_are_averaged_by_their_counts_over_the_window():
    from snugfit import Loss

    def loss(model, x):
        return Loss(model(x).sum(), len(x), metrics={"x": (x.sum(), len(x)), "largest": (float(x.max()), 1)})

    model = Weight(0.0)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=1.0), loss=loss)
    result = engine.step_window([torch.tensor([6.0]), torch.ones(3)])
    assert float(result.metrics["x"]) == 2.25
    assert float(result.metrics["largest"]) == 3.5


def test_arguments_that_are_no_functions_are_refused_by_name():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PlanError, match="loss cannot be called"):
        Engine(model, optimizer, loss=None)
    with pytest.raises(PlanError, match="split cannot be called"):
        Engine(model, optimizer, loss=mean_product, split=3)
