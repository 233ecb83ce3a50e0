"""What an engine saves between two windows and goes on from.

Entry points: ``collect`` and ``load``. Tensors and built-in values only, so that ``torch.load`` needs no more than
``weights_only``. Writing files is left out.
"""

from collections.abc import Mapping
from typing import Any

from snugfit.errors import PlanError
from snugfit.training import checkpointing, recovery

_COUNTERS = ("step_count", "micro_step_count", "sample_count", "micro_batch_size")


def collect(engine: Any, model: bool) -> dict[str, Any]:
    """Everything that the next windows of an engine depend on; with or without the weights."""
    state = {
        "optimizers": [optimizer.state_dict() for optimizer in engine.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in engine.schedulers],
        "scaler": None if engine.scaler is None else engine.scaler.state_dict(),
        "counters": {name: getattr(engine, name) for name in _COUNTERS},
        "skipped_in_a_row": engine.skipped_in_a_row,
        "reference": engine.reference,
        "random": recovery.random_states(engine.device),
    }
    return {"model": checkpointing.unwrapped(engine.model).state_dict(), **state} if model else state


def load(engine: Any, state: Mapping[str, Any]) -> None:
    """Set what ``collect`` read, random states included.

    Raises:
        PlanError: The state is of another number of optimizers or schedulers; nothing is changed then.
    """
    for name in ("optimizers", "schedulers"):
        saved, ours = len(state[name]), len(getattr(engine, name))
        if saved != ours:
            raise PlanError(
                f"a saved state has another number of {name}",
                got=f"{saved} saved, {ours} here",
                expected="the same",
                hint="build the engine as it was built when the state was saved",
            )
    if "model" in state:
        checkpointing.unwrapped(engine.model).load_state_dict(state["model"])
    for name in ("optimizers", "schedulers"):
        for one, saved_state in zip(getattr(engine, name), state[name], strict=True):
            one.load_state_dict(saved_state)
    if engine.scaler is not None and state["scaler"] is not None:
        engine.scaler.load_state_dict(state["scaler"])
    for name in _COUNTERS:
        setattr(engine, name, state["counters"][name])
    engine.skipped_in_a_row, engine.reference = state["skipped_in_a_row"], state["reference"]
    recovery.set_random_states(state["random"], engine.device)
