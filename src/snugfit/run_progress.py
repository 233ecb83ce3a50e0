"""How far a run is, on standard error: a bar on a terminal, else a line now and then.

Entry point: ``shown``, which is told of every micro-step and of every update. What a run writes down is ``runs``'.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from snugfit import sizes

EVERY_S = 10.0
"Between two lines where no terminal is."

Loss = Callable[[Any, Any], Any]


class Progress:
    """Counts the micro-steps and updates of a run, and hands what there is to say to whoever shows it.

    Args:
        steps: Updates of the run.
        micro_steps: Of an update.
        say: Takes how many micro-steps are done and a few words.
    """

    def __init__(self, steps: int, micro_steps: int, say: Callable[[int, str], None]) -> None:
        self.steps, self.micro_steps, self._say = steps, micro_steps, say
        self._update, self._micro_step = 0, 0
        self._last = ""

    def following(self, loss: Loss) -> Loss:
        """A loss that says at each call that a micro-step begins."""

        def followed(model: Any, micro_batch: Any) -> Any:
            self._micro_step = min(self._micro_step + 1, self.micro_steps)  # one that is run again counts once
            self._show(self._micro_step - 1)
            return loss(model, micro_batch)

        return followed

    def updated(self, line: Mapping[str, Any]) -> None:
        """An update is over; its line is the one of the run's metrics."""
        self._update, self._micro_step = self._update + 1, 0
        loss = "not finite" if line["loss"] is None else f"{line['loss']:.4f}"
        skipped = f", skipped ({line['reason']})" if line["skipped"] else ""
        peak = "" if line["peak_memory_bytes"] is None else f", peak {sizes.text(line['peak_memory_bytes'])}"
        self._last = f", loss {loss}, lr {line['lr'][0]:.3g}, {line['samples_per_s']:.3g} samples/s{peak}{skipped}"
        self._show(0)

    def _show(self, micro_steps: int) -> None:
        now = f"update {min(self._update + 1, self.steps)} of {self.steps}"
        if self._micro_step:
            now += f", micro-batch {self._micro_step} of {self.micro_steps}"
        elif self._update:
            now = f"update {self._update} of {self.steps}"
        self._say(self._update * self.micro_steps + micro_steps, f"{now}{self._last}")


@contextmanager
def shown(steps: int, micro_steps: int) -> Iterator[Progress]:
    """Show the progress of a run while it runs.

    Drawn by this thread: a thread of its own would need a stack inside of a memory cap.

    Args:
        steps: Updates of the run.
        micro_steps: Of an update.
    """
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        yield Progress(steps, micro_steps, lines_now_and_then(steps * micro_steps, time.monotonic))
        return
    with Bar(
        BarColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn(), console=console, auto_refresh=False
    ) as bar:
        task = bar.add_task("", total=steps * micro_steps, text="")
        yield Progress(steps, micro_steps, lambda done, text: bar.update(task, completed=done, text=text, refresh=True))


def lines_now_and_then(total: int, clock: Callable[[], float]) -> Callable[[int, str], None]:
    """What says progress in lines: one when a run begins, and in a long one another every ten seconds.

    Args:
        total: Micro-steps of the run.
        clock: Seconds.
    """
    start = clock()
    said: float | None = None

    def say(done: int, text: str) -> None:
        nonlocal said
        now = clock()
        if said is not None and now - said < EVERY_S:
            return
        said = now
        left = f", about {_duration((now - start) / done * (total - done))} left" if done else ""
        print(f"{text} (after {_duration(now - start)}{left})", file=sys.stderr)

    return say


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
