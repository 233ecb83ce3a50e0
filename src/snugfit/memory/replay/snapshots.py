"""Recordings of the CUDA caching allocator, as torch's snapshots and plain event lists hold them.

Entry point: ``read``, which returns an ``AllocatorRecording``. Nothing in a file is executed, whatever it holds;
call stacks, annotations and times are not read.
"""

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from snugfit import sizes
from snugfit.errors import PlanError, UnsupportedError
from snugfit.memory.allocation import allocator_settings
from snugfit.memory.allocation.allocator_settings import AllocatorSettings
from snugfit.memory.allocation.blocks import ADDRESS_BITS
from snugfit.memory.replay import pickles

ALLOC, FREE_REQUESTED, FREE_COMPLETED = "alloc", "free_requested", "free_completed"
SEGMENT_ALLOC, SEGMENT_FREE = "segment_alloc", "segment_free"
SEGMENT_MAP, SEGMENT_UNMAP = "segment_map", "segment_unmap"
OOM = "oom"
DEFAULT_POOL = (0, 0)
_REMARKS = ("snapshot", "workspace_snapshot", OOM)
_KINDS = {ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, *_REMARKS}
_STATES = {"active_allocated": True, "active_pending_free": True, "active_awaiting_free": True, "inactive": False}

JSON_FORMAT = "cuda-allocator-trace v1"
MAX_FILE_BYTES = 512 * sizes.MIB
"Of a file, and of what a compressed one holds."
MAX_GROWTH = 200
LEAST_LIMIT_BYTES = 16 * sizes.MIB
"A compressed file may hold this many times its size, or 16 MiB; the recordings that we have, 3 to 21 times."
MAX_JSON_VALUES = 20_000_000
"Commas, colons and brackets of a JSON document; an event has about 6 in an event list."
_LONGEST_SHOWN = 200
"Characters of the file's own text in a message."

_RECORD = (
    "record with torch.cuda.memory._record_memory_history(), run the step, then torch.cuda.memory._dump_snapshot(path)"
)


class Event(NamedTuple):
    """One entry of the allocator's history; ``num_bytes`` is what was requested, or a segment's size."""

    kind: str
    address: int
    num_bytes: int
    stream: int
    pool: tuple[int, int] | None
    "Of a private pool (CUDA graphs, ``torch.cuda.MemPool``); DEFAULT_POOL is the default one, None is not recorded."


class Block(NamedTuple):
    """A block of a segment when the recording ended."""

    address: int
    num_bytes: int
    requested_bytes: int
    is_live: bool


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment, or a run of mapped pages, when the recording ended."""

    address: int
    num_bytes: int
    is_small: bool
    stream: int
    is_expandable: bool
    pool: tuple[int, int]
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class AllocatorRecording:
    """What one device's allocator did, and what it held in the end."""

    events: tuple[Event, ...]
    segments: tuple[Segment, ...]
    settings: AllocatorSettings
    device_index: int = 0
    notes: tuple[str, ...] = ()
    "Sentences: what of the file was taken for granted or left out."


def read(path: str | Path, device_index: int | None = None) -> AllocatorRecording:
    """Read a recording from a snapshot pickle or an event list in JSON, either of them with gzip or without.

    Args:
        path: The file.
        device_index: Which device; None takes the only one that did anything.

    Raises:
        PlanError: Not a recording, a damaged one, one without a history, or several devices and none chosen.
        UnsupportedError: Recorded under settings that cannot be simulated; names them.
        OSError: The file cannot be read for another reason than that it is none.
    """
    name = Path(path).name
    data = _content(Path(path), name)
    if data[:1] == b"\x80":
        return _of_snapshot(pickles.load(data, name), name, device_index)
    if data.lstrip()[:1] not in (b"{", b"["):
        looks = "a zip archive, as torch.save writes" if data[:2] == b"PK" else repr(data[:12])
        raise _unreadable(f"{name} is no recording of the allocator", f"{len(data)} bytes that begin with {looks}")
    if sum(map(data.count, (b",", b":", b"[", b"{"))) > MAX_JSON_VALUES:
        raise _too_large(f"{name} holds too much to be read", f"{MAX_JSON_VALUES} commas, colons and brackets")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError, MemoryError) as error:
        raise _unreadable(f"{name} is no whole JSON document", f"{type(error).__name__}: {error}"[:300]) from error
    if isinstance(document, dict) and "device_traces" in document:
        return _of_snapshot(document, name, device_index)
    return _of_event_list(document, name, device_index)


