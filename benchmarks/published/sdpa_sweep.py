"""The script behind the ``sdpa-*`` rows: a model in half precision, every batch and length, sdpa first, then eager.

Entry point: ``rows``, in an interpreter with the transformers of the rows' time. A row is one (batch, length) of a
sweep in one process, so that its block tails depend on what ran before: rows of a family are traced as one step
after another. Left out: what a run out of memory leaves behind, and the 100 repetitions of a step (two are traced).
"""

import functools
import gc
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import transformers
from torch import nn

from published import Options, Prediction, Row, Skipped
from published.stages import EMPTY_CACHE, STAGE, stages
from snugfit import hardware
from snugfit.memory import tracing
from snugfit.memory.cuda.target import under_torch
from snugfit.memory.recording import Recorder

WARMUPS, MEASURED = 2, 2
"Steps traced of each (batch, length); the script takes ten and a hundred, of which later ones add nothing."
_QUICK = 4
"Rows of a family in a quick run."

CARDS = {
    "A100": "a100-pcie-80gb",
    "L40S": "l40s",
    "RTX 2060": "rtx-2060-6gb",
    "RTX 3080 Ti": "rtx-3080-ti",
    "RTX3080Ti": "rtx-3080-ti",
    "V100": "v100-sxm-16gb",
    "T4": "t4",
}
"A card as rows call it to its name in the catalogue; the memory of the catalogue's card plays no part."

