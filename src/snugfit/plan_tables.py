"""What ``snugfit plan`` prints: the ladder, the plan, what to change in a script, reasons, and what is worth knowing.

Entry points: ``show`` and ``document``. Readable in 100 columns. Numbers are computed by ``planning``; this file only
chooses columns, units and words.
"""

from collections.abc import Iterable
from typing import Any

from rich.console import Console

from snugfit import sizes, tables
from snugfit.memory_tables import new_table
from snugfit.planning.ladder import Rung, blocks_of, short_line
from snugfit.planning.plan_report import PlanReport
from snugfit.planning.script import script
from snugfit.planning.trials import Trial

_SMALL_BYTES = 4 * sizes.GIB
"Below it GiB with two decimals would say too little."
_UNITS = {"MiB": (sizes.MIB, 1), "GiB": (sizes.GIB, 2)}
"Bytes, and decimals that are shown."


def show(out: Console, report: PlanReport) -> None:
    """Print what a search found."""
    memory = report.memory
    out.print(f"device: {memory.device}, budget {sizes.text(report.budget_bytes)}, {memory.label}\n")
    if report.ladder:
        _ladder(out, report.ladder)
    out.print(f"\nplan:      {tables.plan_line(report.plan)}")
    if report.runner_up is not None:
        out.print(f"runner-up: {tables.plan_line(report.runner_up)}")
    _script(out, report)
    _reasons(out, report)
    _worth_knowing(out, report)
    if report.trials:
        _trials(out, report)
    how = "measured" if report.trials else "modelled"
    seconds = report.step_time_s
    rate = f", {_rate(report.plan.batch_size / seconds)} samples/s" if seconds else ""
    out.print(f"\n{tables.verdict(memory, report.budget_bytes)}, {_seconds(seconds)} per update{rate} ({how})")


def _ladder(out: Console, ladder: tuple[Rung, ...]) -> None:
    unit = unit_for(rung.memory.needed_bytes for rung in ladder)
    numbers = (f"{name}\n{unit}" for name in ("allocated", "reserved", "needed"))
    table = new_table(
        ("rung", "left"),
        ("plan", "left"),
        *((name, "right") for name in numbers),
        ("fits", "left"),
        ("time", "right"),
        ("compute", "right"),
    )
    first, blocks = ladder[0], blocks_of(ladder)
    for rung in ladder:
        memory = rung.memory
        held = (memory.peak_allocated_bytes, memory.peak_reserved_bytes, memory.needed_bytes)
        table.add_row(
            rung.name.removeprefix("gradient ").removeprefix("activation "),
            short_line(rung.plan, blocks),
            *(in_unit(num_bytes, unit) for num_bytes in held),
            "yes" if rung.fits else "no",
            f"{rung.relative_time:.2f}",
            f"{rung.flops / first.flops:.2f}" if first.flops else "",
        )
    out.print(table)
    out.print("plan: micro-batches x samples of each. needed: reserved, context and margin.")
    out.print("time, compute: of an update, modelled; those of the first rung are 1.")


def unit_for(sizes_bytes: Iterable[int]) -> str:
    """The unit that a column of sizes shares: MiB where all are small."""
    return "MiB" if max(sizes_bytes) < _SMALL_BYTES else "GiB"


def in_unit(num_bytes: int, unit: str) -> str:
    """A size as a number of a unit."""
    factor, decimals = _UNITS[unit]
    value = num_bytes / factor
    return f"{value:.{0 if value >= 1000 else decimals}f}"


def _script(out: Console, report: PlanReport) -> None:
    out.print("\nwhat to change in your script", style="bold")
    for way in report.changes:
        out.print(f"  the job must change: {way.change}")
        out.print("\n".join(f"    {line}" for line in way.code.splitlines()), highlight=False, markup=False)
    lines = script(report.plan, "cpu" if report.memory.device == "cpu" else "cuda")
    for heading, found in (("with snugfit", lines.snugfit), ("or without it", lines.pytorch)):
        out.print(f"  {heading}")
        width = max(len(line.code) for line in found)
        shown = [f"    {code:<{width}}  # {comment}" if comment else f"    {code}" for code, comment in found]
        if max(map(len, shown)) > out.width:  # then what is said of a line comes before it
            shown = [f"    {text}" for code, comment in found for text in _above(code, comment)]
        out.print("\n".join(shown))


def _above(code: str, comment: str) -> list[str]:
    indent = code[: len(code) - len(code.lstrip())]
    return [f"{indent}# {comment}", code] if comment else [code]


def _reasons(out: Console, report: PlanReport) -> None:
    out.print("\nreasons", style="bold")
    table = new_table(("", "left"), ("", "left"), ("", "left"))
    table.show_header = False
    for name, reason in report.reasons.items():
        value = getattr(report.plan, name)
        if name == "world_size" and value == 1:
            continue
        shown = (f"{len(value)} segments" if value else "nothing") if name == "recompute" else str(value)
        table.add_row(f"  {name}", shown, reason)
    out.print(table)


def _worth_knowing(out: Console, report: PlanReport) -> None:
    out.print("\nworth knowing", style="bold")
    table = new_table(("", "left"), ("", "left"))
    table.show_header = False
    for topic, sentence in (*(("", note) for note in report.notes), *((a.topic, a.text) for a in report.advice)):
        table.add_row(f"  {topic or 'note'}", sentence)
    out.print(table)


def _trials(out: Console, report: PlanReport) -> None:
    unit = unit_for(trial.peak_bytes or 0 for trial in report.trials)
    table = new_table(("tried out", "left"), ("per update", "right"), ("+-", "right"), (f"peak {unit}", "right"))
    for trial in report.trials:
        if trial.step_time_s is None or trial.peak_bytes is None:
            table.add_row(short_line(trial.plan), "out of memory", "", "")
        else:
            peak = in_unit(trial.peak_bytes, unit)
            table.add_row(short_line(trial.plan), _seconds(trial.step_time_s), f"{trial.spread:.0%}", peak)
    out.print()
    out.print(table)


def _seconds(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def document(report: PlanReport) -> dict[str, Any]:
    """What ``show`` prints, as built-in values."""
    kind = "cpu" if report.memory.device == "cpu" else "cuda"
    return {
        "device": report.memory.device,
        "budget_bytes": report.budget_bytes,
        "fits": report.memory.fits(report.budget_bytes),
        "plan": report.plan.to_dict(),
        "step_time_s": report.step_time_s,
        "runner_up": None if report.runner_up is None else report.runner_up.to_dict(),
        "script": script(report.plan, kind).to_dict(),
        "reasons": dict(report.reasons),
        "notes": list(report.notes),
        "advice": [{"topic": one.topic, "text": one.text, "numbers": dict(one.numbers)} for one in report.advice],
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
