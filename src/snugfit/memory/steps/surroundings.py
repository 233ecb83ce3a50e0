"""What the caller's own modes would change about a trace: set to torch's defaults meanwhile, or refused by name.

Entry points: ``default_modes``, ``alone`` and ``refuse_nested``. Left out: the caller's dispatch and function modes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from snugfit.errors import PlanError, UnsupportedError
from snugfit.memory.steps import refusals

_AUTOCAST_DEVICES = ("cpu", "cuda")
_running: list[None] = []
"Holds one entry while a trace runs: it replaces functions of torch's for the whole process."


def refuse_nested() -> None:
    """Say by name that a trace was started inside of another.

    Raises:
        UnsupportedError: A trace is running in this process.
    """
    if _running:
        line = refusals.users_line()
        raise UnsupportedError(
            "traces cannot be nested, nor run in two threads at once",
            got=f"a second trace or estimate, started at {line} while another one runs",
            expected="one trace at a time in a process",
            hint="call snugfit.trace and snugfit.estimate outside of the step that is traced",
            op="",
            module="",
            line=line,
        )


@contextmanager
def alone() -> Iterator[None]:
    """Let no other trace start for as long as the context lasts."""
    refuse_nested()
    _running.append(None)
    try:
        yield
    finally:
        _running.pop()


@contextmanager
def default_modes() -> Iterator[None]:
    """Gradients on, inference mode and autocast off; afterwards everything is as the caller had it.

    Raises:
        PlanError: The caller's default device is one on which no step can be traced.
    """
    device = _default_device()
    if device is not None and device.type not in ("cpu", "cuda"):
        raise PlanError(
            "the default device holds no tensors that a trace could count",
            got=f'"{device}", by torch.device(...) as a context or torch.set_default_device',
            expected='no default device, "cpu" or "cuda"',
            hint="leave that context around snugfit.trace; inside of make_step it may be used",
        )
    with torch.inference_mode(False), torch.enable_grad(), _autocast_off():
        yield


def _default_device() -> torch.device | None:
    try:
        return torch.get_default_device()
    except (AssertionError, RuntimeError):  # torch makes a tensor to find out, here on a card that is not there
        return None


@contextmanager
def _autocast_off() -> Iterator[None]:
    """Autocast off and its nesting at 0, whatever is entered around the trace; also ends what a step leaves on."""
    enabled = [torch.is_autocast_enabled(device) for device in _AUTOCAST_DEVICES]
    dtypes = [torch.get_autocast_dtype(device) for device in _AUTOCAST_DEVICES]
    keeps_cache, nesting = torch.is_autocast_cache_enabled(), _nesting()
    for device in _AUTOCAST_DEVICES:
        torch.set_autocast_enabled(device, False)
    torch.set_autocast_cache_enabled(True)
    torch.clear_autocast_cache()  # what is in it are casts of real weights
    _nest(0)
    try:
        yield
    finally:
        for device, is_on, dtype in zip(_AUTOCAST_DEVICES, enabled, dtypes, strict=True):
            torch.set_autocast_enabled(device, is_on)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(keeps_cache)
        torch.clear_autocast_cache()  # and now of fake ones
        _nest(nesting)


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _nest(level: int) -> None:
    """Bring autocast to a level of nesting; its outermost end alone clears the cache."""
    while _nesting() > level:
        torch.autocast_decrement_nesting()
    while _nesting() < level:
        torch.autocast_increment_nesting()
