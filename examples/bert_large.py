"""BERT-large for sequence classification at 512 tokens: the model that does not fit a 12 GB card at batch 32.

What it shows: a job of four parts around a model of transformers. Weights and tokens are random; neither changes
memory or time. Sequences have full length and no attention mask is passed, which lets attention use its smallest
kernel; with padding pass ``attention_mask`` in the batch, and the estimate follows.

How to run::

    snugfit estimate examples/bert_large.py --batch 32 --device rtx-3060-12gb
    snugfit plan examples/bert_large.py --batch 32 --device rtx-3060-12gb

Expected output: the first says that the full batch in fp32 does not fit (exit code 1), the second finds mixed
precision with smaller micro-batches.
"""

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

import snugfit

SEQUENCE_LENGTH = 512
NUM_LABELS = 2
CONFIG = BertConfig(
    hidden_size=1024,
    num_hidden_layers=24,
    num_attention_heads=16,
    intermediate_size=4096,
    num_labels=NUM_LABELS,
)


def model() -> nn.Module:
    return BertForSequenceClassification(CONFIG)


def loss(model: nn.Module, micro_batch: dict[str, Tensor]) -> Tensor:
    return model(**micro_batch).loss  # a mean over samples


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-5)


def batch(num_samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(CONFIG.vocab_size, (num_samples, SEQUENCE_LENGTH), generator=generator),
        "labels": torch.randint(NUM_LABELS, (num_samples,), generator=generator),
    }


def job() -> snugfit.Job:
    return snugfit.Job(model, loss, optimizer, batch, max_grad_norm=1.0)
