"""What memory costs, drawn: the rungs of the ladder, and the frontier of time against memory.

Entry points: ``rung_memory``, ``rung_times`` and ``frontier``. The numbers are the search's.
"""

import math

from snugfit.page.details import Considered, Details
from snugfit.page.drawing import BESIDE, BLUE, COLOURS, INK, ORANGE, QUIET, Figure, Unit, axis, figure, plain
from snugfit.tables import plan_line

_FAR = 2.5
"A budget this many times above everything else is left out of a picture, which it would press flat."
_WIDEST = 3
"Where bars are cut off, in budgets: a batch that needs twenty of them would press all others flat."
_LARGE_RATIO = 8
"Of the largest and the smallest memory beyond which its axis is logarithmic."
_CLOSE = {"l": 8, "r": 8, "t": 24, "b": 44}


def rung_memory(details: Details, unit: Unit) -> Figure:
    """What each rung needs of the budget, by category at its peak, and what is held beside."""
    names = _names(details.ladder)
    held = {category: [rung.by_category.get(category, 0) for rung in details.ladder] for category in COLOURS}
    held |= {
        "unused": [rung.peak_reserved_bytes - rung.peak_allocated_bytes for rung in details.ladder],
        "context": [rung.context_bytes for rung in details.ladder],
        "margin": [rung.margin_bytes for rung in details.ladder],
    }
    data: list[Figure] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "x": [unit.of(size) for size in row],
            "y": names,
            "marker": {"color": (COLOURS | BESIDE)[name], "line": {"color": "white", "width": 0.5}},
            "hovertemplate": f"{name} %{{x{unit.hover}<extra>%{{y}}</extra>",
        }
        for name, row in held.items()
        if any(row)
    ]
    highest = max(rung.needed_bytes for rung in details.ladder)
    right, shapes, words = _budget(details, unit, highest)
    right = min(
        right, max(_WIDEST * unit.of(details.budget_bytes), unit.of(min(r.needed_bytes for r in details.ladder)))
    )
    totals = [
        {
            "text": _total(rung, unit, right),
            "align": "left",
            "x": min(unit.of(rung.needed_bytes), right),
            "y": name,
            "xanchor": "left",
            "xshift": 4,
            "showarrow": False,
            "bgcolor": "rgba(255,255,255,0.85)",
        }
        for name, rung in zip(names, details.ladder, strict=True)
    ]
    return figure(
        data,
        barmode="stack",
        bargap=0.35,
        showlegend=False,
        margin=_CLOSE,
        xaxis=axis(f"needed, {unit.name}", range=[0, right], domain=[0, 0.76], fixedrange=True),
        yaxis=_rungs(),
        shapes=shapes,
        annotations=[*totals, *words],
    )


def rung_times(details: Details) -> Figure:
    """The modelled time of one update on each rung."""
    first = details.ladder[0].step_time_s
    times = [rung.step_time_s for rung in details.ladder]
    bar = {
        "type": "bar",
        "orientation": "h",
        "x": times,
        "y": _names(details.ladder),
        "marker": {"color": [BLUE if rung.fits else "#9fb8c8" for rung in details.ladder]},
        "text": [f"{seconds:.3g} s" + (f", {seconds / first:.2f} x" if first else "") for seconds in times],
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": "%{y}: %{x:.4g} s<extra></extra>",
    }
    return figure(
        [bar],
        bargap=0.35,
        margin=_CLOSE,
        xaxis=axis("seconds of an update, modelled", fixedrange=True, range=[0, 1.6 * max(times)]),
        yaxis=_rungs(),
    )


