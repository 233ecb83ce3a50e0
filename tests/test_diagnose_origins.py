"""The first value that is not finite is named by module, operation, micro-batch and phase, whatever made it."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import snugfit
from diagnosed_jobs import Around, Maps, Operation, found_in, one_weight, plan_of
from snugfit import Loss

# ---- the cases


def test_c044_the_first_overflow_is_named_not_the_nan_that_follows():
    found = found_in(Maps(), plan=plan_of(4, precision="16-mixed"))
    assert (found.module, found.op, found.phase, found.micro_batch) == ("b", "linear", "forward", 0)
    assert 'precision="bf16-mixed"' in found.remedy
    assert 'snugfit.precision.keep_fp32(model, "b", "c")' in found.remedy
    assert {one.remedy: one.is_finite for one in found.tried} == {
        'precision="bf16-mixed"': True,
        "fp32 for b": False,
        "fp32 for b, c": True,
    }


def test_c044_with_b_and_c_in_fp32_the_outputs_are_80000_and_0():
    model = Maps()
    handle = snugfit.precision.keep_fp32(model, "b", "c")
    with snugfit.precision.autocast("16-mixed", "cpu"):
        middle = model.b(model.a(torch.ones(1, 4)))
        assert middle.tolist() == [[80000.0] * 4]
        assert model.c(middle).tolist() == [[0.0] * 4]
    handle.remove()


class Planted(nn.Module):
    """A layer that makes NaN out of the micro-batch whose first value is 3."""

    def __init__(self, phase):
        super().__init__()
        self.linear, self.phase = nn.Linear(4, 4), phase

    def forward(self, x):
        y = self.linear(x)
        if x[0, 0] != 3:
            return y
        if self.phase == "forward":
            return torch.sqrt(-y.abs() - 1)
        return y + torch.sqrt(y.detach() * 0 + 0 * y)


@pytest.mark.parametrize(
    ("phase", "op"), [("forward", "sqrt"), ("backward", "SqrtBackward0")], ids=["forward", "backward"]
)
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recomputed"])
def test_peers_11_a_nan_of_one_layer_in_micro_batch_3_is_named_with_both(phase, op, recompute):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Identity(), Planted(phase)), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(4))
        model[0].bias.zero_()
    batch = torch.arange(6.0).repeat_interleave(4).reshape(6, 4)
    segments = (snugfit.Segment("1"),) if recompute else ()
    found = found_in(model, batch=batch, plan=plan_of(1, 6, recompute=segments))
    assert (found.module, found.op, found.phase, found.micro_batch, found.rank) == ("1.1", op, phase, 3, 0)
    assert {"forward": "sqrt(x.clamp(min=0) + 1e-12)", "backward": "sqrt(x + 1e-12)"}[phase] in found.remedy


@pytest.mark.parametrize("recompute", [(), (("0", "1", "2", "3"),), (("0", "1"), ("2", "3")), (("2",),)])
def test_the_module_is_named_whatever_is_recomputed_together(recompute):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Operation(lambda x: torch.exp(x + 1000)), nn.Linear(4, 4))
    segments = tuple(snugfit.Segment(names) for names in recompute)
    found = found_in(model, plan=plan_of(recompute=segments))
    assert (found.module, found.op, found.micro_batch) == ("2", "exp", 0)
    assert found.head_room[0].largest == pytest.approx(1000, abs=2)


# ---- kinds of origin


KEEP_SHAPE = {
    "exp overflow": (lambda x: torch.exp(x * 1000), "exp", "forward", "limit its input"),
    "expm1 in place": (lambda x: (x * 1000).expm1_(), "expm1", "forward", "limit its input"),
    "softmax over a masked row": (
        lambda x: F.softmax(torch.full_like(x, -math.inf) + x, dim=-1),
        "softmax",
        "forward",
        "unmasked",
    ),
    "masked with where": (
        lambda x: torch.where(x > 5, x, -math.inf).softmax(-1),
        "softmax",
        "forward",
        "unmasked",
    ),
    "log of 0": (lambda x: torch.log(x - x), "log", "forward", "above 0"),
    "division by 0": (lambda x: x / (x - x), "div", "forward", "divisor"),
    "division in place": (lambda x: x.clone().div_(x - x), "div", "forward", "divisor"),
    "a number divided by 0": (lambda x: 1 / (x - x), "div", "forward", "divisor"),
    "0 divided by 0": (lambda x: (x - x) / (x - x), "div", "forward", "divisor"),
    "root of 0": (lambda x: torch.sqrt(x - x.detach()), "SqrtBackward0", "backward", "away from 0"),
    "norm of 0": (lambda x: (x * 0).norm(dim=-1, keepdim=True) + x, "", "", ""),
    "power below 1 of 0": (lambda x: (x - x.detach()) ** 0.5, "PowBackward0", "backward", "exponent"),
    "log hidden by where": (
        lambda x: torch.where(x > 5, torch.log(x - x.detach()), x),
        "LogBackward0",
        "backward",
        "above 0",
    ),
    "product overflow": (lambda x: x * 1e38 * 10, "mul", "forward", "learning rate"),
    "in an index": (lambda x: assigned(x), "log", "forward", "above 0"),
}


HARMLESS = ("norm of 0",)


def assigned(x):
    y = x.clone()
    y[:, 1] = torch.log(x[:, 1] - x[:, 1])
    return y


@pytest.mark.parametrize("name", [name for name in KEEP_SHAPE if name not in HARMLESS])
def test_the_operation_of_the_module_is_named(name):
    function, op, phase, advice = KEEP_SHAPE[name]
    found = found_in(Around(function))
    assert (found.module, found.op, found.phase, found.micro_batch) == ("inner", op, phase, 0)
    assert advice in found.remedy
    assert not found.is_finite
    assert "'inner'" in found.cause


@pytest.mark.parametrize("name", HARMLESS)
def test_what_torch_defines_at_zero_is_not_found(name):
    assert found_in(Around(KEEP_SHAPE[name][0])).cause == "none"


def test_a_nan_of_the_loss_function_has_no_module():
    found = found_in(nn.Linear(4, 4), loss=lambda model, x: torch.log(model(x).mean() * 0))
    assert (found.module, found.op, found.phase) == ("", "log", "forward")
    assert "loss function" in found.cause


def test_a_minus_infinity_that_goes_away_is_not_to_blame():
    def masked(x):
        mask = torch.log(torch.tensor([1.0, 0.0, 1.0, 1.0]))
        return F.softmax(x + mask, dim=-1)

    model = nn.Sequential(Operation(masked), nn.Linear(4, 4), Operation(lambda x: torch.log(x - x)), nn.Linear(4, 4))
    found = found_in(model)
    assert (found.module, found.op) == ("2", "log")
    assert found_in(model[:2]).cause == "none"


class Bad(torch.autograd.Function):
    """Finite in forward, NaN in backward."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.nan


