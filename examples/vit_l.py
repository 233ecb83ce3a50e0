"""ViT-L with patches of 16 at 224 pixels: image classification with a warm-up counted in updates.

What it shows: a transformer whose attention, feed-forward layers and residuals all hold much, and a scheduler that
moves once per window however the window is cut. Images are random; weights come from the configuration class.

How to run::

    snugfit plan examples/vit_l.py --batch 64 --device rtx-3060-12gb
    snugfit train examples/vit_l.py --batch 2 --micro-batch 1 --steps 1 --device cpu
    snugfit train examples/vit_l.py:small_job --batch 8 --micro-batch 4 --steps 2 --device cpu

Expected output: the first finds the fastest plan that fits; the second trains one step of the whole model (about
5 GB of memory and up to a minute on two cores), the third two steps of a small one.
"""

import torch
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

import snugfit

CONFIG = ViTConfig(
    hidden_size=1024,
    num_hidden_layers=24,
    num_attention_heads=16,
    intermediate_size=4096,
    num_labels=1000,
)
SMALL_CONFIG = ViTConfig(
    image_size=32,
    patch_size=8,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=2,
    intermediate_size=64,
    num_labels=10,
)
WARMUP_UPDATES = 1000


def loss(model: nn.Module, micro_batch: dict[str, Tensor]) -> Tensor:
    return model(**micro_batch).loss  # a mean over samples


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05)


def make_job(config: ViTConfig) -> snugfit.Job:
    """The job of one configuration, on random images."""

    def batch(num_samples: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        shape = (num_samples, config.num_channels, config.image_size, config.image_size)
        return {
            "pixel_values": torch.randn(shape, generator=generator),
            "labels": torch.randint(config.num_labels, (num_samples,), generator=generator),
        }

    return snugfit.Job(
        lambda: ViTForImageClassification(config),
        loss,
        optimizer,
        batch,
        scheduler=lambda optimizer: snugfit.learning_rate.warmup(optimizer, steps=WARMUP_UPDATES),
        max_grad_norm=1.0,
    )


def job() -> snugfit.Job:
    return make_job(CONFIG)


def small_job() -> snugfit.Job:
    return make_job(SMALL_CONFIG)
