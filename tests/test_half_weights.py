"""Models of half-precision weights as transformers loads them, trained without bf16-true: sums, updates, warnings."""

import copy
import warnings

import pytest
import torch
from torch import nn

from models import LinearStack, regression_batch, same_bits, squared_error, state_of
from snugfit import Engine, Plan
from tolerances import EXACT_VALUE

HALVES = [torch.bfloat16, torch.float16]
pytestmark = pytest.mark.filterwarnings("ignore:.*trained weights of torch:UserWarning")


class Weight(nn.Module):
    """One weight, whose gradient is the input's mean."""

    def __init__(self, dtype):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x):
        return (self.w * x.to(self.w.dtype)).sum(-1)


def mean(model, micro_batch):
    return model(micro_batch).float().mean()


def low_error(model, batch):
    dtype = next(model.parameters()).dtype
    return squared_error(model, {"x": batch["x"].to(dtype), "y": batch["y"].to(dtype)}).float()


def seen_by(optimizer):
    """Gradients as a hook of the optimizer sees them."""
    seen = []
    optimizer.register_step_pre_hook(
        lambda o, *_: seen.extend(p.grad.clone() for group in o.param_groups for p in group["params"])
    )
    return seen


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_thousand_micro_batches_of_one_have_the_gradient_of_the_batch(dtype, precision, by_hand):
    """In bf16 the sum of a thousand equal gradients ends at a quarter."""
    model, samples = Weight(dtype), torch.ones(1024, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = seen_by(optimizer)
    engine = Engine(model, optimizer, loss=mean, micro_batch_size=1, precision=precision)
    if by_hand:
        with engine.window(samples) as window:
            for micro_batch in window:
                window.backward(mean(model, micro_batch))
        result = window.result
    else:
        result = engine.step(samples)
    assert (seen[0].dtype, seen[0].item()) == (dtype, 1.0)
    assert result.grad_norm.item() == pytest.approx(1.0, abs=EXACT_VALUE)
    assert (model.w.grad, model.w.grad_dtype) == (None, dtype)


@pytest.mark.parametrize("limit", [None, 0.01])
@pytest.mark.parametrize("form", [{"foreach": False}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_the_update_is_that_of_the_given_optimizer_on_the_rounded_gradient(kind, form, limit):
    model = LinearStack().to(torch.bfloat16)
    twin = copy.deepcopy(model)
    engine = Engine(
        model, kind(model.parameters(), lr=0.1, **form), loss=low_error, micro_batch_size=2, max_grad_norm=limit
    )
    plain = kind(twin.parameters(), lr=0.1, **form)
    for _ in range(3):
        batch = regression_batch(8)
        engine.step(batch)
        sums = [torch.zeros(p.shape) for p in twin.parameters()]
        for start in range(0, 8, 2):
            twin.zero_grad()
            low_error(twin, {name: value[start : start + 2] for name, value in batch.items()}).div(4).backward()
            for total, p in zip(sums, twin.parameters(), strict=True):
                total += p.grad.float()
        for total, p in zip(sums, twin.parameters(), strict=True):
            p.grad = None
            p.grad = total.to(p.dtype)
        if limit is not None:
            norm = torch.stack([total.square().sum() for total in sums]).sum().sqrt()
            for total, p in zip(sums, twin.parameters(), strict=True):
                p.grad = (total * (limit / (norm + 1e-6)).clamp(max=1.0)).to(p.dtype)
        plain.step()
        for ours, theirs in zip(state_of(model), state_of(twin), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-9)
    if limit is None:
        assert same_bits(state_of(model), state_of(twin))


def test_l_bfgs_evaluates_on_gradients_of_the_weights_type():
    model = LinearStack().to(torch.bfloat16)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    before = state_of(model)
    engine = Engine(model, optimizer, loss=low_error, micro_batch_size=2)
    assert not engine.step(regression_batch(8)).skipped
    assert not same_bits(before, state_of(model))
    assert {p.grad_dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_window_that_fails_leaves_the_type_of_gradients_as_it_was(error):
    def loss(model, micro_batch):
        if micro_batch[0] == 3:
            raise error
        return mean(model, micro_batch)

    model = Weight(torch.bfloat16)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, micro_batch_size=1)
    with pytest.raises(error):
        engine.step(torch.arange(4.0)[:, None])
    assert (model.w.grad, model.w.grad_dtype) == (None, torch.bfloat16)
    assert engine.step(torch.tensor([[1.0], [float("nan")]])).skipped
    assert (model.w.grad, model.w.grad_dtype) == (None, torch.bfloat16)


@pytest.mark.filterwarnings("default:.*trained weights of torch:UserWarning")
def test_such_weights_are_warned_of_once_with_names_numbers_and_ways_out():
    model = LinearStack().to(torch.bfloat16)
    with pytest.warns(UserWarning, match="trained weights") as caught:
        Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=low_error, precision="bf16-mixed")
    (text,) = [str(one.message) for one in caught]
    for part in ("6 trained weights of torch.bfloat16", "layers.0.weight", "and 3 more", "2^-9", "model.float()"):
        assert part in text
    assert "Plan(precision='bf16-true')" in text


@pytest.mark.filterwarnings("error:.*trained weights of torch:UserWarning")
def test_frozen_half_weights_beside_trained_fp32_ones_are_not_warned_of():
    model = LinearStack()
    model.layers[0].to(torch.bfloat16).requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Engine(model, torch.optim.SGD(model.layers[1].parameters(), lr=0.1), loss=low_error)


def test_a_plan_of_bf16_mixed_takes_the_same_way():
    model = Weight(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = seen_by(optimizer)
    plan = Plan(batch_size=1024, micro_batch_size=1, precision="bf16-mixed")
    Engine(model, optimizer, plan, loss=mean).step(torch.ones(1024, 1))
    assert seen[0].item() == 1.0