def test_a_custom_function_is_found_in_backward_by_its_own_name():
    found = found_in(Around(Bad.apply))
    assert (found.module, found.op, found.phase) == ("inner", "BadBackward", "backward")


def test_a_sum_of_gradients_that_overflows_over_the_micro_batches_is_named_as_that():
    def loss(model, x):
        return (model["last"](x) * 3e38).mean()

    model = nn.ModuleDict({"last": one_weight(0.0)})
    found = found_in(model, loss, torch.ones(31, 1), plan_of(16, 31))
    assert (found.module, found.op, found.phase, found.micro_batch) == ("last", "gradient accumulation", "backward", 1)


def test_a_norm_that_overflows_is_told_from_a_gradient_that_does():
    found = found_in(nn.Linear(4, 4), loss=lambda model, x: (model(x) * 1e30).mean())
    assert (found.op, found.phase) == ("gradient norm", "backward")
    assert found.parameters == ()


def test_a_sum_in_fp16_overflows_in_the_loss_function():
    def loss(model, x):
        return model(x).half().sum() * 1.0

    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(1000.0)
    found = found_in(model, loss=loss, batch=torch.ones(64, 4), plan=plan_of(64, 64))
    assert (found.module, found.op, found.phase) == ("", "sum", "forward")
    assert "float16" in found.cause


