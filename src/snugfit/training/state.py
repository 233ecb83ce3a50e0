"""What lives from one window to the next, and how it is saved and loaded.

Entry points: ``Progress``, ``collect`` and ``load``. A state holds tensors and built-in values only, so that
``torch.load`` needs no more than ``weights_only``. Writing files is left out.

NOTE [A state is a copy]
1. What torch's ``state_dict`` returns are the tensors that the next update writes to, and ``load_state_dict`` of an
   optimizer keeps the tensors that it gets. So both are copied: a state that stays in memory can be loaded, again and
   again. That costs the memory of weights, optimizer state and masters once more, on the host, wherever they are.
2. Loading checks the form of everything before it changes anything. What looks right may still be refused where it is
   loaded: all but the weights is set back then, which costs nothing (an optimizer gets new tensors for its state). The
   model comes last and sets itself back (hooks of its own may rename entries).
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from snugfit.errors import PlanError, SnugfitError
from snugfit.training import random_states, recovery, schedules, updates
from snugfit.training.precision import Scaler
from snugfit.training.weighting import Number


@dataclass(slots=True)
class Progress:
    """Counters of a run; a skipped window moves none but ``skipped_in_a_row``."""

    steps: int = 0
    micro_steps: int = 0
    samples: int = 0
    skipped_in_a_row: int = 0
    reference: tuple[Number | None, ...] | None = None
    "R of the losses that report their own counts, from the windows before; None: there was none yet."
    micro_batch_size: int | None = None
    micro_batch_limit: int | None = None
    "Samples of a micro-batch given to ``step_window`` that more did not fit; None: never found out."


@dataclass(frozen=True, slots=True)
class Parts:
    """The objects whose states belong to a run."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    schedulers: Sequence[Any]
    scaler: Scaler | None
    device: torch.device


def collect(parts: Parts, progress: Progress, with_model: bool) -> dict[str, Any]:
    """Everything that the next windows depend on, copied; see the NOTE.

    Raises:
        PlanError: A scheduler without ``state_dict``.
    """
    state = {
        "schedulers": schedules.states(parts.schedulers),
        "optimizers": [optimizer.state_dict() for optimizer in parts.optimizers],
        "weights": [updates.of(optimizer).state_dict() for optimizer in parts.optimizers],
        "scaler": None if parts.scaler is None else parts.scaler.state_dict(),
        "progress": asdict(progress),
        "random": random_states.saved(parts.device),
    }
    copied: dict[str, Any] = _copied({"model": parts.model.state_dict(), **state} if with_model else state, {})
    return copied


def load(parts: Parts, progress: Progress, state: Mapping[str, Any]) -> None:
    """Set what ``collect`` read, random states included.

    Raises:
        PlanError: Not a state, or one of another model, optimizer, scheduler or of other master weights; nothing is
            changed then.
    """
    _check(parts, state)
    trained = [updates.of(optimizer) for optimizer in parts.optimizers]
    weights = state.get("weights", [{}] * len(trained))
    for update, saved in zip(trained, weights, strict=True):
        update.check_state(saved)
    named = state.get("model", {})
    full = {id(parameter): named[name] for name, parameter in parts.model.named_parameters() if name in named}
    with _all_or_nothing(parts, progress):
        for optimizer, one in zip(parts.optimizers, state["optimizers"], strict=True):
            _load_optimizer(optimizer, one)
        for scheduler, one in zip(parts.schedulers, state["schedulers"], strict=True):
            schedules.load(scheduler, _copied(one, {}))
        if parts.scaler is not None and state["scaler"] is not None:
            parts.scaler.load_state_dict(state["scaler"])
        for field in fields(progress):
            setattr(progress, field.name, state["progress"].get(field.name, field.default))
        random_states.restore(state["random"], parts.device)
        if "model" in state:
            _load_model(parts.model, state["model"])
    for update, saved in zip(trained, weights, strict=True):
        update.load_state_dict(saved, full)
    torch.clear_autocast_cache()  # casts of the old weights, where the caller's own autocast is open


