"""What the engine keeps alive between windows, as the trace sees it and as the profiler of a real run counts it."""

import pytest
import torch
from torch import nn

import snugfit

NUMBERS = 32
"Bytes of the 1 to 8 byte numbers of losses, weights and flags: real kernels make them, a trace knows some of them."


@pytest.fixture(scope="module")
def job():
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    return snugfit.Job(
        model,
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]).float(), batch[1]),
        lambda model: torch.optim.Adam(model.parameters()),
        lambda samples: (torch.ones(samples, 64), torch.zeros(samples, dtype=torch.long)),
        max_grad_norm=1.0,
    )


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("micro_batch_size", [8, 3], ids=["one micro-batch", "two and a tail"])
def test_the_estimate_holds_between_windows_what_the_engine_holds(job, precision, micro_batch_size):
    plan = snugfit.Plan(batch_size=8, micro_batch_size=micro_batch_size, precision=precision)
    estimated, measured = snugfit.estimate(job, plan, "cpu"), snugfit.measure(job, plan, "cpu")
    assert sum(estimated.at("step end").values()) == sum(measured.at("step end").values())
    for phase in ("forward end", "backward end"):
        difference = sum(estimated.at(phase).values()) - sum(measured.at(phase).values())
        assert abs(difference) <= NUMBERS


def test_gradients_are_gone_between_windows_and_the_moments_stay(job):
    weights = 4 * (64 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10)
    report = snugfit.estimate(job, snugfit.Plan(batch_size=8, micro_batch_size=2, precision="16-mixed"), "cpu")
    assert report.at("backward end")["gradient"] == weights
    assert "gradient" not in report.at("step end")
    counters = 6 * 4  # Adam's count of updates, one per tensor
    assert report.at("step end")["optimizer"] == 2 * weights + counters
