"""The norm policies of a plan under the engine, and what a window without an update leaves behind."""

import copy
import random
import re
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import strategies
from models import ConvBatchNorm, same_bits, squared_error, state_of
from snugfit import Engine, Job, Loss, NonFiniteError, Plan, Segment, checkpointing, estimate, norms
from snugfit.training.build import build
from tolerances import EXACT_VALUE, FLOAT64

MICRO = "ignore:BatchNorm makes:UserWarning"
POLICIES = ["micro", "window", "frozen"]
pytestmark = pytest.mark.filterwarnings("ignore:out of memory:UserWarning")


class OneLayer(nn.Module):
    """BatchNorm over one channel and a weight, so that every number is known."""

    def __init__(self, kind=nn.BatchNorm1d, **settings):
        super().__init__()
        self.norm, self.w = kind(1, **settings), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.w * self.norm(x)


def square(model, x):
    return model(x).square().mean()


def engine_of(model, policy="micro", batch=4, micro=2, loss=square, **settings):
    recompute = settings.pop("recompute", ())
    plan = Plan(batch_size=batch, micro_batch_size=micro, norm_policy=policy, recompute=recompute)
    return Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, loss=loss, **settings)


def column(*values):
    return torch.tensor(values)[:, None]


def images(size, dtype=torch.float32):
    return {"x": torch.randn(size, 3, 6, 6, dtype=dtype), "y": torch.randn(size, 2, dtype=dtype)}


@pytest.mark.parametrize("recompute", [(), (Segment("norm"),)], ids=["plain", "recomputed"])
@pytest.mark.parametrize(
    ("policy", "mean", "variance", "tracked"),
    [("micro", 0.2, 1.19, 2), ("window", 0.1, 0.9 + 0.8 / 3, 1), ("frozen", 0.0, 1.0, 0)],
)
@pytest.mark.filterwarnings(MICRO)
def test_c077_each_policy_has_its_statistics(policy, mean, variance, tracked, recompute):
    model = OneLayer()
    engine_of(model, policy, recompute=recompute).step(column(-1.0, 1.0, 1.0, 3.0))
    assert model.norm.running_mean.item() == pytest.approx(mean, abs=EXACT_VALUE)
    assert model.norm.running_var.item() == pytest.approx(variance, abs=EXACT_VALUE)
    assert model.norm.num_batches_tracked == tracked


