"""The update of a window: made once, by nobody else, and never taken back or repeated when something fails in it."""

import sys
import warnings

import pytest
import torch
from torch import nn

from models import (
    ConvBatchNorm,
    LinearStack,
    Weight,
    mean_product,
    regression_batch,
    same_bits,
    squared_error,
    state_of,
)
from snugfit import DeviceMemoryError, Engine, Job, Plan, PlanError, estimate, gradient_noise
from snugfit.training import commit, failures

NOTES = sys.version_info >= (3, 11)


class Failing:
    """A scheduler that raises in its first step."""

    def __init__(self, error):
        self.error, self.steps = error, 0

    def step(self):
        self.steps += 1
        if self.steps == 1:
            raise self.error

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class FailingSGD(torch.optim.SGD):
    """Moves its weights and then raises."""

    def __init__(self, parameters, error, lr=1.0):
        super().__init__(parameters, lr=lr)
        self.error = error

    def step(self, closure=None):
        super().step()
        raise self.error


def fails_in(where, error):
    """An engine over w = 0 whose gradient is 1, in which something fails when its update has begun."""
    model = Weight(0.0)
    if where == "optimizer":
        return Engine(model, FailingSGD(model.parameters(), error), loss=mean_product, micro_batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = Failing(error) if where == "scheduler" else None
    engine = Engine(model, optimizer, loss=mean_product, micro_batch_size=2, scheduler=scheduler)

    def fail(*_):
        raise error

    if where == "observer":
        gradient_noise.track(engine)
        engine.runner.observer = fail
    elif where == "norms":
        engine.runner.norms.update = fail
    elif where == "post hook":
        optimizer.register_step_post_hook(fail)
    return engine


PLACES = ("optimizer", "post hook", "observer", "norms", "scheduler")


def by_hand(engine, batch):
    with engine.window(batch) as window:
        for micro_batch in window:
            window.backward(engine.model(micro_batch).mean())


@pytest.mark.parametrize("step", [Engine.step, lambda engine, batch: engine.step_window([batch]), by_hand])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError, RuntimeError])
def test_out_of_memory_when_the_update_has_begun_is_named_and_never_repeated(where, kind, step):
    engine = fails_in(where, error := kind("CUDA out of memory."))
    with pytest.raises(DeviceMemoryError, match="update") as caught:
        step(engine, torch.ones(4))
    assert "saved state" in caught.value.hint
    assert caught.value.__cause__ is error
    assert engine.model.w.item() == -1
    assert engine.step_count == int(where in ("norms", "scheduler"))


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.skipif(not NOTES, reason="Python 3.10 has no notes")
def test_any_other_error_keeps_its_type_and_says_that_weights_have_moved(where, kind):
    engine = fails_in(where, error := kind("boom"))
    with pytest.raises(kind) as caught:
        engine.step(torch.ones(4))
    assert caught.value is error
    (note,) = caught.value.__notes__
    assert "parameters may have moved" in note if where in PLACES[:2] else "optimizers have stepped" in note


def test_python_without_notes_warns_instead():
    class Old(Exception):
        add_note = None

    with pytest.warns(UserWarning, match="moved"):
        failures.note(Old(), "parameters may have moved")


@pytest.mark.skipif(not NOTES, reason="Python 3.10 has no notes")
def test_an_error_in_the_second_optimizer_says_that_the_first_has_moved():
    model = nn.Sequential(Weight(0.0), Weight(1.0))
    first = torch.optim.SGD(model[0].parameters(), lr=1.0)
    second = FailingSGD(model[1].parameters(), ValueError("boom"))
    engine = Engine(model, [first, second], loss=mean_product)
    with pytest.raises(ValueError, match="boom") as caught:
        engine.step(torch.ones(2))
    assert "number 2 of 2" in caught.value.__notes__[0]
    assert "1 before it have moved" in caught.value.__notes__[0]
    assert model[0].w.item() == -1


