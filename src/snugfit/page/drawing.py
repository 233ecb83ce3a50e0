"""What all figures of a page share: colours, units, layout, and text that cannot be taken for markup.

Entry points: ``COLOURS``, ``Unit``, ``figure`` and ``plain``. A figure is a dictionary as plotly.js takes it, so that
nothing of plotly is imported to make one.
"""

import html
from dataclasses import dataclass
from typing import Any

from snugfit import sizes

COLOURS = {
    "parameter": "#332288",
    "buffer": "#882255",
    "gradient": "#88CCEE",
    "optimizer": "#44AA99",
    "saved": "#DDCC77",
    "temporary": "#CC6677",
    "autocast": "#AA4499",
    "workspace": "#999933",
    "input": "#117733",
    "other": "#BBBBBB",
}
"Category to colour: the muted scheme of Paul Tol, told apart with every kind of colour blindness."

BESIDE = {"unused": "#D9D9D9", "context": "#A6A6A6", "margin": "#E9E9E9"}
"What a budget must hold beside allocated bytes."

INK, QUIET, GRID, BLUE, ORANGE = "#1b1f24", "#5f6770", "#e3e6ea", "#0072B2", "#D55E00"
_LARGE = 1000
PHASES = {"forward": "#f1f5fa", "backward": "#fbf4ec", "optimizer": "#f1f6f0"}

Figure = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of a page's sizes: GiB, or MiB where everything is small."""

    name: str
    num_bytes: int

    @classmethod
    def for_bytes(cls, num_bytes: int) -> "Unit":
        """The unit in which a size has a digit before the point."""
        return cls("GiB", sizes.GIB) if num_bytes >= sizes.GIB else cls("MiB", sizes.MIB)

    def of(self, num_bytes: int) -> float:
        """A size as a number of this unit, exact."""
        return num_bytes / self.num_bytes

    def rounded(self, num_bytes: int) -> float:
        """The same with as many digits as a curve needs."""
        return round(num_bytes / self.num_bytes, 5)

    def text(self, num_bytes: int) -> str:
        """A size for people, in this unit."""
        value = num_bytes / self.num_bytes
        return f"{value:,.2f} {self.name}" if value < _LARGE else f"{value:,.0f} {self.name}"

    @property
    def hover(self) -> str:
        """How plotly shows a value of an axis in this unit."""
        return f":,.2f}} {self.name}"


def plain(text: str) -> str:
    """Text as text, also where plotly or a browser would read markup in it."""
    return html.escape(text)


def figure(data: list[Figure], **layout: Any) -> Figure:
    """A figure in the page's style."""
    shared = {
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": INK},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "margin": {"l": 56, "r": 16, "t": 24, "b": 44},
        "hoverlabel": {"bgcolor": "white", "bordercolor": QUIET, "font": {"color": INK}},
        "legend": {"orientation": "h", "x": 0, "y": -0.16, "yanchor": "top", "font": {"size": 11}},
    }
    return {"data": data, "layout": {**shared, **layout}}


def axis(title: str, **values: Any) -> Figure:
    """An axis in the page's style."""
    return {
        "title": {"text": title, "font": {"color": QUIET}, "standoff": 8},
        "gridcolor": GRID,
        "linecolor": QUIET,
        "zeroline": False,
        "automargin": True,
        **values,
    }
