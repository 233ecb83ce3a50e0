"""Inference mode in a traced step holds what a step without gradients holds, and is itself again afterwards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import snugfit


def evaluating(context: Callable[[], Any]) -> Callable[[], Callable[[], object]]:
    def make_step() -> Callable[[], object]:
        model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).to("cuda")
        x = torch.randn(64, 256, device="cuda")

        def step() -> object:
            with context():
                return torch.softmax(model(x).to(torch.float64), -1)

        return step

    return make_step


def test_inference_mode_needs_what_no_grad_needs() -> None:
    device = "a100-sxm-80gb"
    without = snugfit.trace(evaluating(torch.no_grad), device)
    inference = snugfit.trace(evaluating(torch.inference_mode), device)
    assert inference.peak_allocated_bytes == without.peak_allocated_bytes
    assert inference.by_category == without.by_category


def test_inference_mode_false_turns_gradients_on_as_torch_does() -> None:
    flags = []

    def make_step() -> Callable[[], object]:
        def step() -> None:
            with torch.inference_mode():
                flags.append(torch.is_grad_enabled())
                with torch.inference_mode(False):
                    flags.append(torch.is_grad_enabled())
                flags.append(torch.is_grad_enabled())
            flags.append(torch.is_grad_enabled())

        return step

    snugfit.trace(make_step, "24GiB")
    assert flags[:4] == [False, True, False, True]


def test_inference_mode_is_torchs_own_again_after_a_trace() -> None:
    snugfit.trace(evaluating(torch.inference_mode), "24GiB")
    with torch.inference_mode():
        assert torch.ones(2).is_inference()
        assert not torch.is_grad_enabled()


@pytest.mark.parametrize("raises", [True, False])
def test_gradients_are_on_again_after_inference_mode(raises: bool) -> None:
    seen = []

    def make_step() -> Callable[[], object]:
        weight = torch.ones(4, requires_grad=True, device="cuda")

        def step() -> None:
            try:
                with torch.inference_mode():
                    weight * 2
                    if raises:
                        raise KeyError
            except KeyError:
                pass
            seen.append((weight * 2).requires_grad)

        return step

    snugfit.trace(make_step, "24GiB")
    assert seen == [True, True]
