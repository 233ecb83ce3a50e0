"""The main job end to end, on a machine without a GPU; every number printed is from this run.

What it shows: (a) a large model planned for two cards that it does not fit; (b) a real training run that dies of
out-of-memory under a hard cap; (c) the same run planned for that cap, inside of it; (d) that the prediction and the
losses hold.

How to run: ``make demo``, or ``python examples/demo.py``. Under four minutes on two cores.

Expected output: two ladders, an out-of-memory message, a falling loss, a difference of predicted and measured peak
within 1 %, and the first losses equal to those of the full batch within 1e-5.
"""

import json
import tempfile
import time
from pathlib import Path

from snugfit import Plan, capped, hardware, plan_tables, runs, sizes, tables
from snugfit.integrations.known_models import known_job
from snugfit.memory.measuring import measure
from snugfit.planning import search
from snugfit.targets import load_target

TARGET = str(Path(__file__).with_name("python_lm.py"))
BATCH_SIZE = 32
TENSOR_BYTES = 400 * sizes.MIB
STEPS = 30
COMPARED_STEPS = 5
LOSS_TOLERANCE = 1e-5
PEAK_TOLERANCE = 0.01
_AS_GIVEN = {"precision": "32-true", "optimizer_impl": "as-given"}
"What the full batch is compared with, number by number."


def main() -> int:
    """Run the four parts; return 0 when everything held."""
    started = time.perf_counter()
    out = tables.console()
    plan_bert_large()
    with tempfile.TemporaryDirectory() as folder:
        held = train_under_cap(Path(folder))
    out.print(f"\n{'everything held' if held else 'NOT everything held'}, {time.perf_counter() - started:.0f} s")
    return 0 if held else 1


def plan_bert_large() -> None:
    """(a) BERT-large, 512 tokens, batch 32, for a card of 12 GB and one of 8 GB."""
    out = tables.console()
    job = known_job("bert-large", seq=512)
    for device in ("rtx-3060-12gb", "rtx-3060-8gb"):
        heading(f"(a) BERT-large, 512 tokens, batch {BATCH_SIZE}, on {device} (modelled, no GPU used)")
        card = hardware.resolve(device)
        found = search.plan(job, card, batch_size=BATCH_SIZE)
        plan_tables.show(out, found)


def train_under_cap(folder: Path) -> bool:
    """(b) to (d): the language model under one cap, naively and planned; returns whether everything held."""
    out = tables.console()
    job = load_target(TARGET)
    full = Plan(batch_size=BATCH_SIZE, micro_batch_size=BATCH_SIZE)
    baseline = capped.measure_baseline(TARGET)
    cap = baseline + capped.RESERVE_BYTES + TENSOR_BYTES
    allowed = capped.budget_under_cap(cap, baseline)

    heading(f"(b) python_lm, the full batch of {BATCH_SIZE} x 256 bytes, under a hard cap of {sizes.text(cap)}")
    out.print(f"the process has {sizes.text(baseline)} before the first tensor; {sizes.text(allowed)} are left")
    status = run(full, cap, folder / "naive")
    out.print(f"the child ended with status {status} ({'out of memory' if status == 3 else 'not out of memory'})")

    heading("(c) the same job planned for the same cap")
    found = search.plan(job, "cpu", batch_size=BATCH_SIZE, budget=allowed, fixed=_AS_GIVEN)
    plan_tables.show(out, found)
    planned_status = run(found.plan, cap, folder / "planned")
    if planned_status:
        out.print(f"the planned run ended with status {planned_status}")
        return False
    losses = read_losses(folder / "planned")
    shown = sorted({0, *range(9, STEPS, 10), STEPS - 1})
    out.print("\nloss in nats: " + ", ".join(f"step {i + 1}: {losses[i]:.3f}" for i in shown))

    heading("(d) what was predicted and what was measured")
    measured = measure(job, found.plan, "cpu")
    predicted_bytes, measured_bytes = found.memory.peak_allocated_bytes, measured.peak_allocated_bytes
    difference = predicted_bytes / measured_bytes - 1
    out.print(f"peak predicted {sizes.text(predicted_bytes)}, measured {sizes.text(measured_bytes)}: {difference:+.2%}")
    out.print(f"of the {sizes.text(allowed)} that the cap leaves, the tensors take {measured_bytes / allowed:.0%}")
    runs.train(job, full, steps=COMPARED_STEPS, run_dir=folder / "full", device="cpu")
    pairs = list(zip(losses, read_losses(folder / "full"), strict=False))
    largest = max(abs(a - b) for a, b in pairs)
    for i, (a, b) in enumerate(pairs, start=1):
        out.print(f"step {i}: {a:.7f} under the cap, {b:.7f} full batch without a cap")
    out.print(f"largest difference {largest:.1e}, allowed {LOSS_TOLERANCE:.0e}")
    return (
        status == capped.EXIT_OUT_OF_MEMORY
        and losses[-1] < losses[0]
        and abs(difference) <= PEAK_TOLERANCE
        and largest <= LOSS_TOLERANCE
    )


def run(plan: Plan, cap_bytes: int, folder: Path) -> int:
    """Train in a child under the cap, without recovery from out-of-memory, and return its exit status."""
    path = folder / runs.PLAN
    plan.save(path)
    return capped.run_capped(TARGET, path, cap_bytes=cap_bytes, steps=STEPS, run_dir=folder, recover=False)


def read_losses(folder: Path) -> list[float]:
    """Loss of every step of a run."""
    return [json.loads(line)["loss"] for line in (folder / runs.METRICS).read_text().splitlines()]


def heading(text: str) -> None:
    print(f"\n== {text}\n", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
