"""The update of a window, which cannot be taken back: nobody else may make one, and what fails in it or behind it.

Entry points: ``Guard``, ``update`` and ``behind``. What decides on an update is ``step``'s; where the weights of an
optimizer are is ``updates``'s.

NOTE [Behind the point of no return]
1. From the first optimizer on nothing is retried and no buffer set back: weights have moved, and what a smaller
   micro-batch would do now is a second update. Out of memory is then a ``DeviceMemoryError``; any other error keeps its
   type and gets a note, which says what has moved.
2. An optimizer that steps while a window is open (left over in a loop, or in a loss function) would move weights
   between two micro-batches. A hook on all of torch's optimizers refuses that before it moves anything. Versions of the
   parameters would tell of any write, but only afterwards, and also of layers that normalise their weights in place
   whenever they run (``nn.Embedding(max_norm=...)``), which is the same in a full batch.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from snugfit.errors import DeviceMemoryError, PlanError
from snugfit.training import failures, recovery, torch_private, updates

_AGAIN = "start again from a saved state"


class Guard:
    """Refuses steps of optimizers over a window's parameters, from ``close`` until ``open``.

    Args:
        optimizers: The engine's own.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._parameters: set[int] = set()
        self._hook: Any = None

    def close(self, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse steps over these parameters from now on."""
        self._parameters = {id(parameter) for parameter in parameters}
        self._hook = register_optimizer_step_pre_hook(self._refuse)

    def open(self) -> None:
        """Let optimizers step."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _refuse(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        held = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        if any(optimizer is ours for ours in self._optimizers) or any(one in self._parameters for one in held):
            raise PlanError(
                f"{type(optimizer).__name__}.step() was called inside of a window",
                got="an update between two micro-batches; nothing has moved yet",
                expected="one update per window, made by the engine at its end",
                hint="remove optimizer.step() from the loop and from the loss function",
            )


def update(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Step every optimizer that has gradients.

    Raises:
        DeviceMemoryError: Memory ran out; parameters may have moved.
    """
    for i, optimizer in enumerate(optimizers):
        step = updates.of(optimizer)
        if all(parameter.grad is None for parameter in step.parameters):
            continue
        try:
            step.step()
        except BaseException as error:
            if isinstance(error, Exception) and recovery.is_out_of_memory(error):
                raise DeviceMemoryError(
                    "the device ran out of memory inside of the optimizer's update",
                    got=f"{type(optimizer).__name__}: {error}",
                    expected="memory for the optimizer's state and its temporaries",
                    hint=f"parameters may have moved, so {_AGAIN}; optimizer_impl='for-loop' needs least",
                ) from error
            missing = failures.of_missing_closure(error, optimizer)
            if any(map(torch_private.is_fake, step.parameters)):
                if missing is not None:
                    raise missing from error
                raise  # in a trace, where there is nothing to move
            before = f"; those of the {i} before it have moved" if i else ""
            failures.note(
                missing or error,
                f"{type(optimizer).__name__}, number {i + 1} of {len(optimizers)} optimizers, was interrupted in the "
                f"update of a window: its parameters may have moved{before}. The engine does not count this update, "
                f"and buffers stay as the window left them; {_AGAIN}",
            )
            if missing is not None:
                raise missing from error
            raise
    torch.clear_autocast_cache()  # casts of the old weights, where the caller's own autocast is still open


@contextmanager
def behind(what: str) -> Iterator[None]:
    """The context of what runs after the optimizers: an error in it says that the update was made.

    Args:
        what: Runs, for the note.
    """
    try:
        yield
    except BaseException as error:
        if not recovery.is_out_of_memory(error):
            failures.note(
                error,
                f"{what} failed behind the update of a window: the optimizers have stepped, and what comes after "
                f"{what} was left out",
            )
        raise


def out_of_memory(error: BaseException) -> DeviceMemoryError:
    """The error for memory that ran out when the update had begun."""
    return DeviceMemoryError(
        "the device ran out of memory behind the update of a window",
        got=f"{type(error).__name__}: {error}",
        expected="memory for what runs after the optimizers: schedulers, normalisation statistics, an observer",
        hint=f"the optimizers have stepped and the rest may not have, so {_AGAIN}",
    )