def _content(path: Path, name: str) -> bytes:
    if path.is_dir():
        raise _unreadable(f"{path} is a folder", "a folder", "the file of a recording")
    if not path.exists():
        raise _unreadable(f"there is no file {path}", f"path {str(path)!r}", "the file of a recording")
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    limit = MAX_FILE_BYTES
    if data[:2] == b"\x1f\x8b":
        limit = min(limit, max(LEAST_LIMIT_BYTES, MAX_GROWTH * len(data)))
        try:
            with gzip.open(path, "rb") as file:
                data = file.read(limit + 1)
        except (OSError, EOFError, zlib.error, MemoryError) as error:
            raise _unreadable(f"{name} is no whole gzip file", f"{type(error).__name__}: {error}") from error
    if len(data) > limit:
        raise _too_large(f"{name} is too large to be read", sizes.text(limit))
    if not data:
        raise _unreadable(f"{name} is empty", "0 bytes")
    return data


def _too_large(what: str, limit: str) -> PlanError:
    hint = "record fewer steps, or without stacks: _record_memory_history(context=None)"
    return PlanError(what, got=f"more than {limit}", expected=f"at most {limit}", hint=hint)


def _of_snapshot(document: Any, name: str, device_index: int | None) -> AllocatorRecording:
    """A recording from what ``torch.cuda.memory._snapshot()`` returns."""
    if isinstance(document, list):
        raise _unreadable(f"{name} holds segments without a history", "a list, as torch.cuda.memory_snapshot() returns")
    reader = _Reader(name)
    top = reader.mapping(document, "the snapshot")
    if "segments" not in top or "device_traces" not in top:
        keys = sorted(key for key in top if isinstance(key, str))
        raise _unreadable(f"{name} is no snapshot of the allocator", _cut(f"keys {keys[:8]}"))
    traces = reader.sequence(top["device_traces"], "device_traces")
    listed = [reader.mapping(item, "a segment") for item in reader.sequence(top["segments"], "segments")]
    owners = [reader.integer(item, "device", "a segment", default=0) for item in listed]
    chosen = _device(name, {i for i, trace in enumerate(traces) if trace} | set(owners), device_index)
    history = reader.sequence(traces[chosen], "device_traces") if chosen < len(traces) else ()
    if not history:
        raise _unreadable(f"{name} holds no history of device {chosen}", f"{len(listed)} segments and no event")
    settings, notes = _settings(reader, top.get("allocator_settings"))
    events = tuple(reader.event(item) for item in history)
    segments = tuple(reader.segment(item) for item, owner in zip(listed, owners, strict=True) if owner == chosen)
    return _checked(AllocatorRecording(events, segments, settings, chosen, notes), name)


def _of_event_list(document: Any, name: str, device_index: int | None) -> AllocatorRecording:
    """A recording from the JSON format of plain event lists."""
    reader = _Reader(name)
    top = reader.mapping(document, "the document")
    if top.get("format") != JSON_FORMAT:
        raise _unreadable(f"{name} has another format", f"format {top.get('format')!r}"[:100], repr(JSON_FORMAT))
    _device(name, {0}, device_index)
    kinds = {str(number): kind for number, kind in reader.mapping(top.get("event_kinds"), "event_kinds").items()}
    events = []
    for item in reader.sequence(top.get("events"), "events"):
        kind, address, num_bytes, stream = reader.integers(item, 4, "an event")
        events.append(Event(reader.kind(kinds.get(str(kind), kind)), address, num_bytes, stream, None))
    expandable = any(event.kind in (SEGMENT_MAP, SEGMENT_UNMAP) for event in events)
    segments = []
    for item in reader.sequence(top.get("final_segments"), "final_segments"):
        *numbers, inside = reader.sequence(item, "a segment") or (0, 0)
        address, num_bytes, large, stream = reader.integers(numbers, 4, "a segment")
        parts = [reader.integers(block, 4, "a block") for block in reader.sequence(inside, "the blocks of a segment")]
        blocks = tuple(Block(address + at, size, asked, bool(live)) for at, size, asked, live in parts)
        segments.append(Segment(address, num_bytes, not large, stream, expandable, DEFAULT_POOL, blocks))
    settings, notes = _settings(reader, top.get("allocator_settings"))
    return _checked(AllocatorRecording(tuple(events), tuple(segments), settings, 0, notes), name)


