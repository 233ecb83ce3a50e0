"""What a user's own training loop does beside the plan: its optimizer, its batch, what it counts, clipping, a schedule.

Entry points: ``OwnLoop``, built-in values that go to JSON, and ``own_loop``, which reads them off a job. The lines of
code that are made of them are ``script``'s.
"""

import copy
import inspect
import json
import re
import warnings
from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass
from math import isinf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

from snugfit.errors import BatchError
from snugfit.jobs import Job
from snugfit.training import counting, random_states, splitting
from snugfit.training.example import example_batch

_FORMS: dict[type, str] = {tuple: "tuple", list: "list", dict: "dict"}
_REPEATED = (str, bytes, bool, int, float, complex, type(None))
"What every micro-batch holds as it is."
_LONGEST_SHOWN = 50
UNKNOWN_COUNT = ("num_samples(", ")")
"Where nothing is known of a batch."
_PARAMETERS = "model.parameters()"
_IMPLEMENTATION = ("foreach", "fused")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLoop:
    """What a loop says that a plan does not; by default nothing is known."""

    optimizer: str = ""
    "Class of the optimizer as it is written, ``torch.optim.AdamW``; empty: unknown, or several."
    arguments: str = _PARAMETERS
    "What it is called with, its implementation left out."
    form: str = "other"
    """Of a batch: ``"tensor"``, or flat and of tensors only, ``"tuple" "list" "dict"``; ``"nested"``: such that hold
    each other, numbers or strings; ``"other"``: anything else."""
    shown: str = ""
    'A batch in a few words, ``{"x": tensor, "y": tensor}``; empty: unknown.'
    samples: tuple[str, str] = UNKNOWN_COUNT
    "How many samples a batch has, as code in front of and behind its name."
    count: tuple[str, str] = UNKNOWN_COUNT
    "What a loss is a mean over, as code in front of and behind the name of a batch or micro-batch."
    counted: str = "samples"
    '``"samples" "tokens"``, or ``"count"`` for a function of the job\'s own.'
    count_argument: str = ""
    "What an engine is told of it; empty: nothing."
    max_grad_norm: float | None = None
    "That gradients are clipped to."
    has_scheduler: bool = False
    has_split: bool = False
    "Whether batches are cut by a function of the job's own."
    has_cache: bool = False
    "Whether the model is one of transformers that keeps keys and values."
    has_running_statistics: bool = False
    "Whether a layer keeps some, which a module that runs twice moves twice."


def own_loop(job: Job, model: nn.Module) -> OwnLoop:
    """Read off a job what its loop does.

    Args:
        job: Its batch is made for two samples, its optimizer for a copy of the model without data.
        model: The job's, data or not. Not changed.
    """
    optimizer, arguments = _optimizer(job, model)
    limit = job.max_grad_norm
    return OwnLoop(
        optimizer=optimizer,
        arguments=arguments,
        max_grad_norm=None if limit is None or isinf(limit) else float(limit),
        has_scheduler=job.scheduler is not None,
        has_split=job.split is not None,
        # Off or on: a trace that recomputes blocks may have turned it off in a configuration that all models share.
        has_cache=isinstance(getattr(getattr(model, "config", None), "use_cache", None), bool),
        has_running_statistics=any(getattr(m, "running_mean", None) is not None for m in model.modules()),
        **_counted(job, model),
    )


def _counted(job: Job, model: nn.Module) -> dict[str, Any]:
    """How a batch is built, and what is counted in it."""
    batch = _example(job)
    samples = _samples(batch)
    found: dict[str, Any] = {"form": _form(batch), "shown": _shown(batch), "samples": samples}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is inferred is written down here
        count = counting.settled(job.count, model, batch)
    labels = counting.in_code(count, batch)
    if labels is not None:
        return found | {"count": labels.of_batch, "counted": "tokens", "count_argument": labels.argument}
    if not isinstance(count, str):
        return found | {"count": ("count(", ")"), "counted": "count", "count_argument": "count"}
    return found | {"count": samples}


