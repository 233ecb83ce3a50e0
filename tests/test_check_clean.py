"""Clean jobs pass a check, an oracle by hand agrees with it, and a fault of the engine itself would be caught."""

import dataclasses
import math
import types

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from checked_jobs import (
    Wrapped,
    found,
    image_batch,
    image_loss,
    language_batch,
    own_loss,
    regression,
    sgd,
    transformers_model,
)
from models import (
    VOCABULARY,
    WIDTH,
    ConvBatchNorm,
    LinearStack,
    Transformer,
    WithDropout,
    regression_batch,
    shifted_token_loss,
    squared_error,
    token_batch,
    token_loss,
)
from snugfit import Job, Loss, Plan, Segment, Shared, check, checkpointing, tokens
from snugfit.training import segment_run, weighting
from strategies import labels, split_sizes
from tolerances import FLOAT64


class ConvGroupNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


class FunctionalDropout(nn.Module):
    """Dropout and noise that no module shows."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = F.dropout(self.linear(x), 0.5, self.training)
        return x + 0.1 * torch.randn_like(x) * torch.rand(WIDTH) + F.alpha_dropout(x, 0.2, True)


class Filter(nn.Module):
    """A complex parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=WIDTH)


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.critic = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)


def gan_loss(model, batch):
    made, number = model.generator(torch.randn_like(batch["x"])), len(batch["x"])
    critic = F.softplus(-model.critic(batch["x"])).sum() + F.softplus(model.critic(made.detach())).sum()
    return [
        Loss(critic, number, only=model.critic),
        Loss(F.softplus(-model.critic(made)).sum(), number, only=model.generator),
    ]


def denoising_loss(model, batch):
    level = torch.randint(0, 10, (len(batch["x"]), 1)) / 10
    noise = torch.randn_like(batch["x"])
    return F.mse_loss(model(batch["x"] * level.sqrt() + noise * (1 - level).sqrt()), noise)


def penalty_loss(model, batch):
    x = batch["x"].clone().requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.mean() + slope.square().sum(1).mean()


def halves(batch, micro_batch_size):
    parts = {name: tensor.split(micro_batch_size) for name, tensor in batch.items()}
    return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]


PAIRS = [{"x": torch.linspace(0, i, WIDTH), "y": torch.ones(WIDTH)} for i in range(8)]


def sentence_batch():
    return {**language_batch(), "labels": torch.tensor([0, 1, 1, 0])}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_clean_mlp_passes(precision, recompute):
    plan = {"recompute": checkpointing.blocks(LinearStack())} if recompute else {}
    job, plan = regression(LinearStack, size=8, micro_batch_size=3, precision=precision, **plan)
    report = check(job, plan, "cpu")
    assert report.ok
    assert report.hazards == ()
    assert report.gradient_error <= FLOAT64
    assert report.loss_error <= FLOAT64
    assert report.recompute_error == 0.0
    assert report.repeat_error == 0.0
    assert set(report.by_module) == {"layers.0", "layers.1", "layers.2"}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_clean_gpt2_passes(precision):
    model = transformers_model("gpt2", use_cache=False)
    job = Job(model, own_loss, sgd, language_batch(), count=tokens(shift=True))
    segments = checkpointing.blocks(model())
    report = check(job, Plan(batch_size=4, micro_batch_size=1, precision=precision, recompute=segments), "cpu")
    assert report.ok
    assert report.hazards == ()
    assert report.num_forwards < 30


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_clean_bert_with_dropout_and_recompute_passes(precision, attention):
    model = transformers_model("bert", attn_implementation=attention)
    plan = Plan(batch_size=4, micro_batch_size=2, precision=precision, recompute=checkpointing.blocks(model()))
    report = check(Job(model, own_loss, sgd, sentence_batch()), plan, "cpu")
    assert report.ok
    assert any("bernoulli" in line for line in report.assumptions)


