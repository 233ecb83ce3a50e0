import math
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from models import WIDTH, LinearStack, Weight, mean_product, regression_batch, squared_error
from snugfit import DeviceMemoryError, Loss, PlanError
from snugfit.training.hooks import Hooks
from snugfit.training.nonfinite import decider
from snugfit.training.step import run_window
from tolerances import EXACT_VALUE

HOOKS = Hooks(
    decide=decider("skip"),
    reduce_counts=list,
    synchronises=lambda i, n: i == n - 1,
    snapshot=lambda: None,
    restore=lambda state: None,
    move=lambda micro_batch: micro_batch,
)


class Sgd(torch.optim.SGD):
    """Rate 1, so that the move of a weight is its gradient."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=1.0)


def window(micro_batches, counts, loss=mean_product, model=None, optimizers=None, **settings):
    model = Weight(0.0) if model is None else model
    optimizers = [Sgd(model.parameters())] if optimizers is None else optimizers
    outcome = run_window(
        micro_batches,
        counts,
        loss=loss,
        model=model,
        optimizers=optimizers,
        **{
            "hooks": HOOKS,
            "ranks": 1,
            "autocast": nullcontext,
            "device_type": "cpu",
            "loss_scale": None,
            "max_grad_norm": None,
            "reference": (1.0,),
            **settings,
        },
    )
    return outcome, model


def values(*numbers):
    return [torch.tensor([float(x)]) for x in numbers]


def test_c027_the_averaged_gradient_is_clipped_once_per_window():
    outcome, model = window(values(3, -1), [1.0, 1.0], max_grad_norm=1.0)
    assert float(outcome.grad_norm) == 1.0
    assert model.w.item() == pytest.approx(-1.0, abs=EXACT_VALUE)  # torch divides by norm + 1e-6


@pytest.mark.parametrize("scale", [None, 65536.0])
def test_c026_clipping_sees_the_unscaled_gradient(scale):
    outcome, model = window(values(0.5), [1.0], max_grad_norm=1.0, loss_scale=scale)
    assert float(outcome.grad_norm) == 0.5
    assert model.w.item() == -0.5


def test_the_norm_is_reported_without_a_limit_and_before_clipping():
    assert float(window(values(8), [1.0])[0].grad_norm) == 8.0
    outcome, model = window(values(8), [1.0], max_grad_norm=2.0)
    assert float(outcome.grad_norm) == 8.0
    assert model.w.item() == pytest.approx(-2.0, abs=EXACT_VALUE)


def test_the_norm_runs_over_all_optimizers_and_counts_a_shared_parameter_once():
    model = nn.ModuleList([Weight(), Weight()])

    def loss(model, x):
        return (3 * model[0].w + 4 * model[1].w) * x.mean()

    optimizers = [Sgd([model[0].w]), Sgd([model[1].w])]
    assert float(window(values(1), [1.0], loss, model, optimizers)[0].grad_norm) == 5.0


def test_a_window_that_counts_nothing_does_not_step_and_logs_nan():
    outcome, model = window(values(1, 2), [0.0, 0.0])
    assert outcome.reason == "empty"
    assert math.isnan(float(outcome.loss))
    assert model.w.item() == 0.0


def test_a_micro_batch_that_counts_nothing_is_not_run_and_brings_no_nan():
    seen = []

    def loss(model, x):
        seen.append(float(x.sum()))
        return mean_product(model, x)

    outcome, model = window([torch.zeros(0), *values(4)], [0.0, 1.0], loss)
    assert seen == [4.0]
    assert outcome.reason is None
    assert model.w.item() == -4.0


@pytest.mark.parametrize("count", [0, 0.0, torch.tensor(0), torch.tensor(0.0)])
def test_a_loss_that_reports_a_count_of_zero_is_not_back_propagated_whatever_its_value(count):
    def loss(model, x):
        if float(x.sum()) == 0:
            return Loss(model.w * math.nan, count)
        return Loss((model.w * x).sum(), 2)

    outcome, model = window(values(0, 6), [1.0, 1.0], loss)
    assert outcome.reason is None
    assert float(outcome.count) == 2.0
    assert model.w.item() == -3.0


def test_a_window_in_which_all_losses_report_zero_is_empty():
    for count in (0, torch.tensor(0)):
        outcome, model = window(values(1, 2), [1.0, 1.0], lambda model, x, count=count: Loss(model(x).sum(), count))
        assert outcome.reason == "empty"
        assert model.w.item() == 0.0


@pytest.mark.parametrize("reference", [None, (), (1.0,), (1024.0,), (torch.tensor(8.0, dtype=torch.float64),)])
def test_a_loss_may_report_its_count_after_the_forward_whatever_the_last_window_counted(reference):
    def loss(model, x):
        return Loss((model.w * x).sum(), torch.tensor(x.numel()))

    outcome, model = window([torch.tensor([6.0]), torch.ones(3)], [1.0, 1.0], loss, reference=reference)
    assert model.w.item() == pytest.approx(-2.25, abs=EXACT_VALUE)
    assert [float(count) for count in outcome.reported_counts] == [4.0]
    assert outcome.loss.dtype == torch.float32


def test_counts_may_be_unknown_if_the_loss_reports_them_and_only_then():
    loss = lambda model, x: Loss((model.w * x).sum(), x.numel())  # noqa: E731
    assert window(values(2, 4), [None, None], loss)[1].w.item() == -3.0
    with pytest.raises(PlanError, match="count"):
        window(values(2, 4), [None, None])


def test_several_losses_are_summed_where_they_count_what_the_job_counts():
    def loss(model, x):
        return [Loss((model.w * x).sum()), Loss((2 * model.w * x).sum(), x.numel())]

    _, model = window([torch.tensor([2.0, 4.0]), torch.tensor([6.0])], [2.0, 1.0], loss)
    assert model.w.item() == pytest.approx(-12.0, abs=EXACT_VALUE)


def test_losses_of_one_window_may_not_differ_in_kind():
    def loss(model, x):
        return Loss(model(x).sum(), 1) if float(x.sum()) == 1 else mean_product(model, x)

    with pytest.raises(PlanError, match="contradict"):
        window(values(1, 2), [1.0, 1.0], loss)


def test_metrics_are_averaged_by_their_counts():
    def loss(model, x):
        hits = (x > 2).sum()
        return Loss(
            model(x).sum(), metrics={"accuracy": (hits, x.numel()), "length": (float(x.numel()), 1), "n": (1, 0)}
        )

    outcome, _ = window([torch.tensor([1.0, 3.0, 4.0]), torch.tensor([1.0])], [3.0, 1.0], loss)
    assert float(outcome.metrics["accuracy"]) == 0.5
    assert outcome.metrics["length"] == 2.0
    assert math.isnan(outcome.metrics["n"])


def test_c120_a_loss_reaches_only_what_it_is_declared_to():
    model = nn.ModuleDict({"d": Weight(), "g": Weight()})

    def loss(model, x):
        d, g = model["d"].w, model["g"].w
        return Loss(2 * d * x.sum()), Loss(5 * d * g * x.sum(), only=model["g"])

    optimizers = [Sgd(model["d"].parameters()), Sgd(list(model["g"].parameters()))]
    outcome, _ = window(values(1, 1), [1.0, 1.0], loss, model, optimizers)
    assert model["d"].w.item() == 1.0 - 2.0
    assert model["g"].w.item() == 1.0 - 5.0
    assert float(outcome.loss) == 7.0


def test_an_optimizer_without_gradients_is_left_out_alone():
    model = nn.ModuleList([Weight(), Weight()])
    idle = torch.optim.AdamW([model[1].w], weight_decay=0.5)
    outcome, _ = window(values(2), [1.0], lambda m, x: m[0](x).mean(), model, [Sgd([model[0].w]), idle])
    assert outcome.reason is None
    assert model[0].w.item() == -1.0
    assert model[1].w.item() == 1.0
    assert not idle.state


def test_a_window_without_any_gradient_is_skipped_with_that_reason():
    model = nn.ModuleList([Weight(), Weight()])
    outcome, _ = window(values(2), [1.0], lambda m, x: m[0](x).mean(), model, [Sgd([model[1].w])])
    assert outcome.reason == "no gradients"


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda model, x: model(x), "shape (1,)"),
        (lambda model, x: None, "NoneType"),
        (lambda model, x: 3.0, "float"),
        (lambda model, x: model(x).mean().detach(), "without a graph"),
        (lambda model, x: Loss(model(x)), "shape (1,)"),
        (lambda model, x: {"loss": model(x).mean()}, "dict"),
    ],
)
def test_a_loss_that_cannot_be_back_propagated_is_refused_by_shape_or_type(loss, got):
    model = Weight(5.0)
    with pytest.raises(PlanError) as caught:
        window(values(1), [1.0], loss, model)
    assert got in caught.value.got
    assert caught.value.hint
    assert model.w.item() == 5.0


@pytest.mark.parametrize("set_to_none", [True, False])
def test_c014_clearing_gradients_inside_of_a_window_is_noticed_and_named(set_to_none):
    model = Weight(0.0)
    optimizer = Sgd(model.parameters())

    def loss(model, x):
        optimizer.zero_grad(set_to_none)
        return mean_product(model, x)

    with pytest.raises(PlanError, match="zero_grad"):
        window(values(1, 2, 3, 4), [1.0] * 4, loss, model, [optimizer])
    assert model.w.item() == 0.0
    assert model.w.grad is None


def test_no_gradient_is_left_after_an_update_a_skip_or_an_error():
    model = LinearStack()
    batch = regression_batch(4)
    for scaled in (1.0, math.nan):
        window([batch], [4.0], lambda m, b, s=scaled: squared_error(m, b) * s, model)
        assert all(p.grad is None for p in model.parameters())
    calls = []

    def failing(model, batch):
        calls.append(batch)
        if len(calls) == 2:
            raise ValueError("user")
        return squared_error(model, batch)

    with pytest.raises(ValueError, match="user"):
        window([batch, batch], [4.0, 4.0], failing, model)
    assert all(p.grad is None for p in model.parameters())


def test_nothing_of_a_micro_batch_is_alive_when_the_next_starts_or_the_update_runs():
    """Python's collector is not needed for it: what is checked are weak references."""
    alive = []
    model = LinearStack()

    class Checking(Sgd):
        def step(self, closure=None):
            assert all(ref() is None for ref in alive)
            super().step()

    def move(micro_batch):
        assert all(ref() is None for ref in alive)
        moved = {key: value.clone() for key, value in micro_batch.items()}
        alive.extend(weakref.ref(value) for value in moved.values())
        return moved

    def loss(model, micro_batch):
        output = model(micro_batch["x"])
        alive.append(weakref.ref(output))
        value = nn.functional.mse_loss(output, micro_batch["y"])
        alive.append(weakref.ref(value))
        return Loss(value, metrics={"mean": (output.mean(), 1)})

    hooks = Hooks(HOOKS.decide, HOOKS.reduce_counts, HOOKS.synchronises, HOOKS.snapshot, HOOKS.restore, move)
    batches = [regression_batch(4) for _ in range(3)]
    outcome, _ = window(batches, [4.0] * 3, loss, model, [Checking(model.parameters())], hooks=hooks)
    assert len(alive) == 3 * 4
    assert outcome.reason is None