def _samples(batch: Any) -> tuple[str, str]:
    """How many samples a batch has, as code around its name."""
    try:
        number = splitting.num_samples(batch)
    except BatchError:
        return UNKNOWN_COUNT
    tensors = splitting.named_tensors(batch, "")
    first = next(path for path, tensor in tensors if tensor.dim() and len(tensor) == number)
    return "len(", f"{_quoted(first)})"


def _quoted(path: str) -> str:
    """A path with keys as this project writes strings."""
    return re.sub(r"\['([^'\"\\]*)'\]", r'["\1"]', path)


def _example(job: Job) -> Any:
    """A small batch; None where none can be made without reading a whole data set."""
    try:
        with random_states.seeded(job.seed):
            if not isinstance(job.batch, DataLoader):
                return example_batch(job, 2)
            loader: Any = job.batch
            return loader.collate_fn([loader.dataset[0], loader.dataset[0]])
    except Exception:  # of the user's code; it ran for other sizes, and only words depend on it here
        return None


def _form(batch: Any) -> str:
    if isinstance(batch, Tensor):
        return "tensor"
    children = _held(batch)
    if not children or not _is_cut_by_hand(batch):
        return "other"
    is_flat = all(isinstance(one, Tensor) and one.dim() for one in children)
    return _FORMS.get(type(batch), "nested") if is_flat else "nested"


def _held(value: Any) -> list[Any]:
    """What a dictionary, tuple or list holds; nothing for anything else, whose copies take more than its class."""
    if type(value) is dict or isinstance(value, UserDict):
        return list(value.values())
    return list(value) if isinstance(value, (tuple, list)) and not isinstance(value, PackedSequence) else []


def _is_cut_by_hand(value: Any) -> bool:
    """Whether slicing its tensors is all that cutting takes; not where a list may hold one entry per sample."""
    if isinstance(value, (Tensor, *_REPEATED)):
        return True
    children = _held(value)
    return any(_holds_tensor(child) for child in children) and all(_is_cut_by_hand(child) for child in children)


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or any(_holds_tensor(child) for child in _held(value))


def _shown(batch: Any) -> str:
    """A batch in a few words; empty where they would be many."""
    found = _described(batch)
    return found if len(found) <= _LONGEST_SHOWN else ""


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, (Mapping, UserDict)):
        inside = ", ".join(f"{json.dumps(key)}: {_described(one)}" for key, one in value.items())
        return f"{{{inside}}}"
    if isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", None)
        inside = ", ".join(names or (_described(one) for one in value))
        if names:
            return f"{type(value).__name__}({inside})"
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    return "" if value is None else type(value).__name__


def _optimizer(job: Job, model: nn.Module) -> tuple[str, str]:
    """The class of the optimizer and its arguments, as code; nothing where it is not one."""
    try:
        made = job.optimizer(_without_data(model))
    except Exception:  # of the user's code, for a model that holds no numbers
        return "", _PARAMETERS
    if not isinstance(made, torch.optim.Optimizer):
        return "", _PARAMETERS
    kind = type(made)
    name = f"torch.optim.{kind.__name__}" if kind.__module__.startswith("torch.optim") else kind.__name__
    usual = {key: one.default for key, one in inspect.signature(kind).parameters.items()}
    options = [
        f"{key}={value!r}"
        for key, value in made.defaults.items()
        if key in usual and key not in _IMPLEMENTATION and value != usual[key] and not isinstance(value, Tensor)
    ]
    first = _PARAMETERS if len(made.param_groups) == 1 else "groups"
    return name, ", ".join((first, *options))


def _without_data(model: nn.Module) -> nn.Module:
    """A copy whose weights have shapes only."""
    tensors = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(one): _shape_of(one) for one in tensors}
    return copy.deepcopy(model, memo)


def _shape_of(tensor: Tensor) -> Tensor:
    bare = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
