"""A plan knows which model it was made for: the class, the parameters and their shapes."""

import dataclasses

import pytest
import torch
from torch import nn

import snugfit
from snugfit.training import fingerprint


def job(width=4, bias=True, kind=nn.Sequential):
    return snugfit.Job(
        lambda: kind(nn.Linear(4, width, bias=bias), nn.ReLU(), nn.Linear(width, 1)),
        lambda model, batch: model(batch).square().mean(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda n: torch.ones(n, 4),
    )


class Chain(nn.Sequential):
    """A sequential of another name."""


@pytest.fixture(scope="module")
def planned():
    return snugfit.plan(job(), device="cpu", batch_size=4).plan


def test_a_plan_runs_the_model_that_it_was_made_for(planned):
    assert planned.fingerprint is not None
    assert not snugfit.build(job(), planned, device="cpu").step(torch.ones(4, 4)).skipped
    snugfit.estimate(job(), planned, device="cpu")


@pytest.mark.parametrize(
    ("other", "differing"),
    [
        (job(width=5), ("elements", "shapes")),
        (job(bias=False), ("parameters", "elements", "trainable", "shapes")),
        (job(kind=Chain), ("class",)),
    ],
)
def test_a_plan_for_another_model_is_refused_and_says_what_differs(planned, other, differing):
    for run in (
        lambda: snugfit.build(other, planned, device="cpu"),
        lambda: snugfit.estimate(other, planned, device="cpu"),
        lambda: engine_of(other, planned),
    ):
        with pytest.raises(snugfit.PlanError, match="made for another model") as caught:
            run()
        assert caught.value.differing == differing


def engine_of(other, plan):
    model = other.model()
    return snugfit.Engine(model, other.optimizer(model), plan, loss=other.loss)


def test_a_plan_that_rests_on_another_optimizer_is_refused_and_says_where_it_is_made(planned):
    own = type(job().optimizer(job().model())).__name__
    fits = dataclasses.replace(planned, fingerprint=fingerprint.of(job().model(), own))
    rests = dataclasses.replace(planned, fingerprint=fingerprint.of(job().model(), "AdamW8bit"))
    assert not snugfit.build(job(), fits, device="cpu").step(torch.ones(4, 4)).skipped
    for run in (
        lambda: snugfit.build(job(), rests, device="cpu"),
        lambda: snugfit.estimate(job(), rests, device="cpu"),
        lambda: engine_of(job(), rests),
    ):
        with pytest.raises(snugfit.PlanError, match="rests on another optimizer") as caught:
            run()
        assert caught.value.differing == ("optimizer",)
        assert (own in caught.value.got, "AdamW8bit" in caught.value.hint) == (True, True)


def test_a_plan_without_a_fingerprint_is_for_any_model(planned):
    anyone = dataclasses.replace(planned, fingerprint=None)
    assert not snugfit.build(job(width=5), anyone, device="cpu").step(torch.ones(4, 4)).skipped


def test_a_fingerprint_ignores_values_types_and_wrappers():
    model = job().model()
    expected = fingerprint.of(job().model().to(torch.bfloat16))
    assert fingerprint.of(model) == expected
    assert fingerprint.of(torch.compile(model, backend="eager")) == expected
    model[0] = torch.compile(model[0], backend="eager")
    assert fingerprint.of(model) == expected


def test_a_frozen_parameter_changes_what_is_trained():
    model = job().model()
    before = fingerprint.of(model)
    model[0].weight.requires_grad_(False)
    assert fingerprint.of(model) != before


def test_a_fingerprint_that_is_not_one_names_every_part():
    plan = snugfit.Plan(batch_size=4, micro_batch_size=4, fingerprint="something else")
    with pytest.raises(snugfit.PlanError, match="class, parameters, elements, trainable, shapes differ"):
        snugfit.build(job(), plan, device="cpu")
