"""Which tensors of a traced step are on the card and which stay on the host, though all are fake CPU tensors.

Entry point: ``Placement``. A script that names "cuda" puts there what it moves or makes there, and what operations
make from it. What it builds without naming a device stays on the host until it is moved. A script that never names
"cuda" has everything on the card.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from snugfit.memory.recording import Recorder


class Placement(TorchFunctionMode):
    """Lets code that names a CUDA device run on fake CPU tensors, and tells the recorder where tensors are."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch with "cuda" read as the traced device."""
        kwargs = kwargs or {}
        named = func is Tensor.cuda or any(map(_names_cuda, args)) or any(map(_names_cuda, kwargs.values()))
        if not named or getattr(func, "__name__", "") == "_parse_to":  # Module.to reads its arguments, then moves
            return func(*args, **kwargs)
        with self._recorder.on_device():
            if func is Tensor.cuda:
                return self._recorder.placed(args[0])
            args = [_CPU if _names_cuda(value) else value for value in args]
            kwargs = {key: _CPU if _names_cuda(value) else value for key, value in kwargs.items()}
            result = func(*args, **kwargs)
            return self._recorder.placed(result) if func is Tensor.to else result


@contextmanager
def cuda_functions_without_a_card() -> Iterator[None]:
    """Let a step wait for the card, choose it or ask for its memory, though there is none: these change no tensor."""
    with ExitStack() as stack:
        for name in _WITHOUT_EFFECT:
            stack.enter_context(mock.patch.object(torch.cuda, name, return_value=None))
        for name in _COUNTERS:
            stack.enter_context(mock.patch.object(torch.cuda, name, return_value=0))
        yield


_WITHOUT_EFFECT = (
    "synchronize",
    "empty_cache",
    "set_device",
    "reset_peak_memory_stats",
    "manual_seed",
    "manual_seed_all",
)
_COUNTERS = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "current_device")
_CPU = torch.device("cpu")


def _names_cuda(value: object) -> bool:
    if isinstance(value, str):
        return value.partition(":")[0] == "cuda"
    return isinstance(value, torch.device) and value.type == "cuda"
