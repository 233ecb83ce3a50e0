"""A diagnosis leaves weights, optimizers, buffers and random states as they were."""

import math
import random

import numpy as np
import pytest
import torch
from torch import nn

import snugfit
from diagnosed_jobs import Maps, Noisy, mean_output, plan_of, random_bits, sgd, stepped
from models import LinearStack, regression_batch, same_bits, squared_error, state_of
from snugfit import Engine, Job, LossScale, NonFiniteError, checkpointing
from snugfit.training.diagnosing import diagnosis, remedies, rerun
from snugfit.training.diagnosing.diagnose import diagnose


@pytest.mark.filterwarnings("ignore:BatchNorm makes")
@pytest.mark.parametrize("is_bad", [False, True], ids=["clean", "bad"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("optimizers", [1, 2])
def test_a_diagnosis_changes_nothing(is_bad, precision, optimizers):
    model = Noisy()
    made = [torch.optim.AdamW(model.linear.parameters()), torch.optim.AdamW(model.norm.parameters())]
    made = made if optimizers == 2 else [torch.optim.AdamW(model.parameters())]
    engine = Engine(model, made, loss=mean_output, precision=precision, loss_scale=LossScale(init_scale=4.0))
    assert not engine.step(torch.randn(4, 4)).skipped
    batch = torch.randn(8, 4)
    if is_bad:
        batch[5] = math.nan
    suspect = stepped(engine, batch, 4)
    before, bits = state_of(model, *made), random_bits()
    engine_state = state_of(engine)
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    found = diagnosis.of_window(suspect)
    assert found.cause.startswith("the input of micro-batch 1") if is_bad else found.cause == "none"
    assert same_bits(before, state_of(model, *made))
    assert same_bits(engine_state, state_of(engine))
    assert same_bits(bits, random_bits())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()] == hooks
    assert all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.filterwarnings("ignore:BatchNorm makes")
def test_the_windows_that_follow_a_diagnosis_are_those_without_it():
    torch.manual_seed(3)
    finals = []
    for is_diagnosed in (False, True):
        torch.manual_seed(0)
        model = Noisy()
        engine = Engine(model, sgd(model), loss=mean_output, micro_batch_size=2)
        for _ in range(3):
            batch = torch.randn(4, 4)
            if is_diagnosed:
                diagnosis.of_window(stepped(engine, batch, 2))
            engine.step(batch)
        finals.append(state_of(model))
    assert same_bits(*finals)


def test_a_given_module_is_not_trained_by_windows_that_are_finite():
    model = Noisy()
    before, bits = state_of(model), random_bits()
    job = Job(model, mean_output, sgd, lambda number: torch.randn(number, 4))
    assert diagnose(job, plan_of(4), "cpu", steps=3).step == 2
    assert same_bits(before, state_of(model))
    assert same_bits(bits, random_bits())


def test_every_run_of_a_diagnosis_draws_what_the_window_drew():
    drawn = []

    def loss(model, x):
        drawn.append((float(x[0, 0]), torch.rand(()).item(), random.random(), np.random.rand()))
        return torch.log(model(x) * 0).mean() if x[0, 0] == 2 else model(x).mean()

    model = nn.Linear(4, 4)
    engine = Engine(model, sgd(model), loss=loss, precision="16-mixed", micro_batch_size=1, nonfinite="raise")
    with pytest.raises(NonFiniteError) as caught:
        engine.step(torch.arange(4.0).repeat_interleave(4).reshape(4, 4))
    assert (caught.value.diagnosis.micro_batch, len(set(drawn))) == (2, 4)
    assert len(drawn) > 4 * len(caught.value.diagnosis.tried)


def test_nothing_of_a_diagnosis_stays_on_a_model_that_is_recomputed_and_needed_an_island():
    model = nn.Sequential(nn.Linear(4, 4), Maps(), nn.Linear(4, 4))
    segments = (snugfit.Segment(("0", "1", "2")),)
    engine = Engine(model, sgd(model), plan_of(precision="16-mixed", recompute=segments), loss=mean_output)
    stand_ins = [(module.__dict__.get("forward"), getattr(module.forward, "own", None)) for module in model.modules()]
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(4))
        model[0].bias.zero_()
    found = diagnosis.of_window(stepped(engine, torch.ones(4, 4), 2))
    assert (found.module, "keep_fp32" in found.remedy) == ("1.b", True)
    after = [(module.__dict__.get("forward"), getattr(module.forward, "own", None)) for module in model.modules()]
    assert all(a is b and c is d for (a, c), (b, d) in zip(stand_ins, after, strict=True))


def test_a_given_module_and_the_random_states_stay_as_they_were():
    model = Noisy()
    before, bits = state_of(model), random_bits()
    job = Job(model, mean_output, sgd, torch.full((4, 4), math.nan))
    assert not diagnose(job, plan_of(4), "cpu").is_finite
    assert same_bits(before, state_of(model))
    assert same_bits(bits, random_bits())


def test_a_recomputing_model_is_probed_without_counting_twice():
    model = LinearStack()
    segments = checkpointing.every(model, 1)
    calls = []
    model.layers[0].register_forward_hook(lambda *_: calls.append(snugfit.is_recomputing()))
    engine = Engine(model, sgd(model), plan_of(recompute=segments), loss=squared_error)
    with rerun.kept(stepped(engine, regression_batch(4), 2)) as beginning:
        probed = remedies.probed(stepped(engine, regression_batch(4), 2), beginning, None, "32-true")
    assert probed.is_finite
    assert calls.count(False) == 2
