"""What is not an operation's fault is not blamed on one: operands, updates, hooks, recomputations, functorch."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import checkpoint

import snugfit
from diagnosed_jobs import Around, found_in, mean_output, plan_of
from snugfit import NonFiniteError
from snugfit.training.diagnosing.diagnose import diagnose
from snugfit.training.torch_private import is_inside_transform

# ---- operands


@pytest.mark.parametrize(
    ("function", "op", "named"),
    [
        (lambda x: x * math.nan, "mul", "the number nan"),
        (lambda x: x + math.inf, "add", "the number inf"),
        (lambda x: -math.inf - x, "sub", "the number -inf"),
        (lambda x: x.clone().fill_(math.nan), "fill", "the number nan"),
        (lambda x: x + torch.tensor([math.nan] * 4), "tensor", "the number nan"),
        (lambda x: x + torch.from_numpy(CONSTANT.numpy()), "add", "operand 2, a tensor of shape (4,)"),
        (lambda x: CONSTANT * x, "mul", "operand 1, a tensor of shape (4,)"),
    ],
    ids=["mul", "add", "rsub", "fill", "tensor", "numpy", "constant"],
)
def test_an_operand_that_is_not_finite_is_named_not_called_finite(function, op, named):
    found = found_in(Around(function))
    assert (found.module, found.op, found.micro_batch) == ("inner", op, 0)
    assert named in found.cause
    assert "inputs that are finite" not in found.cause
    assert "look at where that operand is from" in found.remedy


CONSTANT = torch.tensor([1.0, math.nan, 1.0, 1.0])


class Holding(nn.Linear):
    """Multiplies with what it holds."""

    def __init__(self, what):
        super().__init__(4, 4)
        if what == "buffer":
            self.register_buffer("held", CONSTANT.clone())
        else:
            self.held = CONSTANT.clone() if what == "tensor" else math.nan

    def forward(self, x):
        return super().forward(x) * self.held


@pytest.mark.parametrize(
    ("what", "named"),
    [("number", "attribute held"), ("tensor", "attribute held of inner"), ("buffer", "a buffer is not finite")],
)
def test_an_attribute_or_buffer_that_is_not_finite_is_named(what, named):
    model = nn.Sequential()
    model.add_module("inner", Holding(what))
    found = found_in(model)
    assert found.module == "inner"
    assert named in found.cause


def test_a_mask_of_minus_infinity_in_a_buffer_is_not_to_blame():
    class Masked(nn.Linear):
        def __init__(self, mask):
            super().__init__(4, 4)
            self.register_buffer("mask", torch.tensor(mask))

        def forward(self, x):
            return torch.softmax(super().forward(x) + self.mask, -1)

    assert found_in(Masked([0.0, -math.inf, 0.0, 0.0])).cause == "none"
    found = found_in(Masked([-math.inf] * 4))
    assert (found.op, "unmasked" in found.remedy) == ("softmax", True)


def test_memory_that_was_not_written_yet_is_no_operand():
    def filled(x):
        y = torch.empty(2, 4).fill_(math.nan)
        for i in range(2):
            y[i] = x[i]
        return torch.log(y - y)

    assert found_in(Around(filled)).op == "log"


# ---- updates


@pytest.mark.parametrize(
    ("optimizer", "named", "remedy"),
    [
        (lambda m: torch.optim.SGD(m.parameters(), lr=math.nan), "SGD(lr=nan)", "a finite lr"),
        (lambda m: torch.optim.SGD(m.parameters(), lr=torch.tensor(math.inf)), "SGD(lr=inf)", "a finite lr"),
        (lambda m: torch.optim.Adam(m.parameters(), eps=0.0), "Adam(lr=0.001, eps=0)", "eps=1e-8"),
        (lambda m: torch.optim.SGD(m.parameters(), lr=1e38, weight_decay=1e38), "SGD(lr=1e+38)", "lower the learning"),
    ],
    ids=["nan lr", "inf tensor", "eps 0", "too large"],
)
@pytest.mark.parametrize("steps", [1, 3])
def test_an_update_that_makes_weights_not_finite_is_said_to_have(optimizer, named, remedy, steps):
    job = snugfit.Job(lambda: nn.Linear(4, 4), lambda m, x: m(x).mean() * 0, optimizer, torch.ones(4, 4))
    found = diagnose(job, plan_of(), "cpu", steps=steps)
    assert (found.phase, found.op, found.step, found.num_windows) == ("update", "optimizer step", 0, 1)
    assert named in found.cause
    assert remedy in found.remedy
    assert found.parameters
    assert set(found.parameters) <= {"weight", "bias"}


def test_a_run_whose_update_made_weights_not_finite_names_the_setting():
    job = snugfit.Job(
        lambda: nn.Linear(4, 4),
        lambda m, x: m(x).square().mean(),
        lambda m: torch.optim.SGD(m.parameters(), lr=math.nan),
        torch.ones(4, 4),
        max_skipped_windows=1,
    )
    engine = snugfit.build(job, plan_of(), "cpu")
    engine.step(torch.ones(4, 4))
    with pytest.raises(NonFiniteError) as caught:
        engine.step(torch.ones(4, 4))
    assert "SGD(lr=nan)" in str(caught.value)
    assert "a finite lr" in caught.value.hint


# ---- hooks of the user's


def spoils(*arguments):
    gradient = arguments[-1]
    return (gradient[0] * math.nan,) if isinstance(gradient, tuple) else gradient * math.nan


def spoils_input(module, given, result):
    return (given[0] * math.nan,)


def hooked(output):
    output.register_hook(spoils)
    return output


@pytest.mark.parametrize(
    ("put", "name"),
    [
        (lambda m: m[1].weight.register_hook(spoils), "spoils"),
        (lambda m: m[1].register_full_backward_hook(spoils_input), "spoils_input"),
        (lambda m: m[1].register_full_backward_pre_hook(spoils), "spoils"),
    ],
    ids=["parameter", "module", "module before"],
)
def test_a_hook_that_spoils_a_gradient_is_named(put, name):
    def made():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        put(model)
        return model

    job = snugfit.Job(made, mean_output, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), torch.ones(4, 4))
    found = diagnose(job, plan_of(), "cpu")
    assert (found.module, found.phase, found.micro_batch) == ("1", "backward", 0)
    assert f"{name} (test_diagnose_blame.py:" in found.cause
    assert "look at what the hook does" in found.remedy


def test_a_hook_of_a_tensor_that_spoils_its_gradient_is_named():
    found = found_in(nn.Sequential(nn.Linear(4, 4)), lambda m, x: hooked(m(x)).mean())
    assert (found.phase, found.module) == ("backward", "0")
    assert "spoils (test_diagnose_blame.py:" in found.cause


def test_a_hook_that_does_no_harm_is_not_blamed():
    def loss(model, x):
        y = model(x)
        y.register_hook(lambda gradient: gradient * 2)
        return torch.sqrt(y * 0).mean()

    found = found_in(nn.Sequential(nn.Linear(4, 4)), loss)
    assert (found.op, "hook" in found.cause) == ("SqrtBackward0", False)


def test_a_gradient_that_is_taken_away_again_is_not_found():
    found = found_in(Around(lambda x: torch.log((x - x.detach()).clamp(min=1e-45) + 0 * x.detach()).clamp(min=-5) + x))
    assert found.cause == "none"


# ---- recomputation


class Other(nn.Module):
    """NaN in every second forward."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        y = self.linear(x)
        return torch.tanh(y * math.nan if self.calls % 2 == 0 else y)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.other = nn.Linear(4, 4), Other()

    def forward(self, x):
        return checkpoint.checkpoint(self.other, self.first(x), use_reentrant=False)


