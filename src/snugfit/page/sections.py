"""What the page says, from the verdict at the top to what the numbers rest on at the bottom.

Entry point: ``body``. Numbers and figures are made elsewhere; this file chooses their order and the words.
"""

from collections.abc import Iterable

from snugfit import sizes
from snugfit.page import markup, modules, over_time, run_figures, techniques, trades
from snugfit.page.details import Details
from snugfit.page.drawing import BESIDE, COLOURS, Unit, plain
from snugfit.page.run_folder import Run
from snugfit.planning.ladder import blocks_of, legend, short_line
from snugfit.planning.script import script
from snugfit.plans import Plan
from snugfit.tables import duration, plan_line

_HOLDERS = 10
_PRODUCTS = {
    "32-true": "everything in fp32",
    "16-mixed": "products in fp16 with a loss scale, trained weights in fp32",
    "bf16-mixed": "products in bf16, trained weights in fp32",
    "bf16-true": "weights and products in bf16",
}


def body(details: Details, run: Run | None) -> str:
    """All sections that there is something to say for."""
    unit = Unit.for_bytes(details.memory.peak_reserved_bytes)
    is_searched = bool(details.ladder)
    return "".join(
        (
            _head(details, run, unit),
            _run(run, details, unit) if run is not None else "",
            _script(details),
            _trade(details, unit) if is_searched else _NOT_SEARCHED,
            _ladder(details, unit) if is_searched else "",
            _over_time(details, unit) if details.timeline else "",
            _modules(details, unit),
            _frontier(details, unit) if details.frontier else "",
            _reasons(details) if details.reasons else "",
            _fine_print(details),
        )
    )


_NOT_SEARCHED = """<p class="quiet">The plan was traced as it is. The ladder, the frontier and the reasons come with the
search that finds a plan: <code>snugfit plan TARGET ... -o plan.json</code>.</p>
"""


def _head(details: Details, run: Run | None, unit: Unit) -> str:
    memory, plan, seconds = details.memory, details.plan, details.step_time_s
    fits = memory.fits(details.budget_bytes)
    label = plain(memory.label)
    verdict = f"{'fits' if fits else 'does not fit'} ({label})"
    options = "".join(f", {name} {value}" for name, value in details.options.items())
    shown = {
        "needed": (unit.text(memory.needed_bytes), f"of a budget of {unit.text(details.budget_bytes)}"),
        "peak reserved": (
            unit.text(memory.peak_reserved_bytes),
            f"{label}; allocated {unit.text(memory.peak_allocated_bytes)}",
        ),
    }
    if seconds:
        shown["one update"] = (duration(seconds), f"modelled; {_rate(plan.batch_size / seconds)} samples/s")
    if run is not None and run.ending is not None and run.ending.peak_memory_bytes is not None:
        where = f"on {plain(run.ending.device)}, in {run.ending.steps} steps"
        shown["peak observed"] = (sizes.text(run.ending.peak_memory_bytes), where)
    return (
        f"<header><h1>{plain(details.target)}{plain(options)}: batch {plan.batch_size} on {plain(memory.device)}</h1>\n"
        f'<p class="lead"><span class="verdict {"fits" if fits else "not-fits"}">{verdict}</span> '
        f"{plain(_in_words(plan))}</p>\n{markup.facts(shown)}</header>\n"
    )


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _in_words(plan: Plan) -> str:
    """What a plan does, for somebody who has not met its fields."""
    steps, size, share = plan.accumulation_steps, plan.micro_batch_size, plan.samples_per_rank
    cut = "at once" if steps == 1 else f"in {steps} micro-batches of {'up to ' if share % size else ''}{size}"
    ranks = f" on each of {plan.world_size} ranks" if plan.world_size > 1 else ""
    moved = sum(segment.policy == "offload" for segment in plan.recompute)
    counts = {"recomputed in backward": len(plan.recompute) - moved, "kept on the host for backward": moved}
    done = [f"{count} segment{'s' if count > 1 else ''} {what}" for what, count in counts.items() if count]
    again = ", ".join(done) or "nothing recomputed"
    return f"{share} samples go through the model {cut}{ranks}; {_PRODUCTS[plan.precision]}; {again}."