class _Reader:
    """Takes values out of a document that may hold anything; whatever has the wrong type is named."""

    def __init__(self, name: str) -> None:
        self.name = name

    def wrong(self, what: str, value: object, expected: str) -> PlanError:
        shown = f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"{type(value).__name__}"
        if isinstance(value, str):
            shown = repr(value[:80])
        return _unreadable(f"{self.name} cannot be read: {what}", shown, expected)

    def mapping(self, value: Any, what: str) -> Mapping[Any, Any]:
        if not isinstance(value, dict):
            raise self.wrong(what, value, "a dictionary")
        return value

    def sequence(self, value: Any, what: str) -> Sequence[Any]:
        if not isinstance(value, (list, tuple)):
            raise self.wrong(what, value, "a list")
        return value

    def whole(self, value: Any, what: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not -(1 << 63) <= value < 1 << 63:
            raise self.wrong(what, value, "a whole number of at most 64 bits")
        return value

    def integer(self, item: Mapping[Any, Any], key: str, what: str, default: int | None = None) -> int:
        value = item.get(key, default)
        return self.whole(value, f"{key} of {what}")

    def integers(self, value: Any, number: int, what: str) -> list[int]:
        items = self.sequence(value, what)
        if len(items) != number:
            raise _unreadable(f"{self.name} cannot be read: {what}", f"{len(items)} values", f"{number}")
        return [self.whole(item, what) for item in items]

    def kind(self, value: Any) -> str:
        if not isinstance(value, str) or value not in _KINDS:
            raise self.wrong("the kind of an event", value, f"one of {' '.join(sorted(_KINDS))}")
        return value

    def pool(self, item: Mapping[Any, Any], key: str) -> tuple[int, int] | None:
        if key not in item:
            return None
        first, second = self.integers(item[key], 2, key)
        return first, second

    def event(self, item: Any) -> Event:
        entry = self.mapping(item, "an event")
        kind = self.kind(entry.get("action"))
        address = 0 if kind in _REMARKS else self.integer(entry, "addr", "an event")
        size, stream = self.integer(entry, "size", "an event"), self.integer(entry, "stream", "an event", default=0)
        return Event(kind, address, size, stream, self.pool(entry, "pool_id"))

    def segment(self, entry: Mapping[Any, Any]) -> Segment:
        address, total = self.integer(entry, "address", "a segment"), self.integer(entry, "total_size", "a segment")
        kind = entry.get("segment_type")
        if kind not in ("small", "large"):
            raise self.wrong("segment_type", kind, "small or large")
        blocks, position = [], address
        for item in self.sequence(entry.get("blocks"), "blocks"):
            block = self.mapping(item, "a block")
            size, state = self.integer(block, "size", "a block"), block.get("state")
            if not isinstance(state, str) or state not in _STATES:
                raise self.wrong("the state of a block", state, " | ".join(_STATES))
            if "requested_size" not in block:
                raise _unreadable(
                    f"{self.name} comes from a torch that did not record what was requested", "a block without it"
                )
            requested = self.integer(block, "requested_size", "a block")
            blocks.append(Block(position, size, requested, _STATES[state]))
            position += size
        stream = self.integer(entry, "stream", "a segment", default=0)
        pool = self.pool(entry, "segment_pool_id") or DEFAULT_POOL
        return Segment(address, total, kind == "small", stream, bool(entry.get("is_expandable")), pool, tuple(blocks))


def _device(name: str, present: set[int], asked: int | None) -> int:
    if asked is not None and asked in present:
        return asked
    if asked is None and len(present) <= 1:
        return next(iter(present), 0)
    listed = _cut(" ".join(map(str, sorted(present)))) or "none"
    raise PlanError(
        f"{name} holds several devices" if asked is None else f"{name} holds nothing of device {asked}",
        got=f"devices {listed}",
        expected="one device",
        hint=f"choose one: --device-index {min(present, default=0)}",
        devices=tuple(sorted(present)),
    )


def _settings(reader: _Reader, value: Any) -> tuple[AllocatorSettings, tuple[str, ...]]:
    """The settings of the recording, and a sentence where it does not say."""
    if value is None:
        return allocator_settings.DEFAULTS, ("the recording does not say its settings; torch's defaults are taken",)
    given = reader.mapping(value, "allocator_settings")
    text = given.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if not isinstance(text, str):
        raise reader.wrong("PYTORCH_CUDA_ALLOC_CONF", text, "text")
    settings = _parsed(text)
    if given.get("max_split_size", -1) not in (-1, (1 << 64) - 1):
        allocator_settings.parse("max_split_size_mb:20", source="the recording")
    if given.get("garbage_collection_threshold", 0):
        allocator_settings.parse("garbage_collection_threshold:0.5", source="the recording")
    divisions = given.get("roundup_power2_divisions")
    if isinstance(divisions, dict) and divisions:
        keys = [str(1 << interval) for interval in range(allocator_settings.NUM_INTERVALS)]
        numbers = tuple(reader.integer(divisions, key, "roundup_power2_divisions", default=0) for key in keys)
        if any(number < 0 or number & (number - 1) for number in numbers):
            raise _unreadable(f"{reader.name} cannot be read: roundup_power2_divisions", str(numbers), "powers of two")
        settings = replace(settings, roundup_power2_divisions=numbers if max(numbers) > 1 else ())
    return replace(settings, expandable_segments=bool(given.get("expandable_segments"))), ()


def _parsed(text: str) -> AllocatorSettings:
    """The settings of a text; what an error shows of it is cut, since a file may hold any."""
    try:
        return allocator_settings.parse(text, source="the recording")
    except (PlanError, UnsupportedError) as error:
        facts = {"op": _cut(error.op)} if isinstance(error, UnsupportedError) else {}  # type: ignore[attr-defined]
        what, got = _cut(error.what), _cut(error.got or "")
        raise type(error)(what, got=got, expected=error.expected, hint=_cut(error.hint or ""), **facts) from None


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]} ..."


