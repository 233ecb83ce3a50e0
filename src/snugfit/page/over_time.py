"""Memory over the step, drawn: categories piled up, what is reserved, the budget, the phases, and the peak.

Entry point: ``memory_over_step``. The numbers are ``memory/reporting/timeline``'s.
"""

from snugfit.memory.reporting.timeline import WindowTimeline
from snugfit.page.details import Details
from snugfit.page.drawing import COLOURS, INK, ORANGE, PHASES, QUIET, Figure, Unit, axis, figure, plain

_FAR = 2.5
"A budget this many times above the peak is left out of the picture, which it would press flat."
_NARROW = 0.1
"Share of a window below which a phase has no room for its name."
_HOLDERS = 4


def memory_over_step(details: Details, unit: Unit) -> Figure:
    """Every window as a picture of its own, chosen by a button; the one with the peak comes first into view."""
    windows = details.timeline
    seen = shown_window(details)
    data: list[Figure] = []
    owners: list[int] = []
    for window in windows:
        traces = _traces(window, details, unit)
        data += [{**trace, "visible": window.window == seen} for trace in traces]
        owners += [window.window] * len(traces)
    layouts = {window.window: _layout(window) for window in windows}
    buttons = [
        {
            "label": _name(window, windows),
            "method": "update",
            "args": [{"visible": [owner == window.window for owner in owners]}, layouts[window.window]],
        }
        for window in windows
    ]
    menu = {
        "type": "buttons",
        "direction": "right",
        "x": 0,
        "xanchor": "left",
        "y": 1.02,
        "yanchor": "bottom",
        "active": [window.window for window in windows].index(seen),
        "buttons": buttons,
        "font": {"size": 11},
        "pad": {"b": 14},
    }
    return figure(
        data,
        hovermode="x unified",
        updatemenus=[menu] if len(windows) > 1 else [],
        margin={"l": 56, "r": 16, "t": 72, "b": 44},
        yaxis=axis(unit.name, range=[0, unit.of(_top(details))], fixedrange=False),
        **layouts[seen],
    )


def shown_window(details: Details) -> int:
    """The window that comes first into view: the last that reaches the peak."""
    peak = details.memory.peak_allocated_bytes
    return max(window.window for window in details.timeline if window.allocated_bytes[window.peak] == peak)


def shows_budget(details: Details) -> bool:
    """Whether the budget is near enough to be drawn."""
    return details.budget_bytes <= _FAR * details.memory.peak_reserved_bytes


def _traces(window: WindowTimeline, details: Details, unit: Unit) -> list[Figure]:
    x, _ = _clock(window)
    allocated = window.allocated_bytes
    traces: list[Figure] = [
        {
            "type": "scatter",
            "name": category,
            "x": x,
            "y": [unit.rounded(num_bytes) for num_bytes in row],
            "stackgroup": f"window {window.window}",
            "mode": "lines",
            "line": {"shape": "hv", "width": 0.4, "color": COLOURS[category]},
            "fillcolor": COLOURS[category],
            "hovertemplate": f"%{{y{unit.hover}",
        }
        for category, row in window.by_category.items()
    ]
    phase = _phase_of_moments(window)
    traces.append(
        {
            "type": "scatter",
            "name": "allocated",
            "x": x,
            "y": [unit.rounded(num_bytes) for num_bytes in allocated],
            "mode": "lines",
            "line": {"shape": "hv", "width": 1, "color": INK},
            "customdata": phase,
            "hovertemplate": f"%{{y{unit.hover}, %{{customdata}}",
        }
    )
    if window.reserved_bytes:
        traces.append(
            {
                "type": "scatter",
                "name": "reserved",
                "x": x,
                "y": [unit.rounded(num_bytes) for num_bytes in window.reserved_bytes],
                "mode": "lines",
                "line": {"shape": "hv", "width": 1.6, "color": QUIET, "dash": "dot"},
                "hovertemplate": f"%{{y{unit.hover}",
            }
        )
    if shows_budget(details):
        traces.append(
            {
                "type": "scatter",
                "name": "budget",
                "x": [x[0], x[-1]],
                "y": [unit.of(details.budget_bytes)] * 2,
                "mode": "lines",
                "line": {"width": 2, "color": ORANGE, "dash": "dash"},
                "hovertemplate": f"%{{y{unit.hover}",
            }
        )
    traces.append(_peak(window, details, unit))
    return traces


