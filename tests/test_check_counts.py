"""Losses whose weights are wrong: divided twice, counted in another unit, a sum that is a mean."""

import pytest
import torch
from torch.nn import functional as F

from checked_jobs import found, regression, sgd
from models import (
    VOCABULARY,
    LinearStack,
    Transformer,
    Weight,
    mean_product,
    regression_batch,
    shifted_token_loss,
    squared_error,
    token_batch,
    token_loss,
)
from snugfit import Job, Loss, Plan, check, tokens


def test_c002_a_loss_that_divides_by_the_number_of_micro_batches_is_found():
    accumulation_steps = 4
    x = torch.arange(1.0, 9.0)

    def loss(model, micro_batch):
        return mean_product(model, micro_batch) / accumulation_steps

    report = check(Job(Weight, loss, sgd, x), Plan(batch_size=8, micro_batch_size=2), "cpu")
    assert [hazard.kind for hazard in report.hazards] == ["double-division"]
    assert "/ accumulation_steps" in report.hazards[0].message
    assert "test_check_counts.py" in report.hazards[0].message
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


def divided_per_sample(model, x):
    steps = 4
    return (model(x) / steps).mean()


def divided_total(model, x):
    return Loss(model(x).sum() / Settings.accumulation_steps, len(x))


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
    divided_total,
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


@pytest.mark.parametrize("counted", [False, True])
def test_a_loss_whose_total_is_a_mean_is_found(counted):
    def loss(model, batch):
        return Loss(squared_error(model, batch), len(batch["x"]) if counted else None)

    assert found(*regression(LinearStack, loss, 5, 2)) == ["mean-returned-as-sum"]