@contextmanager
def _all_or_nothing(parts: Parts, progress: Progress) -> Iterator[None]:
    """The context of loading: where it fails, all but the weights is as it was; see the NOTE, 2.

    Raises:
        PlanError: It failed.
    """
    optimizers = [(optimizer, optimizer.state, optimizer.param_groups) for optimizer in parts.optimizers]
    schedulers = _copied(schedules.states(parts.schedulers), {})
    scaler = None if parts.scaler is None else parts.scaler.state_dict()
    numbers, random = copy.copy(progress), random_states.take(parts.device)
    try:
        yield
    except Exception as error:
        for optimizer, kept, groups in optimizers:
            optimizer.state, optimizer.param_groups = kept, groups
        for scheduler, before in zip(parts.schedulers, schedulers, strict=True):
            scheduler.load_state_dict(before)
        if parts.scaler is not None and scaler is not None:
            parts.scaler.load_state_dict(scaler)
        for field in fields(progress):
            setattr(progress, field.name, getattr(numbers, field.name))
        random_states.restore(random, parts.device)
        if isinstance(error, SnugfitError) or recovery.is_out_of_memory(error):
            raise
        raise _no_state(f"what cannot be loaded: {type(error).__name__}: {error}") from error


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Load groups and state.

    Raises:
        PlanError: They are those of another optimizer, whose options this one does not find in them.
    """
    optimizer.load_state_dict(_copied(saved, {}))
    missing = [name for group in optimizer.param_groups for name in optimizer.defaults if name not in group]
    if missing:
        own = ", ".join(name for name in saved["param_groups"][0] if name != "params")
        raise _of_another(
            "optimizer", f"groups with {own}", f"{type(optimizer).__name__}, which needs {missing[0]} in each"
        )


def _check(parts: Parts, state: Any) -> None:
    """Refuse what ``collect`` did not return, or returned of something else."""
    kinds = {"optimizers": list, "schedulers": list, "progress": Mapping, "random": Mapping}
    if not isinstance(state, Mapping) or "scaler" not in state or not all(name in state for name in kinds):
        keys = ", ".join(map(repr, list(state)[:4])) if isinstance(state, Mapping) else ""
        raise _no_state(f"{type(state).__name__} with {f'keys {keys}' if keys else 'no keys'}")
    for name, kind in kinds.items():
        if not isinstance(state[name], kind):
            raise _no_state(f"{name!r} is {type(state[name]).__name__}")
    for name, needed in (
        ("progress", [field.name for field in fields(Progress) if field.name != "micro_batch_limit"]),
        ("random", ["torch", "python", "numpy"]),
    ):
        missing = [key for key in needed if key not in state[name]]
        if missing:
            raise _no_state(f"{name!r} without {', '.join(missing)}")
    for name in ("steps", "micro_steps", "samples", "skipped_in_a_row"):
        if not isinstance(state["progress"][name], int):
            raise _no_state(f"'progress' with {name}={state['progress'][name]!r}")
    for name, ours in (("optimizers", parts.optimizers), ("schedulers", parts.schedulers)):
        if len(state[name]) != len(ours):
            raise _of_another(f"number of {name}", str(len(state[name])), str(len(ours)))
        if not all(isinstance(one, Mapping) for one in state[name]):
            raise _no_state(f"{name!r} holds {', '.join(type(one).__name__ for one in state[name])}")
    weights = state.get("weights", [{}] * len(parts.optimizers))
    if not isinstance(weights, list) or not all(isinstance(one, Mapping) for one in weights):
        raise _no_state(f"'weights' is {type(weights).__name__}, not a list of what belongs to each optimizer")
    if len(weights) != len(parts.optimizers):
        raise _of_another("number of master weights", str(len(weights)), str(len(parts.optimizers)))
    for optimizer, saved in zip(parts.optimizers, state["optimizers"], strict=True):
        if "param_groups" not in saved or "state" not in saved:
            raise _no_state(f"an optimizer with keys {', '.join(map(repr, saved))}")
        groups = saved["param_groups"]
        if not isinstance(groups, list) or not all(isinstance(g, Mapping) and "params" in g for g in groups):
            raise _no_state("an optimizer whose param_groups are no groups of parameters")
        theirs, mine = ([len(group["params"]) for group in g] for g in (saved["param_groups"], optimizer.param_groups))
        if theirs != mine:
            name = type(optimizer).__name__
            raise _of_another(f"division of {name}'s parameters into groups", _groups(theirs), _groups(mine))
    if "model" in state and not isinstance(state["model"], Mapping):
        raise _no_state(f"'model' is {type(state['model']).__name__}")


def _load_model(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Load weights and buffers, all or none."""
    own = model.state_dict()
    shapes, theirs = ({n: v.shape for n, v in s.items() if isinstance(v, Tensor)} for s in (own, saved))
    before = _copied(own, {}) if own.keys() != saved.keys() or shapes != theirs else None
    try:
        model.load_state_dict(saved)
    except RuntimeError as error:
        if before is not None:
            model.load_state_dict(before)
        differing = [n for n in {**own, **saved} if (n in own) != (n in saved) or shapes.get(n) != theirs.get(n)]
        first = f", the first is {differing[0]}" if differing else ""
        raise _of_another(
            "model", f"{len(saved)} entries, {len(differing)} of them differ{first}", f"{len(own)} entries"
        ) from error


def _groups(sizes: Sequence[int]) -> str:
    return f"{len(sizes)} groups of {', '.join(map(str, sizes))} parameters"


def _of_another(what: str, saved: str, here: str) -> PlanError:
    return PlanError(
        f"a saved state has another {what}",
        got=f"{saved} saved, {here} here",
        expected="the same",
        hint="build the engine as it was built when the state was saved",
    )


def _no_state(got: str) -> PlanError:
    return PlanError(
        "this is not the state of an engine",
        got=got,
        expected="what engine.state_dict() returned",
        hint="load a model's own state with model.load_state_dict, before the first window",
    )


def _copied(value: Any, copies: dict[tuple[Any, ...], Tensor]) -> Any:
    """A copy of all tensors and containers, on the host; single numbers stay on their device.

    Args:
        value: Nested.
        copies: What was copied already, so that tensors that share memory (tied weights) are saved once.
    """
    if isinstance(value, Tensor):
        address = value.data_ptr() if value.layout == torch.strided and value.numel() else 0
        key = (address, value.device, value.dtype, value.shape, value.stride()) if address else ()
        if not address or key not in copies:
            found = value.detach()
            moves = found.dim() > 0 and found.device.type not in ("cpu", "meta")
            found = found.cpu() if moves else found.clone()
            if not address:
                return found
            copies[key] = found
        return copies[key]
    if isinstance(value, Mapping) and hasattr(value, "__setitem__"):
        twin = copy.copy(value)  # which keeps the kind, and what torch hangs on a model's state
        for key in value:
            twin[key] = _copied(value[key], copies)
        return twin
    if isinstance(value, (list, tuple)):
        items = [_copied(one, copies) for one in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
