"""The oracle: each hazard is found in a job that has it and none in a clean one, and a check changes nothing."""

import ast
import dataclasses
import importlib
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import snugfit
from models import (
    VOCABULARY,
    WIDTH,
    ConvBatchNorm,
    LinearStack,
    Transformer,
    Weight,
    WithDropout,
    gradients,
    mean_product,
    regression_batch,
    same_bits,
    shifted_token_loss,
    squared_error,
    state_of,
    token_batch,
    token_loss,
)
from snugfit import (
    BatchError,
    DeviceMemoryError,
    Job,
    Loss,
    Plan,
    PlanError,
    Segment,
    Shared,
    UnsupportedError,
    check,
    checkpointing,
    tokens,
)
from snugfit.training import torch_private, weighting
from strategies import labels, split_sizes
from tolerances import EXACT_VALUE, FLOAT64

KINDS = importlib.import_module("snugfit.training.checking.check").KINDS


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def regression(model, loss=squared_error, size=4, micro_batch_size=2, batch=None, **plan):
    job = Job(model, loss, sgd, regression_batch(size) if batch is None else batch)
    return job, Plan(batch_size=size, micro_batch_size=micro_batch_size, **plan)


def found(job, plan):
    report = check(job, plan, "cpu")
    assert report.ok == (not report.hazards)
    return [hazard.kind for hazard in report.hazards]


# ---- clean jobs


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


def image_batch(size=8):
    return torch.randn(size, 3, 8, 8), torch.randint(2, (size,))


def image_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


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


def transformers_model(name, **settings):
    transformers = pytest.importorskip("transformers")
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, **settings
        )
        config.loss_type = "ForCausalLM"
        return lambda: transformers.GPT2LMHeadModel(config)
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, **settings
    )
    return lambda: transformers.BertForSequenceClassification(config)


def own_loss(model, batch):
    return model(**batch).loss


def language_batch(size=4):
    ids = torch.randint(32, (size, 8))
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[0, 5:], labels[1, 3:], mask[0, 5:] = -100, -100, 0
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


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
    own = checkpointing.checkpoint
    monkeypatch.setattr(
        checkpointing, "checkpoint", lambda *args, **kwargs: own(*args, preserve_rng_state=False, **kwargs)
    )
    report = check(job, plan, "cpu")
    assert {hazard.kind for hazard in report.hazards} == {"dropout-not-replayed"}
    assert report.recompute_error > report.recompute_tolerance


def test_a_loss_that_is_nan_where_its_gradient_is_finite_does_not_pass():
    def loss(model, batch):
        value = squared_error(model, batch)
        return value + torch.tensor(math.nan) if len(batch["x"]) < 4 else value

    report = check(*regression(LinearStack, loss), "cpu")
    assert not report.ok
    assert math.isnan(report.loss_error)


# ---- a check changes nothing


def bits(*values):
    return [value.clone() if isinstance(value, torch.Tensor) else torch.tensor(value) for value in values]


@pytest.mark.parametrize("reaches_past_its_argument", [False, True])
def test_model_random_states_gradients_modes_and_batch_are_left_as_they_are(reaches_past_its_argument):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    model[0].eval()
    batch = regression_batch(4)
    squared_error(model, batch).backward()
    weights, grads = state_of(model), gradients(model)
    modes = [module.training for module in model.modules()]
    inputs = {name: tensor.clone() for name, tensor in batch.items()}
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy(), torch.get_default_dtype()

    def loss(given, micro_batch):
        micro_batch["y"].add_(1.0)
        random.random()
        np.random.rand()
        return squared_error(model if reaches_past_its_argument else given, micro_batch)

    job = Job(model, loss, sgd, batch)
    if reaches_past_its_argument:
        with pytest.raises(PlanError, match="reaches no parameter"):
            check(job, Plan(batch_size=4, micro_batch_size=2), "cpu")
    else:
        check(job, Plan(batch_size=4, micro_batch_size=2, recompute=(Segment("0"),)), "cpu")
    assert same_bits(weights, state_of(model))
    assert all(torch.equal(grads[name], gradient) for name, gradient in gradients(model).items())
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(inputs[name], tensor) for name, tensor in batch.items())
    assert all("forward" not in vars(module) for module in model.modules())
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1], torch.get_default_dtype()
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    assert np.array_equal(before[2], after[2])
    assert before[3] == after[3]


