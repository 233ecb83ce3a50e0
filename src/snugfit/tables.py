"""Tables for people: proofs, runs and the catalogue as text on a terminal.

Entry points: ``check``, ``diagnosis``, ``replay``, ``devices``, ``rates`` and ``run``, which print to a console, and
the JSON documents that stand for them; those of memory are ``memory_tables``'s, those of a search ``plan_tables``'.
Numbers are computed elsewhere; this file only chooses columns, units and words.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from rich.console import Console

from snugfit import sizes
from snugfit.errors import SnugfitError
from snugfit.hardware import Device
from snugfit.memory.replay.replaying import Replay
from snugfit.memory.reports import MemoryReport
from snugfit.memory_tables import new_table as _table
from snugfit.plans import Plan, cut
from snugfit.rates import OVERHEADS, Rates
from snugfit.training.checking.check import CheckReport
from snugfit.training.diagnosing.diagnosis import Diagnosis
from snugfit.training.norms import listed

_TOP_HOLDERS = 8
_SHOWN = {"norm_policy", "optimizer_impl", "bf16_update", "gradient_dtype", "sync", "loss_chunks", "shard"}
_WIDTH_OF_FILES = 120
_RATES = ("float32", "tf32", "float16", "bfloat16", "fp8")


def console() -> Console:
    """Standard output; in a file or pipe tables get a width of their own unless COLUMNS says one."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDTH_OF_FILES
    return Console(width=width, highlight=False, markup=False, emoji=False)


def plan_line(plan: Plan) -> str:
    """A plan in one line."""
    ranks = f" on each of {plan.world_size} ranks" if plan.world_size > 1 else ""
    precision = "fp32" if plan.precision == "32-true" else plan.precision
    count = len(plan.recompute)
    recompute = [f"recompute {count} segment{'s' if count > 1 else ''}"] if plan.recompute else []
    others = [
        f"{field.name} {getattr(plan, field.name)}"
        for field in fields(plan)
        if field.name in _SHOWN and getattr(plan, field.name) != field.default
    ]
    line = [f"batch {plan.batch_size} as {cut(plan)}{ranks}", precision, *recompute, *others]
    return ", ".join(line)


def duration(seconds: float) -> str:
    """A time for people, in the unit that suits it.

    Example:
        >>> duration(0.0213), duration(12.3), duration(486), duration(36000)
        ('21.3 ms', '12.3 s', '8.1 min', '10 h')
    """
    if seconds >= 100:
        return f"{seconds / 60:.3g} min" if seconds < 6000 else f"{seconds / 3600:,.3g} h"
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"


def verdict(report: MemoryReport, budget_bytes: int) -> str:
    """The answer, with the label that says what it rests on."""
    return f"{'fits' if report.fits(budget_bytes) else 'does not fit'} ({report.label})"


def devices(out: Console, catalogue: Sequence[Device]) -> None:
    """Print the catalogue: memory, compute capability, bandwidth and dense rates."""
    table = _table(
        ("device", "left"),
        ("GiB", "right"),
        ("capability", "right"),
        ("GB/s", "right"),
        *((name, "right") for name in _RATES),
    )
    table.columns[0].no_wrap = True  # a name in two lines is no name
    for device in catalogue:
        capability = "-" if device.compute_capability is None else "{}.{}".format(*device.compute_capability)
        rates = [f"{device.flops[name] / 1e12:.1f}" if name in device.flops else "-" for name in _RATES]
        table.add_row(device.name, sizes.gib(device.memory_bytes), capability, f"{device.bandwidth / 1e9:.0f}", *rates)
    out.print(table)
    out.print("rates: dense TFLOP/s of the data sheets, accumulation in float32; -: no such rate. Sources: --json")


def rates(out: Console, found: Rates) -> None:
    """Print what a device reached when it was measured."""
    out.print(f"{found.processor}, {found.threads} threads, torch {found.torch}\n")
    table = _table(("operation", "left"), ("size", "right"), ("reached", "right"))
    for kind, curve in found.arithmetic.items():
        for side, reached in curve:
            table.add_row(kind, f"{side:.0f}", f"{reached / 1e9:.1f} GFLOP/s")
    for kind, curve in found.traffic.items():
        num_bytes, reached = curve[-1]
        table.add_row(kind, sizes.text(round(num_bytes)), f"{reached / 1e9:.1f} GB/s")
    for name in OVERHEADS:
        table.add_row(name.removesuffix("_s").replace("_", " "), "", f"{getattr(found, name) * 1e6:.1f} us")
    out.print(table)
    out.print("size: side of a cube of products, or bytes that move; without one: what each takes beside its work")


def run(out: Console, report: Mapping[str, Any]) -> None:
    """Print how a run ended: what its ``report.json`` holds."""
    steps, skipped = report["steps"], report["skipped"]
    out.print(f"{steps} steps ({skipped} skipped) in {report['seconds']:.1f} s, in {report['run_dir']}")
    out.print(f"loss {_loss(report['first_loss'])} -> {_loss(report['last_loss'])}")
    measured = report["peak_memory_bytes"]
    out.print(f"peak memory {sizes.text(measured)}: {report['peak_memory_source']}")
    if report["predicted"]:
        predicted = report["predicted"]["peak_reserved_bytes"]
        out.print(f"predicted   {sizes.text(predicted)} for its tensors (measure them alone: snugfit measure)")
    for sentence in report["notes"]:
        out.print(f"note: {sentence}")


