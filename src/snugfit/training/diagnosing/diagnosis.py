"""What is found out about one window that went wrong.

Entry points: ``Diagnosis`` and ``of_window``. The window is run again a few times: once under ``probes``, then with
what might help it. Finding such a window in a job is ``diagnose``'s.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from snugfit.errors import UnsupportedError
from snugfit.training import distributed
from snugfit.training.diagnosing import ranges, remedies, rerun, updating
from snugfit.training.diagnosing.origins import Origin
from snugfit.training.diagnosing.probes import Watch
from snugfit.training.diagnosing.ranges import HeadRoom, Underflow
from snugfit.training.diagnosing.remedies import Tried
from snugfit.training.diagnosing.rerun import Suspect

FINITE = "none"
FILE = "nonfinite.pt"
"Where a run keeps the window that ended it."
_MAX_ROWS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Where the first value that is not finite came from, and what helps.

    A window in which everything is finite has the cause ``"none"``, no module and no operation.
    """

    module: str = ""
    'Fully qualified name of the module; ``""`` for the loss function, the data, or nothing.'
    op: str = ""
    "The operation, as ``exp`` or ``ExpBackward0``."
    phase: str = ""
    '``"forward" "backward" "loss scale" "update"``, or ``""`` where all is finite.'
    micro_batch: int | None = None
    "Its place in the window."
    rank: int = 0
    cause: str = FINITE
    remedy: str = "nothing to do"
    "The cheapest that was found to work, else what to look at; with code."
    step: int = 0
    "Updates done before the window."
    num_micro_batches: int | None = None
    "Of the window."
    num_windows: int = 1
    "How many were looked at."
    precision: str = "32-true"
    loss_scale: float | None = None
    "Of the window; None without fp16."
    finite_loss_scale: float | None = None
    "The largest power of two at which the window is finite, where the scale alone was too high."
    tried: tuple[Tried, ...] = ()
    "What the window was run again with, in order."
    head_room: tuple[HeadRoom, ...] = ()
    "Of every exponential and softmax up to the failing micro-batch's end, nearest to its limit first."
    underflow: tuple[Underflow, ...] = ()
    "By module, worst first, of the window's gradients in full precision."
    underflow_fraction: float | None = None
    """Share of all gradient values other than 0 that fp16 loses at the loss scale (without fp16: that bf16 loses);
    None where there is no finite gradient."""
    parameters: tuple[str, ...] = ()
    "Names of those whose gradient was not finite."

    @property
    def is_finite(self) -> bool:
        """Whether nothing was found."""
        return self.cause == FINITE

    def to_dict(self) -> dict[str, Any]:
        """All fields as built-in values; what is not finite is written as None, which JSON has."""
        return {name: plain(value) for name, value in asdict(self).items()}

    def __str__(self) -> str:
        lines = [] if self.is_finite else [f"first value that is not finite: {self._place()}"]
        lines += [f"  cause:     {self.cause}", f"  remedy:    {self.remedy}"]
        if self.num_micro_batches is not None:
            parts = "1 micro-batch" if self.num_micro_batches == 1 else f"{self.num_micro_batches} micro-batches"
            lines.append(f"  window:    {parts} in {self.precision}, after {self.step} updates")
        if self.is_finite:
            looked = "1 window" if self.num_windows == 1 else f"{self.num_windows} windows"
            lines.append(
                f"  looked at: {looked}; if a later one fails, raise steps= (--steps), or give the {FILE} that train "
                "left in its run folder as window= (--window)"
            )
        lines += [f"  tried:     {one.remedy}: {one.outcome}" for one in self.tried]
        for room in self.head_room[:_MAX_ROWS]:
            masked = f", {room.num_masked_rows} rows masked whole" if room.num_masked_rows else ""
            lines.append(
                f"  head-room: {room.op} in {room.module or 'the loss function'}: largest input {room.largest:.4g} of "
                f"{room.limit:.4g} ({room.dtype}){masked}"
            )
        if self.underflow_fraction is not None:
            kind = "bf16" if self.loss_scale is None else f"fp16 at loss scale {self.loss_scale:g}"
            lines.append(f"  underflow: {self.underflow_fraction:.2%} of the gradient is too small for {kind}")
        return "\n".join(lines)

    def _place(self) -> str:
        where = f", module {self.module!r}" if self.module else ""
        which = "" if self.micro_batch is None else f", micro-batch {self.micro_batch}"
        return f"{self.op or 'not known'} in {self.phase}{where}{which}, rank {self.rank}"


