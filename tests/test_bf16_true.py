import copy
import math
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from models import (
    WIDTH,
    ConvBatchNorm,
    LinearStack,
    Transformer,
    regression_batch,
    same_bits,
    squared_error,
    state_of,
    token_batch,
    token_loss,
)
from snugfit import (
    Engine,
    Job,
    LossScale,
    Plan,
    PlanError,
    Segment,
    UnsupportedError,
    build,
    estimate,
    precision,
    tokens,
)
from snugfit.training import bf16_weights, updates
from tolerances import EXACT_VALUE, STOCHASTIC_MEAN

METHODS = ("master-weights", "stochastic-rounding", "nearest")
IMPLEMENTATIONS = ("for-loop", "foreach", "fused")
BF16 = torch.bfloat16


class Weights(nn.Module):
    """Weights of value 1 whose gradient is the input's mean."""

    def __init__(self, number=1):
        super().__init__()
        self.w = nn.Parameter(torch.ones(number))

    def forward(self, x):
        return (self.w * x).sum(-1)


def mean(model, micro_batch):
    return model(micro_batch).mean()


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, **options})


def plan(method="master-weights", **fields):
    values = {"batch_size": 4, "micro_batch_size": 2, "precision": "bf16-true", "bf16_update": method}
    return Plan(**{**values, **fields})


def made(model, loss, optimizer, method="master-weights", *, fields=None, **options):
    job = Job(model, loss, optimizer, None, **options)
    with expected_warning(method):
        return build(job, plan(method, **(fields or {})), device="cpu")


@contextmanager
def expected_warning(method):
    if method == "nearest":
        with pytest.warns(UserWarning, match="rounded away"):
            yield
    else:
        yield


def held(engine, optimizer=0):
    return [p for group in engine.optimizers[optimizer].param_groups for p in group["params"]]


# the update


def hundred_updates(method, number, gradient_dtype, **options):
    fields = {"gradient_dtype": gradient_dtype}
    engine = made(
        lambda: Weights(number), mean, lambda m: torch.optim.SGD(m.parameters(), **options), method, fields=fields
    )
    for _ in range(100):
        engine.step(torch.ones(4, number))
    return engine


@pytest.mark.parametrize("gradient_dtype", ["float32", "parameter"])
def test_c078_with_a_master_small_updates_add_up(gradient_dtype):
    engine = hundred_updates("master-weights", 1, gradient_dtype, lr=0.001)
    (master,) = held(engine)
    assert master.dtype == torch.float32
    assert master.item() == pytest.approx(0.9, abs=2 * EXACT_VALUE)
    assert (engine.model.w.dtype, engine.model.w.item()) == (BF16, 0.8984375)


@pytest.mark.parametrize("gradient_dtype", ["float32", "parameter"])
def test_c078_rounded_to_nearest_the_weight_stays_and_the_warning_has_the_numbers(gradient_dtype):
    job = Job(Weights, mean, lambda m: torch.optim.SGD(m.parameters(), lr=0.001), None)
    with pytest.warns(UserWarning, match=r"2\^-8.*2\^-9 \(0.2 %\).*learning rate of 0.001.*0.512"):
        engine = build(job, plan("nearest", gradient_dtype=gradient_dtype), device="cpu")
    for _ in range(100):
        engine.step(torch.ones(4, 1))
    assert engine.model.w.item() == 1.0


@pytest.mark.parametrize("gradient_dtype", ["float32", "parameter"])
def test_c078_rounded_stochastically_the_mean_over_many_weights_moves(gradient_dtype):
    engine = hundred_updates("stochastic-rounding", 4000, gradient_dtype, lr=0.001)
    assert engine.model.w.dtype == BF16
    assert engine.model.w.float().mean().item() == pytest.approx(0.9, abs=STOCHASTIC_MEAN)
    assert len(engine.model.w.unique()) > 1


