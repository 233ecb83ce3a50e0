"""Where model libraries act differently on fake tensors than on real ones, and how a trace puts that right.

Entry point: ``as_with_real_tensors``. Only libraries that are already imported are touched, and only for the length
of a trace. Each rule says what it assumes, where it assumes something.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from snugfit.memory.recording import Recorder
from snugfit.memory.steps import torchao_rules, transformers_rules


@contextmanager
def as_with_real_tensors(recorder: Recorder) -> Iterator[None]:
    """Let libraries take the way that they take with real tensors."""
    with (
        transformers_rules.rules(recorder.made_by, recorder.values.read, recorder.assume),
        torchao_rules.rules(recorder.assume),
    ):
        yield
