import math
import weakref
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from models import LinearStack, Weight, gradients, mean_product, regression_batch, same_bits, squared_error
from snugfit import Engine, Job, LossScale, Plan, PlanError, Segment, UnsupportedError, build, checkpointing, hardware
from snugfit.training import weighting
from snugfit.training.precision import (
    Scaler,
    autocast,
    keep_fp32,
    multiply,
    refuse_half_weights,
    resolve,
    scaler,
    to_fp32_masters,
    total_norm,
    warn_of_emulation,
)
from tolerances import FP16_SMALL_GRADIENT

BF16 = torch.bfloat16
PRECISIONS = ("32-true", "16-mixed", "bf16-mixed")


def make(model, loss, optimizer=None, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0) if optimizer is None else optimizer
    return Engine(model, optimizer, loss=loss, **settings)


def values(*numbers):
    return [torch.full((1,), float(number)) for number in numbers]


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


# the loss scale


def test_the_scale_backs_off_at_an_overflow_and_grows_after_clean_windows():
    scale = Scaler(LossScale(init_scale=8.0, growth_interval=2))
    scale.update(found_inf=True)
    assert scale.scale == 4.0
    scale.update(found_inf=False)
    assert scale.scale == 4.0
    scale.update(found_inf=False)
    assert scale.scale == 8.0


def test_an_overflow_starts_the_run_of_clean_windows_anew():
    scale = Scaler(LossScale(init_scale=8.0, growth_interval=2))
    for found in (False, True, False):
        scale.update(found)
    assert scale.scale == 4.0


def test_the_scale_keeps_within_floor_and_cap():
    scale = Scaler(LossScale(init_scale=2.0, floor=2.0, cap=2.0, growth_interval=1))
    scale.update(found_inf=True)
    assert scale.scale == 2.0
    scale.update(found_inf=False)
    assert scale.scale == 2.0


HISTORIES = st.lists(st.booleans(), max_size=40)


@given(
    HISTORIES,
    st.integers(1, 5),
    st.sampled_from([1.5, 2.0, 4.0]),  # torch refuses 1
    st.sampled_from([0.25, 0.5, 0.75]),
    st.sampled_from([1.0, 3.0, 65536.0]),
)
def test_without_bounds_it_is_the_scale_of_torch(history, interval, growth, backoff, start):
    bounds = {"floor": 2.0**-100, "cap": 2.0**100}
    settings = {"backoff_factor": backoff, "growth_interval": interval}
    ours = Scaler(LossScale(init_scale=start, growth_factor=growth, **settings, **bounds))
    theirs = torch.amp.GradScaler("cpu", init_scale=start, growth_factor=growth, **settings)
    parameter = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    theirs.scale(torch.ones(()))
    for found in history:
        parameter.grad = torch.tensor(math.inf if found else 1.0)
        theirs.step(optimizer)
        theirs.update()
        ours.update(found)
        assert ours.scale == pytest.approx(theirs.get_scale(), rel=1e-5)


@given(HISTORIES, st.integers(1, 4), st.integers(0, 6), st.integers(0, 6), st.integers(0, 6), st.data())
def test_with_bounds_it_is_the_model_of_it(history, interval, low, above, start, data):
    """Powers of two, so that the model is one of integers: an exponent, and a run of clean windows."""
    high, begin = low + above, low + min(start, above)
    settings = LossScale(
        init_scale=2.0**begin, growth_interval=interval, floor=2.0**low, cap=2.0**high, growth_factor=4.0
    )
    scale, exponent, run = Scaler(settings), begin, 0
    for found in history:
        if data.draw(st.booleans()):  # saved and loaded in between
            saved, scale = scale.state_dict(), Scaler(settings)
            scale.load_state_dict(saved)
        scale.update(found)
        exponent, run = (max(exponent - 1, low), 0) if found else (exponent, run + 1)
        if run == interval:
            exponent, run = min(exponent + 2, high), 0
        assert scale.scale == 2.0**exponent


def test_a_saved_scale_goes_on_where_it_was():
    first, other = Scaler(LossScale(growth_interval=2)), Scaler(LossScale(growth_interval=2))
    first.update(found_inf=True)
    first.update(found_inf=False)
    other.load_state_dict(first.state_dict())
    other.update(found_inf=False)
    assert other.scale == 65536.0


