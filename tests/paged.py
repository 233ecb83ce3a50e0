"""A small job, the details of its plan without a search, and a run folder: what pages are made of in tests."""

import json

import torch
from torch import nn

import snugfit
from snugfit import Plan, Segment, hardware, runs
from snugfit.page import details
from snugfit.page.details import Considered
from snugfit.training import fingerprint

CARD = hardware.resolve("rtx-3060-12gb")
EVIL = "<script>alert(1)<script><img src=x onerror=alert(2)>"
"A module's name; a dot would be a module in it."


class Model(nn.Module):
    """Two numbered blocks that are alike, and a module whose name is markup."""

    def __init__(self, width=64):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(2))
        self.add_module(EVIL, nn.Linear(width, width))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return getattr(self, EVIL)(x)


def job(width=64):
    return snugfit.Job(
        lambda: Model(width),
        lambda model, x: model(x).square().mean(),
        lambda model: torch.optim.AdamW(model.parameters()),
        lambda n: torch.ones(n, width),
    )


PLAN = Plan(batch_size=8, micro_batch_size=4, fingerprint=fingerprint.of(Model()))


def traced(plan=PLAN, **values):
    """Details as they are without a search."""
    given = {"target": "job.py", "options": {"seq": 8}, **values}
    return details.of(job(), plan, CARD, CARD.memory_bytes, **given)


def considered(name="", needed=12, seconds=1.0, flops=0, **plan):
    """A plan of a search, sizes in GiB."""
    num_bytes = needed * 2**30
    return Considered(
        plan=Plan(**{"batch_size": 8, "micro_batch_size": 8, **plan}),
        name=name,
        needed_bytes=num_bytes,
        peak_allocated_bytes=num_bytes - 2**30,
        peak_reserved_bytes=num_bytes - 2**30,
        context_bytes=2**29,
        margin_bytes=2**29,
        by_category={"saved": num_bytes - 2**30},
        fits=needed <= 11,
        step_time_s=seconds,
        samples_per_s=8 / seconds,
        flops=flops,
    )


BLOCKS = (Segment("blocks.0"), Segment("blocks.1"))
RUNGS = (
    considered("full batch, fp32", 30, 4.0, 100),
    considered("mixed precision", 20, 2.0, 100, precision="bf16-mixed"),
    considered("gradient accumulation", 10, 2.5, 100, precision="bf16-mixed", micro_batch_size=4),
    considered("activation checkpointing", 8, 3.0, 133, precision="bf16-mixed", recompute=BLOCKS),
)


def write_run(folder, plan=PLAN, steps=5, **ending):
    """A run folder as ``train`` leaves it, without training."""
    folder.mkdir(parents=True, exist_ok=True)
    plan.save(folder / runs.PLAN)
    lines = [
        {
            "step": step,
            "loss": 1 / step,
            "lr": [0.1],
            "grad_norm": 1.0,
            "samples_per_s": 4.0,
            "peak_memory_bytes": 10**8,
            "skipped": False,
            "reason": None,
            "metrics": {},
        }
        for step in range(1, steps + 1)
    ]
    (folder / runs.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = {
        "run_dir": str(folder),
        "steps": steps,
        "skipped": 0,
        "seconds": 2.0,
        "peak_memory_bytes": 10**8,
        "peak_memory_source": "a counter",
        "predicted": None,
        "notes": ["the job has no data"],
        "device": "cpu",
        **ending,
    }
    (folder / runs.REPORT).write_text(json.dumps(report))
    return folder