@pytest.mark.parametrize(("method", "moves"), list(zip(METHODS, (True, True, False), strict=True)))
def test_c078_weight_decay_has_an_effect(method, moves):
    """Rate 1e-4 times 0.01, decoupled, a thousand times: 1 - 1e-3 in fp32; the gradient is 0."""
    decayed = made(
        lambda: Weights(4000), lambda m, x: (0 * m(x)).mean(), lambda m: adamw(m, lr=1e-4, weight_decay=0.01), method
    )
    for _ in range(1000):
        decayed.step(torch.ones(4, 4000))
    values = decayed.model.w.float() if method != "master-weights" else held(decayed)[0]
    expected = 1 - 1e-3 if moves else 1.0
    assert values.mean().item() == pytest.approx(expected, abs=STOCHASTIC_MEAN / 10 if moves else 0)
    if moves:
        assert values.mean().item() < 1.0


@given(
    st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**126), max_value=2.0**126),
    st.integers(0, 99),
)
def test_stochastic_rounding_gives_one_of_the_two_neighbours_and_keeps_what_bf16_has(value, seed):
    torch.manual_seed(seed)
    exact = torch.full((64,), value)
    rounded = exact.clone()
    updates.round_stochastically(rounded)
    assert torch.equal(rounded.to(BF16).float(), rounded)
    down = (exact.view(torch.int32) & -(2**16)).view(torch.float32)
    up = ((exact.view(torch.int32) & -(2**16)) + 2**16).view(torch.float32)
    assert ((rounded == down) | (rounded == up)).all()
    if exact[0] == down[0]:
        assert torch.equal(rounded, exact)


