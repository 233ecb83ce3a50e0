"""Errors of a window that torch words badly name what is at fault: the tail, the layer, the batch."""

import sys

import pytest
import torch
from torch import nn

from models import ConvBatchNorm, LinearStack, regression_batch, squared_error
from snugfit import BatchError, DeviceMemoryError, Engine, PlanError

NOTES = sys.version_info >= (3, 11)

pytestmark = pytest.mark.filterwarnings("ignore:BatchNorm makes")


def engine_of(model, loss=squared_error, **settings):
    return Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, **settings)


def normalised():
    return nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.BatchNorm1d(6)), nn.Linear(6, 6))


def by_hand(engine, batch):
    with engine.window(batch) as window:
        for micro_batch in window:
            window.backward(squared_error(engine.model, micro_batch))


@pytest.mark.parametrize("step", [Engine.step, by_hand])
def test_a_tail_of_one_sample_names_itself_the_layer_and_the_ways_out(step):
    model = normalised()
    engine = engine_of(model, micro_batch_size=4)
    tracked = model[1][0].running_mean.clone()
    with pytest.raises(BatchError, match=r"micro-batch 2 leaves '1.0' \(BatchNorm1d\) one value per channel") as caught:
        step(engine, regression_batch(9))
    assert "the tail of the batch" in caught.value.got
    assert "drop_last=True" in caught.value.hint
    assert isinstance(caught.value.__cause__, ValueError)
    assert torch.equal(model[1][0].running_mean, tracked)


def test_single_samples_that_are_no_tail_are_named_too_and_instance_norm_as_well():
    with pytest.raises(BatchError, match="one value per channel") as caught:
        engine_of(normalised(), micro_batch_size=1).step(regression_batch(4))
    assert "micro-batch 0 of 4, one of its micro-batches" in caught.value.got
    model = nn.Sequential(nn.InstanceNorm1d(3), nn.Flatten(), nn.Linear(3, 1))
    with pytest.raises(BatchError, match="InstanceNorm1d"):
        engine_of(model, lambda m, x: m(x).mean()).step(torch.randn(2, 3, 1))


def test_a_tail_of_one_sample_is_fine_where_torch_normalises_over_positions_or_is_frozen():
    images = engine_of(ConvBatchNorm(), lambda m, x: m(x).square().mean(), micro_batch_size=4)
    assert not images.step(torch.randn(9, 3, 8, 8)).skipped
    frozen = normalised()
    frozen[1].eval()
    assert not engine_of(frozen, micro_batch_size=4).step(regression_batch(9)).skipped


def test_a_value_error_of_the_user_passes_through():
    def loss(model, micro_batch):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        engine_of(LinearStack(), loss).step(regression_batch(4))
    assert type(caught.value) is ValueError


@pytest.mark.parametrize("step", [Engine.step, by_hand])
def test_a_batch_that_carries_a_graph_is_named(step):
    batch = regression_batch(4)
    batch["x"] = nn.Linear(6, 6)(batch["x"])
    with pytest.raises(BatchError, match="share a graph that comes with the batch") as caught:
        step(engine_of(LinearStack(), micro_batch_size=2), batch)
    assert "x" in caught.value.got


def test_losses_that_share_a_graph_of_the_model_are_still_named_so():
    model = LinearStack()
    engine = engine_of(model)

    def twice():
        with engine.window(regression_batch(2)) as window:
            for micro_batch in window:
                loss = squared_error(model, micro_batch).exp()
                window.backward(loss)
                window.backward(2 * loss)

    with pytest.raises(PlanError, match="two losses share a graph"):
        twice()


PAIRS = [[torch.ones(4, 6), torch.ones(4)], [torch.ones(4, 6), torch.ones(4, 6, dtype=torch.long)]]


def opened(engine, batch):
    with engine.window(batch):
        raise AssertionError("it was taken")


@pytest.mark.parametrize("batch", PAIRS)
@pytest.mark.parametrize("step", [Engine.step_window, opened])
def test_a_list_of_tensors_that_can_only_be_one_batch_is_refused_at_once(batch, step):
    engine = engine_of(LinearStack())
    with pytest.raises(BatchError, match="these tensors are one batch") as caught:
        step(engine, batch)
    assert "tuple(batch)" in caught.value.hint


@pytest.mark.skipif(not NOTES, reason="Python 3.10 has no notes")
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_list_that_may_be_meant_as_one_batch_is_hinted_at_where_the_loss_fails(by_hand):
    def loss(model, pair):
        x, y = pair
        return (model(x) - y).square().mean()

    engine = engine_of(LinearStack(), loss)
    batch = [torch.ones(4, 6), torch.ones(4, 6)]

    def run():
        if not by_hand:
            engine.step_window(batch)
        else:
            with engine.window(batch) as window:
                for pair in window:
                    window.backward(loss(engine.model, pair))

    with pytest.raises(ValueError, match="too many values") as caught:
        run()
    assert any("pass it as a tuple" in note for note in caught.value.__notes__)


@pytest.mark.filterwarnings("ignore:out of memory with")
@pytest.mark.skipif(not NOTES, reason="Python 3.10 has no notes")
def test_errors_that_are_named_already_are_not_hinted_at():
    def loss(model, x):
        raise torch.OutOfMemoryError

    with pytest.raises(DeviceMemoryError) as caught:
        engine_of(LinearStack(), loss).step_window([torch.ones(2, 6), torch.ones(2, 6)])
    assert not hasattr(caught.value, "__notes__")


def test_a_list_of_tensors_of_one_kind_is_a_window_of_micro_batches():
    engine = engine_of(LinearStack(), lambda m, x: m(x).square().mean())
    assert engine.step_window([torch.ones(4, 6), torch.ones(2, 6)]).num_micro_batches == 2
