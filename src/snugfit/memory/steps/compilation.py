"""torch.compile inside of a trace: what it made, or would make, runs as the Python code that it was made from.

Entry point: ``off``. What the compiler saves by joining operations is not counted; the assumption says so.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from snugfit.memory import torch_private

EAGER = "compiled code is traced as it runs without the compiler, which may keep fewer tensors by joining operations"


@contextmanager
def off(assume: Callable[[str], None]) -> Iterator[None]:
    """Let compiled functions and modules run eagerly.

    Args:
        assume: Called with the sentence, if there are any.
    """

    def compile(model: Any = None, **options: Any) -> Any:
        assume(EAGER)
        return (lambda function: function) if model is None else model

    with mock.patch.object(torch, "compile", compile), torch_private.compiled_run_eagerly(lambda: assume(EAGER)):
        yield