def test_an_optimizer_made_by_the_job_never_steps():
    stepped = []

    class Counts(torch.optim.SGD):
        def step(self, closure=None):
            stepped.append(1)

    job = Job(LinearStack, squared_error, lambda m: Counts(m.parameters(), lr=1.0), regression_batch(4))
    assert check(job, Plan(batch_size=4, micro_batch_size=2), "cpu").ok
    assert stepped == []


def test_a_report_is_json_with_every_field():
    batch = regression_batch(4)
    batch["x"][0, 0] = math.nan
    report = check(*regression(LinearStack, batch=batch), "cpu")
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert values["ok"] is False
    assert values["gradient_error"] is None
    assert values["hazards"][0]["kind"] == "non-finite-data"
    assert set(values) == set(report.__slots__)


def test_modules_are_listed_worst_first():
    class Scaled(nn.Module):
        """A loss term of one module only that is not a mean."""

        def __init__(self):
            super().__init__()
            self.good, self.bad = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def loss(model, batch):
        return F.mse_loss(model.good(batch["x"]), batch["y"]) + 0.1 * model.bad(batch["x"]).square().sum()

    report = check(*regression(Scaled, loss), "cpu")
    assert not report.ok
    assert list(report.by_module) == ["bad", "good"]
    assert report.by_module["bad"] == pytest.approx(0.5, abs=EXACT_VALUE)
    assert report.by_module["good"] <= FLOAT64


def test_several_ranks_are_checked_as_one():
    job = Job(LinearStack, squared_error, sgd, regression_batch(8))
    assert check(job, Plan(batch_size=8, micro_batch_size=2, world_size=2, shard="ddp"), "cpu").ok


# ---- counts and coupling


def test_c002_a_loss_that_divides_by_the_number_of_micro_batches_is_found():
    accumulation_steps = 4
    x = torch.arange(1.0, 9.0)

    def loss(model, micro_batch):
        return mean_product(model, micro_batch) / accumulation_steps

    report = check(Job(Weight, loss, sgd, x), Plan(batch_size=8, micro_batch_size=2), "cpu")
    assert [hazard.kind for hazard in report.hazards] == ["double-division"]
    assert "/ accumulation_steps" in report.hazards[0].message
    assert "test_check.py" in report.hazards[0].message
    assert found(Job(Weight, mean_product, sgd, x), Plan(batch_size=8, micro_batch_size=2)) == []


class Settings:
    accumulation_steps = 4
    weight = 0.25


def divided_by_attribute(model, x):
    return mean_product(model, x) / Settings.accumulation_steps


def divided_by_literal(model, x):
    return mean_product(model, x) / 4


def divided_in_place(model, x):
    loss = mean_product(model, x)
    loss /= Settings.accumulation_steps
    return loss


def divided_term_by_term(model, x):
    steps = 4
    return mean_product(model, x) / steps + model.w.square() / steps


def multiplied_by_the_inverse(model, x):
    scale = 1 / Settings.accumulation_steps
    return scale * mean_product(model, x)


def divided_by_a_tensor(model, x):
    steps = torch.tensor(4)
    return torch.div(mean_product(model, x), steps)


def divided_total(model, x):
    return Loss(model(x).sum() / Settings.accumulation_steps, len(x))


def divided_per_sample(model, x):
    steps = 4
    return (model(x) / steps).mean()


def divided_and_converted(model, x):
    return (mean_product(model, x) / Settings.accumulation_steps).float()


DIVIDED = [
    divided_by_attribute,
    divided_by_literal,
    divided_in_place,
    divided_term_by_term,
    multiplied_by_the_inverse,
    divided_by_a_tensor,
    divided_per_sample,
    divided_and_converted,
]


