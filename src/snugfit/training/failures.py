"""Errors of a window that torch, or a user's function, words so that nobody finds the cause: said again, by name.

Entry points: ``explained``, ``of_backward``, and ``note`` for errors that keep their type. What ran out of memory is
``recovery``'s.
"""

import inspect
import re
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from snugfit.errors import BatchError, PlanError, SnugfitError, UnsupportedError, warn
from snugfit.training import recomputation, splitting

_SECOND_BACKWARD = "backward through the graph a second time"
_CALL = re.compile(r"\(\) (takes|missing|got) |positional argument|not callable")
"What Python says of a call that does not fit the function."
_TOO_FEW_VALUES = "Expected more than 1"
"Beginning of what torch's normalisations say of a channel with one value."


def note(error: BaseException, text: str) -> None:
    """Add a sentence to an error that keeps its type; Python 3.10 has no notes, there it is a warning."""
    add = getattr(error, "add_note", None)
    if add is None:
        warn(text)
    else:
        add(text)


def raised_in(error: BaseException) -> str:
    """The package whose code raised an error; that of the call for one that a call itself raises."""
    innermost = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        innermost = frame
    name = "" if innermost is None else innermost.f_globals.get("__name__", "")
    return str(name).partition(".")[0]


def explained(error: Exception, micro_batch: Any, i: int, number: int, model: nn.Module) -> SnugfitError | None:
    """A better error for one that came out of a micro-step, or None if there is nothing to add.

    Args:
        error: Of the forward or the backward.
        micro_batch: That was run.
        i: Its place in the window.
        number: Micro-batches of the window.
        model: What is trained.
    """
    if isinstance(error, TypeError):
        return _loss_not_called(error)
    if isinstance(error, PlanError) and _SECOND_BACKWARD in str(error.__cause__):
        return _graph_of_the_batch(micro_batch, i)
    if isinstance(error, ValueError) and str(error).startswith(_TOO_FEW_VALUES):
        return _too_few_values(error, i, number, model)
    return None


def _loss_not_called(error: TypeError) -> PlanError | None:
    """The error for a loss function that takes other arguments than it gets; one that it raises inside is its own."""
    if raised_in(error) != "snugfit" or not _CALL.search(str(error)):
        return None
    return PlanError(
        "Job.loss cannot be called with a model and a micro-batch",
        got=f"TypeError: {error}",
        expected="(model, micro_batch) -> scalar",
        hint="write loss=lambda model, batch: ...",
    )


def of_backward(error: RuntimeError, i: int) -> SnugfitError | None:
    """A better error for one that torch's backward of micro-batch i raised, or None if there is nothing to add."""
    if _SECOND_BACKWARD in str(error):
        return PlanError(
            "two losses share a graph that the first of them has freed",
            got=f"another backward in micro-batch {i}: {str(error).partition('(')[0].strip()}",
            expected="losses that share a graph in one call",
            hint="return them together from the loss function, or call window.backward([first, second])",
        )
    if isinstance(error, CheckpointError):
        told = str(error).partition("Tip:")[0].removeprefix("torch.utils.checkpoint:").split()
        return UnsupportedError(
            "a segment was not computed the same way again, so its gradients would be of another function",
            got=f"segment {', '.join(recomputation.last_repeated()) or 'of the model itself'}: {' '.join(told)}",
            expected="a forward that depends on its inputs, weights and torch's random numbers alone",
            hint="look for counters, caches, Python's random or numpy in it; ask snugfit.is_recomputing() where the "
            "second run has to act like the first, or leave this module out of recompute",
            names=recomputation.last_repeated(),
        )
    return None


