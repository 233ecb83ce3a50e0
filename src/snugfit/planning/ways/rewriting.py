"""Changes a recorded step without running it again: storages get other sizes, live shorter, vanish or are added.

Entry point: ``Rewriting``. Why something changes is the ways'; positions are those of the recording that was given.
Left out: the work of kernels, which only moves along.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from snugfit.memory.events import Birth, Recording


class Rewriting:
    """A recording under change; ``done`` gives the new one, the old one stays as it is.

    Args:
        recording: Births, deaths, marks and work of a step.
    """

    def __init__(self, recording: Recording) -> None:
        self._old = recording
        self._births = list(recording.births)
        self._added: dict[int, list[int]] = defaultdict(list)
        self._dropped: set[int] = set()
        self._born: dict[int, int] = {}
        self._died: dict[int, int] = {}
        for position, event in enumerate(recording.events):
            (self._born if event > 0 else self._died)[abs(event) - 1] = position

    def born(self, **wanted: str) -> Iterator[tuple[int, Birth]]:
        """Indices and births whose fields have the wanted values, in the order of their birth."""
        for index in sorted(self._born, key=self._born.__getitem__):
            birth = self._old.births[index]
            if all(getattr(birth, name) == value for name, value in wanted.items()):
                yield index, birth

    def position_of(self, index: int) -> int:
        """Where a storage is born."""
        return self._born[index]

    def ends_before(self, index: int, position: int) -> bool:
        """Whether a storage has died in front of a position."""
        return self._died.get(index, position) < position

    def resize(self, index: int, num_bytes: int) -> None:
        """Give a storage another size."""
        self._births[index] = replace(self._births[index], num_bytes=num_bytes)

    def remove(self, index: int) -> None:
        """Let a storage never have been."""
        self._dropped.update(where[index] for where in (self._born, self._died) if index in where)

    def end_at(self, index: int, position: int) -> None:
        """Let a storage die in front of the event at a position, unless it does so earlier."""
        if self._died.get(index, position + 1) > position:
            if index in self._died:
                self._dropped.add(self._died[index])
            self._added[position].append(-index - 1)

    def add(self, birth: Birth, start: int, end: int | None = None) -> None:
        """Add a storage in front of the event at ``start``, which dies in front of the one at ``end``, or stays."""
        self._births.append(birth)
        self._added[start].append(len(self._births))
        if end is not None:
            self._added[end].append(-len(self._births))

    def done(self) -> Recording:
        """The recording with all changes."""
        old, stream, moved = self._old, list[int](), list[int]()
        for position in range(len(old.events) + 1):
            moved.append(len(stream))  # a mark stays in front of what is added behind it
            stream += self._added.get(position, ())
            if position < len(old.events) and position not in self._dropped:
                stream.append(old.events[position])
        return Recording(
            self._births,
            stream,
            [(moved[position], name) for position, name in old.marks],
            [(moved[position], item) for position, item in old.work],
            [border._replace(position=moved[border.position]) for border in old.borders],
        )
