"""What to write instead of an operation that made a value that is not finite.

Entry point: ``of``. Numbers are chosen for the type of the operand, so that slopes stay in its range too: 1e-12 is 0
in float16, and its exponential of 80 is inf. Trying other precisions is ``remedies``'s.
"""

import math
import re
from collections.abc import Callable

import torch

from snugfit.training.diagnosing.origins import Evidence, Origin

_FALLBACK = "lower the learning rate or set max_grad_norm=1.0, and look at the size of what goes into it"
_LATER = "; if it worked before, a lower learning rate"
_COUNTED = ("cross_entropy", "nll_loss", "mean")
"What may be a mean over nothing."
_UNKNOWN = Evidence(torch.float32)
_LARGEST_SLOPE = {torch.float16: 1e4}
"Of what is advised; of other types 1e9, whose square is still far from the end of float32."


def is_about(op: str) -> bool:
    """Whether there is advice about an operation that depends on what it was given."""
    return callable(_ADVICE.get(_plain(op))) or op in _COUNTED


def of(origin: Origin) -> str:
    """What helps against an operation, as a sentence with code where code is enough; by its exact name."""
    evidence = origin.evidence or _UNKNOWN
    if evidence.counted:
        counting = f"pass count={evidence.count} to the job" if evidence.count else "count what the mean is taken over"
        return (
            f"nothing is counted there, so leave the micro-batch out: {counting}, or return snugfit.Loss(total, count)"
        )
    name = _plain(origin.op)
    advice = _ADVICE.get(name)
    if advice is None:
        return _FALLBACK
    return (advice if isinstance(advice, str) else advice(name, evidence)) + _LATER


def _plain(op: str) -> str:
    """``logsoftmax`` for ``log_softmax`` and ``LogSoftmaxBackward0``."""
    return re.sub(r"backward\d*$", "", op.lower()).replace("_", "")


def _is_fp16(evidence: Evidence) -> bool:
    return evidence.dtype == torch.float16


def _is_half(evidence: Evidence) -> bool:
    return evidence.dtype in (torch.float16, torch.bfloat16)


def _log(name: str, evidence: Evidence) -> str:
    code = f"torch.{name}(x.clamp(min={'1e-3' if _is_fp16(evidence) else '1e-6'}))"
    if evidence.lowest < 0:
        return f"its smallest input is {evidence.lowest:.4g}: look at why it is negative, or keep it above 0: {code}"
    return f"keep its input above 0: {code}"


def _log1p(name: str, evidence: Evidence) -> str:
    lowest = "-0.99" if _is_half(evidence) else "-0.999999"
    return f"keep its input above -1: torch.log1p(x.clamp(min={lowest}))"


def _root(name: str, evidence: Evidence) -> str:
    smallest = {"sqrt": ("1e-12", "1e-4"), "rsqrt": ("1e-6", "1e-2")}[name][_is_fp16(evidence)]
    if evidence.lowest < 0:
        return (
            f"its smallest input is {evidence.lowest:.4g}: look at why it is negative (a rounded difference, for "
            f"example), or cut it off: torch.{name}(x.clamp(min=0) + {smallest})"
        )
    return f"keep its input away from 0, where its slope is infinite: torch.{name}(x + {smallest})"


def _division(name: str, evidence: Evidence) -> str:
    smallest = "1e-2" if _is_fp16(evidence) else "1e-6"
    if name == "reciprocal":
        written = ("torch.reciprocal(", ")")
    else:
        written = ("x / ", "")
    divisor = "x" if name == "reciprocal" else "y"
    if evidence.lowest < 0:
        safe = f"torch.where({divisor}.abs() < {smallest}, {smallest}, {divisor})"
    else:
        safe = f"{divisor}.clamp(min={smallest})"
    return f"keep the divisor away from 0: {written[0]}{safe}{written[1]}"


def _exponential(name: str, evidence: Evidence) -> str:
    share = 2 if _is_fp16(evidence) else 4  # its slope is as large, and goes into a sum of squares
    largest = min(torch.finfo(evidence.dtype).max, torch.finfo(torch.float32).max)  # what follows is rarely float64
    limit = math.log(largest) / share
    limit = math.floor(limit / math.log(2) if name == "exp2" else limit)
    lowest = f"min=-{limit}, " if name in ("sinh", "cosh") else ""
    return (
        "subtract the largest before, or work with logarithms (logsumexp), or limit its input: "
        f"torch.{name}(x.clamp({lowest}max={limit}))"
    )


