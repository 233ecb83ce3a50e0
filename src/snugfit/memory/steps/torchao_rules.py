"""torchao's optimizers of low-bit state: their update is compiled, and allocates less than its Python code would.

Entry point: ``rules``, a context. Only what is already imported is touched. Left out: what a compiler other than
torch's own, or a later one, allocates.

NOTE [What the compiled update allocates]
Inductor joins all operations of ``single_param_adam`` but the largest value of each block, behind which a moment is
scaled: so each low-bit moment takes one fp32 array as large as the parameter and one of its scales (read from the C++
code for AdamW8bit, torch 2.13 and torchao 0.18; run eagerly it would be 53 bytes per element).
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from snugfit.memory import torch_compiler

COMPILED = "torchao's update is counted as compiled: one fp32 array of the parameter's size for each low-bit moment"


@contextmanager
def rules(assume: Callable[[str], None]) -> Iterator[None]:
    """Let torchao's optimizers update as their compiled code does.

    Args:
        assume: Called with the sentence, if one of them updates.
    """
    home = sys.modules.get("torchao.optim.adam")
    if home is None or not hasattr(home, "single_param_adam"):
        yield
        return

    @torch_compiler.taken_as_compiled
    def update(parameter: Tensor, gradient: Tensor, step: Tensor, *others: Any) -> None:
        assume(COMPILED)
        moments: list[Any] = [moment for moment in others[:3] if isinstance(moment, Tensor)]
        held: list[Tensor] = []
        for moment in moments:
            if not hasattr(moment, "codes"):
                moment.copy_(gradient)
                continue
            scaled = torch.empty_like(parameter, dtype=torch.float32)
            scaled.copy_(gradient)
            scale = torch.empty_like(moment.scale)
            moment.codes.copy_(scaled)
            held += [scaled, scale]
        parameter.add_(gradient)

    with mock.patch.object(home, "single_param_adam", update):
        yield
