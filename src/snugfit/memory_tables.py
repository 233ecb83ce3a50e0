"""Tables of memory for people: what a plan or a step needs, what else it could need, and how a measurement differs.

Entry points: ``report``, ``savings`` and ``comparison``, each of which prints to a console. Readable in 80 columns.
Numbers are computed elsewhere; this file only chooses columns, units and words.
"""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from snugfit import sizes
from snugfit.memory.reporting import attribution
from snugfit.memory.reporting.comparing import Comparison, Difference
from snugfit.memory.reporting.what_if import Saving
from snugfit.memory.reports import CPU_MARGIN_FRACTION, MARGIN_BYTES, MARGIN_FRACTION, Holder, MemoryReport

_TOP = 8
"Modules and holders that are shown; the JSON document has all."

_UNITS = {"MiB": sizes.MIB, "GiB": sizes.GIB}


def report(out: Console, memory: MemoryReport, budget_bytes: int) -> None:
    """Print what is needed: sizes against the budget, the peak and who holds it, phases, advice, assumptions."""
    unit = _unit(memory)
    _sizes(out, memory, budget_bytes, unit)
    at = memory.peak_at
    where = f"{at.phase} of window {at.window}, {at.module or '(no module)'}, {_short(at.op) or '(no operation)'}"
    out.print(f"\nthe peak is in the {where}; then hold:")
    table = new_table(("category", "left"), (unit, "right"), ("share", "right"))
    for category, num_bytes in largest(memory.by_category):
        table.add_row(category, _in(unit, num_bytes), _share(num_bytes, memory.peak_allocated_bytes))
    out.print(table)
    if memory.holders:
        out.print()
        table = new_table(("largest", "left"), ("number", "right"), (unit, "right"), ("made by", "left"))
        for holder in memory.holders[:_TOP]:
            table.add_row(holder.category, str(holder.num_storages), _in(unit, holder.num_bytes), _maker(holder))
        out.print(table)
    _modules(out, memory, unit)
    _moments(out, memory, unit)
    for sentence in memory.advice:
        out.print(f"\nadvice: {sentence}")
    out.print()
    for sentence in memory.assumptions:
        out.print(f"assumed: {sentence}")


def savings(out: Console, lines: Sequence[Saving], budget_bytes: int) -> None:
    """Print what other plans would free."""
    if not lines:
        out.print("\nwhat if: no change of precision, micro-batch, recomputation or optimizer frees anything")
        return
    out.print()
    unit = _unit(lines[0].memory)
    table = new_table(("what if", "left"), (f"frees {unit}", "right"), (f"needed {unit}", "right"), ("fits", "left"))
    helped = False
    for line in lines:
        name = f"+ {line.change}" if helped else line.change
        fits = "yes" if line.memory.fits(budget_bytes) else "no"
        if line.helps:
            helped = True
        else:
            fits += ", not used below"
        table.add_row(name, _in(unit, line.freed_bytes), _in(unit, line.memory.needed_bytes), fits)
    out.print(table)
    out.print("each line is traced on top of those above it; frees: of the peak reserved")


def comparison(out: Console, compared: Comparison) -> None:
    """Print an estimate beside a measurement: the peak, its categories and the phases."""
    measured, at = compared.measured, compared.measured.peak_at
    where = f"{at.phase} of window {at.window}, {_short(at.op) or '(no operation)'}"
    out.print(f"\nestimated against {measured.label} on {measured.device}; the measured peak is in the {where}:")
    table = new_table(
        ("MiB", "left"), ("estimated", "right"), ("measured", "right"), ("difference", "right"), ("%", "right")
    )
    rows: dict[str, Difference] = {"peak allocated": compared.peak_allocated, "peak reserved": compared.peak_reserved}
    rows |= {f"  {category}": difference for category, difference in compared.by_category.items()}
    for phase, differences in compared.phases.items():
        total = Difference(
            estimated_bytes=sum(difference.estimated_bytes for difference in differences.values()),
            measured_bytes=sum(difference.measured_bytes for difference in differences.values()),
        )
        rows[f"at {phase}"] = total
    for name, difference in rows.items():
        table.add_row(name, *_compared(difference))
    out.print(table)


