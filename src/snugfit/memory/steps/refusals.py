"""What a trace cannot follow, said by operation, module and line of the user's code, with the way on.

Entry points: ``operation``, ``escaped`` and ``users_line``. An exception of the user's own code stays theirs.
"""

import dis
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, TracebackType

from torch import nn

from snugfit.errors import PlanError, SnugfitError, UnsupportedError

_OURS = ("snugfit", "torch", "contextlib", "functools", "unittest")
"Packages whose frames lie between the user's line and an operation."
_COMPILED = ("triton", "bitsandbytes", "flash_attn", "xformers", "apex", "transformer_engine", "liger_kernel")
"Packages whose kernels take real memory of a card; what they raise is about fake tensors, not about the step."
_OF_A_TRACE = ("FakeTensor", "dtype('O')", "type Unknown", "inputs could not be safely coerced")
"What names a trace's own things in a message: its tensors, and arrays of numbers that nobody knows."

_MADE_BY = ("snugfit.training.build", "_made_by")
"The function that calls those of a job that make something; its ``name`` says which."
_CALLS_LOSS, _BACKWARD = ("snugfit.training.step", "micro_step"), ("snugfit.training.step", "_backward")


def operation(op: str, module: str, phase: str) -> UnsupportedError:
    """The refusal of an operation that needs values, or has no fake kernel.

    Args:
        op: Its name, with overload.
        module: Fully qualified name of the module that runs; empty for none.
        phase: Of the step.
    """
    line = users_line()
    return UnsupportedError(
        f"the operation {op} cannot be traced without real values",
        got=f"{op} in {module or 'the step itself'}, phase {phase}, at {line}",
        expected="operations whose result sizes do not depend on computed values, with a fake (meta) kernel",
        hint="read values (.item(), bool(tensor), masks as indices) of what does not depend on weights, or not at all; "
        "declare what decides, or a kernel of another library, with snugfit.opaque(function, outputs_like); give a "
        "custom operator a kernel with torch.library.register_fake",
        op=op,
        module=module,
        line=line,
    )


def two_places(op: str, module: str, size: tuple[int, ...]) -> UnsupportedError:
    """The refusal of a tensor on the host that meets one on the card, which CUDA refuses as well."""
    line = users_line()
    return UnsupportedError(
        "a tensor on the host meets one on the card, which CUDA refuses",
        got=f"{op} in {module or 'the step itself'} with a host tensor of shape {list(size)}, at {line}",
        expected="all tensors of an operation on the device that the step names",
        hint='move it first: tensor.to("cuda"), or make it there: torch.zeros(..., device="cuda")',
        op=op,
        module=module,
        line=line,
    )


def two_types(op: str, module: str, types: Mapping[str, tuple[int, ...]]) -> UnsupportedError:
    """The refusal of a matrix product or a convolution of two types, which every device refuses as well."""
    line = users_line()
    found = " and ".join(f"{name.removeprefix('torch.')} of shape {list(shape)}" for name, shape in types.items())
    return UnsupportedError(
        "a product of tensors of two types, which torch refuses",
        got=f"{op} of {found} in {module or 'the step itself'}, at {line}",
        expected="one type, or a mixed precision, which casts all but float64",
        hint="convert one of them: x.to(weight.dtype)"
        if "torch.float64" in types
        else 'convert one of them: x.to(weight.dtype); or fix precision="bf16-mixed"',
        op=op,
        module=module,
        line=line,
    )


def layout(name: str) -> UnsupportedError:
    """The refusal of a tensor in a compressed layout."""
    line = users_line()
    return UnsupportedError(
        f"a tensor in the layout {name} cannot be counted",
        got=f"{name}, at {line}",
        expected="dense tensors, or sparse ones of torch.sparse_coo",
        hint="trace the step without it, or declare what makes it with snugfit.opaque(function, outputs_like)",
        op=name,
        module="",
        line=line,
    )


def other_device(kind: str) -> UnsupportedError:
    """The refusal of a step that names a device which is neither a CUDA card nor the host."""
    line = users_line()
    return UnsupportedError(
        f"the step names a device of type {kind}, which cannot be traced",
        got=f'"{kind}" at {line}',
        expected='"cuda" or "cpu" ("meta" takes no memory)',
        hint='trace the branch that runs on a CUDA card or on the CPU; a device such as "mps" has no rules here',
        op="",
        module="",
        line=line,
    )


def other_card(index: int, own: int) -> UnsupportedError:
    """The refusal of a step that names a card which the target, one card, does not have."""
    line = users_line()
    return UnsupportedError(
        "a trace is for one card, and the step names another one",
        got=f"cuda:{index}, at {line}",
        expected=f'"cuda" or "cuda:{own}", the only card of the target',
        hint='write "cuda" for the device of this process; snugfit traces what one rank runs',
        op="",
        module="",
        line=line,
    )


def card_on_cpu() -> UnsupportedError:
    """The refusal of a step that names a card though it is traced for the CPU."""
    line = users_line()
    return UnsupportedError(
        "the step names a CUDA device and is traced for the CPU",
        got=f'"cuda" at {line}, device="cpu"',
        expected="a device of the catalogue, or a step that uses the CPU",
        hint='trace for the card: snugfit.trace(make_step, "rtx-4090"); or ask torch.cuda.is_available() in the step; '
        "a job leaves it out, since snugfit moves model and batches",
        op="",
        module="",
        line=line,
    )