def _script(details: Details) -> str:
    kind = "cpu" if details.memory.device == "cpu" else "cuda"
    lines = script(details.plan, kind, details.loop, details.plan_file or None)
    return markup.section(
        "What to change in your script",
        "<h3>With snugfit</h3>\n",
        _code(lines.snugfit),
        f"<h3>{lines.by_hand.replace('or', 'Or', 1)}</h3>\n",
        _code(lines.pytorch),
    )


def _code(lines: tuple[str, ...]) -> str:
    shown = (f"<i>{plain(line)}</i>" if line.lstrip().startswith("#") else plain(line) for line in lines)
    return f'<pre class="wide">{"<br>".join(shown)}</pre>\n'


def _run(run: Run, details: Details, unit: Unit) -> str:
    figures = _run_figures(run, details, unit) if run.steps else ""
    return markup.section("The run", figures, *(f'<p class="quiet">{plain(note)}</p>\n' for note in run.notes))


def _run_figures(run: Run, details: Details, unit: Unit) -> str:
    modelled = details.step_time_s
    times = "Wall time of each update, measured"
    times += "; dotted: modelled, a time whose order deserves more trust than its seconds." if modelled else "."
    parts = [
        '<div class="halves">\n',
        markup.plot("loss", run_figures.losses(run), "loss of every step", "Loss of each update."),
        markup.plot(
            "step-times", run_figures.step_times(run, details.plan, modelled), "wall time of every step", times
        ),
        "</div>\n",
    ]
    observed = run_figures.peaks(run, unit)
    if observed is not None and run.ending is not None:
        caption = f"Observed: {plain(run.ending.peak_memory_source)}. Predicted: of the tensors, modelled."
        parts.append(markup.plot("peaks", observed, "predicted and observed peak", caption, "low"))
    return "".join(parts)


def _trade(details: Details, unit: Unit) -> str:
    return markup.section(
        "What memory is paid with",
        "<p>Each technique frees memory and pays with something else. Grey: without it; coloured: with it. A card "
        "compares two plans that differ in its technique and, where the search met such, in nothing else; the ladder "
        "below adds one technique to the other, each with the micro-batches that it then allows. All numbers are of "
        "this job, modelled.</p>\n",
        techniques.techniques(details, unit),
        _words(one.plan for one in (*details.ladder, *details.frontier)),
    )


def _words(plans: Iterable[Plan]) -> str:
    """What the words for recomputation in these plans mean."""
    found = " ".join(legend(plans))
    return f'<p class="quiet">{plain(found)}</p>\n' if found else ""


def _ladder(details: Details, unit: Unit) -> str:
    first, blocks = details.ladder[0].step_time_s, blocks_of(details.ladder)
    rows = [
        (
            f"<b>{plain(rung.name)}</b>" if rung.plan == details.plan else plain(rung.name),
            plain(short_line(rung.plan, blocks)),
            unit.text(rung.peak_allocated_bytes),
            unit.text(rung.peak_reserved_bytes),
            unit.text(rung.needed_bytes),
            "yes" if rung.fits else "no",
            duration(rung.step_time_s),
            f"{rung.step_time_s / first:.2f}" if first else "",
            _rate(rung.samples_per_s),
            plain(rung.pays_with),
        )
        for rung in details.ladder
    ]
    numbers = ("allocated", "reserved", "needed", "update", "relative", "samples/s")
    heads = ("rung", "plan", *numbers[:3], "fits", *numbers[3:], "pays with")
    kind = "rungs" if len(rows) > 2 else "low"
    seen = {name for rung in details.ladder for name in rung.by_category}
    return markup.section(
        "The ladder",
        "<p>One technique after the other, each with the fastest micro-batches that fit with it.</p>\n",
        markup.legend({name: colour for name, colour in COLOURS.items() if name in seen} | BESIDE),
        '<div class="side">\n',
        markup.plot("ladder", trades.rung_memory(details, unit), "memory that each rung needs", kind=kind),
        markup.plot("ladder-times", trades.rung_times(details), "time of an update on each rung", kind=kind),
        "</div>\n",
        markup.table(heads, rows, numbers),
        '<p class="quiet">Needed: reserved, context and margin. All modelled. Bold: the chosen plan.</p>\n',
    )


