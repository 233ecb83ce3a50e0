"""Groups, several optimizers, schedulers and saved states over bf16 weights."""

import copy
import math

import pytest
import torch
from torch import nn

from bf16_jobs import BF16, METHODS, Weights, adamw, held, hundred_updates, made, mean, plan
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
from snugfit import Engine, Job, PlanError, build, tokens
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


@pytest.mark.parametrize("with_model", [True, False])
def test_a_state_with_masters_of_other_parameters_is_refused_and_nothing_is_changed(with_model):
    state = made(lambda: Weights(3), mean, adamw).state_dict(model=with_model)
    one = made(lambda: Weights(2), mean, adamw)
    before = state_of(one.model, *one.optimizers)
    with pytest.raises(PlanError, match="master weights of other parameters") as caught:
        one.load_state_dict(state)
    assert "number 0 is saved with the shape (3,), here (2,)" in caught.value.got
    more = {"masters": {i: torch.ones(2) for i in range(2)}}
    with pytest.raises(PlanError, match="here there is none"):
        updates.of(one.optimizers[0]).load_state_dict(more)
    assert same_bits(before, state_of(one.model, *one.optimizers))


def test_masters_follow_the_unrounded_weights_of_an_fp32_run_and_an_fp32_run_goes_on_from_masters():
    model, batch = LinearStack(), regression_batch(4)
    plain = Engine(model, adamw(model), loss=squared_error)
    plain.step(batch)
    engine = made(LinearStack, squared_error, adamw)
    engine.load_state_dict(plain.state_dict())
    assert same_bits([p.detach() for p in held(engine)], state_of(model))
    assert same_bits(state_of(engine.model), [p.to(BF16) for p in state_of(model)])
    engine.step(batch)
    masters = [p.detach().clone() for p in held(engine)]
    plain.load_state_dict(engine.state_dict())
    assert same_bits(state_of(model), masters)
    for method in METHODS[1:]:
        other = made(LinearStack, squared_error, adamw, method)
        other.load_state_dict(engine.state_dict(model=False))
        assert same_bits(state_of(other.model), [p.to(BF16) for p in masters])
        engine.load_state_dict(other.state_dict())
        assert same_bits([p.detach() for p in held(engine)], [p.float() for p in state_of(other.model)])


def test_a_state_with_fewer_or_more_masters_than_here_goes_to_masters_and_weights():
    def frozen():
        model = LinearStack()
        model.layers[0].requires_grad_(False)
        return model

    whole, part = made(LinearStack, squared_error, adamw), made(frozen, squared_error, adamw)
    whole.step(regression_batch(4)), part.step(regression_batch(4))
    state = whole.state_dict()
    part.load_state_dict(state)
    assert same_bits(state_of(part.model), state_of(whole.model))
    assert same_bits([p.detach() for p in held(part)[2:]], [p.detach() for p in held(whole)[2:]])
    state = part.state_dict()
    whole.load_state_dict(state)
    assert same_bits([p.detach() for p in held(whole)[:2]], [p.float() for p in state_of(whole.model)[:2]])
    assert not whole.step(regression_batch(4)).skipped


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


# one optimizer only


@pytest.mark.parametrize("method", METHODS)
def test_two_optimizers_over_the_same_weights_are_refused_by_name(method):
    def optimizers(m):
        return [torch.optim.SGD(m.parameters(), lr=0.1), torch.optim.AdamW(m.layers[1].parameters())]

    with pytest.raises(PlanError, match="two optimizers train the same bf16 weights") as caught:
        build(Job(LinearStack, squared_error, optimizers, None), plan(method), device="cpu")
    assert "layers.1.weight and 1 more, in SGD and in AdamW" in caught.value.got


# afterwards


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.SGD])
@pytest.mark.parametrize("method", METHODS)
def test_after_close_a_plain_loop_trains_the_model(method, kind):
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    engine = made(LinearStack, squared_error, lambda m: kind(m.parameters(), lr=0.1, **options), method)
    engine.step(regression_batch(4))
    (optimizer,), model = engine.optimizers, engine.close()
    assert [id(p) for p in held(engine)] == [id(p) for p in model.parameters()]
    assert all(p in optimizer.state for p in model.parameters())
    before = state_of(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = squared_error(model, regression_batch(4))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not any(torch.equal(a, b) for a, b in zip(before, state_of(model), strict=True))
    with pytest.warns(UserWarning, match="bfloat16"):
        again = Engine(model, optimizer, loss=squared_error, precision="bf16-mixed")
    assert not again.step(regression_batch(4)).skipped


@pytest.mark.parametrize("method", METHODS)
def test_two_engines_over_one_model_or_one_optimizer_are_closed_one_by_one(method):
    model = LinearStack()
    first, second = made(model, squared_error, adamw, method), made(model, squared_error, adamw, method)
    third = Engine(model, second.optimizers[0], second.plan, loss=squared_error)
    first.close()
    third.close()
    before = state_of(model)
    assert updates.of(second.optimizers[0]).is_attached
    assert not second.step(regression_batch(4)).skipped
    assert not same_bits(before, state_of(model))
    second.close(), second.close()
    assert not any("forward" in vars(module) for module in model.modules())
    assert not updates.of(second.optimizers[0]).is_attached
    assert not made(model, squared_error, adamw, method).step(regression_batch(4)).skipped


@pytest.mark.parametrize("method", METHODS)
def test_a_copied_engine_trains_its_own_model_bit_for_bit(method):
    engine = made(LinearStack, squared_error, adamw, method)
    engine.step(regression_batch(4))
    twin = copy.deepcopy(engine)
    assert all(a is not b for a, b in zip(engine.model.parameters(), twin.model.parameters(), strict=True))
    batch, random, ends = regression_batch(4), torch.get_rng_state(), []
    for one in (engine, twin, copy.deepcopy(twin)):
        torch.set_rng_state(random)
        one.step(batch)
        assert not one.step(batch).skipped
        ends.append([*state_of(one.model, *one.optimizers), *(p.detach() for p in held(one))])
    assert same_bits(ends[0], ends[1])
    assert {p.grad_dtype for p in twin.model.parameters()} == {torch.float32}
    twin.close()
    assert updates.of(engine.optimizers[0]).is_attached
    assert any("forward" in vars(module) for module in engine.model.modules())
