"""Errors that are not ours, in the form of ours: of files, of standard output, and of the user's own code.

Entry point: ``named``, for the command line. Errors inside of a window are said again by ``training/failures``, those
of memory by ``training/recovery``.
"""

import errno

from snugfit.errors import PlanError, SnugfitError
from snugfit.targets import users_line

_LONGEST_GOT = 1000
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def named(error: BaseException) -> SnugfitError:
    """An error that is not ours, most often of the user's model or loss, in the form of ours."""
    if isinstance(error, FileNotFoundError) and error.filename is not None and not users_line(error):
        return PlanError(
            f"there is no file {error.filename}",
            got=f"path {str(error.filename)!r}",
            expected="a file that is there",
            hint="check the path",
        )
    if isinstance(error, OSError) and error.filename is not None and not users_line(error):
        return PlanError(
            "a file or folder cannot be read or written",
            got=f"{error.strerror}: {error.filename}",
            expected="a path that can be",
            hint="check the path and its permissions",
        )
    if isinstance(error, OSError) and error.errno in _NO_ROOM and not users_line(error):
        return PlanError(
            "the answer cannot be written",
            got=f"{error.strerror}: standard output",
            expected="a terminal, a pipe, or a file on a disk with room",
            hint="free some room, or send the output elsewhere",
        )
    where = users_line(error)
    message = str(error).strip()
    shown = message if len(message) <= _LONGEST_GOT else f"{message[:_LONGEST_GOT]} ..."
    return SnugfitError(
        f"the job raised {type(error).__name__}" if where else f"unexpected {type(error).__name__}",
        got=f"{shown or 'no message'}{f' ({where})' if where else ''}",
        expected="a job whose model, loss, optimizer and batch run without an error",
        hint="pass --debug to see the whole traceback",
    )
