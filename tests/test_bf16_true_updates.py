"""The three forms of the update of bf16 weights: what moves, how it is rounded, and the loop written by hand."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from bf16_jobs import BF16, METHODS, Weights, adamw, held, hundred_updates, made, mean, plan
from models import LinearStack, regression_batch, same_bits, squared_error, state_of
from snugfit import Job, build
from snugfit.training import buckets
from tolerances import EXACT_VALUE, STOCHASTIC_MEAN

IMPLEMENTATIONS = ("for-loop", "foreach", "fused")


# the update


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
    buckets.round_stochastically(rounded)
    assert torch.equal(rounded.to(BF16).float(), rounded)
    down = (exact.view(torch.int32) & -(2**16)).view(torch.float32)
    up = ((exact.view(torch.int32) & -(2**16)) + 2**16).view(torch.float32)
    assert ((rounded == down) | (rounded == up)).all()
    if exact[0] == down[0]:
        assert torch.equal(rounded, exact)


def test_stochastic_rounding_is_right_on_average_for_both_signs_and_keeps_inf_and_nan():
    odd = torch.tensor([0x7FFFFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32)
    special = torch.cat([torch.tensor([math.inf, -math.inf, 0.0, -0.0]), odd])
    buckets.round_stochastically(special)
    assert special[:2].tolist() == [math.inf, -math.inf]
    assert special[2:4].tolist() == [0.0, 0.0]
    assert not special[4:].isfinite().any()
    for value in (1.003, -1.003, 3e-5):
        many = torch.full((200_000,), value)
        buckets.round_stochastically(many)
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
        monkeypatch.setattr(buckets, "BUCKET_BYTES", size)
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
    engine = made(LinearStack, squared_error, lambda m: Counting(m.parameters()), method)
    (optimizer,), calls = engine.optimizers, []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
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


# optimizers that look at all parameters at once


class GlobalNorm(torch.optim.SGD):
    """Clips by the norm over all parameters, inside of its step."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


class TensorCounter(torch.optim.SGD):
    """Counts in a tensor of its groups."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        for group in self.param_groups:
            group["k"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * group["lr"] / group["k"])


class Patched(torch.optim.SGD):
    """Nothing but another name: of a subclass it is not known what it does."""


def hooked(params, lr):
    """Torch's own, with a hook that looks at weights and gradients."""
    optimizer = torch.optim.SGD(params, lr=lr)

    def clip(optimizer, *_):
        held = [p for group in optimizer.param_groups for p in group["params"]]
        norm = torch.stack([(p.detach().float() * p.grad.float()).sum() for p in held]).sum()
        for p in held:
            p.grad.mul_(norm.to(p.grad.dtype))

    optimizer.register_step_pre_hook(clip)
    return optimizer


def with_own_step(params, lr):
    """A step that somebody has set on the object."""
    optimizer = torch.optim.SGD(params, lr=lr)
    plain = optimizer.step

    def step(closure=None):
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)
        return plain(closure)

    optimizer.step = step
    return optimizer


@pytest.mark.filterwarnings("ignore:.*is not known to treat:UserWarning")
@pytest.mark.parametrize("gradient_dtype", ["float32", "parameter"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [GlobalNorm, TensorCounter, Patched, hooked, with_own_step])
def test_optimizers_that_may_couple_parameters_are_stepped_once_whatever_the_bucket(
    kind, method, gradient_dtype, monkeypatch
):
    def weights(size):
        monkeypatch.setattr(buckets, "BUCKET_BYTES", size)
        torch.manual_seed(0)
        fields = {"gradient_dtype": gradient_dtype}
        engine = made(LinearStack, squared_error, lambda m: kind(m.parameters(), lr=0.1), method, fields=fields)
        for _ in range(3):
            engine.step(regression_batch(4))
        return [*state_of(engine.model), *(p.detach() for p in held(engine))]

    assert same_bits(weights(1), weights(2**26))


def test_a_hook_meets_the_values_of_the_weights_without_masters_too():
    engine = made(LinearStack, squared_error, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), "stochastic-rounding")
    before, seen = state_of(engine.model), []
    (optimizer,) = engine.optimizers
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.detach().clone() for p in held(engine)))
    engine.step(regression_batch(4))
    assert same_bits(seen, [p.float() for p in before])


def test_what_an_optimizer_of_its_own_kind_costs_in_copies_is_warned_of(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    with pytest.warns(UserWarning, match=r"Patched is not known.*fp32 copies of all weights and gradients.*GiB"):
        made(
            LinearStack,
            squared_error,
            lambda m: Patched(m.parameters(), lr=0.1),
            "stochastic-rounding",
            fields={"gradient_dtype": "parameter"},
        )
    made(LinearStack, squared_error, lambda m: Patched(m.parameters(), lr=0.1))  # copies nothing: warnings are errors


# what an interrupted update leaves behind


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.uses_b = True

    def forward(self, x):
        return self.a(x) + self.b(x) if self.uses_b else self.a(x)


class Interrupted(torch.optim.SGD):
    """Raises after its update as often as it is told."""

    raises = None

    def step(self, closure=None):
        super().step(closure)
        if self.raises is not None:
            raise self.raises


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("where", ["hook", "step", "bucket"])
@pytest.mark.parametrize("gradient_dtype", ["float32", "parameter"])
@pytest.mark.parametrize("method", METHODS)
def test_an_interrupted_update_leaves_no_gradient_no_copy_and_masters_that_agree(
    method, gradient_dtype, where, error, monkeypatch
):
    kind = torch.optim.SGD if where == "hook" else Interrupted
    engine = made(Two, mean, lambda m: kind(m.parameters(), lr=0.5), method, fields={"gradient_dtype": gradient_dtype})
    (optimizer,) = engine.optimizers
    if where == "bucket":
        monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
        monkeypatch.setattr(buckets, "_ONE_BY_ONE", (Interrupted,))

    def stop(*_):
        raise error

    if where == "hook":
        hook = optimizer.register_step_pre_hook(stop)
    else:
        optimizer.raises = error()
    with pytest.raises(error):
        engine.step(torch.ones(4, 2))
    if where == "hook":
        hook.remove()
    else:
        optimizer.raises = None
    assert all(p.grad is None for p in [*engine.model.parameters(), *held(engine)])
    wanted = torch.float32 if gradient_dtype == "float32" else BF16
    assert {p.grad_dtype for p in engine.model.parameters()} == {wanted}
    if method == "master-weights":
        assert same_bits([p.detach().to(BF16) for p in held(engine)], state_of(engine.model))
    if method == "stochastic-rounding":
        assert not any(any(p.stride()) for p in held(engine))
    engine.model.uses_b = False
    before = state_of(engine.model.b)
    assert not engine.step(torch.ones(4, 2)).skipped
    assert same_bits(before, state_of(engine.model.b))
