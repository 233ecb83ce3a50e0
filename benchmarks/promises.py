"""Promises 1 to 5 of a window over many random examples: batches, cuts, counts, precisions, what is recomputed.

Run ``python benchmarks/promises.py [--examples 500] [--seed N]``. The properties are those of
``tests/test_promises.py``; a counterexample is printed in its smallest form, and the exit code is 1.
"""

import argparse
import math
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import test_promises as promises


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=500, help="of each property")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="labels hold -100")
    not_finite = (st.integers(0, 9), st.sampled_from([math.nan, math.inf, -math.inf]))
    properties = (
        ("1, 2 and 4: gradient, loss and norm of the full batch", promises.holds_for, ()),
        ("5: recomputing changes no bit", promises.recomputing_changes_nothing, ()),
        ("3: what is not finite moves nothing", promises.what_is_not_finite_moves_nothing, not_finite),
    )
    failed = 0
    for name, function, more in properties:
        tried = 0

        def counted(example: object, *rest: object, function: object = function) -> None:
            nonlocal tried
            tried += 1
            function(example, *rest)

        check = settings(
            max_examples=options.examples,
            deadline=None,
            derandomize=False,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
        )(seed(options.seed)(given(promises.examples(), *more)(_of(counted, len(more)))))
        start = time.perf_counter()
        try:
            check()
            print(f"{name}: no counterexample in {tried} examples, {time.perf_counter() - start:.0f} s", flush=True)
        except Exception:
            failed = 1
            print(f"{name}: counterexample after {tried} examples")
            traceback.print_exc()
    return failed


def _of(function: object, more: int) -> object:
    """The function with as many parameters as hypothesis is to fill."""
    return (lambda example: function(example)) if not more else (lambda example, a, b: function(example, a, b))


if __name__ == "__main__":
    sys.exit(main())