CAUSE = (
    "block tails: what the file of weights holds, and which configurations ran before, is known in part; a mask of "
    "ones is passed unless the source says none is"
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A published checkpoint: which model it is, and what loading it does to the card's memory."""

    model: str
    config: dict[str, object]
    file_dtype: torch.dtype | None
    """Type of a safetensors file, None for a pickle.

    Under ``with torch.device("cuda")`` safetensors 0.4 puts all tensors of the file on the card, sorted by name, before
    the model is built (tried with 0.4.5); a pickle is read on the host.
    """
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    most_scores: int
    "Of the page's table: batches, lengths, and the largest batch x length^2 of eager that did not run out of memory."
    extra: tuple[tuple[str, tuple[int, ...]], ...] = ()
    "Name and shape of what the file holds beside the model's parameters; ``*`` stands for every layer."


_POOLER = (
    ("bert.pooler.dense.bias", (768,)),
    ("bert.pooler.dense.weight", (768, 768)),
    ("cls.seq_relationship.bias", (2,)),
    ("cls.seq_relationship.weight", (2, 768)),
)
_MASKS = (("transformer.h.*.attn.bias", (1, 1, 1024, 1024)),)
CHECKPOINTS = {
    "distilbert-base-uncased": Checkpoint(
        "DistilBertForMaskedLM", {}, torch.float32, (1, 2, 4, 8), (128, 256), 8 * 256**2
    ),
    "bert-base-uncased": Checkpoint("BertLMHeadModel", {}, torch.float32, (4, 8, 16), (256, 512), 16 * 512**2, _POOLER),
    "gpt2-large": Checkpoint(
        "GPT2LMHeadModel",
        {"n_embd": 1280, "n_layer": 36, "n_head": 20},
        torch.float32,
        (1, 2, 4),
        (128, 256, 512, 1024),
        4 * 512**2,
        _MASKS,
    ),
    "opt-350m": Checkpoint(
        "OPTForCausalLM",
        {
            "vocab_size": 50272,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "ffn_dim": 4096,
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
        },
        None,
        (1, 2, 4, 8),
        (128, 256, 512, 1024, 2048),
        2 * 2048**2,
    ),
    "pythia-410m": Checkpoint(
        "GPTNeoXForCausalLM",
        {
            "vocab_size": 50304,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
        torch.float16,
        (1, 2, 4),
        (128, 256, 512, 1024, 2048),
        2048**2,
    ),
}
"Sizes as in the configurations on the model hub."


def rows(published: Sequence[Row], options: Options) -> Iterator[Prediction | Skipped]:
    """Predict the rows: those of one checkpoint, card and torch are one run of the script."""
    runs: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in published:
        checkpoint = next((name for name in CHECKPOINTS if name in row.fields["model"]), "")
        card = next((name for text, name in CARDS.items() if text in row.fields["gpu_type"]), "")
        precision = row.fields["precision"].partition(" ")[0]
        known = checkpoint and card and precision in _DTYPES and row.fields["attention"] in ("eager", "sdpa")
        if not known or row.metric != "allocated":
            yield Skipped(row.id, "the checkpoint, the card, the precision or the attention is not one of those known")
        else:
            runs.setdefault((checkpoint, card, row.fields["torch_version"], precision), []).append(row)
    for (checkpoint, card, version, precision), same in runs.items():
        chosen = same[:_QUICK] if options.quick else same
        yield from (Skipped(row.id, "quick run") for row in same[len(chosen) :])
        yield from _run(chosen, CHECKPOINTS[checkpoint], card, version, _DTYPES[precision], is_quick=options.quick)


_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def _run(
    same: Sequence[Row], checkpoint: Checkpoint, card: str, version: str, dtype: torch.dtype, *, is_quick: bool
) -> Iterator[Prediction]:
    sweeps = {name: _sweep(same, checkpoint, name, is_quick=is_quick) for name in ("sdpa", "eager")}
    number = sum(map(len, sweeps.values())) * (WARMUPS + MEASURED)
    print(f"{same[0].family}: {number} steps with transformers {transformers.__version__}", file=sys.stderr)
    device = hardware.resolve(card)
    is_masked = "no attention_mask passed" not in same[0].fields["notes"]
    load = functools.partial(_load, checkpoint, _shapes(checkpoint), dtype)
    with under_torch(version):
        trace = tracing.record(lambda recorder: _script(recorder, sweeps, load, is_masked), device, number)
    found = stages(trace)
    for row in same:
        num_bytes = found[_name(row.fields["attention"], _sizes(row))].peak.allocated
        yield Prediction(row.id, num_bytes, CAUSE)


def _sweep(same: Sequence[Row], checkpoint: Checkpoint, attention: str, *, is_quick: bool) -> list[tuple[int, int]]:
    """What ran in the process: the page's table and the rows; in a quick run the rows alone."""
    sizes = {_sizes(row) for row in same if row.fields["attention"] == attention}
    if not is_quick:
        table = set(itertools.product(checkpoint.batches, checkpoint.lengths))
        sizes |= {(b, s) for b, s in table if attention != "eager" or b * s**2 <= checkpoint.most_scores}
    return sorted(sizes)


def _sizes(row: Row) -> tuple[int, int]:
    return int(row.fields["micro_batch"]), int(row.fields["seq_or_image"])


def _name(attention: str, sizes: tuple[int, int]) -> str:
    return f"{attention} {sizes[0]} {sizes[1]}"


def _script(
    recorder: Recorder, sweeps: dict[str, list[tuple[int, int]]], load: Callable[[str], nn.Module], is_masked: bool
) -> Callable[[], object]:
    """The script as one iteration after another."""

    def iterations() -> Iterator[None]:
        for attention, sizes in sweeps.items():
            model = load(attention)
            for batch, length in sizes:
                inputs = {"input_ids": torch.randint(100, (batch, length), dtype=torch.int64).to("cuda")}
                if is_masked:
                    inputs["attention_mask"] = torch.ones(batch, length, dtype=torch.int64).to("cuda")
                yield from _measure(recorder, model, inputs, _name(attention, (batch, length)))
            del model
            gc.collect()

    ongoing = iterations()
    return lambda: next(ongoing)


def _load(checkpoint: Checkpoint, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, attention: str) -> nn.Module:
    """``from_pretrained`` under ``torch.device("cuda")``: the file's tensors, the model, and the former are gone."""
    kind = getattr(transformers, checkpoint.model)
    config = kind.config_class(**checkpoint.config)
    file = [torch.empty(shape, dtype=checkpoint.file_dtype, device="cuda") for shape in shapes]
    with torch.device("cuda"):
        model: nn.Module = kind._from_config(config, torch_dtype=dtype, attn_implementation=attention)
    del file
    return model.to("cuda").train()


def _shapes(checkpoint: Checkpoint) -> list[tuple[int, ...]]:
    """Shapes of what loading puts on the card beside the model: the file's tensors, by the order of their names."""
    if checkpoint.file_dtype is None:
        return []
    kind = getattr(transformers, checkpoint.model)
    with torch.device("meta"):
        model = kind(kind.config_class(**checkpoint.config))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for pattern, shape in checkpoint.extra:
        layers = range(model.config.num_hidden_layers) if "*" in pattern else [0]
        shapes |= {pattern.replace("*", str(layer)): shape for layer in layers}
    return [shape for _, shape in sorted(shapes.items())]


def _measure(recorder: Recorder, model: nn.Module, inputs: dict[str, torch.Tensor], name: str) -> Iterator[None]:
    """Forward and backward, again and again; what the step before left is alive until it is replaced."""
    for number in range(WARMUPS + MEASURED):
        if number == WARMUPS:
            recorder.mark(f"{STAGE}{name}")
            recorder.mark(EMPTY_CACHE)
        model.zero_grad()
        outputs = model(**inputs)
        loss = outputs.logits.sum()
        loss.backward()
        if number + 1 < WARMUPS + MEASURED:
            yield
    recorder.mark(f"{STAGE}between")
    del outputs, loss
    yield