def new_table(*columns: tuple[str, str]) -> Table:
    """A table without frame of columns that are each a name and ``left`` or ``right``."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name, side in columns:
        table.add_column(name, justify="right" if side == "right" else "left", overflow="fold")
    return table


def largest(held: Mapping[str, int]) -> list[tuple[str, int]]:
    """Names and sizes, the largest first."""
    return sorted(held.items(), key=lambda entry: -entry[1])


def _unit(memory: MemoryReport) -> str:
    return "GiB" if memory.peak_reserved_bytes >= sizes.GIB else "MiB"


def _in(unit: str, num_bytes: int) -> str:
    return f"{num_bytes / _UNITS[unit]:.2f}"


def _sizes(out: Console, memory: MemoryReport, budget_bytes: int, unit: str) -> None:
    table = new_table(("", "left"), (unit, "right"), ("", "left"))
    fraction = CPU_MARGIN_FRACTION if memory.device == "cpu" else MARGIN_FRACTION
    least = "" if memory.device == "cpu" else f", at least {sizes.text(MARGIN_BYTES)}"
    margin = f"{fraction:.0%} of reserved{least} ({memory.label})"
    unused = f"{sizes.text(memory.unused_bytes)} of it unused when it peaks" if memory.unused_bytes else ""
    for name, num_bytes, note in (
        ("peak allocated", memory.peak_allocated_bytes, "live: tensors and workspaces"),
        ("peak reserved", memory.peak_reserved_bytes, unused),
        ("+ context", memory.context_bytes, "driver and kernels, assumed" if memory.context_bytes else ""),
        ("+ margin", memory.margin_bytes, margin if memory.margin_bytes else ""),
        ("= needed", memory.needed_bytes, ""),
        ("budget", budget_bytes, ""),
        ("headroom", budget_bytes - memory.needed_bytes, ""),
    ):
        table.add_row(name, _in(unit, num_bytes), note)
    out.print(table)


def _modules(out: Console, memory: MemoryReport, unit: str) -> None:
    holders = _repeated(memory.by_module)
    if not set(holders) - {""}:
        return
    out.print()
    table = new_table(("module", "left"), ("number", "right"), (unit, "right"), ("mostly", "left"))
    totals = {module: sum(held.values()) for module, (_, held) in holders.items()}
    for module, num_bytes in largest(totals)[:_TOP]:
        number, held = holders[module]
        category, part = largest(held)[0]
        table.add_row(module or "(no module)", str(number), _in(unit, num_bytes), f"{category} {_in(unit, part)}")
    out.print(table)


def _moments(out: Console, memory: MemoryReport, unit: str) -> None:
    """Categories at the ends of phases, and the highest point of each phase of each window."""
    if memory.phases:
        out.print()
        categories = [name for name in attribution.CATEGORIES if any(held.get(name) for held in memory.phases.values())]
        table = new_table((f"{unit} at", "left"), *((phase, "right") for phase in memory.phases))
        for category in categories:
            held_then = (held.get(category, 0) for held in memory.phases.values())
            table.add_row(category, *(_in(unit, num_bytes) if num_bytes else "-" for num_bytes in held_then))
        table.add_row("all", *(_in(unit, sum(held.values())) for held in memory.phases.values()))
        out.print(table)
    if memory.windows:
        out.print()
        phases = list(dict.fromkeys(phase for window in memory.windows for phase in window.by_phase))
        columns = ((name, "right") for name in (*phases, "peak allocated", "reserved"))
        table = new_table((f"highest, {unit}", "left"), *columns)
        for window in memory.windows:
            name = "first step" if window.window == 1 else "steady state"
            ends = (window.peak_allocated_bytes, window.peak_reserved_bytes)
            heights = (window.by_phase.get(phase, 0) for phase in phases)
            table.add_row(name, *(_in(unit, num_bytes) for num_bytes in (*heights, *ends)))
        out.print(table)


def _maker(holder: Holder) -> str:
    made = f"{_short(holder.op)} of {holder.module}" if holder.module else _short(holder.op)
    return made if holder.phase == "build" else f"{made}, {holder.phase}"


def _short(op: str) -> str:
    """An operation without its overload: ``addmm`` for ``addmm.default``."""
    name, _, rest = op.partition(".")
    return name + (f",{rest.partition(',')[2]}" if "," in rest else "")


def _repeated(by_module: Mapping[str, Mapping[str, int]]) -> dict[str, tuple[int, dict[str, int]]]:
    """Modules that differ in an index only, such as ``layer.0`` and ``layer.1``, taken together as ``layer.*``.

    Returns:
        Name to the number of modules and what they hold together, category to bytes.
    """
    together: dict[str, tuple[int, dict[str, int]]] = {}
    for module, held in by_module.items():
        name = attribution.pattern(module)
        number, sums = together.get(name, (0, {}))
        for category, num_bytes in held.items():
            sums[category] = sums.get(category, 0) + num_bytes
        together[name] = (number + 1, sums)
    return together


def _compared(difference: Difference) -> tuple[str, str, str, str]:
    percent = "-" if difference.percent is None else f"{difference.percent:+.2f}"
    in_mib = [f"{num / sizes.MIB:.2f}" for num in (difference.estimated_bytes, difference.measured_bytes)]
    return in_mib[0], in_mib[1], f"{difference.num_bytes / sizes.MIB:+.2f}", percent


def _share(num_bytes: int, total: int) -> str:
    return f"{num_bytes / total:.0%}" if total else "-"
