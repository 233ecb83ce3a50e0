"""The CPU's rules: what real kernels allocate inside, and where their results hold more than the fake ones say.

Entry points: ``CpuRules``, the ``on_op`` of a recorder, and ``hidden_bytes`` for one operation. Each rule stands in
the file of its kind with its reason. Left out, and named in ``CpuRules.assumptions``: operations that nobody has
measured, and what oneDNN's layouts do on processors other than those with AVX-512.
"""

import functools
from collections.abc import Callable

import torch

from snugfit.memory.cpu import (
    attention,
    convolution,
    copies,
    lookups,
    losses,
    matrix_products,
    recurrent,
    reductions,
    transforms,
    types,
)
from snugfit.memory.cpu.measured import WITHOUT_HIDDEN_MEMORY
from snugfit.memory.events import Call, tensors_of
from snugfit.memory.recording import Recorder

HIDDEN: dict[str, Callable[[Call], int]] = {
    **types.HIDDEN,
    **copies.HIDDEN,
    **losses.HIDDEN,
    **lookups.HIDDEN,
    **reductions.HIDDEN,
    **transforms.HIDDEN,
    **matrix_products.HIDDEN,
    **attention.HIDDEN,
    **convolution.HIDDEN,
    **recurrent.HIDDEN,
}
"Operation to the bytes that its kernel needs at its worst moment, beyond its results."

RESULTS: dict[str, Callable[[Call], dict[int, int]]] = {
    **copies.RESULTS,
    **losses.RESULTS,
    **recurrent.RESULTS,
}
"Operation to the real sizes of those results (by position) whose fake storage is smaller."


_ONEDNN = frozenset((*convolution.HIDDEN, *recurrent.HIDDEN))
_MEASURED_THREADS, _MEASURED_CAPABILITY = 2, "AVX512"


@functools.cache
def _is_view(name: str) -> bool:
    """Whether an operation of ATen hands out its argument's storage; one that is not ATen's is taken as new."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    return bool(operator is not None and operator.is_view)


def hidden_bytes(call: Call) -> int:
    """Bytes that a CPU kernel allocates and frees again inside of one operation, at the worst moment."""
    rule = HIDDEN.get(call.name)
    return 0 if rule is None else max(0, rule(call))


class CpuRules:
    """Adds to a recording what CPU kernels allocate inside, and remembers the operations nothing is known about."""

    def __init__(self) -> None:
        self._unknown: set[str] = set()
        self._uses_onednn = False

    def __call__(self, call: Call, recorder: Recorder) -> None:
        """Look at one operation, whose results are recorded already."""
        name = call.name
        if name in HIDDEN:
            self._uses_onednn = self._uses_onednn or name in _ONEDNN
            if name in RESULTS:
                results = tensors_of(call.result)
                for position, num_bytes in RESULTS[name](call).items():
                    recorder.resize(results[position], num_bytes)
            num_bytes = hidden_bytes(call)
            if num_bytes:
                recorder.release(recorder.allocate(num_bytes, "temporary", name))
        elif name not in WITHOUT_HIDDEN_MEMORY and not _is_view(name):
            self._unknown.add(name)

    @property
    def assumptions(self) -> list[str]:
        """What was taken for granted, as sentences of the report."""
        threads, capability = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
        sentences = [f"temporaries inside of kernels are counted as of {threads} thread(s) on a CPU with {capability}"]
        if self._uses_onednn and (threads > _MEASURED_THREADS or capability != _MEASURED_CAPABILITY):
            sentences.append(
                "convolutions and LSTM: copies and scratchpads of oneDNN are those measured with AVX-512 and up to "
                f"{_MEASURED_THREADS} threads; others were up to 35 % of the peak off"
            )
        if self._unknown:
            names = ", ".join(sorted(self._unknown))
            sentences.append(f"temporaries inside of these operations are not counted: {names}")
        return sentences