def made_outside(before: str, after: str) -> UnsupportedError:
    """The refusal to convert a model that was made before the trace."""
    line = users_line()
    return UnsupportedError(
        "a model that was made outside of make_step is converted inside of it",
        got=f"a tensor of type {before} that was to become {after}, at {line}",
        expected="models that are made where they are converted: a trace changes nothing that was there before",
        hint="build the model inside of make_step",
        op="to",
        module="",
        line=line,
    )


def function(name: str, reason: str) -> UnsupportedError:
    """The refusal of a function that no trace can answer."""
    line = users_line()
    return UnsupportedError(
        f"{name} cannot be answered in a trace",
        got=f"{name} called at {line}",
        expected=reason,
        hint="leave the call out of the step that is traced",
        op=name,
        module="",
        line=line,
    )


def escaped(error: Exception, op: object, name_of: Callable[[nn.Module], str | None]) -> Exception:
    """What an exception that left the step becomes: itself if it is the user's own, else a refusal by name.

    The user's own is what code outside of torch raises by a ``raise``, or what Python itself raises there. Errors of
    operations (torch's, or a kernel library's) are about tensors, which are fake here, so they are explained.

    Args:
        error: That left the step.
        op: The operation that ran last.
        name_of: Gives the name of a module, None for one that is not known.
    """
    if isinstance(error, (SnugfitError, Warning)):  # a warning that the user's filters made an error of
        return error
    frames = list(_frames(error.__traceback__))
    package = _package(frames[-1][0]) if frames else ""
    is_operations = package in ("torch", *_COMPILED)
    if not is_operations and isinstance(error, RuntimeError) and not isinstance(error, RecursionError):
        is_operations = bool(frames) and not _is_raised_by_python(frames[-1][0], frames[-1][1].tb_lasti)
    if package == "snugfit" or any(sign in str(error) for sign in _OF_A_TRACE):
        is_operations = True
    if not is_operations:
        return error
    theirs = [(frame, item) for frame, item in frames if _package(frame) not in _OURS]
    line = _line(theirs[-1][0].f_code.co_filename, theirs[-1][1].tb_lineno) if theirs else "no line of the step"
    text = str(error).strip().partition("\n")[0] or "no message"
    module = _module(frames, name_of)
    if "FunctionalTensor" in text:
        return UnsupportedError(
            "the step reads a tensor that compiled code has stored outside of itself",
            got=f"a tensor of the compiler, read in {module or 'the step itself'}, at {line}",
            expected="tensors that leave compiled code as its results",
            hint="return it from what is compiled, or take torch.compile out of the step that is traced",
            op="",
            module=module,
            line=line,
        )
    return UnsupportedError(
        f"an operation of {_part_of_the_job(frames)} raised {type(error).__name__} in the trace",
        got=f"{text} (last operation {op or 'none'} in {module or 'the step itself'}, at {line})",
        expected="a step that runs on real tensors, made of operations that also run on tensors without data",
        hint="if the step runs on the real device, declare this part with snugfit.opaque(function, outputs_like); "
        "else correct it at that line",
        op=str(op),
        module=module,
        line=line,
    )


def not_a_step(value: object) -> PlanError:
    """The refusal of a ``make_step`` that ran the step instead of returning it."""
    return PlanError(
        "make_step did not return a step",
        got=type(value).__name__,
        expected="a function without arguments that runs one whole update",
        hint="return the inner function: `return step`, not `return step()`",
    )


def users_line() -> str:
    """``file:line`` of the innermost running code that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _package(frame) in _OURS:
        frame = frame.f_back
    return "no line of the step" if frame is None else _line(frame.f_code.co_filename, frame.f_lineno)


def _frames(tb: TracebackType | None) -> Iterator[tuple[FrameType, TracebackType]]:
    for frame, _ in traceback.walk_tb(tb):
        assert tb is not None
        yield frame, tb
        tb = tb.tb_next


def _part_of_the_job(frames: Sequence[tuple[FrameType, TracebackType]]) -> str:
    """Which of a job's functions a traceback went through; the step, where it is none of them."""
    places = [(frame.f_globals.get("__name__"), frame.f_code.co_name) for frame, _ in frames]
    if _MADE_BY in places:
        return f"Job.{frames[places.index(_MADE_BY)][0].f_locals['name']}"
    return "Job.loss" if _CALLS_LOSS in places and _BACKWARD not in places else "the step"


def _module(frames: Sequence[tuple[FrameType, TracebackType]], name_of: Callable[[nn.Module], str | None]) -> str:
    """The innermost module whose method is among the frames."""
    for frame, _ in reversed(frames):
        owner = frame.f_locals.get("self")
        name = name_of(owner) if isinstance(owner, nn.Module) else None
        if name is not None:
            return name
    return ""


def _package(frame: FrameType) -> str:
    name = frame.f_globals.get("__name__")
    return name.partition(".")[0] if isinstance(name, str) else ""


def _line(filename: str, number: int | None) -> str:
    shown = os.path.relpath(filename) if os.path.isabs(filename) and not _is_installed(filename) else filename
    return f"{shown}:{number}"


def _is_installed(filename: str) -> bool:
    return "site-packages" in filename or not filename.startswith(os.getcwd())


def _is_raised_by_python(frame: FrameType, instruction: int) -> bool:
    """Whether the frame raised by a statement of its own, not in a call into compiled code."""
    name = next((i.opname for i in dis.get_instructions(frame.f_code) if i.offset == instruction), "")
    return name in ("RAISE_VARARGS", "RERAISE")
