"""Plans every scenario of ``examples/`` for its cards: the page of tables, and the plans themselves.

Run ``python benchmarks/planning/scenarios.py [--only NAME] [--write] [--pages FOLDER]``. Each plan is made in a process
of its own, so that time and resident memory are those of one planning; ``--write`` keeps the plan in ``examples/plans``
and puts its section into ``benchmarks/results/planning_scenarios.md``; ``--pages`` writes what ``snugfit report`` shows
of each plan. The status is 1 where a target is missed.
"""

import argparse
import importlib
import json
import os
import platform
import re
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PLANS = ROOT / "examples" / "plans"
PAGE = ROOT / "benchmarks" / "results" / "planning_scenarios.md"
LIMIT_BYTES = 1 << 30
LONGEST_S = 1200
LIBRARIES = {"8bit-optimizer": "torchao.optim", "lora": "peft"}
"What a change of the job imports."


@dataclass(frozen=True)
class Scenario:
    """A job file, a card and a batch size."""

    job: str
    device: str
    batch_size: int
    fixed: Mapping[str, Any] = field(default_factory=dict)
    allow: tuple[str, ...] = ()
    fits: bool = True
    limit_s: float | None = None
    "Seconds that planning may take above imports, on two cores that do nothing else."

    @property
    def name(self) -> str:
        """Of its plan and its section."""
        file, _, function = self.job.partition(".py:")
        words = [file.removesuffix(".py"), function.removesuffix("_job"), self.device, *self.fixed.values()]
        return "-".join(str(word).replace("_", "-") for word in (*words, *self.allow) if word)

    @property
    def command(self) -> str:
        """What prints the same."""
        options = "".join(f" --{name.replace('_', '-')} {value}" for name, value in self.fixed.items())
        options += "".join(f" --allow {name}" for name in self.allow)
        return f"snugfit plan examples/{self.job} --batch {self.batch_size} --device {self.device}{options}"


_PURE_BF16 = {"precision": "bf16-true", "bf16_update": "nearest"}
SCENARIOS = (
    Scenario("bert_base.py", "rtx-3060-12gb", 32, limit_s=8),
    Scenario("bert_base.py", "rtx-3060-6gb", 128, limit_s=8),
    Scenario("bert_large.py", "rtx-3060-12gb", 32),
    Scenario("bert_large.py", "rtx-3060-8gb", 32),
    Scenario("llama2_7b.py", "a100-sxm-80gb", 64, fits=False, limit_s=30),
    Scenario("llama2_7b.py", "a100-sxm-80gb", 64, fixed=_PURE_BF16, limit_s=30),
    Scenario("llama2_7b.py", "a100-sxm-80gb", 64, allow=("8bit-optimizer",), limit_s=30),
    Scenario("llama2_7b.py", "rtx-3090", 1024, fits=False, limit_s=30),
    Scenario("llama2_7b.py", "rtx-3090", 1024, allow=("lora",), limit_s=30),
    Scenario("sd_unet.py", "rtx-3060-12gb", 32, fits=False, limit_s=30),
    Scenario("sd_unet.py", "rtx-3060-12gb", 32, allow=("8bit-optimizer",), limit_s=30),
    Scenario("sd_unet.py", "rtx-3090", 32, limit_s=30),
    Scenario("resnet50.py", "rtx-3060-8gb", 256),
    Scenario("resnet50.py:group_norm_job", "rtx-3060-8gb", 256),
    Scenario("vit_l.py", "rtx-3060-12gb", 64),
    Scenario("gpt2_large_vocabulary.py", "rtx-3060-12gb", 64),
    Scenario("gpt2_large_vocabulary.py", "a100-sxm-40gb", 64),
)


def make(scenario: Scenario, pages: str = "") -> dict[str, Any]:
    """Plan one scenario here, and return its section, its plan and what the planning took.

    Args:
        scenario: What is planned.
        pages: Folder for its page; empty: no page is written.
    """
    import diffusers  # noqa: F401
    import transformers  # noqa: F401

    import snugfit
    from snugfit.targets import load_target

    for name in scenario.allow:
        importlib.import_module(LIBRARIES[name])
    warnings.simplefilter("ignore")
    job = load_target(str(ROOT / "examples" / scenario.job))
    began, began_cpu = time.perf_counter(), _cpu_seconds()
    try:
        found: Any = snugfit.plan(
            job, scenario.device, scenario.batch_size, fixed=dict(scenario.fixed), allow=scenario.allow
        )
        lines, saved = describe(found), found.plan.to_json()
    except snugfit.InfeasibleError as error:
        lines, saved = describe_infeasible(error), None
    taken = {"wall_s": time.perf_counter() - began, "cpu_s": _cpu_seconds() - began_cpu}
    peak = max(resource.getrusage(who).ru_maxrss for who in _PROCESSES) * 1024
    if pages and saved is not None:
        write_page(Path(pages) / f"{scenario.name}.html", scenario, job, found)
    lines += [
        "",
        f"Planning took {taken['wall_s']:.0f} s ({taken['cpu_s']:.0f} s of CPU time; load {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()} cores) above imports, with a largest resident set of {peak / (1 << 20):.0f} MiB.",
    ]
    return {"lines": lines, "plan": saved, "peak_bytes": peak, **taken}


def write_page(file: Path, scenario: Scenario, job: Any, found: Any) -> None:
    """What ``snugfit report`` writes of a plan that was kept."""
    from snugfit import hardware
    from snugfit.page import details, html

    card, target = hardware.resolve(scenario.device), f"examples/{scenario.job}"
    known = details.of(job, found.plan, card, found.budget_bytes, target=target, options={}, found=found)
    html.write(file, known)