def test_a_saved_scale_takes_the_bounds_and_the_interval_that_are_set_now():
    other = Scaler(LossScale(init_scale=8.0, floor=4.0, cap=16.0, growth_interval=2))
    other.load_state_dict({"scale": 1024.0, "clean_windows": 1500})
    assert other.scale == 16.0
    other.load_state_dict({"scale": 1.0, "clean_windows": 1500})
    assert other.scale == 4.0
    other.update(found_inf=False)  # the run is longer than the interval that is set now
    assert other.scale == 8.0


@pytest.mark.parametrize("name", ["init_scale", "growth_factor", "backoff_factor", "growth_interval", "floor", "cap"])
@pytest.mark.parametrize("value", [math.nan, math.inf, "2", None, True])
def test_a_setting_of_the_scale_that_is_no_number_is_refused(name, value):
    with pytest.raises(PlanError, match=name):
        LossScale(**{name: value})


@pytest.mark.parametrize("value", [3, 65536.0, "65536", torch.amp.GradScaler("cpu", enabled=False)])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_something_else_than_a_loss_scale_is_refused_under_every_precision(value, precision):
    with pytest.raises(PlanError, match="loss_scale") as caught:
        make(Weight(), mean_product, loss_scale=value, precision=precision)
    assert caught.value.hint


def test_c035_fp16_without_a_loss_scale_has_to_be_said_and_is_warned_about():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    with pytest.warns(UserWarning, match=r"loss scale that stays 1.*become 0"):
        engine = make(
            model,
            lambda m, x: m(x).float().mean() * 1e-4,
            precision="16-mixed",
            loss_scale=LossScale(init_scale=1, growth_factor=1),
        )
    result = engine.step(torch.full((1, 1), 1e-4))
    assert (result.loss_scale, result.skipped, model.weight.item()) == (1.0, False, 0.0)  # 1e-8 is 0 in fp16


@pytest.mark.parametrize("given_scale", [None, LossScale(init_scale=8.0)])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_c035_only_fp16_has_a_loss_scale(precision, given_scale):
    assert scaler(precision, given_scale) is None


def test_c035_a_small_gradient_survives_fp16():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    engine = make(model, lambda m, x: m(x).float().mean() * 1e-4, precision="16-mixed")
    assert engine.step(torch.full((1, 1), 1e-4)).loss_scale == 65536.0
    assert -model.weight.item() == pytest.approx(1e-8, rel=FP16_SMALL_GRADIENT)


def half_product(model, micro_batch):
    """w * x, whose gradient passes through half precision."""
    return (model.w.half() * micro_batch.half()).mean()


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_c043_a_scale_that_is_too_high_is_found_within_four_skipped_windows(parts):
    engine = make(Weight(0.0), half_product, precision="16-mixed")
    results = [engine.step_window(values(*[10] * parts)) for _ in range(5)]
    if parts == 1:
        assert [result.skipped for result in results] == [True] * 4 + [False]
        assert [result.loss_scale for result in results] == [65536.0, 32768.0, 16384.0, 8192.0, 4096.0]
        assert engine.model.w.item() == -10.0
    else:  # the mean of more micro-batches leaves more room
        first = next(i for i, result in enumerate(results) if not result.skipped)
        assert results[first].loss_scale == 4096.0 * parts
        assert engine.model.w.item() == -10.0 * (len(results) - first)


@pytest.mark.parametrize("infinite", [(), (1,), (1, 2), (0, 1, 2, 3)])
def test_c031_the_scale_is_frozen_for_the_length_of_a_window_and_moves_once(infinite):
    model, seen = Weight(0.0), []
    model.w.register_hook(lambda gradient: seen.append(gradient.item()))
    settings = LossScale(init_scale=1024.0, growth_interval=1)
    engine = make(model, mean_product, precision="16-mixed", loss_scale=settings)
    parts = values(*[math.inf if i in infinite else 2 for i in range(4)])
    result = engine.step_window(parts)
    assert {value for value in seen if math.isfinite(value)} <= {2 * 1024.0 / 4}
    assert result.skipped == bool(infinite)
    assert engine.state_dict()["scaler"]["scale"] == (512.0 if infinite else 2048.0)


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("bad", [True, False])
def test_several_optimizers_share_one_scale_and_back_off_or_grow_once_per_window(number, bad):
    model = nn.ModuleList(Weight(0.0) for _ in range(number))
    optimizers = [torch.optim.SGD(part.parameters(), lr=1.0) for part in model]
    settings = LossScale(init_scale=8.0, growth_interval=1)
    engine = make(
        model, lambda m, x: sum(part(x).mean() for part in m), optimizers, precision="16-mixed", loss_scale=settings
    )
    result = engine.step_window(values(1, math.inf if bad else 1))
    assert result.skipped == bad
    assert engine.state_dict()["scaler"]["scale"] == (4.0 if bad else 16.0)
    assert {part.w.item() for part in model} == {0.0 if bad else -1.0}