def test_stochastic_rounding_is_right_on_average_for_both_signs_and_keeps_inf_and_nan():
    odd = torch.tensor([0x7FFFFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32)
    special = torch.cat([torch.tensor([math.inf, -math.inf, 0.0, -0.0]), odd])
    updates.round_stochastically(special)
    assert special[:2].tolist() == [math.inf, -math.inf]
    assert special[2:4].tolist() == [0.0, 0.0]
    assert not special[4:].isfinite().any()
    for value in (1.003, -1.003, 3e-5):
        many = torch.full((200_000,), value)
        updates.round_stochastically(many)
        assert many.mean().item() == pytest.approx(value, rel=1e-4)


# the same as by hand


def by_hand(model, optimizer_of, batches, loss, limit=None):
    """fp32 masters beside a bf16 model whose gradients are summed in fp32."""
    masters = [p.detach().clone() for p in model.parameters()]
    model.to(BF16)
    holders = [nn.Parameter(master) for master in masters]
    optimizer = optimizer_of(holders)
    for batch in batches:
        sums = [torch.zeros_like(master) for master in masters]
        for start in (0, 2):
            part = {key: value[start : start + 2] for key, value in batch.items()}
            model.zero_grad()
            (loss(model, part) / 2).backward()
            for total, p in zip(sums, model.parameters(), strict=True):
                total += p.grad.float()
        for holder, total in zip(holders, sums, strict=True):
            holder.grad = total
        if limit is not None:
            nn.utils.clip_grad_norm_(holders, limit)
        optimizer.step()
        with torch.no_grad():
            for p, holder in zip(model.parameters(), holders, strict=True):
                p.copy_(holder)
    return [holder.detach() for holder in holders]


def low_error(model, micro_batch):
    """The squared error of a bf16 model, in fp32."""
    return F.mse_loss(model(micro_batch["x"].to(BF16)).float(), micro_batch["y"])


@pytest.mark.parametrize("limit", [None, 0.01])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_with_masters_it_is_the_hand_written_loop_bit_for_bit(kind, implementation, limit):
    torch.manual_seed(1)
    model, batches = LinearStack(), [regression_batch(4) for _ in range(3)]
    twin = copy.deepcopy(model)
    options = {"foreach": implementation == "foreach", "fused": implementation == "fused"}
    fields = {"optimizer_impl": implementation}
    engine = made(model, squared_error, lambda m: kind(m.parameters(), lr=0.1), fields=fields, max_grad_norm=limit)
    for batch in batches:
        engine.step(batch)
    expected = by_hand(twin, lambda ps: kind(ps, lr=0.1, **options), batches, low_error, limit)
    assert same_bits([p.detach() for p in held(engine)], expected)
    assert same_bits([p.detach() for p in model.parameters()], [p.to(BF16) for p in expected])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("gradient_dtype", ["float32", "parameter"])
def test_the_size_of_a_bucket_changes_nothing(method, gradient_dtype, monkeypatch):
    def weights(size):
        monkeypatch.setattr(updates, "BUCKET_BYTES", size)
        torch.manual_seed(0)
        fields = {"gradient_dtype": gradient_dtype}
        engine = made(LinearStack, squared_error, adamw, method, fields=fields)
        for _ in range(3):
            engine.step(regression_batch(4))
        return [*state_of(engine.model, *engine.optimizers), torch.get_rng_state()]

    assert same_bits(weights(1), weights(2**26))


class Counting(torch.optim.Optimizer):
    """Counts updates in its groups, and takes them into account."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1.0, "step": 0})

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-group["lr"] / group["step"])


@pytest.mark.parametrize("method", METHODS)
def test_a_counter_in_a_group_counts_updates_and_hooks_run_once_per_update(method, monkeypatch):
    monkeypatch.setattr(updates, "BUCKET_BYTES", 1)
    engine = made(LinearStack, squared_error, lambda m: Counting(m.parameters()), method)
    (optimizer,), calls = engine.optimizers, []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for _ in range(3):
        engine.step(regression_batch(4))
    assert optimizer.param_groups[0]["step"] == 3
    assert calls == ["before", "after"] * 3


KINDS = ("AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adadelta", "Adamax")
FUSED = ("AdamW", "Adam", "SGD", "Adagrad")
COMBINATIONS = [
    (kind, method, implementation)
    for kind in KINDS
    for method in METHODS
    for implementation in IMPLEMENTATIONS
    if implementation != "fused" or (kind in FUSED and (kind, method) != ("Adagrad", "nearest"))  # torch has none
]


@pytest.mark.parametrize(("kind", "method", "implementation"), COMBINATIONS)
def test_optimizers_of_torch_run_and_have_moments_in_fp32_but_to_nearest(kind, method, implementation):
    optimizer = getattr(torch.optim, kind)
    options = {"momentum": 0.9} if kind in ("SGD", "RMSprop") else {}
    engine = made(
        LinearStack,
        squared_error,
        lambda m: optimizer(m.parameters(), lr=0.01, **options),
        method,
        fields={"optimizer_impl": implementation},
    )
    before = state_of(engine.model)
    for _ in range(2):
        assert not engine.step(regression_batch(4)).skipped
    assert not same_bits(before, state_of(engine.model))
    moments = [v for s in engine.optimizers[0].state.values() for k, v in s.items() if k != "step" and v.dim()]
    assert moments
    assert {v.dtype for v in moments} == {BF16 if method == "nearest" else torch.float32}


# groups, names, several optimizers


@pytest.mark.parametrize("method", METHODS)
def test_groups_names_and_options_stay_the_user_s_and_parameters_the_same_objects(method):
    model = LinearStack()
    parameters = dict(model.named_parameters())

    def optimizer(m):
        named = list(m.named_parameters())
        groups = [{"params": named[:2], "lr": 0.5}, {"params": named[2:], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.1, weight_decay=0.3)

    engine = made(model, squared_error, optimizer, method)
    groups = engine.optimizers[0].param_groups
    assert [group["param_names"] for group in groups] == [list(parameters)[:2], list(parameters)[2:]]
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.5, 0.3), (0.1, 0.0)]
    assert all(parameters[name] is p for name, p in engine.model.named_parameters())
    assert updates.of(engine.optimizers[0]).parameters == list(parameters.values())


@pytest.mark.parametrize("method", METHODS)
def test_two_optimizers_update_together_or_not_at_all_and_one_without_gradients_alone(method):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Weights(3), Weights(3)

        def forward(self, x):
            return self.a(x) + (self.b(x) if x.sum() > 0 else 0)

    def optimizers(m):
        return [torch.optim.SGD(m.a.parameters(), lr=1.0), torch.optim.SGD(m.b.parameters(), lr=1.0)]

    engine = made(Two, mean, optimizers, method)
    random = torch.get_rng_state()
    assert engine.step(torch.full((4, 3), math.inf)).reason == "non-finite gradient"
    assert engine.model.a.w.tolist() == engine.model.b.w.tolist() == [1.0] * 3
    assert torch.equal(random, torch.get_rng_state())  # a skipped window draws nothing
    engine.step(torch.full((4, 3), -1.0))
    assert (engine.model.a.w.tolist(), engine.model.b.w.tolist()) == ([2.0] * 3, [1.0] * 3)
    assert all(p.grad is None for p in [*engine.model.parameters(), *held(engine, 0), *held(engine, 1)])


def test_a_scheduler_follows_the_updates_and_does_not_warn():
    def scheduler(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    engine = made(LinearStack, squared_error, adamw, scheduler=scheduler)
    assert [engine.step(regression_batch(4)).lr for _ in range(2)] == [(0.01,), (0.005,)]


def test_frozen_weights_need_no_master_until_they_are_trained():
    model = LinearStack()
    model.layers[0].requires_grad_(False)
    engine = made(model, squared_error, adamw)
    assert model.layers[0].weight.dtype == BF16
    assert model.layers[0].weight is held(engine)[0]
    engine.step(regression_batch(4))
    model.layers[0].requires_grad_(True)
    before = model.layers[0].weight.detach().clone()
    for _ in range(20):
        engine.step(regression_batch(4))
    assert held(engine)[0].dtype == torch.float32
    assert not torch.equal(before, model.layers[0].weight)


def test_tied_weights_have_one_master():
    engine = made(lambda: Transformer(tied=True), token_loss, adamw, count=tokens())
    assert engine.model.head.weight is engine.model.embedding.weight
    assert len(held(engine)) == len(list(engine.model.parameters()))
    engine.step(token_batch(4))
    assert torch.equal(engine.model.head.weight, held(engine)[0].to(BF16))


# saving


@pytest.mark.parametrize("with_model", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_a_saved_run_goes_on_bit_for_bit(method, with_model, tmp_path):
    batches = [regression_batch(4) for _ in range(6)]
    engine = made(LinearStack, squared_error, adamw, method)
    for batch in batches[:3]:
        engine.step(batch)
    torch.save([engine.state_dict(model=with_model), engine.model.state_dict()], tmp_path / "state")
    state, weights = torch.load(tmp_path / "state", weights_only=True)
    for batch in batches[3:]:
        engine.step(batch)
    other = made(LinearStack, squared_error, adamw, method)
    other.model.load_state_dict(weights)
    other.load_state_dict(state)
    for batch in batches[3:]:
        other.step(batch)
    ends = [[*state_of(e.model, *e.optimizers), *(p.detach() for p in held(e))] for e in (engine, other)]
    assert same_bits(*ends)


def test_a_state_with_other_masters_is_refused_and_nothing_is_changed():
    model = LinearStack()
    plain = Engine(model, adamw(model), loss=squared_error)
    engine = made(LinearStack, squared_error, adamw)
    for one, state in ((engine, plain.state_dict()), (plain, engine.state_dict())):
        before = state_of(one.model, *one.optimizers)
        with pytest.raises(PlanError, match="other fp32 master weights"):
            one.load_state_dict(state)
        assert same_bits(before, state_of(one.model, *one.optimizers))


def test_states_saved_before_there_were_masters_still_load():
    model = LinearStack()
    engine = Engine(model, adamw(model), loss=squared_error)
    state = engine.state_dict()
    del state["weights"]
    engine.load_state_dict(state)


@pytest.mark.parametrize("method", METHODS)
def test_weights_that_are_loaded_between_two_updates_are_the_ones_that_are_trained(method):
    batch, other = regression_batch(4), LinearStack()
    engine = made(LinearStack, squared_error, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), method)
    engine.step(regression_batch(4))
    engine.model.load_state_dict(other.state_dict())
    expected = made(other.to(BF16), squared_error, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), method)
    for one in (engine, expected):
        torch.manual_seed(0)
        one.step(batch)
    found = [[*state_of(e.model), *(p.detach() for p in held(e))] for e in (engine, expected)]
    assert same_bits(*found)


def test_masters_follow_only_the_weights_that_somebody_wrote_to():
    engine = hundred_updates("master-weights", 2, "float32", lr=0.001)
    with torch.no_grad():
        engine.model.w[0] = 5.0
    masters = engine.state_dict()["weights"][0]["masters"][0].clone()
    assert masters[0].item() == 5.0
    assert masters[1].item() == pytest.approx(0.9, abs=2 * EXACT_VALUE)  # not the rounded 0.8984
    with torch.no_grad():
        engine.model.w.clamp_(max=1.0)
    engine.step(torch.ones(4, 2))
    assert held(engine)[0].tolist() == pytest.approx([0.999, 0.899], abs=2 * EXACT_VALUE)


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


@pytest.mark.parametrize("kind", [Recurrent, Encoder, Tower])
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


# loss and evaluation


class Scores(nn.Module):
    """The same bf16 score for 50000 classes."""

    def __init__(self, inside=None):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.inside = inside

    def forward(self, x, target=None):
        scores = self.w * x.new_ones(len(x), 50000)
        return scores if self.inside is None else self.inside(scores, target)


def test_c081_the_loss_of_bf16_scores_is_computed_and_logged_in_fp32():
    target = torch.zeros(4, dtype=torch.long)
    assert F.cross_entropy(torch.zeros(1, 50000, dtype=BF16), target[:1]).item() == 10.8125
    engine = made(Scores, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), adamw)
    result = engine.step({"x": torch.ones(4, 1), "y": target})
    assert result.loss.dtype == torch.float32
    assert result.loss.item() == pytest.approx(10.819778, abs=1e-5)
    with engine.evaluating() as model:
        scores = model(torch.ones(4, 1))
        assert scores.dtype == BF16
        engine.model.w.data.zero_()
        assert F.cross_entropy(model(torch.ones(4, 1)), target).item() == pytest.approx(10.819778, abs=1e-5)


def test_c081_in_a_window_by_hand_too():
    engine = made(Scores, mean, adamw)
    with engine.window({"x": torch.ones(4, 1), "y": torch.zeros(4, dtype=torch.long)}) as window:
        for micro_batch in window:
            window.backward(F.cross_entropy(engine.model(micro_batch["x"]), micro_batch["y"]))
    assert window.result.loss.item() == pytest.approx(10.819778, abs=1e-5)


@pytest.mark.parametrize("inside", [nn.CrossEntropyLoss(), F.cross_entropy, lambda s, t: nn.CrossEntropyLoss()(s, t)])
def test_c081_a_loss_that_the_model_computes_itself_is_fp32_too(inside):
    batch = {"x": torch.ones(4, 1), "y": torch.zeros(4, dtype=torch.long)}
    engine = made(lambda: Scores(inside), lambda m, b: m(b["x"], b["y"]), adamw)
    result = engine.step(batch)
    assert result.loss.item() == pytest.approx(10.819778, abs=1e-5)


def test_c081_a_loss_that_the_model_computes_by_hand_is_warned_about_once():
    def inside(scores, target):
        return -scores.log_softmax(-1).gather(1, target[:, None]).mean()

    batch = {"x": torch.ones(4, 1), "y": torch.zeros(4, dtype=torch.long)}
    engine = made(lambda: Scores(inside), lambda m, b: m(b["x"], b["y"]), adamw)
    with pytest.warns(UserWarning, match=r"logits\.float\(\)"):
        engine.step(batch)
    engine.step(batch)


class Judged(nn.Module):
    """Blocks that each add a loss of their own, one of them without parameters."""

    def __init__(self, seen):
        super().__init__()
        self.blocks = nn.ModuleList([Judging(nn.Linear(WIDTH, WIDTH), seen), Judging(nn.Tanh(), seen)])

    def forward(self, x):
        total = 0
        for block in self.blocks:
            x, loss = block(x)
            total = total + loss
        return total


class Judging(nn.Module):
    def __init__(self, inner, seen):
        super().__init__()
        self.inner, self.seen = inner, seen

    def forward(self, x):
        x = self.inner(x)
        loss = F.mse_loss(x, torch.zeros_like(x))
        self.seen.append(loss.dtype)
        return x, loss


def test_c081_losses_inside_of_recomputed_segments_are_the_same_again():
    def gradient(recompute):
        torch.manual_seed(0)
        seen = []
        engine = made(lambda: Judged(seen), lambda m, x: m(x), adamw, fields={"recompute": recompute})
        result = engine.step(torch.randn(4, WIDTH))
        return [result.loss, result.grad_norm], seen

    plain, seen = gradient(())
    recomputed, again = gradient((Segment("blocks.0"), Segment("blocks.1")))
    assert same_bits(plain, recomputed)
    assert {*seen, *again} == {torch.float32}


def test_a_loss_may_call_parts_of_the_model_and_use_its_weights():
    def loss(model, micro_batch):
        hidden = model.layers[0](micro_batch["x"])
        return F.mse_loss(F.linear(hidden, model.layers[1].weight), micro_batch["y"])

    engine = made(LinearStack, loss, adamw)
    assert torch.isfinite(engine.step(regression_batch(4)).loss)


def test_evaluation_leaves_the_weights_and_takes_inputs_as_they_are():
    engine = made(Transformer, token_loss, adamw, count=tokens())
    before = state_of(engine.model)
    with engine.evaluating() as model:
        assert model(token_batch(4)["ids"]).dtype == BF16
    assert same_bits(before, state_of(engine.model))


@pytest.mark.parametrize("segments", [("blocks.0",), ("blocks.0", "blocks.1")])
@pytest.mark.parametrize("island", [None, "blocks.1", "blocks.*.norm"])
def test_recompute_changes_no_bit(segments, island):
    def weights(recompute):
        def model():
            torch.manual_seed(3)
            transformer = Transformer()
            if island:
                precision.keep_fp32(transformer, island)
            return transformer

        engine = made(model, token_loss, adamw, count=tokens(), fields={"recompute": recompute})
        torch.manual_seed(4)
        for _ in range(2):
            engine.step(token_batch(4))
        return [p.detach() for p in held(engine)]

    assert same_bits(weights(()), weights((Segment(segments),)))


# memory


WIDE, DEEP = 64, 4


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(DEEP)))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize(
    ("method", "gradient_dtype", "per_parameter"),
    [
        ("master-weights", "float32", 2 + 4 + 4 + 8),
        ("master-weights", "parameter", 2 + 4 + 2 + 8),
        ("stochastic-rounding", "float32", 2 + 4 + 8),
        ("stochastic-rounding", "parameter", 2 + 2 + 8),
        ("nearest", "float32", 2 + 4 + 4),
        ("nearest", "parameter", 2 + 2 + 4),
    ],
)
def test_the_static_bytes_of_every_form_are_predicted(method, gradient_dtype, per_parameter):
    job = Job(Stack, mean, adamw, lambda n: torch.ones(n, WIDE))
    with expected_warning(method):
        report = estimate(job, plan(method, gradient_dtype=gradient_dtype), device="cpu")
    counters = 4 * DEEP * (1 + (method == "stochastic-rounding"))  # Adam's steps, and the stand-ins
    assert report.static_bytes == per_parameter * DEEP * WIDE * WIDE + counters


def test_without_masters_an_update_holds_the_copies_of_one_bucket(monkeypatch):
    job = Job(Stack, mean, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), lambda n: torch.ones(n, WIDE))
    form = plan("stochastic-rounding", optimizer_impl="for-loop")
    whole = estimate(job, form, device="cpu")
    monkeypatch.setattr(updates, "BUCKET_BYTES", 4 * WIDE * WIDE)
    parts = estimate(job, form, device="cpu")
    assert parts.static_bytes == whole.static_bytes
    others = DEEP - 1  # at the peak copies in one case, numbers that stand for them in the other
    assert whole.peak_allocated_bytes - parts.peak_allocated_bytes == 4 * others * WIDE * WIDE - 4 * others


@pytest.mark.parametrize("method", METHODS)
def test_what_needs_no_master_reaches_the_device_in_bf16(method, monkeypatch):
    seen = {}

    def moved(model, device):
        seen.update({name: p.dtype for name, p in model.named_parameters()})
        return model.to(device)

    monkeypatch.setattr("snugfit.training.build._moved", moved)
    model = LinearStack()
    model.layers[0].requires_grad_(False)
    engine = made(model, squared_error, adamw, method)
    trained = torch.float32 if method == "master-weights" else BF16
    assert seen == {name: BF16 if name.startswith("layers.0") else trained for name in seen}
    assert {p.dtype for p in engine.model.parameters()} == {BF16}


# refusals


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
