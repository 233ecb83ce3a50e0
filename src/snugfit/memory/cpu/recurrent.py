"""What oneDNN's LSTM holds and needs: a workspace for backward, packed weights, gates.

Entry points: ``HIDDEN`` and ``RESULTS``. torch calls oneDNN once per layer and direction (ATen/native/mkldnn/RNN.cpp);
the fake kernel gives an empty workspace. GRU and plain RNN run as element-wise operations and matrix products, which
need nothing here. The shares are those of oneDNN's rnn_utils (states, gates and cell states of all time steps, lines
padded to 64 bytes, and by 64 more where a line would be a multiple of 256 elements), checked by measurement.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from snugfit.memory.cpu.copies import copied
from snugfit.memory.events import Call

_PAGE = 4096


class _Sizes(NamedTuple):
    steps: int
    batch: int
    inputs: int
    hidden: int
    element: int
    trains: bool

    @property
    def gates_line(self) -> int:
        return _line(4 * self.hidden, self.element)


def _of(call: Call) -> _Sizes:
    values, weights = call.args[0], call.args[1]
    steps, batch, inputs = values.shape
    backward = call.name.startswith("mkldnn_rnn_layer_backward")
    trains = True if backward else bool(call.args[-1])
    return _Sizes(steps, batch, inputs, weights.shape[0] // 4, values.element_size(), trains)


def _workspace(call: Call) -> dict[int, int]:
    size = _of(call)
    if not size.trains:
        return {}
    cells = size.steps * size.batch
    states = 2 * (size.steps + 1) * size.batch
    widest = max(size.inputs, size.hidden)
    parts = (
        cells * size.gates_line * size.element,
        states * _line(widest, size.element) * size.element,
        states * _line(widest, size.element) * size.element,
        states * _line(widest, 4) * 4,
        (size.steps + 1) * size.batch * 4 * size.hidden * 4,
        cells * _line(size.hidden, size.element) * size.element,
        cells * 4 * max(0, size.inputs - size.hidden) if size.element == 2 else 0,
    )
    return {3: sum(map(_pages, parts))}


def _forward(call: Call) -> int:
    size = _of(call)
    bias = 4 * size.hidden * size.element
    return bias + _packed(size) + _scratchpad(size)


def _backward(call: Call) -> int:
    size = _of(call)
    states = 2 * size.batch * size.hidden
    gradients = call.args[10:13]
    missing = sum(not isinstance(gradient, Tensor) for gradient in gradients[1:])
    inner = copied(gradients) + missing * states // 2 * size.element
    line = size.gates_line if size.element == 4 else _line(4 * size.hidden, 4)
    weights = (size.inputs + size.hidden) * line * 4
    if size.element == 2:  # computed with float32 gradients, and the packed weights beside them
        inner += 4 * (size.steps * size.batch * size.hidden + states) + _packed(size)
    else:
        inner += sum(4 * size.hidden * _line(n, 4) * 4 for n in (size.inputs, size.hidden) if _line(n, 4) != n)
    return inner + 4 * size.hidden * size.element + weights + _scratchpad(size)


def _packed(size: _Sizes) -> int:
    """Both weights as the kernel reads them."""
    if size.element == 4:
        return (size.inputs + size.hidden) * size.gates_line * 4
    rows = sum(-(-n // 32) * 32 for n in (size.inputs, size.hidden))
    return rows * 4 * size.hidden * 2


def _scratchpad(size: _Sizes) -> int:
    """The gates of all steps in float32, of one step in bfloat16, and blocks whose number grows with the width."""
    blocks = _PAGE * 4 * (size.hidden // 256)
    if size.element == 4:
        return _pages(size.steps * size.batch * size.gates_line * 4) + 12856 + blocks
    return 16 * size.batch * size.hidden + 17144 + blocks


def _line(elements: int, element_bytes: int) -> int:
    """Elements of one padded line."""
    per_line = 64 // element_bytes
    padded = -(-elements // per_line) * per_line
    return padded + per_line if padded % 256 == 0 else padded


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


RESULTS: dict[str, Callable[[Call], dict[int, int]]] = {"mkldnn_rnn_layer.default": _workspace}

HIDDEN: dict[str, Callable[[Call], int]] = {
    "mkldnn_rnn_layer.default": _forward,
    "mkldnn_rnn_layer_backward.default": _backward,
}
