import dataclasses
import gc
import math
import traceback
import warnings
import weakref
from collections import deque

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from models import LinearStack, Weight, mean_product, regression_batch, squared_error
from snugfit import BatchError, Engine, Plan, PlanError, Shared


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


@pytest.mark.parametrize(("samples", "size", "steps"), [(9, 2, 2), (10, 2, 4), (7, 3, 1), (1, 4, 3), (8, 2, 2)])
@pytest.mark.parametrize("tail", ["flush", "drop"])
def test_c020_the_number_of_updates_of_an_epoch_is_known_before(samples, size, steps, tail):
    engine = make()
    loader = torch.utils.data.DataLoader(torch.ones(samples), batch_size=size)
    for window in engine.windows(loader, steps, tail=tail):
        engine.step_window(window)
    updates = len(loader) / steps
    assert engine.step_count == (math.ceil(updates) if tail == "flush" else math.floor(updates))


def test_c017_slices_of_a_loader_s_batches_make_one_update_for_each_batch():
    engine = make(micro_batch_size=2)
    results = [engine.step(batch) for batch in torch.utils.data.DataLoader(torch.arange(16.0), batch_size=8)]
    assert [result.num_micro_batches for result in results] == [4, 4]
    assert engine.model.w.item() == -(3.5 + 11.5)
    by_hand = make()
    for batch in torch.utils.data.DataLoader(torch.arange(16.0), batch_size=8):
        with by_hand.window(list(batch.split(2))) as window:
            for micro_batch in window:
                window.backward(mean_product(by_hand.model, micro_batch))
    assert by_hand.step_count == 2
    assert by_hand.model.w.item() == engine.model.w.item()


class Stream(torch.utils.data.IterableDataset):
    """Has no length."""

    def __iter__(self):
        yield from torch.ones(7)


@pytest.mark.parametrize("kind", ["generator", "iterator", "iterable data set", "list", "loader"])
@pytest.mark.parametrize("tail", ["flush", "drop"])
def test_any_iterable_is_grouped_and_says_what_it_dropped_if_it_has_a_length(kind, tail):
    loader = {
        "generator": lambda: (x for x in values(*[1] * 7)),
        "iterator": lambda: iter(values(*[1] * 7)),
        "iterable data set": lambda: torch.utils.data.DataLoader(Stream(), batch_size=1),
        "list": lambda: values(*[1] * 7),
        "loader": lambda: torch.utils.data.DataLoader(torch.ones(7), batch_size=1),
    }[kind]()
    engine = make()
    results = [engine.step_window(window) for window in engine.windows(loader, 3, tail=tail)]
    assert [result.num_micro_batches for result in results] == ([3, 3, 1] if tail == "flush" else [3, 3])
    assert results[-1].num_dropped == (1 if tail == "drop" and kind in ("list", "loader") else 0)


def test_an_empty_loader_makes_no_window():
    engine = make()
    assert list(engine.windows([], 3)) == []
    assert list(engine.windows(iter(()), 3, tail="drop")) == []
    assert engine.step_count == 0


def test_a_micro_batch_without_samples_counts_nothing_wherever_it_is():
    rows = torch.tensor([1.0, 2.0, 6.0])
    for largest in (3, 1):  # 1: larger micro-batches run out of memory, and are cut

        def loss(model, x, largest=largest):
            if len(x) > largest:
                raise torch.OutOfMemoryError
            return mean_product(model, x)

        model = Weight(0.0)
        engine = Engine(model, torch.optim.SGD(model.parameters(), 1.0), loss=loss)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="out of memory")
            engine.step_window([rows[:0], rows[:2], rows[1:1], rows[2:]])
        assert model.w.item() == -3.0  # (1 + 2 + 6) / 3
        assert engine.sample_count == 3
        empty = engine.step_window([rows[:0]])
        assert (empty.reason, empty.count, engine.step_count) == ("empty", 0.0, 1)


@pytest.mark.parametrize("given", [torch.ones(4), {"x": torch.ones(4)}, 5, "four"])
def test_a_batch_is_not_a_list_of_micro_batches(given):
    engine = make()
    with pytest.raises(BatchError, match="list of micro-batches") as caught:
        engine.step_window(given)
    assert "engine.step(batch)" in caught.value.hint


def test_a_loader_is_left_early_with_nothing_read_ahead_and_nothing_left_over():
    read = []

    def loader():
        for x in values(*range(1, 10)):
            read.append(x)
            yield x

    engine = make()
    for window in engine.windows(loader(), 2):
        engine.step_window(window)
        if engine.step_count == 2:
            break
    assert len(read) == 4
    assert engine.model.w.grad is None
    for window in engine.windows(values(8, 8), 2):
        engine.step_window(window)
    assert engine.model.w.item() == -(1.5 + 3.5 + 8.0)


