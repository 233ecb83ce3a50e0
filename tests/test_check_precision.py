"""Half precision: weights, undecorated functions, masks and other values outside of the range."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from checked_jobs import Wrapped, found, regression
from models import WIDTH, LinearStack
from snugfit import check


def half_activation(freeze=False):
    model = LinearStack()
    model.act = nn.PReLU(init=0.25)
    model.act.weight.data = model.act.weight.data.half()
    model.act.weight.requires_grad_(not freeze)
    return model


def half_loss(model, batch):
    return F.mse_loss(model(batch["x"]) * model.act.weight.float(), batch["y"])


def test_c034_half_precision_trainable_weights_are_named():
    report = check(*regression(half_activation, half_loss, precision="16-mixed"), "cpu")
    assert [(hazard.kind, hazard.module) for hazard in report.hazards] == [("half-precision-weight", "act")]
    assert "act.weight" in report.hazards[0].message
    frozen = regression(lambda: half_activation(freeze=True), half_loss, precision="16-mixed")
    assert found(*frozen) == []


class Product(torch.autograd.Function):
    """A product with its own backward, undecorated."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx, gradient):
        a, b = ctx.saved_tensors
        return gradient @ b.t(), a.t() @ gradient


class DecoratedProduct(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        a, b = ctx.saved_tensors
        return gradient @ b.t(), a.t() @ gradient


class Rounded(torch.autograd.Function):
    """Elementwise, so that no type can clash."""

    @staticmethod
    def forward(ctx, a, b):
        return a.round() + 0 * b[:1]

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class WithFunction(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return self.function.apply(x, self.weight)


def test_c052_an_undecorated_function_is_named_before_training():
    def model(function):
        return lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), WithFunction(function), nn.Linear(WIDTH, WIDTH))

    report = check(*regression(model(Product), precision="bf16-mixed"), "cpu")
    assert [(hazard.kind, hazard.module) for hazard in report.hazards] == [("undecorated-function", "1")]
    assert "Product" in report.hazards[0].message
    assert "keep_fp32(model, '1')" in report.hazards[0].message
    assert found(*regression(model(Product))) == []
    for function in (DecoratedProduct, Rounded):
        assert found(*regression(model(function), precision="bf16-mixed")) == []


def test_c052_of_two_undecorated_functions_the_one_that_clashes_is_named():
    model = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), WithFunction(Product), WithFunction(Rounded))  # noqa: E731
    report = check(*regression(model, precision="bf16-mixed"), "cpu")
    assert [(hazard.kind, hazard.module) for hazard in report.hazards] == [("undecorated-function", "1")]


class Attention(nn.Module):
    def __init__(self, mask, full_row):
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mask, self.full_row = mask, full_row

    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        banned = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        banned[0] |= self.full_row
        return torch.softmax(self.mask(scores, banned), -1) @ x


class AttentionNet(nn.Module):
    def __init__(self, mask, full_row=False):
        super().__init__()
        self.attention, self.out = Attention(mask, full_row), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(self.attention(x))


def lowest(scores):
    return torch.finfo(scores.dtype).min


MASKS = {
    "filled with -1e9": lambda scores, banned: scores.masked_fill(banned, -1e9),
    "-1e9 added": lambda scores, banned: scores + banned.to(scores.dtype) * -1e9,
    "-1e9 chosen": lambda scores, banned: torch.where(banned, -1e9, scores),
    "-1e9 cast": lambda scores, banned: scores + (banned.float() * -1e9).to(scores.dtype),
    "lowest - 16": lambda scores, banned: (scores * 0 - 16) + banned.to(scores.dtype) * lowest(scores),
    "two lowest": lambda scores, banned: scores + 2 * (banned.to(scores.dtype) * lowest(scores)),
}


SAFE_MASKS = {
    "lowest - 15": lambda scores, banned: (scores * 0 - 15) + banned.to(scores.dtype) * lowest(scores),
    "half of the lowest": lambda scores, banned: scores.masked_fill(banned, lowest(scores) / 2),
}


def attention_batch():
    return {"x": torch.randn(4, 5, WIDTH), "y": torch.randn(4, 5, WIDTH)}


