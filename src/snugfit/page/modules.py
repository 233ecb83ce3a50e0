"""Who holds the peak, drawn: the tree of modules, and in each of them the categories.

Entry point: ``by_module``. Neighbours that hold about the same, the blocks of a model, are drawn as one box. The
sums are ``memory/reporting/attribution``'s.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from snugfit.memory.reports import MemoryReport
from snugfit.page.drawing import COLOURS, Figure, Unit, figure, plain

_WHOLE, _MODULE = "the peak", "#eef0f2"
_LIKENESS = 0.02
"Share of a block by which another may differ and still be drawn with it."
_LEAST_SHARE = 1 / 1000
"Share of the peak below which what a module holds is drawn together with its like."


@dataclass(frozen=True, slots=True)
class _Node:
    """A module with what it holds itself, by category, and the modules in it."""

    name: str = ""
    own: dict[str, int] = field(default_factory=dict)
    inner: dict[str, "_Node"] = field(default_factory=dict)
    count: int = 1
    "Modules that are drawn as this one."

    def by_category(self) -> dict[str, int]:
        return _sum([self.own, *(node.by_category() for node in self.inner.values())])

    def total(self) -> int:
        return sum(self.by_category().values())


def by_module(memory: MemoryReport, unit: Unit) -> Figure:
    """A treemap: modules in modules, then categories; a click goes into a module, one on the bar at the top out."""
    boxes = _Boxes(unit, max(1, int(memory.peak_allocated_bytes * _LEAST_SHARE)))
    boxes.add(_tidied(_tree(memory.by_module)))
    trace = {
        "type": "treemap",
        "ids": boxes.ids,
        "labels": boxes.labels,
        "parents": boxes.parents,
        "values": boxes.values,
        "branchvalues": "total",
        "marker": {
            "colors": boxes.colours,
            "line": {"width": 1, "color": "white"},
            "pad": {"t": 18, "l": 3, "r": 3, "b": 3},
        },
        "texttemplate": "%{label} %{customdata}",
        "customdata": boxes.texts,
        "hovertext": boxes.hovers,
        "hovertemplate": "%{hovertext}<br>%{customdata}, %{percentRoot:.1%} of the peak<extra></extra>",
        "pathbar": {"thickness": 22},
        "tiling": {"pad": 1},
    }
    return figure([trace], margin={"l": 4, "r": 4, "t": 30, "b": 4}, uniformtext={"minsize": 9, "mode": "hide"})


def _tree(held: Mapping[str, Mapping[str, int]]) -> _Node:
    root = _Node(_WHOLE)
    for module, categories in held.items():
        node = root
        for part in filter(None, module.split(".")):
            node = node.inner.setdefault(part, _Node(part))
        node.own.update(_sum([node.own, categories]))
    return root


def _tidied(node: _Node) -> _Node:
    """The same tree with fewer boxes: neighbours that are alike in one, and a module that only wraps one with it."""
    inner: list[_Node] = []
    numbered = [child for child in node.inner.values() if child.name.isdigit()]
    for child in sorted(numbered, key=lambda child: int(child.name)):
        if inner and _are_alike(inner[-1], child):
            inner[-1] = _together(inner[-1], child)
        else:
            inner.append(child)
    inner += [child for child in node.inner.values() if not child.name.isdigit()]
    inner = [_tidied(child) for child in inner]
    if node.own or len(inner) != 1:
        return replace(node, inner={child.name: child for child in inner})
    (only,) = inner
    return only if node.name == _WHOLE else replace(only, name=f"{node.name}.{only.name}")


def _are_alike(run: _Node, node: _Node) -> bool:
    """Whether a module holds what each of a run of modules does, but for a little (rounding, the odd tail)."""
    here, there = node.by_category(), run.by_category()
    allowed = _LIKENESS * node.total()
    return all(abs(here.get(name, 0) - there.get(name, 0) / run.count) <= allowed for name in {*here, *there})


def _together(run: _Node, node: _Node) -> _Node:
    """A run of modules and the next one, added up part by part."""
    inner = dict(run.inner)
    for name, child in node.inner.items():
        inner[name] = _together(inner[name], child) if name in inner else child
    name = run.name if run.name == node.name else f"{run.name.partition(' ')[0]} to {node.name}"
    return _Node(name, _sum([run.own, node.own]), inner, run.count + node.count)


def _sum(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for part in parts:
        for category, num_bytes in part.items():
            totals[category] = totals.get(category, 0) + num_bytes
    return totals


class _Boxes:
    """The boxes of a treemap so far, as the parallel lists that plotly wants."""

    def __init__(self, unit: Unit, least_bytes: int) -> None:
        self._unit = unit
        self._least_bytes = least_bytes
        self.ids: list[str] = []
        self.labels: list[str] = []
        self.parents: list[str] = []
        self.values: list[int] = []
        self.colours: list[str] = []
        self.texts: list[str] = []
        self.hovers: list[str] = []

    def add(self, node: _Node, parent: str = "", above: str = "") -> None:
        """Draw a module, the modules in it, and what it holds itself; what is too small goes into one box.

        Args:
            node: The module.
            parent: Identity of the box that it lies in; empty for the outermost.
            above: Name of that box.
        """
        path = f"{above}.{node.name}" if above and above != _WHOLE else node.name
        if len(node.own) == 1 and not node.inner:
            self._box(node.name, path, parent, node.own, COLOURS[next(iter(node.own))])
            return
        box = self._box(node.name, path, parent, node.by_category(), _MODULE)
        small = []
        for child in node.inner.values():
            if child.total() >= self._least_bytes:
                self.add(child, box, path)
            else:
                small.append(child.by_category())
        for category, num_bytes in node.own.items():
            if num_bytes >= self._least_bytes:
                self._box(category, f"{path}: {category}", box, {category: num_bytes}, COLOURS[category])
            else:
                small.append({category: num_bytes})
        if small:
            self._box("small parts", f"{path}: small parts", box, _sum(small), COLOURS["other"])

    def _box(self, label: str, path: str, parent: str, held: Mapping[str, int], colour: str) -> str:
        """Draw one box, and return its identity."""
        identity = str(len(self.ids) + 1)
        num_bytes = sum(held.values())
        parts = [
            f"<br>{category} {self._unit.text(size)}" for category, size in sorted(held.items(), key=lambda x: -x[1])
        ]
        self.ids.append(identity)
        self.labels.append(plain(label))
        self.parents.append(parent)
        self.values.append(num_bytes)
        self.colours.append(colour)
        self.texts.append(self._unit.text(num_bytes))
        self.hovers.append(f"<b>{plain(path)}</b>{''.join(parts) if len(parts) > 1 else ''}")
        return identity
