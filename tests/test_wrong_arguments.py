"""What is no model, no loader, no device or no name is refused by name, whatever it is, and nothing has changed."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from models import LinearStack, Weight, mean_product, regression_batch, same_bits, squared_error, state_of
from snugfit import (
    Engine,
    Job,
    Loss,
    Plan,
    PlanError,
    SnugfitError,
    gradient_noise,
    learning_rate,
    norms,
    precision,
    tokens,
)

NO_MODEL = (None, 3, "model", [], nn.Linear, torch.ones(2), lambda: nn.Linear(1, 1))
TAKE_A_MODEL = {
    "Engine": lambda it: Engine(it, torch.optim.SGD([torch.ones(1, requires_grad=True)]), loss=squared_error),
    "keep_fp32": lambda it: precision.keep_fp32(it, "head"),
    "to_fp32_masters": precision.to_fp32_masters,
    "freeze": norms.freeze,
    "to_group_norm": lambda it: norms.to_group_norm(it, 2),
    "to_sync": norms.to_sync,
    "set_momentum": lambda it: norms.set_momentum(it, 0.1),
    "window_statistics": norms.window_statistics,
}


@pytest.mark.parametrize("name", TAKE_A_MODEL)
def test_what_is_no_model_is_refused(name):
    for it in NO_MODEL:
        with pytest.raises(PlanError, match="there is no model"):
            TAKE_A_MODEL[name](it)


def engine_of(**settings):
    model = LinearStack(depth=1)
    optimizer = settings.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    return Engine(model, optimizer, loss=settings.pop("loss", squared_error), **settings)


def job_of(**settings):
    return Job(nn.Identity, print, torch.optim.SGD, None, **settings)


def with_optimizer(model):
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


ARRAY = np.array([1.0, 2.0])
REFUSED = {
    "a count that is an array": lambda: engine_of(count=ARRAY),
    "a policy that is an array": lambda: engine_of(nonfinite=ARRAY),
    "a precision that is an array": lambda: engine_of(precision=ARRAY),
    "a field of a plan that is an array": lambda: Plan(batch_size=1, micro_batch_size=1, sync=ARRAY),
    "skipped windows that are a truth value": lambda: engine_of(max_skipped_windows=True),
    "a seed that is a word": lambda: job_of(seed="x"),
    "a seed that is a fraction": lambda: job_of(seed=0.5),
    "a lazy buffer": lambda: Engine(*with_optimizer(nn.LazyBatchNorm1d()), loss=mean_product),
    "no optimizer": lambda: Engine(Weight(), [], loss=mean_product),
    "an optimizer as the scheduler": lambda: engine_of(scheduler=torch.optim.SGD([torch.ones(1, requires_grad=True)])),
    "a number as the loader": lambda: engine_of().windows(3, 2),
    "a batch as the loader": lambda: engine_of().windows({"x": torch.ones(2)}, 2),
    "a tensor as the loader": lambda: engine_of().windows(torch.ones(4, 2), 2),
    "a truth value as the length of a window": lambda: engine_of().windows([], True),
    "a device of no kind": lambda: precision.autocast("bf16-mixed", "gpu"),
    "a model as the device": lambda: precision.autocast("bf16-mixed", nn.Identity()),
    "a warm-up of no optimizer": lambda: learning_rate.warmup([0.1], 3),
    "a rule that is an array": lambda: learning_rate.scale(0.1, 2, ARRAY),
    "the noise of no engine": lambda: gradient_noise.track(Weight()),
    "tokens of a word": lambda: tokens("labels"),
    "tokens shifted by a number": lambda: tokens(shift=1),
    "tokens at no key": lambda: tokens(key=None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_of_the_wrong_kind_is_refused_by_name(name):
    with pytest.raises(SnugfitError) as caught:
        REFUSED[name]()
    assert all((caught.value.got, caught.value.expected, caught.value.hint))


@pytest.mark.parametrize("metrics", [3, [1], {"a": 1}, {"a": (1,)}, {"a": ("x", 1)}, {"a": (torch.ones(2), 1)}])
def test_metrics_that_cannot_be_averaged_are_refused_and_nothing_moves(metrics):
    model = LinearStack(depth=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = StepLR(optimizer, 1)
    engine = Engine(
        model,
        optimizer,
        loss=lambda model, batch: Loss(squared_error(model, batch) * 4, 4, metrics=metrics),
        scheduler=scheduler,
    )
    batch = regression_batch(4)
    before = [*state_of(model, optimizer, scheduler), torch.get_rng_state()]
    with pytest.raises(PlanError, match=r"Loss\.metrics"):
        engine.step(batch)
    assert same_bits(before, [*state_of(model, optimizer, scheduler), torch.get_rng_state()])


def test_metrics_may_be_numbers_of_any_kind_or_tensors_of_one_element():
    pairs = {"a": (np.float32(3), np.int64(4)), "b": (torch.tensor([3.0]), 4), "c": (True, torch.tensor(4))}
    engine = engine_of(loss=lambda model, batch: Loss(squared_error(model, batch) * 4, 4, metrics=pairs))
    found = engine.step(regression_batch(4)).metrics
    assert {name: float(value) for name, value in found.items()} == {"a": 0.75, "b": 0.75, "c": 0.25}
