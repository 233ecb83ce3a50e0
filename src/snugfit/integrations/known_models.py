"""Jobs for well-known models, built from the configuration classes of transformers and diffusers.

Entry points: ``known_job`` for a model of ``NAMES`` and ``job_from_config`` for a ``config.json``. Nothing is
downloaded: weights start at random and batches are random, which changes neither memory nor time. Sequences have
full length, so no attention mask is passed: one would select another, larger attention kernel.
"""

import difflib
import importlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from snugfit.errors import PlanError, UnsupportedError
from snugfit.jobs import Job
from snugfit.training.counting import tokens

TASKS = ("causal-lm", "masked-lm", "sequence-classification", "image-classification")
ATTENTIONS = ("sdpa", "eager")
_AUTO_CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "image-classification": "AutoModelForImageClassification",
}
# Name: task, configuration class and what differs from its defaults, model class.
_TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "bert-base": ("sequence-classification", "BertConfig", {}, "BertForSequenceClassification"),
    "bert-large": (
        "sequence-classification",
        "BertConfig",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
        "BertForSequenceClassification",
    ),
    "gpt2": ("causal-lm", "GPT2Config", {}, "GPT2LMHeadModel"),
    "gpt2-xl": ("causal-lm", "GPT2Config", {"n_embd": 1600, "n_layer": 48, "n_head": 25}, "GPT2LMHeadModel"),
    "llama-2-7b": (
        "causal-lm",
        "LlamaConfig",
        {
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 4096,
            "vocab_size": 32000,
        },
        "LlamaForCausalLM",
    ),
    "resnet50": ("image-classification", "ResNetConfig", {"num_labels": 1000}, "ResNetForImageClassification"),
    "vit-l": (
        "image-classification",
        "ViTConfig",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "num_labels": 1000,
        },
        "ViTForImageClassification",
    ),
}
_UNET: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "layers_per_block": 2,
    "block_out_channels": (320, 640, 1280, 1280),
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 768,
    "attention_head_dim": 8,
}
_UNET_NAME = "sd-1.5-unet"
NAMES = tuple(sorted([*_TRANSFORMERS, _UNET_NAME]))

_DEFAULT_SEQ = 512
_DEFAULT_IMAGE = 224
_UNET_IMAGE = 512
_LATENT_FACTOR = 8  # the autoencoder of Stable Diffusion makes one latent of 8 x 8 pixels
_UNET_TEXT_TOKENS = 77
_UNET_TIMESTEPS = 1000
_LEARNING_RATE = 5e-5
_BATCH_SEED = 0


def known_job(name: str, *, seq: int | None = None, image: int | None = None, attention: str | None = None) -> Job:
    """Describe the training of a known model.

    Language models see random token ids of full length without an attention mask; BERT classifies sequences (mean
    over samples), GPT-2 and Llama predict the next token (mean over tokens), image models classify, the UNet
    predicts noise. The optimizer is AdamW with torch's defaults. The batch is a function of the number of samples.

    Args:
        name: One of ``NAMES``.
        seq: Tokens per sequence; None means the model's longest, at most 512 for BERT.
        image: Pixels per side; None means 224, for the UNet 512 (its latents are an eighth of that).
        attention: transformers' implementation of attention, ``"sdpa"`` or ``"eager"``; None means its default.

    Raises:
        PlanError: An unknown name, or a size that the model does not have or cannot take.
        UnsupportedError: The library that has the model is not installed.
    """
    if name == _UNET_NAME:
        return _unet_job(seq=seq, image=image, attention=attention)
    if name not in _TRANSFORMERS:
        near = difflib.get_close_matches(name, NAMES, n=3, cutoff=0.4)
        raise PlanError(
            f"unknown model {name!r}",
            got=repr(name),
            expected=" | ".join(NAMES),
            hint=f"did you mean {' or '.join(near)}?" if near else "write a job file and pass its path",
            suggestions=tuple(near),
        )
    task, config_name, values, model_name = _TRANSFORMERS[name]
    library = _library("transformers")
    sizes = {"image_size": image} if image is not None and config_name == "ViTConfig" else {}
    if config_name == "ResNetConfig":
        _refuse(name, "attention", attention, instead="image")
    config = getattr(library, config_name)(**values, **sizes, **_attention_options(attention))
    return _job(name, task, config, lambda: getattr(library, model_name)(config), seq=seq, image=image)


