"""Rows measured with the language model of CS336: stage peaks, checkpoint sweeps, recorded allocator logs.

Entry point: ``rows``. The script behind a row is told from its words: what runs, how often before, what is kept.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from published import Options, Prediction, Row, Skipped, cs336, stages, student, traces
from snugfit import hardware
from snugfit.memory import tracing
from snugfit.memory.recording import Recorder
from snugfit.memory.traces import Trace


@dataclass(frozen=True, slots=True)
class Script:
    """What a published script does; equal scripts are traced once."""

    shape: cs336.Shape
    batch: int
    runs: str
    "``train``, ``forward`` (graph kept) , ``inference`` or ``accumulate`` (forward and backward, gradients add up)."
    warm_ups: int
    amp: bool = False
    half: bool = False
    "bfloat16 parameters and no autocast."
    every: int = 0
    "Blocks per checkpoint; 0 for none."
    empties: bool = False
    "Whether the cache is emptied before the measured step."
    zeroes_last: bool = False
    "Whether gradients go at the end of a step instead of at its beginning."
    draws_warm_ups: bool = False
    "Whether the batches of all warm-up steps are slices of tensors that stay."
    decays_last: bool = False
    "Whether weights decay at the end of their update."
    torch_loss: bool = False
    "Whether the loss is torch's own."
    is_students: bool = False
    "Whether the module is that of ``student`` instead of the course's."
    optimizer: str = "own"
    "``own``, ``torch`` or ``none``; of a step that trains."
    device: str = "a100-sxm-80gb"


def rows(published: Sequence[Row], options: Options) -> Iterator[Prediction | Skipped]:
    """Predict rows; those of one script share a trace."""
    by_script: dict[Script, list[Row]] = {}
    for row in published:
        script = script_of(row, options)
        if isinstance(script, str):
            yield Skipped(row.id, script)
        else:
            by_script.setdefault(script, []).append(row)
    for number, (script, same) in enumerate(by_script.items()):
        if options.quick and (number or script.shape.layers > 24):
            yield from (Skipped(row.id, "quick run") for row in same)
            continue
        found = stages.stages(trace_of(script))
        for row in same:
            stage = _stage(row)
            peak = max(found[name].peak.of(row.metric) for name in _STAGES if stage in ("", name) and name in found)
            num_bytes = found[stage].end.of(row.metric) if row.scope == "resident" else peak
            yield Prediction(row.id, num_bytes, _READ_OFF if script.is_students else "")


_READ_OFF = "the module is not published: its operations are read off the recorded log, so the row proves less"
MEASURED = "measured end"
"Mark where a recorded step ends."
_STAGES = ("forward", "loss", "backward", "optimizer step")


def _stage(row: Row) -> str:
    """The stage whose peak a row is, or nothing for the whole step."""
    found = re.search(r"stage peak: (forward|loss|backward|optimizer step)", row.fields["notes"])
    return found[1] if found else ""


def script_of(row: Row, options: Options) -> Script | str:
    """The script that a row was measured with, or why it is not known."""
    fields = row.fields
    text = f"{fields['config_details']} {fields['notes']}"
    log = log_name(row)
    if not fields["seq_or_image"].isdigit() or not fields["micro_batch"].isdigit():
        return "the size of the batch is not stated as elsewhere"
    context, batch = int(fields["seq_or_image"]), int(fields["micro_batch"])
    width = re.search(r"single-head .* width (\d+)", fields["model"])
    if width:
        return Script(cs336.Shape(int(width[1]), 0, 0, 1, context), batch, "attention", 0)
    sizes = re.search(r"d_model (\d+), d_ff (\d+), (\d+) layers, (\d+) heads", fields["model"])
    if not sizes:
        return "the model's sizes are not stated as elsewhere"
    every = re.search(r"every (\d+) consecutive", fields["checkpointing"])
    if fields["checkpointing"] != "none" and not every:
        return f"checkpointing as in {fields['checkpointing']!r} is not described"
    is_students = "own TransformerLM" in fields["model"]
    # The hand-out of 2025 gathers cos and sin by position and decays weights last.
    is_of_2025 = any(author in fields["source"] for author in ("yyin", "bcrafton"))
    runs, optimizer = _runs(fields, text)
    return Script(
        shape=cs336.Shape(*map(int, sizes.groups()), context=context, gathers_positions=is_of_2025),
        batch=batch,
        runs=runs,
        warm_ups=_warm_ups(text),
        amp="autocast" in fields["precision"],
        half=fields["precision"].startswith("bf16 weights"),
        every=int(every[1]) if every else 0,
        # One of this author's reports says so; of the other the stage peaks show it (block tails of a cold cache).
        empties="cache emptied" in text or "empty_cache" in text or row.family == "enzo",
        zeroes_last="step, zero_grad" in text,
        # Its recorded logs begin with one or two live tensors of five batches beside the batch of the step.
        draws_warm_ups="Wedsonlin" in fields["source"],
        decays_last=is_of_2025,
        is_students=is_students,
        torch_loss=row.family == "shibuki",
        optimizer=optimizer,
        device=_device(fields, log, is_students, options),
    )


def _runs(fields: Mapping[str, str], text: str) -> tuple[str, str]:
    """What a step does, and with which optimizer."""
    optimizer = "none" if fields["optimizer"].startswith("none") else "own"
    if optimizer == "own" and "torch" in fields["optimizer"]:
        optimizer = "torch"
    if "inference" in text or "no_grad" in text:
        return "inference", optimizer
    if optimizer == "none" and "without zero_grad" in text:
        return "accumulate", optimizer
    if optimizer == "none" and "backward" not in text:
        return "forward", optimizer
    return "train", optimizer


def _device(fields: Mapping[str, str], log: str, is_students: bool, options: Options) -> str:
    """A card of the row's capability: where it is not stated, the workspaces in the author's logs tell."""
    is_hopper = "H100" in fields["gpu_type"] or is_students
    if log and not is_hopper:
        is_hopper = workspace_capability(traces.load(options.groundtruth / "traces" / f"{log}.json.gz")) == 9
    return "h100-sxm-80gb" if is_hopper else "a100-sxm-80gb"


def log_name(row: Row) -> str:
    """Name of the recorded log that a row was read from, or nothing."""
    found = re.search(r"traces/(\S+)\.json\.gz", row.fields["config_details"])
    return found[1] if found else ""


def workspace_capability(trace: Mapping[str, Any]) -> int:
    """9 if the recorded card is a Hopper: only there a cuBLAS workspace of 32 MiB is among the blocks."""
    allocations = [num_bytes for kind, _, num_bytes, _ in trace["events"] if kind == 0]
    held = [num_bytes for _, num_bytes in trace["initial_live"]]
    return 9 if 32 << 20 in {*allocations, *held} and 8_519_680 not in {*allocations, *held} else 8


def _warm_ups(text: str) -> int:
    if "no warm-up" in text or "start state: model weights only" in text:
        return 0
    words = {"one": 1, "two": 2, "three": 3, "five": 5}
    found = re.search(r"(\d+|one|two|three|five) warm-up", text)
    return words.get(found[1], 0) or int(found[1]) if found else 1


def trace_of(script: Script) -> Trace:
    """The product's trace of a script: warm-up steps and the measured one."""
    make_step = _attention if script.runs == "attention" else _language_model
    return tracing.record(
        lambda recorder: make_step(recorder, script), hardware.resolve(script.device), script.warm_ups + 1
    )


