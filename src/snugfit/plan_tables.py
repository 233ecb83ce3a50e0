"""What ``snugfit plan`` prints: the ladder, the plan, what to change in a script, reasons, and what is worth knowing.

Entry points: ``show`` and ``document``. Readable in 100 columns. Numbers are computed by ``planning``; this file only
chooses columns, units and words.
"""

from collections.abc import Iterable
from typing import Any

from rich.console import Console

from snugfit import sizes, tables
from snugfit.memory_tables import new_table
from snugfit.option_names import in_options
from snugfit.planning import options
from snugfit.planning.ladder import Rung, blocks_of, legend, short_line
from snugfit.planning.plan_report import PlanReport
from snugfit.planning.script import Script, script
from snugfit.planning.trials import Trial

_SMALL_BYTES = 4 * sizes.GIB
"Below it GiB with two decimals would say too little."
_UNITS = {"MiB": (sizes.MIB, 1), "GiB": (sizes.GIB, 2)}
"Bytes, and decimals that are shown."


def show(out: Console, report: PlanReport, plan_file: str | None = None) -> None:
    """Print what a search found.

    Args:
        out: Where to; lines end where their last letter does.
        report: What was found.
        plan_file: Where the plan was saved; None: it was not.
    """
    with out.capture() as captured:
        _show(out, report, plan_file)
    for line in captured.get().splitlines():
        print(line.rstrip(), file=out.file)


def _show(out: Console, report: PlanReport, plan_file: str | None) -> None:
    memory = report.memory
    out.print(f"device: {memory.device}, budget {sizes.text(report.budget_bytes)}, {memory.label}\n")
    if report.ladder:
        _ladder(out, report.ladder)
    out.print(f"\nplan:      {tables.plan_line(report.plan)}")
    if report.runner_up is not None:
        out.print(f"runner-up: {tables.plan_line(report.runner_up)}")
    _script(out, report, plan_file)
    _reasons(out, report)
    _worth_knowing(out, report)
    if report.trials:
        _trials(out, report)
    how = "measured" if report.trials else "modelled"
    seconds = report.step_time_s
    rate = f", {_rate(report.plan.batch_size / seconds)} samples/s" if seconds else ""
    out.print(f"\n{tables.verdict(memory, report.budget_bytes)}, {tables.duration(seconds)} per update{rate} ({how})")


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
    out.print("plan: micro-batches x samples of each + a smaller last one. needed: reserved, context, margin.")
    out.print("time, compute: seconds and FLOP of an update, modelled; those of the first rung are 1.")
    out.print("compute holds what is computed twice: segments, and the class scores of a loss in chunks.")
    for sentence in legend(rung.plan for rung in ladder):
        out.print(sentence)


def unit_for(sizes_bytes: Iterable[int]) -> str:
    """The unit that a column of sizes shares: MiB where all are small."""
    return "MiB" if max(sizes_bytes) < _SMALL_BYTES else "GiB"


def in_unit(num_bytes: int, unit: str) -> str:
    """A size as a number of a unit."""
    factor, decimals = _UNITS[unit]
    value = num_bytes / factor
    return f"{value:.{0 if value >= 1000 else decimals}f}"


def _script(out: Console, report: PlanReport, plan_file: str | None) -> None:
    out.print("\nwhat to change in your script", style="bold")
    out.print("  loss_fn(model, batch) is your loss, a mean; the other names are yours, too")
    for way in report.changes:
        out.print(f"  the job must change: {way.change}")
        _code(out, way.code.splitlines())
        if way.name in _IN_A_JOB:
            out.print(f"  in job(), {_IN_A_JOB[way.name]}: without, the plan is refused")
    lines = _lines(report, plan_file)
    for heading, found in (("with snugfit", lines.snugfit), (lines.by_hand, lines.pytorch)):
        out.print(f"  {heading}")
        _code(out, found)


_IN_A_JOB = {
    "8bit-optimizer": "the function that makes the optimizer returns this one",
    "lora": "the function that makes the model runs these lines and returns the model",
}
"Where the lines of a change go that snugfit runs itself."


def _code(out: Console, lines: Iterable[str]) -> None:
    """Print code as it is: a line that is longer than the terminal is left to it."""
    out.print("\n".join(f"    {line}" for line in lines), highlight=False, markup=False, soft_wrap=True)


def _lines(report: PlanReport, plan_file: str | None) -> Script:
    kind = "cpu" if report.memory.device == "cpu" else "cuda"
    return script(report.plan, kind, report.loop, plan_file)


def _reasons(out: Console, report: PlanReport) -> None:
    out.print("\nreasons", style="bold")
    table = new_table(("", "left"), ("", "left"), ("", "left"))
    table.show_header = False
    for name, reason in report.reasons.items():
        value = getattr(report.plan, name)
        if name == "world_size" and value == 1:
            continue
        table.add_row(f"  {name}", _value(name, value), reason)
    out.print(table)


def _value(name: str, value: Any) -> str:
    if name == "recompute":
        return options.segments(len(value)) if value else "nothing"
    return options.short(value) if name == "precision" else str(value)


def _worth_knowing(out: Console, report: PlanReport) -> None:
    out.print("\nworth knowing", style="bold")
    table = new_table(("", "left"), ("", "left"))
    table.show_header = False
    for topic, sentence in (*(("", note) for note in report.notes), *((a.topic, a.text) for a in report.advice)):
        table.add_row(f"  {topic or 'note'}", in_options(sentence))
    out.print(table)


def _trials(out: Console, report: PlanReport) -> None:
    unit = unit_for(trial.peak_bytes or 0 for trial in report.trials)
    table = new_table(("tried out", "left"), ("per update", "right"), ("+-", "right"), (f"peak {unit}", "right"))
    for trial in report.trials:
        if trial.step_time_s is None or trial.peak_bytes is None:
            table.add_row(short_line(trial.plan), "out of memory", "", "")
        else:
            peak = in_unit(trial.peak_bytes, unit)
            table.add_row(short_line(trial.plan), tables.duration(trial.step_time_s), f"{trial.spread:.0%}", peak)
    out.print()
    out.print(table)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def document(report: PlanReport, plan_file: str | None = None) -> dict[str, Any]:
    """What ``show`` prints, as built-in values."""
    return {
        "device": report.memory.device,
        "budget_bytes": report.budget_bytes,
        "fits": report.memory.fits(report.budget_bytes),
        "plan": report.plan.to_dict(),
        "step_time_s": report.step_time_s,
        "runner_up": None if report.runner_up is None else report.runner_up.to_dict(),
        "script": _lines(report, plan_file).to_dict(),
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
