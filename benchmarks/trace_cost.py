"""What tracing one step costs: a Llama with the sizes of the 7B model and a number of layers, in a fresh process.

Run ``python benchmarks/trace_cost.py [--layers 32]``. Time counts from after the imports; peak memory is that of the
whole process, and above what the imports took (Linux only). Prints one JSON document.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import snugfit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    layers = parser.parse_args().layers
    torch.set_num_threads(1)

    def make_step() -> Callable[[], None]:
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers)).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.randint(0, 32_000, (1, 2048), device="cuda")

        def step() -> None:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    before, start, cpu = _peak_bytes(), time.perf_counter(), time.process_time()
    report = snugfit.trace(make_step, "h100-sxm-80gb")
    print(
        json.dumps(
            {
                "layers": layers,
                "seconds": time.perf_counter() - start,
                "cpu_seconds": time.process_time() - cpu,
                "peak_bytes": _peak_bytes(),
                "above_imports_bytes": _peak_bytes() - before,
                "predicted_bytes": report.peak_allocated_bytes,
            }
        )
    )


def _peak_bytes() -> int:
    """Largest resident size of this process; getrusage would count that of the process which started it."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
