"""What happens to a window whose gradient is not finite, for every precision the same.

Entry points: ``decider``, the engine's own ``decide`` hook, and ``explained``, which adds a diagnosis to the error of
a run that cannot go on. Finding out where such a value came from is ``diagnosis``'s.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from snugfit.errors import NonFiniteError
from snugfit.training import distributed, recovery
from snugfit.training.diagnosing import diagnosis, ranges
from snugfit.training.diagnosing.diagnosis import Diagnosis
from snugfit.training.diagnosing.rerun import Suspect
from snugfit.training.weighting import Number

_UNREPEATABLE = "the model, the loss or the data is not the same the second time"
_INDENT = "\n            "
_PARTS = {"what", "got", "expected", "hint"}


def decider(
    policy: str, bad_gradients: Callable[[], tuple[str, ...]] = tuple
) -> Callable[[Tensor | None, Number], str | None]:
    """The function that says why a window is skipped; the only one that waits for the device.

    Args:
        policy: ``"skip"``, ``"raise"``, or ``"ignore"``, which reads nothing.
        bad_gradients: Names of the parameters whose gradient is not finite, for the error.

    Returns:
        ``(whether a gradient is not finite, count)`` to a reason or None; raises ``NonFiniteError`` under ``"raise"``.
    """

    def decide(found_inf: Tensor | None, count: Number) -> str | None:
        if policy == "ignore":
            return None
        flags = [] if found_inf is None else [found_inf]
        if isinstance(count, Tensor):
            flags.append((count == 0).to(found_inf.device if found_inf is not None else count.device))
        elif count == 0:
            return "empty"
        values = torch.stack(flags).tolist() if flags else []
        if isinstance(count, Tensor) and values[-1]:
            return "empty"
        if found_inf is None or not values[0]:
            return None
        if policy == "raise":
            raise NonFiniteError(
                "the gradient of a window is not finite",
                got="inf or NaN in the averaged gradient",
                expected='finite gradients, as nonfinite="raise" asks for',
                hint='pass nonfinite="skip" to leave such windows out',
                parameters=bad_gradients(),
            )
        return "non-finite gradient"

    return decide


def too_many_skipped(
    windows: int, step: int, loss_scale: float | None, parameters: tuple[str, ...] = ()
) -> NonFiniteError:
    """The error of a run that only skips; ``parameters`` are those at fault, where their gradients are still there."""
    scale = "no loss scale" if loss_scale is None else f"loss scale {loss_scale:g}"
    return NonFiniteError(
        f"{windows} windows in a row had a gradient that is not finite",
        got=f"after {step} updates, {scale}",
        expected=f"fewer than {windows} (max_skipped_windows)",
        hint='look for inf or NaN in the data, lower the learning rate, or use precision="bf16-mixed"',
        windows=windows,
        step=step,
        loss_scale=loss_scale,
        parameters=parameters,
    )


def explained(error: NonFiniteError, suspect: Suspect) -> NonFiniteError:
    """The same error with the diagnosis of its window in the message and as ``.diagnosis``; ``.window`` is the window.

    A diagnosis that fails is said in the message, and ``.diagnosis`` is then None: it never hides the error.
    """
    found: Diagnosis | None = None
    try:
        found = diagnosis.of_window(suspect)
    except Exception as failure:
        kind = "memory ran out during the diagnosis" if recovery.is_out_of_memory(failure) else "no diagnosis"
        text = f"{kind}: {type(failure).__name__}: {failure}"
    else:
        text = str(found)
        if found.is_finite:
            others = "look at the messages of the other ranks" if distributed.world_size() > 1 else _UNREPEATABLE
            text = f"all is finite when rank {found.rank} runs the window again: {others}"
    hint = error.hint if found is None or found.is_finite else found.remedy
    return _with(error, text, hint, diagnosis=found, window=suspect)


def explained_by_hand(error: NonFiniteError) -> NonFiniteError:
    """The same error with what can be told of a window that was driven by hand, which cannot be run again."""
    if hasattr(error, "diagnosis"):
        return error  # of another engine, stepped inside of the window
    names: Sequence[str] = getattr(error, "parameters", ())
    cause = "a window driven by hand cannot be run again; gradients that are not finite: " + (
        ", ".join(names) or "none"
    )
    remedy = (
        "move the loop into a loss function for engine.step, which runs such a window again and finds the operation"
    )
    module = names[-1].rpartition(".")[0] if names else ""
    found = Diagnosis(module=module, phase="backward", cause=cause, remedy=remedy, parameters=tuple(names))
    return _with(error, cause, remedy, diagnosis=found)


def with_note(error: NonFiniteError, note: str, hint: str = "") -> NonFiniteError:
    """The same error with one more line about what was got, and more of a hint."""
    return _with(error, note, f"{error.hint or ''}{hint}" or None)


def _with(error: NonFiniteError, text: str, hint: str | None, **facts: Any) -> NonFiniteError:
    lines = _INDENT.join([error.got or "", *text.splitlines()])
    known = {name: value for name, value in vars(error).items() if name not in _PARTS}
    return NonFiniteError(error.what, got=lines, expected=error.expected, hint=hint, **{**known, **facts})


def bad_gradients(model: nn.Module) -> tuple[str, ...]:
    """Names of the parameters whose gradient is not finite; waits for the device."""
    named = model.named_parameters()
    return tuple(name for name, p in named if p.grad is not None and ranges.badness(p.grad))
