"""Learning rates for another batch size, and warm-up counted in updates.

Entry points: ``scale`` and ``warmup``. Stepping a scheduler once per real update is the engine's; which rule suits a
model is not known here.
"""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, ReduceLROnPlateau, SequentialLR

from snugfit.errors import PlanError

RULES = ("linear", "sqrt")


def scale(lr: float, factor: float, rule: str = "linear") -> float:
    """The learning rate for a batch that is ``factor`` times the one that ``lr`` was found for.

    ``lr * factor``, usual with SGD and moderate factors, or ``lr * sqrt(factor)``, usual with Adam and large ones.
    Accumulation needs neither: the batch of a window is the batch size, whatever it is cut into.

    Args:
        lr: Rate at the reference batch size.
        factor: Batch size / reference batch size.
        rule: ``"linear"`` or ``"sqrt"``.

    Raises:
        PlanError: An unknown rule, a factor that is not above 0, or a rate below 0.

    Example:
        >>> scale(0.1, 32 / 8)
        0.4
        >>> scale(0.1, 32 / 8, rule="sqrt")
        0.2
    """
    if not isinstance(rule, str) or rule not in RULES:
        raise PlanError(
            "unknown rule of scaling a learning rate",
            got=f"rule={rule!r}",
            expected=" | ".join(map(repr, RULES)),
            hint='use "linear", or "sqrt" for Adam and large factors',
        )
    if not _is_number(factor) or factor <= 0:
        raise PlanError(
            "the factor of a learning rate is a ratio of batch sizes",
            got=f"factor={factor!r}",
            expected="a finite number above 0",
            hint="pass batch_size / reference_batch_size",
        )
    if not _is_number(lr) or lr < 0:
        raise PlanError(
            "this is not a learning rate",
            got=f"lr={lr!r}",
            expected="one finite number of at least 0",
            hint="scale the rate of each parameter group by itself",
        )
    return lr * (factor if rule == "linear" else math.sqrt(factor))


def warmup(optimizer: Optimizer, steps: int, after: LRScheduler | None = None) -> LRScheduler:
    """A scheduler whose k-th update uses k / steps of the full rate, until the steps-th uses all of it.

    It counts updates: hand it to ``Engine`` or ``Job`` as the scheduler, which steps it once per window that made an
    update, however many micro-batches that had; a skipped window does not move it.

    Args:
        optimizer: Whose rates are the full ones.
        steps: Number of updates until the full rate.
        after: Scheduler over the same optimizer; its first rate is that of the update after the warm-up. None: the
            full rate stays.

    Raises:
        PlanError: Less than one step, or ``after`` is not a scheduler that can follow.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([weight], lr=0.8)
        >>> schedule = warmup(optimizer, steps=4)
        >>> optimizer.param_groups[0]["lr"]
        0.2
    """
    if not isinstance(optimizer, Optimizer):
        raise PlanError(
            "a warm-up needs the optimizer whose rates rise",
            got=type(optimizer).__name__,
            expected="a torch.optim.Optimizer",
            hint="pass the optimizer first: warmup(optimizer, steps)",
        )
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise PlanError(
            "a warm-up takes a whole number of updates",
            got=f"steps={steps!r}",
            expected=">= 1",
            hint="count optimizer updates, not micro-batches, or leave the warm-up out",
        )
    if after is not None and (
        not isinstance(after, LRScheduler) or isinstance(after, ReduceLROnPlateau) or after.optimizer is not optimizer
    ):
        same = getattr(after, "optimizer", None) is optimizer
        raise PlanError(
            "this scheduler cannot follow a warm-up",
            got=f"after={type(after).__name__}{'' if same else ', not over this optimizer'}",
            expected="a scheduler over the same optimizer whose step() takes no argument",
            hint="pass after=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=...)",
        )
    rising = LinearLR(optimizer, start_factor=1 / steps, total_iters=steps - 1)
    return rising if after is None else SequentialLR(optimizer, [rising, after], milestones=[steps])


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
