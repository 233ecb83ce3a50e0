"""Diagnosis: the first value that is not finite, by module, operation, micro-batch and phase, and what helps."""

import copy
import dataclasses
import json
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import snugfit
from models import (
    LinearStack,
    Transformer,
    Weight,
    mean_product,
    regression_batch,
    same_bits,
    squared_error,
    state_of,
    token_batch,
    token_loss,
)
from snugfit import (
    DeviceMemoryError,
    Engine,
    Job,
    Loss,
    LossScale,
    NonFiniteError,
    Plan,
    PlanError,
    UnsupportedError,
    checkpointing,
)
from snugfit.training import distributed, recovery
from snugfit.training.diagnosing import diagnosis, remedies, rerun, saved_window
from snugfit.training.diagnosing.diagnose import diagnose

CPU = torch.device("cpu")


class Maps(nn.Module):
    """Three 4x4 maps: 10 everywhere, 500 everywhere, +1 and -1 in turn (case C044)."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(3))
        with torch.no_grad():
            self.a.weight.fill_(10)
            self.b.weight.fill_(500)
            self.c.weight.copy_(torch.tensor([1.0, -1.0, 1.0, -1.0]).expand(4, 4))

    def forward(self, x):
        return self.c(self.b(self.a(x)))


class Operation(nn.Module):
    """One operation as a module of its own."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Around(nn.Module):
    """A linear layer, an operation, another linear layer."""

    def __init__(self, function, value=1.0):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), Operation(function), nn.Linear(4, 4)
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(4) * value)
            self.first.bias.zero_()

    def forward(self, x):
        return self.last(self.inner(self.first(x)))


def mean_output(model, micro_batch):
    return model(micro_batch).float().mean()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def job_of(model, loss=mean_output, batch=None, **options):
    return Job(lambda: copy.deepcopy(model), loss, sgd, torch.ones(4, 4) if batch is None else batch, **options)


def plan_of(micro_batch_size=2, batch_size=4, **fields):
    return Plan(batch_size=batch_size, micro_batch_size=micro_batch_size, **fields)


def found_in(model, loss=mean_output, batch=None, plan=None, steps=1, **options):
    return diagnose(job_of(model, loss, batch, **options), plan or plan_of(), "cpu", steps=steps)


def random_bits():
    return [
        torch.get_rng_state(),
        torch.tensor(random.getstate()[1]),
        torch.from_numpy(np.random.get_state()[1].astype(np.int64)),
    ]


# ---- the cases


def test_c041_the_window_after_a_skipped_one_is_clean():
    model = Weight(0.0)
    engine = Engine(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        loss=mean_product,
        precision="16-mixed",
        loss_scale=LossScale(init_scale=8.0),
    )
    assert engine.step(torch.tensor([math.nan])).skipped
    first = engine.state_dict(model=False)["scaler"]["scale"]
    assert not engine.step(torch.tensor([2.0])).skipped
    assert (model.w.item(), first, engine.state_dict(model=False)["scaler"]["scale"]) == (-2.0, 4.0, 4.0)


def one_weight(value=1.0):
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(value)
    return model


def test_c043_a_loss_scale_that_is_too_high_is_no_nan_bug():
    model = one_weight()
    found = found_in(model, batch=torch.full((4, 1), 10.0), plan=plan_of(4, precision="16-mixed"))
    assert (found.phase, found.loss_scale, found.finite_loss_scale) == ("loss scale", 65536.0, 4096.0)
    assert found.cause.startswith("loss scale too high")
    assert "LossScale(init_scale=4096)" in found.remedy
    outcomes = {one.remedy: one.is_finite for one in found.tried}
    assert outcomes["loss scale 1"]
    assert outcomes["loss scale 4096"]
    assert not outcomes["loss scale 8192"]


def test_c043_four_windows_are_skipped_and_the_fifth_trains_at_4096():
    model = one_weight()
    engine = Engine(model, sgd(model), loss=mean_output, precision="16-mixed")
    results = [engine.step(torch.full((1, 1), 10.0)) for _ in range(6)]
    assert [result.skipped for result in results] == [True] * 4 + [False] * 2
    assert results[4].loss_scale == 4096.0
    assert results[4].grad_norm.item() == 10.0


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
    assert "sqrt(x + 1e-12)" in found.remedy


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


