import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from models import Weight, mean_product
from snugfit import Plan, PlanError
from snugfit.training.engine import Engine


def make(**settings):
    model = Weight(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return Engine(model, optimizer, loss=mean_product, **settings)


def values(*numbers):
    return [torch.tensor([float(x)]) for x in numbers]


def test_c012_a_short_last_window_weighs_its_true_size():
    engine = make()
    results = [engine.step_window(window) for window in engine.windows(values(*[1] * 10), 4)]
    assert [result.num_micro_batches for result in results] == [4, 4, 2]
    assert engine.model.w.item() == -3.0


def test_c012_a_tail_may_be_dropped_and_is_then_reported():
    engine = make()
    results = [engine.step_window(window) for window in engine.windows(values(*[1] * 10), 4, tail="drop")]
    assert [result.num_dropped for result in results] == [0, 2]
    assert engine.model.w.item() == -2.0


def test_c012_a_loader_without_a_length_drops_its_tail_too():
    engine = make()
    windows = list(engine.windows(iter(values(*[1] * 10)), 4, tail="drop"))
    assert [len(window) for window in windows] == [4, 4]


def test_c019_windows_end_after_every_fourth_micro_batch():
    engine = make()
    for window in engine.windows(values(*range(1, 9)), 4):
        engine.step_window(window)
    assert engine.model.w.item() == -9.0


def test_c020_the_horizon_is_the_number_of_updates_that_are_made():
    model = Weight(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / 9)
    engine = Engine(model, optimizer, loss=mean_product, scheduler=scheduler)
    loader = torch.utils.data.DataLoader(torch.ones(9), batch_size=2)
    rates = [
        engine.step_window(window).lr[0]
        for epoch in range(3)
        for window in engine.windows(loader, accumulation_steps=2)
    ]
    assert rates == [1 - step / 9 for step in range(9)]
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert (engine.step_count, engine.micro_step_count, engine.sample_count) == (9, 15, 27)


def test_a_window_reads_exactly_the_micro_batches_that_it_needs():
    read = []

    def loader():
        for x in values(*range(10)):
            read.append(x)
            yield x

    engine = make()
    windows = engine.windows(loader(), 4)
    for number in (4, 8, 10):
        engine.step_window(next(windows))
        assert len(read) == number


def test_an_error_of_the_loader_passes_through():
    def loader():
        yield from values(1, 2)
        raise OSError("disk")

    engine = make()
    windows = engine.windows(loader(), 2)
    engine.step_window(next(windows))
    with pytest.raises(OSError, match="disk"):
        next(windows)


def test_the_plan_knows_the_length_of_a_window():
    engine = make(plan=Plan(batch_size=6, micro_batch_size=2))
    assert [len(window) for window in engine.windows(values(*range(7)))] == [3, 3, 1]


def test_the_length_of_a_window_must_be_known_and_a_count():
    engine = make()
    with pytest.raises(PlanError, match="not known"):
        engine.windows([])
    with pytest.raises(PlanError, match="accumulation_steps"):
        engine.windows([], 0)
    with pytest.raises(PlanError, match="tail"):
        engine.windows([], 2, tail="keep")
