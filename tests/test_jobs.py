import pytest
import torch
from torch import nn

from snugfit import Job, Loss, LossScale, PlanError, Shared


def make_model():
    return nn.Linear(2, 1)


def loss(model, micro_batch):
    return model(micro_batch).mean()


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def make_job(**values):
    return Job(**{"model": make_model, "loss": loss, "optimizer": optimizer, "batch": torch.zeros(4, 2), **values})


def test_a_job_takes_a_module_or_a_function_that_builds_one():
    module = make_model()
    assert make_job().model is make_model
    assert make_job(model=module).model is module


def test_a_job_calls_nothing_and_draws_no_random_number():
    def never(*_):
        raise AssertionError("called")

    state = torch.get_rng_state()
    make_job(model=never, loss=never, optimizer=never, batch=never, data=never, scheduler=never, split=never)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_defaults_of_a_job_are_those_of_the_surface():
    job = make_job()
    assert (job.count, job.data, job.scheduler, job.max_grad_norm, job.loss_scale) == (
        "samples",
        None,
        None,
        None,
        None,
    )
    assert (job.max_skipped_windows, job.nonfinite, job.split, job.seed) == (50, "skip", None, 0)


@pytest.mark.parametrize("name", ["model", "loss", "optimizer"])
def test_what_cannot_be_called_is_refused_by_name(name):
    with pytest.raises(PlanError, match=f"Job.{name} cannot be called"):
        make_job(**{name: 5})


def test_an_optimizer_object_is_refused_with_the_function_to_write():
    with pytest.raises(PlanError, match="is an optimizer, not a function") as caught:
        make_job(optimizer=optimizer(make_model()))
    assert "lambda model" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("count", ["tokens", None, 4]),
        ("max_grad_norm", [0, -1.0, "1", float("nan")]),
        ("max_skipped_windows", [0, -1, 2.5, None]),
        ("nonfinite", ["Skip", None, ""]),
    ],
)
def test_an_option_outside_of_its_range_is_refused_with_its_value(name, values):
    for value in values:
        with pytest.raises(PlanError) as caught:
            make_job(**{name: value})
        assert repr(value) in caught.value.got


@pytest.mark.parametrize("name", ["model", "loss", "optimizer", "data", "scheduler", "split"])
def test_an_argument_that_is_no_function_is_refused_by_name(name):
    with pytest.raises(PlanError, match=f"Job.{name} cannot be called") as caught:
        make_job(**{name: 3})
    assert caught.value.got == "int"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("growth_factor", 0.5),
        ("backoff_factor", 1.0),
        ("backoff_factor", 0.0),
        ("growth_interval", 0),
        ("floor", 0.0),
        ("init_scale", 0.5),
        ("init_scale", 2.0**25),
        ("init_scale", float("nan")),
    ],
)
def test_a_loss_scale_outside_of_its_range_is_refused_by_name(name, value):
    with pytest.raises(PlanError, match=f"LossScale.{name}"):
        LossScale(**{name: value})


def test_the_loss_scale_starts_as_torch_s_scaler_does():
    scaler = torch.amp.GradScaler("cpu")
    scale = LossScale()
    assert scale.init_scale == scaler.get_scale()
    assert scale.growth_factor == scaler.get_growth_factor()
    assert scale.backoff_factor == scaler.get_backoff_factor()
    assert scale.growth_interval == scaler.get_growth_interval()


def test_values_that_hold_tensors_compare_by_identity():
    total = torch.zeros(())
    assert Loss(total) != Loss(total)
    assert Shared(total) != Shared(total)
    assert Shared(total).value is total
    assert (Loss(total).count, Loss(total).metrics, Loss(total).only) == (None, None, None)