def test_c032_an_optimizer_that_owns_no_parameters_at_all_is_left_out():
    model = Weight(0.0)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0), torch.optim.SGD([{"params": []}], lr=1.0)]
    engine = make(model, mean_product, optimizers, precision="16-mixed")
    assert engine.step_window(values(2)).step == 1
    assert model.w.item() == -2.0


@pytest.mark.parametrize("scale", [1.0, 1024.0, 65536.0])
@pytest.mark.parametrize("limit", [None, 1.0, 0.25])
def test_c026_norm_and_clip_see_the_unscaled_gradient(scale, limit):
    engine = make(
        Weight(0.0), mean_product, precision="16-mixed", loss_scale=LossScale(init_scale=scale), max_grad_norm=limit
    )
    result = engine.step_window(values(0.5, 0.5))
    assert float(result.grad_norm) == 0.5
    assert -engine.model.w.item() == pytest.approx(0.25 if limit == 0.25 else 0.5, rel=1e-5)


@pytest.mark.parametrize("limit", [None, 1.0])
@pytest.mark.parametrize("refused", [(0,), (1,), (0, 1), (0, 2)])
def test_c028_after_refused_updates_the_next_windows_work(refused, limit):
    engine = make(Weight(0.0), mean_product, precision="16-mixed", max_grad_norm=limit)
    moved = 0.0
    for i in range(4):
        with engine.window(values(0.5, 0.5)) as window:
            for micro_batch in window:
                window.backward(mean_product(engine.model, micro_batch))
            if i in refused:
                window.skip("norm spike")
        moved -= 0.0 if i in refused else 0.5
        assert (window.result.skipped, window.result.loss_scale) == (i in refused, 65536.0)
        assert engine.model.w.grad is None
    assert engine.model.w.item() == moved


# unscaling


def test_gradients_are_multiplied_by_a_number_or_by_a_tensor_whatever_their_types():
    for factor in (0.25, torch.tensor(0.25, dtype=torch.float64)):
        found = [torch.full((2,), 8.0), torch.full((3,), 8.0, dtype=torch.float64)]
        multiply(found, factor)
        assert [gradient.unique().tolist() for gradient in found] == [[2.0], [2.0]]


@given(st.floats(width=32, min_value=2.0**-60, max_value=2.0**60), st.integers(0, 24))
def test_c053_unscaling_in_fp32_by_a_power_of_two_is_exact(value, exponent):
    gradient = torch.tensor([value])
    scaled = gradient * 2.0**exponent
    multiply([scaled], 1.0 / 2.0**exponent)
    assert torch.equal(scaled, gradient)