def frontier(details: Details, unit: Unit) -> Figure:
    """Time against memory: plans that no other beats in both, the chosen one, the runner-up, and the budget."""
    points = sorted(details.frontier, key=lambda one: one.needed_bytes)
    line = {"color": QUIET, "width": 1.2, "shape": "hv"}
    marker = {"size": 7, "color": QUIET}
    data = [{**_points("frontier", points, unit), "mode": "lines+markers", "line": line, "marker": marker}]
    rungs = [rung for rung in details.ladder if rung.plan not in {one.plan for one in points}]
    if rungs:
        marker = {"size": 8, "color": "white", "line": {"color": QUIET, "width": 1.5}}
        data.append({**_points("other rungs", rungs, unit), "marker": marker})
    for name, plan, symbol, colour, size in (
        ("chosen", details.plan, "star", ORANGE, 17),
        ("runner-up", details.runner_up, "diamond", BLUE, 12),
    ):
        one = None if plan is None else details.considered(plan)
        if one is not None:
            marker = {"size": size, "symbol": symbol, "color": colour, "line": {"color": "white", "width": 1}}
            data.append({**_points(name, [one], unit), "marker": marker})
    needed = [one.needed_bytes for one in (*points, *rungs)]
    right, shapes, words = _budget(details, unit, max(needed))
    horizontal = _memory_axis(unit, min(needed), right)
    for word in words:
        word["x"] = math.log10(word["x"]) if horizontal.get("type") == "log" else word["x"]
    return figure(
        data,
        xaxis=horizontal,
        yaxis=axis("seconds of an update, modelled", rangemode="tozero"),
        shapes=shapes,
        annotations=words,
    )


def _budget(details: Details, unit: Unit, highest: int) -> tuple[float, list[Figure], list[Figure]]:
    """Where the axis of memory ends, the budget's line and its name; no line where it is far away."""
    if details.budget_bytes > _FAR * highest:
        return unit.of(highest), [], []
    at = unit.of(details.budget_bytes)
    line = {"color": ORANGE, "width": 2, "dash": "dash"}
    shape = {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper", "line": line}
    name = {"text": f"budget {unit.text(details.budget_bytes)}", "x": at, "y": 1, "yref": "paper"}
    font = {"size": 11, "color": INK}
    return (
        max(at, unit.of(highest)),
        [shape],
        [{**name, "yanchor": "bottom", "showarrow": False, "font": font}],
    )


def _total(rung: Considered, unit: Unit, right: float) -> str:
    beyond = " &#8594;" if unit.of(rung.needed_bytes) > right else ""
    return f"<b>{unit.text(rung.needed_bytes)}</b>{beyond}<br>{'fits' if rung.fits else 'does not fit'}"


def _memory_axis(unit: Unit, lowest: int, right: float) -> Figure:
    title = f"needed, {unit.name}"
    if right <= _LARGE_RATIO * unit.of(lowest):
        return axis(title, range=[0, 1.08 * right])
    ends = math.log10(0.8 * unit.of(lowest)), math.log10(1.2 * right)
    powers = range(math.floor(ends[0]), math.ceil(ends[1]) + 1)
    ticks = [digit * 10**power for power in powers for digit in (1, 2, 5)]  # plotly's own would say 2 for 20
    return axis(
        f"{title} (logarithmic)", type="log", range=list(ends), tickvals=ticks, ticktext=[f"{at:g}" for at in ticks]
    )


def _points(name: str, considered: list[Considered], unit: Unit) -> Figure:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [unit.of(one.needed_bytes) for one in considered],
        "y": [one.step_time_s for one in considered],
        "text": [plain(plan_line(one.plan)) for one in considered],
        "customdata": ["fits" if one.fits else "does not fit" for one in considered],
        "hovertemplate": f"%{{text}}<br>needed %{{x{unit.hover}, %{{customdata}}<br>%{{y:.4g}} s<extra>{name}</extra>",
    }


def _names(rungs: tuple[Considered, ...]) -> list[str]:
    """Names on two lines at most, and each once: plotly puts equal ones together."""
    names: list[str] = []
    for rung in rungs:
        name = plain(rung.name).replace(", ", ",<br>")
        name = name if "<br>" in name or len(name) < 16 else "<br>".join(name.rsplit(" ", 1))
        names.append(name + " " * names.count(name))
    return names


def _rungs() -> Figure:
    return {"autorange": "reversed", "automargin": True, "ticksuffix": "  ", "showgrid": False, "fixedrange": True}
