"""The loss scale: how it moves, what it bounds, and gradients that are unscaled."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mixed_precision import BF16, PRECISIONS, make
from models import LinearStack, Weight, mean_product, regression_batch, squared_error
from snugfit import LossScale, PlanError
from snugfit.training import weighting
from snugfit.training.precision import Scaler, multiply, scaler, total_norm
from tolerances import FP16_SMALL_GRADIENT


def values(*numbers):
    return [torch.full((1,), float(number)) for number in numbers]


# the loss scale


def test_the_scale_backs_off_at_an_overflow_and_grows_after_clean_windows():
    scale = Scaler(LossScale(init_scale=8.0, growth_interval=2))
    scale.update(found_inf=True)
    assert scale.scale == 4.0
    scale.update(found_inf=False)
    assert scale.scale == 4.0
    scale.update(found_inf=False)
    assert scale.scale == 8.0


def test_an_overflow_starts_the_run_of_clean_windows_anew():
    scale = Scaler(LossScale(init_scale=8.0, growth_interval=2))
    for found in (False, True, False):
        scale.update(found)
    assert scale.scale == 4.0


def test_the_scale_keeps_within_floor_and_cap():
    scale = Scaler(LossScale(init_scale=2.0, floor=2.0, cap=2.0, growth_interval=1))
    scale.update(found_inf=True)
    assert scale.scale == 2.0
    scale.update(found_inf=False)
    assert scale.scale == 2.0


HISTORIES = st.lists(st.booleans(), max_size=40)


@given(
    HISTORIES,
    st.integers(1, 5),
    st.sampled_from([1.5, 2.0, 4.0]),  # torch refuses 1
    st.sampled_from([0.25, 0.5, 0.75]),
    st.sampled_from([1.0, 3.0, 65536.0]),
)
def test_without_bounds_it_is_the_scale_of_torch(history, interval, growth, backoff, start):
    bounds = {"floor": 2.0**-100, "cap": 2.0**100}
    settings = {"backoff_factor": backoff, "growth_interval": interval}
    ours = Scaler(LossScale(init_scale=start, growth_factor=growth, **settings, **bounds))
    theirs = torch.amp.GradScaler("cpu", init_scale=start, growth_factor=growth, **settings)
    parameter = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    theirs.scale(torch.ones(()))
    for found in history:
        parameter.grad = torch.tensor(math.inf if found else 1.0)
        theirs.step(optimizer)
        theirs.update()
        ours.update(found)
        assert ours.scale == pytest.approx(theirs.get_scale(), rel=1e-5)


@given(HISTORIES, st.integers(1, 4), st.integers(0, 6), st.integers(0, 6), st.integers(0, 6), st.data())
def test_with_bounds_it_is_the_model_of_it(history, interval, low, above, start, data):
    """Powers of two, so that the model is one of integers: an exponent, and a run of clean windows."""
    high, begin = low + above, low + min(start, above)
    settings = LossScale(
        init_scale=2.0**begin, growth_interval=interval, floor=2.0**low, cap=2.0**high, growth_factor=4.0
    )
    scale, exponent, run = Scaler(settings), begin, 0
    for found in history:
        if data.draw(st.booleans()):  # saved and loaded in between
            saved, scale = scale.state_dict(), Scaler(settings)
            scale.load_state_dict(saved)
        scale.update(found)
        exponent, run = (max(exponent - 1, low), 0) if found else (exponent, run + 1)
        if run == interval:
            exponent, run = min(exponent + 2, high), 0
        assert scale.scale == 2.0**exponent


def test_a_saved_scale_goes_on_where_it_was():
    first, other = Scaler(LossScale(growth_interval=2)), Scaler(LossScale(growth_interval=2))
    first.update(found_inf=True)
    first.update(found_inf=False)
    other.load_state_dict(first.state_dict())
    other.update(found_inf=False)
    assert other.scale == 65536.0


def test_a_saved_scale_takes_the_bounds_and_the_interval_that_are_set_now():
    other = Scaler(LossScale(init_scale=8.0, floor=4.0, cap=16.0, growth_interval=2))
    other.load_state_dict({"scale": 1024.0, "clean_windows": 1500})
    assert other.scale == 16.0
    other.load_state_dict({"scale": 1.0, "clean_windows": 1500})
    assert other.scale == 4.0
    other.update(found_inf=False)  # the run is longer than the interval that is set now
    assert other.scale == 8.0


@pytest.mark.parametrize("name", ["init_scale", "growth_factor", "backoff_factor", "growth_interval", "floor", "cap"])
@pytest.mark.parametrize("value", [math.nan, math.inf, "2", None, True])
def test_a_setting_of_the_scale_that_is_no_number_is_refused(name, value):
    with pytest.raises(PlanError, match=name):
        LossScale(**{name: value})


@pytest.mark.parametrize("value", [3, 65536.0, "65536", torch.amp.GradScaler("cpu", enabled=False)])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_something_else_than_a_loss_scale_is_refused_under_every_precision(value, precision):
    with pytest.raises(PlanError, match="loss_scale") as caught:
        make(Weight(), mean_product, loss_scale=value, precision=precision)
    assert caught.value.hint


def test_c035_fp16_without_a_loss_scale_has_to_be_said_and_is_warned_about():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    with pytest.warns(UserWarning, match=r"loss scale that stays 1.*become 0"):
        engine = make(
            model,
            lambda m, x: m(x).float().mean() * 1e-4,
            precision="16-mixed",
            loss_scale=LossScale(init_scale=1, growth_factor=1),
        )
    result = engine.step(torch.full((1, 1), 1e-4))
    assert (result.loss_scale, result.skipped, model.weight.item()) == (1.0, False, 0.0)  # 1e-8 is 0 in fp16


@pytest.mark.parametrize("given_scale", [None, LossScale(init_scale=8.0)])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_c035_only_fp16_has_a_loss_scale(precision, given_scale):
    assert scaler(precision, given_scale) is None


def test_c035_a_small_gradient_survives_fp16():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    engine = make(model, lambda m, x: m(x).float().mean() * 1e-4, precision="16-mixed")
    assert engine.step(torch.full((1, 1), 1e-4)).loss_scale == 65536.0
    assert -model.weight.item() == pytest.approx(1e-8, rel=FP16_SMALL_GRADIENT)


def half_product(model, micro_batch):
    """w * x, whose gradient passes through half precision."""
    return (model.w.half() * micro_batch.half()).mean()


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_c043_a_scale_that_is_too_high_is_found_within_four_skipped_windows(parts):
    engine = make(Weight(0.0), half_product, precision="16-mixed")
    results = [engine.step_window(values(*[10] * parts)) for _ in range(5)]
    if parts == 1:
        assert [result.skipped for result in results] == [True] * 4 + [False]
        assert [result.loss_scale for result in results] == [65536.0, 32768.0, 16384.0, 8192.0, 4096.0]
        assert engine.model.w.item() == -10.0
    else:  # the mean of more micro-batches leaves more room
        first = next(i for i, result in enumerate(results) if not result.skipped)
        assert results[first].loss_scale == 4096.0 * parts
        assert engine.model.w.item() == -10.0 * (len(results) - first)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_c043_a_search_for_anomalies_takes_no_overflow_for_a_bug_and_finds_a_bug():
    def loss(model, x):  # the second half is 0 * inf, a NaN, where the scaled gradient overflows
        return (half_product(model, x) * torch.tensor([1.0, 0.0]).half()).sum()

    engine = make(Weight(0.0), loss, precision="16-mixed")
    with torch.autograd.set_detect_anomaly(True):
        results = [engine.step(torch.tensor([10.0])) for _ in range(5)]
        assert torch.is_anomaly_check_nan_enabled()
        wrong = make(Weight(0.0), lambda model, x: (model(x) * 0).sqrt().sum() * 0.0)
        with pytest.raises(RuntimeError, match="nan values"):
            wrong.step(torch.tensor([10.0]))
    assert [result.skipped for result in results] == [True] * 4 + [False]
    assert results[4].loss_scale == 4096.0
    assert engine.model.w.item() == -10.0


@pytest.mark.parametrize("infinite", [(), (1,), (1, 2), (0, 1, 2, 3)])
def test_c031_the_scale_is_frozen_for_the_length_of_a_window_and_moves_once(infinite):
    model, seen = Weight(0.0), []
    model.w.register_hook(lambda gradient: seen.append(gradient.item()))
    settings = LossScale(init_scale=1024.0, growth_interval=1)
    engine = make(model, mean_product, precision="16-mixed", loss_scale=settings)
    parts = values(*[math.inf if i in infinite else 2 for i in range(4)])
    result = engine.step_window(parts)
    assert {value for value in seen if math.isfinite(value)} <= {2 * 1024.0 / 4}
    assert result.skipped == bool(infinite)
    assert engine.state_dict()["scaler"]["scale"] == (512.0 if infinite else 2048.0)


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("bad", [True, False])
def test_several_optimizers_share_one_scale_and_back_off_or_grow_once_per_window(number, bad):
    model = nn.ModuleList(Weight(0.0) for _ in range(number))
    optimizers = [torch.optim.SGD(part.parameters(), lr=1.0) for part in model]
    settings = LossScale(init_scale=8.0, growth_interval=1)
    engine = make(
        model, lambda m, x: sum(part(x).mean() for part in m), optimizers, precision="16-mixed", loss_scale=settings
    )
    result = engine.step_window(values(1, math.inf if bad else 1))
    assert result.skipped == bad
    assert engine.state_dict()["scaler"]["scale"] == (4.0 if bad else 16.0)
    assert {part.w.item() for part in model} == {0.0 if bad else -1.0}


def test_c032_an_optimizer_that_owns_no_parameters_at_all_is_left_out():
    model = Weight(0.0)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0), torch.optim.SGD([{"params": []}], lr=1.0)]
    engine = make(model, mean_product, optimizers, precision="16-mixed")
    assert engine.step_window(values(2)).step == 1
    assert model.w.item() == -2.0


@pytest.mark.parametrize("scale", [1.0, 1024.0, 65536.0])
@pytest.mark.parametrize("limit", [None, 1.0, 0.25])
def test_c026_norm_and_clip_see_the_unscaled_gradient(scale, limit):
    engine = make(
        Weight(0.0), mean_product, precision="16-mixed", loss_scale=LossScale(init_scale=scale), max_grad_norm=limit
    )
    result = engine.step_window(values(0.5, 0.5))
    assert float(result.grad_norm) == 0.5
    assert -engine.model.w.item() == pytest.approx(0.25 if limit == 0.25 else 0.5, rel=1e-5)


@pytest.mark.parametrize("limit", [None, 1.0])
@pytest.mark.parametrize("refused", [(0,), (1,), (0, 1), (0, 2)])
def test_c028_after_refused_updates_the_next_windows_work(refused, limit):
    engine = make(Weight(0.0), mean_product, precision="16-mixed", max_grad_norm=limit)
    moved = 0.0
    for i in range(4):
        with engine.window(values(0.5, 0.5)) as window:
            for micro_batch in window:
                window.backward(mean_product(engine.model, micro_batch))
            if i in refused:
                window.skip("norm spike")
        moved -= 0.0 if i in refused else 0.5
        assert (window.result.skipped, window.result.loss_scale) == (i in refused, 65536.0)
        assert engine.model.w.grad is None
    assert engine.model.w.item() == moved


# unscaling


def test_gradients_are_multiplied_by_a_number_or_by_a_tensor_whatever_their_types():
    for factor in (0.25, torch.tensor(0.25, dtype=torch.float64)):
        found = [torch.full((2,), 8.0), torch.full((3,), 8.0, dtype=torch.float64)]
        multiply(found, factor)
        assert [gradient.unique().tolist() for gradient in found] == [[2.0], [2.0]]


@given(st.floats(width=32, min_value=2.0**-60, max_value=2.0**60), st.integers(0, 24))
def test_c053_unscaling_in_fp32_by_a_power_of_two_is_exact(value, exponent):
    gradient = torch.tensor([value])
    scaled = gradient * 2.0**exponent
    multiply([scaled], 1.0 / 2.0**exponent)
    assert torch.equal(scaled, gradient)


class NoDouble(TorchDispatchMode):
    """Refuses 64-bit floats, as MPS does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if any(isinstance(value, torch.Tensor) and value.dtype == torch.float64 for value in (result, *args)):
            raise TypeError(f"{func} with a 64-bit float")
        return result


