"""Micro-batches that depend on each other: losses and models that compare samples, carried state, random numbers."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from checked_jobs import Wrapped, found, image_batch, image_loss, regression, sgd
from models import VOCABULARY, WIDTH, ConvBatchNorm, LinearStack, Transformer, squared_error, token_batch
from snugfit import Job, Loss, Plan, check, tokens
from snugfit.training import torch_private
from tolerances import EXACT_VALUE


def contrastive(model, batch):
    scores = model(batch["x"]) @ model(batch["y"]).T
    return F.cross_entropy(scores, torch.arange(len(scores)))


def test_c006_a_loss_with_in_batch_negatives_is_refused():
    equal = {"x": torch.ones(4, WIDTH), "y": torch.ones(4, WIDTH)}
    report = check(Job(LinearStack, contrastive, sgd, equal), Plan(batch_size=4, micro_batch_size=2), "cpu")
    assert not report.ok
    assert report.loss_error == pytest.approx(0.5, abs=EXACT_VALUE)  # ln 2 = 0.693147 instead of ln 4 = 1.386294
    (hazard,) = report.hazards
    assert hazard.kind == "batch-coupled-loss"
    assert "0.693147" in hazard.message
    assert "1.38629" in hazard.message


def variance_of_the_batch(model, batch):
    return model(batch["x"]).var(0).mean()


def hardest_sample(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean(1).max()


def neighbours(model, batch):
    """Mixes samples before the model sees them."""
    return F.triplet_margin_loss(model(batch["x"]), model(batch["y"]), model(batch["y"].roll(1, 0)))


def neighbours_of_a_part(model, batch):
    first, part = batch["x"], model.layers[0]
    return F.triplet_margin_loss(part(first), part(batch["y"]), part(batch["y"].roll(1, 0)))


def square_root_of_the_mean(model, batch):
    return squared_error(model, batch).sqrt()


def square_of_the_mean(model, batch):
    return model(batch["x"]).mean().square()


def distances(model, batch):
    return torch.cdist(model(batch["x"]), model(batch["y"])).mean()


@pytest.mark.parametrize(
    "loss",
    [
        contrastive,
        variance_of_the_batch,
        hardest_sample,
        distances,
        neighbours,
        neighbours_of_a_part,
        square_root_of_the_mean,
        square_of_the_mean,
    ],
)
@pytest.mark.parametrize("micro_batch_size", [2, 3])
def test_losses_that_compare_samples_are_named_as_such(loss, micro_batch_size):
    job, plan = regression(LinearStack, loss, 6, micro_batch_size)
    assert found(job, plan) == ["batch-coupled-loss"]
    assert found(job, Plan(batch_size=6, micro_batch_size=6)) == []


class Centered(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class BatchWide(nn.Module):
    """Couples samples in a module that is no BatchNorm."""

    def __init__(self):
        super().__init__()
        self.first, self.center, self.last = nn.Linear(WIDTH, WIDTH), Centered(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(torch.tanh(self.center(self.first(x))))


def test_a_module_that_couples_samples_is_named():
    report = check(*regression(BatchWide, size=8), "cpu")
    assert [(hazard.kind, hazard.module) for hazard in report.hazards] == [("batch-coupled-model", "center")]


def test_c077_batch_norm_layers_are_listed_as_not_equivalent():
    job = Job(ConvBatchNorm, image_loss, sgd, image_batch())
    report = check(job, Plan(batch_size=8, micro_batch_size=4), "cpu")
    assert not report.ok
    assert [(h.kind, h.module) for h in report.hazards] == [
        ("batch-norm", "features.0.1"),
        ("batch-norm", "features.1.1"),
    ]
    assert all("not equivalent" in hazard.message for hazard in report.hazards)
    assert any("split is exact (tried)" in line for line in report.assumptions)
    assert found(job, Plan(batch_size=8, micro_batch_size=4, norm_policy="window")) == ["batch-norm"] * 2


def test_batch_norm_does_not_hide_another_fault():
    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    kinds = found(Job(ConvBatchNorm, loss, sgd, image_batch()), Plan(batch_size=8, micro_batch_size=4))
    assert kinds == ["batch-norm", "batch-norm", "sum-returned-as-mean"]


@pytest.mark.parametrize("source", [random.random, np.random.rand], ids=["python", "numpy"])
def test_random_numbers_that_are_not_torchs_are_named(source):
    def loss(model, batch):
        return squared_error(model, batch) * (1 + float(source()))

    assert found(*regression(LinearStack, loss)) == ["random-split"]


class Carries(nn.Module):
    """Subtracts a mean of what it saw before, which it then updates."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x):
        y = self.linear(x - self.seen)
        self.seen = self.seen + 0.1 * x.detach().mean(0)
        return y