def check(out: Console, plan: Plan, report: CheckReport) -> None:
    """Print what was compared, the modules that differ, the hazards, and the verdict."""
    out.print(f"plan: {plan_line(plan)}\n")
    table = _table(("compared", "left"), ("relative error", "right"), ("tolerance", "right"), ("because", "left"))
    split, same = report.gradient_tolerance, report.recompute_tolerance
    for name, error, tolerance, reason in (
        ("gradient: full batch, split", report.gradient_error, split, report.gradient_tolerance_reason),
        ("loss: full batch, split", report.loss_error, split, ""),
        ("gradient: plain, recomputed", report.recompute_error, same, report.recompute_tolerance_reason),
        ("gradient: one run, another", report.repeat_error, same, ""),
    ):
        table.add_row(name, f"{error:.1e}", f"{tolerance:.0e}", reason)
    out.print(table)
    differing = [(name, error) for name, error in report.by_module.items() if not error <= split]
    if differing:
        out.print()
        table = _table(("module, worst first", "left"), ("relative error", "right"))
        for name, error in differing[:_TOP_HOLDERS]:
            table.add_row(name or "(the model itself)", f"{error:.1e}")
        out.print(table)
    together: dict[tuple[str, str], list[str]] = {}
    for hazard in report.hazards:
        together.setdefault((hazard.kind, hazard.message), []).append(hazard.module)
    for (kind, message), modules in together.items():
        where = f" in {listed(modules)}" if any(modules) else ""
        out.print(f"\nhazard: {kind}{where}\n  {message}")
    out.print()
    for sentence in report.assumptions:
        out.print(f"assumed: {sentence}")
    out.print(f"{report.num_forwards} forwards\n\n{'passed' if report.ok else 'failed'}")


def diagnosis(out: Console, plan: Plan, found: Diagnosis) -> None:
    """Print what was found out about a window."""
    out.print(f"plan: {plan_line(plan)}")
    out.print("every value is finite" if found.is_finite else "a value is not finite")
    out.print(str(found))


def replay(out: Console, found: Replay) -> None:
    """Print how far a replay agrees with the recording, and the first differences."""
    kind = "expandable segments, " if found.is_expandable else ""
    out.print(f"{kind}{found.events} events, {found.compared_events} of them compared\n")
    table = _table(("", "left"), ("recorded", "right"), ("matched", "right"))
    for name, recorded, matched in (
        ("reuses at the address", found.reuses, found.reuses_matched),
        ("runs of pages mapped" if found.is_expandable else "segments", found.segments, found.segments_matched),
        ("given back", found.releases, found.releases_matched),
        ("blocks alive in the end", found.live_blocks, found.live_blocks_matched),
    ):
        table.add_row(name, str(recorded), str(matched))
    out.print(table)
    peaks = sizes.text(found.recorded_peak_reserved_bytes), sizes.text(found.peak_reserved_bytes)
    out.print("\npeak reserved: recorded {}, predicted {}".format(*peaks))
    if found.differences:
        out.print()
        columns = ("event", "right"), ("kind", "left"), ("bytes", "right"), ("recorded at", "right")
        table = _table(*columns, ("predicted at", "right"), ("", "left"))
        for part in found.differences[:_TOP_HOLDERS]:
            shown = ("-" if at is None else f"{at:#x}" for at in (part.recorded_address, part.predicted_address))
            table.add_row(str(part.index), part.kind, str(part.num_bytes), *shown, part.what)
        out.print(table)
        if len(found.differences) > _TOP_HOLDERS:
            out.print(f"and {len(found.differences) - _TOP_HOLDERS} more (--json)")
    for sentence in found.notes:
        out.print(f"note: {sentence}")
    agrees = f"prediction and recording agree ({found.label})"
    out.print(f"\n{agrees if found.matched else 'prediction and recording part'}")


def error_document(error: SnugfitError) -> dict[str, Any]:
    """A "does not fit" as built-in values: the four parts, and the closest plan where there is one."""
    smallest, plan = getattr(error, "smallest", None), getattr(error, "plan", None)
    return {
        "fits": False,
        "error": {"what": error.what, "got": error.got, "expected": error.expected, "hint": error.hint},
        "budget_bytes": getattr(error, "budget_bytes", None),
        "plan": plan.to_dict() if isinstance(plan, Plan) else None,
        "memory": smallest.to_dict() if isinstance(smallest, MemoryReport) else None,
        "ways": [way.to_dict() for way in getattr(error, "ways", ())],
    }


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def warning(message: str, said: set[str]) -> None:
    """Print a warning on standard error, each text once: torch forgets what it has warned of."""
    if message not in said:
        said.add(message)
        print(f"warning: {message}", file=sys.stderr)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Say on standard error what is being done, as long as it is done; on a terminal only."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("planning") as status:
        yield status.update