@pytest.mark.parametrize("loss", DIVIDED, ids=lambda loss: loss.__name__)
def test_a_double_division_is_found_in_whatever_form(loss):
    job = Job(Weight, loss, sgd, torch.arange(1.0, 9.0))
    assert found(job, Plan(batch_size=8, micro_batch_size=2)) == ["double-division"]


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 8])
def test_a_division_that_is_called_one_of_accumulation_is_found_in_any_plan(micro_batch_size):
    report = check(
        Job(Weight, divided_by_attribute, sgd, torch.arange(1.0, 9.0)),
        Plan(batch_size=8, micro_batch_size=micro_batch_size),
        "cpu",
    )
    assert [hazard.kind for hazard in report.hazards] == ["double-division"]
    assert "4 times too small" in report.hazards[0].message


def half_of_a_square(model, x):
    return 0.5 * model(x).square().mean() / 1


def half_of_a_square_divided(model, x):
    return model(x).square().mean() / 2


def mean_of_two(model, x):
    return (mean_product(model, x) + model.w.square()) / 2


def temperature(model, x):
    temperature = 2.0
    return mean_product(model, x) / temperature


def sum_over_length(model, x):
    return model(x).sum() / len(x)


def mean_over_width(model, x):
    return model(x[:, None].expand(-1, 2)).sum(1).mean() / x[:, None].expand(-1, 2).shape[1]


def weighted(model, x):
    return mean_product(model, x) + 0.5 * model.w.square()


CLEAN_DIVISIONS = [
    half_of_a_square,
    half_of_a_square_divided,
    mean_of_two,
    temperature,
    sum_over_length,
    mean_over_width,
    weighted,
]


@pytest.mark.parametrize("loss", CLEAN_DIVISIONS, ids=lambda loss: loss.__name__)
def test_other_divisions_of_a_loss_are_no_hazard(loss):
    # the number of micro-batches is 2, and once the size of a micro-batch is, too
    assert found(Job(Weight, loss, sgd, torch.arange(1.0, 5.0)), Plan(batch_size=4, micro_batch_size=2)) == []


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


@pytest.mark.parametrize("fixed", [1, 8])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3])
def test_a_sum_that_is_returned_as_a_mean_is_found(fixed, micro_batch_size):
    def loss(model, batch):
        return F.mse_loss(model(batch["x"]), batch["y"], reduction="sum") / fixed

    assert found(*regression(LinearStack, loss, 8, micro_batch_size)) == ["sum-returned-as-mean"]


@pytest.mark.parametrize(
    ("loss", "given", "remedy"),
    [
        (token_loss, "samples", "snugfit.tokens()"),
        (token_loss, tokens(shift=True), "snugfit.tokens()"),
        (shifted_token_loss, tokens(), "snugfit.tokens(shift=True)"),
        (shifted_token_loss, "samples", "snugfit.tokens(shift=True)"),
        (lambda m, b: F.cross_entropy(m(b["ids"]).mean(1), b["ids"][:, 0]), tokens(), '"samples"'),
    ],
)
def test_a_wrong_count_is_named_with_one_that_was_tried(loss, given, remedy):
    batch = token_batch(6)
    report = check(Job(Transformer, loss, sgd, batch, count=given), Plan(batch_size=6, micro_batch_size=2), "cpu")
    assert [hazard.kind for hazard in report.hazards] == ["wrong-count"]
    assert f"count={remedy} " in report.hazards[0].message


def test_labels_counted_without_their_shift_are_found_where_no_label_is_ignored():
    batch = token_batch(8, ignored=0.0)
    plan = Plan(batch_size=8, micro_batch_size=2)
    report = check(Job(Transformer, shifted_token_loss, sgd, batch, count=tokens()), plan, "cpu")
    assert [hazard.kind for hazard in report.hazards] == ["wrong-count"]
    assert "tokens(shift=True)" in report.hazards[0].message
    assert found(Job(Transformer, shifted_token_loss, sgd, batch, count=tokens(shift=True)), plan) == []