def _over_time(details: Details, unit: Unit) -> str:
    memory, at = details.memory, details.memory.peak_at
    traced = max((span.micro_batch for window in details.timeline for span in window.spans), default=0)
    where = f"{plain(at.phase)}, {plain(at.module or '(no module)')}, <code>{plain(at.op)}</code>"
    caption = [f"The peak of {unit.text(memory.peak_allocated_bytes)} allocated is in {where}."]
    if 0 < traced < details.plan.accumulation_steps:
        count = f"Of {details.plan.accumulation_steps} micro-batches {traced} are drawn"
        caption.append(f"{count}: the others repeat the second one.")
    if over_time.shows_budget(details):
        caption.append("The budget has to hold context and margin, too, which the curves leave out.")
    else:
        caption.append(f"The budget, {unit.text(details.budget_bytes)}, is far above the picture.")
    rows = [
        (
            plain(holder.category),
            unit.text(holder.num_bytes),
            str(holder.num_storages),
            f"<code>{plain(holder.op)}</code>{plain(f' of {holder.module}' if holder.module else '')}",
            plain(holder.phase),
        )
        for holder in memory.holders[:_HOLDERS]
    ]
    figure = over_time.memory_over_step(details, unit)
    return markup.section(
        "Memory over the step",
        markup.plot("memory", figure, "memory over the step by category", " ".join(caption), "tall"),
        "<h3>What holds most at the peak</h3>\n",
        markup.table(("category", "size", "number", "made by", "in"), rows, ("size", "number")),
    )


def _modules(details: Details, unit: Unit) -> str:
    seen = {name for categories in details.memory.by_module.values() for name in categories}
    caption = "At the peak. Click into a module, and on the bar at the top to come out again."
    return markup.section(
        "By module",
        markup.legend({name: colour for name, colour in COLOURS.items() if name in seen}),
        markup.plot(
            "modules", modules.by_module(details.memory, unit), "memory at the peak by module", caption, "tall"
        ),
    )


def _frontier(details: Details, unit: Unit) -> str:
    caption = "Plans that no other beats in both memory and time. What lies right of the budget does not fit. Modelled."
    second = "" if details.runner_up is None else f"<p>Runner-up: {plain(plan_line(details.runner_up))}.</p>\n"
    return markup.section(
        "Time against memory",
        markup.plot("frontier", trades.frontier(details, unit), "time of an update against memory", caption),
        second,
    )


def _reasons(details: Details) -> str:
    rows = [
        (plain(name), f'<span class="whole">{plain(_value(details.plan, name))}</span>', plain(why))
        for name, why in details.reasons.items()
    ]
    known = [(plain(topic), plain(text)) for topic, text in details.advice.items()]
    return markup.section(
        "Why this plan",
        markup.table(("field", "value", "reason"), rows),
        markup.sentences("Worth knowing", details.notes),
        markup.table(("about", "what this plan means for it"), known) if known else "",
    )


def _value(plan: Plan, name: str) -> str:
    value = getattr(plan, name, "")
    return (f"{len(value)} segments" if value else "nothing") if isinstance(value, tuple) else str(value)


def _fine_print(details: Details) -> str:
    memory = details.memory
    lists = (
        markup.sentences("What could be freed without another plan", memory.advice),
        markup.sentences("Assumed", memory.assumptions),
    )
    made_with = ", ".join(f"{plain(name)} {plain(version)}" for name, version in details.versions.items())
    foot = (
        f'<footer class="quiet">Memory is {plain(memory.label)}, time is a model of the device. {made_with}.</footer>\n'
    )
    return (markup.section("What the numbers rest on", *lists) if any(lists) else "") + foot
