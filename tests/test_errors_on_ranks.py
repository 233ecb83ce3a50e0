"""Two gloo processes: what fails on one of them is raised by both, and nobody waits for one that has left."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))

from models import Weight
from snugfit import BatchError, DeviceMemoryError, Loss, Plan, PlanError, UnsupportedError
from snugfit.training.engine import Engine
from two_ranks import RANKS, results_of

EVERY_STEP = {"plan": Plan(batch_size=4, micro_batch_size=1, world_size=2, sync="micro")}
"Settings of an engine whose ranks reduce in every micro-step."


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What every scenario returns on each of two ranks."""
    return results_of(SCENARIOS, tmp_path_factory.mktemp("ranks"))


def engine_of(model, loss, **settings):
    return Engine(DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=1.0), loss=loss, **settings)


def window_of(rank):
    return [torch.tensor([x]) for x in [(1.0, 3.0), (2.0, 5.0)][rank]]


def out_of_memory(rank):
    def loss(model, micro_batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine = engine_of(Weight(), loss)
    try:
        engine.step(torch.ones(4))
    except DeviceMemoryError as error:
        return str(error)
    return ""


def test_an_out_of_memory_error_under_ddp_is_named_and_not_retried(ranks):
    for message in ranks["out_of_memory"]:
        assert "DDP" in message


class Buffered(Weight):
    """A weight with a buffer, which DDP sends in its forwards."""

    def __init__(self):
        super().__init__(0.0)
        self.register_buffer("nothing", torch.zeros(1))


def failing(rank):
    """One rank's loss function brings nothing, or raises, in some micro-batches of a window."""
    found = []
    for how, failing_window, failing_steps, make, settings in (
        ("nothing", 0, (0,), Weight, {}),
        ("nothing", 1, (1,), Weight, {}),
        ("nothing", 1, (0, 1), Buffered, {}),
        ("an error", 0, (1,), Weight, {}),
        ("an error", 1, (0,), Buffered, {}),
        ("an error", 0, (0,), Weight, EVERY_STEP),
        ("an error inside", 1, (1,), Weight, {}),
    ):
        present = iter([])

        def loss(model, x):
            is_failing = rank == 1 and next(present)  # noqa: B023  (of the window that runs)
            if how == "an error inside" and is_failing:  # noqa: B023
                model(None)
            if how == "nothing" and is_failing:  # noqa: B023
                return None
            value = model(x).mean()
            if is_failing:
                raise KeyError("nothing to see")
            return value

        model = make()
        engine = engine_of(model, loss, **settings)
        with torch.no_grad():
            model.w.zero_()
        errors = []
        for window in range(3):
            present = iter([window == failing_window and i in failing_steps for i in range(2)])
            try:
                engine.step_window(window_of(rank))
            except (PlanError, KeyError, TypeError) as error:
                errors.append((window, type(error).__name__))
        engine.check_ranks()
        found.append([errors == [(failing_window, errors[0][1])], engine.step_count, float(model.w)])
    return found


def test_c045_what_fails_in_the_loss_function_of_one_rank_is_raised_by_all_and_the_next_window_is_right(ranks):
    for found in ranks["failing"]:
        assert found == [[True, 2, -2 * 2.75]] * 7


class BreaksOff(torch.autograd.Function):
    """Nothing in forward; an error in backward."""

    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ctx.error


class Product(nn.Module):
    """Three weights that are multiplied one after the other, each in a bucket of its own."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(())) for _ in range(3))
        self.error = self.breaks_at = None

    def forward(self, x):
        for i, weight in enumerate(self.weights):
            x = x * weight
            if self.error is not None and i == self.breaks_at:
                x = BreaksOff.apply(x, self.error)
        return x


def one_mean(model, x):
    return model(x).mean()


def two_losses(model, x):
    product = model(x)
    return [product.mean(), Loss(product.square().sum(), x.sum())]


GRADIENTS = {one_mean: 11 / 4, two_losses: 11 / 4 + 2 * (1 + 9 + 4 + 25) / 11}
"Of each weight, while all are 1."


def breaking_off(rank):
    """One rank's backward breaks off, before, between or after the gradients that are sent."""
    found = []
    for own, failing, breaks_at, error, settings in (
        (one_mean, (0, 1), 0, ValueError, {}),
        (one_mean, (1, 1), 1, ValueError, {}),
        (one_mean, (1, 1), 2, torch.OutOfMemoryError, {}),
        (one_mean, (0, 0), 1, ValueError, {}),
        (one_mean, (1, 0), 1, ValueError, EVERY_STEP),
        (two_losses, (1, 1), 1, ValueError, {}),
        (two_losses, (1, 0), 1, ValueError, {}),
    ):
        model, errors, gradients = Product(), [], []
        model.breaks_at = breaks_at
        places = iter([(window, i) for window in range(3) for i in range(2)])

        def loss(wrapped, x):
            fails = next(places) == failing and rank == 1  # noqa: B023  (of the engine that runs)
            wrapped.module.error = error("CUDA out of memory") if fails else None  # noqa: B023
            return own(wrapped, x)  # noqa: B023

        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer.register_step_pre_hook(lambda *_: gradients.append([float(w.grad) for w in model.weights]))  # noqa: B023
        engine = Engine(DistributedDataParallel(model, bucket_cap_mb=1e-6), optimizer, loss=loss, **settings)
        for window in range(3):
            try:
                engine.step_window(window_of(rank))
            except (PlanError, ValueError, DeviceMemoryError) as caught:
                errors.append((window, type(caught)))
        raised = PlanError if rank == 0 else ValueError if error is ValueError else DeviceMemoryError
        are_right = [pytest.approx([GRADIENTS[own]] * 3) == gradient for gradient in gradients]
        found.append([errors == [(failing[0], raised)], are_right])
    return found


def test_a_backward_that_breaks_off_on_one_rank_is_raised_by_all_and_the_next_window_is_right(ranks):
    assert ranks["breaking_off"] == [[[True, [True, True]]] * 7] * RANKS


def breaking_off_behind(rank):
    """A backward that breaks off behind all parameters, at an input that needs a gradient as well."""
    model, said = Product(), []
    wrapped = DistributedDataParallel(model)

    def loss(wrapped, x):
        x = x.clone().requires_grad_()
        return wrapped(BreaksOff.apply(x, ValueError("behind")) if rank == 1 and not said else x).mean()

    engine = Engine(wrapped, torch.optim.SGD(model.parameters(), lr=0.0), loss=loss)
    try:
        engine.step_window(window_of(rank))
    except (PlanError, ValueError) as error:
        said.append(str(error))
    if rank == 1:  # the other one would wait for it
        try:
            engine.step_window(window_of(rank))
        except UnsupportedError as error:
            said.append(str(error))
    return said


def test_a_backward_that_breaks_off_behind_all_parameters_is_raised_by_all_and_the_next_window_by_name(ranks):
    first, second = ranks["breaking_off_behind"]
    assert "failed on another rank" in first[0]
    assert "behind" in second[0]
    assert "reduced no more" in second[1]


def sharing(rank):
    """On one rank the batch comes with a graph that all of its micro-batches share."""
    shared = torch.ones(2, requires_grad=True) * 2
    parts = [shared[:1], shared[1:]] if rank == 1 else window_of(rank)
    engine = engine_of(Weight(), lambda model, x: model(x).mean())
    try:
        engine.step_window(parts)
    except (PlanError, BatchError) as error:
        return str(error)
    return ""


def test_what_one_rank_says_of_a_backward_is_what_a_single_process_says(ranks):
    assert "failed on another rank" in ranks["sharing"][0]
    assert "comes with the batch" in ranks["sharing"][1]


SCENARIOS = (out_of_memory, failing, breaking_off, sharing, breaking_off_behind)
