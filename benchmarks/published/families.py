"""Which module predicts which rows, each module in a process of its own: no cache or module state is shared.

Entry points: ``MODULES`` and ``predict``. ``python -m published.families MODULE`` is the process: rows in on stdin,
predictions out on stdout, one JSON document a line; a module may start it with another interpreter.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from published import Family, Options, Prediction, Row, Skipped

MODULES = {
    "enzo": "cs336_rows",
    "snap": "cs336_rows",
    "shibuki": "cs336_rows",
    "gaoyue": "cs336_rows",
    "wedshard": "cs336_rows",
    "attn-magma": "attention",
    "attn-yyin": "attention",
    "sdpa-distilbert": "transformers_rows",
    "sdpa-opt": "transformers_rows",
    "sdpa-gpt2": "transformers_rows",
    "sdpa-gptneox": "transformers_rows",
    "sdpa-bert": "transformers_rows",
    "hfbert": "hfbert",
    "litgpt": "litgpt",
    "optb": "optimum",
    "rasbtgpt": "rasbt",
    "liger": "liger",
    "gmncnn": "gpumemnet",
    "gmntf": "gpumemnet",
    "gmnmlp": "gpumemnet",
    "mlpjobs": "mlp",
}
"Family to its module in this folder. A family that is not here is listed as not predicted."

NOT_PREDICTED = {
    "ttune": "active memory of whole recipes: for ratios with and without a technique",
    "torchao": "compiled models, one of them with bitsandbytes: for ratios only",
    "titan": "sharded over 8 to 128 cards: not modelled",
    "ltxv": "loose figures, against each other only",
    "accel": "model and sequence length are not in the row (grade C)",
    "axo": "recipes of a trainer with packed rows: for ratios only",
}
"Families that are not described well enough to run the step, and why."

_HERE = Path(__file__).resolve().parent


def predict(
    module: str, published: Sequence[Row], options: Options, python: str = sys.executable
) -> Iterator[Prediction | Skipped]:
    """Predict rows by a family module in a process of its own; what is left when it ends early is ``Skipped``.

    Args:
        module: Its name in this folder.
        published: The rows.
        options: Handed on.
        python: Interpreter that runs it: the present one, or one with the library versions of a row's time.
    """
    missing = {row.id for row in published}
    failure = "its module gave no prediction"
    if not (_HERE / f"{module}.py").exists():
        yield from (Skipped(row.id, f"no module benchmarks/published/{module}.py") for row in published)
        return
    roots = [str(_HERE.parent), str(_HERE.parents[1] / "src")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(roots), "OMP_NUM_THREADS": "1"}
    order = {"rows": [asdict(row) for row in published], "options": {**asdict(options), "groundtruth": ""}}
    order["options"]["groundtruth"] = str(options.groundtruth)
    process = subprocess.Popen(
        [python, "-m", "published.families", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(order))
    process.stdin.close()
    for line in process.stdout:
        if line.startswith("{"):  # what a library prints is not ours
            found = json.loads(line)
            if "failure" in found:
                failure = found["failure"]
                continue
            missing.discard(found["id"])
            yield Skipped(**found) if "reason" in found else Prediction(**found)
    status = process.wait()
    if status < 0:
        failure = f"its process was ended by signal {-status}"
    yield from (Skipped(row.id, failure) for row in published if row.id in missing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module")
    module: Family = importlib.import_module(f"published.{parser.parse_args().module}")
    order = json.loads(sys.stdin.read())
    options = Options(**{**order["options"], "groundtruth": Path(order["options"]["groundtruth"])})
    try:
        for found in module.rows([Row(**row) for row in order["rows"]], options):
            print(json.dumps(asdict(found)), flush=True)
    except Exception as error:
        print(json.dumps({"failure": f"FAILED: {type(error).__name__}: {str(error).splitlines()[0]}"}), flush=True)
        raise


if __name__ == "__main__":
    main()
