"""Measuring on the CPU: to the byte where the bytes can be worked out by hand, and without a trace left behind."""

import copy
import random
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from snugfit.errors import UnsupportedError
from snugfit.jobs import Job, Shared
from snugfit.memory import torch_private
from snugfit.memory.measuring import measure
from snugfit.plans import Plan

WIDTH, LAYERS = 64, 5
ROOT = Path(__file__).parents[1]
SCALARS = 256
"Bytes of 0-dimensional tensors that a step keeps: losses, counts."


def stack() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def batch(num_samples: int) -> dict[str, torch.Tensor]:
    return {"x": torch.rand(num_samples, WIDTH), "target": torch.rand(num_samples, WIDTH)}


def linear_loss(model, micro_batch):
    return (model(micro_batch["x"]) * micro_batch["target"]).sum() / len(micro_batch["x"])


def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)


def adam(model):
    return torch.optim.AdamW(model.parameters(), foreach=False)


@pytest.mark.parametrize("num_samples", [16, 256], ids=["weights dominate", "activations dominate"])
def test_the_peak_of_a_stack_of_linear_layers_is_the_one_worked_out_by_hand(num_samples):
    report = measure(
        Job(stack, linear_loss, plain_sgd, batch), Plan(batch_size=num_samples, micro_batch_size=num_samples), "cpu"
    )
    weight, activation = 4 * WIDTH * WIDTH, 4 * WIDTH * num_samples
    # In the backward of layer j (from 1): the inputs of the layers up to j that are not the batch, the gradients of
    # its output and (not for the first layer) of its input, the weights' gradients made so far.
    backward = [
        (j - 1) * activation + (2 if j > 1 else 1) * activation + (LAYERS - j + 1) * weight
        for j in range(1, LAYERS + 1)
    ]
    expected = LAYERS * weight + 2 * activation + max(backward)
    assert expected <= report.peak_allocated_bytes < expected + SCALARS
    assert report.peak_reserved_bytes == report.peak_allocated_bytes
    assert (report.peak_at.phase, report.label, report.device) == ("backward", "CPU-measured", "cpu")
    assert sum(report.by_category.values()) == report.peak_allocated_bytes
    assert report.by_category["parameter"] == LAYERS * weight
    assert report.by_category["input"] == 2 * activation
    assert report.static_bytes == 2 * LAYERS * weight


def test_the_saved_tensors_at_the_end_of_the_forward_are_the_inputs_of_the_layers():
    report = measure(Job(stack, linear_loss, plain_sgd, batch), Plan(batch_size=32, micro_batch_size=32), "cpu")
    inputs = (LAYERS - 1) * 4 * WIDTH * 32
    assert inputs <= report.at("forward end")["saved"] < inputs + SCALARS


def test_the_optimizers_state_and_the_gradients_are_told_apart():
    report = measure(Job(stack, linear_loss, adam, batch), Plan(batch_size=512, micro_batch_size=128), "cpu")
    weights, steps = LAYERS * 4 * WIDTH * WIDTH, 4 * LAYERS
    assert report.at("step end")["optimizer"] == 2 * weights + steps
    assert report.at("backward end")["gradient"] == weights
    assert report.peak_at.window == 2, "the first window's peak has no state yet"


def test_smaller_micro_batches_lower_the_measured_peak():
    job = Job(stack, linear_loss, plain_sgd, batch)
    whole, cut = (measure(job, Plan(batch_size=512, micro_batch_size=size), "cpu") for size in (512, 64))
    assert cut.at("forward end")["saved"] < whole.at("forward end")["saved"] / 4
    assert cut.peak_allocated_bytes < whole.peak_allocated_bytes


def test_a_temporary_inside_of_a_kernel_is_counted():
    def transposed_loss(model, micro_batch):
        wide = model(micro_batch["x"]).t()
        return torch.logcumsumexp(wide, dim=1).sum() / len(micro_batch["x"])

    plan = Plan(batch_size=64, micro_batch_size=64)
    report = measure(Job(stack, transposed_loss, plain_sgd, batch), plan, "cpu")
    assert report.by_category["temporary"] > 2 * 4 * WIDTH * 64


def test_a_given_batch_that_was_there_before_counts_with_what_all_micro_batches_share():
    given = {"x": torch.rand(16, WIDTH), "target": Shared(torch.tensor(0.5))}
    report = measure(Job(stack, linear_loss, plain_sgd, given), Plan(batch_size=16, micro_batch_size=4), "cpu")
    assert report.by_category["input"] == 4 * WIDTH * 16 + 4


def test_a_given_module_is_left_bit_equal():
    model = nn.Sequential(stack(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)).eval()
    model[0][1].weight.grad = torch.ones(WIDTH, WIDTH)
    before, gradient = copy.deepcopy(model.state_dict()), model[0][1].weight.grad
    parameters, forward = [id(p) for p in model.parameters()], model.forward
    measure(Job(model, linear_loss, adam, batch(32)), Plan(batch_size=32, micro_batch_size=8), "cpu")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [id(p) for p in model.parameters()] == parameters
    assert model[0][1].weight.grad is gradient
    assert torch.equal(gradient, torch.ones(WIDTH, WIDTH))
    assert model[0][0].weight.grad is None
    assert not any(module.training for module in model.modules())
    assert model.forward == forward


def test_random_states_are_left_as_they_are():
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)
    expected = torch.rand(3), random.random(), numpy.random.rand()
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)
    measure(Job(stack, linear_loss, adam, batch), Plan(batch_size=8, micro_batch_size=4), "cpu")
    assert torch.equal(torch.rand(3), expected[0])
    assert (random.random(), numpy.random.rand()) == expected[1:]


def test_measuring_twice_gives_the_same_bytes():
    job, plan = Job(stack, linear_loss, adam, batch), Plan(batch_size=24, micro_batch_size=5)
    first, second = measure(job, plan, "cpu"), measure(job, plan, "cpu")
    assert first == second


def test_a_device_that_is_not_here_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="'rtx-3060-12gb'"):
        measure(Job(stack, linear_loss, adam, batch), Plan(batch_size=8, micro_batch_size=4), "rtx-3060-12gb")


def test_a_given_module_that_cannot_be_copied_is_refused_by_name():
    model = stack()
    model.lock = (value for value in ())
    with pytest.raises(UnsupportedError, match="Sequential: TypeError"):
        measure(Job(model, linear_loss, adam, batch), Plan(batch_size=8, micro_batch_size=4), "cpu")


def test_measuring_writes_nothing_to_the_terminal():
    program = """
from tests.test_measuring import *
measure(Job(stack, linear_loss, adam, batch), Plan(batch_size=8, micro_batch_size=4), "cpu")
"""
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert (child.stdout, child.stderr) == ("", "")


def test_the_profiler_tells_address_size_and_surroundings_of_every_allocation():
    with torch_private.profiled_memory("a mark ") as events:
        tensor = torch.empty(1000)
        with torch.profiler.record_function("a mark 1"):
            pass
        address = tensor.data_ptr()
        del tensor
    assert [(e.address, e.num_bytes, e.scopes) for e in events] == [
        (address, 4000, ("aten::empty",)),
        (0, 0, ("a mark 1",)),
        (address, -4000, ()),
    ]
