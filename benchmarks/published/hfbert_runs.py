"""A few updates of the Trainer of 2022 on bert-large: what ``hfbert`` predicts, under transformers 4.46.3.

Entry point: ``rows``. Steps keep their gradients (torch 1.x set them to zero); gradients are clipped; the loss scaler
is left out, as all its work is in place. Left out as well: cuBLAS workspaces of a torch that is not named.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn

from published import MIB, Options, Prediction, Row, Skipped
from published.stages import stages
from snugfit import hardware
from snugfit.memory import tracing
from snugfit.memory.cuda.target import under_torch

TORCH = "1.10"
"The guide is of early 2022 and does not say."
STEPS = 3
CONFIG = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_FALLBACK_CONTEXT = 1343 * MIB
"The family's row with the context alone, for when it is not among the rows."


def rows(published: Sequence[Row], options: Options) -> Iterator[Prediction | Skipped]:
    """Predict what is reserved after some updates, plus the published context."""
    contexts = [row for row in published if "context" in row.fields["optimizer"]]
    context = contexts[0].num_bytes if contexts else _FALLBACK_CONTEXT
    yield from (
        Prediction(row.id, row.num_bytes, "the context, which the others are read against", True) for row in contexts
    )
    for number, row in enumerate(row for row in published if row not in contexts):
        optimizer = next((make for text, make in OPTIMIZERS.items() if text in row.fields["optimizer"]), None)
        if options.quick and number > 1:
            yield Skipped(row.id, "quick run")
        elif optimizer is None or "bert-large" not in row.fields["model"] or row.metric != "nvidia-smi":
            yield Skipped(row.id, "the model or the optimizer is not one of those known")
        else:
            cause = "the allocator's history: torch's version and cuBLAS's own workspaces are not published"
            yield Prediction(row.id, context + _reserved(row, optimizer), cause)


def _reserved(row: Row, optimizer: Callable[[nn.Module], Any] | None) -> int:
    fields = row.fields
    batch = re.match(r"(\d+)(?: x accumulation (\d+))?", fields["micro_batch"])
    size, accumulation = (int(batch[1]), int(batch[2] or 1)) if batch else (0, 0)
    is_half, is_recomputed = fields["precision"].startswith("fp16"), fields["checkpointing"] != "none"

    def make_step(_: object) -> Callable[[], object]:
        config = transformers.BertConfig(**CONFIG, attn_implementation="eager")
        model = transformers.BertForSequenceClassification(config).to("cuda").train()
        if size == 0:
            return lambda: None
        if is_recomputed:
            model.gradient_checkpointing_enable()
        tokens = torch.randint(100, 30000, (size, int(fields["seq_or_image"])))
        labels = torch.zeros(size, dtype=torch.int64)
        made = optimizer(model)

        def step() -> None:
            for _ in range(accumulation):
                autocast = torch.autocast("cuda", dtype=torch.float16) if is_half else nullcontext()
                with autocast:
                    outputs = model(input_ids=tokens.to("cuda"), labels=labels.to("cuda"))
                    loss = outputs.loss
                del outputs
                (loss / accumulation).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
            made.step()
            model.zero_grad(set_to_none=False)

        return step

    with under_torch(TORCH), mock.patch.object(nn.functional, "softmax", _old_softmax):
        trace = tracing.record(make_step, hardware.resolve("v100-sxm-16gb"), STEPS if size else 1)
    return stages(trace)[""].peak.reserved


class OldSoftmax(torch.autograd.Function):
    """Softmax of torch before 1.11, whose derivative asked for the input besides the result."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, dim: int) -> Tensor:
        result = torch.softmax(scores, dim)
        ctx.save_for_backward(scores, result)
        ctx.dim = dim
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        scores, result = ctx.saved_tensors
        return torch.ops.aten._softmax_backward_data(gradient, result, ctx.dim, scores.dtype), None


def _old_softmax(scores: Tensor, dim: int) -> Tensor:
    return OldSoftmax.apply(scores, dim)


class EightBitAdam(torch.optim.Optimizer):
    """The states of bitsandbytes' Adam: a byte per number and moment, and a scale per block of 2048."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})

    def step(self) -> None:  # type: ignore[override]
        """Make the states; the update itself is one kernel in place."""
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state and parameter.numel() >= 4096:
                blocks = -(-parameter.numel() // 2048)
                for moment in (1, 2):
                    state[f"state{moment}"] = torch.zeros_like(parameter, dtype=torch.uint8)
                    state[f"scale{moment}"] = torch.zeros(blocks, dtype=torch.float32, device="cuda")
            elif not state:
                state["state1"], state["state2"] = torch.zeros_like(parameter), torch.zeros_like(parameter)


def _adamw(model: nn.Module) -> Any:
    return transformers.AdamW(model.parameters(), lr=5e-5, no_deprecation_warning=True)


def _adafactor(model: nn.Module) -> Any:
    return transformers.Adafactor(model.parameters(), lr=5e-5, scale_parameter=False, relative_step=False)


def _nothing(model: nn.Module) -> Tensor | None:
    return None


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "AdamW": _adamw,
    "Adafactor": _adafactor,
    "8-bit Adam": EightBitAdam,
    "none (weights": _nothing,
}