def test_labels_of_a_pair_are_counted_by_their_place():
    ids = torch.randint(VOCABULARY, (4, 5))
    labels = ids.masked_fill(torch.rand(4, 5) < 0.4, -100)

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    report = check(Job(Transformer, loss, sgd, (ids, labels)), Plan(batch_size=4, micro_batch_size=1), "cpu")
    assert "count=snugfit.tokens(key=1) " in report.hazards[0].message


def test_a_count_that_cannot_be_guessed_is_measured():
    def loss(model, batch):
        weights = batch["weight"]
        return (F.mse_loss(model(batch["x"]), batch["y"], reduction="none").mean(1) * weights).sum() / weights.sum()

    batch = {**regression_batch(4), "weight": torch.tensor([1.0, 0.0, 2.0, 1.0])}
    report = check(*regression(LinearStack, loss, batch=batch), "cpu")
    assert [hazard.kind for hazard in report.hazards] == ["wrong-count"]
    assert "weighs them 0.2500 to 0.7500" in report.hazards[0].message


def test_half_precision_does_not_hide_a_wrong_weight():
    """One label more or less among hundreds moves the gradient less than bfloat16 can show."""
    ids = torch.randint(VOCABULARY, (4, 100))
    labels = ids.clone()
    labels[0, 0] = -100
    job = Job(Transformer, token_loss, sgd, {"ids": ids, "labels": labels})
    report = check(job, Plan(batch_size=4, micro_batch_size=1, precision="bf16-mixed"), "cpu")
    assert [hazard.kind for hazard in report.hazards] == ["wrong-count"]
    assert report.gradient_error < 1e-2


def test_a_micro_batch_in_which_no_label_counts_is_explained():
    batch = token_batch(4, ignored=0.0)
    batch["labels"][:2] = -100
    report = check(Job(Transformer, token_loss, sgd, batch), Plan(batch_size=4, micro_batch_size=2), "cpu")
    assert [hazard.kind for hazard in report.hazards] == ["wrong-count"]
    assert "count=snugfit.tokens() " in report.hazards[0].message
    assert found(Job(Transformer, token_loss, sgd, batch, count=tokens()), Plan(batch_size=4, micro_batch_size=2)) == []


@pytest.mark.parametrize("source", [random.random, np.random.rand], ids=["python", "numpy"])
def test_random_numbers_that_are_not_torchs_are_named(source):
    def loss(model, batch):
        return squared_error(model, batch) * (1 + float(source()))

    assert found(*regression(LinearStack, loss)) == ["random-split"]


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.last = inner, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.inner(x))


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


@pytest.mark.parametrize("counted", [False, True])
def test_a_loss_whose_total_is_a_mean_is_found(counted):
    def loss(model, batch):
        return Loss(squared_error(model, batch), len(batch["x"]) if counted else None)

    assert found(*regression(LinearStack, loss, 5, 2)) == ["mean-returned-as-sum"]


# ---- recomputation


class Checkpointed(nn.Module):
    """A model that checkpoints one block by itself."""

    def __init__(self, block, **settings):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(WIDTH, WIDTH), block(), nn.Linear(WIDTH, WIDTH)
        self.settings = {"use_reentrant": False, **settings}

    def forward(self, x):
        return self.last(checkpoint(self.block, self.first(x), **self.settings))


def dropout_block():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("reentrant", [False, True])
def test_c055_dropout_that_is_not_replayed_is_found(reentrant):
    def model(**settings):
        return lambda: Checkpointed(dropout_block, use_reentrant=reentrant, **settings)

    report = check(*regression(model(preserve_rng_state=False)), "cpu")
    assert [(hazard.kind, hazard.module) for hazard in report.hazards] == [("dropout-not-replayed", "block")]
    assert report.recompute_error > 0.1
    assert found(*regression(model())) == []


def test_a_state_that_is_not_kept_is_no_hazard_where_nothing_is_random():
    block = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())  # noqa: E731
    assert found(*regression(lambda: Checkpointed(block, preserve_rng_state=False))) == []


