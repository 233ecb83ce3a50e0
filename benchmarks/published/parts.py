"""The parts of the accuracy benchmark that are no published peaks: recorded logs, the CPU, the cost of tracing.

Entry point: ``PARTS``: each takes the options and gives its lines of the table, and what is printed below it.
"""

import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from published import Options, cs336, cs336_rows, recorded
from published.judging import Target
from snugfit.memory import allocator

_RUNS = 3
"Of each depth, the fastest counts: other work on the machine only slows a run down."

Part = Callable[[Options], tuple[list[Target], list[str]]]


def cpu(options: Options) -> tuple[list[Target], list[str]]:
    """The CPU's peak against profiler events: see ``benchmarks/cpu_accuracy.py``."""
    import cpu_accuracy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        measured = list(cpu_accuracy.rows(options.quick))
    errors = [abs(row.error) for row in measured]
    median, worst = statistics.median(errors), max(errors)
    models = len({row.model for row in measured})
    goal = ">= 15 models; median <= 0.1%, worst <= 1%"
    text = f"median {median:.4%}, worst {worst:.2%} of {len(measured)} rows, {models} models"
    met = median <= 0.001 and worst <= 0.01 and models >= 15
    command = "python benchmarks/cpu_accuracy.py"
    target = Target("CPU peak against profiler events", goal, text, met, "modelled, against CPU-measured", command)
    return [target], ["", "## The CPU's peak by model", "", *cpu_accuracy.by_model(measured)]


def simulator(options: Options) -> tuple[list[Target], list[str]]:
    """Events per second of the allocator simulation, on the trace of a training step."""
    script = cs336_rows.Script(cs336.SIZES["medium"].at(128), 4, "train", 1 if options.quick else 5)
    recording = cs336_rows.trace_of(script).recording
    sizes = [birth.num_bytes for birth in recording.births]
    rates = []
    for _ in range(5):
        start = time.process_time()
        allocator.simulate(sizes, recording.events)
        rates.append(len(recording.events) / (time.process_time() - start))
    rate = statistics.median(rates)
    text = f"{rate:,.0f} events/s of CPU time (median of 5 runs over {len(recording.events):,} events)"
    command = "python benchmarks/accuracy.py --part simulator"
    return [Target("simulator", ">= 200,000 events/s", text, rate >= 200_000, "CPU-measured", command)], []


def cost(options: Options) -> tuple[list[Target], list[str]]:
    """Time and memory of tracing a 7B model, and how both grow with depth."""
    program = Path(__file__).resolve().parents[1] / "trace_cost.py"
    depths = (16, 32) if options.quick else (16, 32, 64)
    found: dict[int, dict[str, float]] = {}
    for layers in depths:
        command = [sys.executable, str(program), "--layers", str(layers)]
        runs = []
        for _ in range(_RUNS):
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
        found[layers] = min(runs, key=lambda run: run["seconds"])
    seconds, memory = found[32]["seconds"], found[32]["peak_bytes"] / 1e9
    above = found[32]["above_imports_bytes"] / 1e9
    per_layer = [found[layers]["cpu_seconds"] / layers for layers in depths]
    text = (
        f"{seconds:.1f} s, fastest of {_RUNS} ({found[32]['cpu_seconds']:.1f} s of CPU time), "
        f"{memory:.2f} GB for the whole process, {above:.2f} GB of it above imports; CPU time by depth: "
        + ", ".join(f"{layers} layers {found[layers]['cpu_seconds']:.1f} s" for layers in depths)
    )
    goal = "<= 6 s, <= 0.7 GB, linear in depth (CPU time per layer at most 10% larger at the largest depth)"
    met = seconds <= 6 and memory <= 0.7 and per_layer[-1] <= 1.1 * per_layer[0]
    command_text = "python benchmarks/accuracy.py --part cost"
    return [Target("7B Llama, one configuration", goal, text, met, "CPU-measured", command_text)], []


PARTS: Mapping[str, Part] = {
    "replays": recorded.replays,
    "ordered": recorded.ordered_sizes,
    "cpu": cpu,
    "cost": cost,
    "simulator": simulator,
}