_PROCESSES = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
"A search runs traces in a copy of itself."


def _cpu_seconds() -> float:
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, _PROCESSES))


def describe(found: Any) -> list[str]:
    """What was found, as Markdown."""
    from snugfit import sizes, tables

    memory = found.memory
    lines = []
    if found.ladder:
        lines += ["| rung | plan | allocated | reserved | needed | fits | time | samples/s | pays with |"]
        lines += ["|---|---|---|---|---|---|---|---|---|"]
    for rung in found.ladder:
        sizes_ = [rung.memory.peak_allocated_bytes, rung.memory.peak_reserved_bytes, rung.memory.needed_bytes]
        cells = [rung.name, tables.plan_line(rung.plan), *(sizes.gib(size) for size in sizes_)]
        cells += ["yes" if rung.fits else "no", f"{rung.relative_time:.2f}", f"{rung.samples_per_s:.3g}"]
        lines.append(f"| {' | '.join([*cells, rung.pays_with])} |")
    lines += [
        "",
        f"**{tables.plan_line(found.plan)}**: needs {sizes.text(memory.needed_bytes)} of "
        f"{sizes.text(found.budget_bytes)} (allocated {sizes.text(memory.peak_allocated_bytes)}, reserved "
        f"{sizes.text(memory.peak_reserved_bytes)}), {found.step_time_s:.3g} s per update. Modelled.",
        "",
    ]
    lines += [f"- {name}: {reason}" for name, reason in found.reasons.items() if reason != "given"]
    lines += [f"- the job changes: {way.change}" for way in found.changes]
    lines += [f"- note: {note}" for note in found.notes]
    lines += [f"- {one.topic}: {one.text}" for one in found.advice]
    return lines


def describe_infeasible(error: Any) -> list[str]:
    """Why nothing fits and what would, as Markdown."""
    from snugfit import sizes

    hint, *_ = error.hint.splitlines()
    lines = [f"**Nothing fits.** {error.got}.", "", f"{hint[0].upper()}{hint[1:]}.", ""]
    lines += [
        "| way out | needs | cards | fits | time | snugfit runs it | what changes |",
        "|---|---|---|---|---|---|---|",
    ]

    for way in error.ways:
        needed = "-" if way.needed_bytes is None else sizes.text(way.needed_bytes)
        relative = "-" if way.relative_time is None else f"{way.relative_time:.2f}"
        fits, runs = ("yes" if value else "no" for value in (way.fits, way.executed_by_snugfit))
        lines.append(f"| {way.name} | {needed} | {way.world_size} | {fits} | {relative} | {runs} | {way.change} |")
    return lines


def in_a_process(scenario: Scenario, pages: str) -> dict[str, Any]:
    """What ``make`` returns, from a process of its own."""
    command = [sys.executable, __file__, "--one", scenario.name, "--pages", pages]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LONGEST_S, check=False)
    if done.returncode:
        raise SystemExit(f"{scenario.name}: {done.stderr.strip()[-2000:]}")
    made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return made


def missed(scenario: Scenario, made: Mapping[str, Any]) -> list[str]:
    """The targets that a planning missed."""
    found = []
    if (made["plan"] is not None) != scenario.fits:
        found.append("a plan was expected" if scenario.fits else "no plan was expected")
    if scenario.limit_s is not None and made["wall_s"] > scenario.limit_s:
        found.append(f"{made['wall_s']:.1f} s, {scenario.limit_s:g} s allowed")
    if made["peak_bytes"] > LIMIT_BYTES:
        found.append(f"{made['peak_bytes'] / (1 << 20):.0f} MiB resident, 1 GiB allowed")
    return found


def write(scenario: Scenario, lines: list[str]) -> None:
    """Put a scenario's section into the page, in the order of the scenarios."""
    known = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:] if PAGE.exists() else []
    sections = {section.partition("\n")[0]: section.partition("\n")[2].strip() for section in known}
    sections[scenario.name] = "\n".join([f"`{scenario.command}`", "", *lines]).strip()
    import diffusers
    import torch
    import transformers

    versions = ", ".join(f"{m.__name__} {m.__version__}" for m in (torch, transformers, diffusers))
    head = [
        "# The scenarios and their plans",
        "",
        "Modelled, `python benchmarks/planning/scenarios.py --write` (a section each, the others stay), "
        f"{versions}, Python {platform.python_version()}, one thread. Sizes in GiB, time relative to the first rung.",
        "The plans are in [examples/plans](../../examples/plans).",
    ]
    order = [one.name for one in SCENARIOS if one.name in sections]
    text = "\n".join(head) + "".join(f"\n\n## {name}\n\n{sections[name]}" for name in order) + "\n"
    PAGE.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="scenarios whose name begins so")
    parser.add_argument("--write", action="store_true", help="write the plans and the page")
    parser.add_argument("--pages", default="", metavar="FOLDER", help="write the page of each plan here")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        made = make(next(one for one in SCENARIOS if one.name == arguments.one), arguments.pages)
        print(json.dumps(made))
        return 0
    held = True
    for scenario in SCENARIOS:
        if not scenario.name.startswith(arguments.only):
            continue
        made = in_a_process(scenario, arguments.pages)
        failures = missed(scenario, made)
        held &= not failures
        lines = [*made["lines"], *(f"\nTarget missed: {failure}." for failure in failures)]
        print(f"\n## {scenario.name}\n", *lines, sep="\n", flush=True)
        if arguments.write:
            write(scenario, lines)
            if made["plan"] is not None:
                PLANS.mkdir(exist_ok=True)
                (PLANS / f"{scenario.name}.json").write_text(made["plan"], encoding="utf-8")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
