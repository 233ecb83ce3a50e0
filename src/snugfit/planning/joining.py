"""Which units follow each other directly: the second is called with what the first returned.

Entry point: ``watched``. It is seen while a trace runs; whether a run of such units can be recomputed as one segment is
decided by ``training`` when it is applied.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from snugfit.jobs import Job
from snugfit.training import build, segments


@contextmanager
def watched(job: Job, names: Sequence[str]) -> Iterator[tuple[Job, Callable[[], frozenset[tuple[str, str]]]]]:
    """A job whose units are watched, and a function that gives the pairs that followed each other in every call so far.

    Args:
        job: Its model, where it is given as a module, has hooks meanwhile.
        names: The units.
    """
    seen: dict[tuple[str, str], bool] = {}
    handles: list[Any] = []
    last: list[tuple[str, weakref.ref[Tensor] | None]] = []

    def entered(name: str, args: tuple[Any, ...]) -> None:
        if last:
            before, output = last.pop()
            joins = output is not None and bool(args) and args[0] is output()
            seen[before, name] = joins and seen.get((before, name), True)

    def left(name: str, output: Any) -> None:
        last[:] = [(name, weakref.ref(output) if isinstance(output, Tensor) else None)]

    def watch(model: nn.Module) -> nn.Module:
        modules = dict(segments.unwrapped(model).named_modules())
        for name in names:
            handles.append(modules[name].register_forward_pre_hook(lambda _, args, name=name: entered(name, args)))
            handles.append(modules[name].register_forward_hook(lambda _, __, out, name=name: left(name, out)))
        return model

    def joined() -> frozenset[tuple[str, str]]:
        return frozenset(pair for pair, joins in seen.items() if joins)

    try:
        if isinstance(job.model, nn.Module):
            watch(job.model)
            yield job, joined
        else:
            yield replace(job, model=lambda: watch(build.build_model(job))), joined
    finally:
        for handle in handles:
            handle.remove()
