"""What torch's ``sac_milp`` decides for a GPT-2 at its real shape, with the times of ``operations``.

Entry points: ``graph_of`` (its statistics, once) and ``decided``. Nothing is executed: all of it runs on fake tensors.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from gpt2 import GPT, Shape
from operations import DEVICE, nanoseconds
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools import runtime_estimator
from torch.distributed._tools.ilp_utils import Graph, aggregate_stats, parse_module_info
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.runtime_estimator import RuntimeEstimator
from torch.distributed._tools.sac_estimator import SACEstimator
from torch.distributed._tools.sac_ilp import sac_milp
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from snugfit.hardware import Device


@dataclass(frozen=True)
class Decision:
    """One answer of ``sac_milp``."""

    discarded: Mapping[str, float]
    "Name of each checkpointed module, and the share of its activations that is dropped."
    seconds: float
    "Spent by the solver."


def _roofline(device: Device, func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    """Result and milliseconds of an operation."""
    out = func(*args, **(kwargs or {}))
    if func._overloadpacket in runtime_estimator._IGNORE_OPS:
        return out, 0.0
    tensors = [one for one in pytree.tree_leaves((args, kwargs, out)) if isinstance(one, torch.Tensor)]
    count = flop_registry.get(func._overloadpacket)
    flops = count(*args, **(kwargs or {}), out_val=out) if count else 0
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else "float32"
    moved = sum(one.numel() * one.element_size() for one in tensors)
    return out, nanoseconds(func.__name__, dtype, flops, moved, device) / 1e6


def graph_of(shape: Shape, batch: int, device: Device = DEVICE, *, autocasts: bool = True) -> Graph:
    """The statistics that it decides with: memory, times and trade-offs of every module."""
    RuntimeEstimator._roofline_estimate = classmethod(lambda cls, *call: _roofline(device, *call))
    with FakeTensorMode():
        model = GPT(shape)
        ids = torch.zeros(batch, shape.context, dtype=torch.long)

        def step() -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocasts):
                loss = model(ids).float().sum()
            loss.backward()

        tracker, times, trade_offs = MemTracker(), RuntimeEstimator(), SACEstimator()
        tracker.track_external(model)
        with tracker:
            step()
            tracker.reset_mod_stats()
            step()
        with times("operator-level-cost-model"):
            step()
        with trade_offs(estimate_mode_type="operator-level-cost-model"):
            step()
        logging.getLogger("torch.distributed._tools.sac_ilp").setLevel(logging.ERROR)
        return parse_module_info(aggregate_stats(model, tracker, times, trade_offs, torch.device("cpu")))


def decided(graph: Graph, budget_bytes: float) -> Decision | None:
    """What it drops within a budget of its own reckoning; None where it finds nothing."""
    start = time.perf_counter()
    found, _, peak = sac_milp(graph, memory_budget=budget_bytes / 2**30)
    if peak == -1:
        return None
    return Decision(found, time.perf_counter() - start)
