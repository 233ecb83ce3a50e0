"""What of a model becomes bf16, what stays fp32, and what is refused."""

import copy

import pytest
import torch
from torch import nn

from bf16_jobs import BF16, METHODS, adamw, held, made, plan
from models import (
    WIDTH,
    ConvBatchNorm,
    LinearStack,
    Transformer,
    regression_batch,
    same_bits,
    squared_error,
    state_of,
    token_loss,
)
from snugfit import Engine, LossScale, Plan, PlanError, UnsupportedError, precision, tokens
from snugfit.training import bf16_weights

# what is converted


def test_running_statistics_and_integer_buffers_keep_their_type_and_the_rest_is_bf16():
    class Mixed(ConvBatchNorm):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.ones(2))
            self.register_buffer("ids", torch.arange(2))
            self.register_buffer("frequencies", torch.ones(2), persistent=False)

    engine = made(Mixed, lambda m, x: m(x).square().mean(), adamw)
    types = {name: value.dtype for name, value in engine.model.state_dict().items()}
    assert {types.pop("ids"), types.pop("features.0.1.num_batches_tracked")} == {torch.int64}
    assert {dtype for name, dtype in types.items() if name.split(".")[2:3] == ["1"] and "tracked" not in name} == {
        torch.float32
    }
    assert types["table"] == types["features.0.0.weight"] == types["head.weight"] == BF16
    assert engine.model.frequencies.dtype == torch.float32
    with pytest.warns(UserWarning, match="BatchNorm"):
        assert torch.isfinite(engine.step(torch.randn(4, 3, 8, 8)).loss)


def test_inputs_are_cast_only_where_they_meet_bf16_weights():
    class Timed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, batch, *, scale):
            self.seen = batch["time"]
            return self.layer(torch.stack([batch["time"].sin(), batch["time"]], -1)) * scale

    engine = made(Timed, lambda m, b: m(b, scale=b["time"]).mean(), adamw)
    engine.step({"time": torch.full((4,), 999.0)})
    assert engine.model.seen.dtype == torch.float32  # 999 is not a bf16 number
    assert engine.model.seen.tolist() == [999.0, 999.0]


def test_a_container_that_holds_nothing_to_cast_is_handed_in_itself():
    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x, cache):
            cache.append(1)
            return self.layer(x) * self.scale

    cache = []
    made(Caching, lambda m, x: m(x, cache).mean(), adamw).step(torch.ones(4, 2))
    assert cache == [1, 1]


def test_an_fp32_island_keeps_its_weights_and_computes_in_fp32():
    def model():
        stack = LinearStack()
        precision.keep_fp32(stack, "layers.1")
        return stack

    engine = made(model, squared_error, adamw)
    seen = []
    engine.model.layers[1].register_forward_hook(lambda m, a, out: seen.append((a[0].dtype, out.dtype)))
    before = engine.model.layers[1].weight.detach().clone()
    engine.step(regression_batch(4))
    assert seen == [(BF16, torch.float32)] * 2
    assert engine.model.layers[1].weight.dtype == torch.float32
    assert engine.model.layers[1].weight is held(engine)[2]
    assert not torch.equal(before, engine.model.layers[1].weight)
    assert engine.model.layers[2].weight.dtype == BF16


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(self.lstm(x[:, None])[0][:, 0])


class Encoder(nn.Module):
    """Torch's own encoder, which reads its members' weights in evaluation mode."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x):
        return self.encoder(x[:, None])[:, 0]


class Parametrised(nn.Module):
    """Weights made from others, in modules that have no parameter of their own left."""

    def __init__(self):
        super().__init__()
        made_from = nn.utils.parametrizations
        self.normed = made_from.weight_norm(nn.Linear(WIDTH, WIDTH, bias=False))
        self.spectral = made_from.spectral_norm(nn.Linear(WIDTH, WIDTH, bias=False))
        self.old = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, x):
        return self.old(self.spectral(self.normed(x.float()).float()).float())


class Packed(Recurrent):
    """Sequences of several lengths."""

    def forward(self, x):
        lengths = torch.arange(len(x), 0, -1)
        pack = nn.utils.rnn.pack_padded_sequence
        packed = pack(x[:, None].repeat(1, len(x), 1), lengths, batch_first=True)
        return self.head(nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0][:, 0])


class Tower(nn.Module):
    """A parametrised weight, a parameter of its own, and attention."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.ones(1, 1, WIDTH))
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        x = self.layer(x[:, None] + self.token)
        return self.attention(x, x, x)[0][:, 0]


