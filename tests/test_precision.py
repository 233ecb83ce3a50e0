import pytest
import torch
from torch import nn

from models import LinearStack
from snugfit import LossScale, PlanError, UnsupportedError
from snugfit.training.precision import Scaler, autocast, multiply, refuse_half_weights


@pytest.mark.parametrize(
    ("precision", "dtype"), [("32-true", torch.float32), ("16-mixed", torch.float16), ("bf16-mixed", torch.bfloat16)]
)
def test_a_precision_sets_the_type_of_matrix_products(precision, dtype):
    layer = nn.Linear(4, 4)
    with autocast(precision, torch.device("cpu")):
        assert layer(torch.ones(2, 4)).dtype == dtype


def test_an_unknown_precision_and_one_that_is_not_built_are_told_apart():
    with pytest.raises(PlanError, match="'fp16'"):
        autocast("fp16", "cpu")
    with pytest.raises(UnsupportedError, match="bf16-true"):
        autocast("bf16-true", "cpu")


def test_without_the_cache_no_cast_copy_outlives_its_layer():
    layer = nn.Linear(4, 4, bias=False)
    with torch.no_grad(), autocast("bf16-mixed", "cpu", cache_enabled=False):
        layer(torch.ones(2, 4))
        layer.weight.zero_()
        assert layer(torch.ones(2, 4)).abs().sum() == 0  # a cached cast would still hold the old weight


def test_the_scale_backs_off_at_an_overflow_and_grows_after_clean_windows():
    scaler = Scaler(LossScale(init_scale=8.0, growth_interval=2))
    scaler.update(found_inf=True)
    assert scaler.scale == 4.0
    scaler.update(found_inf=False)
    assert scaler.scale == 4.0
    scaler.update(found_inf=False)
    assert scaler.scale == 8.0


def test_an_overflow_starts_the_run_of_clean_windows_anew():
    scaler = Scaler(LossScale(init_scale=8.0, growth_interval=2))
    for found in (False, True, False):
        scaler.update(found)
    assert scaler.scale == 4.0


def test_the_scale_keeps_within_floor_and_cap():
    scaler = Scaler(LossScale(init_scale=2.0, floor=2.0, cap=2.0, growth_interval=1))
    scaler.update(found_inf=True)
    assert scaler.scale == 2.0
    scaler.update(found_inf=False)
    assert scaler.scale == 2.0


def test_a_saved_scale_goes_on_where_it_was():
    scaler, other = Scaler(LossScale(growth_interval=2)), Scaler(LossScale(growth_interval=2))
    scaler.update(found_inf=True)
    scaler.update(found_inf=False)
    other.load_state_dict(scaler.state_dict())
    other.update(found_inf=False)
    assert other.scale == 65536.0


def test_gradients_are_multiplied_by_a_number_or_by_a_tensor_whatever_their_types():
    for factor in (0.25, torch.tensor(0.25, dtype=torch.float64)):
        gradients = [torch.full((2,), 8.0), torch.full((3,), 8.0, dtype=torch.float64)]
        multiply(gradients, factor)
        assert [gradient.unique().tolist() for gradient in gradients] == [[2.0], [2.0]]


def test_c034_half_precision_trainable_weights_are_refused_by_name_and_frozen_ones_are_fine():
    model = LinearStack()
    model.layers[1].half().requires_grad_(False)
    refuse_half_weights(model)
    model.layers[2].weight.data = model.layers[2].weight.data.half()
    with pytest.raises(PlanError) as caught:
        refuse_half_weights(model)
    assert caught.value.parameters == ("layers.2.weight",)
    assert "layers.2.weight" in caught.value.got
