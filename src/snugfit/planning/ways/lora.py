"""LoRA through peft: the weights stay frozen, and pairs of thin matrices beside the linear layers are trained.

Entry points: ``row``, and ``with_lora`` for the job. It trains something else than the job did, which its row says.
Left out: QLoRA, and convolutions.

NOTE [Which weights have 16 bits]
1. Frozen weights are held in the type that autocast multiplies in, so that it casts none of them in a step; its casts
   of inputs let a 16-bit layer take ordinary floats. So such a job belongs to the mixed precision of that type, and
   without one (fp32) the frozen weights stay as they are.
2. Torch's layers that normalise keep their bits, beside their statistics: what is normalised may be fp32, and not all
   of them take weights of another type than their input's.
3. Adapters are fp32, as peft's ``get_peft_model`` makes them (autocast_adapter_dtype). ``inject_adapter_in_model``,
   which keeps the names of modules, gives them the type of the layer beside.
"""

import contextlib
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from snugfit.errors import UnsupportedError
from snugfit.jobs import Job
from snugfit.planning.ways import by_hand, recorded_step, rows
from snugfit.planning.ways.rows import Case, WayOut
from snugfit.training import build

RANK = 16
CODE = """\
import peft
config = peft.LoraConfig(r={rank}, lora_alpha={alpha}, target_modules={targets})
# freezes all but the adapters; make the optimizer afterwards, as before
model = peft.inject_adapter_in_model(config, model)"""
CODE_ADAPTERS = """
for p in model.parameters():  # adapters learn in fp32
    p.data = p.data.float() if p.requires_grad else p.data"""
_FLOATS = (torch.float32, torch.float64)
_HALF = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_NORMS = (
    *(nn.LayerNorm, nn.GroupNorm, nn.SyncBatchNorm),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


_RATE = "the learning rate stays the job's; adapters are usually trained with about ten times that of all weights"
"Source: LoRA Without Regret (thinkingmachines.ai/blog/lora, 2025); the cookbook of tinker takes 10 as its factor."


def row(case: Case) -> WayOut:
    """The row of this way."""
    is_there, lacking = rows.installed("peft")
    if not is_there:
        return rows.unknown(case, "lora", lacking[0])
    fast = case.fast_plan.precision
    precision = "bf16-mixed" if fast == "bf16-true" else fast
    base = _HALF.get(precision)
    plan = replace(
        case.plan, precision=precision, fingerprint=None, gradient_dtype="float32", bf16_update="master-weights"
    )
    job = with_lora(case.job, base_dtype=base)
    step = recorded_step.record(job, plan, case.device, case.model)
    names = targets(case.model)
    shapes = {weight.module: weight.shape for weight in case.weights if len(weight.shape) == 2}
    trained = sum(RANK * sum(shapes[name]) for name in names if name in shapes)
    code = _code(case.model, names, base)
    return rows.row(
        case,
        "lora",
        step.trace,
        change=f"{_millions(trained)} parameters of rank-{RANK} adapters are trained, the others frozen"
        + (f" in {precision.removesuffix('-mixed')}" if base else ""),
        code=code,
        by_hand=by_hand.lines(case, plan, code.splitlines()),
        seconds=sum(step.seconds().values()),
        plan=plan,
        decides=("precision",) if base else (),
        job=job,
        notes=("it trains other parameters than the job does, with another result", _RATE),
    )


def _code(model: nn.Module, names: list[str], base: torch.dtype | None) -> str:
    """The lines that change the model."""
    ends = short(names)
    is_plain = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in ends} == set(names)
    code = CODE.format(rank=RANK, alpha=2 * RANK, targets=ends if is_plain else names)
    if base is None:
        return code
    return by_hand.HALF_WEIGHTS.format(dtype=str(base).removeprefix("torch.")) + code + CODE_ADAPTERS


def with_lora(job: Job, *, rank: int = RANK, base_dtype: torch.dtype | None = torch.bfloat16) -> Job:
    """The job with LoRA adapters on all linear layers but the output's; everything else is frozen.

    Names of modules stay, so that segments of a plan do. The adapters are fp32. A given module is copied. See the NOTE.

    Args:
        job: Its model, a module or a function.
        rank: Of the adapters; their alpha is twice it.
        base_dtype: Type of the frozen weights but those of layers that normalise, for a plan of the mixed precision of
            that type; None leaves them.

    Raises:
        UnsupportedError: When the model is built: peft is missing, or there is no linear layer.
    """

    def model() -> nn.Module:
        if isinstance(job.model, nn.Module):
            return _adapted(build.copied(job.model), rank, base_dtype)
        with _held_in(base_dtype):
            base = build.build_model(job)
        return _adapted(base, rank, base_dtype)

    return replace(job, model=model)


def targets(model: nn.Module) -> list[str]:
    """Names of the linear layers that get adapters: all but the one that makes the output of a language model.

    Nor the output projection of ``nn.MultiheadAttention``, which takes its weight and never calls it.
    """
    get = getattr(model, "get_output_embeddings", None)
    output = get() if callable(get) else None
    never_called = {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    return [
        name
        for name, module in model.named_modules()
        if name
        and module is not output
        and id(module) not in never_called
        and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
    ]


def short(names: list[str]) -> list[str]:
    """The last parts of names, for people."""
    return sorted({name.rpartition(".")[2] for name in names})


def _adapted(model: nn.Module, rank: int, base_dtype: torch.dtype | None) -> nn.Module:
    try:
        with rows.quiet_imports():
            import peft
    except ImportError as error:
        raise UnsupportedError(
            "LoRA needs peft",
            got=str(error),
            expected="peft, an optional extra of snugfit",
            hint='pip install "snugfit[peft]"',
            library="peft",
        ) from error
    names = targets(model)
    if not names:
        raise UnsupportedError(
            "LoRA finds no linear layer",
            got=type(model).__name__,
            expected="a model with torch.nn.Linear layers beside its output",
            hint="use another way out",
        )
    if base_dtype is not None:
        _convert(model, base_dtype)
    pattern = "|".join(re.escape(name) for name in names)  # a list would be taken as ends of names
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=pattern)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out is set")  # it is then set as it must be
        adapted: nn.Module = peft.inject_adapter_in_model(config, model)
    for name, parameter in adapted.named_parameters():
        is_adapter = "lora_" in name
        parameter.requires_grad_(is_adapter)
        if is_adapter:
            parameter.data = parameter.data.float()
    return adapted


def _convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Round weights, not buffers: rotary frequencies and running statistics need their bits."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            _round(module, parameter, dtype)


def _round(module: nn.Module, parameter: nn.Parameter, dtype: torch.dtype) -> None:
    is_norm = isinstance(module, _NORMS) or hasattr(module, "running_mean")
    if parameter.dtype in _FLOATS and not is_norm and not is_lazy(parameter):
        parameter.data = parameter.data.to(dtype)


@contextlib.contextmanager
def _held_in(dtype: torch.dtype | None) -> Iterator[None]:
    """Round each weight as soon as a module holds it: all of them in fp32 would take twice as much at first."""
    if dtype is None:
        yield
        return
    handle = register_module_parameter_registration_hook(lambda module, _, made: _round(module, made, dtype))
    try:
        yield
    finally:
        handle.remove()


def _millions(number: int) -> str:
    return f"{number / 1e6:.1f} million" if number >= 1e5 else str(number)