def test_a_window_s_micro_batches_are_dropped_before_the_next_ones_are_read():
    alive = []

    def loader():
        for x in range(6):
            item = torch.tensor([float(x)])
            alive.append(weakref.ref(item))
            yield item
            del item

    engine = make()
    windows = engine.windows(loader(), 2)
    gc.disable()
    try:
        for _ in range(3):
            engine.step_window(next(windows))
            if len(alive) > 2:
                assert all(ref() is None for ref in alive[:-2])
    finally:
        gc.enable()


class DiskError(Exception):
    """An error of a loader's own."""


@pytest.mark.parametrize("at", [0, 1, 2, 5])
def test_a_loader_s_error_passes_through_as_it_is_and_the_engine_goes_on(at):
    raised = DiskError("sector 7")

    def loader():
        for i, x in enumerate(values(*range(8))):
            if i == at:
                raise raised
            yield x

    engine = make()
    with pytest.raises(DiskError) as caught:
        deque(map(engine.step_window, engine.windows(loader(), 2)), maxlen=0)
    assert caught.value is raised
    assert caught.value.__cause__ is None
    assert "loader" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert engine.step_count == at // 2
    assert engine.model.w.grad is None
    before = engine.model.w.item()
    engine.step_window(values(2))
    assert engine.model.w.item() == before - 2.0


def test_an_unknown_policy_for_uneven_loaders_is_refused():
    with pytest.raises(PlanError, match="uneven"):
        make().windows([], 2, uneven="wait")


# --- gradients that someone touches ---


def two_networks():
    model = nn.ModuleDict({"d": LinearStack(1), "g": LinearStack(1), "e": nn.Embedding(3, 6, sparse=True)})
    optimizers = [torch.optim.SGD(model[name].parameters(), lr=1.0) for name in ("d", "g", "e")]

    def loss(model, batch):
        return squared_error(model["g"], {"x": model["d"](batch["x"]), "y": batch["y"]}) + (
            model["e"](torch.tensor([0, 2, 2])).sum()
        )

    return model, optimizers, loss


def replaced(parameter):
    parameter.grad = parameter.grad.clone()


TOUCHES = {
    "zero_grad()": lambda model, optimizers: optimizers[1].zero_grad(),
    "zero_grad(set_to_none=False)": lambda model, optimizers: optimizers[1].zero_grad(set_to_none=False),
    "of the first optimizer": lambda model, optimizers: optimizers[0].zero_grad(),
    "of a sparse gradient": lambda model, optimizers: optimizers[2].zero_grad(),
    "model.zero_grad()": lambda model, optimizers: model.zero_grad(),
    "replaced": lambda model, optimizers: replaced(model["g"].layers[0].bias),
    "a sparse one replaced": lambda model, optimizers: replaced(model["e"].weight),
    "scaled": lambda model, optimizers: model["d"].layers[0].bias.grad.mul_(2),
    "clipped": lambda model, optimizers: nn.utils.clip_grad_norm_(model["g"].parameters(), 1e-3),
    "a backward of one's own": lambda model, optimizers: model["d"].layers[0].weight.sum().backward(),
}


@pytest.mark.parametrize("name", TOUCHES)
@pytest.mark.parametrize("form", ["in the loss function", "by hand", "by hand, behind the last"])
def test_c014_gradients_that_are_touched_inside_of_a_window_are_noticed_and_nothing_moves(name, form):
    model, optimizers, loss = two_networks()
    before = [p.clone() for p in model.parameters()]
    batches = [regression_batch(3) for _ in range(3)]

    def touching(model, batch):
        value = loss(model, batch)
        if batch is batches[2]:
            TOUCHES[name](model, optimizers)
        return value

    engine = Engine(model, optimizers, loss=touching)
    engine.runner.hooks = dataclasses.replace(engine.runner.hooks, move=lambda micro_batch: micro_batch)

    def by_hand():
        with engine.window(batches) as window:
            for i, batch in enumerate(window):
                if i == 2 and form == "by hand":
                    TOUCHES[name](model, optimizers)
                window.backward(loss(model, batch))
            if form != "by hand":
                TOUCHES[name](model, optimizers)

    with pytest.raises(PlanError, match="gradients were cleared or changed") as caught:
        engine.step_window(batches) if form == "in the loss function" else by_hand()
    if "zero_grad" in name:
        assert "zero_grad" in caught.value.got
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_c014_a_gradient_from_before_the_window_does_not_leak_into_it():
    engine = make()
    (engine.model.w * 100).backward()
    engine.step_window(values(1))
    assert engine.model.w.item() == -1.0


# --- windows by hand ---


def test_a_window_by_hand_that_is_left_early_raises_and_leaves_nothing():
    engine = make(precision="bf16-mixed")

    def leaving():
        with engine.window(values(1, 2, 3)) as window:
            for micro_batch in window:
                window.backward(engine.model(micro_batch).mean())
                break

    with pytest.raises(PlanError, match="left before its last") as caught:
        leaving()
    assert "1 of 3" in caught.value.got
    assert engine.model.w.grad is None
    assert engine.model.w.item() == 0.0
    assert not torch.is_autocast_enabled("cpu")
    engine.step_window(values(2))
    assert engine.model.w.item() == -2.0


