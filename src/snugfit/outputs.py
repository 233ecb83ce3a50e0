"""Where the answer of a command goes, looked at before the work, so that nobody waits for it in vain.

Entry points: ``check_file`` and ``check_standard_output``. Writing files is ``plans.write_atomically``'s.
"""

import os
import sys
from pathlib import Path

from snugfit.errors import PlanError


def check_file(path: Path) -> None:
    """Refuse a path to which nothing can be written; nothing is made.

    Raises:
        PlanError: A folder, below a file, or in a folder that may not be written to.
    """
    if path.is_dir():
        raise PlanError(
            "the output is a folder, and a file is written",
            got=f"-o {path}",
            expected="the path of a file",
            hint="add the name of a file to it",
        )
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise PlanError(
            "the output cannot be written",
            got=f"-o {path}: {folder} {'may not be written to' if folder.is_dir() else 'is a file'}",
            expected="a path in a folder that can be written to",
            hint="write it elsewhere",
        )


def drop_what_cannot_be_written() -> None:
    """Give standard output up, where it does not take what is left in its buffer."""
    try:
        sys.stdout.flush()
    except OSError:
        sys.stdout = None  # or it is tried again when the process ends


def check_standard_output() -> None:
    """Refuse a standard output that is closed.

    Raises:
        PlanError: It is.
    """
    if sys.stdout is None:
        raise PlanError(
            "standard output is closed, and the answer goes there",
            got="no standard output",
            expected="a terminal, a pipe or a file",
            hint="leave >&- out, or write > /dev/null",
        )
