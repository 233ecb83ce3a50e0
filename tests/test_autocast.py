"""Regions of autocast: their cache, recomputation, custom functions and the type of the loss."""

import weakref
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mixed_precision import BF16, PRECISIONS, make
from models import LinearStack, gradients, regression_batch, same_bits, squared_error
from snugfit import Segment, checkpointing
from snugfit.training.precision import autocast, keep_fp32


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
