"""LoRA through peft: the weights stay frozen, and pairs of thin matrices beside the linear layers are trained.

Entry points: ``row``, and ``with_lora`` for the job. It trains something else than the job did, which its row says.
Left out: QLoRA, and convolutions.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from snugfit.errors import UnsupportedError
from snugfit.jobs import Job
from snugfit.planning.ways import recorded_step, rows
from snugfit.planning.ways.rows import Case, WayOut
from snugfit.training import build

RANK = 16
CODE_BFLOAT16 = """\
for p in model.parameters():  # weights only: buffers need their bits
    p.data = p.data.to(torch.bfloat16)
"""
CODE = """\
import peft
config = peft.LoraConfig(r={rank}, lora_alpha={alpha}, target_modules={targets})
# freezes all but the adapters; make the optimizer afterwards, as before
model = peft.inject_adapter_in_model(config, model)"""
_FLOATS = (torch.float32, torch.float64)


def row(case: Case) -> WayOut:
    """The row of this way."""
    is_there, lacking = rows.installed("peft")
    if not is_there:
        return rows.unknown(case, "lora", lacking[0])
    total = sum(weight.numel * weight.itemsize for weight in case.weights)
    precision = case.plan.precision
    if precision == "bf16-true" or (precision == "32-true" and total > case.budget_bytes and case.device.fast_bfloat16):
        precision = "bf16-mixed"
    base = torch.bfloat16 if precision == "bf16-mixed" else None
    plan = replace(
        case.plan, precision=precision, fingerprint=None, gradient_dtype="float32", bf16_update="master-weights"
    )
    job = with_lora(case.job, base_dtype=base)
    step = recorded_step.record(job, plan, case.device, case.model)
    names = targets(case.model)
    shapes = {weight.module: weight.shape for weight in case.weights if len(weight.shape) == 2}
    trained = sum(RANK * sum(shapes[name]) for name in names if name in shapes)
    return rows.row(
        case,
        "lora",
        step.trace,
        change=f"{_millions(trained)} parameters of rank-{RANK} adapters are trained, the others frozen"
        + (" in bf16" if base else ""),
        code=(CODE_BFLOAT16 if base else "") + CODE.format(rank=RANK, alpha=2 * RANK, targets=short(names)),
        seconds=sum(step.seconds().values()),
        plan=plan,
        executed=True,
        job=job,
        notes=("it trains other parameters than the job does, with another result",),
    )


def with_lora(job: Job, *, rank: int = RANK, base_dtype: torch.dtype | None = torch.bfloat16) -> Job:
    """The job with LoRA adapters on all linear layers but the output's; everything else is frozen.

    Names of modules stay, so that segments of a plan do. The adapters are fp32. A given module is copied.

    Args:
        job: Its model, a module or a function.
        rank: Of the adapters; their alpha is twice it.
        base_dtype: Type of the frozen weights; None leaves them.

    Raises:
        UnsupportedError: When the model is built: peft is missing, or there is no linear layer.
    """

    def model() -> nn.Module:
        with _made_in(base_dtype) if not isinstance(job.model, nn.Module) else contextlib.nullcontext():
            base = build.copied(job.model) if isinstance(job.model, nn.Module) else build.build_model(job)
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
        if getattr(module, "running_mean", None) is None:
            for parameter in module.parameters(recurse=False):
                if parameter.dtype in _FLOATS:
                    parameter.data = parameter.data.to(dtype)


@contextlib.contextmanager
def _made_in(dtype: torch.dtype | None) -> Iterator[None]:
    """Let weights be made in a type at once: in fp32 they would take twice as much while the model is built."""
    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _millions(number: int) -> str:
    return f"{number / 1e6:.1f} million" if number >= 1e5 else str(number)
