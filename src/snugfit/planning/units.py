"""The units of a model between which the planner chooses what to recompute, and the options that each of them has.

Entry points: ``named`` and ``options_of``. Units are repeated blocks, or the parts of a plain chain; alike are those of
one class and the same parameters, whose options are measured on one of them. What an option costs is ``probing``'s.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from snugfit.planning.chain import NOTHING
from snugfit.plans import Segment
from snugfit.training import segments

FULL, CHILDREN, OFFLOAD = "full", "each part", "offload"
KEEP_PRODUCTS, KEEP_LAST, KEEP_ATTENTION_LAST = "keep-matmul", "keep-last", "keep-attention-last"
ESSENTIAL = (NOTHING, FULL)
"Options that are worth a trace of their own on any device where too few alike units carry them all in one."

_FEW_UNITS = 16
"Below this number of units, those that hold a chain of blocks themselves are taken apart."
_MOST_OF_IT = 0.5
"Share of a unit's parameters from which the blocks inside of it stand for it."
_MOST_PARTS = 4
"Parts of a unit that are options of their own."


@dataclass(frozen=True, slots=True)
class Options:
    """What may be recomputed of one unit: name of each option to its segments, names relative to the unit."""

    segments: Mapping[str, tuple[Segment, ...]]

    def only(self, *names: str) -> "Options":
        """These options alone."""
        return Options({name: self.segments[name] for name in names})

    def of(self, unit: str, option: str) -> tuple[Segment, ...]:
        """The segments of an option of the unit with that name."""
        return tuple(
            Segment(tuple(".".join(part for part in (unit, name) if part) for name in segment.modules), segment.policy)
            for segment in self.segments[option]
        )


def named(model: nn.Module) -> tuple[str, ...]:
    """Fully qualified names of the model's units, none inside of another; empty where it has no parts to choose."""
    model = segments.unwrapped(model)
    names = list(_blocks(model, ""))
    if not names:
        return tuple(_parts_of_chain(model))
    while len(names) < _FEW_UNITS:
        finer = [inner for name in names for inner in (_blocks_inside(model, name) or [name])]
        if finer == names:
            break
        names = finer
    return tuple(names)


def alike(model: nn.Module, names: tuple[str, ...]) -> dict[str, Any]:
    """Unit to a key that is the same for units of one class with the same parameters."""
    modules = dict(segments.unwrapped(model).named_modules())
    return {name: _kind(modules[name]) for name in names}


def options_of(unit: nn.Module, *, offload: bool) -> Options:
    """The options of a unit, ``"nothing"`` first, then those that matter most.

    Args:
        unit: The module.
        offload: Whether keeping its saved tensors on the host is one.
    """
    found: dict[str, tuple[Segment, ...]] = {NOTHING: (), FULL: (Segment(("",)),)}
    found[KEEP_PRODUCTS] = (Segment(("",), KEEP_PRODUCTS),)
    parts = _parts(unit)
    for part in parts:
        found[part] = (Segment((part,)),)
    if len(parts) > 1:
        found[CHILDREN] = tuple(Segment((part,)) for part in parts)
    for policy in (KEEP_LAST, KEEP_ATTENTION_LAST):
        found[policy] = (Segment(("",), policy),)
    for part in parts:
        found[f"{part}, {KEEP_PRODUCTS}"] = (Segment((part,), KEEP_PRODUCTS),)
    if offload:
        found[OFFLOAD] = (Segment(("",), OFFLOAD),)
    return Options(found)


def _blocks(module: nn.Module, name: str) -> Iterator[str]:
    """The children of the outermost containers that hold nothing but modules made of modules."""
    children = list(module.named_children())
    is_container = isinstance(module, (nn.ModuleList, nn.Sequential))
    are_blocks = is_container and bool(children) and all(_is_block(child) for _, child in children)
    for child_name, child in children:
        full = f"{name}.{child_name}" if name else child_name
        if are_blocks:
            yield full
        else:
            yield from _blocks(child, full)


def _is_block(module: nn.Module) -> bool:
    has_parts = any(True for _ in module.children()) or isinstance(module, nn.RNNBase)
    return has_parts and segments.runs(module) and any(True for _ in module.parameters())


def _parts(unit: nn.Module) -> list[str]:
    """Children of a unit that hold modules or weights: attention, feed-forward, ..."""
    parts = [
        name
        for name, child in unit.named_children()
        if _is_block(child) and not isinstance(child, (nn.ModuleList, nn.ModuleDict))
    ]
    return parts if 0 < len(parts) <= _MOST_PARTS else []


def _parts_of_chain(model: nn.Module) -> Iterator[str]:
    """The parts of a model without repeated blocks: those of its largest nn.Sequential, or its children."""
    chains = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Sequential)]
    if chains:
        name, chain = max(chains, key=lambda found: sum(p.numel() for p in found[1].parameters()))
        yield from (f"{name}.{child}" if name else child for child, _ in chain.named_children())
    else:
        yield from (
            name
            for name, child in model.named_children()
            if any(True for _ in child.parameters()) and not isinstance(child, (nn.ModuleList, nn.ModuleDict))
        )


def _blocks_inside(model: nn.Module, name: str) -> list[str]:
    """The blocks that make up most of a unit; empty where there are none."""
    unit = model.get_submodule(name)
    found = list(_blocks(unit, name))
    held = sum(parameter.numel() for inner in found for parameter in model.get_submodule(inner).parameters())
    return found if held >= _MOST_OF_IT * sum(parameter.numel() for parameter in unit.parameters()) else []


def _kind(module: nn.Module) -> Any:
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())
    return type(module), shapes, module.extra_repr()