def test_no_value_is_read_outside_of_the_hooks(monkeypatch):
    def refuse(*_):
        raise AssertionError("a tensor's value was read")

    hooks = Hooks(lambda found, count: None, list, HOOKS.synchronises, HOOKS.snapshot, HOOKS.restore, HOOKS.move)
    model = LinearStack()
    batches = [regression_batch(size) for size in (3, 2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    for counts in ([3.0, 2.0], [3.0, 3.0]):
        window(batches, counts, squared_error, model, [optimizer], hooks=hooks, max_grad_norm=1.0, loss_scale=8.0)

    def reports(model, batch):
        return Loss(squared_error(model, batch) * len(batch["x"]), torch.tensor(len(batch["x"])))

    window(batches, [3.0, 2.0], reports, model, [optimizer], hooks=hooks, max_grad_norm=1.0)


def test_each_micro_batch_runs_forward_once_and_backward_once():
    model = LinearStack(depth=1)
    with FlopCounterMode(display=False) as counter:
        window([regression_batch(4)], [4.0], squared_error, model)
    assert counter.get_total_flops() == 2 * 2 * 4 * WIDTH * WIDTH  # forward, and the weight's gradient


def test_an_out_of_memory_error_of_the_update_says_that_parameters_may_have_moved():
    class Failing(Sgd):
        def step(self, closure=None):
            raise torch.OutOfMemoryError("CUDA out of memory")

    model = Weight()
    with pytest.raises(DeviceMemoryError, match="parameters may have moved") as caught:
        window(values(1), [1.0], model=model, optimizers=[Failing(model.parameters())])
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_a_cast_weight_never_outlives_the_update_even_in_the_caller_s_own_autocast():
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    batch = torch.ones(1, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert float(model(batch).detach()) == 4.0
        window([batch], [1.0], lambda m, x: m(x).float().mean(), model, [Sgd(model.parameters())])
        assert float(model(batch).detach()) == 0.0


def test_backward_and_update_run_outside_of_the_caller_s_autocast():
    seen = []

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(torch.is_autocast_enabled("cpu"))
            return gradient

    with torch.autocast("cpu", dtype=torch.bfloat16):
        window(values(1), [1.0], lambda m, x: Identity.apply(m(x).mean()))
    assert seen == [False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_precision_loss_is_weighted_and_logged_in_single_precision(dtype):
    outcome, _ = window(values(1, 1, 1), [1.0, 1.0, 1.0], lambda m, x: ((m.w + 1) * x).mean().to(dtype))
    assert outcome.loss.dtype == torch.float32
    assert float(outcome.loss) == pytest.approx(1.0, abs=EXACT_VALUE)


@pytest.mark.parametrize("count", [-1, math.nan, math.inf])
def test_a_reported_count_that_cannot_be_divided_by_is_refused(count):
    with pytest.raises(PlanError, match="count"):
        window(values(1), [1.0], lambda model, x: Loss(model(x).sum(), count))
