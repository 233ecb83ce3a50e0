"""Recorded allocator logs of real steps against our own trace of the same step: the ordered list of requested sizes.

Entry points: ``load``, ``requested`` and ``compare``.
"""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Difference:
    """A run of sizes that only one of the two lists has."""

    position: int
    "In the published list."
    missing: tuple[int, ...]
    "What the published list has and ours has not."
    added: tuple[int, ...]
    "What ours has and the published list has not."
    index: int = 0
    "In our list."


def load(path: Path) -> dict[str, Any]:
    """A trace file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        document: dict[str, Any] = json.load(file)
    return document


def requested(trace: dict[str, Any]) -> list[int]:
    """The requested size of every allocation, in order."""
    return [num_bytes for kind, _, num_bytes, _ in trace["events"] if kind == 0]


def changes(trace: dict[str, Any]) -> list[int]:
    """Every allocation's requested size and every free's with a minus, in order."""
    return [num_bytes if kind == 0 else -num_bytes for kind, _, num_bytes, _ in trace["events"] if kind in (0, 1)]


def compare(published: Sequence[int], ours: Sequence[int]) -> tuple[int, list[Difference]]:
    """The length of the longest list of sizes that both have in order, and where they part.

    The shortest edit script, found by how far each diagonal gets with a number of edits.
    """
    steps: list[dict[int, int]] = []
    reach = {1: 0}
    for edits in range(len(published) + len(ours) + 1):
        steps.append(dict(reach))
        for diagonal in range(-edits, edits + 1, 2):
            down = diagonal == -edits or (diagonal != edits and reach[diagonal - 1] < reach[diagonal + 1])
            x = reach[diagonal + 1] if down else reach[diagonal - 1] + 1
            while x < len(published) and x - diagonal < len(ours) and published[x] == ours[x - diagonal]:
                x += 1
            reach[diagonal] = x
            if x >= len(published) and x - diagonal >= len(ours):
                return _walk_back(published, ours, steps)
    raise AssertionError("unreachable: every list can be edited into every other")


def _walk_back(
    published: Sequence[int], ours: Sequence[int], steps: Sequence[dict[int, int]]
) -> tuple[int, list[Difference]]:
    x, y = len(published), len(ours)
    edits: list[tuple[int, int, bool]] = []
    for number in range(len(steps) - 1, 0, -1):
        reach, diagonal = steps[number], x - y
        down = diagonal == -number or (diagonal != number and reach[diagonal - 1] < reach[diagonal + 1])
        before = diagonal + 1 if down else diagonal - 1
        start = reach[before]
        x, y = start, start - before
        edits.append((x, y, down))
    matched = len(published) - sum(not down for *_, down in edits)
    differences: list[Difference] = []
    for x, y, down in reversed(edits):
        last = differences[-1] if differences else None
        if last and last.position + len(last.missing) == x and last.index + len(last.added) == y:
            differences.pop()
        else:
            last = Difference(x, (), (), y)
        missing = last.missing if down else (*last.missing, published[x])
        added = (*last.added, ours[y]) if down else last.added
        differences.append(Difference(last.position, missing, added, last.index))
    return matched, differences
