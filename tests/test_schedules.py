"""Schedules, counters and averages of weights follow real updates, and nobody else's."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, OneCycleLR, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from models import Weight, mean_product
from snugfit import Engine, PlanError, UnsupportedError

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


class Timm:
    """Steps by the number of the epoch."""

    def step(self, epoch, metric=None):
        raise AssertionError("never called")


def test_a_scheduler_whose_step_needs_an_argument_is_refused_at_set_up():
    with pytest.raises(UnsupportedError, match=r"Timm.step\(\) needs an argument") as caught:
        make(scheduler=Timm())
    assert caught.value.got == "step(epoch)"


def test_a_step_with_arguments_that_may_be_left_out_is_fine():
    class Lenient:
        steps = 0

        def step(self, epoch=None, *more, **options):
            self.steps += 1

    engine, _ = make(scheduler=(scheduler := Lenient()))
    engine.step(torch.ones(1))
    assert scheduler.steps == 1


def test_a_second_scheduler_that_raises_does_not_make_the_first_look_stepped_by_the_loop():
    engine, optimizer = make()
    engine.runner.schedulers = (first := StepLR(optimizer, 1), OneCycleLR(optimizer, 0.1, total_steps=2))
    engine.step(torch.ones(1))
    engine.step(torch.ones(1))
    for steps in (3, 4):
        with pytest.raises(ValueError, match="Tried to step"):
            engine.step(torch.ones(1))
        assert first.last_epoch == engine.step_count == steps


def test_engines_that_share_a_scheduler_are_told_so():
    engine, optimizer = make()
    scheduler = StepLR(optimizer, 1)
    engines = [Engine(engine.model, optimizer, loss=mean_product, scheduler=scheduler) for _ in range(2)]
    engines[0].step(torch.ones(1))
    engines[1].step(torch.ones(1))
    with pytest.raises(PlanError, match="stepped outside of the engine") as caught:
        engines[0].step(torch.ones(1))
    assert "of several engines only one may hold it" in caught.value.hint


def test_a_scheduler_of_another_optimizer_is_refused_at_once():
    other = torch.optim.SGD(Weight(0.0).parameters(), lr=1.0)
    with pytest.raises(PlanError, match="belongs to another optimizer"):
        make(scheduler=StepLR(other, 1))


def test_a_path_is_no_plan():
    with pytest.raises(PlanError, match="not a plan") as caught:
        make(plan="plan.json")
    assert "Plan.load" in caught.value.hint


def test_a_loss_function_that_returns_more_than_its_loss_is_told_so():
    model = nn.Linear(2, 3)
    engine = Engine(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, x: (model(x).square().mean(), model(x)),
    )
    with pytest.raises(PlanError, match="taken as several losses") as caught:
        engine.step(torch.ones(5, 2))
    assert "(5, 3)" in caught.value.got