def _language_model(recorder: Recorder, script: Script) -> Callable[[], object]:
    """The step of a script, written as its author wrote it."""
    if script.is_students:
        model: nn.Module = student.LanguageModel(script.shape).to("cuda")
    else:
        model = cs336.LanguageModel(script.shape, script.every).to("cuda")
    if script.half:
        model = model.to(torch.bfloat16)
    optimizer = _optimizer(script, model)
    size = (script.batch, script.shape.context)
    num_inputs = 2 if script.runs in ("train", "accumulate") else 1  # with labels or without
    batch = [torch.randint(0, 10_000, size, device="cuda") for _ in range(num_inputs)]
    drawn = []
    if script.draws_warm_ups:
        drawn = [torch.randint(0, 10_000, (script.warm_ups, *size), device="cuda") for _ in range(num_inputs)]
    window = 0
    logits: torch.Tensor | None = None
    loss: torch.Tensor | None = None

    def precision() -> AbstractContextManager[object]:
        return torch.autocast("cuda", torch.bfloat16) if script.amp else nullcontext()

    def begins() -> list[torch.Tensor]:
        nonlocal window
        window += 1
        if drawn and window <= script.warm_ups:
            return [inputs[window - 1] for inputs in drawn]
        if script.empties and window == script.warm_ups + 1:
            recorder.mark(stages.EMPTY_CACHE)
        return batch

    def forward() -> object:
        (x,) = begins()
        recorder.mark("stage: forward")
        with torch.inference_mode() if script.runs == "inference" else nullcontext(), precision():
            return model(x)

    def train() -> None:
        x, y = begins()
        if not script.zeroes_last:
            optimizer.zero_grad(set_to_none=True)
        recorder.mark("stage: forward")
        with precision():
            logits = model(x)
            recorder.mark("stage: loss")
            loss = _loss(script, logits, y)
        recorder.mark("stage: backward")
        loss.backward()
        if script.optimizer != "none":
            recorder.mark("stage: optimizer step")
            optimizer.step()
        recorder.mark(MEASURED)
        recorder.mark("stage: ")
        if script.zeroes_last:
            optimizer.zero_grad(set_to_none=True)

    def accumulate() -> None:  # written without a function: what a step names lives until the next one names it
        nonlocal logits, loss
        x, y = begins()
        recorder.mark("stage: forward")
        with precision():
            logits = model(x)
            recorder.mark("stage: loss")
            loss = _loss(script, logits, y)
        recorder.mark("stage: backward")
        loss.backward()
        recorder.mark("stage: ")

    return {"train": train, "accumulate": accumulate}.get(script.runs, forward)


