"""ResNet-50 with BatchNorm at batch 256: the case in which accumulation is not the full batch.

What it shows: BatchNorm normalises micro-batches, so that a smaller micro-batch is another training; mixed precision
and recomputation keep it larger. Three things can be done about it: ``--norm-policy window`` updates running
statistics once per window, ``--norm-policy frozen`` (for fine-tuning) makes the split exact, and ``group_norm_job``
has normalisation layers that do not look at the batch. Images are random; weights come from the configuration class.

How to run::

    snugfit plan examples/resnet50.py --batch 256 --device rtx-3060-8gb
    snugfit plan examples/resnet50.py:group_norm_job --batch 256 --device rtx-3060-8gb
    snugfit train examples/resnet50.py --batch 4 --micro-batch 2 --norm-policy window --steps 1 --device cpu

Expected output: plans that fit, the first with advice on BatchNorm; the third trains one step of the whole model on
two micro-batches, some seconds on two cores.
"""

import torch
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification

import snugfit

CONFIG = ResNetConfig(num_labels=1000)
PIXELS = 224
REFERENCE_BATCH_SIZE, REFERENCE_RATE = 256, 0.1


def model() -> nn.Module:
    return ResNetForImageClassification(CONFIG)


def group_norm_model() -> nn.Module:
    return snugfit.norms.to_group_norm(model(), groups=32)


def loss(model: nn.Module, micro_batch: dict[str, Tensor]) -> Tensor:
    return model(**micro_batch).loss  # a mean over samples


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=REFERENCE_RATE, momentum=0.9, weight_decay=1e-4)


def batch(num_samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "pixel_values": torch.randn(num_samples, CONFIG.num_channels, PIXELS, PIXELS, generator=generator),
        "labels": torch.randint(CONFIG.num_labels, (num_samples,), generator=generator),
    }


def job() -> snugfit.Job:
    return snugfit.Job(model, loss, optimizer, batch)


def group_norm_job() -> snugfit.Job:
    return snugfit.Job(group_norm_model, loss, optimizer, batch)
