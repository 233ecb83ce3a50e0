"""Jobs are diagnosed over the windows of their data."""

import dataclasses
import math

import pytest
import torch
from torch import nn

import snugfit
from diagnosed_jobs import Around, engine_of, found_in, job_of, mean_output, one_weight, plan_of, sgd
from snugfit import DeviceMemoryError, Job, NonFiniteError, PlanError, UnsupportedError
from snugfit.training import distributed
from snugfit.training.diagnosing.diagnose import diagnose


def test_windows_of_the_data_are_looked_at_until_one_goes_wrong():
    def data():
        for i in range(3):
            yield torch.full((4, 4), math.nan if i == 1 else 1.0)

    found = found_in(nn.Linear(4, 4), data=data, steps=3)
    assert (found.step, found.micro_batch) == (1, 0)
    assert found_in(nn.Linear(4, 4), data=data, steps=1).cause == "none"


def test_a_model_that_diverges_is_found_out_by_its_own_updates():
    job = Job(
        lambda: one_weight(2.0),
        lambda model, x: (model(x) ** 4).mean(),
        lambda model: torch.optim.SGD(model.parameters(), lr=100.0),
        torch.ones(4, 1),
    )
    found = diagnose(job, plan_of(), "cpu", steps=10)
    assert found.step > 0
    assert (found.op, found.phase) == ("pow", "forward")
    assert "learning rate" in found.remedy


@pytest.mark.parametrize("policy", ["raise", "ignore", "skip"])
def test_the_job_s_own_policy_does_not_end_the_diagnosis(policy):
    model = Around(lambda x: torch.log(x - x))
    assert found_in(model, nonfinite=policy, max_skipped_windows=1).module == "inner"


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_a_number_of_steps_that_is_none_is_refused(steps):
    with pytest.raises(PlanError, match="steps"):
        diagnose(job_of(nn.Linear(4, 4)), plan_of(), "cpu", steps=steps)


def test_memory_that_runs_out_in_a_diagnosis_of_a_job_is_named():
    def loss(model, x):
        raise torch.OutOfMemoryError("planted")

    with pytest.raises(DeviceMemoryError, match="out of memory while diagnosing"):
        found_in(nn.Linear(4, 4), loss)


def test_a_given_module_that_cannot_be_copied_is_refused():
    class Once(nn.Linear):
        def __deepcopy__(self, memo):
            raise TypeError("a lock")

    with pytest.raises(UnsupportedError, match="cannot be copied"):
        diagnose(Job(Once(4, 4), mean_output, sgd, torch.ones(4, 4)), plan_of(), "cpu")


def test_a_layer_that_waits_for_other_ranks_is_not_run_by_one_alone(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    engine = engine_of(model, nonfinite="raise")
    batch = torch.full((4, 4), math.nan)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    with pytest.raises(NonFiniteError, match="no diagnosis: UnsupportedError") as caught:
        engine.step(batch)
    assert "SyncBatchNorm" in str(caught.value)


def test_data_without_a_batch_are_refused():
    with pytest.raises(PlanError, match="no batch"):
        found_in(nn.Linear(4, 4), data=list)


def test_an_optimizer_that_evaluates_the_loss_itself_is_diagnosed():
    job = Job(
        lambda: Around(lambda x: torch.log(x - x)),
        mean_output,
        lambda model: torch.optim.LBFGS(model.parameters()),
        torch.ones(4, 4),
    )
    assert diagnose(job, plan_of(), "cpu").module == "inner"
    engine = snugfit.build(dataclasses.replace(job, nonfinite="raise"), plan_of(), "cpu")
    with pytest.raises(NonFiniteError) as caught:
        engine.step(torch.ones(4, 4))
    assert caught.value.diagnosis.op == "log"
