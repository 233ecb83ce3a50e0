"""Llama-2-7B's shape, full fine-tuning at 2,048 tokens: what fits one A100 of 80 GB, and what no 24 GB card holds.

What it shows: a model whose weights, gradients and optimizer state alone decide. Weights are random and made from the
configuration class; nothing is downloaded. ``small_job`` is the same architecture in a size that a CPU trains.

How to run::

    snugfit plan examples/llama2_7b.py --batch 64 --device a100-sxm-80gb
    snugfit plan examples/llama2_7b.py --batch 1024 --device rtx-3090
    snugfit plan examples/llama2_7b.py --batch 1024 --device rtx-3090 --allow lora
    snugfit train examples/llama2_7b.py:small_job --batch 4 --micro-batch 2 --recompute blocks --steps 2 --device cpu

Expected output: the first finds a plan, with every layer recomputed; the second says what is too large (exit code 1)
and what each way out would need; the third plans adapters of rank 16 instead; the fourth trains two steps.
"""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import snugfit

CONFIG = LlamaConfig(
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    max_position_embeddings=4096,
    vocab_size=32000,
)
SEQUENCE_LENGTH = 2048
SMALL_CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=172,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=128,
    vocab_size=1000,
)
SMALL_SEQUENCE_LENGTH = 64


def loss(model: nn.Module, micro_batch: dict[str, Tensor]) -> Tensor:
    # Without use_cache=False every layer's keys and values would be kept beside the saved tensors.
    return model(**micro_batch, use_cache=False).loss  # a mean over the tokens that are predicted


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-5)


def make_job(config: LlamaConfig, length: int) -> snugfit.Job:
    """The job of one configuration, on random tokens of full length."""

    def batch(num_samples: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        input_ids = torch.randint(config.vocab_size, (num_samples, length), generator=generator)
        return {"input_ids": input_ids, "labels": input_ids.clone()}

    return snugfit.Job(
        lambda: LlamaForCausalLM(config),
        loss,
        optimizer,
        batch,
        count=snugfit.tokens(shift=True),
        max_grad_norm=1.0,
    )


def job() -> snugfit.Job:
    return make_job(CONFIG, SEQUENCE_LENGTH)


def small_job() -> snugfit.Job:
    return make_job(SMALL_CONFIG, SMALL_SEQUENCE_LENGTH)