@pytest.mark.parametrize(
    ("job", "plan"),
    [
        (Job(ConvGroupNorm, image_loss, sgd, image_batch()), Plan(batch_size=8, micro_batch_size=3)),
        (Job(ConvBatchNorm, image_loss, sgd, image_batch()), Plan(batch_size=8, micro_batch_size=8)),
        (
            Job(ConvBatchNorm, image_loss, sgd, image_batch()),
            Plan(batch_size=8, micro_batch_size=2, norm_policy="frozen", recompute=(Segment("features.0"),)),
        ),
        (Job(lambda: ConvBatchNorm().eval(), image_loss, sgd, image_batch()), Plan(batch_size=8, micro_batch_size=2)),
        regression(WithDropout, recompute=checkpointing.blocks(WithDropout()), precision="bf16-mixed"),
        regression(FunctionalDropout),
        regression(
            lambda: nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True),
            lambda m, b: m(b)[0].square().mean(),
            batch=torch.randn(4, 3, WIDTH),
        ),
        regression(LinearStack, lambda m, b: Loss(F.mse_loss(m(b["x"]), b["y"], reduction="sum"), len(b["x"]))),
        regression(LinearStack, lambda m, b: [squared_error(m, b), Loss((m(b["x"]) ** 4).sum())], 5, 2),
        regression(LinearStack, batch={**regression_batch(4), "scale": Shared(torch.ones(3)), "name": "x"}),
        regression(LinearStack, size=1, micro_batch_size=1),
        regression(
            lambda: Wrapped(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))),
            size=8,
            micro_batch_size=3,
        ),
        regression(Filter, size=8, micro_batch_size=3),
        regression(Gan, gan_loss, 8, 3, precision="bf16-mixed"),
        regression(LinearStack, denoising_loss, 8, 3),
        regression(LinearStack, penalty_loss, 8, 3, recompute=checkpointing.blocks(LinearStack())),
        regression(LinearStack, size=8, micro_batch_size=3, precision="bf16-true"),
        (
            Job(lambda: Transformer(tied=True), token_loss, sgd, token_batch(6), count=tokens()),
            Plan(batch_size=6, micro_batch_size=4, recompute=checkpointing.blocks(Transformer())),
        ),
        (Job(LinearStack, squared_error, sgd, regression_batch), Plan(batch_size=8, micro_batch_size=3)),
        (
            Job(LinearStack, squared_error, sgd, regression_batch(8), split=halves),
            Plan(batch_size=8, micro_batch_size=4),
        ),
        (
            Job(LinearStack, squared_error, sgd, torch.utils.data.DataLoader(PAIRS, batch_size=4)),
            Plan(batch_size=8, micro_batch_size=3),
        ),
        (
            Job(LinearStack, squared_error, lambda m: torch.optim.LBFGS(m.parameters()), regression_batch(8)),
            Plan(batch_size=8, micro_batch_size=3),
        ),
    ],
    ids=[
        "group-norm",
        "whole",
        "frozen",
        "eval",
        "dropout",
        "functional",
        "lstm",
        "Loss",
        "two",
        "Shared",
        "one",
        "spectral",
        "complex",
        "gan",
        "noise",
        "penalty",
        "bf16-true",
        "tied",
        "function",
        "split",
        "loader",
        "lbfgs",
    ],
)
def test_clean_jobs_pass(job, plan):
    assert found(job, plan) == []


@given(split_sizes(), st.sampled_from(["samples", "tokens", "shifted"]), st.booleans(), st.integers(0, 3))
@hypothesis_settings(max_examples=15)
def test_a_clean_job_passes_for_any_split(sizes, unit, recompute, seed):
    torch.manual_seed(seed)
    size, micro_batch_size = sizes
    loss, count = {
        "samples": (token_loss, "samples"),
        "tokens": (token_loss, tokens()),
        "shifted": (shifted_token_loss, tokens(shift=True)),
    }[unit]
    batch = token_batch(size, ignored=0.0 if unit == "samples" else 0.3)
    batch["labels"][0, 1] = 1
    plan = Plan(
        batch_size=size,
        micro_batch_size=micro_batch_size,
        recompute=checkpointing.blocks(Transformer()) if recompute else (),
    )
    report = check(Job(Transformer, loss, sgd, batch, count=count, seed=seed), plan, "cpu")
    assert report.ok, report


