"""Every error that snugfit raises on purpose, and the one form of their messages.

Entry point: ``SnugfitError`` and its leaves. A message has four parts, each on its line: what failed, what was
got, what was expected, and one action to take. The facts are attributes as well, so that nobody parses text.
``warn`` is for what is no error. Recognising a foreign out-of-memory error is ``training/recovery.py``'s.
"""

import sys
import warnings
from typing import Any

_BETWEEN = ("snugfit", "contextlib", "torch")
"Packages whose frames a warning looks through."


class SnugfitError(Exception):
    """Base of all errors of this package.

    Args:
        what: What failed, in one sentence, with the name of the argument or module.
        got: The value(s) found, with units and location.
        expected: The rule, with the number that decides.
        hint: One action that the user can take, as code or as a command.
        **facts: Set as attributes of the error, for programs.
    """

    def __init__(
        self, what: str, *, got: str | None = None, expected: str | None = None, hint: str | None = None, **facts: Any
    ) -> None:
        self.what, self.got, self.expected, self.hint = what, got, expected, hint
        for name, value in facts.items():
            setattr(self, name, value)
        super().__init__(_message(what, got, expected, hint))


class PlanError(SnugfitError, ValueError):
    """A plan, a job or an argument contradicts itself or the model."""


class BatchError(SnugfitError, ValueError):
    """A batch cannot be cut, counted or used as it is."""


class InfeasibleError(SnugfitError):
    """No candidate fits the budget; ``.smallest`` is the report of the closest one, ``.budget_bytes`` the budget."""


class UnsupportedError(SnugfitError):
    """An operation, module or device that cannot be accounted for; ``.op`` and ``.module`` name it where known."""


class NonFiniteError(SnugfitError):
    """A loss or gradient is not finite and the job asked not to go on.

    ``.diagnosis`` is what was found out about the window, ``.window`` what can be run again, ``.parameters`` names
    parameters whose gradient is not finite; ``.diagnosis`` is None where finding out failed, which the message says.
    """


class DeviceMemoryError(SnugfitError, RuntimeError):
    """The device ran out of memory while running a plan; raised from the original exception."""


def _message(what: str, got: str | None, expected: str | None, hint: str | None) -> str:
    lines = [what]
    if got is not None:
        lines.append(f"  got:      {got}")
    if expected is not None:
        lines.append(f"  expected: {expected}")
    if hint is not None:
        lines.append(f"hint: {hint}")
    return "\n".join(lines)


def warn(message: str) -> None:
    """Warn at the user's own line: the nearest that is neither in this package nor in a library between them."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
