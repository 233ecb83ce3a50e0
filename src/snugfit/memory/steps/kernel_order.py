"""In which order a compiler runs the kernels of a graph so that the least is alive at once.

Entry point: ``least_peak_first``. The rule is the greedy one that torch's compiler tries first (Inductor's
``reorder_for_peak_memory``); left out are the two others that it compares with, which seldom win.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kernel:
    """What one kernel makes and needs."""

    makes: Hashable | None
    "The memory that its result is in; None for a view."
    reads: frozenset[Hashable]
    after: frozenset[int]
    "Places of the kernels that have to run before."


def least_peak_first(kernels: Sequence[Kernel], sizes: Mapping[Hashable, int], kept: frozenset[Hashable]) -> list[int]:
    """The order with the lower peak: the given one, or one that never makes what may come later.

    Args:
        kernels: In an order in which they can run.
        sizes: Of each memory that is freed once nobody reads it any more, in bytes.
        kept: What is not freed: results.

    Returns:
        Places of the kernels.
    """
    given = list(range(len(kernels)))
    other = _greedy(kernels, sizes, kept)
    return min((given, other), key=lambda order: _peak([kernels[place] for place in order], sizes, kept))


class _Alive:
    """What is alive while kernels run one after another."""

    def __init__(self, kernels: Sequence[Kernel], sizes: Mapping[Hashable, int], kept: frozenset[Hashable]) -> None:
        self._sizes, self._kept = sizes, kept
        self._uses = Counter(memory for kernel in kernels for memory in (*kernel.reads, kernel.makes))
        made = {kernel.makes for kernel in kernels}
        self.bytes = self.peak = sum(size for memory, size in sizes.items() if memory not in made)

    def change(self, kernel: Kernel) -> tuple[int, int]:
        """Bytes alive while a kernel runs and after it."""
        made = self._sizes.get(kernel.makes, 0)
        ending = [
            self._sizes.get(memory, 0)
            for memory in (*kernel.reads, kernel.makes)
            if self._uses[memory] == 1 and memory not in self._kept
        ]
        return self.bytes + made, self.bytes + made - sum(ending)

    def run(self, kernel: Kernel) -> None:
        """Run a kernel."""
        during, self.bytes = self.change(kernel)
        self.peak = max(self.peak, during)
        self._uses.subtract((*kernel.reads, kernel.makes))


def _peak(kernels: Sequence[Kernel], sizes: Mapping[Hashable, int], kept: frozenset[Hashable]) -> int:
    alive = _Alive(kernels, sizes, kept)
    for kernel in kernels:
        alive.run(kernel)
    return alive.peak


def _greedy(kernels: Sequence[Kernel], sizes: Mapping[Hashable, int], kept: frozenset[Hashable]) -> list[int]:
    """Of those that can run: below the peak so far the one that leaves the least, else the one that needs the least."""
    alive = _Alive(kernels, sizes, kept)
    missing = [len(kernel.after) for kernel in kernels]
    followers: list[list[int]] = [[] for _ in kernels]
    for place, kernel in enumerate(kernels):
        for before in kernel.after:
            followers[before].append(place)
    ready = [place for place, number in enumerate(missing) if not number]
    order: list[int] = []

    def cost(place: int) -> tuple[int, int, int]:
        during, left = alive.change(kernels[place])
        return during if during > alive.peak else 0, left, place

    while ready:
        chosen = min(ready, key=cost)
        ready.remove(chosen)
        order.append(chosen)
        alive.run(kernels[chosen])
        for place in followers[chosen]:
            missing[place] -= 1
            if not missing[place]:
                ready.append(place)
    return order