@pytest.mark.parametrize("kept", [True, False])
def test_an_error_in_the_body_passes_through_and_leaves_nothing_even_if_someone_holds_the_loop(kept):
    engine = make(precision="bf16-mixed")
    held = []

    def failing():
        with engine.window(values(1, 2)) as window:
            loop = iter(window)
            if kept:
                held.append(loop)
            for micro_batch in loop:
                window.backward(engine.model(micro_batch).mean())
                raise DiskError("body")

    with pytest.raises(DiskError, match="body"):
        failing()
    assert engine.model.w.grad is None
    assert not torch.is_autocast_enabled("cpu")
    assert engine.step_window(values(2)).reason is None


def test_a_window_by_hand_has_one_loop():
    engine = make()

    def twice():
        with engine.window(values(1, 2)) as window:
            for _ in range(2):
                for micro_batch in window:
                    window.backward(engine.model(micro_batch).mean())

    with pytest.raises(PlanError, match="twice"):
        twice()
    assert engine.model.w.item() == 0.0


def test_repeated_backward_calls_add_up():
    engine = make()
    with engine.window(values(1, 2)) as window:
        for micro_batch in window:
            for factor in (1, 2, 3):
                window.backward(factor * engine.model(micro_batch).mean())
    assert engine.model.w.item() == -9.0
    assert float(window.result.loss) == 0.0


@pytest.mark.parametrize("limit", [None, 1.0])
def test_c028_a_refused_update_leaves_the_scale_as_it_is_and_the_next_window_works(limit):
    engine = make(precision="16-mixed", max_grad_norm=limit)
    assert engine.step_window(values(1, 3)).reason is None
    scale, before = engine.state_dict()["scaler"], engine.model.w.item()
    with engine.window(values(100, 300)) as window:
        for micro_batch in window:
            window.backward(engine.model(micro_batch).mean())
        window.skip("norm spike")
    result = window.result
    assert (result.skipped, result.reason) == (True, "refused")
    assert float(result.grad_norm) == pytest.approx(200.0, rel=1e-3)  # unscaled once, for whoever decides
    assert engine.state_dict()["scaler"] == scale
    assert engine.model.w.grad is None
    assert engine.model.w.item() == before
    assert (engine.step_count, engine.micro_step_count) == (1, 2)
    assert engine.step_window(values(2, 2)).reason is None
    assert engine.step_count == 2


def test_evaluating_works_between_and_inside_of_windows_and_restores_every_mode():
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.BatchNorm1d(6).eval())
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=squared_error, precision="bf16-mixed")
    batch = regression_batch(4)

    def check():
        modes = [module.training for module in model.modules()]
        with engine.evaluating() as evaluated:
            assert not any(module.training for module in evaluated.modules())
            first, second = evaluated(batch["x"]), evaluated(batch["x"])
            assert not first.requires_grad
            assert torch.is_autocast_enabled("cpu")
        assert torch.equal(first, second)
        assert [module.training for module in model.modules()] == modes == [True, True, True, False]
        assert torch.is_grad_enabled()

    check()
    with engine.window([batch, batch]) as window:
        for micro_batch in window:
            check()
            window.backward(squared_error(model, micro_batch))
            check()
        check()
    assert window.result.reason is None
    with pytest.raises(DiskError), engine.evaluating():
        raise DiskError
    assert [module.training for module in model.modules()] == [True, True, True, False]


@pytest.mark.parametrize("way", ["step", "step_window", "window"])
def test_a_count_of_ones_own_sees_what_is_shared_without_its_wrapper(way):
    seen = []

    def count(micro_batch):
        seen.append(type(micro_batch["factor"]))
        return float(micro_batch["x"].sum() * micro_batch["factor"][0])

    model = Weight()
    engine = Engine(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        loss=lambda model, batch: model(batch["x"]).mean() * batch["factor"].sum(),
        count=count,
    )
    batch = {"x": torch.ones(2), "factor": Shared(torch.tensor([3.0, 1.0, 1.0]))}
    if way == "window":
        with engine.window([batch]) as window:
            for micro_batch in window:
                window.backward(model(micro_batch["x"]).mean())
        result = window.result
    else:
        result = engine.step(batch) if way == "step" else engine.step_window([batch])
    assert result.count == 6.0
    assert set(seen) == {torch.Tensor}


def test_a_data_set_that_is_asked_item_by_item_is_a_loader():
    class Items:
        def __getitem__(self, index):
            if index == 4:
                raise IndexError
            return torch.full((2, 1), float(index))

    found = list(make().windows(Items(), 2))
    assert [[float(micro_batch[0]) for micro_batch in window] for window in found] == [[0.0, 1.0], [2.0, 3.0]]