@pytest.mark.parametrize("make", [lambda: ValueError("boom"), KeyboardInterrupt, lambda: DeviceMemoryError("full")])
@pytest.mark.parametrize("in_update", [False, True])
def test_buffers_are_taken_back_before_the_update_and_stay_with_the_weights_behind_it(make, in_update):
    torch.manual_seed(0)
    model, error = ConvBatchNorm(), make()

    def loss(model, x):
        value = model(x).square().mean()
        if not in_update:
            raise error
        return value

    engine = Engine(model, FailingSGD(model.parameters(), error), loss=loss)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(type(error)):
        engine.step(torch.randn(2, 3, 8, 8))
    moved = not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert moved == in_update
    assert model.features[0][1].num_batches_tracked.item() == int(in_update)


def test_the_window_after_a_failed_scheduler_goes_on_from_where_things_are():
    engine = fails_in("scheduler", ValueError("boom"))
    with pytest.raises(ValueError, match="boom"):
        engine.step(torch.ones(4))
    assert engine.step(torch.ones(4)).step == 2
    assert engine.model.w.item() == -2


# --- nobody else steps ---


def two_layers():
    model = LinearStack(depth=2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("whose", ["own", "another over the same weights"])
@pytest.mark.parametrize("place", ["loss", "loop"])
def test_an_optimizer_that_steps_inside_a_window_is_refused_before_it_moves_anything(whose, place):
    model, optimizer = two_layers()
    other = optimizer if whose == "own" else torch.optim.Adam(list(model.parameters())[:1])

    def loss(model, micro_batch):
        if place == "loss":
            other.step()
        return squared_error(model, micro_batch)

    engine = Engine(model, optimizer, loss=loss, micro_batch_size=2)
    before = state_of(model, other)

    def run():
        if place == "loss":
            engine.step(regression_batch(4))
            return
        with engine.window(regression_batch(4)) as window:
            for micro_batch in window:
                window.backward(squared_error(model, micro_batch))
                other.step()

    with pytest.raises(PlanError, match=f"{type(other).__name__}.step.. was called inside of a window"):
        run()
    assert same_bits(before, state_of(model, other))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    other.step()  # between windows it may


def test_an_optimizer_of_another_model_may_step_inside_a_window_and_layers_may_write_to_their_weights():
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=0.1), nn.Linear(3, 1))
    elsewhere = Weight(0.0)
    other = torch.optim.SGD(elsewhere.parameters(), lr=1.0)

    def loss(model, ids):
        elsewhere.w.grad = torch.ones(())
        other.step()
        return model(ids).square().mean()

    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, micro_batch_size=2)
    assert not engine.step(torch.arange(4)).skipped
    assert elsewhere.w.item() == -2


def test_the_guard_leaves_no_hook_behind_whatever_ends_a_window():
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
    others = len(hooks)
    model, optimizer = two_layers()

    def loss(model, micro_batch):
        assert len(hooks) == others + 1
        if micro_batch["x"][0, 0] > 100:
            raise ValueError("boom")
        return squared_error(model, micro_batch)

    engine = Engine(model, optimizer, loss=loss, micro_batch_size=2)
    engine.step(regression_batch(4))
    assert len(hooks) == others
    with pytest.raises(ValueError, match="boom"):
        engine.step({name: value + 1000 for name, value in regression_batch(4).items()})
    assert len(hooks) == others
    guard = commit.Guard([optimizer])
    guard.open()
    guard.open()


def test_an_interrupted_update_of_a_trace_comes_out_as_it_is():
    stop = KeyboardInterrupt()
    job = Job(LinearStack, squared_error, lambda model: FailingSGD(model.parameters(), stop), regression_batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of what Python 3.10 has no notes for
        with pytest.raises(KeyboardInterrupt) as caught:
            estimate(job, Plan(batch_size=4, micro_batch_size=2), "cpu")
    assert caught.value is stop
    assert not getattr(stop, "__notes__", ())
