"""A loss that is divided by the number of micro-batches already, and divisions that are something else."""

import numpy as np
import pytest
import torch

from checked_jobs import found, sgd
from models import Weight, mean_product
from snugfit import Job, Loss, Plan, check
from snugfit.training.checking import divisions
from tolerances import FLOAT64


def test_c002_a_loss_that_divides_by_the_number_of_micro_batches_is_found():
    accumulation_steps = 4
    x = torch.arange(1.0, 9.0)

    def loss(model, micro_batch):
        return mean_product(model, micro_batch) / accumulation_steps

    report = check(Job(Weight, loss, sgd, x), Plan(batch_size=8, micro_batch_size=2), "cpu")
    assert [hazard.kind for hazard in report.hazards] == ["double-division"]
    assert "/ accumulation_steps" in report.hazards[0].message
    assert "test_check_divisions.py" in report.hazards[0].message
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


def divided_by_a_bare_number(model, x):
    return mean_product(model, x) / torch.tensor(4.0)


def divided_after_the_length(model, x):
    return model(x).sum() / len(x) / Settings.accumulation_steps


def divided_with_the_length(model, x):
    return model(x).sum() / (len(x) * Settings.accumulation_steps)


def divided_by_a_float(model, x):
    return mean_product(model, x) / float(Settings.accumulation_steps)


def divided_by_numpy(model, x):
    gas = np.int64(4)
    return mean_product(model, x) / gas


def divided_by_an_entry(model, x):
    return torch.true_divide(mean_product(model, x), {"gradient_accumulation_steps": 4}["gradient_accumulation_steps"])


def divided_per_sample_by_name(model, x):
    return (model(x) / Settings.accumulation_steps).mean()


def divided_by_n(model, x):
    n = 4
    return mean_product(model, x) / n


NAMED = [
    divided_after_the_length,
    divided_with_the_length,
    divided_by_a_float,
    divided_by_numpy,
    divided_by_an_entry,
    divided_per_sample_by_name,
]


@pytest.mark.parametrize("loss", [*NAMED, divided_by_a_bare_number, divided_by_n], ids=lambda loss: loss.__name__)
def test_a_double_division_is_found_however_its_number_is_made(loss):
    report = check(Job(Weight, loss, sgd, torch.arange(1.0, 9.0)), Plan(batch_size=8, micro_batch_size=2), "cpu")
    assert [hazard.kind for hazard in report.hazards] == ["double-division"]
    assert report.gradient_error <= FLOAT64  # no comparison shows it


@pytest.mark.parametrize("loss", NAMED, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("micro_batch_size", [4, 8])
def test_a_name_of_accumulation_is_enough_in_a_plan_of_other_numbers(loss, micro_batch_size):
    plan = Plan(batch_size=8, micro_batch_size=micro_batch_size)
    assert found(Job(Weight, loss, sgd, torch.arange(1.0, 9.0)), plan) == ["double-division"]


@pytest.mark.parametrize("loss", [*DIVIDED, *NAMED], ids=lambda loss: loss.__name__)
def test_a_double_division_is_found_by_its_line_where_python_knows_no_columns(loss, monkeypatch):
    monkeypatch.setattr(divisions, "_position", lambda frame: None)
    job = Job(Weight, loss, sgd, torch.arange(1.0, 9.0))
    assert found(job, Plan(batch_size=8, micro_batch_size=2)) == ["double-division"]


def mean_over_classes(model, x):
    return model(x)[:, None].expand(-1, 4).sum(1).mean() / 4


def mean_over_named_classes(model, x):
    classes = 4
    return model(x)[:, None].expand(-1, classes).sum(1).mean() / classes


def mean_of_four(model, x):
    return (mean_product(model, x) + model.w.square() + model.w + model.w.exp()) / 4


CLEAN_QUARTERS = [mean_over_classes, mean_over_named_classes, mean_of_four]


@pytest.mark.parametrize("loss", CLEAN_QUARTERS, ids=lambda loss: loss.__name__)
def test_a_division_that_makes_a_mean_is_not_remarked_on(loss):
    report = check(Job(Weight, loss, sgd, torch.arange(1.0, 9.0)), Plan(batch_size=8, micro_batch_size=2), "cpu")
    assert report.ok
    assert not any("1 / 4" in line for line in report.assumptions)


def weighted_by_a_literal(model, x):
    return 0.25 * mean_product(model, x)


def weighted_by_an_attribute(model, x):
    return Settings.weight * mean_product(model, x)


def weighted_by_a_variable(model, x):
    coefficient = 0.25
    return mean_product(model, x) * coefficient


def divided_by_a_temperature(model, x):
    temperature = 4.0
    return mean_product(model, x) / temperature


def divided_inside_by_a_bare_number(model, x):
    return (model(x) / 4).sum() / len(x)


REMARKS = [
    weighted_by_a_literal,
    weighted_by_an_attribute,
    weighted_by_a_variable,
    divided_by_a_temperature,
    divided_inside_by_a_bare_number,
]


@pytest.mark.parametrize("loss", REMARKS, ids=lambda loss: loss.__name__)
def test_another_factor_that_equals_the_number_of_micro_batches_is_a_remark(loss):
    report = check(Job(Weight, loss, sgd, torch.arange(1.0, 9.0)), Plan(batch_size=8, micro_batch_size=2), "cpu")
    assert report.ok
    (line,) = [line for line in report.assumptions if "1 / 4" in line]
    assert "test_check_divisions.py" in line
    assert "mean_product(model, x)" in line or "(model(x) / 4)" in line
