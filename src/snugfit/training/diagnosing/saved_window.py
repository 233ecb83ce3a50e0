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
from snugfit.training.diagnosing import contents, rerun
from snugfit.training.diagnosing.diagnosis import FILE as FILE
from snugfit.training.diagnosing.rerun import Suspect

_FORMAT, _VERSION = "snugfit window", 1


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
            mine = {name: _form(tensor) for name, tensor in ours.items()}
            theirs = {name: _form(tensor) for name, tensor in saved.items()}
            if mine != theirs:
                name = next(n for n in [*mine, *theirs] if mine.get(n) != theirs.get(n))
                raise PlanError(
                    f"the saved window is of another model: its {kind} differ",
                    got=f"{name}: {theirs.get(name, 'none')} in the file, {mine.get(name, 'none')} in the job",
                    expected="the same names, shapes and kinds of numbers",
                    hint="diagnose with the job that wrote the window",
                )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.parameters[name])
            for name, buffer in model.named_buffers():
                buffer.copy_(self.buffers[name])
        random_states.restore(dict(self.random), device)


def _form(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    """Shape and kind of numbers; not the precision, which a window may be looked at in another one of."""
    kind = "complex" if tensor.is_complex() else "floating point" if tensor.is_floating_point() else str(tensor.dtype)
    return tuple(tensor.shape), kind


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
        PlanError: No path, no such file, or not one that ``save`` wrote; whatever is wrong in it is said.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise PlanError(
            "window is not a path",
            got=repr(path),
            expected=f"the file {FILE} that train wrote into its run folder",
            hint="leave window out to look for a window that goes wrong in the job's data; steps= says how many",
        )
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise _unreadable(path, error.strerror or type(error).__name__) from None
    except Exception as error:  # whose advice, to load it as code, is not passed on
        raise _unreadable(path, f"{type(error).__name__}: it is damaged, or holds more than tensors") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise _unreadable(path, "a file of another kind")
    if content.get("version") != _VERSION:
        raise _unreadable(path, f"version {content.get('version')!r}, where this snugfit reads {_VERSION}")
    wrong = contents.fault(content)
    if wrong:
        raise _unreadable(path, wrong)
    return SavedWindow(**{name: content[name] for name in contents.NAMES})


@contextmanager
def kept_beside(folder: Path) -> Iterator[None]:
    """Save the window of a ``NonFiniteError`` that is raised inside, and say in its message where, or why not."""
    try:
        yield
    except NonFiniteError as error:
        suspect = getattr(error, "window", None)
        if suspect is None:
            raise
        path, hint = folder / FILE, ""
        try:
            save(path, suspect)
        except Exception as failure:
            what = failure.got if isinstance(failure, SnugfitError) else f"{type(failure).__name__}: {failure}"
            note = f"the window could not be saved: {what}"
        else:
            note = f"saved: snugfit.diagnose(job, plan, window={str(path)!r}) runs it again"
            hint = f"; --window {path} of snugfit diagnose looks at this window again"
        raise nonfinite.with_note(error, note, hint) from error


def _plain(value: Any, path: str) -> Any:
    """A micro-batch with tensors of its own, no views of a larger one.

    Raises:
        BatchError: Something that a file may not hold.
    """
    kind = type(value)
    if kind is Tensor:
        return value.detach().clone()
    if kind in contents.PLAIN:
        return value
    if kind is dict and all(type(key) in contents.PLAIN for key in value):
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