def test_dropout_that_a_library_model_does_not_replay_is_found():
    def model():
        built = transformers_model("gpt2", use_cache=False)()
        for block in built.transformer.h:
            own = block.forward
            block.forward = lambda *args, own=own, **kwargs: checkpoint(
                own, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
            )
        return built

    job = Job(model, own_loss, sgd, language_batch(), count=tokens(shift=True))
    report = check(job, Plan(batch_size=4, micro_batch_size=2), "cpu")
    assert [h.module for h in report.hazards if h.kind == "dropout-not-replayed"] == [
        "transformer.h.0",
        "transformer.h.1",
    ]


class PythonNoise(nn.Module):
    def forward(self, x):
        return x * (1 + random.random())


def test_a_recomputed_module_that_draws_from_python_is_found():
    class Model(LinearStack):
        def __init__(self):
            super().__init__()
            self.layers[1] = nn.Sequential(PythonNoise(), nn.Linear(WIDTH, WIDTH))

    report = check(*regression(Model, recompute=(Segment("layers.1"),)), "cpu")
    assert ("random-numbers-not-replayed", "layers.1") in [(h.kind, h.module) for h in report.hazards]


class AddsInPlace(nn.Module):
    def forward(self, x):
        return x.add_(1).square()


@pytest.mark.parametrize("own", [False, True])
def test_a_recomputed_module_that_changes_its_input_is_found(own):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block, self.last = nn.Linear(WIDTH, WIDTH), AddsInPlace(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = self.first(x)
            return self.last(checkpoint(self.block, x, use_reentrant=False) if own else self.block(x))

    plan = {} if own else {"recompute": (Segment("block"),)}
    report = check(*regression(Model, **plan), "cpu")
    assert [(hazard.kind, hazard.module) for hazard in report.hazards] == [("input-changed-in-place", "block")]
    assert found(*regression(Model)) == ([] if not own else ["input-changed-in-place"])


def test_an_activation_in_place_inside_of_a_recomputed_module_is_no_hazard():
    block = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))  # noqa: E731
    assert found(*regression(lambda: Checkpointed(block))) == []


def test_a_batch_that_the_loss_function_changes_is_found():
    def loss(model, batch):
        batch["x"].mul_(2)
        return squared_error(model, batch)

    report = check(*regression(LinearStack, loss), "cpu")
    assert [hazard.kind for hazard in report.hazards] == ["batch-changed-in-place"]
    assert "batch['x']" in report.hazards[0].message


def test_a_cache_under_recomputation_is_found():
    model = transformers_model("gpt2", use_cache=True)
    job = Job(model, own_loss, sgd, language_batch(), count=tokens(shift=True))
    plan = {"batch_size": 4, "micro_batch_size": 2}
    report = check(job, Plan(**plan, recompute=checkpointing.blocks(model())), "cpu")
    assert {hazard.kind for hazard in report.hazards} == {"cache-under-recompute"}
    assert [hazard.module for hazard in report.hazards] == ["transformer.h.0", "transformer.h.1"]
    assert math.isnan(report.recompute_error)
    assert found(job, Plan(**plan)) == []


SEEN = []


class Counts(nn.Module):
    """A layer with every kind of side effect."""

    def __init__(self, asks):
        super().__init__()
        self.linear, self.asks, self.calls = nn.Linear(WIDTH, WIDTH), asks, 0
        self.log, self.sums = [], {"x": 0.0}
        self.register_buffer("metric", torch.zeros(()))

    def forward(self, x):
        if not (self.asks and snugfit.is_recomputing()):
            self.calls += 1
            self.log.append(float(x.detach().mean()))
            self.sums["x"] += 1.0
        self.metric = self.metric + x.detach().mean()
        return torch.tanh(self.linear(x))


class CountingStack(nn.Module):
    def __init__(self, asks=False, hook=True):
        super().__init__()
        self.layers = nn.ModuleList(Counts(asks) for _ in range(3))
        if hook:
            self.layers[1].linear.register_forward_hook(lambda module, args, output: SEEN.append(1))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


EACH = tuple(Segment(f"layers.{i}") for i in range(3))


