"""Names the segments of a model: its blocks, every k-th, runs of them, or whatever matches.

Entry points: ``blocks``, ``every``, ``segments`` and ``match``, all reached as ``snugfit.checkpointing``. Nothing is
changed here; ``checkpointing`` applies them.
"""

import difflib
import fnmatch
import inspect
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from snugfit.errors import PlanError, warn
from snugfit.plans import Segment

_SIMILAR_SHARE = 0.125
"A repeated container is taken beside the largest if it holds at least this share of its parameters."

_IN_BETWEEN = ("_orig_mod", "_fsdp_wrapped_module")
"What torch's wrappers call the module inside of them, wherever they lie."
_IN_FRONT = (("module",), ("base_model", "model"))
"What DDP and peft call the model that they hold."


def blocks(model: nn.Module, policy: str = "full") -> tuple[Segment, ...]:
    """One segment per block of the model: children of containers that repeat one class (encoder and decoder both).

    Raises:
        PlanError: No container repeats a class.
    """
    return tuple(Segment((name,), policy) for chain in _chains(unwrapped(model)) for name in chain)


def every(model: nn.Module, k: int, policy: str = "full") -> tuple[Segment, ...]:
    """One segment per k-th block of each chain, counted from its first.

    Raises:
        PlanError: k below 1 or above the number of blocks of the longest chain.
    """
    chains = _chains(unwrapped(model))
    _check_range("k", k, max(map(len, chains)))
    return tuple(Segment((name,), policy) for chain in chains for name in chain[::k])


def segments(model: nn.Module, n: int | None = None, policy: str = "full") -> tuple[Segment, ...]:
    """Every chain of blocks cut into n runs of about the same length.

    Args:
        model: What is cut.
        n: Runs per chain; None means the square root of the chain's length, rounded, which keeps the fewest tensors
            when one run is recomputed at a time (Chen et al., arXiv 1604.06174).
        policy: Of each segment.

    Raises:
        PlanError: n below 1 or above the number of blocks of the shortest chain.
    """
    chains = _chains(unwrapped(model))
    if n is not None:
        _check_range("n", n, min(map(len, chains)))
    if n == 1:
        warn(
            "segments(model, 1) saves next to nothing: the recomputation of the one segment holds all of its tensors "
            "at once; pass more segments, or None for the square root of the number of blocks"
        )
    found = []
    for chain in chains:
        number = round(math.sqrt(len(chain))) if n is None else n
        cuts = [len(chain) * i // number for i in range(number + 1)]
        found += [Segment(chain[a:b], policy) for a, b in pairwise(cuts)]
    return tuple(found)


def match(
    model: nn.Module, what: str | type | Callable[[str, nn.Module], bool], policy: str = "full"
) -> tuple[Segment, ...]:
    """One segment per module that matches and lies in no other one that does: the outermost wins.

    Args:
        model: What is looked through.
        what: A pattern of names such as ``"*.attn"``, a class of modules, or ``(name, module)`` to bool.
        policy: Of each segment.

    Raises:
        PlanError: Nothing matches, or ``what`` is none of these.

    Example:
        >>> model = nn.ModuleDict({"attn": nn.Linear(2, 2), "mlp": nn.Linear(2, 2)})
        >>> [segment.modules for segment in match(model, "at*")]
        [('attn',)]
    """
    if isinstance(what, str):
        pattern = what
        wanted: Callable[[str, nn.Module], Any] = lambda name, _: fnmatch.fnmatchcase(name, pattern)  # noqa: E731
    elif isinstance(what, type):
        kind = what
        wanted = lambda _, module: isinstance(module, kind)  # noqa: E731
    elif callable(what) and _takes(what, "", model):
        wanted = what
    else:
        raise PlanError(
            "this cannot be matched",
            got=repr(what),
            expected="a pattern of names, a class, or a function (name, module) -> bool",
            hint='pass a pattern such as "*.attn"',
        )
    modules = {name: module for name, module in unwrapped(model).named_modules() if name}
    found = [name for name, module in modules.items() if wanted(name, module)]
    if not found:
        leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in modules if not name[-1].isdecimal()))
        near = similar(what, modules) if isinstance(what, str) else ()
        raise PlanError(
            "nothing matches" if not isinstance(what, str) else "a pattern matches no module",
            got=repr(what),
            expected=f"one of {len(modules)} names such as {list(modules)[-1] if modules else 'none at all'}"
            + (f"; they end with {', '.join(leaves[:8])}" if leaves else ""),
            hint=f"did you mean {' or '.join(near)}?" if near else 'a pattern is of the whole name, such as "*.attn"',
        )
    chosen = set(found)
    return tuple(Segment((name,), policy) for name in found if not any(outer in chosen for outer in _around(name)))