@pytest.mark.parametrize("count", [0, 0.0, torch.tensor(0.0)], ids=["int", "float", "tensor"])
def test_a_loss_whose_count_is_0_is_not_to_blame(count):
    def loss(model, x):
        value = model(x).sum()
        return Loss(value * math.nan, count) if x[0, 0] == 0 else Loss(value, torch.tensor(2.0))

    batch = torch.tensor([[0.0], [0.0], [1.0], [1.0]]).expand(4, 4).contiguous()
    if not isinstance(count, torch.Tensor):
        batch = batch.clone()
    assert found_in(nn.Linear(4, 4), loss, batch).cause == "none"
    batch[3] = math.nan
    assert found_in(nn.Linear(4, 4), loss, batch).micro_batch == 1


def test_of_several_losses_the_one_that_is_not_finite_is_found():
    def losses(model, x):
        y = model(x)
        return [Loss(y.sum()), Loss(torch.log(y * 0).sum())]

    found = found_in(nn.Linear(4, 4), losses)
    assert (found.module, found.op) == ("", "log")


def test_a_value_that_was_made_finite_again_is_not_to_blame():
    def repaired(x):
        y = torch.log(x - x)
        y.fill_(1.0)
        return y / (x - x)

    assert found_in(Around(repaired)).op == "div"


def test_a_custom_function_is_its_module_s_also_where_another_module_takes_its_output():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.inner(Bad.apply(self.first(x)))

    found = found_in(nn.ModuleDict({"outer": Outer()}), lambda model, x: model["outer"](x).mean())
    assert (found.module, found.op) == ("outer", "BadBackward")


def test_the_size_of_the_inputs_is_that_before_an_operation_in_place():
    found = found_in(Around(lambda x: (x * 1000).expm1_()))
    assert "largest finite input 1000" in found.cause


# ---- planted from outside


def times_nan(module, args, output):
    return output * math.nan


def plus_inf(module, args, output):
    return output + math.inf


def filled(module, args, output):
    output.data.fill_(math.nan)


def set_in_place(module, args, output):
    with torch.no_grad():
        output[0] = math.nan
    return output


def replaced(module, args, output):
    return torch.full_like(output, math.nan, requires_grad=True)


@pytest.mark.parametrize("hook", [times_nan, plus_inf, filled, set_in_place, replaced])
def test_a_layer_whose_output_a_hook_spoils_is_named(hook):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].register_forward_hook(hook)
    found = found_in(model)
    assert (found.module, found.phase, found.micro_batch) == ("1", "forward", 0)


def test_a_layer_whose_gradient_a_hook_spoils_is_named():
    class Spoiled(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            y.register_hook(lambda gradient: gradient * math.nan)
            return y

    found = found_in(nn.Sequential(nn.Linear(4, 4), Spoiled(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    assert (found.module, found.op, found.phase) == ("1", "AddmmBackward0", "backward")
    assert "hook" in found.cause


def test_a_gradient_that_a_hook_of_the_parameter_spoils_is_named():
    class Own(nn.Linear):
        def forward(self, x):
            if not self.weight._backward_hooks:
                self.weight.register_hook(lambda gradient: gradient * math.nan)
            return super().forward(x)

    found = found_in(nn.Sequential(nn.Linear(4, 4), Own(4, 4)))
    assert (found.module, found.parameters) == ("1", ("1.weight",))
    assert "hook" in found.cause


def test_logits_that_are_masked_where_the_label_is_are_said_to_be_that():
    def loss(model, x):
        return F.cross_entropy(
            model(x).masked_fill(torch.eye(4, dtype=torch.bool)[0], -math.inf), torch.zeros(2).long()
        )

    found = found_in(nn.Linear(4, 4), loss)
    assert (found.module, found.phase) == ("", "forward")
    assert "-inf that was put in on purpose" in found.cause


def test_a_mask_made_by_multiplying_with_infinity_is_to_blame():
    found = found_in(Around(lambda x: x + (x < 100) * torch.zeros(()) * -math.inf))
    assert (found.module, found.op) == ("inner", "mul")
