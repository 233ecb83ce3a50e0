"""A step that runs in full precision only, or in mixed precision only, is planned in what it runs in, and says so."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import snugfit
from snugfit import precision

WIDTH = 16


class Spectral(nn.Module):
    """Weighs frequencies, as a neural operator does: cuFFT takes no bf16."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=WIDTH)


def operator():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Spectral())


def operator_in_fp32():
    model = operator()
    precision.keep_fp32(model, "1")
    return model


def probabilities():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())


def squared(model, batch):
    return F.mse_loss(model(batch["x"]).float(), batch["y"])


def of_probabilities(model, batch):
    return F.binary_cross_entropy(model(batch["x"]), batch["y"])


def inverted(model, batch):
    hidden = model(batch["x"])
    return torch.linalg.inv(hidden.T @ hidden).square().mean()


def refused_by_the_model(model, batch):
    hidden = model(batch["x"])
    if hidden.dtype != torch.float32:
        raise TypeError(f"this model is for fp32, not {hidden.dtype}")
    return F.mse_loss(hidden, batch["y"])


def job(model, loss):
    return snugfit.Job(
        model,
        loss,
        lambda model: torch.optim.AdamW(model.parameters()),
        lambda n: {"x": torch.rand(n, WIDTH), "y": torch.rand(n, WIDTH)},
    )


@pytest.mark.parametrize(
    ("model", "loss", "said"),
    [
        (operator, squared, ("Unsupported dtype BFloat16", "keep_fp32(model, '1')")),
        (probabilities, of_probabilities, ("binary_cross_entropy is unsafe to autocast", "enabled=False")),
        (probabilities, inverted, ("Low precision dtypes not supported", "enabled=False")),
        (operator_in_fp32, refused_by_the_model, None),
        (probabilities, refused_by_the_model, ("TypeError: this model is for fp32, not torch.bfloat16",)),
    ],
    ids=["fourier", "bce", "inverse", "islands", "own"],
)
def test_a_step_that_mixed_precision_breaks_is_planned_in_fp32_with_the_reason(model, loss, said):
    found = snugfit.plan(job(model, loss), "rtx-3060-12gb", 64)
    assert found.plan.precision == "32-true"
    notes = [note for note in found.notes if note.startswith("bf16-mixed is left out")]
    assert len(notes) == (said is not None)
    if said is not None:
        assert all(part in notes[0] for part in said)
        assert found.reasons["precision"] == "the step runs in no other that was tried"
        assert "mixed precision" not in [rung.name for rung in found.ladder]


def test_what_a_note_proposes_lets_the_step_run_in_mixed_precision():
    found = snugfit.plan(job(operator_in_fp32, squared), "rtx-3060-12gb", 64, fixed={"precision": "bf16-mixed"})
    assert found.plan.precision == "bf16-mixed"


def test_a_precision_that_is_given_and_does_not_run_is_an_error():
    with pytest.raises(snugfit.UnsupportedError, match="unsafe to autocast"):
        snugfit.plan(job(probabilities, of_probabilities), "rtx-3060-12gb", 64, fixed={"precision": "bf16-mixed"})


def test_what_fails_in_every_precision_is_an_error_of_the_job():
    def wrong(model, batch):
        return model(batch["x"]).view(3, -1).sum()

    with pytest.raises(snugfit.UnsupportedError, match="is invalid for input of size"):
        snugfit.plan(job(probabilities, wrong), "rtx-3060-12gb", 64)


def test_where_nothing_fits_the_precision_that_is_left_out_is_named_and_no_way_out_takes_it():
    pytest.importorskip("torchao")
    pytest.importorskip("peft")
    with pytest.raises(snugfit.InfeasibleError, match="bf16-mixed is left out") as refused:
        snugfit.plan(job(probabilities, of_probabilities), "rtx-3060-12gb", 64, budget="600MiB")
    ways = {way.name: way for way in refused.value.ways}
    assert {ways[name].plan.precision for name in ("8bit-optimizer", "lora", "fused-backward")} == {"32-true"}
    assert all(ways[name].memory is not None for name in ("8bit-optimizer", "lora", "fused-backward"))


@pytest.mark.parametrize("loss", [squared, refused_by_the_model])
def test_ways_by_hand_keep_to_a_precision_that_is_given(loss):
    with pytest.raises(snugfit.InfeasibleError) as refused:
        snugfit.plan(job(probabilities, loss), "rtx-3060-12gb", 64, budget="600MiB", fixed={"precision": "32-true"})
    by_hand = [way for way in refused.value.ways if way.name in ("fsdp", "host-offload")]
    assert [way.plan.precision for way in by_hand if way.name == "fsdp"] == ["32-true"]
    assert all(way.memory is not None for way in by_hand if way.name == "fsdp")
