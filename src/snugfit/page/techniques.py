"""The picture of the three techniques: each trades time, computation or precision for memory, in this job's numbers.

Entry point: ``techniques``, which gives a piece of HTML. For each technique two plans of the search are put side by
side that differ in it and, if there are such, in nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

from snugfit.page.details import Considered, Details
from snugfit.page.drawing import Unit, plain
from snugfit.planning.ladder import blocks_of, short_line
from snugfit.plans import Plan

_BITS = {"32-true": 24, "16-mixed": 11, "bf16-mixed": 8, "bf16-true": 8}
"Significant bits of what matrix products read, the hidden one included."


@dataclass(frozen=True, slots=True)
class _Technique:
    name: str
    pays_with: str
    fields: frozenset[str]
    "Of the plan: what it changes."
    amount: Callable[[Plan], int]
    "How much of it a plan has; more is more."
    sentence: str


_SAMPLES = frozenset({"micro_batch_size"})
_TECHNIQUES = (
    _Technique(
        "Mixed precision",
        "precision",
        frozenset({"precision", "bf16_update", "gradient_dtype"}),
        lambda plan: -_BITS[plan.precision],
        "Products read fewer significant bits; what is saved for backward is half as large, and faster to move.",
    ),
    _Technique(
        "Gradient accumulation",
        "time",
        _SAMPLES,
        lambda plan: plan.accumulation_steps,
        "Fewer samples are in flight at once; the gradient is that of the whole batch, from more and smaller kernels.",
    ),
    _Technique(
        "Activation checkpointing",
        "computation",
        frozenset({"recompute", "loss_chunks"}),
        lambda plan: len(plan.recompute) + plan.loss_chunks - 1,
        "What backward needs is computed a second time instead of kept; every number stays the same.",
    ),
)


_SAME = 0.005
"Relative change below which there is none to speak of."


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    before: float | None
    "None where nobody counted."
    after: float | None
    was: str
    now: str


_NEVER_DIFFER = frozenset({"batch_size", "world_size", "fingerprint", "version"})


def techniques(details: Details, unit: Unit) -> str:
    """Three panels, one for each technique."""
    return f'<div class="panels">{"".join(_panel(technique, details, unit) for technique in _TECHNIQUES)}</div>'


def _panel(technique: _Technique, details: Details, unit: Unit) -> str:
    pair = _pair(technique, details)
    head = f'<h3>{technique.name} <span class="pays">pays with {technique.pays_with}</span></h3>'
    if pair is None:
        body = '<p class="quiet">The search met no plan with it: this job has nothing to show here.</p>'
    else:
        before, after = pair
        rows = "".join(_row_html(row, technique) for row in _rows(before, after, unit))
        blocks = blocks_of(details.ladder)
        compared = " &rarr; ".join(plain(short_line(one.plan, blocks)) for one in pair)
        body = f'<p class="quiet">{_kinship(pair, details)}: {compared}</p>'
        body += f'<table class="trade"><tbody>{rows}</tbody></table>'
    return f'<section class="panel">{head}<p>{technique.sentence}</p>{body}</section>'


def _kinship(pair: tuple[Considered, Considered], details: Details) -> str:
    """Where the plans of a pair are from: a reader looks for them in the ladder."""
    rungs = {rung.plan for rung in details.ladder}
    return "Two rungs of the ladder" if {one.plan for one in pair} <= rungs else "Two plans that are not both rungs"


def _pair(technique: _Technique, details: Details) -> tuple[Considered, Considered] | None:
    """Two plans of the search that differ in a technique and in as little else as possible; early rungs first."""
    met = (*details.ladder, *details.frontier)
    pairs = [
        (before, after)
        for before in met
        for after in met
        if technique.amount(after.plan) > technique.amount(before.plan) and _differing(before, after) & technique.fields
    ]
    return min(pairs, key=lambda pair: _unfitness(pair, technique), default=None)


def _unfitness(pair: tuple[Considered, Considered], technique: _Technique) -> tuple[int, int, bool, float]:
    """How badly two plans show a technique: what else they differ in, what nobody counted, how little it frees."""
    before, after = pair
    others = len(_differing(before, after) - technique.fields)
    samples = abs(before.plan.micro_batch_size - after.plan.micro_batch_size) if technique.fields != _SAMPLES else 0
    return others, samples, not (before.flops and after.flops), after.needed_bytes / max(before.needed_bytes, 1)


def _differing(a: Considered, b: Considered) -> set[str]:
    names = {field.name for field in fields(Plan)} - _NEVER_DIFFER
    return {name for name in names if getattr(a.plan, name) != getattr(b.plan, name)}


def _rows(before: Considered, after: Considered, unit: Unit) -> list[_Row]:
    """What a technique may change, without it and with it."""

    def row(name: str, value: Callable[[Considered], float | None], text: Callable[[float], str]) -> _Row:
        values = value(before), value(after)
        was, now = ("" if each is None else text(each) for each in values)
        return _Row(name, *values, was, now)

    return [
        row("memory", lambda one: one.needed_bytes, lambda num_bytes: unit.text(int(num_bytes))),
        row("time", lambda one: one.step_time_s, lambda seconds: f"{seconds:.3g} s"),
        row("computation", lambda one: one.flops or None, _flops),
        row("precision", lambda one: _BITS[one.plan.precision], lambda bits: f"{bits:.0f} bits"),
    ]


def _flops(count: float) -> str:
    for name, factor in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if count >= factor:
            return f"{count / factor:.4g} {name}"
    return f"{count:.0f} FLOP"


def _row_html(row: _Row, technique: _Technique) -> str:
    if row.before is None or row.after is None:
        not_counted = '<td colspan="3" class="quiet">counted for rungs of the ladder only</td>'
        return f'<tr><th scope="row">{row.name}</th>{not_counted}</tr>'
    is_same = row.before == row.after or (row.before > 0 and abs(row.after / row.before - 1) < _SAME)
    change = "same" if is_same else f"{100 * (row.after / row.before - 1):+.0f} %" if row.before else ""
    whole = max(row.before, row.after) or 1
    kind = "paid" if row.name == technique.pays_with else "freed" if row.name == "memory" else ""
    before, after = 100 * row.before / whole, 100 * row.after / whole
    return (
        f'<tr class="{kind}"><th scope="row">{row.name}</th>'
        f'<td><span class="bar before" style="width:{before:.1f}%"></span>'
        f'<span class="bar" style="width:{after:.1f}%"></span></td>'
        f'<td class="number">{row.was}<br><b>{row.now}</b></td><td class="number">{change}</td></tr>'
    )