# ---- data and weights


@pytest.mark.parametrize(("value", "word"), [(math.nan, "NaN"), (math.inf, "inf")])
@pytest.mark.parametrize("key", ["x", "y"])
def test_bad_data_are_named_by_key_and_micro_batch(value, word, key):
    batch = regression_batch(8)
    batch[key][5, 2] = value
    found = found_in(LinearStack(), squared_error, batch, plan_of(2, 8))
    assert found.micro_batch == 2
    assert f"batch['{key}'] (1 of 12 values, {word})" in found.cause
    assert "the input of micro-batch 2 is not finite" in found.cause
    assert found.remedy.startswith("look at the data")
    assert found.tried == ()


def test_weights_of_labels_that_are_nan_are_named():
    def weighted(model, micro_batch):
        each = F.mse_loss(model(micro_batch["x"]), micro_batch["y"], reduction="none").mean(-1)
        return (each * micro_batch["weight"]).mean()

    batch = {**regression_batch(4), "weight": torch.tensor([1.0, 1.0, 1.0, math.nan])}
    found = found_in(LinearStack(), weighted, batch)
    assert (found.micro_batch, found.op) == (1, "input batch['weight']")


@pytest.mark.parametrize("name", ["layers.1.weight", "layers.2.bias"])
def test_a_weight_that_is_nan_before_the_window_is_named(name):
    model = LinearStack()
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0] = math.nan
    found = found_in(model, squared_error, regression_batch(4))
    assert (found.module, found.op) == (name.rpartition(".")[0], f"weight {name}")
    assert "weights are not finite before the window" in found.cause
    assert "saved state" in found.remedy


def test_a_buffer_that_masks_with_minus_infinity_is_not_to_blame():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mask", torch.full((4,), -math.inf).index_fill(0, torch.tensor([0]), 0.0))

        def forward(self, x):
            return F.softmax(self.linear(x) + self.mask, dim=-1)

    assert found_in(Masked()).cause == "none"


def test_an_integer_batch_and_attention_run_under_watch():
    batch = token_batch(4)
    model = Transformer()
    assert found_in(model, token_loss, batch, count=snugfit.tokens()).cause == "none"
    with torch.no_grad():
        model.blocks[1].norm_2.bias.fill_(100.0)
        model.blocks[1].ff[0].weight.fill_(1e38)
    found = found_in(model, token_loss, batch, count=snugfit.tokens())
    assert (found.module, found.op) == ("blocks.1.ff.0", "linear")


# ---- what is left as it was


def stepped(engine, batch, size):
    """The suspect of a window of an engine that has stepped before."""
    parts, counts = engine.prepare(batch, size)
    return engine.runner.suspect(parts, counts, engine.runner.hooks.snapshot())