@pytest.mark.parametrize("around", ["norm", "whole"])
@pytest.mark.parametrize("policy", ["micro", "window"])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.BatchNorm1d, (2, 1)),
        (nn.BatchNorm1d, (2, 1, 1)),
        (nn.BatchNorm2d, (2, 1, 1, 1)),
        (nn.BatchNorm3d, (2, 1, 1, 1, 1)),
        (nn.SyncBatchNorm, (2, 1)),
    ],
)
def test_c075_every_kind_of_batchnorm_learns_once_from_a_recomputed_forward(kind, shape, policy, around):
    model = nn.Sequential(OneLayer(kind))
    segment = Segment("0.norm" if around == "norm" else "0")
    engine_of(model, policy, batch=2, recompute=(segment,)).step(torch.tensor([0.0, 2.0]).view(shape))
    norm = model[0].norm
    assert norm.running_mean.item() == pytest.approx(0.1, abs=EXACT_VALUE)
    assert norm.running_var.item() == pytest.approx(1.1, abs=EXACT_VALUE)
    assert norm.num_batches_tracked == 1


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_tracked_batches_grow_by_one_per_window_with_and_without_recomputation(steps, recompute):
    """Test 7 against the peers."""
    model = ConvBatchNorm()
    segments = checkpointing.blocks(model) if recompute else ()
    engine = engine_of(model, "window", batch=8, micro=8 // steps, loss=squared_error, recompute=segments)
    for window in range(1, 4):
        assert engine.step(images(8)).num_micro_batches == steps
        assert [int(layer.num_batches_tracked) for _, layer in norms.batch_norms(model)] == [window, window]


@given(strategies.cuts(8), st.booleans())
def test_the_policy_window_gives_the_statistics_of_the_first_layer_s_whole_batch(sizes, recompute):
    """The first layer's inputs do not depend on the cut; micro-batches of one sample have positions enough."""
    model = ConvBatchNorm().double()
    whole = copy.deepcopy(model.features[0])
    segments = checkpointing.blocks(model) if recompute else ()
    engine = engine_of(model, "window", batch=8, micro=8, loss=squared_error, recompute=segments)
    batch = images(8, torch.float64)
    parts = zip(*(tensor.split(sizes) for tensor in batch.values()), strict=True)
    engine.step_window([{"x": x, "y": y} for x, y in parts])
    whole(batch["x"])
    for name, wanted in whole[1].named_buffers():
        found = getattr(model.features[0][1], name)
        torch.testing.assert_close(found, wanted, rtol=FLOAT64, atol=FLOAT64)


def test_the_policy_changes_no_gradient_only_statistics():
    model = ConvBatchNorm()
    twin = copy.deepcopy(model)
    batch = images(8)
    results = [
        engine_of(one, policy, batch=8, micro=2, loss=squared_error).step(batch)
        for one, policy in ((model, "window"), (twin, "frozen"))
    ]
    assert results[0].loss != results[1].loss
    plain = ConvBatchNorm()
    plain.load_state_dict(model.state_dict())
    handle = norms.window_statistics(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = Engine(plain, torch.optim.SGD(plain.parameters(), lr=0.1), loss=squared_error, micro_batch_size=2)
        engine.step(batch)
    assert [int(layer.num_batches_tracked) for _, layer in norms.batch_norms(plain)] == [2, 2]  # the engine updates
    handle.update()
    assert [int(layer.num_batches_tracked) for _, layer in norms.batch_norms(plain)] == [2, 2]  # nothing is left


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.filterwarnings(MICRO)
def test_build_applies_the_policy_and_close_gives_the_plain_module_back(policy):
    model = ConvBatchNorm()
    job = Job(
        model, squared_error, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), lambda size: images(size)
    )
    engine = build(job, Plan(batch_size=4, micro_batch_size=2, norm_policy=policy), device="cpu")
    engine.step(images(4))
    tracked = {"micro": 2, "window": 1, "frozen": 0}[policy]
    assert model.features[0][1].num_batches_tracked == tracked
    with engine.evaluating():
        model(images(4)["x"])
    assert model.features[0][1].num_batches_tracked == tracked
    assert engine.close() is model
    model.train()(images(4)["x"])
    assert model.features[0][1].num_batches_tracked == tracked + 1


@pytest.mark.parametrize("device", ["cpu", "rtx-3060-12gb"])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("policy", ["window", "frozen"])
def test_the_policies_run_under_fake_tensors(policy, momentum, device):
    model = ConvBatchNorm()
    norms.set_momentum(model, momentum)
    before = state_of(model)
    job = Job(model, squared_error, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), images)
    plan = Plan(
        batch_size=6, micro_batch_size=2, norm_policy=policy, recompute=(Segment("features.0"), Segment("features.1.1"))
    )
    report = estimate(job, plan, device)
    assert report.peak_allocated_bytes > 0
    assert same_bits(state_of(model), before)


# the warning


@pytest.mark.parametrize("how", ["step", "step_window", "window"])
def test_several_micro_batches_under_the_policy_micro_are_warned_of_once_with_the_layers_and_the_way_out(how):
    model = ConvBatchNorm()
    engine = engine_of(model, batch=4, micro=2, loss=squared_error)

    def run():
        parts = [images(2), images(2)]
        if how == "step":
            engine.step(images(4))
        elif how == "step_window":
            engine.step_window(parts)
        else:
            with engine.window(parts) as window:
                for part in window:
                    window.backward(squared_error(model, part))

    with pytest.warns(UserWarning, match="not equivalent") as caught:
        run()
    assert len(caught) == 1
    text = str(caught[0].message)
    for part in ("features.0.1, features.1.1", "norm_policy='micro'", "norm_policy='window'", "to_group_norm"):
        assert part in text
    run()  # warnings are errors


def test_one_micro_batch_frozen_layers_and_other_layers_are_not_warned_of():
    engine_of(ConvBatchNorm(), batch=4, micro=4, loss=squared_error).step(images(4))
    frozen = ConvBatchNorm()
    norms.freeze(frozen)
    engine_of(frozen, batch=4, micro=2, loss=squared_error).step(images(4))
    engine_of(norms.to_group_norm(ConvBatchNorm(), 2), batch=4, micro=2, loss=squared_error).step(images(4))


def test_of_many_layers_the_first_are_named():
    model = nn.Sequential(*(nn.BatchNorm1d(1) for _ in range(12)))
    with pytest.warns(UserWarning, match=re.escape("6, 7 and 4 more layers")):
        engine_of(model).step(torch.randn(4, 1))


@pytest.mark.parametrize("policy", ["window", "frozen"])
def test_a_policy_without_layers_is_warned_of(policy):
    with pytest.warns(UserWarning, match=f"norm_policy='{policy}' has no effect"):
        engine_of(nn.Linear(1, 1), policy)


# windows without an update


def run_window(engine, batch, how):
    if how == "step":
        return engine.step(batch)
    if how == "step_window":
        return engine.step_window(list(batch.split(2)))
    if how == "run":
        return engine.runner.run(*engine.prepare(batch, 2))
    with engine.window(batch) as window:
        for part in window:
            window.backward(square(engine.model, part))
    return window.result


