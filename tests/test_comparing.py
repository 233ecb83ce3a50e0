"""An estimate beside a measurement: the differences of a moment add up to that of the whole."""

import torch

import snugfit
from models import Transformer, token_batch, token_loss
from snugfit.memory.reporting.comparing import compare


def test_differences_are_signed_and_add_up():
    job = snugfit.Job(
        Transformer,
        token_loss,
        lambda model: torch.optim.AdamW(model.parameters()),
        token_batch,
        count=snugfit.tokens(),
    )
    small = snugfit.Plan(batch_size=8, micro_batch_size=4)
    large = snugfit.Plan(batch_size=16, micro_batch_size=16)
    estimated, measured = snugfit.estimate(job, large, "cpu"), snugfit.measure(job, small, "cpu")
    compared = compare(estimated, measured)
    whole = compared.peak_allocated
    assert whole.num_bytes == estimated.peak_allocated_bytes - measured.peak_allocated_bytes > 0
    assert whole.percent == 100 * whole.num_bytes / measured.peak_allocated_bytes
    assert sum(difference.num_bytes for difference in compared.by_category.values()) == whole.num_bytes
    for phase, differences in compared.phases.items():
        there = sum(estimated.at(phase).values()) - sum(measured.at(phase).values())
        assert sum(difference.num_bytes for difference in differences.values()) == there
    assert compared.by_category["parameter"].num_bytes == 0
    back = compare(measured, estimated)
    assert back.peak_allocated.num_bytes == -whole.num_bytes


def test_a_category_that_was_not_measured_has_no_percentage():
    job = snugfit.Job(
        Transformer,
        token_loss,
        lambda model: torch.optim.AdamW(model.parameters()),
        token_batch,
        count=snugfit.tokens(),
    )
    plan = snugfit.Plan(batch_size=4, micro_batch_size=4)
    compared = compare(snugfit.estimate(job, plan, "t4"), snugfit.measure(job, plan, "cpu"))
    workspaces = compared.by_category["workspace"]
    assert (workspaces.measured_bytes, workspaces.percent) == (0, None)
    assert workspaces.to_dict()["difference_bytes"] == workspaces.estimated_bytes > 0