class Noisy(nn.Module):
    """Dropout, BatchNorm and a linear layer: random states and buffers move."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.norm(self.linear(x)))


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


# ---- the numbers of a finite job


def test_a_finite_job_says_so_with_its_head_room():
    model = Around(torch.exp, value=3.0)
    found = found_in(model)
    assert (found.cause, found.module, found.op, found.phase) == ("none", "", "", "")
    assert found.is_finite
    (room,) = found.head_room
    assert (room.module, room.op, room.dtype, room.largest) == ("inner", "exp", "float32", pytest.approx(3.0))
    assert room.limit == pytest.approx(88.72, abs=0.01)
    assert "88.72" in str(found)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 11.09), (torch.bfloat16, 88.72), (torch.float32, 88.72)])
def test_head_room_is_that_of_the_type_in_which_the_operation_runs(dtype, limit):
    found = found_in(Around(lambda x: torch.exp(x.to(dtype)).float()))
    assert found.head_room[0].limit == pytest.approx(limit, abs=0.01)
    assert found.head_room[0].dtype == str(dtype).removeprefix("torch.")


def test_head_room_of_an_attention_is_that_of_its_scores_with_masked_positions_left_out():
    def attend(x):
        heads = x.reshape(1, 1, *x.shape)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[0, 0]

    found = found_in(Around(attend, value=2.0), plan=plan_of(4))
    (room,) = found.head_room
    assert room.largest == pytest.approx(4 * 4 / 2)
    assert (room.masked_fraction, room.num_masked_rows) == (pytest.approx(6 / 16), 0)


@pytest.mark.parametrize("op", ["softmax", "log_softmax", "logsumexp"])
def test_masked_rows_are_counted(op):
    def masked(x):
        scores = x.masked_fill(torch.tensor([True, False, True, True]), -math.inf)
        scores = torch.cat([scores, torch.full_like(scores[:1], -math.inf)])
        values = getattr(torch, op)(scores, dim=-1)
        return values.reshape(len(scores), -1)[: len(x)].nan_to_num(neginf=0.0).expand(len(x), 4)

    room = found_in(Around(masked)).head_room[0]
    assert room.num_masked_rows == 1


@pytest.mark.parametrize(("scale", "share"), [(1.0, 1.0), (65536.0, 0.0)])
def test_the_share_of_gradients_below_the_range_is_that_at_the_scale(scale, share):
    model = one_weight()
    found = found_in(
        model,
        batch=torch.full((4, 1), 1e-8),
        plan=plan_of(4, precision="16-mixed"),
        loss_scale=LossScale(init_scale=scale),
    )
    assert found.underflow_fraction == share
    assert found.underflow[0].fp16_fraction == share
    assert found.underflow[0].bf16_fraction == 0.0


def test_underflow_is_told_by_module_worst_first():
    model = nn.ModuleDict({"small": nn.Linear(4, 4, bias=False), "large": nn.Linear(4, 4, bias=False)})
    found = found_in(model, loss=lambda model, x: (model["small"](x) * 1e-9 + model["large"](x)).mean())
    assert [row.module for row in found.underflow] == ["small", "large"]
    assert [row.fp16_fraction for row in found.underflow] == [1.0, 0.0]
    assert [row.num_values for row in found.underflow] == [16, 16]


def test_a_diagnosis_is_json_and_reads_as_text():
    found = found_in(Maps(), plan=plan_of(4, precision="16-mixed"))
    written = json.loads(json.dumps(found.to_dict()))
    assert (written["module"], written["tried"][0]["is_finite"]) == ("b", True)
    text = str(found)
    for part in ("linear in forward, module 'b', micro-batch 0, rank 0", "cause:", "remedy:", "tried:"):
        assert part in text


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


# ---- models as people have them


@pytest.mark.parametrize("need_weights", [False, True])
def test_the_inside_of_torch_s_own_attention_is_seen(need_weights):
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            return self.attn(x, x, x, need_weights=need_weights, key_padding_mask=x[..., 0] == 0)[0]

    batch = torch.rand(4, 3, 4) + 1
    softmax = "softmax" if need_weights else "scaled_dot_product_attention"
    (room,) = found_in(Attend(), batch=batch).head_room
    assert (room.module, room.op, room.num_masked_rows) == ("attn", softmax, 0)
    batch[1] = 0.0
    found = found_in(Attend(), batch=batch)
    if need_weights:
        assert (found.module, found.op, found.phase) == ("attn", "softmax", "forward")
        assert "unmasked" in found.remedy
    assert found.head_room[0].num_masked_rows > 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recomputed"])
def test_the_layer_of_a_transformer_that_leaves_fp16_is_named(attention, recompute):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=50,
        max_position_embeddings=32,
        attn_implementation=attention,
    )
    model = transformers.BertForMaskedLM(config)
    layer = model.bert.encoder.layer[1]
    with torch.no_grad():
        layer.intermediate.dense.bias.fill_(6e4)
        layer.output.dense.weight.fill_(10.0)
    ids = torch.randint(50, (4, 8))
    mask = torch.ones(4, 8, dtype=torch.long)
    mask[:, 6:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    segments = checkpointing.blocks(model) if recompute else ()
    plan = plan_of(precision="16-mixed", recompute=segments)
    found = found_in(model, lambda model, batch: model(**batch).loss, batch, plan, count=snugfit.tokens())
    assert (found.module, found.op) == ("bert.encoder.layer.1.output.dense", "linear")
    assert found.remedy.startswith('use precision="bf16-mixed"')
    softmax = "scaled_dot_product_attention" if attention == "sdpa" else "softmax"
    assert {room.op for room in found.head_room if room.module.endswith("attention.self")} == {softmax}


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_model_that_recomputes_by_itself_is_watched(is_reentrant):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def inner(self, x):
            return torch.sqrt(self.second(x) * 0)

        def forward(self, x):
            return checkpoint(self.inner, self.first(x), use_reentrant=is_reentrant)

    found = found_in(nn.ModuleDict({"own": Own()}), lambda model, x: model["own"](x).mean())
    op = "CheckpointFunctionBackward" if is_reentrant else "SqrtBackward0"
    assert (found.module, found.op, found.phase) == ("own", op, "backward")


def test_the_model_itself_is_told_from_the_loss_function():
    class Own(nn.Linear):
        def forward(self, x):
            return torch.log(super().forward(x) * 0)

    found = found_in(Own(4, 4))
    assert (found.module, found.op) == ("", "log")
    assert "the model itself" in found.cause


def test_a_module_under_two_names_is_reported_by_its_first():
    model = nn.ModuleDict({"a": Operation(lambda x: torch.log(x * 0)), "w": nn.Linear(4, 4)})
    model["b"] = model["a"]
    assert found_in(model, lambda model, x: model["b"](model["w"](x)).mean()).module == "a"


def test_sparse_gradients_are_looked_at():
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True))
    batch = torch.ones(4, 3, dtype=torch.long)
    assert found_in(model, batch=batch).underflow[0].num_values == 4
    found = found_in(model, lambda model, x: torch.sqrt(model(x) * 0).mean(), batch)
    assert (found.op, found.phase, found.parameters) == ("SqrtBackward0", "backward", ("0.weight",))


def test_bf16_weights_are_diagnosed_too():
    plan = plan_of(precision="bf16-true")
    assert found_in(Around(torch.tanh), plan=plan).cause == "none"
    found = found_in(Around(lambda x: torch.log(x - x)), plan=plan)
    assert (found.module, found.op, found.phase) == ("inner", "log", "forward")


@pytest.mark.parametrize("policy", ["micro", "window"])
@pytest.mark.filterwarnings("ignore:BatchNorm makes")
def test_running_statistics_are_left_as_they_were_under_every_policy(policy):
    model = Noisy()
    engine = Engine(model, sgd(model), plan_of(norm_policy=policy), loss=mean_output)
    engine.step(torch.randn(4, 4))
    suspect = stepped(engine, torch.randn(4, 4), 2)
    before = state_of(model)
    assert diagnosis.of_window(suspect).cause == "none"
    assert same_bits(before, state_of(model))


# ---- remedies


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


# ---- the engine


def engine_of(model, **options):
    return Engine(model, sgd(model), loss=mean_output, **options)


def test_a_run_that_only_skips_ends_in_a_diagnosis():
    model = Around(lambda x: torch.log(x - x))
    engine = engine_of(model, max_skipped_windows=3)
    batch = torch.ones(4, 4)
    assert engine.step(batch).skipped
    assert engine.step(batch).skipped
    before = state_of(model)
    with pytest.raises(NonFiniteError) as caught:
        engine.step(batch)
    found = caught.value.diagnosis
    assert (found.module, found.op, found.phase) == ("inner", "log", "forward")
    assert "log in forward, module 'inner'" in str(caught.value)
    assert caught.value.hint == found.remedy
    assert caught.value.windows == 3
    assert same_bits(before, state_of(model))


def test_the_policy_raise_ends_in_a_diagnosis_and_names_the_parameters():
    model = Around(lambda x: torch.log(x - x))
    with pytest.raises(NonFiniteError) as caught:
        engine_of(model, nonfinite="raise").step(torch.ones(4, 4))
    assert caught.value.diagnosis.module == "inner"
    assert "first.weight" in caught.value.parameters
    assert all(parameter.grad is None for parameter in model.parameters())


def test_windows_of_micro_batches_are_diagnosed_too():
    engine = engine_of(nn.Linear(4, 4), nonfinite="raise")
    with pytest.raises(NonFiniteError) as caught:
        engine.step_window([torch.ones(2, 4), torch.full((2, 4), math.nan)])
    assert caught.value.diagnosis.micro_batch == 1


def test_the_scale_ends_at_its_floor_and_not_at_zero():
    model = Around(lambda x: torch.log(x - x))
    engine = engine_of(
        model, precision="16-mixed", max_skipped_windows=6, loss_scale=LossScale(init_scale=32.0, floor=8.0)
    )
    scales = [engine.step(torch.ones(4, 4)).loss_scale for _ in range(5)]
    assert scales == [32.0, 16.0, 8.0, 8.0, 8.0]
    with pytest.raises(NonFiniteError) as caught:
        engine.step(torch.ones(4, 4))
    assert caught.value.loss_scale == 8.0
    assert caught.value.diagnosis.op == "log"
    assert engine.state_dict(model=False)["scaler"]["scale"] == 8.0


def test_the_diagnosis_is_of_the_scale_that_the_window_had():
    engine = engine_of(one_weight(), precision="16-mixed", max_skipped_windows=1)
    with pytest.raises(NonFiniteError) as caught:
        engine.step(torch.full((1, 1), 10.0))
    assert (caught.value.diagnosis.loss_scale, caught.value.diagnosis.finite_loss_scale) == (65536.0, 4096.0)


@pytest.mark.parametrize("options", [{"nonfinite": "raise"}, {"max_skipped_windows": 1}])
def test_a_window_by_hand_says_which_gradients_are_not_finite(options):
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    engine = engine_of(model, **options)

    def by_hand():
        with engine.window([torch.ones(2, 4)]) as window:
            for micro_batch in window:
                window.backward(model["a"](micro_batch).mean() + (model["b"](micro_batch) * math.nan).mean())

    with pytest.raises(NonFiniteError) as caught:
        by_hand()
    assert caught.value.parameters == ("b.weight", "b.bias")
    assert "cannot be run again" in str(caught.value)
    assert caught.value.diagnosis.parameters == ("b.weight", "b.bias")


def test_the_diagnosis_of_an_engine_inside_of_a_window_by_hand_is_kept():
    inner = engine_of(Around(lambda x: torch.log(x - x)), nonfinite="raise")
    outer = engine_of(nn.Linear(4, 4))

    def by_hand():
        with outer.window([torch.ones(2, 4)]) as window:
            for micro_batch in window:
                inner.step(micro_batch)

    with pytest.raises(NonFiniteError) as caught:
        by_hand()
    assert caught.value.diagnosis.module == "inner"


def test_a_diagnosis_that_fails_never_hides_the_error():
    calls = []

    def loss(model, x):
        calls.append(1)
        if len(calls) > 1:
            raise ValueError("no second time")
        return model(x).mean() * math.nan

    model = nn.Linear(4, 4)
    engine = Engine(model, sgd(model), loss=loss, nonfinite="raise")
    with pytest.raises(NonFiniteError, match="no diagnosis: ValueError: no second time") as caught:
        engine.step(torch.ones(2, 4))
    assert caught.value.diagnosis is None
    assert caught.value.what == "the gradient of a window is not finite"


def test_memory_that_runs_out_during_the_diagnosis_is_said():
    calls = []

    def loss(model, x):
        calls.append(1)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("planted")
        return model(x).mean() * math.nan

    model = nn.Linear(4, 4)
    engine = Engine(model, sgd(model), loss=loss, nonfinite="raise")
    with pytest.raises(NonFiniteError, match="memory ran out during the diagnosis") as caught:
        engine.step(torch.ones(2, 4))
    assert caught.value.diagnosis is None


def test_a_window_that_is_finite_the_second_time_is_said_to_be():
    calls = []

    def loss(model, x):
        calls.append(1)
        return model(x).mean() * (math.nan if len(calls) == 1 else 1.0)

    model = nn.Linear(4, 4)
    engine = Engine(model, sgd(model), loss=loss, nonfinite="raise")
    with pytest.raises(NonFiniteError, match="all is finite when rank 0 runs the window again") as caught:
        engine.step(torch.ones(2, 4))
    assert caught.value.diagnosis.cause == "none"


def test_peers_4_an_inf_moves_neither_learning_rate_nor_counters_nor_an_average_of_real_updates():
    model = nn.Linear(4, 4)
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    engine = Engine(model, optimizer, loss=mean_output, scheduler=scheduler)
    average = torch.optim.swa_utils.AveragedModel(model)
    before = state_of(model, optimizer)
    result = engine.step(torch.full((4, 4), math.inf))
    if not result.skipped:
        average.update_parameters(model)
    assert result.skipped
    assert (engine.step_count, engine.sample_count, engine.micro_step_count) == (0, 0, 0)
    assert (scheduler.get_last_lr(), average.n_averaged.item()) == ([0.1], 0)
    assert same_bits(before, state_of(model, optimizer))
    assert engine.step(torch.ones(4, 4)).step == 1
    assert scheduler.get_last_lr() == [0.05]


# ---- properties


@given(
    layer=st.integers(0, 3),
    micro_batch=st.integers(0, 4),
    phase=st.sampled_from(["forward", "backward"]),
    segments=st.sampled_from([(), (("0",), ("1",), ("2",), ("3",)), (("0", "1", "2", "3"),), (("1", "2"),)]),
)
@settings(max_examples=30)
def test_the_layer_and_the_micro_batch_of_a_planted_nan_are_named(layer, micro_batch, phase, segments):
    class Plant(nn.Module):
        def __init__(self, is_bad):
            super().__init__()
            self.linear, self.is_bad = nn.Linear(2, 2), is_bad

        def forward(self, x):
            if not self.is_bad or mark[0] != micro_batch:
                return self.linear(x)
            return x / torch.zeros(()) if phase == "forward" else self.linear(x) + torch.sqrt(x * 0)

    mark = [0]

    def loss(model, micro_batch):
        mark[0] = int(micro_batch["index"][0])
        return model(micro_batch["x"]).mean()

    model = nn.Sequential(*(Plant(i == layer) for i in range(4)))
    batch = {"x": torch.rand(5, 2, requires_grad=False) + 1, "index": torch.arange(5)}
    plan = plan_of(1, 5, recompute=tuple(snugfit.Segment(names) for names in segments))
    found = diagnose(Job(model, loss, sgd, batch), plan, "cpu", steps=1)
    if phase == "backward" and layer == 0:
        assert found.cause == "none"  # nothing before it has a gradient
        return
    assert (found.module, found.phase, found.micro_batch) == (str(layer), phase, micro_batch)
    assert found.op == ("div" if phase == "forward" else "SqrtBackward0")


# ---- jobs and files


def test_windows_of_the_data_are_looked_at_until_one_goes_wrong():
    def data():
        for i in range(3):
            yield torch.full((4, 4), math.nan if i == 1 else 1.0)

    found = found_in(nn.Linear(4, 4), data=data, steps=3)
    assert (found.step, found.micro_batch) == (1, 0)
    assert found_in(nn.Linear(4, 4), data=data, steps=1).cause == "none"


def test_a_model_that_diverges_is_found_out_by_its_own_updates():
    job = Job(
        lambda: one_weight(2.0),
        lambda model, x: (model(x) ** 4).mean(),
        lambda model: torch.optim.SGD(model.parameters(), lr=100.0),
        torch.ones(4, 1),
    )
    found = diagnose(job, plan_of(), "cpu", steps=10)
    assert found.step > 0
    assert (found.op, found.phase) == ("pow", "forward")
    assert "learning rate" in found.remedy


@pytest.mark.parametrize("policy", ["raise", "ignore", "skip"])
def test_the_job_s_own_policy_does_not_end_the_diagnosis(policy):
    model = Around(lambda x: torch.log(x - x))
    assert found_in(model, nonfinite=policy, max_skipped_windows=1).module == "inner"


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_a_number_of_steps_that_is_none_is_refused(steps):
    with pytest.raises(PlanError, match="steps"):
        diagnose(job_of(nn.Linear(4, 4)), plan_of(), "cpu", steps=steps)


def test_memory_that_runs_out_in_a_diagnosis_of_a_job_is_named():
    def loss(model, x):
        raise torch.OutOfMemoryError("planted")

    with pytest.raises(DeviceMemoryError, match="during the diagnosis"):
        found_in(nn.Linear(4, 4), loss)


def test_a_given_module_that_cannot_be_copied_is_refused():
    class Once(nn.Linear):
        def __deepcopy__(self, memo):
            raise TypeError("a lock")

    with pytest.raises(UnsupportedError, match="cannot be copied"):
        diagnose(Job(Once(4, 4), mean_output, sgd, torch.ones(4, 4)), plan_of(), "cpu")


def test_a_layer_that_waits_for_other_ranks_is_not_run_by_one_alone(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    engine = engine_of(model, nonfinite="raise")
    batch = torch.full((4, 4), math.nan)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    with pytest.raises(NonFiniteError, match="no diagnosis: UnsupportedError") as caught:
        engine.step(batch)
    assert "SyncBatchNorm" in str(caught.value)


def test_data_without_a_batch_are_refused():
    with pytest.raises(PlanError, match="no batch"):
        found_in(nn.Linear(4, 4), data=list)


def trained_until_it_fails(model, folder, batch=None, loss=mean_output, **options):
    job = job_of(model, loss, batch, nonfinite="raise", **options)
    with pytest.raises(NonFiniteError) as caught:
        snugfit.train(job, plan_of(precision=options.get("precision", "32-true")), steps=5, run_dir=folder)
    return job, caught.value


def test_a_run_leaves_the_window_that_failed_and_it_is_diagnosed_again(tmp_path):
    batches = [torch.randn(4, 4) for _ in range(3)]
    batches[2][3, 1] = math.nan
    job, error = trained_until_it_fails(nn.Linear(4, 4), tmp_path, data=lambda: iter(batches))
    assert "nonfinite.pt" in str(error)
    assert error.diagnosis.micro_batch == 1
    found = diagnose(job, plan_of(), "cpu", window=tmp_path / "nonfinite.pt")
    assert (found.cause, found.micro_batch, found.step) == (error.diagnosis.cause, 1, 2)
    saved = saved_window.load(tmp_path / "nonfinite.pt")
    assert torch.equal(saved.micro_batches[0], batches[2][:2])
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


@pytest.mark.filterwarnings("ignore:BatchNorm makes")
def test_a_saved_window_begins_with_the_very_weights_buffers_and_random_states(tmp_path):
    class FailsLate(Noisy):
        def forward(self, x):
            y = super().forward(x)
            return y / 0 if x[0, 0] > 100 and bool((y[0] == 0).any()) else y

    batch = torch.randn(4, 4)
    batch[2] = 1000.0
    data = [torch.randn(4, 4), torch.randn(4, 4), batch]
    job, error = trained_until_it_fails(FailsLate(), tmp_path, data=lambda: iter(data * 4))
    found = diagnose(job, plan_of(), "cpu", window=tmp_path / "nonfinite.pt")
    assert (found.module, found.op, found.micro_batch) == ("", "div", 1)
    assert found.to_dict() == error.diagnosis.to_dict()


def test_a_saved_window_is_looked_at_under_another_precision_too(tmp_path):
    model = Maps()
    job = job_of(model, nonfinite="raise")
    with pytest.raises(NonFiniteError):
        snugfit.train(job, plan_of(precision="16-mixed"), steps=1, run_dir=tmp_path)
    path = tmp_path / "nonfinite.pt"
    assert diagnose(job, plan_of(precision="16-mixed"), "cpu", window=path).module == "b"
    assert diagnose(job, plan_of(precision="bf16-mixed"), "cpu", window=path).cause == "none"


def test_a_saved_window_has_the_scale_that_it_failed_at_and_no_more_data_than_its_own(tmp_path):
    large = torch.full((10**6, 4), 10.0)
    job = job_of(nn.Linear(4, 4), data=lambda: iter([large[:4] * math.nan, large[:4], large[4:8]]))
    job = dataclasses.replace(job, loss=lambda model, x: torch.log(model(x) * 0).mean(), max_skipped_windows=3)
    plan, path = plan_of(precision="16-mixed"), tmp_path / "nonfinite.pt"
    with pytest.raises(NonFiniteError):
        snugfit.train(job, plan, steps=3, run_dir=tmp_path)
    assert path.stat().st_size < 100_000
    assert diagnose(job, plan, "cpu", window=path).loss_scale == 16384.0


def test_a_saved_window_begins_with_its_buffers(tmp_path):
    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer("seen", torch.zeros(()), persistent=False)

        def forward(self, x):
            self.seen += 1
            return super().forward(x) / (self.seen - 6)

    job, error = trained_until_it_fails(Counting(), tmp_path)
    found = diagnose(job, plan_of(), "cpu", window=tmp_path / "nonfinite.pt")
    assert (found.op, found.micro_batch, found.step) == ("div", 1, 2)
    assert found.to_dict() == error.diagnosis.to_dict()


def test_a_window_that_a_file_may_not_hold_is_said_and_not_written(tmp_path):
    class Own(dict):
        pass

    batch = Own(x=torch.full((4, 4), math.nan))
    _, error = trained_until_it_fails(
        nn.Linear(4, 4), tmp_path, batch, loss=lambda model, micro_batch: model(micro_batch["x"]).mean()
    )
    assert "the window could not be saved" in str(error)
    assert "Own at micro-batch 0" in str(error)
    assert error.diagnosis is not None
    assert not (tmp_path / "nonfinite.pt").exists()


def test_a_run_that_retries_no_memory_error_is_diagnosed_too(tmp_path):
    job = job_of(nn.Linear(4, 4), batch=torch.full((4, 4), math.nan), nonfinite="raise")
    with pytest.raises(NonFiniteError) as caught:
        snugfit.train(job, plan_of(), steps=1, run_dir=tmp_path, recover=False)
    assert caught.value.diagnosis.cause.startswith("the input of micro-batch 0")
    assert (tmp_path / "nonfinite.pt").exists()


def test_an_optimizer_that_evaluates_the_loss_itself_is_diagnosed():
    job = Job(
        lambda: Around(lambda x: torch.log(x - x)),
        mean_output,
        lambda model: torch.optim.LBFGS(model.parameters()),
        torch.ones(4, 4),
    )
    assert diagnose(job, plan_of(), "cpu").module == "inner"
    engine = snugfit.build(dataclasses.replace(job, nonfinite="raise"), plan_of(), "cpu")
    with pytest.raises(NonFiniteError) as caught:
        engine.step(torch.ones(4, 4))
    assert caught.value.diagnosis.op == "log"


def test_a_window_of_an_earlier_run_does_not_stay(tmp_path):
    (tmp_path / "nonfinite.pt").write_bytes(b"old")
    snugfit.train(job_of(nn.Linear(4, 4)), plan_of(), steps=1, run_dir=tmp_path)
    assert not (tmp_path / "nonfinite.pt").exists()


@pytest.mark.parametrize("what", ["missing", "text", "other", "version", "lengths", "kind", "model", "pickle"])
def test_a_file_that_is_no_window_of_this_job_is_refused_in_four_parts(tmp_path, what):
    job, _ = trained_until_it_fails(nn.Linear(4, 4), tmp_path, torch.full((4, 4), math.nan))
    path = tmp_path / "nonfinite.pt"
    content = torch.load(path, weights_only=True)
    if what == "missing":
        path.unlink()
    elif what == "text":
        path.write_text("no window")
    elif what == "other":
        torch.save({"x": torch.ones(1)}, path)
    elif what == "version":
        torch.save({**content, "version": 99}, path)
    elif what == "lengths":
        torch.save({**content, "counts": [1.0]}, path)
    elif what == "kind":
        torch.save({**content, "buffers": None}, path)
    elif what == "pickle":
        torch.save({**content, "step": Maps()}, path)
    else:
        job = job_of(nn.Linear(4, 5))
    with pytest.raises(PlanError) as caught:
        diagnose(job, plan_of(), "cpu", window=path)
    for part in ("  got:      ", "  expected: ", "hint: "):
        assert part in str(caught.value)


def test_a_file_that_is_refused_changes_no_random_state(tmp_path):
    job, bits = job_of(nn.Linear(4, 4)), random_bits()
    with pytest.raises(PlanError):
        diagnose(job, plan_of(), "cpu", window=tmp_path / "none.pt")
    assert same_bits(bits, random_bits())
    assert recovery.random_states(CPU).keys() == {"torch", "python", "numpy"}
