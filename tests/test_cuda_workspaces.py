"""cuBLAS workspaces: sizes by card and torch, settings of the environment, and how many a step holds."""

from dataclasses import replace

import pytest
import torch

import snugfit
from snugfit import hardware
from snugfit.memory import tracing
from snugfit.memory.cuda import target, workspaces

PAIRS = 2 * 4096 * 1024 + 8 * 16 * 1024
LARGE = 32 * 2**20


@pytest.mark.parametrize(
    ("capability", "torch_version", "num_bytes"),
    [
        ((7, 0), (2, 13), PAIRS),
        ((8, 9), (2, 14), PAIRS),
        ((9, 0), (2, 6), LARGE),
        ((10, 0), (2, 11), PAIRS),
        ((10, 0), (2, 12), LARGE),
        ((11, 0), (2, 13), PAIRS),
        ((11, 0), (2, 14), LARGE),
        ((12, 0), (2, 13), LARGE),
    ],
)
def test_a_workspace_follows_the_card_and_torch(capability, torch_version, num_bytes):
    card = replace(target.of_capability(capability), torch_version=torch_version)
    assert workspaces.cublas_workspace_bytes(card, {}) == num_bytes


@pytest.mark.parametrize(
    ("setting", "num_bytes"),
    [(":4096:8", 4096 * 1024 * 8), (":4096:2:16:8", PAIRS), (":16:8", 16 * 1024 * 8), (":0:0", 0)],
)
def test_the_setting_of_cublas_counts(setting, num_bytes):
    card = target.of_capability((9, 0))
    assert workspaces.cublas_workspace_bytes(card, {"CUBLAS_WORKSPACE_CONFIG": setting}) == num_bytes


@pytest.mark.parametrize("setting", ["", "4096", ":4096", ":4096:8,", "4096:8", ":x:8"])
def test_a_setting_that_cublas_cannot_read_is_refused_by_name(setting):
    card = target.of_capability((8, 0))
    with pytest.raises(snugfit.PlanError) as caught:
        workspaces.cublas_workspace_bytes(card, {"CUBLAS_WORKSPACE_CONFIG": setting})
    assert "CUBLAS_WORKSPACE_CONFIG" in str(caught.value)


def test_cublaslt_shares_the_workspace_unless_told_otherwise():
    card = replace(target.of_capability((8, 0)), torch_version=(2, 13))
    apart = {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}
    assert workspaces.cublaslt_workspace_bytes(card, {}) == 0
    assert workspaces.cublaslt_workspace_bytes(card, apart) == 1024 * 1024
    assert workspaces.cublaslt_workspace_bytes(card, {**apart, "CUBLASLT_WORKSPACE_SIZE": "4096"}) == 4 * 2**20
    with pytest.raises(snugfit.PlanError) as caught:
        workspaces.cublaslt_workspace_bytes(card, {"CUBLASLT_WORKSPACE_SIZE": "4MiB"})
    assert "CUBLASLT_WORKSPACE_SIZE" in str(caught.value)


def workspace_bytes(backward, operation=torch.matmul):
    def make_step():
        weight = torch.zeros(64, 64, requires_grad=backward)

        def step():
            result = operation(weight, torch.zeros(64, 64))
            if backward:
                result.sum().backward()

        return step

    return snugfit.trace(make_step, "rtx-3090").phases["step end"].get("workspace", 0)


def test_a_forward_holds_one_workspace_and_a_training_step_two():
    assert workspace_bytes(False) == PAIRS
    assert workspace_bytes(True) == 2 * PAIRS
    assert workspace_bytes(True, torch.mul) == 0


def test_a_step_under_a_setting_of_cublas_follows_it(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":1024:1")
    assert workspace_bytes(True) == 2 * 1024 * 1024
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    assert workspace_bytes(True) == 0


@pytest.mark.parametrize(
    ("version", "with_bias", "without_bias"),
    [
        ("2.6", [PAIRS, 2**20, 2**20], [PAIRS]),
        ("2.10", [PAIRS, 2**20], [PAIRS]),
        ("2.13", [PAIRS], [PAIRS]),
    ],
)
def test_a_bias_goes_through_cublaslt_with_a_workspace_of_its_own_in_older_torch(version, with_bias, without_bias):
    def taken(bias):
        recordings = []

        def make_step(recorder):
            recordings.append(recorder.recording)
            layers = [torch.nn.Linear(8, 8, bias=bias) for _ in range(2)]
            return lambda: [layer(torch.zeros(4, 8)) for layer in layers]

        with target.under_torch(version), torch.no_grad():
            tracing.record(make_step, hardware.resolve("a100-sxm-40gb"), 1)
        return [birth.num_bytes for birth in recordings[0].births if birth.category == "workspace"]

    assert taken(True) == with_bias
    assert taken(False) == without_bias
