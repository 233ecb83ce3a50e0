"""Unpacking packed sequences under fake tensors: torch's own code reads the lengths where no mode sees it.

Entry point: ``pad``. The lengths are known wherever the batch is; packing itself is ``value_sized``'s.
"""

from typing import Any

import torch
from torch import Tensor

from snugfit.memory import torch_private
from snugfit.memory.known_values.values import Values


def pad(values: Values, data: Tensor, sizes: Tensor, batch_first: bool, filling: float, length: int) -> Any:
    """What ``torch.nn.utils.rnn.pad_packed_sequence`` makes: padded sequences, and the lengths on the host.

    As in ATen/native/PackedSequence.cpp: one full tensor, into which every run of steps of as many sequences is copied.
    """
    real = values.read(sizes)
    if real is None:
        return NotImplemented
    with torch_private.without_modes():
        counts: list[int] = real.tolist()
    steps = max(length, len(counts))
    padded = data.new_full((steps, counts[0], *data.shape[1:]), filling)
    start = offset = 0
    for step in range(1, len(counts) + 1):
        if step == len(counts) or counts[step] != counts[start]:
            count, run = counts[start], step - start
            rows = data[offset : offset + run * count]
            padded[start:step, :count].copy_(rows.view(run, count, *data.shape[1:]))
            start, offset = step, offset + run * count
    lengths = torch.tensor([sum(count > index for count in counts) for index in range(counts[0])])
    return (padded.transpose(0, 1) if batch_first else padded), lengths
