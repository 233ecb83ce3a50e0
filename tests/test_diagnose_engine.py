"""An engine whose windows are not finite ends in a diagnosis, and what it skips leaves no mark."""

import math

import pytest
import torch
from torch import nn

from diagnosed_jobs import Around, engine_of, found_in, mean_output, one_weight, plan_of, sgd
from models import Weight, mean_product, same_bits, state_of
from snugfit import Engine, LossScale, NonFiniteError

# ---- windows that are skipped


def test_c041_the_window_after_a_skipped_one_is_clean():
    model = Weight(0.0)
    engine = Engine(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        loss=mean_product,
        precision="16-mixed",
        loss_scale=LossScale(init_scale=8.0),
    )
    assert engine.step(torch.tensor([math.nan])).skipped
    first = engine.state_dict(model=False)["scaler"]["scale"]
    assert not engine.step(torch.tensor([2.0])).skipped
    assert (model.w.item(), first, engine.state_dict(model=False)["scaler"]["scale"]) == (-2.0, 4.0, 4.0)


def test_c043_a_loss_scale_that_is_too_high_is_no_nan_bug():
    model = one_weight()
    found = found_in(model, batch=torch.full((4, 1), 10.0), plan=plan_of(4, precision="16-mixed"))
    assert (found.phase, found.loss_scale, found.finite_loss_scale) == ("loss scale", 65536.0, 4096.0)
    assert found.cause.startswith("loss scale too high")
    assert "LossScale(init_scale=4096)" in found.remedy
    outcomes = {one.remedy: one.is_finite for one in found.tried}
    assert outcomes["loss scale 1"]
    assert outcomes["loss scale 4096"]
    assert not outcomes["loss scale 8192"]


def test_c043_four_windows_are_skipped_and_the_fifth_trains_at_4096():
    model = one_weight()
    engine = Engine(model, sgd(model), loss=mean_output, precision="16-mixed")
    results = [engine.step(torch.full((1, 1), 10.0)) for _ in range(6)]
    assert [result.skipped for result in results] == [True] * 4 + [False] * 2
    assert results[4].loss_scale == 4096.0
    assert results[4].grad_norm.item() == 10.0


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_c043_the_verdict_is_the_same_while_torch_searches_for_anomalies(precision):
    def roots(x):
        return (x * 0).sqrt() * 0  # the slope of a root at 0 is infinite, times 0

    plan = plan_of(precision=precision)
    plain = found_in(Around(roots), plan=plan)
    with torch.autograd.set_detect_anomaly(True):
        searched = found_in(Around(roots), plan=plan)
        assert torch.is_anomaly_check_nan_enabled()
    assert (plain.phase, plain.op) == ("backward", "SqrtBackward0")
    assert searched == plain


# ---- the engine


def test_a_run_that_only_skips_ends_in_a_diagnosis():
    model = Around(lambda x: torch.log(x - x))
    engine = engine_of(model, max_skipped_windows=3)
    batch = torch.ones(4, 4)
    assert engine.step(batch).skipped
    assert engine.step(batch).skipped
    before = state_of(model)
    with pytest.raises(NonFiniteError) as caught:
        engine.step(batch)
    found = caught.value.diagnosis
    assert (found.module, found.op, found.phase) == ("inner", "log", "forward")
    assert "log in forward, module 'inner'" in str(caught.value)
    assert caught.value.hint == found.remedy
    assert caught.value.windows == 3
    assert same_bits(before, state_of(model))


def test_the_policy_raise_ends_in_a_diagnosis_and_names_the_parameters():
    model = Around(lambda x: torch.log(x - x))
    with pytest.raises(NonFiniteError) as caught:
        engine_of(model, nonfinite="raise").step(torch.ones(4, 4))
    assert caught.value.diagnosis.module == "inner"
    assert "first.weight" in caught.value.parameters
    assert all(parameter.grad is None for parameter in model.parameters())


def test_windows_of_micro_batches_are_diagnosed_too():
    engine = engine_of(nn.Linear(4, 4), nonfinite="raise")
    with pytest.raises(NonFiniteError) as caught:
        engine.step_window([torch.ones(2, 4), torch.full((2, 4), math.nan)])
    assert caught.value.diagnosis.micro_batch == 1