@pytest.mark.parametrize("is_torch_s", [False, True], ids=["snugfit", "torch"])
def test_a_nan_of_the_recomputation_alone_is_said_to_be_one(is_torch_s):
    model = Checkpointed() if is_torch_s else nn.ModuleDict({"first": nn.Linear(4, 4), "other": Other()})
    plan = plan_of() if is_torch_s else plan_of(recompute=(snugfit.Segment("other"),))
    loss = mean_output if is_torch_s else lambda m, x: m["other"](m["first"](x)).mean()
    found = found_in(model, loss, plan=plan)
    assert (found.module, found.op, found.phase) == ("other", "recomputation", "backward")
    assert "the recomputation of module 'other' made NaN" in found.cause


def test_a_value_that_is_harmless_in_both_forwards_is_not_blamed_on_the_recomputation():
    class Masking(nn.Linear):
        def forward(self, x):
            return super().forward(x).masked_fill(torch.tensor([True, False, False, False]), -math.inf)

    model = nn.Sequential(nn.Linear(4, 4), Masking(4, 4), nn.Softmax(-1), Around(lambda x: torch.sqrt(x * 0)))
    found = found_in(model, plan=plan_of(recompute=(snugfit.Segment("1"),)))
    assert found.op == "SqrtBackward0"


# ---- functorch


def test_a_loss_that_maps_with_vmap_is_diagnosed():
    def loss(model, b):
        return F.cross_entropy(torch.func.vmap(model)(b["x"]), b["y"])

    batch = {"x": torch.rand(4, 4), "y": torch.arange(4)}
    assert found_in(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), loss, batch).cause == "none"
    batch["x"][3, 1] = math.nan
    assert found_in(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), loss, batch).micro_batch == 1


@pytest.mark.parametrize("inside", [lambda y: torch.log(y * 0 - 1), lambda y: torch.sqrt(y * 0), lambda y: y / (y * 0)])
def test_what_goes_wrong_inside_of_vmap_is_found_outside_of_it(inside):
    found = found_in(nn.Linear(4, 4), lambda m, x: torch.func.vmap(lambda one: inside(m(one)))(x).square().mean())
    assert (found.is_finite, found.micro_batch) == (False, 0)


def test_a_loss_that_takes_gradients_with_functorch_is_diagnosed():
    def loss(model, x):
        return torch.func.grad(lambda one: model(one).square().sum())(x).square().mean()

    assert found_in(nn.Linear(4, 4), loss).cause == "none"


def test_torch_still_says_which_tensors_a_transform_maps_over():
    seen = []
    torch.func.vmap(lambda x: seen.append(is_inside_transform(x)) or x)(torch.ones(2))
    torch.func.grad(lambda x: seen.append(is_inside_transform(x)) or x)(torch.ones(()))
    assert [*seen, is_inside_transform(torch.ones(2))] == [True, True, False]