def of_missing_closure(error: BaseException, optimizer: torch.optim.Optimizer) -> UnsupportedError | None:
    """The error for a ``step`` that was called without its closure and needs one, though it may be left out."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    inner = frames[-1] if frames else None  # where None was called, or asked about
    calls_none = isinstance(error, TypeError) and "'NoneType' object is not callable" in str(error)
    if not calls_none and "closure" not in str(error).lower():
        return None
    if inner is None or inner.f_code.co_name != "step" or inner.f_locals.get("closure", inner) is not None:
        return None
    try:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    except (TypeError, ValueError):
        return None
    if closure is None or closure.default is closure.empty:
        return None
    name = type(optimizer).__name__
    return UnsupportedError(
        f"{name}.step() needs the closure that it was called without",
        got=f"{type(error).__name__}: {error} (of its definition step(self, closure={closure.default}))",
        expected="a closure without a default, where step() cannot do without it",
        hint=f"define it as step(self, closure), or derive: class With({name}): step = lambda self, closure: "
        f"{name}.step(self, closure)",
    )


def refuse_a_batch(micro_batches: Sequence[Any]) -> None:
    """Refuse a list that can only be one batch: its tensors are not of one kind.

    Raises:
        BatchError: Bare tensors of another type or number of dimensions than the first.
    """
    if not _are_bare_tensors(micro_batches):
        return
    kinds = [(tensor.dtype, tensor.dim()) for tensor in micro_batches]
    if len(set(kinds)) > 1:
        raise BatchError(
            "a list is taken as the micro-batches of a window, and these tensors are one batch",
            got=", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in micro_batches),
            expected="micro-batches of one kind, or a batch that is no list",
            hint="pass a batch [x, y] as a tuple: engine.window(tuple(batch)), or call engine.step(batch)",
        )


def note_a_batch(error: Exception, micro_batches: Sequence[Any]) -> None:
    """Say what a list is taken as, where a loss failed on one that may have been meant as one batch."""
    if isinstance(error, SnugfitError):
        return
    if _are_bare_tensors(micro_batches) and len({len(t) for t in micro_batches if t.dim()}) == 1:
        note(
            error,
            f"a list of {len(micro_batches)} tensors was taken as the micro-batches of a window; if it is one batch, "
            "as a DataLoader yields it, pass it as a tuple, or call engine.step(batch)",
        )


def _are_bare_tensors(micro_batches: Sequence[Any]) -> bool:
    return len(micro_batches) > 1 and all(isinstance(one, Tensor) for one in micro_batches)


def _graph_of_the_batch(micro_batch: Any, i: int) -> BatchError | None:
    try:
        names = [name for name, tensor in splitting.named_tensors(micro_batch) if tensor.grad_fn is not None]
    except BatchError:
        return None
    if not names:
        return None
    return BatchError(
        "the micro-batches of a window share a graph that comes with the batch",
        got=f"{names[0]}, which requires gradients, in micro-batch {i}; the first backward has freed its graph",
        expected="a batch without a graph",
        hint="compute it inside of the loss function, so that each micro-batch has its own, or detach it",
        micro_batch=i,
    )


def _too_few_values(error: Exception, i: int, number: int, model: nn.Module) -> BatchError:
    name, layer = _layer_in(error.__traceback__, model)
    place = f"{name!r} ({type(layer).__name__})" if layer is not None else "a normalisation layer"
    what = "the tail of the batch" if i == number - 1 and i else "one of its micro-batches"
    return BatchError(
        f"micro-batch {i} leaves {place} one value per channel, of which there is no variance",
        got=f"micro-batch {i} of {number}, {what}: {str(error).strip()}",
        expected="more than one value per channel in training mode",
        hint="use a micro_batch_size that leaves no tail of one sample, drop_last=True in the DataLoader, or "
        "snugfit.norms.freeze(model), or snugfit.norms.to_group_norm(model, groups)",
        micro_batch=i,
        module=name,
    )


def _layer_in(trace: TracebackType | None, model: nn.Module) -> tuple[str | None, nn.Module | None]:
    """The innermost named module that a traceback went through."""
    names = {id(module): name for name, module in model.named_modules() if name}
    found: tuple[str | None, nn.Module | None] = (None, None)
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in names:
            found = names[id(module)], module
        trace = trace.tb_next
    return found
