"""Recorded allocator logs of real steps: replayed through the simulator, and beside our own trace of the same step.

Entry points: ``replays`` and ``ordered_sizes``.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from published import Options, Row, cs336_rows, read, traces
from published.judging import Target
from snugfit.memory.allocator import CachingAllocator
from snugfit.memory.replay import replaying, snapshots
from snugfit.memory.traces import Trace

_JUDGED = ("cs336_medium_ctx128_train_fp32_wedsonlin", "cs336_medium_ctx512_train_fp32_wedsonlin")
"Logs of which the share in ``_SHARE`` must match; the others are shown."
_SHARE = 0.98


def replays(options: Options) -> tuple[list[Target], list[str]]:
    """Every recorded log through the simulator, address by address."""
    folder = options.groundtruth / "traces"
    files = sorted(folder.glob("*.json.gz")) if folder.is_dir() else []
    if not files:
        return [], ["", f"Recorded logs skipped: {folder} is not there."]
    lines = ["", "## Recorded logs through the simulator (replay-exact where all is matched)", ""]
    lines += ["| log | reuses at the recorded address | segments of the recorded size | peak reserved | recorded |"]
    lines += ["|---|---|---|---|---|"]
    exact = 0
    for file in files:
        found = replaying.replay(snapshots.read(file))
        exact += found.matched
        lines.append(
            f"| {file.name.removesuffix('.json.gz')} | {found.reuses_matched} of {found.reuses} "
            f"| {found.segments_matched} of {found.segments} | {found.peak_reserved_bytes} "
            f"| {found.recorded_peak_reserved_bytes} |"
        )
    goal = "every reuse at the right address, every segment of the right size, peak reserved exact"
    command = "python benchmarks/accuracy.py --part replays"
    reached = f"{exact} of {len(files)} logs"
    return [Target("all recorded logs", goal, reached, exact == len(files), "replay-exact", command)], lines


def ordered_sizes(options: Options) -> tuple[list[Target], list[str]]:
    """Recorded requested sizes of one step against our own trace of it, in order."""
    if not options.groundtruth.is_dir():
        return [], []
    targets, lines = [], ["", "## Our own trace beside the recorded log of the same step", ""]
    by_log = {cs336_rows.log_name(row): row for row in read(options.groundtruth) if row.family == "snap"}
    for log, row in sorted(by_log.items()):
        if log and (not options.quick or log in _JUDGED):
            target, more = _beside(log, row, options)
            targets.append(target)
            lines += more
    return targets, lines


def _beside(log: str, row: Row, options: Options) -> tuple[Target, list[str]]:
    recorded = traces.load(options.groundtruth / "traces" / f"{log}.json.gz")
    trace, events = measured_step(row, options)
    births = trace.recording.births
    requested, ours = traces.requested(recorded), [event - 1 for event in events if event > 0]
    matched, differences = traces.compare(requested, [births[index].num_bytes for index in ours])
    share = matched / max(len(requested), len(ours))
    text = f"{share:.2%} ({matched} of {len(requested)} recorded and {len(ours)} traced)"
    changes = traces.changes(recorded)
    in_order, _ = traces.compare(changes, [_signed(trace, event) for event in events])
    text += f"; allocations and frees together {in_order} of {len(changes)}"
    if "attention_only" in log:
        right, total = _addresses(trace, events, recorded)
        text += f"; addresses {right} of {total}"
    judged = log in _JUDGED
    target = Target(
        what=f"ordered allocation sizes of {log}",
        target=f">= {_SHARE:.0%} matched in order, every mismatch named" if judged else "shown",
        reached=text,
        met=share >= _SHARE if judged else None,
        label="modelled, against a recorded log",
        command="python benchmarks/accuracy.py --part ordered",
    )
    return target, _named(log, trace, ours, differences)


def measured_step(row: Row, options: Options) -> tuple[Trace, list[int]]:
    """Our trace of a row's script, and the events of its measured step."""
    script = cs336_rows.script_of(row, options)
    assert not isinstance(script, str), script
    trace = cs336_rows.trace_of(script)
    recording = trace.recording
    start = max(position for position, name in recording.marks if name == "window")
    ends = {name: position for position, name in recording.marks}
    if script.runs == "attention":  # recorded from the first allocation on
        start = 0
    events = recording.events[start : ends.get(cs336_rows.MEASURED, ends["step end"])]
    return trace, [event for event in events if recording.births[abs(event) - 1].num_bytes]


def _signed(trace: Trace, event: int) -> int:
    num_bytes = trace.recording.births[abs(event) - 1].num_bytes
    return num_bytes if event > 0 else -num_bytes


def _addresses(trace: Trace, events: Sequence[int], recorded: Mapping[str, Any]) -> tuple[int, int]:
    """How many of our allocations the simulator puts where the log has them, the driver's choice of segments given."""
    segments = iter([address for kind, address, _, _ in recorded["events"] if kind == 3])
    wanted = [address for kind, address, _, _ in recorded["events"] if kind == 0]
    allocator = CachingAllocator(place=lambda size: next(segments))
    got = []
    for event in events:
        if event > 0:
            got.append(allocator.malloc(event, trace.recording.births[event - 1].num_bytes))
        else:
            allocator.free(-event)
    return sum(a == b for a, b in zip(wanted, got, strict=False)), len(wanted)


def _named(log: str, trace: Trace, ours: Sequence[int], differences: Sequence[traces.Difference]) -> list[str]:
    """Every mismatch once, with how often it comes and after which of our operations."""
    births = trace.recording.births
    kinds: Counter[tuple[Any, ...]] = Counter()
    for d in differences:
        before = births[ours[d.index - 1]] if d.index else None
        ops = tuple(births[index].op for index in ours[d.index : d.index + len(d.added)])
        kinds[d.missing, d.added, ops, before.op if before else "the start", before.phase if before else ""] += 1
    lines = [f"- {log}: no mismatch."] if not kinds else []
    for (missing, added, ops, before, phase), count in kinds.most_common():
        parts = [f"recorded only {_sizes(missing)}"] if missing else []
        parts += [f"traced only {_sizes(added)} by {', '.join(ops)}"] if added else []
        lines.append(f"- {log}: {count} x after {before} ({phase}): {'; '.join(parts)}")
    return lines


def _sizes(sizes: Sequence[int]) -> str:
    return " ".join(map(str, sizes[:8])) + (f" and {len(sizes) - 8} more" if len(sizes) > 8 else "")
