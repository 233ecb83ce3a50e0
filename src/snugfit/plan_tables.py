"""What ``snugfit plan`` prints: the ladder, the plan with its reasons, notes and advice, and what was tried out.

Entry points: ``show`` and ``document``. Numbers are computed by ``planning``; this file only chooses columns and words.
"""

from typing import Any

from rich.console import Console

from snugfit import sizes, tables
from snugfit.memory_tables import new_table
from snugfit.planning.ladder import Rung
from snugfit.planning.plan_report import PlanReport
from snugfit.planning.trials import Trial


def show(out: Console, report: PlanReport) -> None:
    """Print what a search found."""
    memory = report.memory
    out.print(f"device: {memory.device}, budget {sizes.text(report.budget_bytes)}, {memory.label}\n")
    if report.ladder:
        _ladder(out, report)
    _reasons(out, report)
    for way in report.changes:
        out.print(f"\nthe job must change: {way.change}")
        out.print(way.code, highlight=False, markup=False)
    for sentence in report.notes:
        out.print(f"note: {sentence}")
    for advice in report.advice:
        out.print(f"advice: {advice.text}")
    if report.trials:
        _trials(out, report)
    how = "measured" if report.trials else "modelled"
    out.print(f"\n{tables.verdict(memory, report.budget_bytes)}, {_seconds(report.step_time_s)} per update ({how})")


def _ladder(out: Console, report: PlanReport) -> None:
    table = new_table(
        ("rung", "left"),
        ("plan", "left"),
        ("allocated GiB", "right"),
        ("reserved GiB", "right"),
        ("needed GiB", "right"),
        ("fits", "left"),
        ("time", "right"),
        ("samples/s", "right"),
        ("pays with", "left"),
    )
    for rung in report.ladder:
        table.add_row(
            rung.name,
            tables.plan_line(rung.plan),
            sizes.gib(rung.memory.peak_allocated_bytes),
            sizes.gib(rung.memory.peak_reserved_bytes),
            sizes.gib(rung.memory.needed_bytes),
            "yes" if rung.fits else "no",
            f"{rung.relative_time:.2f}",
            f"{rung.samples_per_s:.3g}",
            rung.pays_with,
        )
    out.print(table)
    out.print("needed: reserved, context and margin. time: modelled, that of the first rung is 1.")


def _reasons(out: Console, report: PlanReport) -> None:
    out.print(f"\nplan:      {tables.plan_line(report.plan)}")
    if report.runner_up is not None:
        out.print(f"runner-up: {tables.plan_line(report.runner_up)}")
    out.print()
    table = new_table(("value", "left"), ("", "left"), ("reason", "left"))
    for name, reason in report.reasons.items():
        value = getattr(report.plan, name)
        shown = (f"{len(value)} segments" if value else "nothing") if name == "recompute" else str(value)
        table.add_row(name, shown, reason)
    out.print(table)


def _trials(out: Console, report: PlanReport) -> None:
    table = new_table(("tried out", "left"), ("per update", "right"), ("+-", "right"), ("peak GiB", "right"))
    for trial in report.trials:
        if trial.step_time_s is None or trial.peak_bytes is None:
            table.add_row(tables.plan_line(trial.plan), "out of memory", "", "")
        else:
            peak = sizes.gib(trial.peak_bytes)
            table.add_row(tables.plan_line(trial.plan), _seconds(trial.step_time_s), f"{trial.spread:.0%}", peak)
    out.print()
    out.print(table)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"


def document(report: PlanReport) -> dict[str, Any]:
    """What ``show`` prints, as built-in values."""
    return {
        "device": report.memory.device,
        "budget_bytes": report.budget_bytes,
        "fits": report.memory.fits(report.budget_bytes),
        "plan": report.plan.to_dict(),
        "step_time_s": report.step_time_s,
        "runner_up": None if report.runner_up is None else report.runner_up.to_dict(),
        "reasons": dict(report.reasons),
        "notes": list(report.notes),
        "advice": [{"claim": one.claim, "text": one.text, "numbers": dict(one.numbers)} for one in report.advice],
        "changes": [way.to_dict() for way in report.changes],
        "memory": report.memory.to_dict(),
        "ladder": [_rung(rung) for rung in report.ladder],
        "frontier": [
            {"plan": one.plan.to_dict(), "needed_bytes": one.needed_bytes, "step_time_s": one.step_time_s}
            for one in report.frontier
        ],
        "trials": [_trial(trial) for trial in report.trials],
    }


def _rung(rung: Rung) -> dict[str, Any]:
    return {
        "name": rung.name,
        "plan": rung.plan.to_dict(),
        "memory": rung.memory.to_dict(),
        "needed_bytes": rung.memory.needed_bytes,
        "fits": rung.fits,
        "step_time_s": rung.step_time_s,
        "relative_time": rung.relative_time,
        "samples_per_s": rung.samples_per_s,
        "flops": rung.flops,
        "pays_with": rung.pays_with,
    }


def _trial(trial: Trial) -> dict[str, Any]:
    return {
        "plan": trial.plan.to_dict(),
        "step_time_s": trial.step_time_s,
        "spread": trial.spread,
        "peak_bytes": trial.peak_bytes,
        "out_of_memory": trial.out_of_memory,
    }
