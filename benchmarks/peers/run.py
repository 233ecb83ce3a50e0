"""The faults of other training tools as tests that they and snugfit run: who gets which number.

Run ``python benchmarks/peers/run.py [--write] [--venv FOLDER] [--only CASE ...]``. It makes a virtual environment with
the peers of ``requirements.txt``, the torch of ``constraints.txt`` and this snugfit, and runs every case of ``one.py``
for every system in processes of their own under a time limit. ``--write`` puts the table into
``benchmarks/results/peers.md``. Nothing in it comes from reading a source: each verdict is a run.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TIMEOUT_S = 150
MARK = "RESULT "
NAMES = {
    "snugfit": "snugfit",
    "accelerate": "Accelerate",
    "trainer": "transformers Trainer",
    "lightning": "Lightning Trainer",
    "fabric": "Lightning Fabric",
}
DISTRIBUTIONS = {"accelerate": "accelerate", "trainer": "transformers", "lightning": "lightning", "fabric": "lightning"}
EXPLAINED = """
Verdicts: **right** is the exact value, wrong another one, cannot that the system offers nothing to run (the value
says why), error that it raised or did not end within {limit} s, - that the row is about another system. Every
cell is a run in a process of its own. Each system is driven by the gradient accumulation loop of its own
documentation (`benchmarks/peers/systems.py` names the pages). Fabric's page ends its first window after one
micro-batch and does not divide the loss; both are repaired here for it. Fabric and Accelerate leave counters
(Fabric schedules and clipping too) to the user's loop, so what is wrong in them is wrong in the loop that their
pages show. On a CPU Accelerate, and with it the Trainer, makes no `GradScaler`, and Lightning replaces `16-mixed`
by bf16: in the fp16 rows each is given the scaler that it makes on a GPU. In row 11 the Trainer's
`debug="underflow_overflow"` and Lightning's `detect_anomaly` are on from the first step; snugfit has
`nonfinite="raise"`, which costs nothing until it repeats the window that went wrong. Rows that a system fails
because it never claimed to offer the thing (7, 10 with a loss of one's own) are rows all the same: they say what
its user gets.
"""


def environment(folder: Path) -> Path:
    """The interpreter of the peers' virtual environment, made if it is not there."""
    python = folder / "bin" / "python"
    done = folder / ".installed"
    wanted = (HERE / "requirements.txt").read_text() + (ROOT / "constraints.txt").read_text()
    if done.exists() and done.read_text() == wanted:
        return python
    print(f"setting up {folder} (once)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    base = [*pip, "-c", str(ROOT / "constraints.txt"), "-e", str(ROOT)]
    subprocess.run(base, check=True)
    for line in (HERE / "requirements.txt").read_text().splitlines():
        if line and not line.startswith("#"):  # one by one: what cannot be installed is a column that says so
            subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), line], check=False)
    done.write_text(wanted)
    return python


def versions(python: Path) -> dict[str, str | None]:
    code = (
        "import json, sys\nfrom importlib import metadata\nfound = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n        found[name] = metadata.version(name)\n"
        "    except metadata.PackageNotFoundError:\n        found[name] = None\n"
        "print(json.dumps(found))"
    )
    names = ["snugfit", "torch", *sorted(set(DISTRIBUTIONS.values()))]
    output = subprocess.run([str(python), "-c", code, *names], capture_output=True, text=True, check=True).stdout
    return json.loads(output)


def cases(python: Path) -> dict[str, list]:
    code = (
        "import json, one\nprint(json.dumps({name: [case.number, case.title, case.right, case.ranks] "
        "for name, case in one.CASES.items()}))"
    )
    output = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True, cwd=HERE).stdout
    return json.loads(output.splitlines()[-1])


def run_one(python: Path, name: str, system: str, ranks: int, debug: bool) -> dict[str, str]:
    """One case for one system; all its processes are gone afterwards."""
    variables = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    variables |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        command = [str(python), str(HERE / "one.py"), name, system]
        started = []
        for rank in range(ranks):
            extra = [] if ranks == 1 else [str(rank), folder]
            started.append(
                subprocess.Popen(
                    [*command, *extra],
                    stdout=subprocess.PIPE,
                    stderr=None if debug else subprocess.DEVNULL,
                    text=True,
                    env=variables,
                    cwd=folder,
                    start_new_session=True,
                )
            )
        found = []
        try:
            for process in started:
                output, _ = process.communicate(timeout=TIMEOUT_S)
                lines = [line for line in output.splitlines() if line.startswith(MARK)]
                last = f"ended with {process.returncode} and no result"
                found.append(json.loads(lines[-1][len(MARK) :]) if lines else {"verdict": "error", "value": last})
        except subprocess.TimeoutExpired:
            found.append({"verdict": "error", "value": f"did not end within {TIMEOUT_S} s"})
        finally:
            for process in started:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                process.wait()
    ordered = sorted(found, key=lambda one: ("-", "right", "cannot", "wrong", "error").index(one["verdict"]))
    return ordered[-1]  # the worst of the ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/peers.md")
    parser.add_argument("--venv", type=Path, default=HERE / ".venv", help="where the peers are installed")
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    parser.add_argument("--systems", nargs="*", default=list(NAMES))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--debug", action="store_true", help="show what the children print")
    options = parser.parse_args()
    python = environment(options.venv.resolve())
    installed = versions(python)
    table = {name: case for name, case in cases(python).items() if not options.only or name in options.only}
    print(", ".join(f"{name} {version}" for name, version in installed.items()), flush=True)
    present = [s for s in options.systems if s == "snugfit" or installed[DISTRIBUTIONS[s]]]
    work = [(name, system) for name in table for system in present]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = pool.map(lambda w: run_one(python, *w, table[w[0]][3], options.debug), work)
        found = {}
        for one, result in zip(work, results, strict=True):
            found[one] = result
            print(f"{one[0]:24} {one[1]:12} {result['verdict']:7} {result['value']}", flush=True)
    if options.write:
        path = ROOT / "benchmarks" / "results" / "peers.md"
        path.write_text(document(table, found, installed, options.systems), encoding="utf-8")


def document(table: dict, found: dict, installed: dict, systems: list[str]) -> str:
    """The results as a page: the verdicts, then the values behind them."""
    heads = ["snugfit" if s == "snugfit" else f"{NAMES[s]} {installed[DISTRIBUTIONS[s]] or ''}" for s in systems]
    lines = [
        "# The same tests for snugfit and for other tools",
        "",
        f"CPU-measured, `python benchmarks/peers/run.py --write`, torch {installed['torch']}, Python "
        f"{platform.python_version()}, float32 unless a row says otherwise.",
        "",
        EXPLAINED.format(limit=TIMEOUT_S).strip(),
        "",
        "| # | test | " + " | ".join(heads) + " |",
        "|---" * (2 + len(systems)) + "|",
    ]
    missing = {"verdict": "not installed", "value": "cannot be installed from the package index"}
    for name, (number, title, _, _) in table.items():
        verdicts = [found.get((name, s), missing)["verdict"] for s in systems]
        lines.append(
            f"| {number} | {title} | " + " | ".join(f"**{v}**" if v == "right" else v for v in verdicts) + " |"
        )
    lines += ["", "## The values", ""]
    for name, (number, title, right, _) in table.items():
        lines += [f"**{number}. {title}** Right: {right}.", ""]
        for s, head in zip(systems, heads, strict=True):
            one = found.get((name, s), missing)
            if one["verdict"] != "-":
                lines.append(f"- {head}: {one['verdict']}: {one['value']}")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    main()
