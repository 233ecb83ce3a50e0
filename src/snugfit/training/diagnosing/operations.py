"""What torch's operations are called by those who write them, and which of them mean what they put in.

Entry points: ``name`` and ``leaves``. What an operation did to a value is ``probes``'s.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.overrides import resolve_name

UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"Their values are whatever was in memory."
FILLS = {
    "full",
    "full_like",
    "new_full",
    "fill",
    "masked_fill",
    "index_fill",
    "where",
    "tensor",
    "as_tensor",
    "setitem",
}
"A number that these put in is meant."
_PLAIN = {
    "truediv": "div",
    "rdiv": "div",
    "rtruediv": "div",
    "rsub": "sub",
    "rmul": "mul",
    "radd": "add",
    "rpow": "pow",
}


def name(func: Any) -> str:
    """What users call an operation: ``add`` for ``torch.Tensor.__iadd__``."""
    parts = (resolve_name(func) or getattr(func, "__name__", "operation")).split(".")
    plain = (parts[-2] if parts[-1] == "__get__" else parts[-1]).strip("_")
    return str(_PLAIN.get(plain, plain))


def leaves(value: Any) -> Iterator[Any]:
    """Tensors and numbers among arguments or results."""
    if isinstance(value, (Tensor, float, int)) and not isinstance(value, bool):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from leaves(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from leaves(one)
