"""A check changes nothing that was given to it, and its report says all of what was found."""

import json
import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from checked_jobs import regression, sgd
from models import WIDTH, LinearStack, gradients, regression_batch, same_bits, squared_error, state_of
from snugfit import Job, Plan, PlanError, Segment, check
from tolerances import EXACT_VALUE, FLOAT64


@pytest.mark.parametrize("reaches_past_its_argument", [False, True])
def test_model_random_states_gradients_modes_and_batch_are_left_as_they_are(reaches_past_its_argument):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    model[0].eval()
    batch = regression_batch(4)
    squared_error(model, batch).backward()
    weights, grads = state_of(model), gradients(model)
    modes = [module.training for module in model.modules()]
    inputs = {name: tensor.clone() for name, tensor in batch.items()}
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy(), torch.get_default_dtype()

    def loss(given, micro_batch):
        micro_batch["y"].add_(1.0)
        random.random()
        np.random.rand()
        return squared_error(model if reaches_past_its_argument else given, micro_batch)

    job = Job(model, loss, sgd, batch)
    if reaches_past_its_argument:
        with pytest.raises(PlanError, match="reaches no parameter"):
            check(job, Plan(batch_size=4, micro_batch_size=2), "cpu")
    else:
        check(job, Plan(batch_size=4, micro_batch_size=2, recompute=(Segment("0"),)), "cpu")
    assert same_bits(weights, state_of(model))
    assert all(torch.equal(grads[name], gradient) for name, gradient in gradients(model).items())
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(inputs[name], tensor) for name, tensor in batch.items())
    assert all("forward" not in vars(module) for module in model.modules())
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1], torch.get_default_dtype()
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    assert np.array_equal(before[2], after[2])
    assert before[3] == after[3]


def test_an_optimizer_made_by_the_job_never_steps():
    stepped = []

    class Counts(torch.optim.SGD):
        def step(self, closure=None):
            stepped.append(1)

    job = Job(LinearStack, squared_error, lambda m: Counts(m.parameters(), lr=1.0), regression_batch(4))
    assert check(job, Plan(batch_size=4, micro_batch_size=2), "cpu").ok
    assert stepped == []


def test_a_report_is_json_with_every_field():
    batch = regression_batch(4)
    batch["x"][0, 0] = math.nan
    report = check(*regression(LinearStack, batch=batch), "cpu")
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert values["ok"] is False
    assert values["gradient_error"] is None
    assert values["hazards"][0]["kind"] == "non-finite-data"
    assert set(values) == set(report.__slots__)


def test_modules_are_listed_worst_first():
    class Scaled(nn.Module):
        """A loss term of one module only that is not a mean."""

        def __init__(self):
            super().__init__()
            self.good, self.bad = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def loss(model, batch):
        return F.mse_loss(model.good(batch["x"]), batch["y"]) + 0.1 * model.bad(batch["x"]).square().sum()

    report = check(*regression(Scaled, loss), "cpu")
    assert not report.ok
    assert list(report.by_module) == ["bad", "good"]
    assert report.by_module["bad"] == pytest.approx(0.5, abs=EXACT_VALUE)
    assert report.by_module["good"] <= FLOAT64


def test_several_ranks_are_checked_as_one():
    job = Job(LinearStack, squared_error, sgd, regression_batch(8))
    assert check(job, Plan(batch_size=8, micro_batch_size=2, world_size=2, shard="ddp"), "cpu").ok
