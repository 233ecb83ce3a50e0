"""A remedy is tried before it is named: loss scales, islands, another precision."""

import math
import re

import pytest
import torch
from torch import nn

import snugfit
from diagnosed_jobs import Around, Maps, Operation, found_in, one_weight, plan_of
from snugfit import LossScale


def test_what_is_wrong_at_scale_1_is_named_not_what_overflows_before_it_at_a_larger_one():
    model = nn.Sequential(Operation(lambda x: torch.sqrt(x)), nn.Linear(1, 1, bias=False))
    w = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        w.weight.zero_()
    found = found_in(
        nn.Sequential(w, *model),
        batch=torch.ones(1, 1),
        plan=plan_of(1, 1, precision="16-mixed"),
    )
    assert (found.module, found.op, found.phase) == ("1", "SqrtBackward0", "backward")


def test_a_scale_that_comes_down_does_not_hide_what_is_wrong_later():
    batches = [torch.full((4, 1), 10.0), torch.full((4, 1), 10.0), torch.full((4, 1), math.nan)]
    options = {"plan": plan_of(4, precision="16-mixed"), "data": lambda: iter(batches), "max_skipped_windows": 1}
    found = found_in(one_weight(), steps=3, **options)
    assert (found.step, found.loss_scale) == (2, 4096.0)
    assert "the input of micro-batch 0" in found.cause
    assert found_in(one_weight(), steps=2, **options).phase == "loss scale"


@pytest.mark.parametrize(("gradient", "scale"), [(10.0, 4096.0), (5.0, 8192.0), (300.0, 128.0)])
def test_the_largest_finite_scale_is_the_last_power_of_two_below_the_range(gradient, scale):
    found = found_in(one_weight(), batch=torch.full((4, 1), gradient), plan=plan_of(4, precision="16-mixed"))
    assert found.finite_loss_scale == scale


def test_a_nan_that_no_scale_takes_away_is_not_blamed_on_the_scale():
    found = found_in(Around(lambda x: torch.sqrt(x - x.detach())), plan=plan_of(4, precision="16-mixed"))
    assert (found.module, found.op, found.phase) == ("inner", "SqrtBackward0", "backward")
    assert found.finite_loss_scale is None
    assert found.tried[0].remedy == "loss scale 1"


def test_an_fp32_island_alone_is_enough_where_nothing_follows():
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(60000.0)
    found = found_in(model, plan=plan_of(4, precision="16-mixed"))
    assert found.module == "0"
    assert 'keep "0" in fp32' in found.remedy


def test_an_island_that_cannot_be_made_is_noted_and_does_not_end_the_diagnosis():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4, bias=False).half().requires_grad_(False)
            self.head = nn.Linear(4, 4)
            with torch.no_grad():
                self.inner.weight.fill_(60000.0)

        def forward(self, x):
            return self.head(self.inner(x))

    found = found_in(Half(), plan=plan_of(4, precision="16-mixed"))
    assert (found.module, found.op) == ("inner", "linear")
    outcomes = {one.remedy: one.outcome for one in found.tried}
    assert outcomes["fp32 for inner"].startswith("failed: modules that are to run in fp32 have weights of half")


def test_where_no_precision_helps_the_operation_gets_its_own_advice():
    found = found_in(Around(lambda x: torch.log(x - x)), plan=plan_of(4, precision="16-mixed"))
    assert "above 0" in found.remedy
    assert [one.is_finite for one in found.tried] == [False] * len(found.tried)
    assert found.tried[-1].remedy == 'precision="32-true"'


def test_a_remedy_that_runs_out_of_memory_is_noted_and_the_next_one_tried():
    class Greedy(Maps):
        def forward(self, x):
            if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16:
                raise torch.OutOfMemoryError("planted")
            return super().forward(x)

    found = found_in(Greedy(), plan=plan_of(4, precision="16-mixed"))
    assert found.tried[0].outcome.startswith("out of memory")
    assert 'keep "b", "c" in fp32' in found.remedy
    assert "bf16" not in found.remedy


def test_the_largest_finite_scale_is_found_below_one_that_is_no_power_of_two():
    model = one_weight()
    found = found_in(
        model,
        batch=torch.full((4, 1), 10.0),
        plan=plan_of(4, precision="16-mixed"),
        loss_scale=LossScale(init_scale=10000.0),
    )
    assert found.finite_loss_scale == 4096.0


def test_a_loss_scale_that_a_remedy_names_makes_the_window_finite():
    options = {"batch": torch.full((4, 1), 10.0), "plan": plan_of(4, precision="16-mixed")}
    found = found_in(one_weight(), **options)
    code = re.search(r"loss_scale=(snugfit\.LossScale\(.*?\))", found.remedy)[1]
    assert found_in(one_weight(), loss_scale=eval(code, {"snugfit": snugfit}), **options).cause == "none"


def test_an_island_and_a_precision_that_a_remedy_names_make_the_window_finite():
    found = found_in(Maps(), plan=plan_of(4, precision="16-mixed"))
    assert 'use precision="bf16-mixed"' in found.remedy
    assert found_in(Maps(), plan=plan_of(4, precision="bf16-mixed")).cause == "none"
    model = Maps()
    code = re.search(r"snugfit\.precision\.keep_fp32\(.*?\)", found.remedy)[0]
    job = snugfit.Job(
        lambda: (eval(code, {"snugfit": snugfit, "model": model}), model)[1],
        lambda m, x: m(x).float().mean(),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.0),
        torch.ones(4, 4),
        loss_scale=LossScale(init_scale=1.0),
    )
    assert snugfit.diagnose(job, plan_of(4, precision="16-mixed"), "cpu", steps=1).cause == "none"
