"""Random states set aside: what traces and measurements draw never moves the user's own.

Entry point: ``random_states``.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch


@contextmanager
def random_states(seed: int = 0) -> Iterator[None]:
    """Seed Python's, numpy's and torch's random states, and put them back as they were."""
    states = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng():
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(states[0])
            numpy.random.set_state(states[1])
