"""Running statistics of a window: those of one big batch over the same activations."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import strategies
from snugfit import Segment, UnsupportedError, checkpointing, norms
from snugfit.training.running_statistics import pooled
from snugfit.training.torch_private import in_backward
from tolerances import CUT_FLOAT32, EXACT_VALUE, FLOAT64, POOLED_FLOAT32

SHAPES = {"1d": (3,), "1d long": (3, 2), "2d": (3, 2, 2), "3d": (3, 2, 1, 2)}
KINDS = {
    "1d": nn.BatchNorm1d,
    "1d long": nn.BatchNorm1d,
    "2d": nn.BatchNorm2d,
    "3d": nn.BatchNorm3d,
}


class Activated(nn.BatchNorm2d):
    """A subclass with a forward of its own, as image models have it."""

    def forward(self, x):
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        momentum = self.momentum
        statistics = {"running_mean": self.running_mean, "running_var": self.running_var}
        return F.batch_norm(x, **statistics, training=self.training, momentum=momentum, eps=self.eps).relu()


class Halves(nn.BatchNorm1d):
    """Normalises the halves of a micro-batch one by one."""

    def forward(self, x):
        return torch.cat([super(Halves, self).forward(half) for half in x.chunk(2)])


def statistics(layer):
    return layer.running_mean, layer.running_var


def assert_close(found, wanted):
    for one, other in zip(statistics(found), statistics(wanted), strict=True):
        tolerance = {"rtol": FLOAT64, "atol": FLOAT64} if one.dtype == torch.float64 else CUT_FLOAT32
        torch.testing.assert_close(one, other, **tolerance)
    assert found.num_batches_tracked == wanted.num_batches_tracked


@st.composite
def ways_of_cutting(draw):
    """Sizes of the micro-batches of a window, of two samples at least, as BatchNorm needs them."""
    return [size + 1 for size in draw(strategies.cuts(draw(st.integers(1, 9))))]


@given(
    st.lists(ways_of_cutting(), min_size=1, max_size=3),
    st.sampled_from(sorted(KINDS)),
    st.sampled_from([0.1, 0.9, 1.0, 0.0, None]),
    st.sampled_from([torch.float64, torch.float32]),
    st.integers(0, 1000),
)
def test_statistics_of_a_window_are_those_of_one_big_batch_however_it_is_cut(windows, kind, momentum, dtype, seed):
    torch.manual_seed(seed)
    layer = KINDS[kind](3, momentum=momentum, dtype=dtype)
    whole = copy.deepcopy(layer)
    handle = norms.window_statistics(layer)
    for sizes in windows:
        x = 3 * torch.randn(sum(sizes), *SHAPES[kind], dtype=dtype) + 5
        before = [tensor.clone() for tensor in statistics(layer)]
        for part in x.split(sizes):
            assert torch.equal(layer(part), F.batch_norm(part, None, None, layer.weight, layer.bias, training=True))
        assert all(map(torch.equal, before, statistics(layer)))
        handle.update()
        whole(x)
        assert_close(layer, whole)


def test_c077_the_window_has_the_statistics_of_a_batch_of_four():
    layer = nn.BatchNorm1d(1)
    handle = norms.window_statistics(layer)
    for values in ([-1.0, 1.0], [1.0, 3.0]):
        layer(torch.tensor(values)[:, None])
    handle.update()
    assert layer.running_mean.item() == pytest.approx(0.1, abs=EXACT_VALUE)
    assert layer.running_var.item() == pytest.approx(0.9 + 0.8 / 3, abs=EXACT_VALUE)  # 1.1667
    assert layer.num_batches_tracked == 1


def test_c077_plain_accumulation_moves_twice_and_misses_the_variance_between_micro_batches():
    layer = nn.BatchNorm1d(1)
    for values in ([-1.0, 1.0], [1.0, 3.0]):
        layer(torch.tensor(values)[:, None])
    assert layer.running_mean.item() == pytest.approx(0.2, abs=EXACT_VALUE)
    assert layer.running_var.item() == pytest.approx(1.19, abs=EXACT_VALUE)
    assert layer.num_batches_tracked == 2


def test_a_large_mean_costs_no_digits_of_the_variance():
    layer = nn.BatchNorm1d(1, momentum=1.0)
    x = 1e3 + torch.randn(64, 1)
    handle = norms.window_statistics(layer)
    for part in x.split(4):
        layer(part)
    handle.update()
    assert layer.running_var.item() == pytest.approx(x.double().var().item(), rel=POOLED_FLOAT32)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("kind", [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d])
def test_instancenorm_with_running_statistics_moves_once_as_with_the_big_batch(kind, batched):
    layer = kind(3, track_running_stats=True, dtype=torch.float64)
    whole = copy.deepcopy(layer)
    shape = (3, *(2,) * (1 + [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d].index(kind)))
    x = torch.randn(6, *shape, dtype=torch.float64)
    handle = norms.window_statistics(layer)
    for part in x.split([3, 2, 1]) if batched else x:
        layer(part)
    assert layer.running_mean.abs().max() == 0
    handle.update()
    whole(x)
    assert_close(layer, whole)


def test_syncbatchnorm_of_one_rank_is_pooled_like_batchnorm():
    layer = nn.SyncBatchNorm(3, dtype=torch.float64)
    whole = copy.deepcopy(layer)
    x = torch.randn(7, 3, 2, dtype=torch.float64)
    handle = norms.window_statistics(layer)
    for part in x.split([3, 2, 2]):
        layer(part)
    handle.update()
    whole(x)
    assert_close(layer, whole)


def test_a_subclass_whose_forward_calls_batch_norm_is_pooled():
    layer = Activated(3, dtype=torch.float64)
    whole = copy.deepcopy(layer)
    x = torch.randn(7, 3, 2, 2, dtype=torch.float64)
    handle = norms.window_statistics(layer)
    for part in x.split([3, 2, 2]):
        assert layer(part).min() >= 0
    handle.update()
    whole(x)
    assert_close(layer, whole)


class Silent(nn.BatchNorm1d):
    def forward(self, x):
        return (x - self.running_mean) * self.running_var.rsqrt()


class Detached(nn.BatchNorm1d):
    def forward(self, x):
        return F.batch_norm(x, self.running_mean.clone(), self.running_var.clone(), training=True)


@pytest.mark.parametrize("kind", [Silent, Detached, Halves])
def test_a_subclass_that_uses_its_statistics_otherwise_is_refused_by_name_and_left_as_it_was(kind):
    model = nn.Sequential(nn.Linear(3, 3), kind(3))
    before = copy.deepcopy(model.state_dict())
    norms.window_statistics(model)
    with pytest.raises(UnsupportedError, match="layer '1'") as caught:
        model(torch.randn(4, 3))
    assert kind.__name__ in str(caught.value)
    assert model[1].momentum == 0.1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_evaluation_layers_without_statistics_and_layers_that_are_not_called_are_left_alone():
    model = nn.ModuleList([nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False), nn.BatchNorm1d(2)])
    handle = norms.window_statistics(model)
    assert handle.layers == ("0", "2")
    model.eval()
    x = 4 * torch.ones(3, 2)
    torch.testing.assert_close(model[0](x), F.batch_norm(x, torch.zeros(2), torch.ones(2)))
    model.train()
    model[1](torch.randn(3, 2))
    model[2](torch.randn(3, 2))
    handle.update()
    assert [int(model[i].num_batches_tracked) for i in (0, 2)] == [0, 1]
    assert model[0].running_mean.abs().max() == 0


def test_a_layer_that_is_called_twice_per_micro_batch_counts_both_calls():
    layer = nn.BatchNorm1d(3, dtype=torch.float64)
    whole = copy.deepcopy(layer)
    handle = norms.window_statistics(layer)
    x = torch.randn(8, 3, dtype=torch.float64)
    for part in x.split(4):
        layer(part[:2])
        layer(part[2:])
    handle.update()
    whole(x)
    assert_close(layer, whole)


def test_a_shared_layer_is_pooled_once():
    layer = nn.BatchNorm1d(3)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    handle = norms.window_statistics(model)
    model(torch.randn(4, 3))
    handle.update()
    assert handle.layers == ("0",)
    assert layer.num_batches_tracked == 1


def test_discarded_statistics_move_nothing_and_the_next_window_is_normal():
    layer = nn.BatchNorm1d(3)
    whole = copy.deepcopy(layer)
    handle = norms.window_statistics(layer)
    layer(torch.full((2, 3), torch.nan))
    layer(torch.randn(2, 3))
    handle.discard()
    handle.update()
    assert layer.num_batches_tracked == 0
    x = torch.randn(6, 3)
    for part in x.split(3):
        layer(part)
    handle.update()
    handle.update()
    whole(x)
    assert_close(layer, whole)


def test_an_empty_micro_batch_counts_nothing():
    layer = nn.BatchNorm1d(3)
    whole = copy.deepcopy(layer)
    handle = norms.window_statistics(layer)
    x = torch.randn(4, 3)
    layer(x[:0])
    layer(x)
    handle.update()
    whole(x)
    assert_close(layer, whole)


def test_a_forward_that_fails_leaves_the_layer_as_it_was_and_counts_nothing():
    layer = nn.BatchNorm1d(3)
    handle = norms.window_statistics(layer)
    before = dict(layer._buffers)
    with pytest.raises(ValueError, match="more than 1 value"):
        layer(torch.randn(1, 3))
    assert layer.momentum == 0.1
    assert all(layer._buffers[name] is buffer for name, buffer in before.items())
    handle.update()
    assert layer.num_batches_tracked == 0


def test_removing_gives_torch_s_behaviour_back_and_twice_changes_nothing():
    layer, plain = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    handle = norms.window_statistics(layer)
    x = torch.randn(4, 3)
    layer(x)
    handle.remove()
    handle.remove()
    handle.update()
    layer(x)
    plain(x)
    assert_close(layer, plain)
    assert "forward" not in vars(layer)


def test_applying_it_again_takes_the_layers_over():
    layer, whole = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    x = torch.randn(4, 3)
    norms.window_statistics(layer)
    layer(x[:2])
    handle = norms.window_statistics(layer)
    layer(x[2:])
    handle.update()
    whole(x)
    assert_close(layer, whole)


def test_a_deep_copy_pools_for_itself():
    layer, whole = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    handle = norms.window_statistics(layer)
    twin = copy.deepcopy(layer)
    x = torch.randn(4, 3)
    twin(x)
    handle.update()
    assert layer.num_batches_tracked == 0
    norms.window_statistics(twin).update()
    whole(x)
    assert_close(twin, whole)


@pytest.mark.parametrize("segments", [[Segment("1")], [Segment(("0", "1", "2"))]], ids=["the layer", "around it"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_recomputed_micro_batch_is_counted_once(segments, momentum):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=momentum), nn.ReLU()).double()
    twin = copy.deepcopy(model)
    checkpointing.apply(model, segments)
    handles = [norms.window_statistics(model), norms.window_statistics(twin)]
    x = torch.randn(7, 3, dtype=torch.float64)
    for one in (model, twin):
        for part in x.split([3, 2, 2]):
            one(part).square().sum().backward()
    for handle in handles:
        handle.update()
    assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert model[1].num_batches_tracked == 1


def test_canary_autograd_says_whether_backward_is_running():
    seen = []
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda gradient: seen.append(in_backward()))
    weight.sum().backward()
    assert (seen, in_backward()) == ([True], False)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_micro_batch_recomputed_by_torch_s_own_checkpoint_is_counted_once(use_reentrant):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Sigmoid(), nn.Linear(3, 3)).double()
    twin = copy.deepcopy(model)
    handles = [norms.window_statistics(model), norms.window_statistics(twin)]
    for part in torch.randn(7, 3, dtype=torch.float64).split([3, 2, 2]):
        checkpoint(model, part.requires_grad_(), use_reentrant=use_reentrant).square().sum().backward()
        twin(part).square().sum().backward()
    for handle in handles:
        handle.update()
    assert_close(model[1], twin[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_are_pooled_in_single_precision(dtype):
    layer, whole = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    x = (10 + torch.randn(64, 3, 4, 4)).to(dtype)
    handle = norms.window_statistics(layer)
    for part in x.split(2):
        layer(part)
    handle.update()
    whole(x)
    torch.testing.assert_close(layer.running_mean, whole.running_mean, rtol=POOLED_FLOAT32, atol=0)
    torch.testing.assert_close(layer.running_var, whole.running_var, rtol=POOLED_FLOAT32, atol=0)


def test_half_precision_layers_keep_their_type():
    layer = nn.BatchNorm1d(3).bfloat16()
    handle = norms.window_statistics(layer)
    for part in torch.randn(8, 3).bfloat16().split(4):
        layer(part)
    handle.update()
    assert {tensor.dtype for tensor in statistics(layer)} == {torch.bfloat16}
    assert layer.running_mean.abs().max() > 0


@pytest.mark.parametrize("momentum", [0.1, None])
def test_no_value_is_read_while_a_window_runs(monkeypatch, momentum):
    layer = nn.BatchNorm1d(3, momentum=momentum)
    handle = norms.window_statistics(layer)

    def read(self, *args):
        raise AssertionError("a tensor's value was read")

    for name in ("item", "__float__", "__bool__", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, read)
    for _ in range(3):
        layer(torch.randn(4, 3)).sum().backward()
    handle.update()


def test_a_lazy_layer_is_refused_by_name_until_it_is_initialised():
    model = nn.Sequential(nn.Flatten(), nn.LazyBatchNorm1d())
    for function in (norms.window_statistics, norms.freeze):
        with pytest.raises(UnsupportedError, match="layer '1'"):
            function(model)
    model(torch.randn(2, 3))
    assert norms.window_statistics(model).layers == ("1",)


def test_nothing_is_held_but_the_statistics():
    layer = nn.BatchNorm1d(3)
    norms.window_statistics(layer)
    x = torch.randn(4, 3, requires_grad=True)
    layer(x).sum().backward()
    held = [tensor for tensor in vars(pooled(layer)).values() if isinstance(tensor, torch.Tensor)]
    assert len(held) == 2
    assert all(tensor.shape == (3,) and not tensor.requires_grad for tensor in held)


@pytest.mark.parametrize("first", ["recompute", "statistics"])
@pytest.mark.parametrize("removed", ["recompute", "statistics"])
def test_recomputing_and_window_statistics_come_and_go_in_any_order(first, removed):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())
    make = {
        "recompute": lambda: checkpointing.apply(model, [Segment(("0", "1", "2"))]),
        "statistics": lambda: norms.window_statistics(model),
    }
    order = [first, *(set(make) - {first})]
    handles = {name: make[name]() for name in order}
    model(torch.randn(4, 3)).sum().backward()
    assert model[1].num_batches_tracked == 0
    handles["statistics"].update()
    assert model[1].num_batches_tracked == 1
    handles[removed].remove()
    for handle in handles.values():
        handle.remove()
    assert all("forward" not in vars(layer) for layer in model)
    model(torch.randn(4, 3)).sum().backward()
    assert model[1].num_batches_tracked == 2
