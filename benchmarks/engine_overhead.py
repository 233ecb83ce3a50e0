"""What the engine costs beside a hand-written loop of the same arithmetic: operations, synchronisations, time, memory.

Run ``python benchmarks/engine_overhead.py [--write]``: it continues in the virtual environment of ``benchmarks/peers``,
so that Accelerate and Fabric are timed in the same run. What is counted is also asserted, in
``tests/test_overhead.py``; times are only printed, because on shared cores the same loop against itself varies by
several percent: a second run of the baseline stands beside each ratio.
"""

import argparse
import gc
import math
import platform
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils._python_dispatch import TorchDispatchMode

import snugfit
from snugfit.memory.torch_private import profiled_memory

ROOT = Path(__file__).resolve().parents[1]
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
COUNTS = ("equal", "ragged", "reported")
ON_DEVICE = "reported as a tensor"
SCALE = 1024.0
WIDTH = 8
_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
Run = Callable[[Sequence[Any]], object]


class Setting(NamedTuple):
    """One way of training; the loop by hand and the engine do the same arithmetic under it."""

    precision: str = "32-true"
    max_grad_norm: float | None = None
    counts: str = "equal"
    "Equal and known, known but ragged, or reported by the loss after its forward."
    groups: int = 1
    nonfinite: str = "skip"


