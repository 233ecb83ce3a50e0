"""Normalisation layers: frozen, converted, or with another momentum."""

import copy
import doctest
import io
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from models import ConvBatchNorm, gradients, same_bits, squared_error, state_of
from snugfit import Segment, UnsupportedError, checkpointing, norms
from snugfit.errors import PlanError
from tolerances import EXACT_VALUE, FLOAT64

BATCH_NORMS = [
    (nn.BatchNorm1d, (4,)),
    (nn.BatchNorm1d, (4, 3)),
    (nn.BatchNorm2d, (4, 3, 3)),
    (nn.BatchNorm3d, (4, 2, 3, 3)),
    (nn.SyncBatchNorm, (4, 3)),
]
LONELY = "ignore:to_sync synchronises ranks:UserWarning"


class Activated(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


def trained(layer):
    """A layer whose parameters and statistics are not those it was built with."""
    with torch.no_grad():
        for tensor in (layer.weight, layer.running_var):
            tensor.uniform_(0.5, 2)
        for tensor in (layer.bias, layer.running_mean):
            tensor.normal_()
    return layer


def image_batch(size):
    return {"x": torch.randn(size, 3, 6, 6, dtype=torch.float64), "y": torch.randn(size, 2, dtype=torch.float64)}


def test_the_examples_of_the_documentation_are_true():
    failed, attempted = doctest.testmod(norms)
    assert failed == 0
    assert attempted > 3


# freeze


@pytest.mark.parametrize(("kind", "shape"), BATCH_NORMS)
def test_a_frozen_layer_normalises_with_its_statistics_whatever_train_says(kind, shape):
    layer = trained(kind(4))
    model = nn.Sequential(layer)
    x = torch.randn(5, *shape)
    wanted = copy.deepcopy(layer).eval()(x)
    before = state_of(model)
    norms.freeze(model)
    for mode in (True, False, True):
        model.train(mode)
        assert torch.equal(model(x), wanted)
    assert same_bits(state_of(model), before)
    assert not layer.training
    assert model.training


def test_a_frozen_layer_still_trains_its_weight_and_bias():
    layer = trained(nn.BatchNorm1d(4))
    norms.freeze(layer)
    layer(torch.randn(5, 4)).square().sum().backward()
    assert layer.weight.grad.abs().min() > 0
    assert layer.bias.grad.abs().min() > 0


def test_c077_frozen_statistics_stay_and_micro_batches_give_the_gradient_of_the_batch():
    layer = nn.BatchNorm1d(1).double()
    twin = copy.deepcopy(layer)
    x = torch.tensor([[-1.0], [1.0], [1.0], [3.0]], dtype=torch.float64)
    for one in (layer, twin):
        norms.freeze(one)
    for part in x.split(2):
        (layer(part).square().mean() / 2).backward()
    twin(x).square().mean().backward()
    assert (layer.running_mean.item(), layer.running_var.item(), int(layer.num_batches_tracked)) == (0.0, 1.0, 0)
    torch.testing.assert_close(layer.weight.grad, twin.weight.grad, rtol=FLOAT64, atol=0)
    torch.testing.assert_close(layer.bias.grad, twin.bias.grad, rtol=FLOAT64, atol=0)


@given(st.integers(2, 6), st.integers(1, 6))
def test_a_frozen_model_has_the_gradient_of_the_full_batch_however_it_is_cut(size, micro):
    model = ConvBatchNorm().double()
    twin = copy.deepcopy(model)
    batch = image_batch(size)
    for one in (model, twin):
        norms.freeze(one)
    for start in range(0, size, micro):
        part = {name: tensor[start : start + micro] for name, tensor in batch.items()}
        (squared_error(model, part) * (len(part["x"]) / size)).backward()
    squared_error(twin, batch).backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, gradients(twin)[name], rtol=FLOAT64, atol=FLOAT64)


