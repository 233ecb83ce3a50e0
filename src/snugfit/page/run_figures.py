"""How a run went, drawn: its loss, the time of its steps, and the observed peak beside the predicted one.

Entry points: ``losses``, ``step_times`` and ``peaks``. What a run leaves behind is ``run_folder``'s.
"""

from collections.abc import Callable, Sequence

from snugfit.page.drawing import BLUE, ORANGE, QUIET, Figure, Unit, axis, figure
from snugfit.page.run_folder import Run, Step
from snugfit.plans import Plan

_POINTS = 2000
"Steps of a long run that are drawn."
_FEW = 60


def losses(run: Run) -> Figure:
    """The loss of every step; skipped ones are marked."""
    shown = _thinned(run.steps, lambda step: 0.0 if step.loss is None else step.loss)
    data = [
        {
            "type": "scatter",
            "name": "loss",
            "x": [step.step for step in shown],
            "y": [step.loss for step in shown],
            "mode": _mode(shown),
            "line": {"color": BLUE, "width": 2},
            "marker": {"size": 5},
            "hovertemplate": "step %{x}: %{y:.5g}<extra></extra>",
        }
    ]
    skipped = [step for step in run.steps if step.skipped][:_POINTS]
    if skipped:
        data.append(
            {
                "type": "scatter",
                "name": "skipped",
                "x": [step.step for step in skipped],
                "y": [step.loss for step in skipped],
                "mode": "markers",
                "marker": {"symbol": "x", "size": 9, "color": ORANGE},
                "text": [step.reason or "" for step in skipped],
                "hovertemplate": "step %{x} skipped: %{text}<extra></extra>",
            }
        )
    return figure(data, xaxis=axis("step"), yaxis=axis("loss"))


def step_times(run: Run, plan: Plan, modelled_s: float | None) -> Figure:
    """The wall time of every step, and what was modelled for it."""
    timed = _thinned([step for step in run.steps if step.samples_per_s > 0], lambda step: step.samples_per_s)
    data: list[Figure] = [
        {
            "type": "scatter",
            "name": "measured",
            "x": [step.step for step in timed],
            "y": [plan.samples_per_rank / step.samples_per_s for step in timed],
            "mode": _mode(timed),
            "line": {"color": BLUE, "width": 2},
            "marker": {"size": 5},
            "hovertemplate": "step %{x}: %{y:.4g} s<extra></extra>",
        }
    ]
    if modelled_s is not None and timed:
        data.append(
            {
                "type": "scatter",
                "name": "modelled",
                "x": [timed[0].step, timed[-1].step],
                "y": [modelled_s] * 2,
                "mode": "lines",
                "line": {"color": QUIET, "dash": "dot", "width": 2},
                "hovertemplate": "modelled %{y:.4g} s<extra></extra>",
            }
        )
    return figure(data, xaxis=axis("step"), yaxis=axis("seconds", rangemode="tozero"))


def peaks(run: Run, unit: Unit) -> Figure | None:
    """The peak that was predicted beside the one that was observed; None where either is not known."""
    ending = run.ending
    if ending is None or ending.predicted is None or ending.peak_memory_bytes is None:
        return None
    values = {
        "observed": ending.peak_memory_bytes,
        "predicted<br>reserved": ending.predicted.peak_reserved_bytes,
        "predicted<br>allocated": ending.predicted.peak_allocated_bytes,
    }
    bar = {
        "type": "bar",
        "orientation": "h",
        "x": [unit.of(num_bytes) for num_bytes in values.values()],
        "y": list(values),
        "text": [unit.text(num_bytes) for num_bytes in values.values()],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": [ORANGE, BLUE, "#9fb8c8"]},
        "hovertemplate": f"%{{y}}: %{{x{unit.hover}<extra></extra>",
    }
    right = 1.35 * max(values.values())
    names = {"autorange": "reversed", "automargin": True, "ticksuffix": "  ", "fixedrange": True}
    return figure([bar], bargap=0.4, xaxis=axis(unit.name, range=[0, unit.of(int(right))]), yaxis=names)


def _thinned(steps: Sequence[Step], height: Callable[[Step], float]) -> Sequence[Step]:
    """The steps of a short run; of a long one the highest and the lowest of each of many equal parts."""
    if len(steps) <= _POINTS:
        return steps
    length = -(-2 * len(steps) // _POINTS)
    parts = (steps[start : start + length] for start in range(0, len(steps), length))
    ends = ({part.index(pick(part, key=height)) for pick in (min, max)} for part in map(list, parts))
    return [steps[number * length + at] for number, found in enumerate(ends) for at in sorted(found)]


def _mode(steps: Sequence[Step]) -> str:
    return "lines" if len(steps) > _FEW else "lines+markers"