@pytest.mark.parametrize("how", ["step", "step_window", "run", "window"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("recompute", [(), (Segment("norm"),)], ids=["plain", "recomputed"])
@pytest.mark.filterwarnings(MICRO)
def test_a_non_finite_window_leaves_statistics_as_they_were_and_the_next_is_normal(how, policy, momentum, recompute):
    model = OneLayer(momentum=momentum)
    engine = engine_of(model, policy, recompute=recompute)
    run_window(engine, torch.randn(4, 1), how)
    before, twin = state_of(model), copy.deepcopy(model)
    bad = run_window(engine, column(1.0, 2.0, torch.nan, 4.0), how)
    assert bad.reason == "non-finite gradient"
    assert same_bits(state_of(model), before)
    good = torch.randn(4, 1)
    result = run_window(engine, good, how)
    assert not result.skipped
    other = engine_of(twin, policy)
    assert torch.equal(run_window(other, good, how).loss, result.loss)
    assert same_bits(state_of(model), state_of(twin))


@pytest.mark.filterwarnings(MICRO)
def test_random_states_go_on_after_a_skipped_window():
    class Noisy(OneLayer):
        def forward(self, x):
            return super().forward(x + torch.rand(()) + random.random() + np.random.rand())

    model = Noisy()
    engine = engine_of(model)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    engine.step(column(1.0, 2.0, torch.nan, 4.0))
    drawn = [torch.rand(()).item(), random.random(), np.random.rand()]
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    for draw in (lambda: torch.rand(()), random.random, np.random.rand):
        draw(), draw()
    assert drawn == [torch.rand(()).item(), random.random(), np.random.rand()]


@pytest.mark.parametrize("reason", ["empty", "refused", "raise", "error", "early", "out of memory"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.filterwarnings(MICRO)
def test_a_window_that_makes_no_update_for_any_reason_moves_no_buffer(policy, reason):
    model = OneLayer()
    model.register_buffer("calls", torch.zeros(()))
    engine = engine_of(model, policy, nonfinite="raise" if reason == "raise" else "skip")
    before = state_of(model)

    def loss(part):
        model.calls += 1
        value = square(model, part)
        return Loss(value * 0, torch.tensor(0.0)) if reason == "empty" else value

    def window(batch):
        with engine.window(batch) as window:
            for i, part in enumerate(window):
                window.backward(loss(part))
                if i == 1 and reason == "error":
                    raise KeyError("labels")
                if i == 1 and reason == "out of memory":
                    raise torch.OutOfMemoryError("CUDA out of memory")
                if i == 0 and reason == "early":
                    break
            if reason == "refused":
                window.skip("norm spike")
        return window.result

    last = torch.nan if reason == "raise" else 3.0
    batch = column(-1.0, 1.0, 1.0, last)
    if reason in ("empty", "refused"):
        assert window(batch).reason == reason
    else:
        errors = {"raise": NonFiniteError, "error": KeyError, "early": ValueError, "out of memory": RuntimeError}
        with pytest.raises(errors[reason]):
            window(batch)
    assert same_bits(state_of(model), before)


def test_an_out_of_memory_error_in_a_window_counts_no_micro_batch_twice():
    def loss(model, x):
        value = square(model, x)
        if len(x) > 2 and x[0] == 0:  # the second micro-batch of the first attempt
            raise torch.OutOfMemoryError("CUDA out of memory")
        return value

    model, whole = OneLayer(), nn.BatchNorm1d(1)
    batch = column(1.0, 2.0, 3.0, 4.0, 0.0, 5.0, 7.0, 9.0)
    result = engine_of(model, "window", batch=8, micro=4, loss=loss).step(batch)
    whole(batch)
    assert result.num_micro_batches == 4
    assert model.norm.running_mean.item() == pytest.approx(whole.running_mean.item(), abs=EXACT_VALUE)
    assert model.norm.running_var.item() == pytest.approx(whole.running_var.item(), abs=EXACT_VALUE)
    assert model.norm.num_batches_tracked == 1


def test_a_forward_between_windows_is_torch_s_and_is_not_counted_in_the_next_window():
    model, twin = OneLayer(), OneLayer()
    engine = engine_of(model, "window")
    engine.step(column(-1.0, 1.0, 1.0, 3.0))
    twin.load_state_dict(model.state_dict())
    x = torch.randn(4, 1)
    model(x), twin(x)
    assert same_bits(state_of(model.norm), state_of(twin.norm))
    before = model.norm.running_mean.item()
    engine.step(column(-1.0, 1.0, 1.0, 3.0))
    assert model.norm.running_mean.item() == pytest.approx(0.9 * before + 0.1, abs=EXACT_VALUE)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.filterwarnings(MICRO)
def test_an_average_of_the_weights_gets_its_statistics_by_update_bn(policy):
    """A deep copy is torch's, whatever the engine does with the layers that it drives."""
    model = ConvBatchNorm()
    engine = engine_of(model, policy, batch=4, micro=2, loss=squared_error)
    engine.step(images(4))
    plain = ConvBatchNorm()
    plain.load_state_dict(model.state_dict())
    averaged, wanted = (torch.optim.swa_utils.AveragedModel(one) for one in (model, plain))
    loader = [images(4)["x"] for _ in range(3)]
    for one in (averaged, wanted):
        torch.optim.swa_utils.update_bn(loader, one)
    assert same_bits(state_of(averaged.module), state_of(wanted.module))
    assert averaged.module.features[0][1].num_batches_tracked == 3
    norms.to_group_norm(averaged.module, 2)  # nothing of the engine is left on it
    before = state_of(model)
    averaged(loader[0])
    assert same_bits(before, state_of(model))


def test_update_bn_works_between_the_windows_of_an_engine_too():
    model, plain = ConvBatchNorm(), ConvBatchNorm()
    engine_of(model, "window", loss=squared_error).step(images(4))
    plain.load_state_dict(model.state_dict())
    loader = [images(4)["x"] for _ in range(3)]
    for one in (model, plain):
        torch.optim.swa_utils.update_bn(loader, one)
    assert same_bits(state_of(model), state_of(plain))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.filterwarnings(MICRO)
def test_a_copied_engine_drives_the_layers_of_its_own_model(policy):
    engine = engine_of(ConvBatchNorm(), policy, loss=squared_error)
    engine.step(images(4))
    twin, batch = copy.deepcopy(engine), images(4)
    for one in (engine, twin):
        one.model.train()
        one.step(batch)
    assert same_bits(state_of(engine.model), state_of(twin.model))
    assert twin.close().features[0][1].training


@pytest.mark.parametrize("policy", ["window", "frozen"])
def test_what_two_engines_need_stays_until_the_second_is_closed(policy):
    model = ConvBatchNorm()
    settings = {"recompute": checkpointing.blocks(model), "loss": squared_error, "batch": 4}
    first, second = engine_of(model, policy, **settings), engine_of(model, policy, **settings)
    first.step(images(4))
    first.close(), first.close()
    assert all("forward" in block.__dict__ for block in model.features)
    before = int(model.features[0][1].num_batches_tracked)
    assert second.step(images(4)).num_micro_batches == 2
    assert model.features[0][1].num_batches_tracked == before + (policy == "window")
    second.close()
    assert not any({"forward", "train"} & vars(module).keys() for module in model.modules())
    again = engine_of(model, policy, **{**settings, "recompute": (Segment("features.0"),)})
    assert not again.step(images(4)).skipped


def test_an_engine_that_was_dropped_keeps_nothing_on_the_model():
    model = ConvBatchNorm()
    settings = {"recompute": checkpointing.blocks(model), "loss": squared_error}
    engine_of(model, "window", **settings)
    engine_of(model, "window", **settings).close()
    assert not any("forward" in vars(module) for module in model.modules())


def test_an_engine_without_a_policy_beside_one_that_pools_has_torch_s_statistics():
    model = OneLayer()
    pooling, plain = engine_of(model, "window"), engine_of(model, micro=4)
    plain.step(column(-1.0, 1.0, 1.0, 3.0))
    assert model.norm.num_batches_tracked == 1
    pooling.step(column(-1.0, 1.0, 1.0, 3.0))
    assert model.norm.num_batches_tracked == 2


def test_a_buffer_that_only_a_window_without_update_changes_is_warned_of_by_name():
    model = OneLayer()
    model.register_buffer("table", torch.zeros(2**17))

    def loss(model, x):
        if x.isnan().any():
            model.table.add_(1)
        return square(model, x)

    engine = engine_of(model, "window", loss=loss)
    for _ in range(2):
        engine.step(torch.randn(4, 1))
    with pytest.warns(UserWarning, match="table"):
        engine.step(column(1.0, 2.0, torch.nan, 4.0))


def test_a_window_copies_the_buffers_at_most_once(monkeypatch):
    model = OneLayer()
    engine = engine_of(model, "window")
    taken, keeper = [], type(engine.runner.snapshots._keeper)
    take = keeper.take
    monkeypatch.setattr(keeper, "take", lambda self, modules: taken.append(1) or take(self, modules))
    for how in ("step", "step_window", "run", "window"):
        run_window(engine, torch.randn(4, 1), how)
        assert len(taken) == 1
        taken.clear()