def test_freezing_twice_is_freezing_once_and_removing_gives_the_mode_that_was_asked_for():
    model = ConvBatchNorm()
    first = norms.freeze(model)
    second = norms.freeze(model)
    assert first.layers == second.layers == ("features.0.1", "features.1.1")
    first.remove()
    assert not model.train().features[0][1].training  # the second still needs it
    second.remove()
    assert all(module.training for module in model.modules())
    second.remove()
    norms.freeze(model)
    model.eval()
    norms.freeze(model).remove()
    assert not any(module.training for module in model.modules())
    assert not any("train" in vars(module) for module in model.modules())


def test_a_frozen_model_can_be_copied_and_saved_whole_and_the_copy_stays_frozen():
    model = ConvBatchNorm()
    norms.freeze(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        twin.train()
        twin(torch.randn(2, 3, 6, 6))
        assert twin.features[0][1].num_batches_tracked == 0
        norms.freeze(twin).remove()
        assert twin.features[0][1].training
    assert not model.features[0][1].training


def test_a_frozen_layer_is_recomputed_as_it_was():
    model, twin = ConvBatchNorm().double(), None
    norms.freeze(model)
    twin = copy.deepcopy(model)
    checkpointing.apply(model, [Segment("features.0.1"), Segment("features.1")])
    batch = image_batch(4)
    for one in (model, twin):
        one.train()
        squared_error(one, batch).backward()
    assert all(torch.equal(gradient, gradients(twin)[name]) for name, gradient in gradients(model).items())


def test_layers_that_have_nothing_to_freeze_are_refused_by_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
    with pytest.raises(PlanError, match=r"track_running_stats=False of 1") as caught:
        norms.freeze(model)
    assert caught.value.names == ("1",)


@pytest.mark.parametrize(
    "function",
    [
        norms.freeze,
        lambda model: norms.to_group_norm(model, 2),
        norms.to_sync,
        lambda model: norms.set_momentum(model, 0.1),
    ],
)
def test_a_model_without_such_layers_is_warned_of(function):
    with pytest.warns(UserWarning, match="no effect"):
        function(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))


# to_group_norm


@pytest.mark.parametrize(("kind", "shape"), BATCH_NORMS)
@pytest.mark.parametrize("groups", [1, 2])
def test_groupnorm_has_the_parameters_of_the_batchnorm_and_normalises_each_sample_by_itself(kind, shape, groups):
    layer = trained(kind(4, eps=1e-3, dtype=torch.float64))
    parameters = layer.weight, layer.bias
    model = norms.to_group_norm(nn.Sequential(layer), groups)
    norm = model[0]
    x = torch.randn(5, *shape, dtype=torch.float64)
    assert type(norm) is nn.GroupNorm
    assert (norm.weight, norm.bias) == parameters
    assert (norm.num_groups, norm.num_channels, norm.eps, norm.training) == (groups, 4, 1e-3, True)
    wanted = nn.functional.group_norm(x, groups, *parameters, 1e-3)
    assert torch.equal(model(x), wanted)
    torch.testing.assert_close(torch.cat([model(part) for part in x.split(2)]), wanted, rtol=FLOAT64, atol=FLOAT64)
    assert list(model.state_dict()) == ["0.weight", "0.bias"]


def test_an_optimizer_made_before_trains_the_converted_model():
    model = ConvBatchNorm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    ours = list(map(id, model.parameters()))
    norms.to_group_norm(model, 2)
    assert list(map(id, model.parameters())) == ours
    model(torch.randn(2, 3, 6, 6)).square().sum().backward()
    optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert moved.count(True) >= len(moved) - 1  # a convolution's bias before a norm may have no effect


