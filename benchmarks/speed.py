"""Times what a user waits for: the import, an estimate and a plan of BERT-large.

Run ``python benchmarks/speed.py [--write]``; with ``--write`` the table goes to ``benchmarks/results/speed.md``.
Every figure is the best (and the median) of several fresh processes; times and memory of estimate and plan count
above the imports of torch and transformers.
"""

import argparse
import platform
import statistics
import subprocess
import sys
from pathlib import Path

IMPORTS = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import snugfit
print(time.perf_counter() - middle, 0)
"""
CALL = """
import resource, time
import torch, transformers, snugfit
from transformers import BertConfig, BertForSequenceClassification
from snugfit.integrations.known_models import known_job
from snugfit.memory.tracing import estimate
from snugfit.planning.search import plan
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
job = known_job("bert-large", seq=512)
before = peak()
start = time.perf_counter()
{call}
print(time.perf_counter() - start, peak() - before)
"""
SIMULATE = """
import random, time
from snugfit.memory.allocator import simulate
from snugfit.memory.allocation.allocator_settings import parse
chance, sizes, events, alive = random.Random(0), [], [], []
for index in range(1, 200_001):
    sizes.append(chance.choice((512, 4096, chance.randrange(1, 2**20), chance.randrange(2**20, 2**26))))
    events.append(index)
    alive.append(index)
    if len(alive) > 400:
        events.append(-alive.pop(chance.randrange(len(alive))))
start = time.perf_counter()
simulate(sizes, events, settings=parse("{settings}"))
print((time.perf_counter() - start) * 1e6 / len(events), 0)
"""
ESTIMATE = 'estimate(job, snugfit.Plan(batch_size=32, micro_batch_size=32), "rtx-3060-12gb")'
PLAN = 'plan(job, "{device}", batch_size=32)'
ROWS = (
    ("import snugfit, above import torch", IMPORTS, 10, "0.2 s"),
    ("1,000,000 events of the simulated allocator", SIMULATE.format(settings=""), 3, "5 s"),
    ("with expandable segments", SIMULATE.format(settings="expandable_segments:True"), 3, "5 s"),
    ("estimate of BERT-large, batch 32, 512 tokens", CALL.format(call=ESTIMATE), 5, "4 s, 0.7 GB"),
    ("plan of BERT-large for 12 GB", CALL.format(call=PLAN.format(device="rtx-3060-12gb")), 3, "15 s"),
    ("plan of BERT-large for 8 GB", CALL.format(call=PLAN.format(device="rtx-3060-8gb")), 3, "15 s"),
)


def run(code: str) -> tuple[float, float]:
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    seconds, num_bytes = output.split()[-2:]
    return float(seconds), float(num_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/speed.md")
    write = parser.parse_args().write
    import torch

    lines = ["| what | best | median | memory above imports | limit |", "|---|---|---|---|---|"]
    for name, code, times, limit in ROWS:
        runs = [run(code) for _ in range(times)]
        seconds = [run[0] for run in runs]
        memory = max(run[1] for run in runs)
        shown = f"{memory / 1e9:.2f} GB" if memory else "-"
        lines.append(f"| {name} | {min(seconds):.2f} s | {statistics.median(seconds):.2f} s | {shown} | {limit} |")
        print(lines[-1], flush=True)
    header = (
        "# Speed of snugfit itself\n\nCPU-measured, `python benchmarks/speed.py --write`, "
        f"torch {torch.__version__}, Python {platform.python_version()}, two shared cores.\n\n"
    )
    if write:
        path = Path(__file__).parent / "results" / "speed.md"
        path.write_text(header + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
