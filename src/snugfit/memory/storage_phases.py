"""What a storage turns out to be when a phase of the step ends: saved, temporary, or part of the update.

Entry points: ``forward_ended`` and ``update_began``, called by the recorder with what was born so far.
"""

from collections.abc import Set as AbstractSet

from snugfit.memory.events import Birth


def forward_ended(births: list[Birth], window: int, alive: AbstractSet[int]) -> None:
    """The forward of a micro-batch is over: what it left is saved, what it freed was temporary."""
    for index in range(len(births) - 1, -1, -1):
        birth = births[index]
        if birth.window != window:
            break
        if birth.category == "other" and birth.phase == "forward":
            birth.category = "saved" if index in alive else "temporary"


def update_began(births: list[Birth], window: int) -> None:
    """What was made for an update since the last backward (the norm to clip by) is part of it."""
    for index in range(len(births) - 1, -1, -1):
        birth = births[index]
        if birth.phase == "backward" or birth.window != window:
            break
    else:
        return
    if birth.window == window:
        for birth in births[index + 1 :]:
            if birth.phase == "forward" and not birth.module:
                birth.phase, birth.category = "optimizer", "temporary"
