"""Runs scenarios on two gloo processes, which are started once for all of them and killed when they take too long."""

import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch import multiprocessing

TIMEOUT = 150
"Seconds: below the limit at which a test ends the whole run."
RANKS = 2


def results_of(scenarios, folder):
    """What every scenario returns on each rank, by its name.

    Args:
        scenarios: Functions of a rank, of a module's top level, that return what ``torch.load`` reads without code.
        folder: For the ranks to meet and to leave their results in.
    """
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_one_rank, args=(rank, str(folder), scenarios)) for rank in range(RANKS)]
    deadline = time.monotonic() + TIMEOUT
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0.1))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    found = [torch.load(Path(folder) / f"result{rank}", weights_only=True) for rank in range(RANKS)]
    failed = [text for result in found for text in result.values() if isinstance(text, str) and "Traceback" in text]
    assert not failed, failed[0]
    return {name: [result[name] for result in found] for name in found[0]}


def _one_rank(rank, folder, scenarios):
    sys.path.insert(0, str(Path(__file__).parent))
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=limit)
    results = {}
    for scenario in scenarios:
        try:
            results[scenario.__name__] = scenario(rank)
        except Exception:
            results[scenario.__name__] = traceback.format_exc()
    torch.save(results, f"{folder}/result{rank}")
    dist.destroy_process_group()
