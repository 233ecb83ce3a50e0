"""Which precision a name and a device give, and what is refused."""

import pytest
import torch
from torch import nn

from mixed_precision import BF16, PRECISIONS, make
from models import LinearStack, Weight, mean_product
from snugfit import Job, Plan, PlanError, UnsupportedError, build, hardware
from snugfit.training.precision import autocast, refuse_half_weights, resolve, to_fp32_masters, warn_of_emulation

# names and devices


@pytest.mark.parametrize(
    ("precision", "dtype"), [("32-true", torch.float32), ("16-mixed", torch.float16), ("bf16-mixed", BF16)]
)
def test_a_precision_sets_the_type_of_matrix_products(precision, dtype):
    layer = nn.Linear(4, 4)
    with autocast(precision, torch.device("cpu")):
        assert layer(torch.ones(2, 4)).dtype == dtype


@pytest.mark.parametrize("name", ["fp16", "auto", None, 16])
def test_an_unknown_precision_is_refused(name):
    with pytest.raises(PlanError, match="unknown precision"):
        autocast(name, "cpu")


def absent():
    there = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "xpu": torch.xpu.is_available(),
    }
    return [name for name, is_there in there.items() if not is_there]


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("device", ["meta", *absent()])
def test_c053_mixed_precision_on_a_device_that_is_not_there_is_an_error_and_not_fp32_in_silence(precision, device):
    for ask in (lambda: autocast(precision, device), lambda: resolve(precision, torch.device(device))):
        with pytest.raises(PlanError) as caught:
            ask()
        assert device in caught.value.got
        assert "auto" in caught.value.hint


def test_c053_full_precision_needs_no_device():
    with autocast("32-true", "cuda"):
        assert not torch.is_autocast_enabled("cuda")


CARDS = {
    "cpu": "32-true",
    "gtx-1080-ti": "32-true",
    "gtx-1660-ti": "32-true",
    "v100-sxm2-16gb": "16-mixed",
    "t4": "16-mixed",
    "rtx-2080-ti": "16-mixed",
    "rtx-3060-12gb": "bf16-mixed",
    "a100-pcie-40gb": "bf16-mixed",
}


@pytest.mark.parametrize("device", [name for name in CARDS if name == "cpu" or name in hardware.devices()])
def test_auto_takes_what_a_device_is_good_at_and_says_why(device):
    name, reason = resolve("auto", device)
    assert name == CARDS[device]
    capability = hardware.resolve(device).compute_capability
    assert "CPU" in reason if capability is None else "{}.{}".format(*capability) in reason


def test_auto_has_a_card_of_every_kind_to_be_tested_with():
    assert {CARDS[name] for name in CARDS if name in hardware.devices()} == set(PRECISIONS)


def test_every_card_of_the_catalogue_gets_a_precision_that_it_multiplies_fast():
    rates = {"bf16-mixed": "bfloat16", "16-mixed": "float16", "32-true": "float32"}
    for device in hardware.devices():
        assert rates[resolve("auto", device)[0]] in hardware.resolve(device).flops


def test_a_precision_that_is_asked_for_is_taken():
    assert resolve("16-mixed", torch.device("cpu")) == ("16-mixed", "asked for")
    with pytest.raises(PlanError, match="unknown precision"):
        resolve("half", "cpu")


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_auto_takes_full_precision_where_nothing_is_known(device):
    assert resolve("auto", torch.device(device))[0] == "32-true"


def test_an_engine_resolves_auto_on_its_model_s_device_and_keeps_the_reason():
    engine = make(Weight(), mean_product, precision="auto")
    assert engine.precision == "32-true"
    assert "CPU" in engine.precision_reason
    plan = Plan(batch_size=2, micro_batch_size=1, precision="bf16-mixed")
    assert make(Weight(), mean_product, plan=plan, precision="auto").precision == "bf16-mixed"


@pytest.mark.parametrize(("capability", "warns"), [((7, 5), True), ((8, 0), False), ((9, 0), False)])
def test_bf16_on_a_card_that_emulates_it_is_warned_about(capability, warns, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    card = torch.device("cuda", 0)
    warn_of_emulation("16-mixed", card)
    for name in ("bf16-mixed", "bf16-true"):
        if warns:
            with pytest.warns(UserWarning, match=r"7\.5 has no bfloat16"):
                warn_of_emulation(name, card)
        else:
            warn_of_emulation(name, card)


# weights of half precision


def test_c034_half_precision_trainable_weights_are_refused_by_name_and_frozen_ones_are_fine():
    model = LinearStack()
    model.layers[1].half().requires_grad_(False)
    refuse_half_weights(model)
    model.layers[2].weight.data = model.layers[2].weight.data.half()
    model.layers[0].bias.data = model.layers[0].bias.data.bfloat16()
    with pytest.raises(PlanError) as caught:
        refuse_half_weights(model)
    assert caught.value.parameters == ("layers.0.bias", "layers.2.weight")
    assert "layers.0.bias, layers.2.weight" in caught.value.got
    assert to_fp32_masters(model) == caught.value.parameters
    refuse_half_weights(model)
    assert model.layers[1].weight.dtype == torch.float16


# weights of bf16


def test_bf16_true_is_made_by_build_only():
    with pytest.raises(UnsupportedError, match="build"):
        make(Weight(), mean_product, precision="bf16-true")
    job = Job(Weight, mean_product, lambda m: torch.optim.SGD(m.parameters(), lr=1.0), None)
    engine = build(job, Plan(batch_size=2, micro_batch_size=1, precision="bf16-true"), device="cpu")
    assert engine.precision == "bf16-true"
    assert engine.model.w.dtype == BF16