class TokenModel(nn.Module):
    """The smallest model with token labels."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 3), nn.Linear(3, VOCABULARY)

    def forward(self, ids):
        return self.head(self.embedding(ids))


def error_of_the_split(model, loss, batch, counts, micro_batch_size):
    """Relative error of the weighted gradients, by hand."""
    model = model.double()
    parts = [
        dict(zip(batch, values, strict=True))
        for values in zip(*(t.split(micro_batch_size) for t in batch.values()), strict=True)
    ]
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for part in parts:
        if counts(part):
            for total, gradient in zip(sums, torch.autograd.grad(loss(model, part), model.parameters()), strict=True):
                total += gradient * counts(part) / sum(map(counts, parts))
    full = torch.cat([g.flatten() for g in torch.autograd.grad(loss(model, batch), model.parameters())])
    return float((torch.cat([total.flatten() for total in sums]) - full).norm() / full.norm())


@given(
    st.data(),
    st.sampled_from(["samples", tokens(), tokens(shift=True)]),
    st.sampled_from([token_loss, shifted_token_loss]),
)
@hypothesis_settings(max_examples=25)
def test_a_check_agrees_with_an_oracle_by_hand_on_any_labels_and_split(data, count, loss):
    size, micro_batch_size = data.draw(split_sizes())
    ids = torch.randint(VOCABULARY, (size, 4))
    batch = {"ids": ids, "labels": torch.tensor(data.draw(labels(size)))}
    plan = Plan(batch_size=size, micro_batch_size=micro_batch_size)
    report = check(Job(TokenModel, loss, sgd, batch, count=count), plan, "cpu")
    torch.manual_seed(0)
    counts = (lambda part: len(part["ids"])) if count == "samples" else count
    expected = error_of_the_split(TokenModel(), loss, batch, counts, micro_batch_size)
    if report.ok:
        assert expected <= FLOAT64
    elif not math.isnan(expected):
        assert report.hazards
        is_hidden = expected <= FLOAT64  # labels of this batch, but not of others
        assert is_hidden or report.gradient_error == pytest.approx(expected, rel=1e-6)
    is_right = count == (tokens() if loss is token_loss else tokens(shift=True))
    assert report.ok or not is_right


def test_an_engine_that_averages_means_would_be_caught(monkeypatch):
    own = weighting.agree

    def alike(*args):
        return dataclasses.replace(own(*args), equal=True)

    job, plan = regression(LinearStack, size=8, micro_batch_size=3)
    assert check(job, plan, "cpu").ok
    monkeypatch.setattr(weighting, "agree", alike)
    assert not check(job, plan, "cpu").ok


def test_a_recomputation_that_draws_another_mask_would_be_caught(monkeypatch):
    job, plan = regression(WithDropout, recompute=checkpointing.blocks(WithDropout()))
    assert check(job, plan, "cpu").ok
    forgetful = types.SimpleNamespace(**{**vars(segment_run.random_states), "set_torch": lambda states: None})
    monkeypatch.setattr(segment_run, "random_states", forgetful)
    report = check(job, plan, "cpu")
    assert {hazard.kind for hazard in report.hazards} == {"recompute-changes-gradient"}
    assert report.recompute_error > report.recompute_tolerance


def test_a_loss_that_is_nan_where_its_gradient_is_finite_does_not_pass():
    def loss(model, batch):
        value = squared_error(model, batch)
        return value + torch.tensor(math.nan) if len(batch["x"]) < 4 else value

    report = check(*regression(LinearStack, loss), "cpu")
    assert not report.ok
    assert math.isnan(report.loss_error)


def test_a_plan_that_splits_nothing_is_said_to_prove_nothing_about_a_split():
    job = Job(LinearStack, squared_error, lambda m: torch.optim.SGD(m.parameters(), lr=1.0), regression_batch(4))
    for size, expected in ((4, True), (3, False)):
        report = check(job, Plan(batch_size=4, micro_batch_size=size), "cpu")
        assert report.ok
        assert any(line.startswith("nothing is split") for line in report.assumptions) == expected
