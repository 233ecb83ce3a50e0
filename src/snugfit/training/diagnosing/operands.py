"""What an operation was given: operands that are not finite, and what decides about the remedy.

Entry points: ``Operands``, which names them, and ``evidence``. Which operation is to blame is ``probes``'s.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from snugfit.training import splitting
from snugfit.training.diagnosing import advice, ranges
from snugfit.training.diagnosing.origins import WORDS, Evidence
from snugfit.training.diagnosing.ranges import badness, num_bad

_DIVISIONS = {"div", "divide", "true_divide"}
_SPREADS = {"std", "var", "std_mean", "var_mean"}
_LABELLED = {"cross_entropy", "nll_loss"}
_IGNORED = -100


class Operands:
    """Names of what is not finite among an operation's operands.

    Args:
        model: Whose attributes are looked through for where a tensor or number is from.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names: dict[int, str] = {}
        for name, module in model.named_modules():
            where = f" of {name}" if name else ""
            self._names |= {
                id(value): f"attribute {attribute}{where}"
                for attribute, value in vars(module).items()
                if isinstance(value, Tensor)
            }
        self._names |= {id(tensor): f"buffer {name}" for name, tensor in model.named_buffers()}

    def tensor(self, position: int, tensor: Tensor, found: str = "") -> str:
        """One that is not finite, in words."""
        name = self._names.get(id(tensor))
        named = f"{name}, " if name else ""
        return (
            f"operand {position}, {named}a tensor of shape {tuple(tensor.shape)}{found} "
            f"({num_bad(tensor)} of {tensor.numel()} values {WORDS[badness(tensor)]})"
        )

    def number(self, value: float, module: str) -> str:
        """One that is not finite, in words."""
        attributes = vars(self._model.get_submodule(module)) if module else vars(self._model)
        same = (name for name, one in attributes.items() if isinstance(one, float) and repr(one) == repr(value))
        name = next(same, None)
        return f"the number {value}" + (f" (attribute {name})" if name else "")


def evidence(
    func: Any, op: str, args: Sequence[Any], kwargs: dict[str, Any], micro_batch: Callable[[], Any]
) -> Evidence | None:
    """What an operation was given that decides about the remedy; None where nothing does.

    Args:
        func: The operation; a division by the tensor it belongs to has its operands the other way round.
        op: Its name.
        args: Before it runs.
        kwargs: Before it runs.
        micro_batch: What the labels are looked for in.
    """
    if not advice.is_about(op):
        return None
    given = list(args)
    first = given[0] if given else kwargs.get("input", kwargs.get("self"))
    second = given[1] if len(given) > 1 else kwargs.get("other", kwargs.get("exponent", kwargs.get("target")))
    is_reversed = getattr(func, "__name__", "").startswith("__r")
    decides = first
    if op in _DIVISIONS and not is_reversed:
        decides = second
    if not isinstance(decides, Tensor):
        decides = first
    if not isinstance(decides, Tensor) or not decides.is_floating_point() or not ranges.is_readable(decides):
        return None
    counted = count = ""
    if op in _LABELLED and isinstance(second, Tensor):
        counted, count = _unlabelled(second, args, kwargs, micro_batch)
    elif op == "mean" and decides.numel() == 0:
        counted = "a mean over no value at all"
    elif op in _DIVISIONS and _is_zero(first) and _is_zero(second):
        counted = "0 divided by 0, as of a mean over nothing"
    return Evidence(
        decides.dtype,
        lowest=ranges.lowest(decides),
        exponent=float(second) if op == "pow" and not is_reversed and isinstance(second, (int, float)) else None,
        counted=counted,
        count=count,
    )


def reduced(
    found: Evidence | None, op: str, args: Sequence[Any], outputs: Sequence[Tensor]
) -> tuple[int, Evidence | None]:
    """Values per output of a standard deviation or variance (0 for other operations), and the evidence with it."""
    if op not in _SPREADS or found is None or not outputs or not args or not isinstance(args[0], Tensor):
        return 0, found
    number = args[0].numel() // max(outputs[0].numel(), 1)
    return number, Evidence(found.dtype, found.lowest, num_reduced=number)


def _is_zero(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and not bool(value.detach().any())


def _unlabelled(
    labels: Tensor, args: Sequence[Any], kwargs: dict[str, Any], micro_batch: Callable[[], Any]
) -> tuple[str, str]:
    """Whether a loss has no label to be the mean of: in words, and how to count."""
    ignored = kwargs.get("ignore_index", args[4] if len(args) > 4 else _IGNORED)
    if labels.is_floating_point() or not ranges.is_readable(labels) or bool((labels != ignored).any()):
        return "", ""
    words = f"a mean over no label: all {labels.numel()} are {ignored}, which is ignored"
    return words, f"snugfit.tokens({', '.join(_counting(micro_batch(), ignored))})"


def _counting(micro_batch: Any, ignored: int) -> Iterator[str]:
    """The arguments of ``tokens`` that count 0 in a micro-batch."""
    if ignored != _IGNORED:
        yield f"ignore_index={ignored}"
    whole, shifted = [], []
    for path, tensor in splitting.named_tensors(micro_batch):
        key = re.fullmatch(r"batch(?:\[(.+)\]|\.(\w+))", path)
        if key is None or tensor.is_floating_point() or tensor.dim() == 0:
            continue
        name = key[1] or repr(key[2])
        if not bool((tensor != ignored).any()):
            whole.append(name)
        elif tensor.dim() > 1 and not bool((tensor[..., 1:] != ignored).any()):
            shifted.append(name)
    if not whole and shifted:
        yield "shift=True"
    yield f"key={(whole or shifted or [repr('labels')])[0].replace(chr(39), chr(34))}"


def numbers(leaves: Sequence[Any]) -> list[float]:
    """Those of an operation that are not finite."""
    return [leaf for leaf in leaves if isinstance(leaf, float) and not math.isfinite(leaf)]


def is_mask(tensor: Tensor) -> bool:
    """Whether all that is not finite in a tensor is -inf, as it is in a mask."""
    with torch.no_grad():
        values = tensor.detach()
        return not bool(((values != values) | (values == math.inf)).any())