def _peak(window: WindowTimeline, details: Details, unit: Unit) -> Figure:
    x, _ = _clock(window)
    at, height = x[window.peak], window.allocated_bytes[window.peak]
    is_highest = height == details.memory.peak_allocated_bytes
    is_left = at <= x[-1] * 0.6
    return {
        "type": "scatter",
        "name": "peak" if is_highest else "peak of this window",
        "x": [at],
        "y": [unit.of(height)],
        "mode": "markers+text",
        "marker": {"symbol": "diamond", "size": 11, "color": ORANGE, "line": {"color": "white", "width": 1.5}},
        "text": [f"<b>peak {unit.text(height)}</b>"],
        "textposition": "top right" if is_left else "top left",
        "cliponaxis": False,
        "hovertemplate": f"%{{y{unit.hover}{'' if not is_highest else _holders(details, unit)}<extra></extra>",
    }


def _holders(details: Details, unit: Unit) -> str:
    """Where the peak is and what holds most of it, one to a line."""
    memory = details.memory
    at = memory.peak_at
    lines = [f", in {plain(at.phase)}, {plain(at.module or '(no module)')}, {plain(at.op)}"]
    for holder in memory.holders[:_HOLDERS]:
        where = f" of {plain(holder.module)}" if holder.module else ""
        lines.append(f"  {unit.text(holder.num_bytes)} {holder.category}: {plain(holder.op)}{where}")
    return "<br>".join(lines)


def _layout(window: WindowTimeline) -> Figure:
    """What changes with the window: the axis, the phases behind the curves and their names."""
    x, title = _clock(window)
    shapes, names = [], []
    for span in window.spans:
        begun, ended = x[span.start], x[span.end]
        shapes.append(
            {
                "type": "rect",
                "xref": "x",
                "yref": "paper",
                "x0": begun,
                "x1": ended,
                "y0": 0,
                "y1": 1,
                "layer": "below",
                "line": {"width": 0.5, "color": "white"},
                "fillcolor": PHASES.get(span.phase, "white"),
            }
        )
        if ended - begun >= _NARROW * x[-1]:
            names.append(
                {
                    "text": _span_name(span.phase, span.micro_batch),
                    "x": (begun + ended) / 2,
                    "y": 1,
                    "yref": "paper",
                    "yanchor": "bottom",
                    "showarrow": False,
                    "font": {"size": 10, "color": QUIET},
                }
            )
    return {
        "shapes": shapes,
        "annotations": names,
        "xaxis": axis(title, range=[0, x[-1]], showgrid=False, hoverformat=".2f"),
    }


def _clock(window: WindowTimeline) -> tuple[list[float], str]:
    """The moments of a window on the axis, and what the axis says."""
    if not window.seconds or not window.seconds[-1]:
        return list(window.moments), "allocations and releases since the window began"
    if window.seconds[-1] >= 1:
        return [round(seconds, 6) for seconds in window.seconds], "seconds since the window began, modelled"
    return [round(1000 * seconds, 5) for seconds in window.seconds], "milliseconds since the window began, modelled"


def _phase_of_moments(window: WindowTimeline) -> list[str]:
    names = [""] * len(window.moments)
    for span in window.spans:
        names[span.start : span.end + 1] = [_span_name(span.phase, span.micro_batch)] * (span.end + 1 - span.start)
    return names


def _span_name(phase: str, micro_batch: int) -> str:
    return plain(phase if phase == "optimizer" or not micro_batch else f"{phase} {micro_batch}")


def _name(window: WindowTimeline, windows: tuple[WindowTimeline, ...]) -> str:
    if window is windows[-1]:
        return f"window {window.window}: every further one"
    return f"window {window.window}: the first" if window is windows[0] else f"window {window.window}"


def _top(details: Details) -> int:
    highest = max(details.memory.peak_reserved_bytes, details.memory.peak_allocated_bytes)
    return int(1.12 * (max(highest, details.budget_bytes) if shows_budget(details) else highest))