def _takes(function: Callable[..., Any], *args: Any) -> bool:
    try:
        inspect.signature(function).bind(*args)
    except TypeError:
        return False
    except ValueError:
        return True  # one of C, which does not say
    return True


def similar(wanted: str, names: Collection[str]) -> tuple[str, ...]:
    """What may have been meant by a name or a pattern that no module has, the likeliest first."""
    end = wanted.rpartition(".")[2].strip("*?")
    if "*" not in wanted and "?" not in wanted:
        inside = [name for name in names if end and name.endswith(f".{wanted}")]
        return tuple(inside[:3] or difflib.get_close_matches(wanted, names, n=3, cutoff=0.7))
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    return tuple(f'"*{leaf}"' for leaf in difflib.get_close_matches(end, ends, n=2))


def without_wrappers(name: str) -> str:
    """A module's name in the model that DDP, FSDP, peft or torch.compile have wrapped."""
    parts = [part for part in name.split(".") if part not in _IN_BETWEEN]
    for prefix in _IN_FRONT:
        if parts[: len(prefix)] == list(prefix):
            parts = parts[len(prefix) :]
    return ".".join(parts)


def _around(name: str) -> list[str]:
    """The names of the modules that a module lies in: ``a`` and ``a.b`` for ``a.b.c``."""
    parts = name.split(".")
    return [".".join(parts[:number]) for number in range(1, len(parts))]


def unwrapped(model: nn.Module) -> nn.Module:
    """The plain module inside of DDP.

    Raises:
        PlanError: The model is none.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(
            "there is no model to look through for segments",
            got=f"a {type(model).__name__}, {str(model)[:40]!r}",
            expected="a torch.nn.Module",
            hint="pass the model first: snugfit.checkpointing.apply(model, segments)",
        )
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def runs(module: nn.Module) -> bool:
    """Whether a module has a forward: a list of blocks is walked through, and never runs itself."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def _chains(model: nn.Module) -> list[tuple[str, ...]]:
    """The repeated containers worth recomputing, as the names of their children."""
    found = _containers(model, at_least=2)
    if not found:  # one block may be run again and again (ALBERT)
        least = _SIMILAR_SHARE * sum(parameter.numel() for parameter in model.parameters())
        found = [container for container in _containers(model, at_least=1) if 0 < least <= container.num_weights]
    if not found:
        raise PlanError(
            "the model has no repeated blocks",
            got=type(model).__name__,
            expected="an nn.ModuleList or nn.Sequential of at least two children of one class, or of one child with "
            "many of the weights",
            hint='name the modules yourself: snugfit.checkpointing.match(model, "*.attn"), --recompute "match:*.attn"',
        )
    largest = max(found, key=lambda container: container.num_weights)
    least = _SIMILAR_SHARE * max(largest.num_weights, 1)
    return [one.children for one in found if one.kind is largest.kind or one.num_weights >= least]


@dataclass(frozen=True, slots=True)
class _Container:
    """Modules of one class in an ``nn.ModuleList`` or ``nn.Sequential``."""

    name: str
    kind: type
    num_weights: int
    children: tuple[str, ...]


def _containers(model: nn.Module, at_least: int) -> list[_Container]:
    """The outermost containers of so many modules of one class."""
    found: list[_Container] = []
    for name, module in model.named_modules():
        kinds = {type(child) for child in module.children()}
        is_inside = any(name == other.name or name.startswith(f"{other.name}.") or not other.name for other in found)
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < at_least or len(kinds) != 1:
            continue
        if not all(map(runs, module)):  # a list of stages, each a list of blocks
            continue
        if not is_inside:
            prefix = f"{name}." if name else ""
            children = tuple(f"{prefix}{i}" for i, _ in module.named_children())
            size = sum(parameter.numel() for parameter in module.parameters())
            found.append(_Container(name, kinds.pop(), size, children))
    return found


def _check_range(name: str, value: int, limit: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
        raise PlanError(
            f"{name} does not fit the number of blocks",
            got=f"{name}={value!r}",
            expected=f"1 to {limit}",
            hint=f"pass {name}=1",
        )
