"""Settings of the CUDA caching allocator: the text of ``PYTORCH_ALLOC_CONF`` read as torch reads it.

Entry points: ``parse``, ``from_environment`` and the ``AllocatorSettings`` they return. Settings that change sizes in
ways that no recording here verifies are refused by name; those that change none are accepted and listed.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from snugfit import sizes
from snugfit.errors import PlanError, UnsupportedError
from snugfit.memory.allocation.blocks import MIN_BLOCK_BYTES

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

NUM_INTERVALS = 16
"Intervals of ``roundup_power2_divisions``: 1 MiB, 2 MiB and so on to 32 GiB, each up to the next."
LARGE_SEGMENT_BYTES = 20 * sizes.MIB

# NOTE [Syntax of the settings] (c10/core/AllocatorConfig.{h,cpp}, c10/cuda/CUDAAllocatorConfig.{h,cpp} of torch 2.13)
#   1. White space is dropped wherever it stands. "," ":" "[" "]" are words of their own; keys and values are case
#      sensitive, a switch is True or False. A comma may end the text. Of a key given twice the last one counts.
#   2. torch reads a number as far as it goes ("8x" is 8) and takes most words where a ":" or "," belongs. Nobody
#      means that, so here it is an error.
#   3. ``roundup_power2_divisions`` is one number for all intervals, or a list of MiB:divisions. The first entry also
#      fills the intervals below it, ">" those above the entry before it (alone: all but the first); intervals that
#      no entry names are off. A second list changes what the first set.
#   4. Up to torch 2.9 PYTORCH_ALLOC_CONF is looked at first, in 2.13 last, so two that differ are refused.
_SEPARATORS = re.compile(r"([,:\[\]])")
_SWITCHES = {"True": True, "False": False}

_WITHOUT_EFFECT = {
    "max_non_split_rounding_mb": "number",  # looked at only where max_split_size_mb is set
    "pinned_use_background_threads": "switch",
    "pinned_max_round_threshold_mb": "number",
    "pinned_max_cached_size_mb": "number",
    "pinned_use_cuda_host_register": "switch",
    "pinned_use_hip_host_register": "switch",
    "pinned_num_register_threads": "number",
    "pinned_reserve_segment_size_mb": "number",
    "pinned_free_catch_all": "switch",
    "release_lock_on_cudamalloc": "switch",
    "release_lock_on_hipmalloc": "switch",
}
"Settings of pinned host memory and of locks: no device allocation gets another size or place."
_REFUSED = {
    "max_split_size_mb": "blocks above that size are never split and are given back one by one",
    "garbage_collection_threshold": "which cached blocks are given back depends on their age",
}
_REFUSED_IF_ON = {
    "graph_capture_record_stream_reuse": "blocks return to the cache by the graph of the captured streams",
    "throw_on_cudamalloc_oom": "a full device is then an error before the cache is given back",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """What of the allocator differs from its defaults, sizes in bytes."""

    expandable_segments: bool = False
    "From source, not verified by a recording."
    roundup_power2_divisions: tuple[int, ...] = ()
    "Divisions of each interval between powers of two, 0 or 1 for none; empty where all are off."
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    "Segment for large requests below 10 MiB. From source, not verified by a recording."
    memory_fraction: float | None = None
    "``per_process_memory_fraction``."
    without_effect: tuple[str, ...] = ()
    "Keys that were given and change no size."
    source: str = ""
    "Where the settings come from, a variable's name for example."

    def limit_bytes(self, memory_bytes: int) -> int | None:
        """What the fraction lets the allocator take of a device's whole memory; None where there is no fraction."""
        return None if self.memory_fraction is None else int(self.memory_fraction * memory_bytes)

    def sentences(self) -> tuple[str, ...]:
        """What of them is in effect, for people."""
        by = f" ({self.source})" if self.source else ""
        said = []
        if self.expandable_segments:
            said.append(f"expandable segments are on{by}: modelled from torch's source, not verified by a recording")
        if self.roundup_power2_divisions:
            shown = ", ".join(
                f"{divisions} from {sizes.text(sizes.MIB << index)}"
                for index, divisions in enumerate(self.roundup_power2_divisions)
                if not index or divisions != self.roundup_power2_divisions[index - 1]
            )
            said.append(f"requests are rounded up to divisions of powers of two{by}: {shown}")
        if self.large_segment_bytes != LARGE_SEGMENT_BYTES:
            size = sizes.text(self.large_segment_bytes)
            said.append(f"large segments are {size}{by}: modelled from torch's source, not verified by a recording")
        if self.memory_fraction is not None:
            said.append(f"the allocator may take {self.memory_fraction:.0%} of the device{by}")
        if self.without_effect:
            said.append(f"settings without effect on memory of the device{by}: {', '.join(self.without_effect)}")
        return tuple(said)

    def rounded(self, requested_bytes: int) -> int:
        """Size of the block that a request asks for: c10's ``round_size``.

        Args:
            requested_bytes: More than 0.
        """
        if self.roundup_power2_divisions and requested_bytes >= MIN_BLOCK_BYTES:
            power = requested_bytes.bit_length() - 1
            divisions = self.roundup_power2_divisions[min(max(power - 20, 0), NUM_INTERVALS - 1)]
            if divisions > 1 and requested_bytes > MIN_BLOCK_BYTES * divisions:
                step = (1 << power) // divisions
                return -(-requested_bytes // step) * step
        return (requested_bytes + MIN_BLOCK_BYTES - 1) & -MIN_BLOCK_BYTES


DEFAULTS = AllocatorSettings()


def from_environment(environment: Mapping[str, str] | None = None) -> AllocatorSettings:
    """Read the settings that torch would take from the environment.

    Args:
        environment: Variables and their values; None takes those of the process.

    Raises:
        PlanError: A text that cannot be read, or two variables that say different things.
        UnsupportedError: A setting that cannot be simulated; names it.
    """
    variables = os.environ if environment is None else environment
    given = {name: variables[name] for name in VARIABLES if name in variables}
    texts = {name: "".join(text.split()) for name, text in given.items()}
    if len(set(texts.values())) > 1:
        raise PlanError(
            "two variables set the allocator differently, and versions of torch differ in which one counts",
            got=", ".join(f"{name}={text}" for name, text in given.items()),
            expected="one of them, or the same text in each",
            hint=f"unset {' '.join(list(given)[1:])}",
        )
    for name, text in given.items():
        return parse(text, source=name)
    return DEFAULTS


def parse(text: str, *, source: str = "") -> AllocatorSettings:
    """Read a settings text, as torch takes it from ``PYTORCH_ALLOC_CONF``.

    Args:
        text: Pairs such as ``"expandable_segments:True,roundup_power2_divisions:[256:1,512:2,>:4]"``.
        source: Name of the variable or file, for messages.

    Raises:
        PlanError: A text that torch cannot read either, or reads as something else.
        UnsupportedError: A setting that cannot be simulated; names it.
    """
    settings = replace(DEFAULTS, source=source)
    divisions = [0] * NUM_INTERVALS
    for key, value in _pairs(text):
        if key == "expandable_segments":
            settings = replace(settings, expandable_segments=_switch(text, key, value))
        elif key == "roundup_power2_divisions":
            _fill(text, key, value, divisions)
        elif key == "large_segment_size_mb":
            settings = replace(settings, large_segment_bytes=_number(text, key, value, least=11) * sizes.MIB)
        elif key == "per_process_memory_fraction":
            settings = replace(settings, memory_fraction=_fraction(text, key, value))
        elif key in _WITHOUT_EFFECT:
            _ = _switch(text, key, value) if _WITHOUT_EFFECT[key] == "switch" else _number(text, key, value)
            settings = replace(settings, without_effect=(*settings.without_effect, key))
        elif key in _REFUSED:
            raise _refused(key, value, _REFUSED[key])
        elif key in _REFUSED_IF_ON:
            if _switch(text, key, value):
                raise _refused(key, value, _REFUSED_IF_ON[key])
            settings = replace(settings, without_effect=(*settings.without_effect, key))
        elif key == "backend":
            if value in (["cudaMallocAsync"], ["hipMallocAsync"]):
                raise _refused(key, value, "the driver's own pool decides, by rules that are not published")
            if value != ["native"]:
                raise _unreadable(text, key, "native or cudaMallocAsync")
        else:
            raise UnsupportedError(
                f"unknown setting of the allocator: {key}",
                got=text,
                expected="a setting that torch 2.13 knows and the simulator follows",
                hint="correct the name, or take it out of PYTORCH_ALLOC_CONF for the estimate",
                op=key,
            )
    return replace(settings, roundup_power2_divisions=tuple(divisions) if max(divisions) > 1 else ())


def _pairs(text: str) -> list[tuple[str, list[str]]]:
    """Keys and the words of their values; the brackets of a list stay, so that they can be told from a value."""
    words = [word for word in _SEPARATORS.split("".join(text.split())) if word]
    pairs, position = [], 0
    while position < len(words):
        key = words[position]
        if _SEPARATORS.fullmatch(key) or words[position + 1 : position + 2] != [":"]:
            raise _unreadable(text, key, "key:value, pairs separated by commas")
        end = start = position + 2
        if words[start : start + 1] == ["["]:
            if "]" not in words[start:]:
                raise _unreadable(text, key, "a list that ends with ]")
            end = words.index("]", start)
        if end >= len(words) or (end == start and _SEPARATORS.fullmatch(words[end])):
            raise _unreadable(text, key, "a value behind the colon")
        if words[end + 1 : end + 2] not in ([], [","]):
            raise _unreadable(text, key, "a comma behind each pair")
        pairs.append((key, words[start : end + 1]))
        position = end + 2
    return pairs


def _fill(text: str, key: str, value: list[str], divisions: list[int]) -> None:
    """Set the intervals that a value names."""
    if value[0] != "[":
        divisions[:] = [_number(text, key, value, power=True)] * NUM_INTERVALS
        return
    inside = value[1:-1]
    last = 0
    for first, start in enumerate(range(0, len(inside), 4)):
        entry = inside[start : start + 4]
        if len(entry) < 3 or entry[1] != ":" or entry[3:] not in ([], [","]):
            raise _unreadable(text, key, "MiB:divisions in brackets, such as [256:1,512:2,>:4]")
        number = 0 if entry[2] == "0" else _number(text, key, entry[2:3], power=True)
        if entry[0] == ">":
            divisions[last + 1 :] = [number] * (NUM_INTERVALS - last - 1)
            continue
        interval = _number(text, key, entry[:1], power=True)
        last = min(interval.bit_length() - 1, NUM_INTERVALS - 1)
        # In torch the first entry with a number fills what is below it, also behind a ">".
        if not first or all(inside[before] == ">" for before in range(0, start, 4)):
            divisions[:last] = [number] * last
        divisions[last] = number


def _number(text: str, key: str, value: list[str], *, least: int = 0, power: bool = False) -> int:
    expected = "a power of two" if power else "a whole number" if not least else f"a whole number, at least {least}"
    if len(value) != 1 or not re.fullmatch("[0-9]{1,18}", value[0]):
        raise _unreadable(text, key, expected)
    number = int(value[0])
    if number < least or (power and (number == 0 or number & (number - 1))):
        raise _unreadable(text, key, expected)
    return number


def _fraction(text: str, key: str, value: list[str]) -> float:
    try:
        number = float(value[0]) if len(value) == 1 else math.nan
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1:
        raise _unreadable(text, key, "a number from 0 to 1")
    return number


def _switch(text: str, key: str, value: list[str]) -> bool:
    if len(value) != 1 or value[0] not in _SWITCHES:
        raise _unreadable(text, key, "True or False, in this spelling")
    return _SWITCHES[value[0]]


def _unreadable(text: str, key: str, expected: str) -> PlanError:
    return PlanError(
        f"cannot read the allocator's settings at {key!r}",
        got=repr(text),
        expected=expected,
        hint='write for example PYTORCH_ALLOC_CONF="expandable_segments:True,roundup_power2_divisions:8"',
    )


def _refused(key: str, value: list[str], why: str) -> UnsupportedError:
    return UnsupportedError(
        f"the simulated allocator does not follow {key}: {why}, which no recording here verifies",
        got=f"{key}:{''.join(value)}",
        expected="settings whose effect on sizes is known: expandable_segments, roundup_power2_divisions, "
        "large_segment_size_mb, per_process_memory_fraction",
        hint=f"take {key} out of PYTORCH_ALLOC_CONF for the estimate, or measure on the card",
        op=key,
    )
