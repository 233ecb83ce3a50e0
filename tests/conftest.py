"""Shared settings of the suite: hypothesis without deadlines and with the same samples on every run, seeded torch.

Data that a file draws while it is imported, for ``parametrize``, is the same on every run as well.
"""

import pytest
import torch
from hypothesis import settings

settings.register_profile("snugfit", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("snugfit")


def pytest_collectstart(collector):
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _as_wide_as_a_file(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # xdist gives its workers that of the terminal


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and this machine has none"))