class NoDouble(TorchDispatchMode):
    """Refuses 64-bit floats, as MPS does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if any(isinstance(value, torch.Tensor) and value.dtype == torch.float64 for value in (result, *args)):
            raise TypeError(f"{func} with a 64-bit float")
        return result


def test_c053_a_window_needs_no_64_bit_floats():
    engine = make(LinearStack(), squared_error, precision="16-mixed", micro_batch_size=3, max_grad_norm=1.0)
    batch = regression_batch(8)
    with NoDouble():
        assert not engine.step(batch).skipped


def test_c053_a_count_that_only_the_device_knows_is_fp32_where_there_is_nothing_larger():
    for kind, dtype in (("mps", torch.float32), ("cpu", torch.float64), ("cuda", torch.float64)):
        assert weighting.as_float(SimpleNamespace(device=SimpleNamespace(type=kind), to=lambda dtype: dtype)) == dtype


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 60000.0), (BF16, 1.5)])
def test_the_norm_of_half_precision_gradients_is_taken_in_fp32(dtype, value):
    found = [torch.full((1000,), value, dtype=dtype), torch.ones(3)]
    exact = torch.cat([gradient.double() for gradient in found]).norm().item()
    assert total_norm(found).item() == pytest.approx(exact, rel=1e-6)
    assert nn.utils.get_total_norm(found).item() != pytest.approx(exact, rel=1e-3)


def test_the_norm_of_fp32_gradients_is_torch_s_own_bit_for_bit():
    found = [torch.randn(17, 5), torch.randn(3)]
    assert torch.equal(total_norm(found), nn.utils.get_total_norm(found))
    assert total_norm([]).item() == 0.0


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


# autocast


def test_without_the_cache_no_cast_copy_outlives_its_layer():
    layer = nn.Linear(4, 4, bias=False)
    with torch.no_grad(), autocast("bf16-mixed", "cpu", cache_enabled=False):
        layer(torch.ones(2, 4))
        layer.weight.zero_()
        assert layer(torch.ones(2, 4)).abs().sum() == 0  # a cached cast would still hold the old weight


@pytest.mark.parametrize("precision", PRECISIONS)
def test_c048_a_forward_without_gradients_first_loses_no_gradient(precision):
    def found(first):
        torch.manual_seed(0)
        model, seen = LinearStack(), []
        batch = regression_batch(4)

        def loss(m, micro_batch):
            if first:
                with torch.no_grad():
                    m(micro_batch["x"])
            return squared_error(m, micro_batch)

        engine = make(model, loss, precision=precision, micro_batch_size=2)
        engine.optimizers[0].register_step_pre_hook(lambda *_: seen.append(gradients(model)))
        engine.step(batch)
        return list(seen[0].values())

    assert len(found(True)) == 6
    assert same_bits(found(True), found(False))


class Casts(TorchDispatchMode):
    """Counts the bytes of half-precision copies of weights that are alive."""

    def __init__(self, num_bytes):
        super().__init__()
        self.num_bytes, self.alive, self.most = num_bytes, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == BF16 and func is torch.ops.aten._to_copy.default:
            storage = result.untyped_storage()
            if storage.nbytes() == self.num_bytes:
                self.alive += self.num_bytes
                self.most = max(self.most, self.alive)
                weakref.finalize(storage, self.died)
        return result

    def died(self):
        self.alive -= self.num_bytes


SIX = 131072


@pytest.mark.parametrize("outer", [False, True])
def test_c049_evaluation_keeps_no_cast_copy_and_holds_one_at_most(outer):
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(6)))
    engine = make(model, lambda m, x: m(x).mean(), precision="bf16-mixed")
    x = torch.ones(1, 256)
    with Casts(SIX) as casts, torch.autocast("cpu", dtype=BF16, enabled=outer):
        for _ in range(2):
            with engine.evaluating() as evaluated:
                evaluated(x)
                assert casts.alive == 0
                evaluated(x)
            assert casts.alive == 0
    assert casts.most == SIX


def test_c049_the_same_in_one_plain_region_would_keep_all_six():
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(6)))
    with Casts(SIX) as casts, autocast("bf16-mixed", "cpu"):
        model(torch.ones(1, 256))
        assert casts.alive == 6 * SIX
    assert casts.alive == 0


class Nested(nn.Module):
    """Layers in nested regions of different types."""

    def __init__(self, kinds, seen):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in kinds)
        self.kinds = kinds
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda *_: seen.append(state()))

    def forward(self, x):
        for layer, kind in zip(self.layers, self.kinds, strict=True):
            with torch.autocast("cpu", **kind) if kind else autocast("32-true", "cpu"):
                x = layer(x.float())
        return x


def state():
    return (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled())


KINDS = [None, {"dtype": torch.float16}, {"enabled": False}, {"dtype": BF16, "cache_enabled": False}, None]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_c050_each_recomputation_uses_exactly_the_autocast_state_of_its_forward(precision, wrapped):
    """Variant: one segment around the regions that are opened inside of it."""
    found = {}
    for recompute in (False, True):
        torch.manual_seed(0)
        inner = []
        model = nn.Sequential(Nested(KINDS, inner))
        names = ["0"] if wrapped else [f"0.layers.{i}" for i in range(len(KINDS))]
        if recompute:
            checkpointing.apply(model, [Segment(name) for name in names])
        with autocast(precision, "cpu"):
            loss = model(torch.ones(2, 4)).float().square().sum()
        loss.backward()
        found[recompute] = (list(gradients(model).values()), inner)
    plain, (again, states) = found[False][1], found[True]
    assert same_bits(found[False][0], again)
    assert plain == states[: len(KINDS)]
    if wrapped:
        assert states[len(KINDS) :] == plain
    else:  # hooks of a module are outside of what is recomputed
        assert len(states) == len(KINDS)


@pytest.mark.parametrize("form", ["step", "by hand", "load"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_no_cast_of_an_old_weight_outlives_an_update_in_a_region_of_the_user_s_own(form, precision):
    model = nn.Linear(2, 2, bias=False)
    nn.init.ones_(model.weight)
    engine = make(model, lambda m, x: m(x).float().mean(), precision=precision)
    saved = {**engine.state_dict(), "model": {"weight": torch.full((2, 2), 5.0)}}
    x = torch.ones(1, 2)
    with torch.autocast("cpu", dtype=BF16):
        before = model(x)  # casts the weight and keeps the cast
        if form == "step":
            engine.step(x)
        elif form == "by hand":
            with engine.window([x]) as window:
                for micro_batch in window:
                    window.backward(model(micro_batch).float().mean())
        else:
            engine.load_state_dict(saved)
        after = model(x)
    expected = {"load": 10.0}.get(form, 1.0)  # each of the two weights of an output falls by 1/2
    assert (before.unique().tolist(), after.unique().tolist()) == ([2.0], [expected])


class Product(torch.autograd.Function):
    """A user's own product of two matrices, decorated for autocast."""

    types: ClassVar = []

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        result = a @ b
        Product.types.append(result.dtype)
        return result

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        a, b = ctx.saved_tensors
        left, right = gradient @ b.t(), a.t() @ gradient
        Product.types += [left.dtype, right.dtype]
        return left, right


