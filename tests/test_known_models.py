import importlib
import json
import sys
import types

import pytest
import torch
from torch import nn

from snugfit import Job, PlanError, UnsupportedError
from snugfit.integrations import known_models

pytest.importorskip("transformers", reason="the extra transformers is not installed")

TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
CONFIGS = {
    "causal-lm": {"model_type": "llama", **TEXT, "max_position_embeddings": 64},
    "masked-lm": {"model_type": "bert", **TEXT, "max_position_embeddings": 64},
    "sequence-classification": {"model_type": "bert", **TEXT, "max_position_embeddings": 64, "num_labels": 3},
    "image-classification": {
        "model_type": "vit",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 16,
        "patch_size": 8,
        "num_labels": 3,
    },
}


def write_config(tmp_path, values):
    path = tmp_path / "config.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


@pytest.mark.parametrize("name", [name for name in known_models.NAMES if name != "sd-1.5-unet"])
def test_a_known_model_is_described_without_building_it(name, monkeypatch):
    monkeypatch.setattr(nn.Linear, "__init__", lambda *_, **__: pytest.fail("a module was built"))
    state = torch.get_rng_state()
    job = known_models.known_job(name)
    first, second = job.batch(3), job.batch(3)
    assert isinstance(job, Job)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(len(tensor) == 3 for tensor in first.values())
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert "attention_mask" not in first


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("bert-base", 109_483_778),
        ("bert-large", 335_143_938),
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("llama-2-7b", 6_738_415_616),
        ("resnet50", 25_557_032),
        ("vit-l", 304_326_632),
    ],
)
def test_a_known_model_has_the_published_number_of_parameters(name, num_parameters):
    with torch.device("meta"):
        model = known_models.known_job(name).model()
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


def test_the_size_of_the_inputs_is_the_one_asked_for():
    assert known_models.known_job("bert-large", seq=64).batch(2)["input_ids"].shape == (2, 64)
    assert known_models.known_job("resnet50", image=64).batch(2)["pixel_values"].shape == (2, 3, 64, 64)
    job = known_models.known_job("vit-l", image=384)
    with torch.device("meta"):
        assert job.model().config.image_size == 384
    assert job.batch(2)["pixel_values"].shape == (2, 3, 384, 384)


def test_an_implementation_of_attention_reaches_the_model():
    with torch.device("meta"):
        assert known_models.known_job("bert-base", attention="eager").model().config._attn_implementation == "eager"
    with pytest.raises(PlanError, match="implementation of attention"):
        known_models.known_job("bert-base", attention="fastest")


def test_causal_models_count_the_tokens_that_have_a_predecessor():
    job = known_models.known_job("gpt2", seq=8)
    assert job.count(job.batch(2)) == 2 * 7


@pytest.mark.parametrize(
    ("name", "sizes", "part"),
    [
        ("bert-base", {"seq": 0}, "seq"),
        ("bert-base", {"seq": 513}, "at most 512"),
        ("bert-base", {"image": 224}, "takes no image"),
        ("resnet50", {"seq": 512}, "takes no seq"),
        ("resnet50", {"image": -1}, "image"),
        ("resnet50", {"attention": "sdpa"}, "takes no attention"),
        ("sd-1.5-unet", {"image": 100}, "multiple of 64"),
        ("sd-1.5-unet", {"seq": 77}, "takes no seq"),
    ],
)
def test_a_size_that_a_model_does_not_take_is_refused(name, sizes, part):
    with pytest.raises(PlanError, match=part):
        known_models.known_job(name, **sizes)


def test_an_unknown_name_is_refused_with_the_nearest_ones():
    with pytest.raises(PlanError) as caught:
        known_models.known_job("bert-lage")
    assert "bert-large" in caught.value.suggestions
    assert "bert-large" in caught.value.hint


@pytest.mark.parametrize(("name", "library"), [("sd-1.5-unet", "diffusers"), ("bert-base", "transformers")])
def test_a_library_that_is_not_installed_is_named_with_the_command(name, library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UnsupportedError) as caught:
        known_models.known_job(name)
    assert caught.value.library == library
    assert caught.value.hint == f'pip install "snugfit[{library}]"'


class FakeUNet(nn.Module):
    def __init__(self, *, sample_size, in_channels, out_channels, cross_attention_dim, **_):
        super().__init__()
        self.sample_size = sample_size
        self.latents = nn.Conv2d(in_channels, out_channels, 1)
        self.text = nn.Linear(cross_attention_dim, 1)

    def forward(self, noisy, timesteps, text, return_dict=True):
        assert not return_dict
        assert timesteps.shape == noisy.shape[:1]
        assert noisy.shape[-2:] == (self.sample_size, self.sample_size)
        return (self.latents(noisy) + self.text(text).mean(),)


def test_the_unet_predicts_noise_of_latents_an_eighth_of_the_image(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", types.SimpleNamespace(UNet2DConditionModel=FakeUNet))
    job = known_models.known_job("sd-1.5-unet", image=128)
    batch = job.batch(2)
    assert batch["noisy"].shape == (2, 4, 16, 16)
    job.loss(job.model(), batch).backward()


@pytest.mark.parametrize("task", known_models.TASKS)
def test_a_config_file_and_a_task_make_a_job_that_trains(tmp_path, task):
    size = {} if task == "image-classification" else {"seq": 8}
    job = known_models.job_from_config(write_config(tmp_path, CONFIGS[task]), task, **size)
    model = job.model()
    optimizer = job.optimizer(model)
    loss = job.loss(model, job.batch(2))
    loss.backward()
    optimizer.step()
    assert loss.shape == ()
    assert torch.isfinite(loss)
    assert job.count == "samples" or job.count(job.batch(2)) in (2 * 7, 2 * 8)


def test_a_stored_type_of_the_weights_does_not_choose_the_precision(tmp_path):
    path = write_config(tmp_path, {**CONFIGS["causal-lm"], "torch_dtype": "float16", "dtype": "bfloat16"})
    model = known_models.job_from_config(path, "causal-lm").model()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ("{", "cannot read"),
        ("[]", "is not a configuration"),
        ({"hidden_size": 4}, "no model type"),
        ({"model_type": "berd"}, "no model type"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_by_name(tmp_path, values, part):
    path = write_config(tmp_path, values)
    with pytest.raises(PlanError, match=part) as caught:
        known_models.job_from_config(path, "causal-lm")
    assert "config.json" in caught.value.what


def test_a_type_that_nobody_knows_is_told_how_many_there_are(tmp_path):
    known = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    with pytest.raises(PlanError) as caught:
        known_models.job_from_config(write_config(tmp_path, {"model_type": "berd"}), "causal-lm")
    assert f"one of the {sum(1 for _ in known.keys())} types" in caught.value.expected
    assert "bert" in known


@pytest.mark.parametrize(("task", "hint"), [("", "causal-lm"), ("casual-lm", "causal-lm")])
def test_a_config_without_a_known_task_is_refused_with_one(tmp_path, task, hint):
    with pytest.raises(PlanError) as caught:
        known_models.job_from_config(write_config(tmp_path, CONFIGS["causal-lm"]), task)
    assert hint in caught.value.hint
