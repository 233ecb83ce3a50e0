"""Stable Diffusion 1.5's UNet, fine-tuned at 512 pixels: skip connections, and a rate that follows the batch size.

What it shows: what a down block makes is needed again by the up block on its level, so that the model is no plain
chain; and the learning rate is one that was found for a batch of ``REFERENCE_BATCH_SIZE``, scaled by the square root
to ``BATCH_SIZE`` (usual with Adam). Accumulation itself changes no rate: the batch size is what counts, whatever it is
cut into. Latents, noise and text embeddings are random; weights come from the configuration class.

How to run::

    snugfit plan examples/sd_unet.py --batch 32 --device rtx-3060-12gb
    snugfit plan examples/sd_unet.py --batch 32 --device rtx-3090
    snugfit train examples/sd_unet.py:small_job --batch 4 --micro-batch 2 --steps 2 --device cpu

Expected output: on 12 GB the ways out (exit code 1): weights, gradients and AdamW's state alone take 12.81 GiB. A plan
for 24 GB. Then two steps of a small UNet.
"""

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn

import snugfit

SIZES = {
    "sample_size": 64,  # latents of 512 pixels
    "layers_per_block": 2,
    "block_out_channels": (320, 640, 1280, 1280),
    "cross_attention_dim": 768,
    "attention_head_dim": 8,
}
SMALL_SIZES = {
    "sample_size": 16,
    "layers_per_block": 1,
    "block_out_channels": (32, 32, 64, 64),
    "cross_attention_dim": 32,
    "attention_head_dim": 8,
}
TEXT_TOKENS, TIMESTEPS = 77, 1000
BATCH_SIZE, REFERENCE_BATCH_SIZE, REFERENCE_RATE = 32, 8, 1e-5


def loss(model: nn.Module, micro_batch: dict[str, Tensor]) -> Tensor:
    predicted = model(micro_batch["noisy"], micro_batch["timesteps"], micro_batch["text"], return_dict=False)[0]
    return nn.functional.mse_loss(predicted.float(), micro_batch["noise"])


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    rate = snugfit.learning_rate.scale(REFERENCE_RATE, BATCH_SIZE / REFERENCE_BATCH_SIZE, rule="sqrt")
    return torch.optim.AdamW(model.parameters(), lr=rate)


def make_job(sizes: dict[str, int | tuple[int, ...]]) -> snugfit.Job:
    """The job of one size of the UNet, on random latents."""

    def batch(num_samples: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        latents = (num_samples, 4, sizes["sample_size"], sizes["sample_size"])
        return {
            "noisy": torch.randn(latents, generator=generator),
            "noise": torch.randn(latents, generator=generator),
            "timesteps": torch.randint(TIMESTEPS, (num_samples,), generator=generator),
            "text": torch.randn(num_samples, TEXT_TOKENS, sizes["cross_attention_dim"], generator=generator),
        }

    return snugfit.Job(lambda: UNet2DConditionModel(**sizes), loss, optimizer, batch, max_grad_norm=1.0)


def job() -> snugfit.Job:
    return make_job(SIZES)


def small_job() -> snugfit.Job:
    return make_job(SMALL_SIZES)