def of_window(suspect: Suspect) -> Diagnosis:
    """Run a window again under watch and find out what made it not finite.

    Model, optimizer state, buffers and random states are bit-equal afterwards; gradients are released. Waits for the
    device at every operation. Ranks do not wait for each other, so a loss function may not make them either.

    Raises:
        UnsupportedError: SyncBatchNorm on several ranks, whose forward waits for all of them.
    """
    _refuse_waiting(suspect)
    with rerun.kept(suspect) as beginning:
        probed = remedies.probed(suspect, beginning, suspect.loss_scale, suspect.precision)
        facts: dict[str, Any] = {
            "rank": suspect.rank,
            "step": suspect.step,
            "num_micro_batches": len(suspect.micro_batches),
            "precision": suspect.precision,
            "loss_scale": suspect.loss_scale,
            "head_room": probed.watch.head_room,
            "parameters": probed.watch.bad_parameters,
            **_underflow(suspect, beginning),
        }
        if probed.is_finite:
            return Diagnosis(**facts)
        origin = probed.watch.found or probed.watch.suspected or _of_norm(probed.watch)
        found = remedies.find(suspect, beginning, origin)
    first = found.origin
    return Diagnosis(
        module=first.module,
        op=first.op,
        phase=found.phase,
        micro_batch=first.micro_batch,
        cause=found.cause,
        remedy=found.remedy,
        tried=found.tried,
        finite_loss_scale=found.finite_loss_scale,
        **facts,
    )


def of_update(suspect: Suspect, names: Sequence[str]) -> Diagnosis:
    """What is known of a finite window whose update made weights not finite.

    Args:
        suspect: The window.
        names: Of the parameters that are not finite now.
    """
    optimizers = suspect.settings["optimizers"]
    return Diagnosis(
        module=names[0].rpartition(".")[0],
        op="optimizer step",
        phase="update",
        cause=(
            f"the update made weights not finite out of finite weights and gradients: {', '.join(names)}; by "
            f"{updating.settings(optimizers)}"
        ),
        remedy=updating.remedy(optimizers),
        rank=suspect.rank,
        step=suspect.step,
        num_micro_batches=len(suspect.micro_batches),
        precision=suspect.precision,
        loss_scale=suspect.loss_scale,
        parameters=tuple(names),
    )


def _refuse_waiting(suspect: Suspect) -> None:
    """Refuse what would hang, for each rank runs its window as often as it needs."""
    names = [name for name, module in suspect.model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if names and distributed.world_size() > 1:
        raise UnsupportedError(
            "a window with SyncBatchNorm cannot be run again by one rank alone",
            got=f"{', '.join(names)}, {distributed.world_size()} ranks",
            expected="layers that do not wait for other ranks, or one process",
            hint="run snugfit.diagnose(job, plan) in one process",
            module=names[0],
        )


def _of_norm(watch: Watch) -> Origin:
    names = ", ".join(watch.bad_parameters)
    if names:
        cause = f"averaging the gradients over the window made them not finite: {names}"
    else:
        cause = "the norm over all gradients is not finite, though each of them is: their squares leave float32"
    return Origin("norm", "", "gradient norm", "backward", None, cause)


def _underflow(suspect: Suspect, beginning: Any) -> dict[str, Any]:
    """Gradients of the window in full precision, against the ends of the half-precision types."""
    rows: list[tuple[Underflow, ...]] = []
    scale = suspect.loss_scale or 1.0

    def look() -> None:
        rows.append(ranges.underflow(suspect.model, scale))

    name = "32-true" if suspect.precision in ("16-mixed", "bf16-mixed") else suspect.precision
    try:
        rerun.run(suspect, beginning, loss_scale=None, precision_name=name, look=look)
    except Exception:  # a model that does not run without autocast has no numbers here
        return {}
    if not rows or not rows[0]:
        return {}
    total = sum(row.num_values for row in rows[0])
    is_fp16 = suspect.loss_scale is not None
    lost = sum((row.fp16_fraction if is_fp16 else row.bf16_fraction) * row.num_values for row in rows[0])
    return {"underflow": rows[0], "underflow_fraction": lost / total}


def plain(value: Any) -> Any:
    """A value with lists for tuples and None for numbers that are not finite, as JSON has it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value
