"""GPT-2 small with a vocabulary of 128,000: the case in which the logits are the peak.

What it shows: at 1,024 tokens a sample's logits alone are 0.5 GB in fp32, and several such tensors are alive at once.
The loss is called as ``chunked_cross_entropy(..., chunks=None)``, which leaves the number of chunks to the plan. The
head is tied to the embedding. Tokens are random; weights come from the configuration class.

How to run::

    snugfit plan examples/gpt2_large_vocabulary.py --batch 64 --device rtx-3060-12gb
    snugfit train examples/gpt2_large_vocabulary.py:small_job --batch 8 --micro-batch 4 --steps 2 --device cpu

Expected output: a plan whose loss_chunks is above 1; the second trains two steps of a small model.
"""

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import snugfit

CONFIG = GPT2Config(vocab_size=128_000)
SMALL_CONFIG = GPT2Config(
    vocab_size=8_000, bos_token_id=0, eos_token_id=0, n_embd=64, n_layer=4, n_head=4, n_positions=64
)


def loss(model: nn.Module, micro_batch: dict[str, Tensor]) -> Tensor:
    hidden = model.transformer(micro_batch["input_ids"], use_cache=False).last_hidden_state
    # Position i predicts token i + 1, so the last position of a sample predicts nothing.
    return snugfit.chunked_cross_entropy(
        hidden[:, :-1], model.lm_head.weight, micro_batch["labels"][:, 1:], chunks=None
    )


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)


def make_job(config: GPT2Config) -> snugfit.Job:
    """The job of one configuration, on random tokens of full length."""

    def batch(num_samples: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        input_ids = torch.randint(config.vocab_size, (num_samples, config.n_positions), generator=generator)
        return {"input_ids": input_ids, "labels": input_ids.clone()}

    return snugfit.Job(
        lambda: GPT2LMHeadModel(config),
        loss,
        optimizer,
        batch,
        count=snugfit.tokens(shift=True),
        max_grad_norm=1.0,
    )


def job() -> snugfit.Job:
    return make_job(CONFIG)


def small_job() -> snugfit.Job:
    return make_job(SMALL_CONFIG)
