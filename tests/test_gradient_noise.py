"""The gradient noise scale, against the value that a toy problem has in closed form."""

import math

import pytest
import torch
from torch import nn

import snugfit
from models import LinearStack, Weight, mean_product, regression_batch, squared_error
from snugfit import Engine, Loss, Plan, PlanError
from snugfit.training.gradient_noise import METRIC
from tolerances import FLOAT64


class Point(nn.Module):
    """A point w; a sample x pulls at it with the gradient w - x."""

    def __init__(self, width):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(width, dtype=torch.float64))

    def forward(self, x):
        return 0.5 * (self.w - x).square().sum(1)


def pull(model, x):
    return model(x).mean()


def still(model, loss, **settings):
    return Engine(model, torch.optim.SGD(model.parameters(), lr=0.0), loss=loss, **settings)


@pytest.mark.parametrize(("size", "micro"), [(64, 16), (40, 16), (6, 1)])
def test_the_noise_scale_of_a_known_covariance_is_found(size, micro):
    """Samples around (2, 0, 0) with variance 4 in 3 directions: S = 12, |G|^2 = 4."""
    engine = still(Point(3), pull, micro_batch_size=micro)
    snugfit.gradient_noise.track(engine, decay=0.997)
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        noise = torch.randn(size, 3, dtype=torch.float64, generator=generator)
        result = engine.step(2 * noise + torch.tensor([2.0, 0.0, 0.0], dtype=torch.float64))
    assert float(result.metrics[METRIC]) == pytest.approx(3.0, rel=0.25)  # seeds scatter by about 10 %


def own(model, batch, on_device):
    count = len(batch["x"])
    return Loss(squared_error(model, batch) * count, torch.tensor(count) if on_device else count)


def estimate(model, loss, batch, part):
    """The same from two gradients, one after the other."""

    def squared_norm(batch):
        return sum(float(g.square().sum()) for g in torch.autograd.grad(loss(model, batch), list(model.parameters())))

    small, large = squared_norm({k: v[:part] for k, v in batch.items()}), squared_norm(batch)
    size = len(batch["x"])
    return ((small - large) / (1 / part - 1 / size)) / ((size * large - part * small) / (size - part))


FORMS = {
    "equal counts": (6, 2, {}, lambda m, b: squared_error(m, b)),
    "unequal counts": (7, 3, {}, lambda m, b: squared_error(m, b)),
    "a sum": (7, 3, {}, lambda m, b: Loss(squared_error(m, b) * len(b["x"]))),
    "own counts": (7, 3, {}, lambda m, b: own(m, b, False)),
    "own counts of the device": (
        7,
        3,
        {},
        lambda m, b: Loss(squared_error(m, b) * len(b["x"]), torch.tensor(len(b["x"]))),
    ),
    "a limit": (7, 3, {"max_grad_norm": 1e-3}, lambda m, b: squared_error(m, b)),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("by_hand", [False, True])
def test_every_way_of_weighting_brings_the_same_estimate(name, by_hand):
    size, micro, settings, loss = FORMS[name]
    model, batch = LinearStack().double(), regression_batch(size, torch.float64)
    engine = still(model, loss, micro_batch_size=micro, **settings)
    snugfit.gradient_noise.track(engine)
    wanted = estimate(model, squared_error, batch, micro)
    for _ in range(2):  # smoothing two equal numbers
        if by_hand:
            with engine.window(batch) as window:
                for micro_batch in window:
                    window.backward(loss(model, micro_batch))
            result = window.result
        else:
            result = engine.step(batch)
        assert float(result.metrics[METRIC]) == pytest.approx(wanted, rel=1e3 * FLOAT64)
        assert result.metrics[METRIC].dim() == 0


def test_the_loss_scale_is_taken_out():
    model, batch = LinearStack(), regression_batch(6)
    found = []
    for precision in ("32-true", "16-mixed"):
        engine = still(model, squared_error, micro_batch_size=2, precision=precision)
        snugfit.gradient_noise.track(engine)
        found.append(float(engine.step(batch).metrics[METRIC]))
    assert found[1] == pytest.approx(found[0], rel=0.05)  # fp16


def test_numerator_and_denominator_are_smoothed_apart():
    engine = still(Weight(0.0).double(), mean_product, micro_batch_size=1)
    snugfit.gradient_noise.track(engine, decay=0.75)
    noises, signals = [], []
    for x in ([1.0, 3.0], [2.0, 2.0], [5.0, 1.0]):
        small, large = x[0] ** 2, (sum(x) / 2) ** 2
        noises.append((small - large) / (1 - 1 / 2))
        signals.append(2 * large - small)
        result = engine.step(torch.tensor(x, dtype=torch.float64))
    smoothed = [0.75 * (0.75 * a + b) + c for a, b, c in (noises, signals)]
    assert float(result.metrics[METRIC]) == pytest.approx(smoothed[0] / smoothed[1], rel=FLOAT64)


def test_windows_that_say_nothing_leave_the_last_value():
    engine = still(Weight(0.0), mean_product)
    snugfit.gradient_noise.track(engine)

    def value(*numbers, loss=None):
        engine.runner.loss = loss or mean_product
        return float(engine.step_window([torch.tensor([float(x)]) for x in numbers]).metrics[METRIC])

    assert math.isnan(value(1))
    assert math.isnan(value(1, math.nan))
    first = value(3, 1)
    assert math.isfinite(first)
    assert value(9) == first
    assert value(9, math.inf) == first
    assert value(1, 2, loss=lambda m, x: (m(x).mean(), Loss(m(x).sum(), 1))) == first
    for zero in (0, torch.tensor(0)):
        assert value(7, 0, loss=lambda m, x, zero=zero: Loss(m(x).sum(), 1 if x.sum() else zero)) == first
    assert value(9, 1) != first


def test_it_costs_one_norm_and_no_value_is_read(monkeypatch):
    model, batch = LinearStack(), regression_batch(6)
    engine = still(model, squared_error, micro_batch_size=2, nonfinite="ignore")
    handle = snugfit.gradient_noise.track(engine)
    norms = []
    plain = snugfit.precision.total_norm
    monkeypatch.setattr(snugfit.precision, "total_norm", lambda values: norms.append(1) or plain(values))

    def refuse(*_):
        raise AssertionError("a tensor's value was read")

    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    engine.step(batch)
    assert len(norms) == 2
    handle.remove()
    assert METRIC not in engine.step(batch).metrics
    assert len(norms) == 3


def test_one_handle_at_a_time_and_a_decay_below_one():
    engine = still(Weight(0.0), mean_product)
    handle = snugfit.gradient_noise.track(engine)
    with pytest.raises(PlanError, match="already"):
        snugfit.gradient_noise.track(engine)
    handle.remove()
    handle.remove()
    snugfit.gradient_noise.track(engine).remove()
    for decay in (1.0, -0.1, None, math.nan):
        with pytest.raises(PlanError, match="decay"):
            snugfit.gradient_noise.track(engine, decay=decay)


def test_it_changes_nothing_about_the_update():
    models = [LinearStack() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    batch = regression_batch(7)
    for i, model in enumerate(models):
        engine = Engine(
            model,
            torch.optim.AdamW(model.parameters()),
            Plan(batch_size=7, micro_batch_size=3),
            loss=squared_error,
            max_grad_norm=0.1,
        )
        if i:
            snugfit.gradient_noise.track(engine)
        for _ in range(3):
            engine.step(batch)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
