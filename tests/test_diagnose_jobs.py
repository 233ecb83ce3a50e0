"""Jobs are diagnosed over the windows of their data."""

import dataclasses
import math

import pytest
import torch
from torch import nn

import snugfit
from diagnosed_jobs import Around, engine_of, found_in, job_of, mean_output, one_weight, plan_of, sgd
from snugfit import BatchError, DeviceMemoryError, Job, NonFiniteError, PlanError, UnsupportedError
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


# ---- how far is looked


def late(number):
    def data():
        for i in range(number + 5):
            yield torch.full((4, 4), math.nan if i == number else 1.0)

    return data


def test_the_data_are_looked_at_for_twenty_windows_where_nobody_says_how_many():
    job = job_of(nn.Linear(4, 4), data=late(19))
    found = diagnose(job, plan_of(), "cpu")
    assert (found.step, found.num_windows) == (19, 20)
    clean = diagnose(job_of(nn.Linear(4, 4), data=late(20)), plan_of(), "cpu")
    assert (clean.cause, clean.num_windows) == ("none", 20)
    assert diagnose(job_of(nn.Linear(4, 4)), plan_of(), "cpu").num_windows == 3


@pytest.mark.parametrize(("steps", "said"), [(1, "1 window;"), (4, "4 windows;")])
def test_a_diagnosis_without_a_finding_says_how_far_it_looked_and_how_to_look_further(steps, said):
    text = str(found_in(nn.Linear(4, 4), data=late(9), steps=steps))
    assert f"looked at: {said}" in text
    for way in ("steps=", "--steps", "nonfinite.pt", "window=", "--window"):
        assert way in text


def test_fewer_data_than_asked_for_are_counted_as_they_are():
    assert found_in(nn.Linear(4, 4), data=lambda: [torch.ones(4, 4)] * 2, steps=7).num_windows == 2


def test_the_text_says_what_the_window_was():
    found = found_in(nn.Linear(4, 4), data=late(1), plan=plan_of(2, 4, precision="bf16-mixed"), steps=3)
    assert found.num_micro_batches == 2
    assert "window:    2 micro-batches in bf16-mixed, after 1 updates" in str(found)


# ---- buffers that stay as they are


class Layers(nn.Sequential):
    """A normalisation layer in a model."""

    def __init__(self, norm):
        super().__init__(nn.Linear(4, 4), nn.Sequential(nn.Unflatten(1, (4, 1)), norm, nn.Flatten()), nn.Linear(4, 4))


@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recomputed"])
@pytest.mark.parametrize(
    "norm",
    [lambda: nn.BatchNorm1d(4), lambda: nn.InstanceNorm1d(4, track_running_stats=True)],
    ids=["batch", "instance"],
)
@pytest.mark.parametrize("is_given", [False, True], ids=["function", "given"])
def test_a_normalisation_layer_in_evaluation_mode_is_diagnosed(norm, is_given, recompute):
    model = Layers(norm())
    model[1].eval()
    job = job_of(model)
    job = dataclasses.replace(job, model=model) if is_given else job
    plan = plan_of(recompute=(snugfit.Segment("1"),) if recompute else ())
    assert diagnose(job, plan, "cpu", steps=4).num_windows == 4


@pytest.mark.parametrize("policy", ["micro", "window", "frozen"])
@pytest.mark.filterwarnings("ignore:BatchNorm makes")
@pytest.mark.filterwarnings("ignore:.*freshly made")
def test_a_normalisation_layer_under_each_policy_is_diagnosed(policy):
    model = Layers(nn.BatchNorm1d(4))
    with torch.no_grad():
        model[1][1].running_mean.fill_(0.5)
    assert diagnose(job_of(model), plan_of(norm_policy=policy), "cpu").cause == "none"


class Counting(nn.Module):
    """Buffers that change in some windows only, in place or not, in a layer of evaluation mode."""

    def __init__(self, from_call, way):
        super().__init__()
        self.linear, self.from_call, self.way = nn.Linear(4, 4), from_call, way
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mask", torch.ones(4))
        self.eval()

    def forward(self, x):
        self.calls += 1
        if self.calls >= self.from_call:
            if self.way == "new":
                self.seen = self.seen + 1
            else:
                self.seen.add_(1)
        return self.linear(x * self.mask)


@pytest.mark.parametrize("way", ["new", "in place"])
@pytest.mark.parametrize("from_call", [1, 2, 3, 5, 6])
def test_buffers_that_change_in_some_windows_only_are_what_training_leaves(from_call, way):
    model = Counting(from_call, way)
    batches = [torch.ones(4, 4)] * 3 + [torch.full((4, 4), math.nan)]
    found = found_in(model, data=lambda: iter(batches), steps=4)
    assert (found.step, found.micro_batch) == (3, 0)


# ---- arguments


@pytest.mark.parametrize(
    ("job", "plan"),
    [
        (None, plan_of()),
        ("job.py", plan_of()),
        (job_of(nn.Linear(4, 4)), {"batch_size": 4}),
        (job_of(nn.Linear(4, 4)), None),
        (job_of(nn.Linear(4, 4)), "plan.json"),
    ],
)
def test_what_is_no_job_or_plan_is_refused(job, plan):
    with pytest.raises(PlanError, match=r"diagnose needs a (job|plan)"):
        diagnose(job, plan, "cpu")


@pytest.mark.parametrize("data", [3, None, object()])
def test_data_that_cannot_be_iterated_over_are_refused(data):
    with pytest.raises(PlanError, match="cannot be iterated over"):
        found_in(nn.Linear(4, 4), data=lambda: data)


@pytest.mark.parametrize("data", [[None], [torch.ones(4, 4), None], [{}]])
def test_a_batch_that_is_none_is_refused(data):
    with pytest.raises(BatchError, match="holds no tensor"):
        found_in(nn.Linear(4, 4), data=lambda: data, steps=3)


@pytest.mark.parametrize("split", [lambda batch, size: 3, lambda batch, size: None, lambda batch, size: {"x": batch}])
def test_a_split_that_returns_no_list_is_refused(split):
    with pytest.raises(BatchError, match="split did not return a list"):
        found_in(nn.Linear(4, 4), split=split)


def test_data_of_inference_mode_are_refused():
    with torch.inference_mode():
        batch = {"x": [torch.ones(4, 4)]}
    with pytest.raises(BatchError, match="inference mode") as caught:
        found_in(nn.Linear(4, 4), lambda model, b: model(b["x"][0]).mean(), batch)
    assert "batch['x'][0] of micro-batch 0" in str(caught.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("is_inner", [False, True], ids=["model", "layer"])
def test_a_torchscript_module_is_refused_by_name(is_inner):
    scripted = torch.jit.script(nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), scripted) if is_inner else scripted
    job = Job(lambda: model, mean_output, sgd, torch.ones(4, 4))
    with pytest.raises(UnsupportedError, match="TorchScript") as caught:
        diagnose(job, plan_of(), "cpu")
    assert caught.value.module == ("1" if is_inner else "")