def _power(name: str, evidence: Evidence) -> str:
    exponent = evidence.exponent
    if exponent is not None and exponent >= 1 and evidence.lowest < 0 and exponent % 1:
        return (
            f"its smallest input is {evidence.lowest:.4g}, of which there is no power {exponent:g}: look at why it is "
            f"negative, or cut it off: x.clamp(min=0).pow({exponent:g})"
        )
    words = "limit its input, and keep it away from 0 where the exponent is below 1"
    if exponent is None or exponent >= 1:
        return words
    largest = _LARGEST_SLOPE.get(evidence.dtype, 1e9)
    smallest = (largest / max(abs(exponent), 1e-6)) ** (1 / (exponent - 1))
    smallest = 10.0 ** math.ceil(math.log10(max(smallest, 1e-6)))
    return f"{words}: x.clamp(min={smallest:g}).pow({exponent:g})"


def _inside(name: str, evidence: Evidence) -> str:
    limit = "0.99" if _is_half(evidence) else "0.999999"
    return f"keep its input inside of (-1, 1): torch.{name}(x.clamp(min=-{limit}, max={limit}))"


def _acosh(name: str, evidence: Evidence) -> str:
    lowest = "1.01" if _is_half(evidence) else "1.000001"
    return f"keep its input above 1: torch.{name}(x.clamp(min={lowest}))"


def _logit(name: str, evidence: Evidence) -> str:
    return f"keep its input inside of (0, 1): torch.logit(x, eps={'1e-2' if _is_half(evidence) else '1e-6'})"


def _spread(name: str, evidence: Evidence) -> str:
    if evidence.num_reduced is not None and evidence.num_reduced <= 1:
        return (
            "it was taken over one value, where its own formula divides by 0: pass correction=0, or choose a "
            "micro_batch_size that leaves no micro-batch of one sample"
        )
    return "look at the size of what goes into it, whose squares are summed"


_MASKED = "leave at least one position of every row unmasked"
_UNDER_A_ROOT = "keep its input away from 0, where its slope is not defined: add an eps under the root"
_SINGULAR = "its matrix is singular, or its determinant negative: add a small multiple of the identity to it"
_ADVICE: dict[str, str | Callable[[str, Evidence], str]] = {
    **dict.fromkeys(("logsoftmax", "softmax", "logsumexp", "scaleddotproductattention"), _MASKED),
    **dict.fromkeys(
        (
            "scaleddotproductflashattentionforcpu",
            "scaleddotproductflashattention",
            "scaleddotproductefficientattention",
            "scaleddotproductcudnnattention",
        ),
        _MASKED,
    ),
    **dict.fromkeys(("log", "log2", "log10"), _log),
    "log1p": _log1p,
    **dict.fromkeys(("sqrt", "rsqrt"), _root),
    **dict.fromkeys(("norm", "linalgnorm", "linalgvectornorm", "linalgmatrixnorm", "cdist", "dist"), _UNDER_A_ROOT),
    **dict.fromkeys(("div", "divide", "truedivide", "reciprocal"), _division),
    **dict.fromkeys(("exp", "expm1", "exp2", "sinh", "cosh"), _exponential),
    **dict.fromkeys(("pow", "floatpower"), _power),
    **dict.fromkeys(("acos", "asin", "atanh", "arccos", "arcsin", "arctanh", "erfinv"), _inside),
    **dict.fromkeys(("acosh", "arccosh"), _acosh),
    "logit": _logit,
    **dict.fromkeys(
        ("logdet", "slogdet", "linalgslogdet", "inverse", "linalginv", "linalginvex", "cholesky", "linalgcholesky"),
        _SINGULAR,
    ),
    **dict.fromkeys(("svd", "linalgsvd", "linalgeigh", "linalgeig"), "its slope needs singular values that differ"),
    **dict.fromkeys(("std", "var", "stdmean", "varmean"), _spread),
    "normalize": "keep its input away from 0, or pass an eps that the type has: 1e-12 is 0 in float16",
    "ctcloss": "a target is longer than its input: pass zero_infinity=True, or drop such samples",
}