@pytest.mark.parametrize("convert", [lambda model: norms.to_group_norm(model, 2), norms.to_sync])
@pytest.mark.filterwarnings(LONELY)
class TestConversion:
    def test_a_layer_in_two_places_stays_one(self, convert):
        layer = nn.BatchNorm1d(4)
        model = nn.ModuleDict({"a": nn.Sequential(layer), "b": layer})
        convert(model)
        assert model["a"][0] is model["b"]
        assert not isinstance(model["b"], nn.BatchNorm1d)

    def test_a_model_that_is_a_batchnorm_itself_is_returned_converted(self, convert):
        layer = nn.BatchNorm1d(4)
        assert not isinstance(convert(layer), nn.BatchNorm1d)

    def test_a_model_that_contains_them_is_changed_in_place_and_returned(self, convert):
        model = ConvBatchNorm()
        assert convert(model) is model
        assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())

    def test_layers_without_parameters_or_without_bias_are_converted(self, convert):
        layers = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(4, bias=False))
        weight = layers[1].weight
        convert(layers)
        assert layers[0].weight is None
        assert layers[1].weight is weight
        assert layers[1].bias is None
        assert layers(torch.randn(3, 4, 2)).shape == (3, 4, 2)

    def test_mode_type_and_frozen_parameters_are_kept(self, convert):
        layer = nn.BatchNorm2d(4).bfloat16().eval()
        layer.weight.requires_grad = False
        model = convert(nn.Sequential(layer))
        assert not model[0].training
        assert model[0].weight.dtype == torch.bfloat16
        assert not model[0].weight.requires_grad

    def test_a_layer_with_a_forward_of_its_own_is_refused_by_name(self, convert):
        with pytest.raises(UnsupportedError, match="layer '1'") as caught:
            convert(nn.Sequential(nn.BatchNorm2d(4), Activated(4)))
        assert "Activated" in str(caught.value)

    @pytest.mark.parametrize(
        "put_on",
        [norms.freeze, norms.window_statistics, lambda model: checkpointing.apply(model, [Segment("0")])],
    )
    def test_a_layer_that_already_does_something_else_is_refused_by_name(self, convert, put_on):
        model = nn.Sequential(nn.BatchNorm2d(4))
        put_on(model)
        with pytest.raises(PlanError, match="layer '0'"):
            convert(model)
        assert isinstance(model[0], nn.BatchNorm2d)

    def test_a_lazy_layer_is_refused_by_name(self, convert):
        with pytest.raises(UnsupportedError, match="layer '0'"):
            convert(nn.Sequential(nn.LazyBatchNorm1d()))


@pytest.mark.parametrize("groups", [3, 0, -2, 8, 2.0, True])
def test_groups_that_do_not_divide_the_channels_are_refused_with_those_that_do(groups):
    model = nn.Sequential(nn.BatchNorm2d(6 if groups != 3 else 4), nn.Identity())
    with pytest.raises(PlanError, match="layer '0'") as caught:
        norms.to_group_norm(model, groups)
    assert caught.value.divisors == ((1, 2, 4) if groups == 3 else (1, 2, 3, 6))
    assert f"groups={groups!r}" in str(caught.value)
    assert isinstance(model[0], nn.BatchNorm2d)


def test_the_hint_of_refused_groups_is_a_number_that_fits_all_layers():
    model = nn.Sequential(nn.BatchNorm2d(12), nn.BatchNorm2d(18))
    with pytest.raises(PlanError, match=r"use groups=6 "):
        norms.to_group_norm(model, 4)
    norms.to_group_norm(model, 6)


def test_one_channel_per_group_without_positions_is_warned_of():
    with pytest.warns(UserWarning, match="becomes 0"):
        model = norms.to_group_norm(nn.Sequential(nn.BatchNorm1d(4).double()), 4)
    assert model(torch.randn(3, 4, dtype=torch.float64)).abs().max() < FLOAT64


# to_sync


def test_to_sync_on_one_rank_says_that_it_changes_nothing_and_changes_nothing():
    model = ConvBatchNorm()
    twin = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="ranks, not micro-batches: on one device it changes nothing"):
        norms.to_sync(model)
    assert {type(layer) for _, layer in norms.batch_norms(model)} == {nn.SyncBatchNorm}
    x = torch.randn(4, 3, 6, 6)
    assert torch.equal(model(x), twin(x))
    assert same_bits(state_of(model), state_of(twin))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        norms.to_sync(model)  # nothing left to convert


