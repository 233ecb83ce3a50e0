"""A window that went wrong, in a file: its micro-batches, and the weights, buffers and random states it began with.

Entry points: ``save`` and ``load``. Tensors and built-in values only, so that ``torch.load`` needs no more than
``weights_only``. Optimizer state is left out: a diagnosis makes no update.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from snugfit.errors import BatchError, NonFiniteError, PlanError, SnugfitError
from snugfit.training import nonfinite, random_states
from snugfit.training.diagnosing import rerun
from snugfit.training.diagnosing.rerun import Suspect

FILE = "nonfinite.pt"
_FORMAT, _VERSION = "snugfit window", 1
_PLAIN = (int, float, bool, str, type(None))
_KINDS: dict[str, Any] = {
    "micro_batches": list,
    "counts": list,
    "step": int,
    "loss_scale": (float, type(None)),
    "precision": str,
    "reference": (tuple, type(None)),
    "random": dict,
    "parameters": dict,
    "buffers": dict,
}


@dataclass(frozen=True, slots=True)
class SavedWindow:
    """What a file holds; see ``rerun.Suspect`` for the words."""

    micro_batches: Sequence[Any]
    counts: Sequence[float | None]
    step: int
    loss_scale: float | None
    precision: str
    reference: tuple[Any, ...] | None
    random: Mapping[str, Any]
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]

    def put_into(self, model: nn.Module, device: torch.device) -> None:
        """Set weights, buffers and random states to those of the window's beginning.

        Raises:
            PlanError: The window is of another model; nothing is changed then.
        """
        for kind, ours, saved in (
            ("parameters", dict(model.named_parameters()), self.parameters),
            ("buffers", dict(model.named_buffers()), self.buffers),
        ):
            mine = {name: tuple(tensor.shape) for name, tensor in ours.items()}
            theirs = {name: tuple(tensor.shape) for name, tensor in saved.items()}
            if mine != theirs:
                name = next(n for n in [*mine, *theirs] if mine.get(n) != theirs.get(n))
                raise PlanError(
                    f"the saved window is of another model: its {kind} differ",
                    got=f"{name}: {theirs.get(name, 'none')} in the file, {mine.get(name, 'none')} in the job",
                    expected="the same names and shapes",
                    hint="diagnose with the job that wrote the window",
                )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.parameters[name])
            for name, buffer in model.named_buffers():
                buffer.copy_(self.buffers[name])
        random_states.restore(dict(self.random), device)


def save(path: str | os.PathLike[str], suspect: Suspect) -> None:
    """Write a window to a file, whole or not at all.

    Raises:
        BatchError: A micro-batch holds something other than tensors and built-in containers; names it.
    """
    micro_batches = [_plain(one, f"micro-batch {i}") for i, one in enumerate(suspect.micro_batches)]
    model = suspect.model
    with rerun.kept(suspect):
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "micro_batches": micro_batches,
            "counts": list(suspect.counts),
            "step": suspect.step,
            "loss_scale": suspect.loss_scale,
            "precision": suspect.precision,
            "reference": suspect.settings["reference"],
            "random": random_states.saved(suspect.device),
            "parameters": {name: tensor.detach() for name, tensor in model.named_parameters()},
            "buffers": {name: tensor.detach() for name, tensor in model.named_buffers()},
        }
        target = Path(path)
        partial = target.with_name(f"{target.name}.partial")
        try:
            torch.save(content, partial)
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> SavedWindow:
    """Read a window.

    Raises:
        PlanError: No such file, or not one that ``save`` wrote.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise _unreadable(
            path, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise _unreadable(path, "a file of another kind")
    if content.get("version") != _VERSION:
        raise _unreadable(path, f"version {content.get('version')!r}, where this snugfit reads {_VERSION}")
    for name, kind in _KINDS.items():
        if not isinstance(content.get(name, _PLAIN), kind):
            raise _unreadable(path, f"no {name}" if name not in content else f"{name} of type {type(content[name])}")
    if len(content["micro_batches"]) != len(content["counts"]):
        raise _unreadable(path, f"{len(content['micro_batches'])} micro-batches, {len(content['counts'])} counts")
    tensors = [*content["parameters"].values(), *content["buffers"].values()]
    if not all(isinstance(tensor, Tensor) for tensor in tensors) or not {"torch", "python", "numpy"} <= set(
        content["random"]
    ):
        raise _unreadable(path, "weights that are no tensors, or incomplete random states")
    return SavedWindow(**{name: content[name] for name in _KINDS})


@contextmanager
def kept_beside(folder: Path) -> Iterator[None]:
    """Save the window of a ``NonFiniteError`` that is raised inside, and say in its message where, or why not."""
    try:
        yield
    except NonFiniteError as error:
        suspect = getattr(error, "window", None)
        if suspect is None:
            raise
        path = folder / FILE
        try:
            save(path, suspect)
        except Exception as failure:
            what = failure.got if isinstance(failure, SnugfitError) else f"{type(failure).__name__}: {failure}"
            note = f"the window could not be saved: {what}"
        else:
            note = f"saved: snugfit.diagnose(job, plan, window={str(path)!r}) runs it again"
        raise nonfinite.with_note(error, note) from error


def _plain(value: Any, path: str) -> Any:
    """A micro-batch with tensors of its own, no views of a larger one.

    Raises:
        BatchError: Something that a file may not hold.
    """
    kind = type(value)
    if kind is Tensor:
        return value.detach().clone()
    if kind in _PLAIN:
        return value
    if kind is dict and all(type(key) in _PLAIN for key in value):
        return {key: _plain(one, f"{path}[{key!r}]") for key, one in value.items()}
    if kind in (list, tuple):
        return kind(_plain(one, f"{path}[{i}]") for i, one in enumerate(value))
    raise BatchError(
        "a window holds something that its file may not hold",
        got=f"{kind.__module__}.{kind.__qualname__} at {path}",
        expected="tensors, numbers, strings, None, and dict, list or tuple of them",
        hint="yield plain dicts of tensors, for example dict(batch)",
        path=path,
    )


def _unreadable(path: str | os.PathLike[str], got: str) -> PlanError:
    return PlanError(
        f"the window {os.fspath(path)!r} cannot be read",
        got=got,
        expected=f"a file {FILE} that train wrote into its run folder",
        hint="leave window out to look for a window that goes wrong in the job's data",
    )