def test_c061_what_counts_twice_under_recomputation_is_found():
    report = check(*regression(CountingStack, recompute=EACH), "cpu")
    assert {hazard.kind for hazard in report.hazards} == {"counted-twice"}
    named = [(h.module, h.message.split(" of ")[0]) for h in report.hazards]
    for i in range(3):
        assert [name for module, name in named if module == f"layers.{i}"] == ["calls", "log", "sums"]
    assert [name for module, name in named if module == "layers.1.linear"] == ["SEEN"]
    assert found(*regression(lambda: CountingStack(asks=True, hook=False), recompute=EACH)) == []
    assert found(*regression(CountingStack)) == []


class CountsGlobally(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        SEEN.append(1)
        return self.linear(x)


def test_what_a_forward_counts_outside_of_its_module_is_found():
    job, plan = regression(lambda: Wrapped(CountsGlobally()), recompute=(Segment("inner"),))
    report = check(job, plan, "cpu")
    assert [(hazard.kind, hazard.module) for hazard in report.hazards] == [("counted-twice", "inner")]
    assert "SEEN of forward" in report.hazards[0].message
    assert found(*regression(lambda: Wrapped(CountsGlobally()))) == []


def test_a_metric_buffer_in_the_models_own_checkpoint_counts_twice():
    def model():
        return Checkpointed(lambda: Counts(asks=False))

    report = check(*regression(model), "cpu")
    assert ("block", "metric") in [(h.module, h.message.split(" of ")[0]) for h in report.hazards]


def test_values_that_are_only_overwritten_count_once():
    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.last = nn.Linear(WIDTH, WIDTH), None

        def forward(self, x):
            self.last = x.detach()
            return self.linear(x)

    model = lambda: nn.Sequential(Remembers(), nn.Dropout(0.5), Remembers())  # noqa: E731
    job, plan = regression(model, lambda m, b: F.mse_loss(m(b["x"]), b["y"]), recompute=(Segment("0"), Segment("2")))
    assert found(job, plan) == []


def test_a_reentrant_checkpoint_that_cuts_the_graph_is_found():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.last(checkpoint(self.block, x, use_reentrant=True))

    report = check(*regression(Model), "cpu")
    assert [(hazard.kind, hazard.module) for hazard in report.hazards] == [("recompute-changes-gradient", "block")]


def test_a_generator_of_ones_own_makes_two_runs_differ():
    generator = torch.Generator().manual_seed(0)

    class Noise(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.linear(x * torch.rand(x.shape, generator=generator))

    assert found(*regression(Noise)) == ["two-runs-differ"]


# ---- precision


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


# ---- what cannot be checked


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_in_the_data_that_are_not_finite_are_a_hazard(value):
    batch = regression_batch(4)
    batch["x"][1, 2] = value
    report = check(*regression(LinearStack, batch=batch), "cpu")
    kind = "non-finite-data" if math.isnan(value) else "infinite-data"
    assert [hazard.kind for hazard in report.hazards] == [kind]
    assert "batch['x'] holds 1 of 24" in report.hazards[0].message
    assert math.isnan(report.gradient_error)


def test_an_infinite_mask_in_the_data_is_no_hazard():
    def loss(model, batch):
        return (model(batch["x"]) + batch["mask"]).softmax(-1)[:, 0].mean()

    mask = torch.zeros(4, WIDTH)
    mask[:, 3:] = -math.inf
    assert found(*regression(LinearStack, loss, batch={**regression_batch(4), "mask": mask})) == []


def test_an_infinite_mask_in_the_data_that_leaves_nothing_of_a_row_is_named_where_it_hurts():
    def loss(model, batch):
        return (model(batch["x"]) + batch["mask"]).softmax(-1)[:, 0].mean()

    mask = torch.zeros(4, WIDTH)
    mask[2] = -math.inf
    assert found(*regression(LinearStack, loss, batch={**regression_batch(4), "mask": mask})) == ["fully-masked-row"]


def test_micro_batches_that_report_a_count_of_zero_are_no_hazard():
    def loss(model, batch):
        total = ((model(batch["x"]) - batch["y"]).square().mean(1) * batch["weight"]).sum()
        return Loss(total, float(batch["weight"].sum()))

    weight = torch.tensor([0.0] * 6 + [1.0, 2.0])
    job, plan = regression(LinearStack, loss, 8, 1, batch={**regression_batch(8), "weight": weight})
    assert found(job, plan) == []


@pytest.mark.parametrize("count", ["samples", tokens(), tokens(shift=True)])
def test_labels_that_are_all_ignored_are_a_hazard(count):
    batch = token_batch(4)
    batch["labels"][:] = -100
    job = Job(Transformer, token_loss, sgd, batch, count=count)
    assert found(job, Plan(batch_size=4, micro_batch_size=2)) == ["nothing-counted"]


def test_a_loss_that_raises_is_a_named_error():
    def loss(model, batch):
        raise KeyError("missing")

    with pytest.raises(PlanError, match="raised KeyError") as caught:
        check(*regression(LinearStack, loss), "cpu")
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_loss_that_raises_for_micro_batches_only_says_so():
    def loss(model, batch):
        assert len(batch["x"]) == 4
        return squared_error(model, batch)

    with pytest.raises(PlanError, match="micro_batch_size=2, though not with the whole batch"):
        check(*regression(LinearStack, loss), "cpu")


@pytest.mark.parametrize("loss", [lambda m, b: m(b["x"]), lambda m, b: None, lambda m, b: squared_error(m, b).detach()])
def test_a_loss_that_is_no_scalar_is_refused_as_in_training(loss):
    with pytest.raises(PlanError, match="not a scalar"):
        check(*regression(LinearStack, loss), "cpu")


def test_an_empty_batch_is_a_named_error():
    with pytest.raises(BatchError, match="no sample"):
        check(*regression(LinearStack, batch=regression_batch(0)), "cpu")


def test_what_is_no_plan_is_refused():
    job, _ = regression(LinearStack)
    with pytest.raises(PlanError, match="check needs a plan"):
        check(job, None, "cpu")


def test_a_model_that_cannot_be_copied_is_a_named_error():
    class Uncopied(LinearStack):
        def __deepcopy__(self, memo):
            raise RuntimeError("no")

    with pytest.raises(UnsupportedError, match="cannot be copied"):
        check(*regression(Uncopied()), "cpu")


def limited(most, only_in_float64=False):
    """A loss that runs out of memory for more than some samples."""

    def loss(model, batch):
        wide = batch["x"].dtype == torch.float64
        if len(batch["x"]) > most and (wide or not only_in_float64):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return squared_error(model, batch)

    return loss


def test_a_full_batch_that_does_not_fit_is_replaced_by_the_largest_that_does():
    report = check(*regression(LinearStack, limited(4), 8, 2), "cpu")
    assert report.ok
    assert report.gradient_error <= report.gradient_tolerance
    assert any("micro-batches of 4 samples" in line for line in report.assumptions)
    report = check(*regression(LinearStack, limited(2), 8, 2), "cpu")
    assert report.ok
    assert any("nothing larger than micro_batch_size=2 fits" in line for line in report.assumptions)


def test_a_full_batch_that_only_fits_in_float32_is_compared_in_float32():
    report = check(*regression(LinearStack, limited(4, only_in_float64=True), 8, 2), "cpu")
    assert report.ok
    assert any("in float32" in line for line in report.assumptions)
    assert not any("does not fit" in line for line in report.assumptions)


@pytest.mark.parametrize("most", [8, 4])
def test_what_only_fits_with_recomputation_is_compared_with_it(most):
    def loss(model, batch):
        recomputes = "forward" in vars(model.layers[0])
        if len(batch["x"]) > (most if recomputes else 1):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return squared_error(model, batch)

    report = check(*regression(LinearStack, loss, 8, 2, recompute=checkpointing.blocks(LinearStack())), "cpu")
    assert report.ok
    assert any("in float32, with recomputation" in line for line in report.assumptions)
    assert any("only 1 samples fit" in line for line in report.assumptions)
    assert any("micro-batches of 4 samples" in line for line in report.assumptions) == (most == 4)


def test_single_samples_alone_are_not_compared():
    report = check(*regression(LinearStack, limited(1), 4, 1), "cpu")
    assert not report.ok
    assert [hazard.kind for hazard in report.hazards] == ["not-compared"]


def test_a_micro_batch_that_does_not_fit_is_a_named_error():
    with pytest.raises(DeviceMemoryError, match="does not fit"):
        check(*regression(LinearStack, limited(1), 4, 2), "cpu")


def test_a_model_that_only_runs_in_float32_is_compared_in_float32():
    def loss(model, batch):
        return F.mse_loss(model(batch["x"].float()), batch["y"].float())

    report = check(*regression(LinearStack, loss, 8, 3), "cpu")
    assert report.ok
    assert any("compared in float32" in line for line in report.assumptions)
    assert report.gradient_tolerance > FLOAT64


def test_parameters_in_no_optimizer_are_a_remark_and_no_hazard():
    job = Job(
        LinearStack, squared_error, lambda m: torch.optim.SGD(m.layers[2].parameters(), lr=1.0), regression_batch(4)
    )
    report = check(job, Plan(batch_size=4, micro_batch_size=2), "cpu")
    assert report.ok
    assert list(report.by_module) == ["layers.2"]
    assert any("4 trainable parameters are in no optimizer" in line for line in report.assumptions)


def test_every_kind_of_hazard_in_the_source_is_listed():
    """A kind is the first argument of a Hazard, and its way out is in the message."""
    source = Path(snugfit.__file__).parent / "training"
    made = set()
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
            if name in ("Hazard", "_add") and isinstance(node.args[0], ast.Constant):
                made.add(node.args[0].value)
    assert made == set(KINDS)


# ---- canaries of what is private in torch


def test_random_operations_are_seen_by_their_names_and_give_constants():
    x = torch.ones(3, 4, requires_grad=True)
    with torch_private.Steady() as steady:
        dropped = F.dropout(x, 0.5)
        values = [
            torch.rand(4),
            torch.rand_like(x),
            torch.randn(4),
            torch.randn_like(x),
            torch.empty(4).uniform_(2, 4),
            torch.empty(4).normal_(1, 2),
            torch.normal(torch.ones(4), 2.0),
            torch.empty(4).exponential_(),
            torch.randint(0, 10, (4,)),
            torch.randint(4, (4,)),
            torch.bernoulli(torch.full((4,), 0.1)),
        ]
        order = torch.randperm(5)
    assert dropped.eq(2).all()
    expected = [0.5, 0.5, 0.5, 0.5, 3.0, 2.0, 2.0, 1.0, 4, 1, 1]
    assert [float(value.flatten()[0]) for value in values] == expected
    assert all((value == value.flatten()[0]).all() for value in values)
    assert order.tolist() == [0, 1, 2, 3, 4]
    assert {"bernoulli", "rand", "randn", "randint", "randperm", "normal", "uniform", "exponential"} <= steady.seen


def test_attention_drops_nothing_under_constants_in_forward_and_backward():
    query = torch.randn(1, 2, 3, 4, requires_grad=True)
    gradients = []
    for p in (0.0, 0.5):
        query.grad = None
        with torch_private.Steady():
            # what is kept is scaled, as dropout does
            F.scaled_dot_product_attention(query, query, query, dropout_p=p).square().mean().backward()
        gradients.append(query.grad * (1 - p) ** 2)
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_checkpoint_calls_are_seen_and_made_plain(reentrant, plain):
    calls, runs = [], []

    def around(call):
        calls.append((call.preserves_random_state, [type(value) for value in call.arguments]))
        return lambda: calls.append("after")

    def function(x):
        runs.append(1)
        return x.square()

    x = torch.ones(2, requires_grad=True)
    with torch_private.checkpoint_calls(around, plain=plain):
        checkpoint(function, x, use_reentrant=reentrant, preserve_rng_state=False).sum().backward()
    assert calls == [(False, [torch.Tensor]), "after"]
    assert len(runs) == (1 if plain else 2)
    assert x.grad.tolist() == [2.0, 2.0]
    checkpoint(function, x, use_reentrant=reentrant).sum().backward()
    assert len(calls) == 2
