"""LoRA as a way out: what has 16 bits and what has not, and that plan, printed code and engine agree."""

import warnings

import pytest
import torch
from torch import nn

import snugfit
from snugfit import Job, Plan, hardware, sizes
from snugfit.planning.ways import lora
from snugfit.planning.ways_out import sentences, ways_out

pytest.importorskip("peft")
CARD = hardware.resolve("rtx-3090")


class Vision(nn.Module):
    """A convolution of float pixels, normalisation of float features, and an encoder."""

    def __init__(self, width=32, depth=2):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.batch_norm = nn.BatchNorm2d(3)
        self.position = nn.Parameter(torch.zeros(1, 4, width))
        self.first = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, pixels):
        patches = self.patch(self.batch_norm(pixels)).flatten(2).transpose(1, 2)
        return self.head(self.encoder(self.first(patches.float() + self.position))[:, 0])


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def batch(num_samples):
    return {"x": torch.randn(num_samples, 3, 8, 8), "y": torch.arange(num_samples) % 10}


def job(**sizes_of_model):
    return Job(lambda: Vision(**sizes_of_model), loss_fn, adamw, batch)


def row_of(plan, device=CARD, **sizes_of_model):
    (found,) = ways_out(job(**sizes_of_model), plan, device, 24 * sizes.GIB, allow=["lora"])
    return found


def adapter_elements(width=32, depth=2):
    # rank 16 beside both linear layers of each encoder layer, and the head, which is no language model's.
    return lora.RANK * (depth * 2 * (width + 2 * width) + width + 10)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_card_that_multiplies_bf16_runs_lora_under_autocast_of_bf16(precision):
    found = row_of(Plan(batch_size=4, micro_batch_size=4, precision=precision))
    assert found.plan.precision == "bf16-mixed"
    assert found.fits
    assert found.decides == ("precision",)
    assert "frozen in bf16" in found.change


def test_a_card_without_bf16_holds_the_frozen_weights_in_fp16():
    found = row_of(Plan(batch_size=4, micro_batch_size=4), hardware.resolve("v100-sxm-16gb"))
    assert found.plan.precision == "16-mixed"
    assert "torch.float16" in found.code
    held = {p.dtype for p in found.job.model().parameters() if not p.requires_grad}
    assert torch.float16 in held


def test_frozen_weights_have_neither_gradients_nor_state_nor_autocast_copies():
    memory = row_of(Plan(batch_size=4, micro_batch_size=2), width=256).memory
    held, trained = memory.at("backward end"), adapter_elements(256)
    assert held["gradient"] == pytest.approx(4 * trained, rel=0.05)
    assert held["optimizer"] == pytest.approx(8 * trained, rel=0.05)
    assert not held.get("autocast")
    wide = 4 * (2 * 3 + 5 * 2 * 256)  # a BatchNorm of 3 channels and five LayerNorms
    weights = sum(p.numel() for p in Vision(256).parameters())
    assert held["parameter"] == pytest.approx(2 * weights + wide / 2 + 4 * trained, rel=0.02)


def test_what_normalises_and_what_is_a_buffer_keeps_its_bits_and_is_never_rounded_on_the_way():
    third = torch.tensor(1 / 3)

    def model():
        made = Vision()
        for value in made.state_dict().values():
            value.copy_(third)
        return made

    made = lora.with_lora(Job(model, loss_fn, adamw, batch)).model()
    kept = (made.batch_norm.running_mean, made.batch_norm.weight, made.first.weight, made.encoder.layers[0].norm1.bias)
    for tensor in kept:
        assert torch.equal(tensor, torch.full_like(tensor, third))
        assert tensor.dtype == torch.float32
    assert made.patch.weight.dtype == made.position.dtype == torch.bfloat16


def test_a_model_with_a_convolution_of_float_pixels_is_planned_where_lora_is_allowed():
    given = job(width=1024)
    found = snugfit.plan(given, "rtx-3060-8gb", 16, "1250MiB", allow=("lora",))
    assert found.plan.precision == "bf16-mixed"
    assert found.reasons["precision"].startswith("lora decides it")
    assert [way.name for way in found.changes] == ["lora"]
    assert found.memory.needed_bytes <= 1250 * sizes.MIB


def test_the_printed_change_and_the_plans_engine_agree_without_a_warning():
    found = row_of(Plan(batch_size=4, micro_batch_size=4))
    names = {"torch": torch, "model": Vision()}
    exec(found.code, names)
    model = names["model"]
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == adapter_elements()
    assert {p.dtype for p in trained} == {torch.float32}
    expected = {name: p.dtype for name, p in found.job.model().named_parameters()}
    assert {name: p.dtype for name, p in model.named_parameters()} == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = snugfit.Engine(model, adamw(model), found.plan, loss=loss_fn)
        losses = [float(engine.step(batch(4)).loss) for _ in range(2)]
    assert all(loss == loss for loss in losses)


def test_targets_are_named_in_full_where_their_last_parts_mean_other_layers_too():
    model = nn.ModuleDict(
        {"a": nn.ModuleDict({"proj": nn.Linear(4, 4)}), "b": nn.ModuleDict({"proj": nn.Conv1d(4, 4, 1)})}
    )
    code = lora._code(model, lora.targets(model), None)
    assert "target_modules=['a.proj']" in code


def test_a_way_that_cannot_be_traced_is_a_line_with_the_reason_and_is_not_offered():
    def picky(optimizer):
        if type(optimizer).__name__ == "AdamW8bit":
            raise RuntimeError("no such optimizer here")
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    pytest.importorskip("torchao")
    given = Job(Vision, loss_fn, adamw, batch, scheduler=picky)
    found = ways_out(given, Plan(batch_size=4, micro_batch_size=4), CARD, 24 * sizes.GIB, allow=["8bit-optimizer"])
    (line,) = sentences(found)
    assert "no such optimizer here" in line
    assert "type --allow" not in line
    assert not found[0].fits