def test_c053_a_window_needs_no_64_bit_floats():
    engine = make(LinearStack(), squared_error, precision="16-mixed", micro_batch_size=3, max_grad_norm=1.0)
    batch = regression_batch(8)
    with NoDouble():
        assert not engine.step(batch).skipped


def test_c053_a_count_that_only_the_device_knows_is_fp32_where_there_is_nothing_larger():
    for kind, dtype in (("mps", torch.float32), ("cpu", torch.float64), ("cuda", torch.float64)):
        assert weighting.as_float(SimpleNamespace(device=SimpleNamespace(type=kind), to=lambda dtype: dtype)) == dtype


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 60000.0), (BF16, 1.5)])
def test_the_norm_of_half_precision_gradients_is_taken_in_fp32(dtype, value):
    found = [torch.full((1000,), value, dtype=dtype), torch.ones(3)]
    exact = torch.cat([gradient.double() for gradient in found]).norm().item()
    assert total_norm(found).item() == pytest.approx(exact, rel=1e-6)
    assert nn.utils.get_total_norm(found).item() != pytest.approx(exact, rel=1e-3)


def test_the_norm_of_fp32_gradients_is_torch_s_own_bit_for_bit():
    found = [torch.randn(17, 5), torch.randn(3)]
    assert torch.equal(total_norm(found), nn.utils.get_total_norm(found))
    assert total_norm([]).item() == 0.0
