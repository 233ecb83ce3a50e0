"""Single-head attention without parameters, memory read between forward and backward: ``attn-*`` rows.

Entry point: ``rows``.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from published import Options, Prediction, Row, Skipped, cs336, stages
from snugfit import hardware
from snugfit.memory import tracing
from snugfit.memory.recording import Recorder

_WARM_UPS = 2
"The scripts warm up five times; from the second time on nothing changes."
_QUICK = 2
"Rows of a quick run."


def rows(published: Sequence[Row], options: Options) -> Iterator[Prediction | Skipped]:
    """Predict the rows of both scripts."""
    scripts = {"attn-magma": _with_torch, "attn-yyin": _written_out}
    for number, row in enumerate(published):
        width = re.search(r"head width (\d+)", row.fields["config_details"])
        script = scripts.get(row.family)
        if options.quick and number % len(published) >= _QUICK:
            yield Skipped(row.id, "quick run")
        elif width is None or script is None or row.scope != "resident before backward":
            yield Skipped(row.id, "head width, script or scope is not one of those known")
        else:
            shape = (int(row.fields["micro_batch"]), int(row.fields["seq_or_image"]), int(width[1]))
            trace = tracing.record(
                lambda recorder, script=script, shape=shape: script(recorder, shape), _device(row), _WARM_UPS + 1
            )
            yield Prediction(row.id, stages.stages(trace)["forward"].end.of(row.metric))


def _device(row: Row) -> hardware.Device:
    return hardware.resolve("h100-sxm-80gb" if "H100" in row.fields["gpu_type"] else "a100-sxm-80gb")


def _with_torch(recorder: Recorder, shape: tuple[int, int, int]) -> Callable[[], None]:
    """Queries, keys and values are copies of leaves on the host: their gradients stay there."""
    leaves = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    q, k, v = (leaf.to("cuda") for leaf in leaves)

    def forward() -> Tensor:
        weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(shape[-1]), dim=-1)
        return weights @ v

    def step() -> None:
        recorder.mark("stage: forward")
        output = forward()
        recorder.mark("stage: backward")
        torch.autograd.grad(output.sum(), [q, k, v])  # from there on the gradients are the host's

    return step


def _written_out(recorder: Recorder, shape: tuple[int, int, int]) -> Callable[[], None]:
    """Leaves on the card, a mask of all pairs, every operation written out; the loop's last loss is still there."""
    q, k, v = (torch.randn(shape, device="cuda", requires_grad=True) for _ in range(3))
    mask = torch.ones(shape[1], shape[1], dtype=torch.bool, device="cuda").tril()
    loss: Tensor | None = None

    def step() -> None:
        nonlocal loss
        recorder.mark("stage: forward")
        output = cs336.attend(q, k, v, mask)
        recorder.mark("stage: backward")
        loss = output.sum()
        loss.backward()

    return step
