"""Copies of torch's random state that a step takes: 5056 bytes each, held by every recomputed segment until backward.

Entry point: ``recorded``. torch makes them past its dispatcher, so that a recorder does not see them; on CUDA they lie
on the host.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from snugfit.memory.recording import Recorder


@contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """Record every copy of the random state, from its making to its end, for as long as the context lasts."""
    take = torch.get_rng_state
    endings: list[weakref.finalize[[int], Tensor]] = []

    def taken() -> Tensor:
        state = take()
        category = "saved" if recorder.phase == "forward" else "temporary"
        index = recorder.allocate(state.untyped_storage().nbytes(), category, "get_rng_state")
        endings.append(weakref.finalize(state, recorder.release, index))
        return state

    try:
        with mock.patch.object(torch, "get_rng_state", taken):
            yield
    finally:
        for ending in endings:
            ending.detach()