def _optimizer(script: Script, model: nn.Module) -> torch.optim.Optimizer:
    if script.optimizer == "torch":
        return torch.optim.AdamW(model.parameters())
    if script.is_students:
        return student.AdamW(model.parameters())
    return cs336.AdamW(model.parameters(), decays_last=script.decays_last)


def _loss(script: Script, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if script.torch_loss:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return (student if script.is_students else cs336).cross_entropy(logits, labels)


def _attention(recorder: Recorder, script: Script) -> Callable[[], object]:
    """Three leaves, made within the recording, and one forward and backward of naive attention without a mask."""
    shape = (script.batch, script.shape.context, script.shape.d_model)
    q, k, v = (torch.randn(shape, device="cuda", requires_grad=True) for _ in range(3))
    output: torch.Tensor | None = None
    loss: torch.Tensor | None = None

    def step() -> None:
        nonlocal output, loss
        recorder.mark("stage: forward")
        output = _attend(q, k, v)
        loss = output.sum()
        recorder.mark("stage: backward")
        loss.backward()
        recorder.mark("stage: ")

    return step


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As ``cs336.attend``, but the largest scores have a name and the shifted ones have none."""
    scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(k.shape[-1])
    weights = _softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, v)


def _softmax(x: torch.Tensor) -> torch.Tensor:
    largest = torch.max(x, dim=-1, keepdim=True)[0]
    exponents = torch.exp(x - largest)
    return exponents / torch.sum(exponents, dim=-1, keepdim=True)
