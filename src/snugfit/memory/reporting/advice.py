"""What a recorded step holds although nothing needs it, in sentences with numbers of this recording.

Entry points: ``sentences`` and ``compares_classes``. A sentence says what was seen and what would free it; a saving
that was not replayed is given as the most it can be. Changes of the plan (precision, micro-batch, recomputation) are
``what_if``'s.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from snugfit import sizes
from snugfit.memory.allocator import Simulation
from snugfit.memory.events import Recording
from snugfit.memory.reporting import attribution

_LEAST_SHARE = 0.01
"Share of the peak below which nothing is worth a sentence."
_LARGE_SHARE = 0.2
_LEAST_SCORES_BYTES = 256 * sizes.MIB
"Share of the peak, and bytes, below which the class scores of a loss are not worth a change of the loss."
OF_CROSS_ENTROPY = (
    "_log_softmax.default",
    "_log_softmax_backward_data.default",
    "nll_loss_backward.default",
    "nll_loss2d_backward.default",
)
"Operations whose results are class scores: log-probabilities and gradients."
_KEPT_ON_PURPOSE = ("parameter", "buffer", "gradient", "optimizer", "workspace", "input")


def sentences(
    recording: Recording,
    replayed: Simulation,
    alive_at_peak: Iterable[int],
    replay: Callable[[Recording], Simulation],
) -> tuple[str, ...]:
    """What could be freed in this step without changing how it is planned.

    Args:
        recording: At least one window.
        replayed: The recording's replay.
        alive_at_peak: Births that are alive at its peak.
        replay: Replays a changed recording.
    """
    ends = _ends(recording)
    if not ends:
        return ()
    least = max(1, int(replayed.peak_allocated_bytes * _LEAST_SHARE))
    reading = _Reading(recording, replayed, frozenset(alive_at_peak), least)
    found = (
        reading.left_by_the_step_before(ends, replay),
        reading.held_after_backward(replay),
        reading.old_gradients(),
        reading.class_scores(),
        reading.in_the_optimizer(),
    )
    return tuple(sentence for sentence in found if sentence)


def compares_classes(recording: Recording) -> bool:
    """Whether a loss picks a label's score among those of all classes; losses of distributions or sequences do not."""
    return any(birth.op.startswith("nll_loss") for birth in recording.births)