def job_from_config(
    path: str | os.PathLike[str],
    task: str,
    *,
    seq: int | None = None,
    image: int | None = None,
    attention: str | None = None,
) -> Job:
    """Describe the training of a model of which one has the ``config.json`` of transformers.

    Args:
        path: The file. It is read as data: code that it points to is not run, nothing is downloaded.
        task: One of ``TASKS``.
        seq: Tokens per sequence; None means the model's longest, at most 512.
        image: Pixels per side; None means the configuration's, else 224.
        attention: See ``known_job``.

    Raises:
        PlanError: Unknown task or model type, or a file that is not a configuration.
        UnsupportedError: transformers is not installed.
    """
    if task not in TASKS:
        raise PlanError(
            "unknown task" if task else "a config.json does not say what is trained",
            got=f"task={task!r}",
            expected=" | ".join(TASKS),
            hint="pass --task causal-lm" if not task else f"pass --task {_nearest(task, TASKS)}",
        )
    values = _read_config(Path(path))
    library = _library("transformers")
    known = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in known:
        types = tuple(known.keys())  # of a mapping that loads lazily, whose own length is 0
        near = _nearest(str(model_type), types)
        raise PlanError(
            f"{os.fspath(path)!r} has no model type that transformers knows",
            got=f"model_type={model_type!r}",
            expected=f"one of the {len(types)} types of transformers {library.__version__}",
            hint=f"set model_type to {near!r}, or write a job file" if model_type else 'add "model_type" to the file',
        )
    # The precision is the plan's: a type of the stored weights must not make the model.
    config = known[model_type].from_dict({key: values[key] for key in values if key not in ("dtype", "torch_dtype")})
    if image is not None and hasattr(config, "image_size"):
        config.image_size = image
    options = _attention_options(attention)
    auto_class = getattr(library, _AUTO_CLASSES[task])
    return _job(os.fspath(path), task, config, lambda: auto_class.from_config(config, **options), seq=seq, image=image)


def _job(
    name: str, task: str, config: Any, make_model: Callable[[], nn.Module], *, seq: int | None, image: int | None
) -> Job:
    if task == "image-classification":
        _refuse(name, "seq", seq, instead="image")
        pixels = _size("image", image, getattr(config, "image_size", None) or _DEFAULT_IMAGE)
        channels = getattr(config, "num_channels", 3)
        return Job(make_model, _own_loss, _adamw, _image_batch(pixels, channels, config.num_labels))
    _refuse(name, "image", image, instead="seq")
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    length = _size("seq", seq, longest if longest and task == "causal-lm" else min(longest or _DEFAULT_SEQ, 512))
    if longest and length > longest:
        raise PlanError(
            f"the sequence is longer than {name} takes",
            got=f"seq={length}",
            expected=f"at most {longest} (max_position_embeddings)",
            hint=f"pass --seq {longest}",
        )
    if task == "sequence-classification":
        return Job(make_model, _own_loss, _adamw, _labelled_batch(length, text.vocab_size, config.num_labels))
    shift = task == "causal-lm"
    loss = _causal_loss if shift else _own_loss

    def make() -> nn.Module:
        model: Any = make_model()
        if shift and getattr(model, "loss_type", "") is None:  # of GPT-2; transformers would warn and take this one
            model.loss_type = "ForCausalLM"
        assert isinstance(model, nn.Module)
        return model

    return Job(make, loss, _adamw, _token_batch(length, text.vocab_size), count=tokens(shift=shift))


def _unet_job(*, seq: int | None, image: int | None, attention: str | None) -> Job:
    _refuse(_UNET_NAME, "seq", seq, instead="image")
    _refuse(_UNET_NAME, "attention", attention, instead="image")
    pixels = _size("image", image, _UNET_IMAGE)
    if pixels % (_LATENT_FACTOR * _LATENT_FACTOR):
        raise PlanError(
            "the UNet halves its latents three times",
            got=f"image={pixels}",
            expected=f"a multiple of {_LATENT_FACTOR * _LATENT_FACTOR} pixels",
            hint=f"pass --image {_UNET_IMAGE}",
        )
    library = _library("diffusers")
    side = pixels // _LATENT_FACTOR

    def make_model() -> nn.Module:
        model: nn.Module = library.UNet2DConditionModel(sample_size=side, **_UNET)
        return model

    def batch(num_samples: int) -> dict[str, Tensor]:
        generator = _generator()
        latents = (num_samples, _UNET["in_channels"], side, side)
        text = (num_samples, _UNET_TEXT_TOKENS, _UNET["cross_attention_dim"])
        return {
            "noisy": torch.randn(latents, generator=generator),
            "noise": torch.randn(latents, generator=generator),
            "timesteps": torch.randint(_UNET_TIMESTEPS, (num_samples,), generator=generator),
            "text": torch.randn(text, generator=generator),
        }

    return Job(make_model, _noise_loss, _adamw, batch)


