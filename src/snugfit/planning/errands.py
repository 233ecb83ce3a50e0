"""Traces of one search that do not wait for each other: one of them in a forked copy of this process, on another core.

Entry points: ``errand`` and ``apart``. What comes back is what the same call gives here, where it is made instead if
there is no second core, if this process has threads or CUDA (neither survives a fork), or if the copy failed in any
way.

NOTE [Autograd in copies]
With its first backward, the engine of a CUDA build of torch starts a thread for each kind of device, also where there
is no card. A copy of such a process can run no backward any more. So the traces of a search are all made ``apart``, in
copies of a process that runs none; one that ran a backward before makes them itself, one after the other.

NOTE [What traces leave]
The tensors and modules of a trace hold each other, and nobody collects them while a search runs. The process that made
the trace does so, once: before it makes another one, or a copy, which would have them as well.
"""

import ctypes
import fcntl
import gc
import os
import pickle
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")

_DIES_WITH_PARENT = 1
"``PR_SET_PDEATHSIG`` of Linux's ``prctl``."
_NICENESS = 5
"Of a copy that may wait: about a third of the time of one that may not, where both want the same core."
_PATIENCE_S = 300.0
"After which a copy that says nothing is given up: a fork of somebody else's locks can hang."


def errand(work: Callable[[], Result], *, may_wait: bool = False) -> "Errand[Result]":
    """Begin some work, in a copy of this process where that is possible.

    Args:
        work: Changes nothing that anybody looks at later; its result can be pickled.
        may_wait: Whether what this process does meanwhile goes first where there are too few cores for both.
    """
    return Errand(work, *_fork(work, may_wait)) if _is_possible() else Errand(work)


def apart(work: Callable[[], Result]) -> Result:
    """The result of some work that traces, and so runs backward, and takes nothing from those after it: see the NOTEs.

    Args:
        work: As for ``errand``.
    """
    return errand(work).result() if _ends_with_backward() else _traced(work)


class Errand(Generic[Result]):
    """Work that may be under way elsewhere."""

    def __init__(self, work: Callable[[], Result], child: int | None = None, pipe: int | None = None) -> None:
        self._work, self._child, self._pipe = work, child, pipe

    def result(self) -> Result:
        """Wait for the result; made here where there is none. Errors of the work are raised here."""
        if self._child is None or self._pipe is None:
            return _traced(self._work)
        pipe, self._pipe = self._pipe, None  # whose end _read closes
        try:
            document = _read(pipe)
        finally:  # also where somebody does not wait for it any more
            self.give_up()
        try:
            result: Result = pickle.loads(document)  # of our own copy
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError):
            return _traced(self._work)
        return result

    def give_up(self) -> None:
        """End what is under way and has not been asked for; a second call does nothing."""
        child, self._child = self._child, None
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            os.close(pipe)
        if child is not None:
            _end(child)

    def __del__(self) -> None:
        self.give_up()


def _is_possible() -> bool:
    alone = threading.active_count() == 1 and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return sys.platform == "linux" and alone and len(os.sched_getaffinity(0)) > 1 and not _is_spent()


def _ends_with_backward() -> bool:
    """Whether this process can make copies until it runs a backward."""
    return torch.backends.cuda.is_built() and not _is_spent()  # type: ignore[no-untyped-call]


def _is_spent() -> bool:
    """Whether this is a copy, which has run a backward, and the build is one for CUDA."""
    return _is_copy[0] and torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]


_is_copy = [False]
"Of this process."
_has_traced = [False]
"Whether this process has made a trace since it last collected what they leave."


def _traced(work: Callable[[], Result]) -> Result:
    """Do some work that traces, in this process."""
    _collect()
    try:
        return work()
    finally:
        _has_traced[0] = True


def _collect() -> None:
    """Collect what traces of this process have left; see the NOTE."""
    if _has_traced[0]:
        _has_traced[0] = False
        gc.collect()


def _fork(work: Callable[[], Any], may_wait: bool) -> tuple[int, int]:
    _collect()
    reading, writing = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or none at all
            stream.flush()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    try:  # nothing of the copy may be seen but its result
        _end_with_parent()
        _is_copy[0] = True
        if may_wait:
            os.nice(_NICENESS)
        os.close(reading)
        writing = fcntl.fcntl(writing, fcntl.F_DUPFD, 3)  # the first three may be the closed ones of a terminal
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        torch.set_num_threads(1)  # a pool of threads is not copied
        _check_autograd()
        document = pickle.dumps(work(), protocol=pickle.HIGHEST_PROTOCOL)
        with os.fdopen(writing, "wb") as result:
            result.write(document)
    finally:
        os._exit(0)


def _check_autograd() -> None:
    """A copy whose autograd is dead says nothing; see the NOTE.

    Raises:
        RuntimeError: It is.
    """
    torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]


def _read(pipe: int) -> bytes:
    """What a copy wrote; nothing if it takes too long or ends without a word."""
    parts: list[bytes] = []
    deadline = time.monotonic() + _PATIENCE_S
    with os.fdopen(pipe, "rb", buffering=0) as stream:
        poll = select.poll()  # unlike select.select, of any descriptor's number
        poll.register(stream, select.POLLIN)
        while poll.poll(1000 * max(deadline - time.monotonic(), 0)):
            part = stream.read(1 << 20)
            if not part:
                return b"".join(parts)
            parts.append(part)
    return b""


def _end_with_parent() -> None:
    """A copy whose process is killed would trace on for nobody."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)


def _end(child: int) -> None:
    try:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    except (ProcessLookupError, ChildProcessError):
        pass