# set_momentum


@pytest.mark.parametrize(("arguments", "momentum"), [((0.05,), 0.05), ((0.99, "old"), 0.01), ((None,), None)])
@pytest.mark.parametrize(("kind", "shape"), BATCH_NORMS)
def test_the_momentum_of_every_layer_is_set_in_either_convention(kind, shape, arguments, momentum):
    model = nn.Sequential(kind(4))
    norms.set_momentum(model, *arguments)
    assert model[0].momentum == (None if momentum is None else pytest.approx(momentum, rel=FLOAT64))


@given(st.floats(0, 1))
def test_both_conventions_move_statistics_alike(weight):
    new, old = nn.BatchNorm1d(1).double(), nn.BatchNorm1d(1).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        norms.set_momentum(new, weight)
    norms.set_momentum(old, 1 - weight, weight_of="old")
    x = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    new(x)
    old(x)
    assert new.running_mean.item() == pytest.approx(2 * weight, abs=FLOAT64)
    torch.testing.assert_close(old.running_mean, new.running_mean, rtol=FLOAT64, atol=FLOAT64)


@pytest.mark.parametrize("value", [0.9, 0.99])
def test_a_momentum_that_looks_like_the_other_convention_is_warned_of(value):
    with pytest.warns(UserWarning, match="weight_of='old'"):
        norms.set_momentum(nn.BatchNorm1d(1), value)


@pytest.mark.parametrize(
    "arguments", [(-0.1,), (1.1,), (float("nan"),), ("0.1",), (True,), (0.1, "torch"), (None, "old")]
)
def test_a_momentum_that_is_no_weight_is_refused(arguments):
    layer = nn.BatchNorm1d(1)
    with pytest.raises(PlanError, match="momentum"):
        norms.set_momentum(layer, *arguments)
    assert layer.momentum == 0.1


def test_instancenorm_with_statistics_takes_a_momentum_but_not_none():
    model = nn.Sequential(nn.InstanceNorm1d(1, track_running_stats=True), nn.InstanceNorm1d(1), nn.BatchNorm1d(1))
    norms.set_momentum(model, 0.3)
    assert [layer.momentum for layer in model] == [0.3, 0.1, 0.3]
    with pytest.raises(PlanError, match="layer '0'"):
        norms.set_momentum(model, None)
    assert model[2].momentum == 0.3


def test_c077_the_corrected_momentum_forgets_as_much_in_a_window_as_the_whole_one_in_a_step():
    layer = nn.BatchNorm1d(1)
    norms.set_momentum(layer, norms.corrected_momentum(0.1, 2))
    for values in ([-1.0, 1.0], [1.0, 3.0]):
        layer(torch.tensor(values)[:, None])
    assert layer.momentum == pytest.approx(1 - 0.9**0.5, rel=FLOAT64)
    assert layer.running_mean.item() == pytest.approx(0.1026334, abs=EXACT_VALUE)


@given(st.floats(0, 1), st.integers(1, 128))
def test_a_corrected_momentum_leaves_the_old_value_the_same_weight(momentum, steps):
    corrected = norms.corrected_momentum(momentum, steps)
    assert (1 - corrected) ** steps == pytest.approx(1 - momentum, rel=FLOAT64 * steps, abs=FLOAT64)


@pytest.mark.parametrize("arguments", [(1.5, 2), (None, 2), (0.1, 0), (0.1, 1.5), (0.1, True)])
def test_a_correction_of_no_momentum_or_no_window_is_refused(arguments):
    with pytest.raises(PlanError):
        norms.corrected_momentum(*arguments)


def test_the_layers_that_couple_samples_are_named():
    model = nn.Sequential(
        nn.BatchNorm1d(2),
        nn.BatchNorm1d(2).eval(),
        nn.BatchNorm1d(2, track_running_stats=False).eval(),
        nn.LayerNorm(2),
    )
    assert norms.batch_coupled(model) == ("0", "2")
