"""What Python code stores beside its result, noticed and taken back: lists that tensors are appended to, and the like.

Entry point: ``Reached``. Followed are lists, dicts, sets and deques that a function gets at by what it encloses, by
names of its module and by attributes of its modules; left out are objects of other classes.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from snugfit.memory import torch_compiler

_MOST = 5000
"Objects that are looked at; a registry of a library may lead to all of it."
_LIBRARIES = ("torch", "transformers", "diffusers", "numpy")
"Whose functions keep nothing of a user's tensors."
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)


class Reached:
    """The containers that some objects lead to, with what they hold now.

    Args:
        roots: Functions, modules and whatever they are given.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self._before = [(container, _copy(container)) for container in _containers(roots)]

    def take_back(self) -> bool:
        """Put back what the containers held; whether tensors had been stored in them or taken out of them."""
        is_changed = False
        for container, held in self._before:
            now, then = ({id(entry): entry for entry in _entries(one)} for one in (container, held))
            apart = [*(now[i] for i in now.keys() - then.keys()), *(then[i] for i in then.keys() - now.keys())]
            if any(map(_holds_tensor, apart)):
                is_changed = True
                _restore(container, held)
        return is_changed


def _containers(roots: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    waiting, seen = deque(roots), dict[int, Any]()
    while waiting and len(seen) < _MOST:
        one = waiting.popleft()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, (list, dict, set, deque)):
            found.append(one)
            waiting.extend(_entries(one)[:_MOST])
        elif isinstance(one, (tuple, frozenset)):
            waiting.extend(one)
        else:
            waiting.extend(_led_to(one))
    return found


def _led_to(one: Any) -> Iterator[Any]:
    """What a function or module gets at."""
    if isinstance(one, MethodType):
        yield from (one.__self__, one.__func__)
    elif isinstance(one, nn.Module):
        own = one.__dict__
        yield from (value for name, value in own.items() if name not in _OF_EVERY_MODULE)
        yield from own["_modules"].values()
        yield type(one).forward
    elif isinstance(one, FunctionType) and one.__module__.partition(".")[0] not in _LIBRARIES:
        yield from (cell.cell_contents for cell in one.__closure__ or () if _is_filled(cell))
        yield from one.__defaults__ or ()
        yield from (one.__globals__[name] for name in _names(one.__code__) if name in one.__globals__)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _entries(container: Any) -> Sequence[Any]:
    return list(container.values() if isinstance(container, dict) else container)


def _copy(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in torch_compiler.flattened(value)[0])


def _restore(container: Any, held: Any) -> None:
    container.clear()
    container.update(held) if isinstance(container, (dict, set)) else container.extend(held)
