"""One case for one system on one or two ranks, in a process of its own; the last line it prints is the result.

Started by ``run.py``: ``python one.py CASE SYSTEM [RANK FOLDER]``.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import gradients
import layers
import loss_scale
import nonfinite
from systems import CannotError, NotAskedError

RANKS = 2
MARK = "RESULT "


class Case(NamedTuple):
    """One row of the table."""

    number: str
    title: str
    right: str
    "The value that is right."
    run: Callable[[str], tuple[str, bool]]
    ranks: int = 1


CASES = {
    "ragged": Case(
        "1",
        "Labels of different lengths, 4 micro-batches: the gradient is the full batch's (GPT-2, its own loss)",
        "relative error at most 1e-5",
        gradients.ragged_labels,
    ),
    "ragged-two-ranks": Case(
        "1", "the same on 2 ranks", "relative error at most 1e-5", gradients.ragged_labels, ranks=RANKS
    ),
    "ragged-recipe": Case(
        "1",
        "the same with the second loop of the page, for samples of variable size",
        "relative error at most 1e-5",
        gradients.ragged_labels_recipe,
    ),
    "ragged-recipe-two-ranks": Case(
        "1",
        "the same with that loop on 2 ranks",
        "relative error at most 1e-5",
        gradients.ragged_labels_recipe,
        ranks=RANKS,
    ),
    "ragged-plain": Case(
        "1",
        "the same with a module of one's own that returns a mean over its labels",
        "relative error at most 1e-5",
        gradients.ragged_labels_plain_module,
    ),
    "short-window": Case(
        "2",
        "10 batches with gradients 1 to 10, window 4: the last two weigh 1/2 each",
        "gradients [2.5, 6.5, 9.5]",
        gradients.short_last_window,
    ),
    "iterable": Case(
        "3",
        "A loader without length ends inside of a window: nothing crosses into the next epoch",
        "first gradient of the second epoch 2.5",
        gradients.iterable_loader,
    ),
    "overflow": Case(
        "4",
        "An infinite fp16 gradient in the first window: rate, counter, average and weight stay",
        "rate 1.0, counter 0, average 0 times, weight 1.0, scale 8 to 4",
        loss_scale.overflow,
    ),
    "two-optimizers": Case(
        "5",
        "Two optimizers, one overflow: the scale halves once, both are skipped",
        "scale 8 to 4, 0 of 2 updated",
        loss_scale.two_optimizers,
    ),
    "dropout": Case(
        "6",
        "Dropout 0.5 and activation checkpointing through the system: the gradient is the plain one",
        "relative error at most 1e-5 on every path",
        layers.dropout,
    ),
    "batchnorm": Case(
        "7",
        "BatchNorm, window 4: num_batches_tracked grows by one, without and with activation checkpointing",
        "1 and 1",
        layers.batchnorm,
    ),
    "clip": Case(
        "9",
        "A gradient of norm 5, clipped to 1, fp32 and fp16 at three loss scales",
        "1.0 handed to the optimizer every time",
        loss_scale.clip,
    ),
    "empty-fused": Case(
        "10",
        "A window without a valid token, cross_entropy: no NaN, no update, no loss of 0.0 in the log",
        "weights bit-equal, log nan or nothing",
        nonfinite.empty_fused,
    ),
    "empty-masked": Case(
        "10",
        "the same with a mask by hand: sum(loss * mask) / sum(mask)",
        "weights bit-equal, log nan or nothing",
        nonfinite.empty_masked,
    ),
    "planted-nan": Case(
        "11",
        "NaN made in one layer in micro-batch 3 of 4: what the system prints names both",
        "the layer 'layers.1' and micro-batch 3 (index 2)",
        nonfinite.planted_nan,
    ),
}


def main(name: str, system: str, rank: str = "", folder: str = "") -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    case = CASES[name]
    if case.ranks > 1:
        _join(int(rank), folder)
    try:
        value, right = case.run(system)
        result = {"verdict": "right" if right else "wrong", "value": value}
    except CannotError as reason:
        result = {"verdict": "cannot", "value": str(reason)}
    except NotAskedError as reason:
        result = {"verdict": "-", "value": str(reason)}
    except Exception as error:  # whatever a system raises is what the table has to say
        import traceback

        traceback.print_exc()
        result = {"verdict": "error", "value": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
    print(MARK + json.dumps(result), flush=True)
    sys.stderr.flush()
    os._exit(0)  # some systems leave threads behind that wait for other ranks


def _join(rank: int, folder: str) -> None:
    """Make the process group, over a file; systems find it, and torchrun's variables."""
    import torch

    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "NODE_RANK": 0}
    os.environ |= {name: str(value) for name, value in variables.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "peers"}
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
