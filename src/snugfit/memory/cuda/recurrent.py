"""Recurrent layers as cuDNN runs them: one kernel per call, with a reserve that backward reads.

Entry point: ``kernels``. Rules: ATen/native/cudnn/RNN.cpp. What cannot be known without a card is the size of cuDNN's
reserve and workspace; the reserve is taken to be the gates, cells and outputs of every layer and step, the workspace
to be nothing (``ASSUMPTION``). Left out: LSTM with projections, and double backward.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

ASSUMPTION = (
    "recurrent layers: cuDNN's reserve is estimated as gates, cells and outputs of every step; its workspace is not "
    "counted"
)

_VALUES_PER_UNIT = {"lstm": 6, "gru": 5, "rnn_tanh": 2, "rnn_relu": 2}
"Saved per hidden unit and step: gates (4, 3, 1), the cell or the recurrent product of the candidate, the output."


class _Layout(NamedTuple):
    kind: str
    num_layers: int
    num_directions: int
    train: bool


class _CudnnRnn(torch.autograd.Function):
    """Outputs, last states and reserve; input, output, states, weights and reserve are saved."""

    @staticmethod
    def forward(ctx: Any, layout: _Layout, input: Tensor, hx: Tensor, cx: Tensor | None, *weights: Tensor) -> Any:
        steps = input.contiguous()  # a copy where a batch comes first: gone when the kernel is done
        hidden = hx.shape[-1]
        output = input.new_empty((*input.shape[:-1], hidden * layout.num_directions))
        last = torch.empty_like(hx)
        last_cell = torch.empty_like(cx) if cx is not None else None
        units = output.numel() * layout.num_layers * _VALUES_PER_UNIT[layout.kind]
        reserve = input.new_empty(units if layout.train else 0)
        del steps
        ctx.layout = layout
        ctx.save_for_backward(input, hx, cx, output, reserve, *weights)
        return output, last, last_cell

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        input, hx, cx, output, _, *weights = ctx.saved_tensors
        steps = input.contiguous()
        incoming = (torch.zeros_like(output) if gradients[0] is None else gradients[0]).contiguous()
        grad_input = torch.empty_like(input, memory_format=torch.contiguous_format)
        grad_hx = torch.empty_like(hx)
        grad_cx = torch.empty_like(cx) if cx is not None else None
        grads: list[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[4:]):
            flat = input.new_zeros(sum(weight.numel() for weight in weights))  # the gradients are views of it
            grads = [
                part.view(w.shape) for part, w in zip(flat.split([w.numel() for w in weights]), weights, strict=True)
            ]
        del steps, incoming
        return None, grad_input, grad_hx, grad_cx, *grads


def _run(layout: _Layout, input: Tensor, hx: Tensor, cx: Tensor | None, weights: Sequence[Tensor]) -> Any:
    if torch.is_autocast_enabled("cpu"):  # cudnn/AutocastRNN.cpp: everything is cast, the weights at every call
        dtype = torch.get_autocast_dtype("cpu")
        input, hx, cx = input.to(dtype), hx.to(dtype), None if cx is None else cx.to(dtype)
        weights = [weight.to(dtype) for weight in weights]
    return _CudnnRnn.apply(layout, input, hx, cx, *weights)  # type: ignore[no-untyped-call]


def _padded(kind: str) -> Callable[..., Any]:
    def kernel(
        input: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        states = hx if isinstance(hx, (list, tuple)) else (hx, None)
        steps = input.transpose(0, 1) if batch_first else input
        layout = _Layout(kind, num_layers, 2 if bidirectional else 1, train)
        output, last, last_cell = _run(layout, steps, states[0], states[1], params)
        output = output.transpose(0, 1) if batch_first else output
        return (output, last) if last_cell is None else (output, last, last_cell)

    return kernel


def _packed(kind: str) -> Callable[..., Any]:
    def kernel(
        data: Tensor,
        batch_sizes: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> Any:
        states = hx if isinstance(hx, (list, tuple)) else (hx, None)
        layout = _Layout(kind, num_layers, 2 if bidirectional else 1, train)
        output, last, last_cell = _run(layout, data, states[0], states[1], params)
        return (output, last) if last_cell is None else (output, last, last_cell)

    return kernel


def kernels(assume: Callable[[str], None]) -> dict[str, Callable[..., Any]]:
    """Kernels for the composite operators of recurrent layers, by name with overload.

    Args:
        assume: Called with what a layer had to assume.
    """

    def saying(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            assume(ASSUMPTION)
            return kernel(*args, **kwargs)

        return run

    padded = {f"{kind}.input": saying(_padded(kind)) for kind in _VALUES_PER_UNIT}
    return {**padded, **{f"{kind}.data": saying(_packed(kind)) for kind in _VALUES_PER_UNIT}}