class Custom(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.w = nn.Parameter(torch.full((4, 4), 0.5))
        self.function = function

    def forward(self, x):
        return self.function.apply(x, self.w)


@pytest.mark.parametrize("region", [None, "0"])
@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", BF16), ("16-mixed", torch.float16), ("32-true", torch.float32)]
)
def test_c052_a_decorated_function_runs_forward_and_backward_in_the_type_of_autocast(precision, dtype, region):
    Product.types = []
    model = nn.Sequential(Custom(Product))
    if region:
        checkpointing.apply(model, [Segment(region)])
    engine = make(model, lambda m, x: m(x).float().mean(), precision=precision)
    result = engine.step(torch.ones(2, 4))
    assert not result.skipped
    assert set(Product.types) == {dtype}
    assert len(Product.types) == (4 if region else 3)
    assert model[0].w.unique().tolist() == [0.25]


def test_c052_an_undecorated_function_clashes_and_runs_as_an_fp32_island():
    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        def backward(ctx, gradient):
            a, b = ctx.saved_tensors
            return gradient @ b.t(), a.t() @ gradient

    def step(island):
        model = nn.Sequential(Custom(Bare))
        if island:
            keep_fp32(model, "0")
        make(model, lambda m, x: m(x).float().mean(), precision="bf16-mixed").step(torch.ones(2, 4))
        return model[0].w.unique().tolist()

    with pytest.raises(RuntimeError, match="dtype"):
        step(island=False)
    assert step(island=True) == [0.25]


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_c081_the_loss_of_half_precision_scores_is_computed_accumulated_and_logged_in_fp32(precision):
    """bf16 scores, 50000 classes, all equal: 10.819778, not 10.8125."""
    model = nn.Linear(1, 50000, bias=False)
    nn.init.zeros_(model.weight)
    engine = make(model, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), precision=precision, micro_batch_size=3)
    result = engine.step({"x": torch.ones(4, 1), "y": torch.zeros(4, dtype=torch.long)})
    assert result.loss.dtype == torch.float32
    assert result.loss.item() == pytest.approx(10.819778, abs=1e-5)


def test_bf16_true_is_made_by_build_only():
    with pytest.raises(UnsupportedError, match="build"):
        make(Weight(), mean_product, precision="bf16-true")
    job = Job(Weight, mean_product, lambda m: torch.optim.SGD(m.parameters(), lr=1.0), None)
    engine = build(job, Plan(batch_size=2, micro_batch_size=1, precision="bf16-true"), device="cpu")
    assert engine.precision == "bf16-true"
    assert engine.model.w.dtype == BF16
