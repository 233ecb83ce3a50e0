"""Activation checkpointing in plain PyTorch: the lines that do what the segments of a plan say, as far as it can.

Entry points: ``lines`` with ``imports``, and ``reason_against``, which says what only snugfit does. The lines are code
that runs; that they give the same gradients is tested.
"""

import re
import textwrap
from collections.abc import Iterator

from snugfit.planning.own_loop import OwnLoop
from snugfit.plans import Segment

WIDTH = 76
"Of a line of code that is printed."

CHECKPOINT = "from torch.utils.checkpoint import checkpoint"

_LAST_NUMBER = re.compile(r'([^{}"\\]*?)(\d+)([^\d{}"\\]*)')
_ATTENTION = {
    "cuda": tuple(f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")),
    "cpu": ("_scaled_dot_product_flash_attention_for_cpu",),
}
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")
_OWN = "keep:"

_OFFLOADED = """\
def offloaded(forward):
    def moved(*args, **kwargs):
        with save_on_cpu({pinned}):
            return forward(*args, **kwargs)
    return moved"""


def reason_against(segments: tuple[Segment, ...]) -> str:
    """Why segments need snugfit; empty where PyTorch can do the same."""
    names = {segment.modules[0] for segment in segments}
    if any(len(segment.modules) > 1 for segment in segments):
        return "runs of modules are repeated as one"
    last = sum("-last" in segment.policy for segment in segments)
    if last:
        some = "" if last == len(segments) else f"in {last} of {len(segments)} segments "
        return f"{some}only the last product of each module is kept"
    if any(segment.policy.startswith(_OWN) and "*" in segment.policy for segment in segments):
        return "operations are named by a pattern"
    inner = [name for name in names if any(name.startswith(f"{other}.") for other in names)]
    if inner and {segment.policy for segment in segments} != {"full"}:
        return "a segment that keeps results holds another one"
    return ""


def lines(segments: tuple[Segment, ...], kind: str, loop: OwnLoop) -> Iterator[str]:
    """The lines that recompute segments, for a model called ``model``.

    Args:
        segments: Of the plan.
        kind: Of the device: ``"cuda"`` or ``"cpu"``.
        loop: Says whether the model has a cache, and running statistics.
    """
    reason = reason_against(segments)
    if reason:
        yield f"# recomputation, only with snugfit: {reason}"
        yield "# (plan with --recompute blocks for lines of plain PyTorch)"
        yield "snugfit.checkpointing.apply(model, plan.recompute)"
        return
    if loop.has_cache:
        yield "# a block that runs again would add to its cache again"
        yield "model.config.use_cache = False"
    if loop.has_running_statistics:
        yield "# running statistics of layers that run again move twice here, not with snugfit"
    for policy in dict.fromkeys(segment.policy for segment in segments):
        names = [segment.modules[0] for segment in segments if segment.policy == policy]
        yield from _wrapper(policy, kind)
        yield from _over(names)
        yield "    layer = model.get_submodule(name)"
        made = "offloaded(layer.forward)" if policy == "offload" else "functools.partial(checkpointed, layer.forward)"
        yield f"    layer.forward = {made}"


def imports(segments: tuple[Segment, ...]) -> Iterator[str]:
    """The imports that ``lines`` needs."""
    policies = {segment.policy for segment in segments}
    if reason_against(segments):
        return
    if policies - {"offload"}:
        yield "import functools"
        yield CHECKPOINT
    if policies - {"offload", "full"}:
        yield "from torch.utils.checkpoint import create_selective_checkpoint_contexts"
    if "offload" in policies:
        yield "from torch.autograd.graph import save_on_cpu"


def _wrapper(policy: str, kind: str) -> Iterator[str]:
    """What the forward of a module goes through."""
    if policy == "offload":
        yield from _OFFLOADED.format(pinned="pin_memory=True" if kind == "cuda" else "").splitlines()
        return
    if policy == "full":
        yield "checkpointed = functools.partial(checkpoint, use_reentrant=False)"
        return
    yield f"# {policy}: the results of these are kept, the rest is computed again"
    yield "kept = ["
    yield from (f"    torch.ops.aten.{name}.default," for name in _operations(policy, kind))
    yield "]"
    yield "contexts = functools.partial(create_selective_checkpoint_contexts, kept)"
    yield "checkpointed = functools.partial("
    yield "    checkpoint, use_reentrant=False, context_fn=contexts"
    yield ")"


def _operations(policy: str, kind: str) -> tuple[str, ...]:
    if policy.startswith(_OWN):
        return tuple(name.strip() for name in policy.removeprefix(_OWN).split(","))
    return _ATTENTION[kind] if policy == "keep-attention" else (*_PRODUCTS, *_ATTENTION[kind])


def _over(names: list[str]) -> Iterator[str]:
    """The head of a loop over names, those that differ by a number alone as a range."""
    pieces = _pieces(names)
    if len(pieces) == 1 and not pieces[0].startswith('"'):
        yield f"for name in [{pieces[0]}]:"
        return
    literal = [piece for piece in pieces if piece.startswith('"')]
    yield "names = ["
    yield from (f"    *({piece})," for piece in pieces if not piece.startswith('"'))
    if literal:
        text = ", ".join(literal) + ","
        yield from textwrap.wrap(
            text, WIDTH, initial_indent="    ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )
    yield "]"
    yield "for name in names:"


def _pieces(names: list[str]) -> list[str]:
    """Names as code: a comprehension for those that are numbered alike, the others as they are."""
    numbered: dict[tuple[str, str], list[int]] = {}
    alone = []
    for name in names:
        match = _LAST_NUMBER.fullmatch(name)
        if match is None or str(int(match[2])) != match[2]:
            alone.append(name)
        else:
            numbered.setdefault((match[1], match[3]), []).append(int(match[2]))
    found = []
    for (head, tail), numbers in numbered.items():
        if len(numbers) == 1:
            alone.append(f"{head}{numbers[0]}{tail}")
        else:
            found.append(f'f"{head}{{i}}{tail}" for i in {_numbers(numbers)}')
    return found + [f'"{name}"' for name in alone]


def _numbers(numbers: list[int]) -> str:
    first, step = numbers[0], numbers[1] - numbers[0]
    if step > 0 and numbers == list(range(first, numbers[-1] + 1, step)):
        end = numbers[-1] + 1
        if step > 1:
            return f"range({first}, {end}, {step})"
        return f"range({first}, {end})" if first else f"range({end})"
    return f"({', '.join(map(str, numbers))})"