@pytest.mark.parametrize("full_row", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_c080_a_mask_outside_of_the_fp16_range_is_named(mask, full_row):
    model = lambda: AttentionNet(MASKS[mask], full_row)  # noqa: E731
    report = check(*regression(model, batch=attention_batch(), precision="16-mixed"), "cpu")
    assert ("half-range", "attention") in [(hazard.kind, hazard.module) for hazard in report.hazards]
    assert {hazard.kind for hazard in report.hazards} <= {"half-range", "fully-masked-row"}


@pytest.mark.parametrize("full_row", [False, True])
@pytest.mark.parametrize("mask", SAFE_MASKS)
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_c080_a_mask_inside_of_the_range_gives_finite_values(mask, full_row, precision):
    model = lambda: AttentionNet(SAFE_MASKS[mask], full_row)  # noqa: E731
    assert found(*regression(model, batch=attention_batch(), precision=precision)) == []


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_c080_a_fully_masked_row_is_named_in_every_precision(precision):
    def mask(scores, banned):
        return scores.masked_fill(banned, -math.inf)

    full = regression(lambda: AttentionNet(mask, full_row=True), batch=attention_batch(), precision=precision)
    report = check(*full, "cpu")
    assert [(hazard.kind, hazard.module) for hazard in report.hazards] == [("fully-masked-row", "attention")]
    assert found(*regression(lambda: AttentionNet(mask), batch=attention_batch(), precision=precision)) == []


def test_c080_a_bf16_mask_of_two_lowest_values_is_named():
    model = lambda: AttentionNet(MASKS["two lowest"])  # noqa: E731
    report = check(*regression(model, batch=attention_batch(), precision="bf16-mixed"), "cpu")
    assert [(hazard.kind, hazard.module) for hazard in report.hazards] == [("half-range", "attention")]


class Exponential(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear, self.size = nn.Linear(WIDTH, WIDTH), size

    def forward(self, x):
        return self.linear(x) + torch.log(torch.exp(self.linear(x) * 0 + self.size).mean(-1, keepdim=True))


@pytest.mark.parametrize(("size", "kinds"), [(11.0, []), (11.2, ["half-range"])])
def test_an_exponential_above_the_fp16_range_is_named(size, kinds):
    model = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Exponential(size))  # noqa: E731
    report = check(*regression(model, batch=attention_batch(), precision="16-mixed"), "cpu")
    assert [hazard.kind for hazard in report.hazards] == kinds
    assert all("exp in '1'" in hazard.message for hazard in report.hazards)
    assert found(*regression(model, batch=attention_batch(), precision="bf16-mixed")) == []


def test_a_division_by_what_fp16_cannot_hold_is_named():
    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = self.linear(x)
            return (x + 1) / ((x - x).abs() + 1e-9) * 1e-9

    model = lambda: nn.Sequential(Normalised())  # noqa: E731
    report = check(*regression(model, precision="16-mixed"), "cpu")
    assert [(hazard.kind, hazard.module) for hazard in report.hazards] == [("half-range", "0")]
    assert found(*regression(model)) == []


def test_a_loss_that_raises_without_a_message_in_half_precision_only_is_named():
    def loss(model, batch):
        value = model(batch["x"])
        if value.dtype == torch.bfloat16:
            raise NotImplementedError
        return F.mse_loss(value, batch["y"])

    assert found(*regression(lambda: nn.Linear(WIDTH, WIDTH), loss, precision="bf16-mixed")) == ["fails-in-precision"]


def test_c034_several_half_precision_weights_are_one_hazard():
    def model():
        net = LinearStack()
        net.layers[1].half()
        net.layers[2].bias.data = net.layers[2].bias.data.half()
        return net

    def loss(net, batch):
        return F.mse_loss(net.layers[0](batch["x"]), batch["y"])

    report = check(*regression(model, loss, precision="16-mixed"), "cpu")
    (hazard,) = report.hazards
    assert (hazard.kind, hazard.module) == ("half-precision-weight", "")
    assert all(name in hazard.message for name in ("layers.1.weight", "layers.1.bias", "layers.2.bias"))


@pytest.mark.parametrize("scores", [lambda x: x * 0 - 1e9, lambda x: x * 1e9], ids=["minus", "both"])
def test_scores_that_leave_the_fp16_range_are_not_taken_for_a_masked_row(scores):
    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return scores(self.linear(x)).softmax(-1)

    report = check(*regression(lambda: Wrapped(Scores()), precision="16-mixed"), "cpu")
    assert {(hazard.kind, hazard.module) for hazard in report.hazards} == {("half-range", "inner")}


class Watched(nn.Module):
    """A statistic of its output that leaves the range of float16."""

    def __init__(self, is_used):
        super().__init__()
        self.linear, self.is_used, self.size = nn.Linear(WIDTH, WIDTH), is_used, None

    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            self.size = (y * 0 + 3000).mul(3000)
        return y * self.size if self.is_used else y


def test_a_statistic_that_nothing_is_trained_on_may_leave_the_range():
    assert found(*regression(lambda: Wrapped(Watched(is_used=False)), precision="16-mixed")) == []
    report = check(*regression(lambda: Wrapped(Watched(is_used=True)), precision="16-mixed"), "cpu")
    assert ("half-range", "inner") in [(hazard.kind, hazard.module) for hazard in report.hazards]


def test_a_kernel_that_this_cpu_lacks_is_said_to_be_one_of_its_own():
    def loss(model, batch):
        value = model(batch["x"])
        if value.dtype == torch.float16:
            raise RuntimeError("\"some_kernel_cpu\" not implemented for 'Half'")
        return F.mse_loss(value, batch["y"])

    report = check(*regression(lambda: nn.Linear(WIDTH, WIDTH), loss, precision="16-mixed"), "cpu")
    assert [hazard.kind for hazard in report.hazards] == ["fails-in-precision"]
    assert "the CPU of this machine has no kernel" in report.hazards[0].message


def test_what_is_not_finite_in_float64_alone_is_judged_in_float32():
    def loss(model, batch):
        scores = model(batch["x"])
        least = torch.full_like(scores, torch.finfo(scores.dtype).min).float()  # a mask: -inf where it was float64
        return F.mse_loss(scores, batch["y"]) + 0.0 * (scores.float() * (least / 1e10)).mean()

    report = check(*regression(LinearStack, loss), "cpu")
    assert report.ok
    assert any("in float64, which training does not use" in line for line in report.assumptions)


def test_what_is_finite_in_no_type_is_still_named():
    def loss(model, batch):
        return F.mse_loss(model(batch["x"]), batch["y"]) * math.inf

    assert found(*regression(LinearStack, loss)) == ["non-finite-gradient"]
