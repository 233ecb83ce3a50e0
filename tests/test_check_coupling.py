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
