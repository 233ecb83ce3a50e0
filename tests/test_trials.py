"""Plans that are tried out: what comes back, and that nothing of the user's is changed."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from snugfit import Job, Plan, Segment, SnugfitError
from snugfit.errors import PlanError, UnsupportedError
from snugfit.planning import trials

WIDTH = 8


class Model(nn.Module):
    """Dropout draws, batch normalisation has buffers."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
        self.outer = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.outer(self.inner(x))


def loss(model, x):
    return model(x).square().mean()


def plan_of(size, *segments):
    return Plan(batch_size=8, micro_batch_size=size, recompute=segments, norm_policy="window")


def job_of(model, **more):
    more = {"optimizer": lambda m: torch.optim.AdamW(m.parameters(), 0.1), **more}
    return Job(model, loss, batch=lambda n: torch.randn(n, WIDTH), **more)


def same(a, b):
    """Whether two nested states are equal, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def test_each_plan_has_its_seconds_and_its_peak_in_the_order_given():
    plans = [plan_of(8), plan_of(2), plan_of(8, Segment("inner"))]
    found = trials.run(job_of(Model), plans, "cpu", windows=2)
    assert [trial.plan for trial in found] == plans
    for trial in found:
        assert len(trial.seconds) == 2 * trials.TURNS
        assert min(trial.seconds) <= trial.step_time_s <= max(trial.seconds)
        assert trial.peak_bytes > 0
        assert trial.spread >= 0
        assert trial.out_of_memory is None


def test_a_module_an_optimizer_and_a_scheduler_that_were_there_before_stay_bit_for_bit():
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loss(model, torch.randn(4, WIDTH)).backward()
    optimizer.step()
    model.eval()
    objects = (model.state_dict(), optimizer.state_dict(), scheduler.state_dict())
    before = copy.deepcopy((objects, [parameter.grad for parameter in model.parameters()]))
    job = job_of(model, optimizer=lambda _: optimizer, scheduler=lambda _: scheduler)
    trials.run(job, [plan_of(8), plan_of(4, Segment("inner"))], "cpu", windows=1)
    objects = (model.state_dict(), optimizer.state_dict(), scheduler.state_dict())
    assert same((objects, [parameter.grad for parameter in model.parameters()]), before)
    assert not model.training
    assert "forward" not in vars(model.inner)  # the segment went to a copy


def test_random_states_of_python_numpy_and_torch_stay_as_they_are():
    before = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state()
    trials.run(job_of(Model), [plan_of(4)], "cpu", windows=1)
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_an_optimizer_that_was_there_before_trains_the_copy():
    model, seen = Model(), []
    optimizer = torch.optim.SGD(model.parameters(), 1.0)

    def watching(m, x):
        seen.append(float(m.outer.weight.detach().abs().sum()))
        return loss(m, x)

    job = Job(model, watching, lambda _: optimizer, lambda n: torch.ones(n, WIDTH))
    trials.run(job, [plan_of(8)], "cpu", windows=2)
    assert len(set(seen[:3])) == 3  # each window saw other weights


def test_memory_that_runs_out_is_an_answer_and_the_others_go_on():
    def heavy(model, x):
        if len(x) > 2:
            torch.empty(2**60, dtype=torch.uint8)
        return loss(model, x)

    job = Job(Model, heavy, lambda m: torch.optim.SGD(m.parameters(), 0.1), lambda n: torch.randn(n, WIDTH))
    too_large, fitting = trials.run(job, [plan_of(8), plan_of(2)], "cpu", windows=1)
    assert (too_large.step_time_s, too_large.peak_bytes, too_large.seconds) == (None, None, ())
    assert "memory" in too_large.out_of_memory
    assert fitting.step_time_s > 0


def test_an_error_names_the_plan():
    def broken(model, x):
        if len(x) == 4:
            raise ValueError("not with four")
        return loss(model, x)

    job = Job(Model, broken, lambda m: torch.optim.SGD(m.parameters(), 0.1), lambda n: torch.randn(n, WIDTH))
    with pytest.raises(SnugfitError, match="micro_batch_size=4") as raised:
        trials.run(job, [plan_of(2), plan_of(4)], "cpu", windows=1)
    assert "not with four" in str(raised.value)
    assert isinstance(raised.value.__cause__, ValueError)


def test_an_error_of_ours_keeps_its_kind_and_names_the_plan():
    with pytest.raises(PlanError, match=r"micro_batch_size=8.*1 segments") as raised:
        trials.run(job_of(Model), [plan_of(8, Segment("nowhere"))], "cpu", windows=1)
    assert "nowhere" in str(raised.value)


def test_only_a_device_of_this_machine_can_be_tried():
    with pytest.raises(UnsupportedError, match="tried out"):
        trials.run(job_of(Model), [plan_of(8)], "a100-sxm-40gb")


@pytest.mark.parametrize("windows", [0, -1, True, 1.5])
def test_windows_are_counted_in_whole_numbers(windows):
    with pytest.raises(PlanError, match="windows"):
        trials.run(job_of(Model), [plan_of(8)], "cpu", windows=windows)
