"""The ranks of a training run: how many there are, sums over them, and whether they still agree.

Entry points: ``world_size``, ``reduce_counts``, ``gather`` and ``check_ranks``. A single process pays for nothing here.
Reducing gradients is DDP's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch import distributed as dist

from snugfit.errors import PlanError

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def world_size() -> int:
    """Number of processes that train together; 1 where no process group is initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Number of this process among them; 0 where no process group is initialised."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def reduce_counts(values: Sequence[float | Tensor], device: torch.device) -> list[float | Tensor]:
    """Sum numbers over all ranks, in one message.

    Numbers stay numbers, which waits for the device; if all are 0-dimensional tensors nothing waits.

    Args:
        values: As many, in the same order, on every rank.
        device: Where the process group reduces.
    """
    wide = torch.float32 if device.type == "mps" else torch.float64
    packed = torch.stack([torch.as_tensor(value, dtype=wide, device=device).detach() for value in values])
    dist.all_reduce(packed)
    return [packed[i] if isinstance(value, Tensor) else float(packed[i]) for i, value in enumerate(values)]


def gather(names: list[str]) -> list[list[str]]:
    """The names that every rank has."""
    found: list[list[str]] = [[]] * world_size()
    dist.all_gather_object(found, names)
    return found


def check_ranks(model: nn.Module) -> None:
    """Check that all ranks hold the same weights, bit for bit, by comparing sums of their bits.

    Buffers are left out: DDP lets those of BatchNorm differ until the next window begins.

    Raises:
        PlanError: Ranks differ; ``.names`` are the parameters.
    """
    if world_size() == 1:
        return
    state = dict(model.named_parameters())
    sums = torch.stack([_bit_sum(tensor) for tensor in state.values()])
    highest, lowest = sums.clone(), sums.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    names = [name for name, differs in zip(state, (highest != lowest).tolist(), strict=True) if differs]
    if names:
        raise PlanError(
            "the ranks hold different weights",
            got=f"{len(names)} of {len(state)} tensors differ, the first is {names[0]}",
            expected="equal weights on all ranks after every update",
            hint="reduce gradients in the last micro-step of a window and seed all ranks alike before building",
            names=tuple(names),
        )


def _bit_sum(tensor: Tensor) -> Tensor:
    plain = tensor.detach().contiguous().reshape(-1)
    plain = torch.view_as_real(plain) if plain.is_complex() else plain  # of which one element may be 16 bytes
    return plain.view(_BITS[plain.element_size()]).sum(dtype=torch.int64)