class _Reading:
    """One recording, and what it takes to write sentences about it."""

    def __init__(self, recording: Recording, replayed: Simulation, alive_at_peak: frozenset[int], least: int) -> None:
        self._recording = recording
        self._births = recording.births
        self._blocks = replayed.block_bytes
        self._timeline = attribution.Timeline(recording, replayed.block_bytes)
        self._replayed = replayed
        self._at_peak = alive_at_peak
        self._least = least
        self._peak = self._timeline.at(replayed.peak_index)

    def left_by_the_step_before(self, ends: list[int], replay: Callable[[Recording], Simulation]) -> str:
        """Storages that a step leaves behind for the next one, or for ever."""
        alive = self._timeline.alive(ends)
        left = [
            {i for i in alive[end] if self._births[i].window == number and self._is_free_to_go(i)}
            for number, end in enumerate(ends, start=1)
        ]
        if len(ends) > 1:
            for_ever = left[-2] & alive[ends[-1]]
            again = self._bytes(left[-1])
            if self._bytes(for_ever) >= self._least and again >= self._least:
                return (
                    f"every step leaves {sizes.text(again)} more behind ({self._largest(left[-1])}): memory grows "
                    "until it runs out; keep numbers (loss.item()) or detached copies on the host, not tensors"
                )
            left[-2] -= for_ever  # made once, such as tables that a module caches
        carried = {i for group in left[:-1] for i in group}
        if self._bytes(carried & self._at_peak) < self._least:
            return ""
        dead = {i: ends[self._births[i].window - 1] for i in carried}
        freed = self._replayed.peak_allocated_bytes - replay(_let_go(self._recording, dead)).peak_allocated_bytes
        if freed < self._least:
            return ""
        held = carried & self._at_peak
        return (
            f"results of the step before are alive at the peak ({self._largest(held)}): without them the peak is "
            f"{sizes.text(freed)} lower; keep no reference to outputs (and losses) from one step to the next"
        )

    def held_after_backward(self, replay: Callable[[Recording], Simulation]) -> str:
        """What the forward made and something else than autograd holds while backward runs."""
        recording = self._recording
        advice = "keep only the loss, del outputs before backward (in transformers: use_cache=False, too)"
        passed = {i: position for i, position in _passed_by_backward(recording).items() if self._is_free_to_go(i)}
        held = self._at_peak & {i for i, position in passed.items() if position <= self._replayed.peak_index}
        if self._bytes(held) >= self._least:
            freed = self._replayed.peak_allocated_bytes - replay(_let_go(recording, passed)).peak_allocated_bytes
            if freed >= self._least:
                return (
                    "results of the forward are still held at the peak, after their part of backward "
                    f"({self._largest(held)}): without them the peak is {sizes.text(freed)} lower; {advice}"
                )
        outputs = {i for i in self._at_peak & self._outputs() if self._is_free_to_go(i)}
        if self._peak.phase != "backward" or self._bytes(outputs) < self._least:
            return ""
        return (
            f"the model's outputs are held all through backward ({self._largest(outputs)}): the peak is up to "
            f"{sizes.text(self._bytes(outputs))} lower without them, if the loss does not need them; {advice}"
        )

    def _outputs(self) -> set[int]:
        """What the last module made that ran before the loss and backward left, in the window of the peak."""
        births, window = self._births, self._peak.window
        made = [i for i, birth in enumerate(births) if birth.phase == "forward" and birth.window == window]
        losses = {births[i].module for i in made if "loss" in births[i].op}
        named = [i for i in made if births[i].module and births[i].module not in losses]
        ran = [
            position
            for position, event in enumerate(self._recording.events)
            if event > 0 and births[event - 1].phase == "backward" and births[event - 1].window == window
        ]
        if not named or not ran:
            return set()
        left = self._timeline.alive([ran[-1]])[ran[-1]]
        return {i for i in named if births[i].module == births[named[-1]].module and i in left}

    def old_gradients(self) -> str:
        """Gradients of the step before that are there while this one runs forward and backward."""
        if self._peak.phase == "optimizer":
            return ""
        old = {
            i
            for i in self._at_peak
            if self._births[i].category == "gradient" and self._births[i].window < self._peak.window
        }
        num_bytes = self._bytes(old)
        if num_bytes < self._least:
            return ""
        return (
            f"up to {sizes.text(num_bytes)}: gradients of the step before are alive at the peak; call "
            "optimizer.zero_grad(set_to_none=True) before the forward"
        )

    def class_scores(self) -> str:
        """What a cross entropy over many classes holds: log-probabilities and gradients."""
        if not compares_classes(self._recording):
            return ""
        held = {i for i in self._at_peak if self._births[i].op in OF_CROSS_ENTROPY}
        num_bytes = self._bytes(held)
        if num_bytes < _LARGE_SHARE * self._replayed.peak_allocated_bytes or num_bytes < _LEAST_SCORES_BYTES:
            return ""
        return (
            f"{sizes.text(num_bytes)} of the peak are class scores within the loss "
            f"({self._largest(held)}): snugfit.chunked_cross_entropy holds those of one chunk at a time; the loss "
            "must be handed hidden states for it, not logits (docs/checkpointing.md, The loss in chunks)"
        )

    def in_the_optimizer(self) -> str:
        """What does not lower a peak that lies in the optimizer's step."""
        if self._peak.phase != "optimizer":
            return ""
        return (
            "the peak lies in the optimizer's step, after backward: recomputing more and smaller micro-batches do not "
            "lower it; smaller parameters, gradients, optimizer states and temporaries (on a card: foreach=False) do"
        )

    def _is_free_to_go(self, index: int) -> bool:
        return self._births[index].category not in _KEPT_ON_PURPOSE

    def _bytes(self, indices: Iterable[int]) -> int:
        return sum(self._blocks[index] for index in indices)

    def _largest(self, indices: Iterable[int]) -> str:
        first = attribution.holders(self._births, self._blocks, indices)[0]
        return f"mostly {first.op} of {first.module or 'the step itself'}, {sizes.text(first.num_bytes)}"


def _ends(recording: Recording) -> list[int]:
    """Where each window ends."""
    return [position for position, name in recording.marks if name == "step end"]


def _passed_by_backward(recording: Recording) -> dict[int, int]:
    """For births of a forward the event from which on autograd surely does not need them.

    Backward runs its nodes in the reverse of the order in which they were made. When it makes something in a module,
    all that the forward made after the last of that module's own results has been passed: whatever saved it has been
    run. A second backward that comes back to modules that ran later (of another loss) takes that back.
    """
    births = recording.births
    last_of_module: dict[str, int] = {}
    pending: list[int] = []
    found: dict[int, int] = {}
    lowest = len(births)
    for position, event in enumerate(recording.events):
        if event < 0:
            continue
        birth = births[event - 1]
        if birth.phase == "forward":
            last_of_module[birth.module] = event - 1
            pending.append(event - 1)
        elif birth.phase == "backward" and birth.module in last_of_module:
            last = last_of_module[birth.module]
            if lowest <= last:
                found = {index: passed for index, passed in found.items() if index > last}
                lowest = min(found, default=len(births))
            while pending and pending[-1] > last:
                lowest = min(lowest, pending[-1])
                found[pending.pop()] = position
        elif birth.phase == "optimizer":
            pending.clear()
    return found


def _let_go(recording: Recording, deaths: Mapping[int, int]) -> Recording:
    """The recording in which some births die before the event at a given position, if they live as long."""
    dying: dict[int, list[int]] = {}
    for index, position in deaths.items():
        dying.setdefault(position, []).append(index + 1)
    gone: set[int] = set()
    events: list[int] = []
    for position, event in enumerate(recording.events):
        if position in dying:
            fresh = [number for number in dying[position] if number not in gone]
            gone.update(fresh)
            events += [-number for number in fresh]
        if event > 0 or -event not in gone:
            events.append(event)
            if event < 0:
                gone.add(-event)
    return replace(recording, events=events, marks=[], work=[])