class CouplesByItsOwnBuffer(Carries):
    def forward(self, x):
        self.seen = x.detach().mean(0)
        return self.linear(x - self.seen)


def test_state_that_one_micro_batch_hands_to_the_next_is_named():
    report = check(*regression(lambda: Wrapped(Carries()), size=6), "cpu")
    assert [(hazard.kind, hazard.module) for hazard in report.hazards] == [("carried-state", "inner")]
    assert "changes seen of 'inner'" in report.hazards[0].message


def test_code_around_modules_that_couples_samples_is_named_by_its_module():
    report = check(*regression(lambda: Wrapped(CouplesByItsOwnBuffer()), size=6), "cpu")
    assert [(hazard.kind, hazard.module) for hazard in report.hazards] == [("batch-coupled-model", "inner")]
    report = check(*regression(CouplesByItsOwnBuffer, size=6), "cpu")
    assert [(hazard.kind, hazard.module) for hazard in report.hazards] == [("batch-coupled-model", "")]


def two_means(model, batch):
    logits = model(batch["ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) + 0.1 * logits.square().mean()


def two_losses(model, batch):
    logits = model(batch["ids"])
    tokens_loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    return [tokens_loss, Loss(0.1 * logits.square().sum(), logits.numel())]


def test_means_over_different_units_are_told_from_coupled_samples():
    plan = Plan(batch_size=6, micro_batch_size=2)
    batch = token_batch(6)
    assert found(Job(Transformer, two_means, sgd, batch, count=tokens()), plan) == ["several-denominators"]
    assert found(Job(Transformer, two_losses, sgd, batch, count=tokens()), plan) == []


class Routed(nn.Module):
    """Tokens of all samples in one row, and a loss over how evenly they are routed, as mixtures of experts have."""

    def __init__(self):
        super().__init__()
        self.body, self.router, self.head = Transformer(), nn.Linear(VOCABULARY, 3), nn.Linear(VOCABULARY, VOCABULARY)

    def forward(self, ids):
        hidden = self.body(ids).flatten(0, 1)
        return self.head(hidden), self.router(hidden).softmax(-1)


def test_an_auxiliary_loss_over_all_tokens_of_a_batch_couples_them():
    def loss(model, batch):
        logits, routes = model(batch["ids"])
        return F.cross_entropy(logits, batch["labels"].flatten()) + routes.mean(0).square().sum()

    job = Job(Routed, loss, sgd, token_batch(6, ignored=0.0))
    assert found(job, Plan(batch_size=6, micro_batch_size=2)) == ["batch-coupled-loss"]


def normalised_advantage(model, batch):
    advantage = batch["y"][:, 0]
    weight = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    return (weight * model(batch["x"]).mean(1)).mean()


def weighted_by_the_largest(model, batch):
    weight = batch["y"][:, 0] / batch["y"][:, 0].abs().max()
    return (weight * model(batch["x"]).mean(1)).mean() + model(batch["x"]).square().mean()


@pytest.mark.parametrize("loss", [normalised_advantage, weighted_by_the_largest])
def test_statistics_of_the_data_couple_samples(loss):
    assert found(*regression(LinearStack, loss, 8)) == ["batch-coupled-loss"]


def test_a_coupling_that_is_a_millionth_of_the_loss_is_named_as_one():
    def loss(model, batch):
        return squared_error(model, batch) + 1e-6 * model(batch["x"]).std(0).mean()

    report = check(*regression(LinearStack, loss, 8), "cpu")
    assert [hazard.kind for hazard in report.hazards] == ["batch-coupled-loss"]


class Bank(nn.Module):
    """Keeps features of former micro-batches, and compares a sample with their mean."""

    def __init__(self):
        super().__init__()
        self.linear, self.kept = nn.Linear(WIDTH, WIDTH), []

    def forward(self, x):
        y = self.linear(x)
        others = sum(self.kept) if self.kept else 0.0
        self.kept.append(y.detach().mean(0))
        return y - others


class SelfBank(Bank):
    """Compares with those of its own micro-batch, too."""

    def forward(self, x):
        y = self.linear(x)
        self.kept.append(y.detach().mean(0))
        return y - sum(self.kept)


def test_features_that_are_kept_for_later_micro_batches_are_carried_state():
    report = check(*regression(lambda: Wrapped(Bank()), size=6), "cpu")
    assert [(hazard.kind, hazard.module) for hazard in report.hazards] == [("carried-state", "inner")]
    assert "changes kept of 'inner'" in report.hazards[0].message
    kinds = found(*regression(lambda: Wrapped(SelfBank()), size=6))
    assert kinds == ["carried-state", "batch-coupled-model"]


class NumpyNoise(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.generator = nn.Linear(WIDTH, WIDTH), np.random.default_rng(0)

    def forward(self, x):
        return self.linear(x) * float(1 + self.generator.random())


LOCAL = random.Random(0)


class LocalNoise(NumpyNoise):
    def forward(self, x):
        return self.linear(x) * (1 + LOCAL.random())


@pytest.mark.parametrize(("noise", "source"), [(NumpyNoise, "numpy generator in 'inner'"), (LocalNoise, "random gen")])
def test_a_generator_of_a_modules_own_is_named(noise, source):
    report = check(*regression(lambda: Wrapped(noise()), size=6), "cpu")
    assert report.hazards[0].kind == "random-split"
    assert source in report.hazards[0].message


def draws(draw):
    def loss(model, batch):
        y = model(batch["x"])
        return (y * (1 + draw(y.detach().abs() + 1) + draw(y.detach().abs() + 1)).detach()).mean()

    return loss


@pytest.mark.parametrize(
    "draw",
    [
        torch.poisson,
        lambda x: torch.distributions.Gamma(x, 1.0).sample(),
        lambda x: torch.distributions.Categorical(x).sample()[:, None],
        lambda x: torch.multinomial(x, 2, replacement=True).sum(1, keepdim=True),
        lambda x: torch.empty_like(x).log_normal_(),
        lambda x: torch.distributions.Binomial(3, x / (x + 1)).sample(),
        lambda x: F.rrelu(x - 2, training=True),
    ],
    ids=["poisson", "gamma", "categorical", "multinomial", "log-normal", "binomial", "rrelu"],
)
def test_a_loss_that_draws_from_any_distribution_is_compared(draw):
    assert found(*regression(LinearStack, draws(draw), 6, 2)) == []


def test_a_random_operation_without_a_constant_is_named_instead_of_a_coupling(monkeypatch):
    known = dict(torch_private._CONSTANTS)
    del known["poisson"]
    monkeypatch.setattr(torch_private, "_CONSTANTS", known)
    report = check(*regression(LinearStack, draws(torch.poisson), 6, 2), "cpu")
    assert [hazard.kind for hazard in report.hazards] == ["random-split"]
    assert "random numbers of poisson" in report.hazards[0].message


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, b: F.mse_loss(torch.func.vmap(m)(b["x"]), b["y"]),
        lambda m, b: torch.func.vmap(torch.func.jacrev(lambda x: m(x)))(b["x"]).square().sum((1, 2)).mean(),
        lambda m, b: F.mse_loss(torch.func.vmap(lambda x: m(x) / 4)(b["x"]), b["y"]),
    ],
    ids=["vmap", "jacrev", "divided"],
)
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_losses_under_transformations_of_torch_func_are_compared(loss, precision):
    assert found(*regression(LinearStack, loss, 8, 2, precision=precision)) == []
