"""What a step takes beside its operations: whole steps of a tiny model, timed, less what their operations take.

Entry point: ``overheads``. The model is so small that Python, dispatch and autograd are nearly all of its time. The
overheads are what explains what then remains of steps that differ in them; steps take turns, and the median of each
counts.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snugfit.hardware import Device
from snugfit.jobs import Job
from snugfit.memory.events import Work
from snugfit.memory.tracing import record_job
from snugfit.planning import cost
from snugfit.planning.timed_operations import clock, counted
from snugfit.plans import Plan, Segment
from snugfit.rates import Rates
from snugfit.training import build

WIDTH, LAYERS, SAMPLES, LENGTH = 16, 8, 4, 4
ROUNDS, WARM_UP = 25, 3


class _Block(nn.Module):
    """A layer of a transformer, as small as can be, whose modules and operations are those of a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.expand, self.contract = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(n, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        grown: Tensor = self.contract(F.gelu(self.expand(self.after(x))))
        return x + grown


def _loss(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return model(x).square().mean()


def _job() -> Job:
    return Job(
        lambda: nn.Sequential(*(_Block() for _ in range(LAYERS))),
        _loss,
        lambda model: torch.optim.AdamW(model.parameters()),
        lambda n: torch.randn(n, LENGTH, WIDTH),
        count="samples",
    )


def overheads(rates: Rates, device: Device) -> Rates:
    """The rates with their overheads, which are taken to be 0 before.

    Args:
        rates: Whose curves have been measured.
        device: Of this machine.
    """
    rates = _dispatch(rates, device)
    names = tuple(str(i) for i in range(LAYERS))
    plain = Plan(batch_size=SAMPLES, micro_batch_size=SAMPLES)
    plans = {
        "plain": plain,
        "micro-batches": replace(plain, micro_batch_size=SAMPLES // 4),
        "one segment": replace(plain, recompute=(Segment(names),)),
        "segments": replace(plain, recompute=tuple(Segment((name,)) for name in names)),
        "watched": replace(plain, recompute=tuple(Segment((name,), "keep-matmul") for name in names)),
    }
    seconds = _taken({name: _step(plan, device) for name, plan in plans.items()}, device.torch_device)
    counts, rest = [], []
    for name, plan in plans.items():
        work = record_job(_job(), plan, device, windows=_all_micro_batches(plan)).work
        counts.append([sum(has(item) for item in work) for has in _HAS.values()])
        rest.append(seconds[name] - cost.step_time(work, replace(device, rates=rates)))
    solved = np.linalg.lstsq(np.array(counts, dtype=float), np.array(rest), rcond=None)[0]
    found: dict[str, Any] = {name: max(0.0, float(one)) for name, one in zip(_HAS, solved, strict=True)}
    return replace(rates, **found)


def _all_micro_batches(plan: Plan) -> list[tuple[int, ...]]:
    return [tuple(range(plan.accumulation_steps))] * 2


_HAS: dict[str, Callable[[Work], bool]] = {
    "window_s": lambda work: work.begins == "window",
    "micro_step_s": lambda work: work.begins in ("window", "micro-batch"),
    "segment_s": lambda work: work.begins == "segment",
    "repeated_s": lambda work: work.is_repeated,
    "watched_s": lambda work: work.is_watched,
}


def _dispatch(rates: Rates, device: Device) -> Rates:
    """The rates with what an operation of a forward, a backward and an update takes beside its work."""
    job, place = _job(), device.torch_device
    model = build.build_model(job).to(place)
    optimizer, batch = job.optimizer(model), job.batch(SAMPLES).to(place)
    losses: list[Tensor] = []

    def forward() -> None:
        losses[:] = [job.loss(model, batch)]

    def backward() -> None:
        losses[0].backward()  # type: ignore[no-untyped-call]

    def update() -> None:
        optimizer.step()

    def clear() -> None:
        optimizer.zero_grad()

    parts = {"forward_s": forward, "backward_s": backward, "update_s": update, "": clear}
    seconds = _taken(parts, place)
    work = {name: counted(part) for name, part in parts.items()}
    kind = device.kind
    alone = {name: sum(cost.work_seconds(item, kind, rates) for item in done) for name, done in work.items()}
    found: dict[str, Any] = {
        name: max(0.0, seconds[name] - alone[name]) / max(1, len(work[name])) for name in parts if name
    }
    return replace(rates, **found)


def _step(plan: Plan, device: Device) -> Callable[[], object]:
    job = _job()
    engine = build.build(job, plan, device)
    batch = job.batch(SAMPLES)
    return lambda: engine.step(batch)


def _taken(calls: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """The median of the seconds of many calls of each, which take turns."""
    now = clock(device)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(WARM_UP + ROUNDS):
        for name, call in calls.items():
            start = now()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[name].append(now() - start)
    return {name: statistics.median(taken[WARM_UP:]) for name, taken in seconds.items()}
