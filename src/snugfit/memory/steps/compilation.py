"""torch.compile inside of a trace: what is compiled keeps for backward what torch's own partitioner keeps.

Entry point: ``kept_as_compiled``. Each compiled call is one graph, made by torch's compiler of fake tensors as far as
its partition, and run under the recorder by ``fused_kernels``. Where that cannot be done (see the NOTE) it runs as
the Python code that it was made from, and an assumption says so. Left out: what CUDA graphs reserve, and padding.

NOTE [What runs as plain Python code]
1. Functions that were compiled before the trace, and compilers other than torch's own.
2. What leads to no single graph: values that decide, segments that are recomputed or offloaded inside, hooks of
   gradients, recurrent layers, attributes or buffers that the call replaces.
3. Tensors that are no inputs, weights or buffers of the modules that the function is a method of, is given or encloses.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from snugfit.memory import torch_compiler, torch_private
from snugfit.memory.recording import Recorder
from snugfit.memory.steps.compiled_calls import Call, Untraceable
from snugfit.memory.steps.fused_kernels import Kernels

EAGER = "compiled code is traced as it runs without the compiler, which may keep fewer tensors by joining operations"
COMPILED = (
    "compiled code keeps what torch's partitioner chooses, each compiled call taken as one graph; of operations that "
    "are joined only those results are counted that others than joined operations read"
)
_PARTITIONING = ("inductor", "aot_eager_decomp_partition")
"Compilers that cut forward and backward with the partitioner."


@contextmanager
def kept_as_compiled(recorder: Recorder) -> Iterator[None]:
    """Let compiled functions and modules keep what the compiler would, or run eagerly; assumptions say which.

    Args:
        recorder: Of the trace.
    """
    regions = Regions(recorder)
    with (
        torch_compiler.called_instead(regions.of),
        torch_private.compiled_run_eagerly(lambda: recorder.assume(EAGER)),
    ):
        yield


@dataclass(frozen=True, slots=True)
class _Captured:
    """What runs a call by graphs; None where there are none."""

    run: Callable[[Call], Any] | None
    numbers: dict[tuple[int, str], int]
    "The plain numbers of modules that it has read."


class Regions:
    """The graphs of what has been compiled so far; functions that do the same with the same kinds of tensors share."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._captured: dict[Any, list[_Captured]] = {}
        self._kept: list[Any] = []
        "Objects that keys name by their id."
        self._is_capturing = False

    def of(self, function: Callable[..., Any], backend: str) -> Callable[..., Any]:
        """What runs in place of a compiled function."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._is_capturing or backend == "eager":
                return function(*args, **kwargs)
            call = Call(function, args, kwargs)
            captured = self._of(call) if backend in _PARTITIONING else None
            if captured is None:
                self._recorder.assume(EAGER)
                return function(*args, **kwargs)
            self._recorder.assume(COMPILED)
            return captured(call)

        return run

    def _of(self, call: Call) -> Callable[[Call], Any] | None:
        if not call.is_whole:
            return None
        try:
            candidates = self._captured.setdefault(call.key(self._kept), [])
        except Untraceable:
            return None
        numbers = call.numbers()
        for candidate in candidates:
            if all(numbers.get(place) == value for place, value in candidate.numbers.items()):
                return candidate.run
        candidates.append(self._capture(call, numbers))
        return candidates[-1].run

    def _capture(self, call: Call, numbers: dict[tuple[int, str], int]) -> _Captured:
        self._is_capturing = True
        try:
            run, read = call.captured(self._kernels)
        except Untraceable:
            return _Captured(None, {})
        finally:
            self._is_capturing = False
        return _Captured(run, {place: numbers[place] for place in read})

    def _kernels(self, graph: Any) -> Kernels:
        return Kernels(graph, lambda: None if self._is_capturing else self._recorder)