@pytest.mark.parametrize("kind", [Recurrent, Encoder, Tower, Parametrised, Packed])
def test_modules_that_use_weights_in_other_ways_run_in_training_and_in_evaluation(kind):
    torch.manual_seed(0)
    engine = made(kind, squared_error, adamw)
    before = state_of(engine.model)
    assert torch.isfinite(engine.step(regression_batch(4)).loss)
    assert not same_bits(before, state_of(engine.model))
    with engine.evaluating() as model:
        assert model(torch.randn(2, WIDTH)).dtype == BF16


def test_a_copy_of_a_built_model_may_be_run_in_another_precision():
    model = LinearStack()
    made(model, squared_error, adamw)
    twin = copy.deepcopy(model).double()
    assert twin(torch.ones(1, WIDTH, dtype=torch.float64)).dtype == torch.float64


def test_a_weight_shared_between_an_island_and_another_module_is_refused_by_name():
    def model():
        transformer = Transformer(tied=True)
        precision.keep_fp32(transformer, "head")
        return transformer

    with pytest.raises(PlanError, match=r"head.weight is embedding.weight") as caught:
        made(model, token_loss, adamw, count=tokens())
    assert "embedding" in caught.value.hint


def test_building_again_on_the_same_model_changes_nothing_but_the_optimizer():
    model = LinearStack()
    made(model, squared_error, adamw)
    weights = state_of(model)
    engine = made(model, squared_error, adamw)
    assert same_bits(weights, state_of(model))
    engine.step(regression_batch(4))
    assert not same_bits(weights, state_of(model))


def test_closing_gives_back_a_plain_bf16_module():
    model = LinearStack()
    engine = made(model, squared_error, adamw)
    assert engine.close() is model
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert {p.dtype for p in model.parameters()} == {p.grad_dtype for p in model.parameters()} == {BF16}


# refusals


@pytest.mark.filterwarnings("ignore:.*jit.*is deprecated:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning")
def test_a_scripted_module_anywhere_is_refused_by_name_and_nothing_is_changed():
    for scripted in (torch.jit.script(nn.Linear(WIDTH, WIDTH)), torch.jit.trace(nn.Tanh(), torch.ones(1, WIDTH))):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), scripted)
        with pytest.raises(UnsupportedError, match="scripted"):
            made(model, squared_error, adamw)
        assert model[0].weight.dtype == torch.float32
        with pytest.raises(UnsupportedError, match="scripted"):
            precision.keep_fp32(model, "0", "1")
        assert "forward" not in vars(model[0])


def test_an_engine_refuses_by_name_what_only_build_can_do():
    model = LinearStack()
    for asked in ({"precision": "bf16-true"}, {"plan": plan()}):
        with pytest.raises(UnsupportedError, match="AdamW") as caught:
            Engine(model, adamw(model), loss=squared_error, **asked)
        assert "snugfit.build" in caught.value.hint
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_lbfgs_and_a_torch_without_gradient_types_are_refused_by_name(monkeypatch):
    with pytest.raises(UnsupportedError, match="LBFGS"):
        made(LinearStack, squared_error, lambda m: torch.optim.LBFGS(m.parameters()))
    monkeypatch.setattr(bf16_weights, "Tensor", type("Tensor", (), {}))
    with pytest.raises(UnsupportedError, match="grad_dtype"):
        made(LinearStack, squared_error, adamw)


@pytest.mark.parametrize("field", [{"precision": "bf16-mixed"}, {"precision": "32-true"}])
@pytest.mark.parametrize("method", METHODS[1:])
def test_the_form_of_the_update_needs_bf16_true(method, field):
    with pytest.raises(PlanError, match="bf16_update"):
        plan(method, **field)


def test_an_unknown_form_of_the_update_is_refused_and_every_one_survives_json():
    with pytest.raises(PlanError, match="stochastic"):
        plan("stochastic")
    for method in METHODS:
        assert Plan.from_json(plan(method).to_json()) == plan(method)


def test_a_loss_scale_has_no_effect():
    engine = made(LinearStack, squared_error, adamw, loss_scale=LossScale(init_scale=8.0))
    assert engine.step(regression_batch(4)).loss_scale is None
