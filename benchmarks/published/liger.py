"""Single operations as Liger-Kernel's benchmark runs them with the reference implementation: ``liger-*`` rows.

Entry point: ``rows``. Each run repeats ten times on the same tensors and the peak is the median one: old gradients
are alive, and backward retains its graph where the script does. Some scripts build both implementations, of which one
runs: ``others`` is the idle one. The Triton kernels themselves are left out.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from published import Options, Prediction, Row, Skipped, stages
from snugfit import hardware
from snugfit.memory import tracing
from snugfit.memory.recording import Recorder

_RUNS = 3
"From the second run on nothing changes."
_QUICK = 4
"Rows of a quick run."

Pass = Callable[[], Tensor]
"A forward of the operation; what it closes over stays alive as in the script."


def rows(published: Sequence[Row], options: Options) -> Iterator[Prediction | Skipped]:
    """Predict the rows of known operations."""
    for number, row in enumerate(published):
        operation = row.fields["model"].removeprefix("op: ").partition(" ")[0]
        config = _config(row.fields["config_details"])
        if options.quick and number >= _QUICK:
            yield Skipped(row.id, "quick run")
        elif "reference" not in row.fields["model"]:
            yield Skipped(row.id, "a Triton kernel, whose scratch memory is not known")
        elif operation not in _OPERATIONS or config is None:
            yield Skipped(row.id, f"operation {operation} is not one of {', '.join(_OPERATIONS)}")
        else:
            card = "h100-pcie-80gb" if "H100" in row.fields["gpu_type"] else "a100-sxm-80gb"
            trace = tracing.record(_script(operation, config), hardware.resolve(card), _RUNS)
            yield Prediction(row.id, stages.stages(trace)["run"].peak.of(row.metric))


def _config(text: str) -> dict[str, Any] | None:
    """``full pass, V=4096, {...}`` as one dictionary; the pass under ``pass``."""
    found = re.match(r"(\w+) pass, (\w+)=(\d+), (\{.*\})$", text)
    if found is None:
        return None
    config: dict[str, Any] = json.loads(found[4])
    config["dtype"] = getattr(torch, config.get("dtype", "torch.float32").removeprefix("torch."))
    return {**config, found[2]: int(found[3]), "pass": found[1]}


def _script(operation: str, config: Mapping[str, Any]) -> Callable[[Recorder], Callable[[], None]]:
    setup, has_gradient, retains = _OPERATIONS[operation]

    def make(recorder: Recorder) -> Callable[[], None]:
        if config["pass"] != "full":  # the process ran the full passes before: backward's thread has its workspace
            one = torch.ones(1, 1, requires_grad=True, device="cuda")
            (one @ one).backward()
            del one
        forward, gradient = setup(config)
        kept: list[Tensor] = []

        def backward(output: Tensor) -> None:
            if has_gradient:  # the norms are given one tensor, the others make one per run
                output.backward(torch.randn_like(output) if gradient is None else gradient, retain_graph=retains)
            else:
                output.backward(retain_graph=retains)

        def step() -> None:
            if config["pass"] == "backward" and not kept:
                kept.append(forward())
            recorder.mark("stage: run")
            output = kept[0] if kept else forward()
            if config["pass"] != "forward":
                backward(output)
            del output

        return step

    return make


def _cross_entropy(config: Mapping[str, Any]) -> tuple[Pass, Tensor | None]:
    num_tokens, vocabulary = config["B"] * config["T"], config["V"]
    logits = torch.randn(num_tokens, vocabulary, requires_grad=True, device="cuda")
    target = torch.randint(vocabulary, (num_tokens, 1), device="cuda").squeeze(1)
    return lambda: F.cross_entropy(logits, target), None


def _fused_linear_cross_entropy(config: Mapping[str, Any]) -> tuple[Pass, Tensor | None]:
    hidden = torch.randn(config["BT"], config["H"], requires_grad=True, dtype=config["dtype"], device="cuda")
    target = torch.randint(config["V"], (config["BT"], 1), device="cuda").squeeze(1)
    linear, others = (
        nn.Linear(config["H"], config["V"], bias=False, dtype=config["dtype"]).to("cuda") for _ in range(2)
    )

    def forward(_kept: nn.Module = others) -> Tensor:
        logits = linear(hidden)
        return F.cross_entropy(logits, target)

    return forward, None


def _kl_div(config: Mapping[str, Any]) -> tuple[Pass, Tensor | None]:
    shape = (config["B"] * config["T"], config["V"])
    logits = torch.randn(shape, requires_grad=True, device="cuda").log_softmax(dim=-1)
    target = torch.randn(shape, device="cuda").softmax(dim=-1)
    return lambda: F.kl_div(logits, target, reduction="batchmean"), None


def _layer_norm(config: Mapping[str, Any]) -> tuple[Pass, Tensor | None]:
    norm, others = (nn.LayerNorm(config["N"], eps=config["eps"]).to("cuda") for _ in range(2))
    inputs = torch.randn(config["M"], config["N"], dtype=config["dtype"], device="cuda")
    gradient = torch.randn_like(inputs)
    inputs.requires_grad_(True)
    return lambda _kept=others: norm(inputs), gradient


class _RMSNorm(nn.Module):
    """As in Llama."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        dtype = hidden.dtype
        hidden = hidden.to(torch.float32)
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + self.eps)
        return self.weight * hidden.to(dtype)


def _rms_norm(config: Mapping[str, Any]) -> tuple[Pass, Tensor | None]:
    norm, others = (_RMSNorm(config["H"], config["eps"]).to("cuda") for _ in range(2))
    inputs = torch.randn(config["M"], config["H"], dtype=config["dtype"], device="cuda")
    gradient = torch.randn_like(inputs)
    inputs.requires_grad_(True)
    return lambda _kept=others: norm(inputs), gradient


class _GatedMLP(nn.Module):
    """Llama's, without biases."""

    def __init__(self, width: int, inner: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return result


def _gated_mlp(config: Mapping[str, Any]) -> tuple[Pass, Tensor | None]:
    activation = F.silu if config["hidden_act"] == "silu" else lambda x: F.gelu(x, approximate="tanh")
    shape = (config["B"] if "B" in config else config["bsz"], config["T"], config["hidden_size"])
    x = torch.randn(shape, dtype=config["dtype"], requires_grad=True, device="cuda")
    layer = _GatedMLP(config["hidden_size"], config["intermediate_size"], activation).to("cuda").to(config["dtype"])
    gradient = torch.randn_like(x) if config["pass"] == "backward" else None
    return lambda: layer(x), gradient


_OPERATIONS: dict[str, tuple[Callable[[Mapping[str, Any]], tuple[Pass, Tensor | None]], bool, bool]] = {
    "cross_entropy": (_cross_entropy, False, False),
    "fused_linear_cross_entropy": (_fused_linear_cross_entropy, False, False),
    "geglu": (_gated_mlp, True, True),
    "kl_div": (_kl_div, False, True),
    "layer_norm": (_layer_norm, True, True),
    "rms_norm": (_rms_norm, True, True),
    "swiglu": (_gated_mlp, True, True),
}
"Operation to its set-up, whether backward is given a gradient, and whether it retains its graph."
