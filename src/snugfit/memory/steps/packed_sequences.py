"""Packed sequences under fake tensors: torch's own code reads the lengths where no mode sees it.

Entry points: ``pack`` and ``pad``. The lengths are known wherever the batch is; the sizes of what is packed are
``value_sized``'s.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from snugfit.memory import torch_private
from snugfit.memory.known_values.values import Values


def pack(values: Values, data: Tensor, lengths: Tensor, batch_first: bool) -> Any:
    """What ``torch.nn.utils.rnn.pack_padded_sequence`` makes of data that is trained: its steps, and their sizes.

    Its own backward reads the sizes in ATen/native/PackedSequence.cpp; everything else about it needs nothing here.
    """
    real = values.read(lengths)
    if real is None or not data.requires_grad or not torch.is_grad_enabled():
        return NotImplemented
    with torch_private.without_modes():
        ends: list[int] = real.tolist()
    counts = [sum(end > step for end in ends) for step in range(max(ends))]
    return _Pack.apply(data, lengths, batch_first, counts)  # type: ignore[no-untyped-call]


class _Pack(torch.autograd.Function):
    """Packs, and keeps the sizes; backward copies every step's gradients into zeros, time first."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, lengths: Tensor, batch_first: bool, counts: Sequence[int]) -> Any:
        ctx.batch_first, ctx.counts, ctx.shape = batch_first, counts, data.shape
        packed, sizes = torch_private.PACK_PADDED_SEQUENCE(data, lengths, batch_first)
        ctx.mark_non_differentiable(sizes)
        ctx.save_for_backward(sizes)
        return packed, sizes

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows, (first, second, *rest) = gradients[0], ctx.shape
        made = rows.new_zeros((second, first, *rest) if ctx.batch_first else ctx.shape)
        offset = 0
        for step, count in enumerate(ctx.counts):
            made[step, :count].copy_(rows[offset : offset + count])
            offset += count
        return (made.transpose(0, 1) if ctx.batch_first else made), None, None, None


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