def test_the_scale_ends_at_its_floor_and_not_at_zero():
    model = Around(lambda x: torch.log(x - x))
    engine = engine_of(
        model, precision="16-mixed", max_skipped_windows=6, loss_scale=LossScale(init_scale=32.0, floor=8.0)
    )
    scales = [engine.step(torch.ones(4, 4)).loss_scale for _ in range(5)]
    assert scales == [32.0, 16.0, 8.0, 8.0, 8.0]
    with pytest.raises(NonFiniteError) as caught:
        engine.step(torch.ones(4, 4))
    assert caught.value.loss_scale == 8.0
    assert caught.value.diagnosis.op == "log"
    assert engine.state_dict(model=False)["scaler"]["scale"] == 8.0


def test_the_diagnosis_is_of_the_scale_that_the_window_had():
    engine = engine_of(one_weight(), precision="16-mixed", max_skipped_windows=1)
    with pytest.raises(NonFiniteError) as caught:
        engine.step(torch.full((1, 1), 10.0))
    assert (caught.value.diagnosis.loss_scale, caught.value.diagnosis.finite_loss_scale) == (65536.0, 4096.0)


@pytest.mark.parametrize("options", [{"nonfinite": "raise"}, {"max_skipped_windows": 1}])
def test_a_window_by_hand_says_which_gradients_are_not_finite(options):
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    engine = engine_of(model, **options)

    def by_hand():
        with engine.window([torch.ones(2, 4)]) as window:
            for micro_batch in window:
                window.backward(model["a"](micro_batch).mean() + (model["b"](micro_batch) * math.nan).mean())

    with pytest.raises(NonFiniteError) as caught:
        by_hand()
    assert caught.value.parameters == ("b.weight", "b.bias")
    assert "cannot be run again" in str(caught.value)
    assert caught.value.diagnosis.parameters == ("b.weight", "b.bias")


def test_the_diagnosis_of_an_engine_inside_of_a_window_by_hand_is_kept():
    inner = engine_of(Around(lambda x: torch.log(x - x)), nonfinite="raise")
    outer = engine_of(nn.Linear(4, 4))

    def by_hand():
        with outer.window([torch.ones(2, 4)]) as window:
            for micro_batch in window:
                inner.step(micro_batch)

    with pytest.raises(NonFiniteError) as caught:
        by_hand()
    assert caught.value.diagnosis.module == "inner"


def test_a_diagnosis_that_fails_never_hides_the_error():
    calls = []

    def loss(model, x):
        calls.append(1)
        if len(calls) > 1:
            raise ValueError("no second time")
        return model(x).mean() * math.nan

    model = nn.Linear(4, 4)
    engine = Engine(model, sgd(model), loss=loss, nonfinite="raise")
    with pytest.raises(NonFiniteError, match="no diagnosis: ValueError: no second time") as caught:
        engine.step(torch.ones(2, 4))
    assert caught.value.diagnosis is None
    assert caught.value.what == "the gradient of a window is not finite"


def test_memory_that_runs_out_during_the_diagnosis_is_said():
    calls = []

    def loss(model, x):
        calls.append(1)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("planted")
        return model(x).mean() * math.nan

    model = nn.Linear(4, 4)
    engine = Engine(model, sgd(model), loss=loss, nonfinite="raise")
    with pytest.raises(NonFiniteError, match="memory ran out during the diagnosis") as caught:
        engine.step(torch.ones(2, 4))
    assert caught.value.diagnosis is None


def test_a_window_that_is_finite_the_second_time_is_said_to_be():
    calls = []

    def loss(model, x):
        calls.append(1)
        return model(x).mean() * (math.nan if len(calls) == 1 else 1.0)

    model = nn.Linear(4, 4)
    engine = Engine(model, sgd(model), loss=loss, nonfinite="raise")
    with pytest.raises(NonFiniteError, match="all is finite when rank 0 runs the window again") as caught:
        engine.step(torch.ones(2, 4))
    assert caught.value.diagnosis.cause == "none"


def test_peers_4_an_inf_moves_neither_learning_rate_nor_counters_nor_an_average_of_real_updates():
    model = nn.Linear(4, 4)
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    engine = Engine(model, optimizer, loss=mean_output, scheduler=scheduler)
    average = torch.optim.swa_utils.AveragedModel(model)
    before = state_of(model, optimizer)
    result = engine.step(torch.full((4, 4), math.inf))
    if not result.skipped:
        average.update_parameters(model)
    assert result.skipped
    assert (engine.step_count, engine.sample_count, engine.micro_step_count) == (0, 0, 0)
    assert (scheduler.get_last_lr(), average.n_averaged.item()) == ([0.1], 0)
    assert same_bits(before, state_of(model, optimizer))
    assert engine.step(torch.ones(4, 4)).step == 1
    assert scheduler.get_last_lr() == [0.05]
