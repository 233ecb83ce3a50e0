"""Data, weights and models as people have them: bad values are named and what is right is not."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import snugfit
from diagnosed_jobs import Around, Noisy, Operation, found_in, mean_output, plan_of, sgd, stepped
from models import (
    LinearStack,
    Transformer,
    regression_batch,
    same_bits,
    squared_error,
    state_of,
    token_batch,
    token_loss,
)
from snugfit import Engine, Job, checkpointing
from snugfit.training.diagnosing import diagnosis
from snugfit.training.diagnosing.diagnose import diagnose

# ---- data and weights


@pytest.mark.parametrize(("value", "word"), [(math.nan, "NaN"), (math.inf, "inf")])
@pytest.mark.parametrize("key", ["x", "y"])
def test_bad_data_are_named_by_key_and_micro_batch(value, word, key):
    batch = regression_batch(8)
    batch[key][5, 2] = value
    found = found_in(LinearStack(), squared_error, batch, plan_of(2, 8))
    assert found.micro_batch == 2
    assert f"batch['{key}'] (1 of 12 values, {word})" in found.cause
    assert "the input of micro-batch 2 is not finite" in found.cause
    assert found.remedy.startswith("look at the data")
    assert found.tried == ()


def test_weights_of_labels_that_are_nan_are_named():
    def weighted(model, micro_batch):
        each = F.mse_loss(model(micro_batch["x"]), micro_batch["y"], reduction="none").mean(-1)
        return (each * micro_batch["weight"]).mean()

    batch = {**regression_batch(4), "weight": torch.tensor([1.0, 1.0, 1.0, math.nan])}
    found = found_in(LinearStack(), weighted, batch)
    assert (found.micro_batch, found.op) == (1, "input batch['weight']")


@pytest.mark.parametrize("name", ["layers.1.weight", "layers.2.bias"])
def test_a_weight_that_is_nan_before_the_window_is_named(name):
    model = LinearStack()
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0] = math.nan
    found = found_in(model, squared_error, regression_batch(4))
    assert (found.module, found.op) == (name.rpartition(".")[0], f"weight {name}")
    assert "weights are not finite before the window" in found.cause
    assert "saved state" in found.remedy


def test_a_buffer_that_masks_with_minus_infinity_is_not_to_blame():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mask", torch.full((4,), -math.inf).index_fill(0, torch.tensor([0]), 0.0))

        def forward(self, x):
            return F.softmax(self.linear(x) + self.mask, dim=-1)

    assert found_in(Masked()).cause == "none"


def test_an_integer_batch_and_attention_run_under_watch():
    batch = token_batch(4)
    model = Transformer()
    assert found_in(model, token_loss, batch, count=snugfit.tokens()).cause == "none"
    with torch.no_grad():
        model.blocks[1].norm_2.bias.fill_(100.0)
        model.blocks[1].ff[0].weight.fill_(1e38)
    found = found_in(model, token_loss, batch, count=snugfit.tokens())
    assert (found.module, found.op) == ("blocks.1.ff.0", "linear")


# ---- models as people have them


@pytest.mark.parametrize("need_weights", [False, True])
def test_the_inside_of_torch_s_own_attention_is_seen(need_weights):
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            return self.attn(x, x, x, need_weights=need_weights, key_padding_mask=x[..., 0] == 0)[0]

    batch = torch.rand(4, 3, 4) + 1
    softmax = "softmax" if need_weights else "scaled_dot_product_attention"
    (room,) = found_in(Attend(), batch=batch).head_room
    assert (room.module, room.op, room.num_masked_rows) == ("attn", softmax, 0)
    batch[1] = 0.0
    found = found_in(Attend(), batch=batch)
    if need_weights:
        assert (found.module, found.op, found.phase) == ("attn", "softmax", "forward")
        assert "unmasked" in found.remedy
    assert found.head_room[0].num_masked_rows > 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recomputed"])
def test_the_layer_of_a_transformer_that_leaves_fp16_is_named(attention, recompute):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=50,
        max_position_embeddings=32,
        attn_implementation=attention,
    )
    model = transformers.BertForMaskedLM(config)
    layer = model.bert.encoder.layer[1]
    with torch.no_grad():
        layer.intermediate.dense.bias.fill_(6e4)
        layer.output.dense.weight.fill_(10.0)
    ids = torch.randint(50, (4, 8))
    mask = torch.ones(4, 8, dtype=torch.long)
    mask[:, 6:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    segments = checkpointing.blocks(model) if recompute else ()
    plan = plan_of(precision="16-mixed", recompute=segments)
    found = found_in(model, lambda model, batch: model(**batch).loss, batch, plan, count=snugfit.tokens())
    assert (found.module, found.op) == ("bert.encoder.layer.1.output.dense", "linear")
    assert found.remedy.startswith('use precision="bf16-mixed"')
    softmax = "scaled_dot_product_attention" if attention == "sdpa" else "softmax"
    assert {room.op for room in found.head_room if room.module.endswith("attention.self")} == {softmax}


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_model_that_recomputes_by_itself_is_watched(is_reentrant):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def inner(self, x):
            return torch.sqrt(self.second(x) * 0)

        def forward(self, x):
            return checkpoint(self.inner, self.first(x), use_reentrant=is_reentrant)

    found = found_in(nn.ModuleDict({"own": Own()}), lambda model, x: model["own"](x).mean())
    op = "CheckpointFunctionBackward" if is_reentrant else "SqrtBackward0"
    assert (found.module, found.op, found.phase) == ("own", op, "backward")


def test_the_model_itself_is_told_from_the_loss_function():
    class Own(nn.Linear):
        def forward(self, x):
            return torch.log(super().forward(x) * 0)

    found = found_in(Own(4, 4))
    assert (found.module, found.op) == ("", "log")
    assert "the model itself" in found.cause


def test_a_module_under_two_names_is_reported_by_its_first():
    model = nn.ModuleDict({"a": Operation(lambda x: torch.log(x * 0)), "w": nn.Linear(4, 4)})
    model["b"] = model["a"]
    assert found_in(model, lambda model, x: model["b"](model["w"](x)).mean()).module == "a"


def test_sparse_gradients_are_looked_at():
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True))
    batch = torch.ones(4, 3, dtype=torch.long)
    assert found_in(model, batch=batch).underflow[0].num_values == 4
    found = found_in(model, lambda model, x: torch.sqrt(model(x) * 0).mean(), batch)
    assert (found.op, found.phase, found.parameters) == ("SqrtBackward0", "backward", ("0.weight",))


def test_bf16_weights_are_diagnosed_too():
    plan = plan_of(precision="bf16-true")
    assert found_in(Around(torch.tanh), plan=plan).cause == "none"
    found = found_in(Around(lambda x: torch.log(x - x)), plan=plan)
    assert (found.module, found.op, found.phase) == ("inner", "log", "forward")


@pytest.mark.parametrize("policy", ["micro", "window"])
@pytest.mark.filterwarnings("ignore:BatchNorm makes")
def test_running_statistics_are_left_as_they_were_under_every_policy(policy):
    model = Noisy()
    engine = Engine(model, sgd(model), plan_of(norm_policy=policy), loss=mean_output)
    engine.step(torch.randn(4, 4))
    suspect = stepped(engine, torch.randn(4, 4), 2)
    before = state_of(model)
    assert diagnosis.of_window(suspect).cause == "none"
    assert same_bits(before, state_of(model))


# ---- properties


@given(
    layer=st.integers(0, 3),
    micro_batch=st.integers(0, 4),
    phase=st.sampled_from(["forward", "backward"]),
    segments=st.sampled_from([(), (("0",), ("1",), ("2",), ("3",)), (("0", "1", "2", "3"),), (("1", "2"),)]),
)
@settings(max_examples=30)
def test_the_layer_and_the_micro_batch_of_a_planted_nan_are_named(layer, micro_batch, phase, segments):
    class Plant(nn.Module):
        def __init__(self, is_bad):
            super().__init__()
            self.linear, self.is_bad = nn.Linear(2, 2), is_bad

        def forward(self, x):
            if not self.is_bad or mark[0] != micro_batch:
                return self.linear(x)
            return x / torch.zeros(()) if phase == "forward" else self.linear(x) + torch.sqrt(x * 0)

    mark = [0]

    def loss(model, micro_batch):
        mark[0] = int(micro_batch["index"][0])
        return model(micro_batch["x"]).mean()

    model = nn.Sequential(*(Plant(i == layer) for i in range(4)))
    batch = {"x": torch.rand(5, 2, requires_grad=False) + 1, "index": torch.arange(5)}
    plan = plan_of(1, 5, recompute=tuple(snugfit.Segment(names) for names in segments))
    found = diagnose(Job(model, loss, sgd, batch), plan, "cpu", steps=1)
    if phase == "backward" and layer == 0:
        assert found.cause == "none"  # nothing before it has a gradient
        return
    assert (found.module, found.phase, found.micro_batch) == (str(layer), phase, micro_batch)
    assert found.op == ("div" if phase == "forward" else "SqrtBackward0")
