"""Groups, several optimizers, schedulers and saved states over bf16 weights."""

import math

import pytest
import torch
from torch import nn

from bf16_jobs import BF16, METHODS, Weights, adamw, held, hundred_updates, made, mean
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
from snugfit import Engine, PlanError, tokens
from snugfit.training import updates
from tolerances import EXACT_VALUE

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
