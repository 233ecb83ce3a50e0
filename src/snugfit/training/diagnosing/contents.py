"""Whether what a file of a window holds is what a window is made of: kinds, shapes, ranges.

Entry points: ``fault`` and ``NAMES``. Reading and writing the file is ``saved_window``'s; whether the window is one of
the job is too.
"""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from snugfit.plans import PRECISIONS

PLAIN = (int, float, bool, str, type(None))
"What a micro-batch may hold beside tensors, dict, list and tuple."
_KEYS_OF_NUMPY = 624


def fault(content: dict[Any, Any]) -> str:
    """What is wrong with what a file holds, the first thing only; an empty string if nothing is."""
    for name, rule in _RULES.items():
        if name not in content:
            return f"no {name}"
        said = rule(content[name])
        if said:
            return f"{name}: {said}"
    if len(content["micro_batches"]) != len(content["counts"]):
        return f"{len(content['micro_batches'])} micro-batches, {len(content['counts'])} counts"
    return ""


def _micro_batches(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return f"{_kind(value)}, where a list of at least one is written"
    return next((said for said in map(_of_data, value) if said), "")


def _of_data(value: Any) -> str:
    if type(value) is dict:
        keys = next((f"a key of type {_kind(key)}" for key in value if type(key) not in PLAIN), "")
        return keys or next((said for said in map(_of_data, value.values()) if said), "")
    if type(value) in (list, tuple):
        return next((said for said in map(_of_data, value) if said), "")
    if type(value) in PLAIN or type(value) is Tensor:
        return ""
    return f"{_kind(value)} in a micro-batch"


def _counts(value: Any) -> str:
    if not isinstance(value, list):
        return f"{_kind(value)}, where a list is written"
    return next((f"{one!r}, where numbers of at least 0 are written" for one in value if not _is_count(one)), "")


def _is_count(value: Any) -> bool:
    return value is None or (_is_number(value) and math.isfinite(value) and value >= 0)


def _step(value: Any) -> str:
    is_whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return "" if is_whole else f"{value!r}, where a whole number of at least 0 is written"


def _loss_scale(value: Any) -> str:
    is_scale = value is None or (_is_number(value) and math.isfinite(value) and value > 0)
    return "" if is_scale else f"{value!r}, where a number above 0 is written"


def _precision(value: Any) -> str:
    return "" if isinstance(value, str) and value in PRECISIONS else f"{value!r}, which is no precision"


def _reference(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, tuple):
        return f"{_kind(value)}, where a tuple is written"
    return next((f"{_shown(one)}, where numbers above 0 are written" for one in value if not _is_reference(one)), "")


def _is_reference(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and _is_reference(value.item())
    return value is None or (_is_number(value) and math.isfinite(value) and value >= 0)


def _random(value: Any) -> str:
    if not isinstance(value, dict):
        return f"{_kind(value)}, where a dict is written"
    for name, attempt in _GENERATORS.items():
        if name not in value:
            return f"no state of {name}"
        try:
            attempt(value[name])
        except Exception as error:  # whatever the generators raise
            return f"no state of {name}: {type(error).__name__}"
    cuda = value.get("cuda")
    if cuda is not None and not (isinstance(cuda, Tensor) and cuda.dtype == torch.uint8 and cuda.dim() == 1):
        return "no state of cuda"
    return ""


def _of_torch(value: Any) -> None:
    torch.Generator().set_state(value)


def _of_python(value: Any) -> None:
    version, internal, gauss = value
    random.Random().setstate((version, tuple(internal), gauss))
    if not (gauss is None or isinstance(gauss, float)):
        raise TypeError(type(gauss))


def _of_numpy(value: Any) -> None:
    kind, keys, position, has_gauss, gauss = value
    numbers = np.asarray(keys)
    if numbers.dtype.kind not in "iu" or numbers.shape != (_KEYS_OF_NUMPY,) or numbers.min() < 0 or numbers.max() >> 32:
        raise ValueError(numbers.dtype)
    if not 0 <= position <= _KEYS_OF_NUMPY:
        raise ValueError(position)
    np.random.RandomState().set_state((kind, numbers.astype(np.uint32), position, has_gauss, gauss))


_GENERATORS: dict[str, Callable[[Any], None]] = {"torch": _of_torch, "python": _of_python, "numpy": _of_numpy}


def _tensors(value: Any) -> str:
    if not isinstance(value, dict):
        return f"{_kind(value)}, where a dict is written"
    for name, tensor in value.items():
        if not isinstance(name, str):
            return f"{name!r}, where names are written"
        if not isinstance(tensor, Tensor):
            return f"{name} is {_shown(tensor)}, where a tensor is written"
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return f"a {value.layout} tensor" if isinstance(value, Tensor) else repr(value)[:80]


def _kind(value: Any) -> str:
    return "an empty list" if value == [] else type(value).__name__


_RULES: dict[str, Callable[[Any], str]] = {
    "micro_batches": _micro_batches,
    "counts": _counts,
    "step": _step,
    "loss_scale": _loss_scale,
    "precision": _precision,
    "reference": _reference,
    "random": _random,
    "parameters": _tensors,
    "buffers": _tensors,
}
NAMES = tuple(_RULES)
"Of all that a file holds beside its kind and version."
