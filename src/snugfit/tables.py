"""Tables for people: reports, ladders and the catalogue as text on a terminal.

Entry points: ``ladder``, ``reasons``, ``check``, ``diagnosis``, ``replay``, ``devices`` and ``run``, which print to a
console, and the JSON documents that stand for them; those of memory are ``memory_tables``'s. Numbers are computed
elsewhere; this file only chooses columns, units and words.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from rich.console import Console

from snugfit import sizes
from snugfit.errors import SnugfitError
from snugfit.hardware import Device
from snugfit.memory.replay.replaying import Replay
from snugfit.memory.reports import MemoryReport
from snugfit.memory_tables import new_table as _table
from snugfit.planning.search import PlanReport
from snugfit.plans import Plan
from snugfit.training.checking.check import CheckReport
from snugfit.training.diagnosing.diagnosis import Diagnosis
from snugfit.training.norms import listed

_TOP_HOLDERS = 8
_SHOWN = {"norm_policy", "optimizer_impl", "bf16_update", "gradient_dtype", "sync", "loss_chunks", "shard"}
_WIDTH_OF_FILES = 120
_RATES = ("float32", "tf32", "float16", "bfloat16", "fp8")


def console() -> Console:
    """Standard output; in a file or pipe tables get a width of their own, so that no column is cut."""
    width = None if sys.stdout.isatty() else _WIDTH_OF_FILES
    return Console(width=width, highlight=False, markup=False, emoji=False)


def plan_line(plan: Plan) -> str:
    """A plan in one line."""
    ranks = f"{plan.world_size} ranks x " if plan.world_size > 1 else ""
    cut = f"{ranks}{plan.accumulation_steps} x {plan.micro_batch_size}"
    recompute = [f"recompute {len(plan.recompute)} segments"] if plan.recompute else []
    others = [
        f"{field.name} {getattr(plan, field.name)}"
        for field in fields(plan)
        if field.name in _SHOWN and getattr(plan, field.name) != field.default
    ]
    line = [f"batch {plan.batch_size} as {cut}", plan.precision, *recompute, *others]
    return ", ".join(line)


def verdict(report: MemoryReport, budget_bytes: int) -> str:
    """The answer, with the label that says what it rests on."""
    return f"{'fits' if report.fits(budget_bytes) else 'does not fit'} ({report.label})"


def ladder(out: Console, report: PlanReport, budget_bytes: int) -> None:
    """Print the rungs, one technique after the other."""
    table = _table(
        ("rung", "left"),
        ("plan", "left"),
        ("allocated GiB", "right"),
        ("reserved GiB", "right"),
        ("needed GiB", "right"),
        ("fits", "left"),
        ("time", "right"),
    )
    for rung in report.ladder:
        table.add_row(
            rung.name,
            plan_line(rung.plan),
            sizes.gib(rung.memory.peak_allocated_bytes),
            sizes.gib(rung.memory.peak_reserved_bytes),
            sizes.gib(rung.memory.needed_bytes),
            "yes" if rung.fits else "no",
            f"{rung.relative_time:.2f}",
        )
    memory_report = report.memory
    out.print(f"device: {memory_report.device}, budget {sizes.text(budget_bytes)}, {memory_report.label}\n")
    out.print(table)
    out.print("needed: reserved, context and margin. time: modelled, that of the first rung is 1.")


def reasons(out: Console, report: PlanReport) -> None:
    """Print the chosen plan, each value with its reason, and the runner-up."""
    out.print(f"\nplan:      {plan_line(report.plan)}")
    if report.runner_up is not None:
        out.print(f"runner-up: {plan_line(report.runner_up)}")
    out.print()
    table = _table(("value", "left"), ("", "left"), ("reason", "left"))
    for name, reason in report.reasons.items():
        value = getattr(report.plan, name)
        shown = (f"{len(value)} segments" if value else "nothing") if name == "recompute" else str(value)
        table.add_row(name, shown, reason)
    out.print(table)


def devices(out: Console, catalogue: Sequence[Device]) -> None:
    """Print the catalogue: memory, compute capability, bandwidth and dense rates."""
    table = _table(
        ("device", "left"),
        ("GiB", "right"),
        ("capability", "right"),
        ("GB/s", "right"),
        *((name, "right") for name in _RATES),
    )
    for device in catalogue:
        capability = "-" if device.compute_capability is None else "{}.{}".format(*device.compute_capability)
        rates = [f"{device.flops[name] / 1e12:.1f}" if name in device.flops else "-" for name in _RATES]
        table.add_row(device.name, sizes.gib(device.memory_bytes), capability, f"{device.bandwidth / 1e9:.0f}", *rates)
    out.print(table)
    out.print("rates: dense TFLOP/s of the data sheets, accumulation in float32; -: no such rate. Sources: --json")


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


def plan_document(report: PlanReport, budget_bytes: int) -> dict[str, Any]:
    """What ``ladder`` and ``reasons`` print, as built-in values."""
    return {
        "device": report.memory.device,
        "budget_bytes": budget_bytes,
        "fits": report.memory.fits(budget_bytes),
        "plan": report.plan.to_dict(),
        "runner_up": None if report.runner_up is None else report.runner_up.to_dict(),
        "reasons": dict(report.reasons),
        "memory": report.memory.to_dict(),
        "ladder": [
            {
                "name": rung.name,
                "plan": rung.plan.to_dict(),
                "memory": rung.memory.to_dict(),
                "needed_bytes": rung.memory.needed_bytes,
                "fits": rung.fits,
                "step_time_s": rung.step_time_s,
                "relative_time": rung.relative_time,
            }
            for rung in report.ladder
        ],
    }


def error_document(error: SnugfitError) -> dict[str, Any]:
    """A "does not fit" as built-in values: the four parts, and the closest plan where there is one."""
    smallest, plan = getattr(error, "smallest", None), getattr(error, "plan", None)
    return {
        "fits": False,
        "error": {"what": error.what, "got": error.got, "expected": error.expected, "hint": error.hint},
        "budget_bytes": getattr(error, "budget_bytes", None),
        "plan": plan.to_dict() if isinstance(plan, Plan) else None,
        "memory": smallest.to_dict() if isinstance(smallest, MemoryReport) else None,
    }


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def warning(message: str, said: set[str]) -> None:
    """Print a warning on standard error, each text once: torch forgets what it has warned of."""
    if message not in said:
        said.add(message)
        print(f"warning: {message}", file=sys.stderr)
