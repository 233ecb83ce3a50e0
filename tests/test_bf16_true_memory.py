"""The bytes that weights, masters, gradients and moments take in every form of the update."""

import pytest
import torch
from torch import nn

from bf16_jobs import BF16, METHODS, adamw, expected_warning, made, mean, plan
from models import LinearStack, squared_error
from snugfit import Job, estimate
from snugfit.training import buckets

WIDE, DEEP = 64, 4


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(DEEP)))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize(
    ("method", "gradient_dtype", "per_parameter"),
    [
        ("master-weights", "float32", 2 + 4 + 4 + 8),
        ("master-weights", "parameter", 2 + 4 + 2 + 8),
        ("stochastic-rounding", "float32", 2 + 4 + 8),
        ("stochastic-rounding", "parameter", 2 + 2 + 8),
        ("nearest", "float32", 2 + 4 + 4),
        ("nearest", "parameter", 2 + 2 + 4),
    ],
)
def test_the_static_bytes_of_every_form_are_predicted(method, gradient_dtype, per_parameter):
    job = Job(Stack, mean, adamw, lambda n: torch.ones(n, WIDE))
    with expected_warning(method):
        report = estimate(job, plan(method, gradient_dtype=gradient_dtype), device="cpu")
    counters = 4 * DEEP * (1 + (method == "stochastic-rounding"))  # Adam's steps, and the stand-ins
    assert report.static_bytes == per_parameter * DEEP * WIDE * WIDE + counters


def test_without_masters_an_update_holds_the_copies_of_one_bucket(monkeypatch):
    job = Job(Stack, mean, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), lambda n: torch.ones(n, WIDE))
    form = plan("stochastic-rounding", optimizer_impl="for-loop")
    whole = estimate(job, form, device="cpu")
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 4 * WIDE * WIDE)
    parts = estimate(job, form, device="cpu")
    assert parts.static_bytes == whole.static_bytes
    others = DEEP - 1  # at the peak copies in one case, numbers that stand for them in the other
    saved = whole.windows[-1].by_phase["optimizer"] - parts.windows[-1].by_phase["optimizer"]
    assert saved == 4 * others * WIDE * WIDE - 4 * others


@pytest.mark.parametrize("method", METHODS)
def test_what_needs_no_master_reaches_the_device_in_bf16(method, monkeypatch):
    seen = {}

    def moved(model, device):
        seen.update({name: p.dtype for name, p in model.named_parameters()})
        return model.to(device)

    monkeypatch.setattr("snugfit.training.build._moved", moved)
    model = LinearStack()
    model.layers[0].requires_grad_(False)
    engine = made(model, squared_error, adamw, method)
    trained = torch.float32 if method == "master-weights" else BF16
    assert seen == {name: BF16 if name.startswith("layers.0") else trained for name in seen}
    assert {p.dtype for p in engine.model.parameters()} == {BF16}