def _checked(recording: AllocatorRecording, name: str) -> AllocatorRecording:
    """The recording, once addresses and sizes make sense and one kind of segments explains it."""
    for address, size in _extents(recording):
        if not 0 <= address < address + size <= 1 << (ADDRESS_BITS - 1):
            raise _unreadable(
                f"{name} cannot be read: an address or a size out of range",
                f"{size} bytes at {address}",
                f"addresses below 2^{ADDRESS_BITS - 1} and sizes above 0",
            )
    for segment in recording.segments:
        places = sorted((block.address, block.num_bytes) for block in segment.blocks)
        stops = [segment.address, *(address + size for address, size in places)]
        if [address for address, _ in places] != stops[:-1] or stops[-1] != segment.address + segment.num_bytes:
            raise _unreadable(
                f"{name} contradicts itself: the blocks of a segment do not fill it",
                f"segment of {segment.num_bytes} bytes at {segment.address}",
                "blocks one behind the other, as large as the segment together",
            )
    for first, second in pairwise(sorted((segment.address, segment.num_bytes) for segment in recording.segments)):
        if sum(first) > second[0]:
            raise _unreadable(
                f"{name} contradicts itself: two segments overlap",
                f"segments of {first[1]} bytes at {first[0]} and of {second[1]} at {second[0]}",
                "every segment once, apart from the others",
            )
    counted = Counter(event.kind for event in recording.events if event.pool in (None, DEFAULT_POOL))
    held = Counter(segment.is_expandable for segment in recording.segments if segment.pool == DEFAULT_POOL)
    expandable = counted[SEGMENT_MAP] + counted[SEGMENT_UNMAP] + held[True]
    plain = counted[SEGMENT_ALLOC] + counted[SEGMENT_FREE] + held[False]
    if expandable and plain:
        raise UnsupportedError(
            f"{name} mixes expandable segments and others",
            got=f"{expandable} segments, maps and unmaps of the one kind, {plain} of the other",
            expected="one setting of expandable_segments from the first allocation to the last",
            hint="record a run that does not change expandable_segments on its way",
            op="expandable_segments",
        )
    is_expandable = recording.settings.expandable_segments if not expandable + plain else expandable > 0
    return replace(recording, settings=replace(recording.settings, expandable_segments=is_expandable))


def _extents(recording: AllocatorRecording) -> Iterator[tuple[int, int]]:
    for event in recording.events:
        if event.kind not in _REMARKS:
            yield event.address, event.num_bytes
    for segment in recording.segments:
        yield segment.address, segment.num_bytes
        for block in segment.blocks:
            yield block.address, block.num_bytes


def _unreadable(what: str, got: str, expected: str = "a snapshot of torch's CUDA allocator") -> PlanError:
    return PlanError(what, got=got, expected=expected, hint=_RECORD)