class Model(nn.Module):
    """Some linear layers, one for each parameter group."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]).float(), batch["y"])


def total_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]).float(), batch["y"], reduction="sum")


def reporting_loss(model: nn.Module, batch: dict[str, Tensor]) -> snugfit.Loss:
    return snugfit.Loss(total_loss(model, batch), batch["x"].numel())


def tensor_reporting_loss(model: nn.Module, batch: dict[str, Tensor]) -> snugfit.Loss:
    return snugfit.Loss(total_loss(model, batch), (batch["x"] != 0).sum())


_LOSSES = {"reported": reporting_loss, ON_DEVICE: tensor_reporting_loss}


def window_of(number: int, counts: str = "equal") -> list[dict[str, Tensor]]:
    """Micro-batches, whose sizes differ where their counts do."""
    sizes = [4 + (i % 2 if counts != "equal" else 0) for i in range(number)]
    return [{"x": torch.ones(size, WIDTH), "y": torch.zeros(size, WIDTH)} for size in sizes]


def parts_of(setting: Setting) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Model(setting.groups)
    groups = [{"params": list(layer.parameters())} for layer in model.layers]
    return model, torch.optim.SGD(groups, lr=1e-3)


def engine_run(setting: Setting) -> Run:
    """A window by the engine."""
    model, optimizer = parts_of(setting)
    engine = snugfit.Engine(
        model,
        optimizer,
        loss=_LOSSES.get(setting.counts, mean_loss),
        count="samples",
        precision=setting.precision,
        max_grad_norm=setting.max_grad_norm,
        loss_scale=snugfit.LossScale(init_scale=SCALE) if setting.precision == "16-mixed" else None,
        nonfinite=setting.nonfinite,
    )
    return engine.step_window


def loop_run(setting: Setting) -> Run:
    """The same window by hand: loss and gradient norm are returned, a window that is not finite is skipped."""
    model, optimizer = parts_of(setting)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    scale = SCALE if setting.precision == "16-mixed" else None

    def autocast() -> AbstractContextManager[Any]:
        dtype = _DTYPES.get(setting.precision)
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)

    def window(batches: Sequence[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        counts = [batch["x"].numel() if setting.counts == "reported" else len(batch["x"]) for batch in batches]
        reference = 2.0 ** math.floor(math.log2(sum(counts)))  # a power of two, so that low precision loses nothing
        logged = None
        for batch, count in zip(batches, counts, strict=True):
            with autocast():
                loss = (total_loss if setting.counts == "reported" else mean_loss)(model, batch)
            if setting.counts == "reported":
                loss = loss / reference
            elif setting.counts == "ragged":
                loss = loss * (count / reference)
            else:
                loss = loss / len(batches)
            value = loss.detach()
            logged = value if logged is None else logged + value
            (loss if scale is None else loss * scale).backward()
            del loss
        share = 1.0 if setting.counts == "equal" else reference / sum(counts)
        gradients = [p.grad for p in parameters if p.grad is not None]
        if (factor := share / (scale or 1.0)) != 1.0:
            torch._foreach_mul_(gradients, factor)
        if share != 1.0:
            logged = logged * share
        norm = get_total_norm(gradients)
        if setting.nonfinite == "ignore" or torch.isfinite(norm):
            if setting.max_grad_norm is not None:
                clip_grads_with_norm_(parameters, setting.max_grad_norm, norm)
            optimizer.step()
        return logged, norm

    return window


READS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "numpy", "cpu")
"Methods of a tensor that wait for its device."
_NO_KERNELS = ("aten.lift_fresh.default", "aten.detach.default")
"What only wraps data that is there."


class Operations(TorchDispatchMode):
    """Counts the tensor operations that are dispatched, and apart from them the reads of a tensor's value."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()
        self.reads = 0
        self._reading = False
        self._patches = ExitStack()

    def __enter__(self) -> "Operations":
        for name in READS:
            self._patches.enter_context(mock.patch.object(Tensor, name, self._read(getattr(Tensor, name))))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._reading and op.namespace == "aten" and str(op) not in _NO_KERNELS:  # others mark a profile
            if op is torch.ops.aten._local_scalar_dense.default:
                self.reads += 1
            else:
                self.counted[str(op)] += 1
        return op(*args, **(kwargs or {}))

    def _read(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def reading(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._reading:
                return method(tensor, *args, **kwargs)
            self.reads, self._reading = self.reads + 1, True
            try:
                return method(tensor, *args, **kwargs)
            finally:
                self._reading = False

        return reading


def operations(run: Run, batches: Sequence[Any]) -> Operations:
    """Operations and reads of one window, the second: the optimizer's state and references are there."""
    run(batches)
    with Operations() as mode:
        run(batches)
    return mode


class Cost(NamedTuple):
    """Operations that the engine dispatches beyond those of the loop by hand, and all of its reads of a value."""

    operations_per_micro_step: float
    operations_per_window: float
    reads_per_micro_step: float
    reads_per_window: float


def cost(setting: Setting) -> Cost:
    """Counted in windows of 4 and of 8 micro-batches: what grows belongs to the micro-step, the rest to the window."""
    totals, reads = [], []
    for number in (4, 8):
        batches = window_of(number, setting.counts)
        engine, loop = operations(engine_run(setting), batches), operations(loop_run(setting), batches)
        totals.append(engine.counted.total() - loop.counted.total())
        reads.append(engine.reads)
    steps, read = (totals[1] - totals[0]) / 4, (reads[1] - reads[0]) / 4
    return Cost(steps, totals[0] - 4 * steps, read, reads[0] - 4 * read)


def reads_on_device(number: int) -> int:
    """Reads in a window whose losses report their counts as tensors of the device."""
    return operations(engine_run(Setting(counts=ON_DEVICE)), window_of(number, "ragged")).reads


def peak_bytes(run: Run, batches: Sequence[Any]) -> int:
    """Largest sum of live allocations that one window makes, the second, above what was there before it."""
    run(batches)
    gc.collect()
    with profiled_memory("no mark") as events:
        run(batches)
    live: dict[int, int] = {}
    held = peak = 0
    for event in events:
        if event.num_bytes > 0:
            live[event.address] = event.num_bytes
            held += event.num_bytes
            peak = max(peak, held)
        else:  # of something from before the window it lowers what is held, as it does for the other
            held -= live.pop(event.address, -event.num_bytes)
    return peak


# times


class Empty(nn.Module):
    """Nothing but one weight, so that what is timed is the loop around it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def empty_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).sum()


def by_hand(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> Run:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def window(batches: Sequence[Any]) -> None:
        for batch in batches:
            (loss(model, batch) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return window


def by_snugfit(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], nonfinite: str = "skip") -> Run:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return snugfit.Engine(model, optimizer, loss=loss, nonfinite=nonfinite).step_window


def by_accelerate(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], steps: int) -> Run:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))

    def window(batches: Sequence[Any]) -> None:
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()

    return window


def by_fabric(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], steps: int) -> Run:
    import lightning

    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-3))

    def window(batches: Sequence[Any]) -> None:
        for i, batch in enumerate(batches):
            is_accumulating = (i + 1) % steps != 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                fabric.backward(loss(model, batch) / steps)
            if not is_accumulating:
                optimizer.step()
                optimizer.zero_grad()

    return window


def best(run: Run, batches: Sequence[Any]) -> float:
    start = time.perf_counter()
    run(batches)
    return time.perf_counter() - start


def best_of(runs: dict[str, tuple[Run, Sequence[Any]]], times: int) -> dict[str, float]:
    """Best time of each, all of them taking turns."""
    found = dict.fromkeys(runs, float("inf"))
    for _ in range(times):
        for name, (run, batches) in runs.items():
            found[name] = min(found[name], best(run, batches))
    return found


def python_overhead(depth: int, times: int, micro_steps: int = 16) -> dict[str, tuple[float, float]]:
    """Microseconds above the loop by hand: per micro-step, and per window of one micro-batch.

    Args:
        depth: Modules of the model, each with one weight.
        times: Best of how many.
        micro_steps: Of the longer window.
    """

    def model() -> nn.Module:
        return nn.Sequential(*(Empty() for _ in range(depth)))

    makers: dict[str, Callable[[int], Run]] = {
        "hand-written loop": lambda n: by_hand(model(), empty_loss),
        "hand-written loop again (A/A)": lambda n: by_hand(model(), empty_loss),
        'snugfit, nonfinite="ignore"': lambda n: by_snugfit(model(), empty_loss, "ignore"),
        "snugfit": lambda n: by_snugfit(model(), empty_loss),
    }
    if _is_installed("accelerate"):
        makers["Accelerate"] = lambda n: by_accelerate(model(), empty_loss, n)
    if _is_installed("lightning"):
        makers["Lightning Fabric"] = lambda n: by_fabric(model(), empty_loss, n)
    found = []
    for number in (1, micro_steps):
        batches = [torch.ones(1) for _ in range(number)]
        runs = {name: (maker(number), batches) for name, maker in makers.items()}
        best_of(runs, 20)
        found.append(best_of(runs, times))
        _forget_accelerate()
    one, many = found
    slope = {name: (many[name] - one[name]) / (micro_steps - 1) * 1e6 for name in makers}
    base = "hand-written loop"
    return {name: (slope[name] - slope[base], (one[name] - one[base]) * 1e6) for name in makers} | {
        "(the loop itself)": (slope[base], one[base] * 1e6)
    }


def wall_ratios(times: int = 30) -> dict[str, tuple[float, float]]:
    """Time of a window of a real, small model over that of the loop by hand: best and median."""

    class Perceptron(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*(part for _ in range(6) for part in (nn.Linear(256, 256), nn.ReLU())))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    batches = [torch.ones(32, 256) for _ in range(8)]
    runs: dict[str, tuple[Run, Sequence[Any]]] = {
        "hand-written loop": (by_hand(Perceptron(), loss), batches),
        "hand-written loop again (A/A)": (by_hand(Perceptron(), loss), batches),
        "snugfit": (by_snugfit(Perceptron(), loss), batches),
    }
    taken: dict[str, list[float]] = {name: [] for name in runs}
    best_of(runs, 5)
    for _ in range(times):
        for name, (run, given) in runs.items():
            taken[name].append(best(run, given))
    base = taken["hand-written loop"]
    return {
        name: (min(t) / min(base), statistics.median(t) / statistics.median(base))
        for name, t in taken.items()
        if name != "hand-written loop"
    }


def _is_installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


def _forget_accelerate() -> None:
    """Its state is one for a process; its own tests reset it this way."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)


def settings() -> list[Setting]:
    found = [Setting(p, clip, counts) for p in PRECISIONS for clip in (None, 1.0) for counts in COUNTS]
    return [*found, Setting(groups=3), Setting(max_grad_norm=1.0, groups=3), Setting(nonfinite="ignore")]


def document() -> str:
    """The results as a page."""
    torch.set_num_threads(1)
    lines = [
        "# What the engine costs",
        "",
        f"CPU-measured, `python benchmarks/engine_overhead.py --write`, torch {torch.__version__}, Python "
        f"{platform.python_version()}, one thread, two shared cores.",
        "",
        "## Counted",
        "",
        "Operations that the engine dispatches beyond a hand-written loop of the same arithmetic, which also "
        "returns loss and gradient norm, skips what is not finite, and weights ragged losses by count / R with R a "
        "power of two (a loop that divides by the count at once spares two multiplications per window). Reads are "
        "all that the engine makes of a tensor's value, each a synchronisation on a GPU. Peak is the engine's above "
        "the loop's in a window of 4. Limits: 2 operations per micro-step, 3 per window and parameter group, no "
        "read per micro-step and one per window, 64 KiB.",
        "",
        "| precision | clipping | counts | groups | nonfinite | operations per micro-step | per window | "
        "reads per micro-step | per window | peak |",
        "|---" * 10 + "|",
    ]
    for setting in settings():
        counted = cost(setting)
        batches = window_of(4, setting.counts)
        peak = peak_bytes(engine_run(setting), batches) - peak_bytes(loop_run(setting), batches)
        clip = "no" if setting.max_grad_norm is None else "yes"
        lines.append(
            f"| {setting.precision} | {clip} | {setting.counts} | {setting.groups} | {setting.nonfinite} | "
            f"{counted.operations_per_micro_step:+g} | {counted.operations_per_window:+g} | "
            f"{counted.reads_per_micro_step:g} | {counted.reads_per_window:g} | {peak:+d} B |"
        )
    lines += [
        "",
        "A loss that reports its count as a tensor of the device has it read, for a count of 0 is not back-propagated: "
        f"{reads_on_device(4)} reads in a window of 4, {reads_on_device(8)} in one of 8.",
        "",
        "## Python time",
        "",
        "Microseconds above the hand-written loop, best of some hundred, all taking turns; on a model with one weight "
        "(the limit is half of Accelerate's per micro-step) and on one with 200 modules of one weight each. A window "
        "is one of a single micro-batch.",
        "",
        "| | micro-step, 1 weight | window, 1 weight | micro-step, 200 weights | window, 200 weights |",
        "|---|---|---|---|---|",
    ]
    small, large = python_overhead(1, times=400), python_overhead(200, times=60)
    for name in small:
        numbers = (*small[name], *large[name])
        lines.append(f"| {name} | " + " | ".join(f"{number:.1f} us" for number in numbers) + " |")
    lines += [
        "",
        "## Wall time",
        "",
        "Over the hand-written loop, six layers of 256, windows of 8 x 32. What the second line differs from 1.00 is "
        "the noise of this machine.",
        "",
        "| | best of 30 | median |",
        "|---|---|---|",
    ]
    lines += [f"| {name} | {low:.3f} | {middle:.3f} |" for name, (low, middle) in wall_ratios().items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/engine_overhead.md")
    parser.add_argument("--here", action="store_true", help="stay in this environment, with the peers that it has")
    options = parser.parse_args()
    if not options.here:
        sys.path.insert(0, str(ROOT / "benchmarks" / "peers"))
        import run

        python = run.environment(run.HERE / ".venv")
        again = [str(python), __file__, "--here", *(["--write"] if options.write else [])]
        sys.exit(subprocess.run(again, check=False).returncode)
    page = document()
    print(page)
    if options.write:
        (ROOT / "benchmarks" / "results" / "engine_overhead.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