def _own_loss(model: nn.Module, micro_batch: Mapping[str, Tensor]) -> Tensor:
    loss: Tensor = model(**micro_batch).loss
    return loss


def _causal_loss(model: nn.Module, micro_batch: Mapping[str, Tensor]) -> Tensor:
    # Without use_cache=False keys and values of every layer would be kept beside the saved tensors.
    loss: Tensor = model(**micro_batch, use_cache=False).loss
    return loss


def _noise_loss(model: nn.Module, micro_batch: Mapping[str, Tensor]) -> Tensor:
    predicted = model(micro_batch["noisy"], micro_batch["timesteps"], micro_batch["text"], return_dict=False)[0]
    return nn.functional.mse_loss(predicted.float(), micro_batch["noise"])


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)


def _labelled_batch(length: int, vocab_size: int, num_labels: int) -> Callable[[int], dict[str, Tensor]]:
    def batch(num_samples: int) -> dict[str, Tensor]:
        generator = _generator()
        return {
            "input_ids": torch.randint(vocab_size, (num_samples, length), generator=generator),
            "labels": torch.randint(num_labels, (num_samples,), generator=generator),
        }

    return batch


def _token_batch(length: int, vocab_size: int) -> Callable[[int], dict[str, Tensor]]:
    def batch(num_samples: int) -> dict[str, Tensor]:
        input_ids = torch.randint(vocab_size, (num_samples, length), generator=_generator())
        return {"input_ids": input_ids, "labels": input_ids.clone()}

    return batch


def _image_batch(pixels: int, channels: int, num_labels: int) -> Callable[[int], dict[str, Tensor]]:
    def batch(num_samples: int) -> dict[str, Tensor]:
        generator = _generator()
        return {
            "pixel_values": torch.randn(num_samples, channels, pixels, pixels, generator=generator),
            "labels": torch.randint(num_labels, (num_samples,), generator=generator),
        }

    return batch


def _generator() -> torch.Generator:
    """A generator of its own, so that the user's random state is not moved and every batch is the same."""
    return torch.Generator().manual_seed(_BATCH_SEED)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedError(
            f"{name} is needed for this model and cannot be imported",
            got=str(error),
            expected=f"{name}, an optional extra of snugfit",
            hint=f'pip install "snugfit[{name}]"',
            library=name,
        ) from error


def _read_config(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(
            f"cannot read the configuration {os.fspath(path)!r}",
            got=str(error),
            expected="a config.json of transformers",
            hint="check the path, or download the file again",
        ) from error
    if not isinstance(values, dict):
        raise PlanError(
            f"{os.fspath(path)!r} is not a configuration",
            got=type(values).__name__,
            expected="a JSON object with model_type",
            hint="pass the config.json of a model of transformers",
        )
    return values


def _attention_options(attention: str | None) -> dict[str, str]:
    if attention not in (None, *ATTENTIONS):
        raise PlanError(
            "unknown implementation of attention",
            got=f"attention={attention!r}",
            expected=" | ".join(map(repr, ATTENTIONS)),
            hint="leave it out to use transformers' default",
        )
    return {} if attention is None else {"attn_implementation": attention}


def _size(name: str, given: int | None, default: int) -> int:
    size = default if given is None else given
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise PlanError(
            f"{name} must be a whole number of at least 1",
            got=f"{name}={size!r}",
            expected=">= 1",
            hint=f"pass --{name} {default}",
        )
    return size


def _refuse(model: str, name: str, given: object, *, instead: str) -> None:
    if given is not None:
        raise PlanError(
            f"{model} takes no {name}",
            got=f"{name}={given!r}",
            expected=f"{instead}, or no size at all",
            hint=f"leave --{name} out",
        )


def _nearest(name: str, known: tuple[str, ...]) -> str:
    return (difflib.get_close_matches(name, known, n=1, cutoff=0.0) or [known[0]])[0]
