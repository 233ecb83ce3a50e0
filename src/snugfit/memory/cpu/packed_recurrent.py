"""LSTM, GRU and RNN over packed sequences on the CPU: torch's own code reads their lengths where no mode sees it.

Entry point: ``answers``. The same operations in the same order as PackedLayer, ReversedPackedLayer and the cells in
ATen/native/RNN.cpp. Sequences that are not packed need nothing here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from snugfit.memory import torch_private
from snugfit.memory.known_values.values import Values

_Hidden = tuple[Tensor, ...]
_Cell = Callable[[Tensor, _Hidden, Sequence[Tensor]], _Hidden]


def answers(values: Values) -> dict[Any, Callable[..., Any]]:
    """Functions of torch's that run a recurrent network, with what to do where they are given packed sequences.

    Args:
        values: Knows the lengths of the batch.
    """

    def answer(cell: _Cell, num_states: int) -> Callable[..., Any]:
        def run(data: Tensor, sizes: Any, hidden: Any, weights: Any, *options: Any) -> Any:
            real = values.read(sizes) if isinstance(sizes, Tensor) else None
            if real is None or not isinstance(weights, (list, tuple)) or len(options) != 5:
                return NotImplemented
            with torch_private.without_modes():
                counts: list[int] = real.tolist()
            states = tuple(hidden) if num_states == 2 else (hidden,)
            return _network(cell, data, counts, states, weights, *options)

        return run

    functions = torch_private.RECURRENT
    cells = {"lstm": (_lstm, 2), "gru": (_gru, 1), "rnn_tanh": (_rnn(torch.tanh), 1), "rnn_relu": (_rnn(torch.relu), 1)}
    return {functions[name]: answer(*cells[name]) for name in cells}


def _network(
    cell: _Cell,
    data: Tensor,
    counts: Sequence[int],
    states: _Hidden,
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    trains: bool,
    is_bidirectional: bool,
) -> tuple[Tensor, ...]:
    directions = 2 if is_bidirectional else 1
    given = [state.unbind(0) for state in states]
    per_cell = len(weights) // (num_layers * directions)
    finals: list[_Hidden] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            own = _named(weights[index * per_cell : (index + 1) * per_cell], has_biases)
            hidden = tuple(parts[index] for parts in given)
            run = _backwards if direction else _forwards
            output, final = run(cell, data, counts, hidden, own)
            outputs.append(output)
            finals.append(final)
        data = torch.cat(outputs, 1) if is_bidirectional else outputs[0]
        if dropout and trains and layer < num_layers - 1:
            data = F.dropout(data, dropout)
    return data, *(torch.stack(parts) for parts in zip(*finals, strict=True))


def _named(weights: Sequence[Tensor], has_biases: bool) -> tuple[Any, ...]:
    """Input and hidden weights, their biases, and the projection; None for what is not there."""
    biases = weights[2:4] if has_biases else (None, None)
    rest = weights[4:] if has_biases else weights[2:]
    return (*weights[:2], *biases, rest[0] if rest else None)


def _forwards(
    cell: _Cell, data: Tensor, counts: Sequence[int], hidden: _Hidden, weights: Sequence[Tensor]
) -> tuple[Tensor, _Hidden]:
    inputs = F.linear(data, weights[0], weights[2])
    outputs, ended, offset, last = [], [], 0, counts[0]
    for count in counts:
        step = inputs.narrow(0, offset, count)
        offset += count
        if count < last:
            ended.append(tuple(part.narrow(0, count, last - count) for part in hidden))
            hidden = tuple(part.narrow(0, 0, count) for part in hidden)
        last = count
        hidden = cell(step, hidden, weights)
        outputs.append(hidden[0])
    ended.append(hidden)
    finals = tuple(torch.cat(parts, 0) for parts in zip(*reversed(ended), strict=True))
    return torch.cat(outputs, 0), finals


def _backwards(
    cell: _Cell, data: Tensor, counts: Sequence[int], given: _Hidden, weights: Sequence[Tensor]
) -> tuple[Tensor, _Hidden]:
    inputs = F.linear(data, weights[0], weights[2])
    outputs, offset, last = [], inputs.shape[0], counts[-1]
    hidden = tuple(part.narrow(0, 0, last) for part in given)
    for count in reversed(counts):
        if count > last:
            added = [part.narrow(0, last, count - last) for part in given]
            hidden = tuple(torch.cat(pair, 0) for pair in zip(hidden, added, strict=True))
        step = inputs.narrow(0, offset - count, count)
        offset, last = offset - count, count
        hidden = cell(step, hidden, weights)
        outputs.append(hidden[0])
    return torch.cat(outputs[::-1], 0), hidden


def _lstm(inputs: Tensor, hidden: _Hidden, weights: Sequence[Tensor]) -> _Hidden:
    gates = F.linear(hidden[0], weights[1], weights[3]).add_(inputs).unsafe_chunk(4, 1)
    enters, forgets, new, leaves = gates[0].sigmoid_(), gates[1].sigmoid_(), gates[2].tanh_(), gates[3].sigmoid_()
    cells = (forgets * hidden[1]).add_(enters * new)
    output = leaves * cells.tanh()
    return (output if weights[4] is None else output.matmul(weights[4].t())), cells


def _gru(inputs: Tensor, hidden: _Hidden, weights: Sequence[Tensor]) -> _Hidden:
    of_input = inputs.unsafe_chunk(3, 1)
    of_hidden = F.linear(hidden[0], weights[1], weights[3]).unsafe_chunk(3, 1)
    reset = of_hidden[0].add_(of_input[0]).sigmoid_()
    update = of_hidden[1].add_(of_input[1]).sigmoid_()
    new = of_input[2].add(of_hidden[2].mul_(reset)).tanh_()
    return ((hidden[0] - new).mul_(update).add_(new),)


def _rnn(activation: Callable[[Tensor], Tensor]) -> _Cell:
    def cell(inputs: Tensor, hidden: _Hidden, weights: Sequence[Tensor]) -> _Hidden:
        return (activation(F.linear(hidden[0], weights[1], weights[3]).add_(inputs)),)

    return cell
