"""An error on one rank of several: all ranks learn of it at the window's end, and none waits for one that has left.

Entry point: ``RankErrors``, of one window. Errors of a single process, or of all ranks at the same place, need nothing
of this; what they say is ``failures``'s.

NOTE [What a rank with an error still does]
1. A loss function that raises, or returns no loss, or a backward that breaks off on one rank leaves the others waiting
   in the reduction of gradients. So the error is kept, the micro-batch brings no gradient or a part of one, and the
   rank takes part in all that the others wait for: DDP is given a 0 for each parameter that was not reached.
2. At the window's end a number that ranks send each other anyway says how many have kept an error. All ranks raise
   then, before any update: those with an error theirs, the others one that says so.
3. What a rank cannot make up for is raised at once, and the others wait for their time limit: an error in a loop by
   hand, one in the forward of a model with buffers, which DDP sends, one in a backward in which DDP looks for unused
   parameters; and one of every micro-batch of a window in which the others count several things.
4. A backward that breaks off behind the last parameter leaves DDP in a reduction that nothing ends: that window is
   raised by all, and the next one on this rank at once.
"""

import traceback

from snugfit.errors import PlanError


class RankErrors:
    """The errors of one window on this rank, and the refusals and errors of all.

    Args:
        ranks: Their number.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._kept: Exception | None = None
        self.is_refused = False
        "Whether this rank refuses the update."

    def keep(self, error: Exception, better: Exception | None) -> None:
        """Keep an error, the first of the window, until all ranks are told; without the tensors of its frames.

        Args:
            error: Of the loss function, or of a backward.
            better: What says it better, or None.
        """
        traceback.clear_frames(error.__traceback__)
        if better is not None:
            better.__cause__ = error
        self._kept = self._kept or better or error

    @property
    def flag(self) -> float:
        """What this rank tells the others: 1 for a refusal, and more than all refusals together for an error."""
        return float(self.is_refused) + (0.0 if self._kept is None else self._ranks + 1.0)

    def settled(self, flags: float) -> bool:
        """Whether any rank refuses the update, from the sum of their flags.

        Raises:
            Exception: The error that was kept here.
            PlanError: Other ranks have kept one.
        """
        if self._kept is not None:
            kept, self._kept = self._kept, None
            try:
                raise kept
            finally:
                del kept  # a frame that holds its own error keeps all that is in the error's frames
        number, refusals = divmod(int(flags), self._ranks + 1)
        if number:
            raise PlanError(
                "a window failed on another rank, so no rank updates from it",
                got=f"an error in a forward or backward on {number} of {self._ranks} ranks, not on this one",
                expected="a loss and its gradient on every rank",
                hint="look at the error that the other rank raises",
            )
        return refusals > 0
