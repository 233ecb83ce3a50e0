"""optimum-benchmark's training runs: ``optb-*`` rows, allocated and reserved peaks of five Trainer steps.

Entry point: ``rows``. Batches of a few tokens, so that parameters, gradients and the optimizer's temporaries decide.
The cards are AMD's, whose allocator follows the same code. Assumed: under ROCm torch 2.2 takes no workspace for matrix
products from the allocator (not seen in source; with one the rows are 0.7 % further off).
"""

import os
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch
import transformers

from published import Options, Prediction, Row, Skipped
from published.stages import stages
from snugfit import hardware
from snugfit.memory import tracing
from snugfit.memory.cuda.target import under_torch

DEVICE = "a100-pcie-80gb"
STEPS = 5
MODELS = {
    "bert-base-uncased": ("BertForMaskedLM", {}),
    "openai-community/gpt2": ("GPT2LMHeadModel", {}),
    "roberta-base": (
        "RobertaForSequenceClassification",
        {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1},
    ),
}
"Class and configuration by checkpoint; the task is the one that the rows name for it."


def rows(published: Sequence[Row], options: Options) -> Iterator[Prediction | Skipped]:
    """Predict the rows: one trace per model serves both metrics."""
    known: dict[tuple[str, int, int], dict[str, int]] = {}
    for row in published:
        name = next((name for name in MODELS if name in row.fields["model"]), "")
        if not name or row.metric not in ("allocated", "reserved") or not row.fields["precision"].startswith("fp32"):
            yield Skipped(row.id, "the model or the precision is not one of those known")
            continue
        key = (name, int(row.fields["micro_batch"]), int(row.fields["seq_or_image"]))
        if options.quick and known and key not in known:
            yield Skipped(row.id, "quick run")
            continue
        if key not in known:
            known[key] = _peaks(*key)
        cause = "a ROCm card that is not named, taken as an A100 whose matrix products have no workspace"
        yield Prediction(row.id, known[key][row.metric], cause)


def _peaks(name: str, batch_size: int, length: int) -> dict[str, int]:
    kind, sizes = MODELS[name]
    made = getattr(transformers, kind)

    def make_step(_: object) -> Callable[[], object]:
        model = made(made.config_class(**sizes)).to("cuda").train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
        shape = (batch_size, length)
        tokens = torch.randint(5, 1000, shape)
        labels = torch.zeros(batch_size, dtype=torch.int64) if "Sequence" in kind else tokens

        def step() -> None:
            batch = {"input_ids": tokens, "attention_mask": torch.ones(shape, dtype=torch.int64), "labels": labels}
            outputs = model(**{key: value.to("cuda") for key, value in batch.items()})
            outputs.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            model.zero_grad()

        return step

    with under_torch("2.2"), mock.patch.dict(os.environ, {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}):
        trace = tracing.record(make_step, hardware.resolve(DEVICE), STEPS)
    peak = stages(trace)[""].peak
    return {"allocated": peak.allocated, "reserved": peak.reserved}
