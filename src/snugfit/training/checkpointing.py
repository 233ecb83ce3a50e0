"""Activation checkpointing of modules by name: their saved tensors are dropped and computed again in backward.

Entry points: ``apply`` with the segments that ``every``, ``blocks``, ``segments`` and ``match`` name, and
``is_recomputing``. How modules are repeated is ``segment_run``'s, what may be recomputed is checked in
``recomputable``; choosing under a budget is the planner's.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from snugfit.errors import PlanError, warn
from snugfit.plans import Segment
from snugfit.training import recomputable
from snugfit.training.caches import Cache, without_cache
from snugfit.training.holders import let_go
from snugfit.training.recomputation import is_recomputing as is_recomputing
from snugfit.training.segment_run import Forward, Run, present
from snugfit.training.segments import blocks as blocks
from snugfit.training.segments import every as every
from snugfit.training.segments import match as match
from snugfit.training.segments import segments as segments
from snugfit.training.segments import unwrapped as unwrapped


class Handle:
    """What ``apply`` did, and the way to undo it."""

    def __init__(
        self,
        segments: tuple[Segment, ...],
        modules: dict[str, nn.Module],
        forwards: list[Forward],
        caches: list[Cache],
    ) -> None:
        self.segments = segments
        self.covered: tuple[str, ...] = tuple(modules)
        "Names of the modules that are recomputed."
        self._undone: list[Forward | Cache] = [*forwards, *caches]
        self._note()

    def remove(self) -> None:
        """Give the modules their own forward back; a second call does nothing.

        Where another handle or engine needs the same segments they stay for it.
        """
        undone, self._undone = self._undone[::-1], []
        for one, is_free in zip(undone, let_go(self, [one.holders for one in undone]), strict=True):
            if is_free:
                one.uninstall()

    def check_use(self) -> None:
        """Say what of the segments did nothing in the forwards so far; for an engine whose first window has run.

        Raises:
            PlanError: None of them has run.
        """
        runs = list(dict.fromkeys(one.run for one in self._undone if isinstance(one, Forward)))
        idle = [run.segment.modules for run in runs if not run.called]
        apart = [run.segment.modules for run in runs if run.longest == 1 < len(run.called) == len(run.modules)]
        if idle and len(idle) == len(runs):
            raise PlanError(
                "no segment has run, so nothing is recomputed",
                got=f"{_shown(idle)}, which the forward does not call",
                expected="modules that run in the forward",
                hint="pass snugfit.checkpointing.blocks(model), or name the modules that are called",
            )
        if idle:
            warn(f"segments that did not run in the first window, so nothing of them is recomputed: {_shown(idle)}")
        if apart:
            warn(
                "modules of a segment did not run in the order in which it names them, so each is recomputed by "
                f"itself: {_shown(apart)}; name them in the order in which they run"
            )

    def _note(self) -> None:
        for one in self._undone:
            one.holders.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._note()


def _shown(segments: Sequence[tuple[str, ...]]) -> str:
    """The names of some segments."""
    more = f" and {len(segments) - 3} more" if len(segments) > 3 else ""
    return ", ".join("+".join(names) for names in segments[:3]) + more


def apply(model: nn.Module, segments: Sequence[Segment]) -> Handle:
    """Recompute segments of a model during backward. The model is changed in place.

    The modules of a segment are repeated together, in the order in which they were called; what one of them was called
    with is kept unless an earlier one returned it. A segment may lie inside of another one, and is then recomputed
    within the recomputation of the outer one. Applying the same segments again changes nothing. Models of transformers
    get ``config.use_cache = False`` until the handle is removed: a cache would hold keys and values of all blocks.

    Args:
        model: May be wrapped in DDP, FSDP, peft or torch.compile; names may be those of the plain model.
        segments: What is recomputed as one unit each.

    Returns:
        Handle with ``covered`` and ``remove()``.

    Raises:
        PlanError: No segment, a name that matches nothing, a container that is never called, segments that overlap
            without one holding the other, or an own set of operations that torch does not have.
        UnsupportedError: A module of TorchScript or inside of nn.DataParallel, or one that its own library
            checkpoints already.
    """
    model = unwrapped(model)
    segments = recomputable.listed(segments)
    modules, inner_first = recomputable.modules_of(model, segments)
    installed: list[Forward] = []
    forwards: list[Forward] = []
    try:
        for segment in inner_first:
            members = [modules[name] for name in segment.modules]
            others = [other for member in members for other in present(member) if other not in installed]
            same = [other for other in others if other.segment == segment]
            if len(same) == len(members):
                forwards += same
                continue
            if any(other.segment not in segments for other in others):
                raise PlanError(
                    "modules are recomputed already, in another segment",
                    got=", ".join(name for name in segment.modules if any(present(modules[name]))),
                    expected="each module in one segment, or in segments that one call of apply names together",
                    hint="call remove() on the first handle",
                )
            run = Run(segment, members)
            for position, member in enumerate(members):
                installed.append(Forward(run, position, member))
                installed[-1].install()
            forwards += installed[-len(members) :]
    except BaseException:
        for forward in reversed(installed):
            forward.uninstall()
        raise
    return Handle(segments, modules, forwards, without_cache(model, [forward.module for forward in forwards]))
