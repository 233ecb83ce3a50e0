"""Every form of activation checkpointing: plain gradients bit for bit, and what is kept and what repeated."""

import collections
import copy
import dataclasses
import gc
import pickle
import random
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from models import LinearStack, Transformer, gradients, token_batch, token_loss
from saved_tensors import saved_bytes
from snugfit import Engine, Plan, PlanError, Segment, UnsupportedError, is_recomputing
from snugfit.training import offloading
from snugfit.training.checkpointing import apply, blocks, every, match, segments
from snugfit.training.torch_private import DispatchMode

FORMS = {
    "every block": blocks,
    "every second": lambda model: every(model, 2),
    "two runs": lambda model: segments(model, 2),
    "square root": segments,
    "attention": lambda model: match(model, "*.attn"),
    "feed-forward": lambda model: match(model, "*.ff"),
    "a class": lambda model: match(model, nn.LayerNorm),
    "a predicate": lambda model: match(model, lambda name, module: name.count(".") == 1),
    "keep-matmul": lambda model: blocks(model, "keep-matmul"),
    "keep-attention": lambda model: blocks(model, "keep-attention"),
    "keep-last": lambda model: blocks(model, "keep-last"),
    "own set": lambda model: blocks(model, "keep:addmm,native_layer_norm"),
    "own set of random operations": lambda model: blocks(model, "keep:bernoulli,native_dropout,bmm"),
    "runs that keep": lambda model: segments(model, 2, "keep-matmul"),
    "runs that keep the last product": lambda model: segments(model, 2, "keep-attention-last"),
    "offload": lambda model: blocks(model, "offload"),
    "mixed": lambda model: (
        Segment("blocks.0"),
        Segment("blocks.1", "keep-matmul"),
        Segment("blocks.2", "offload"),
        Segment("blocks.3.attn"),
    ),
    "nested": lambda model: (
        Segment(("blocks.0", "blocks.1", "blocks.2", "blocks.3")),
        Segment(("blocks.0", "blocks.1")),
        Segment(("blocks.2", "blocks.3")),
        Segment("blocks.1.ff"),
    ),
    "kept inside of full": lambda model: (
        Segment(("blocks.0", "blocks.1")),
        Segment("blocks.0", "keep-matmul"),
        Segment("blocks.3", "keep-matmul"),
        Segment("blocks.3.ff"),
    ),
}


class Counter(DispatchMode):
    """How often each operation runs."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def counted(run):
    with Counter() as counter:
        run()
    return counter.calls


def trained_alike(model, twin, run, windows=2):
    """Whether the gradients of two models stay equal bit for bit, window after window."""
    for _ in range(windows):
        for one in (model, twin):
            torch.manual_seed(3)
            one.zero_grad()
            run(one).backward()
        ours, theirs = gradients(model), gradients(twin)
        if ours.keys() != theirs.keys() or not all(torch.equal(ours[name], theirs[name]) for name in ours):
            return False
    return True


# On the host nothing is moved, which a test of its own says.
pytestmark = pytest.mark.filterwarnings("ignore:segments are offloaded to the host")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_those_of_plain_training_bit_for_bit(form, autocast, monkeypatch):
    monkeypatch.setattr(offloading, "MIN_BYTES", 1)
    model = Transformer(depth=4, dropout=0.3)
    twin = copy.deepcopy(model)
    handle = apply(model, FORMS[form](model))
    batch = token_batch(4)

    def run(one):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return token_loss(one, batch)

    assert handle.covered
    assert trained_alike(model, twin, run)
    handle.remove()
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert trained_alike(model, twin, run)


def test_matrix_products_that_are_kept_are_not_run_again():
    model = Transformer(depth=3)
    batch = token_batch(4)
    plain = counted(lambda: token_loss(model, batch).backward())
    apply(model, blocks(model, "keep-matmul"))
    kept = counted(lambda: token_loss(model, batch).backward())
    products = ("addmm", "mm", "bmm", "baddbmm")
    assert {name: kept.get(name) for name in products} == {name: plain.get(name) for name in products}
    assert kept["native_layer_norm"] > plain["native_layer_norm"]


@pytest.mark.parametrize(("policy", "repeated"), [("full", 5), ("keep-last", 4)])
def test_of_each_module_of_a_run_the_last_product_alone_is_not_run_again(policy, repeated):
    """Two blocks of three linear layers: all but the very last, which nothing needs, or the last of each, run again."""
    model = Transformer(depth=2)
    batch = token_batch(4)
    plain = counted(lambda: token_loss(model, batch).backward())
    apply(model, [Segment(("blocks.0", "blocks.1"), policy)])
    for _ in range(2):
        kept = counted(lambda: token_loss(model, batch).backward())
    assert kept["addmm"] - plain["addmm"] == repeated


def test_a_full_segment_repeats_everything_up_to_the_last_tensor_that_backward_needs():
    class Chain(nn.Module):
        def forward(self, x):
            return x.sin().cos().exp() + 1  # nothing of the addition is saved

    model = nn.Sequential(Chain())
    apply(model, [Segment("0")])
    x = torch.randn(4, requires_grad=True)
    calls = counted(lambda: model(x).sum().backward())
    # exp keeps its result, so all three run twice; the derivative of sin is a cos, that of cos a sin.
    assert (calls["exp"], calls["add"]) == (2, 1)
    assert calls["sin"] == calls["cos"] == 3


def test_a_result_that_no_recomputation_asks_for_is_kept_once_only():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 64, bias=False), nn.Linear(64, 8, bias=False)

        def forward(self, x):
            return self.down(self.up(x).relu())

    model = nn.Sequential(Block())
    apply(model, [Segment("0", "keep-matmul")])
    x = torch.randn(4, 8, requires_grad=True)
    seen = model[0].__dict__["forward"].seen
    model(x).sum().backward()
    assert {index for _, index in seen.unused} == {1}  # the result of down: backward needs relu's, no later one
    first = counted(lambda: model(x).sum().backward())
    assert first["mm"] == 2 + 4


def test_c063_nested_regions_run_the_inner_function_three_times_at_most():
    class Inner(nn.Module):
        calls = 0

        def forward(self, t):
            Inner.calls += 1
            return t.sin() * t

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, t):
            return self.inner(t) ** 2

    model = nn.Sequential(Outer())
    apply(model, [Segment("0"), Segment("0.inner")])
    t = torch.tensor(2.0, requires_grad=True)
    model(t).backward()
    plain = torch.tensor(2.0, requires_grad=True)
    ((plain.sin() * plain) ** 2).backward()
    assert torch.equal(t.grad, plain.grad)
    assert t.grad.item() == pytest.approx(0.2800770, abs=1e-6)
    assert Inner.calls <= 3


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass
class Output:
    value: torch.Tensor
    aux: int


@pytest.mark.parametrize("policy", ["full", "keep-matmul", "offload"])
def test_c057_structures_of_inputs_and_outputs_are_kept(policy):
    class Region(nn.Module):
        def forward(self, given, *, scale, extra):
            h = given["h"] ** 2
            return Output(h, 3), Pair(h * scale["s"], h + extra[0]), (h, 1.5, None)

    model = nn.Sequential(Region())
    apply(model, [Segment("0", policy)])
    h, s = torch.tensor(2.0, requires_grad=True), torch.tensor(5.0, requires_grad=True)
    output, pair, rest = model[0]({"h": h}, scale={"s": s}, extra=[torch.tensor(1.0)])
    assert type(output) is Output
    assert output.aux == 3
    assert type(pair) is Pair
    assert rest[1:] == (1.5, None)
    output.value.backward(retain_graph=True)
    assert h.grad.item() == 4.0
    pair.first.backward()
    assert s.grad.item() == 4.0


def test_c059_a_region_that_writes_into_its_input_is_a_clear_error():
    class Region(nn.Module):
        def forward(self, x):
            return x.add_(1) ** 2

    model = nn.Sequential(Region())
    apply(model, [Segment("0")])
    x = torch.tensor(2.0, requires_grad=True)
    with pytest.raises(UnsupportedError, match="input was written into") as caught:
        model(x * 1).backward()
    assert caught.value.names == ("0",)


def test_c059_instance_norm_and_an_in_place_activation_at_the_end():
    model = nn.Sequential(nn.Sequential(nn.InstanceNorm2d(2), nn.ReLU(inplace=True)))
    apply(model, [Segment("0")])
    x = torch.ones(1, 2, 3, 3, requires_grad=True)
    model(x).sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))


def test_a_kept_result_that_is_written_over_later_is_the_one_of_its_operation():
    class Region(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x):
            h = self.inner(x)
            h = h.sigmoid() + h.mul_(0.5).relu_()
            return h.exp()

    model = nn.Sequential(Region())
    twin = copy.deepcopy(model)
    apply(model, [Segment("0", "keep-matmul")])
    x = torch.randn(5, 6)
    assert trained_alike(model, twin, lambda one: one(x).sum())


@pytest.mark.parametrize("policy", ["full", "keep-matmul", "keep-attention", "offload"])
def test_several_backwards_through_one_forward_and_double_backward(policy, monkeypatch):
    monkeypatch.setattr(offloading, "MIN_BYTES", 1)

    def results(model, x):
        y = model(x).sin()
        first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
        second = torch.autograd.grad((y * 2).sum(), x, create_graph=True)[0]
        return first, second, torch.autograd.grad(second.square().sum(), x)[0]

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    twin = copy.deepcopy(model)
    apply(model, [Segment(("0", "1", "2"), policy)])
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    for ours, theirs in zip(results(model, x), results(twin, x), strict=True):
        assert torch.equal(ours, theirs)


def test_dropout_behind_a_kept_random_operation_draws_the_same_mask():
    class Region(nn.Module):
        def forward(self, x):
            first = torch.bernoulli(torch.full_like(x, 0.5))
            return F.dropout(x * first * x, 0.5)

    model = nn.Sequential(Region())
    apply(model, [Segment("0", "keep:bernoulli")])
    x = torch.randn(1000, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert torch.equal(x.grad != 0, y != 0)


def test_a_routing_decision_is_kept_even_where_the_second_run_would_decide_otherwise():
    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.noise = 0.0

        def forward(self, x):
            scores = x.detach() * torch.tensor([1.0, 1.0 + (1.0 if is_recomputing() else -1.0)])
            best = scores.topk(1).indices
            return x.gather(-1, best).square()

    model = nn.Sequential(Router())
    apply(model, [Segment("0")])
    x = torch.ones(1, 2, requires_grad=True)
    model(x).sum().backward()
    assert x.grad.tolist() == [[2.0, 0.0]]


def test_a_list_that_a_segment_adds_to_is_added_to_once():
    class Region(nn.Module):
        def forward(self, x, seen):
            seen.append(float(len(seen)))
            return (x * (seen[-1] + 1)).sin()

    model = nn.Sequential(Region())
    apply(model, [Segment("0")])
    seen = [0.0]
    x = torch.tensor(2.0, requires_grad=True)
    model[0](x, seen).backward()
    assert seen == [0.0, 1.0]
    assert x.grad.item() == pytest.approx(2 * torch.tensor(4.0).cos().item())


def test_c067_a_frozen_prefix_is_not_recomputed():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    for layer in model[:2]:
        layer.requires_grad_(False)
    apply(model, [Segment("0"), Segment("1")])
    x = torch.randn(32, 64)
    calls = counted(lambda: model(x).sum().backward())
    assert calls["addmm"] == 3
    assert saved_bytes(lambda: model(x)) == 32 * 64 * 4


def test_c068_more_segments_than_layers_one_segment_and_a_first_layer_with_two_inputs():
    stack = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(PlanError, match="n=3"):
        segments(stack, 3)
    with pytest.warns(UserWarning, match="saves next to nothing"):
        segments(stack, 1)

    class Two(nn.Module):
        def forward(self, x, y):
            return x * y

    class Scaled(nn.Module):
        def forward(self, x, y):
            return x * 3

    chain = nn.ModuleList([Two(), Scaled()])
    apply(chain, [Segment(("0", "1"))])
    x, y = torch.tensor(2.0, requires_grad=True), torch.tensor(5.0, requires_grad=True)
    chain[1](chain[0](x, y), y).backward()
    assert (x.grad.item(), y.grad.item()) == (15.0, 6.0)


def test_the_square_root_is_the_default_number_of_segments():
    assert [len(segment.modules) for segment in segments(LinearStack(depth=9))] == [3, 3, 3]


def test_c069_a_model_that_is_checkpointed_by_its_own_library_is_refused_by_name():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=16, use_cache=False)
    model = transformers.GPT2LMHeadModel(config)
    for module in model.modules():  # what the library's own switch sets
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = True
    with pytest.raises(UnsupportedError, match="gradient_checkpointing_disable"):
        apply(model, blocks(model))
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = False
    assert apply(model, blocks(model)).covered == ("transformer.h.0", "transformer.h.1")


def test_c069_torch_s_own_checkpoint_wrapper_is_refused_by_name():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = LinearStack(depth=2)
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    with pytest.raises(UnsupportedError, match="own library"):
        apply(model, blocks(LinearStack(depth=2)))


def test_c070_nothing_lives_on_after_backward_without_a_collection():
    class Region(nn.Module):
        def forward(self, x, box):
            box.output = x.sin() * x
            return box.output

    class Box:
        output = None

    model = nn.Sequential(Region())
    apply(model, [Segment("0", "keep-matmul")])
    gc.disable()
    try:
        box = Box()
        reference = weakref.ref(box)
        x = torch.randn(3, requires_grad=True)
        model[0](x, box).sum().backward()
        del box
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("policy", ["full", "keep-matmul", "offload"])
def test_without_gradients_no_form_does_anything(policy):
    model = Transformer(depth=2)
    apply(model, blocks(model, policy))
    batch = token_batch(2)
    with torch.no_grad():
        assert saved_bytes(lambda: token_loss(model, batch)) == 0


def test_a_tensor_that_is_changed_after_it_was_saved_is_an_error_when_offloaded_too(monkeypatch):
    monkeypatch.setattr(offloading, "MIN_BYTES", 1)

    class Region(nn.Module):
        def forward(self, x):
            h = x * 2
            y = h * h
            h.add_(1)
            return y

    model = nn.Sequential(Region())
    apply(model, [Segment("0", "offload")])
    with pytest.raises(PlanError, match="in place"):
        model(torch.ones(3, requires_grad=True)).sum().backward()


@pytest.mark.parametrize(
    ("policy", "named"),
    [("keep:mmm", "mmm"), ("keep:", "''"), ("keep:mm,add_", "add_"), ("keep:view", "view")],
)
def test_own_sets_that_cannot_be_kept_are_refused_by_name(policy, named):
    model = LinearStack()
    with pytest.raises(PlanError) as caught:
        apply(model, [Segment("layers.0", policy)])
    assert named in caught.value.got
    with pytest.raises(PlanError):
        Segment("layers.0", "keep-everything")


@pytest.mark.parametrize("nothing", ["*.attention", nn.Conv2d, lambda name, module: False, 3])
def test_what_matches_nothing_is_refused(nothing):
    with pytest.raises(PlanError):
        match(Transformer(), nothing)


def test_a_match_inside_of_another_match_is_left_to_the_outer_one():
    model = nn.ModuleDict({"attn": nn.ModuleDict({"attn_out": nn.Linear(2, 2)}), "attn2": nn.Linear(2, 2)})
    assert [segment.modules for segment in match(model, "*attn*")] == [("attn",), ("attn2",)]
    assert [segment.modules for segment in match(model, nn.Module)] == [("attn",), ("attn2",)]
    assert [segment.modules for segment in match(model, "attn.*")] == [("attn.attn_out",)]


def test_a_pattern_or_a_name_that_is_nearly_right_is_told_what_was_meant():
    model = nn.ModuleDict({"h": nn.ModuleList([nn.ModuleDict({"attn": nn.Linear(2, 2)})])})
    with pytest.raises(PlanError, match="matches no module") as caught:
        match(model, "*.atn")
    assert caught.value.hint == 'did you mean "*attn"?'
    with pytest.raises(PlanError) as caught:
        match(model, "attn")
    assert caught.value.hint == "did you mean h.0.attn?"
    with pytest.raises(PlanError) as caught:
        match(model, "*.zzzzzz")
    assert "model" not in caught.value.hint
    for name in ("attn", "h.0.atn"):
        with pytest.raises(PlanError, match="does not have") as caught:
            apply(model, [Segment(name)])
        assert caught.value.hint == "did you mean h.0.attn?"
    with pytest.raises(PlanError, match="does not have") as caught:
        apply(model, [Segment("zzzzzz")])
    assert "did you mean" not in caught.value.hint


def test_applying_nested_segments_again_changes_nothing_and_either_handle_may_go_first():
    model = Transformer(depth=2)
    chosen = [Segment(("blocks.0", "blocks.1")), Segment("blocks.0"), Segment("blocks.0.ff")]
    first, second = apply(model, chosen), apply(model, chosen)
    before = model.blocks[0].__dict__["forward"]
    first.remove()
    assert model.blocks[0].__dict__["forward"] is before
    second.remove()
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_no_form_warns_on_an_ordinary_model():
    model = Transformer(depth=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for chosen in FORMS.values():
            apply(model, chosen(model)).remove()


@pytest.mark.parametrize("second", [lambda x: torch.cat([x, x]).sin().cos(), torch.sin])
def test_a_recomputation_that_differs_is_an_error_that_names_the_segment(second):
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            x = x * self.weight
            return (second(x) if is_recomputing() else x.sin().cos()).sum()

    model = nn.ModuleDict({"fine": nn.Linear(3, 3), "changing": Changing()})
    plan = Plan(batch_size=2, micro_batch_size=2, recompute=(Segment("fine"), Segment("changing")))
    engine = Engine(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        plan,
        loss=lambda model, x: model["changing"](model["fine"](x)),
    )
    with pytest.raises(UnsupportedError, match="is_recomputing") as caught:
        engine.step(torch.ones(2, 3))
    assert caught.value.names == ("changing",)
    assert "(2, 3)" in caught.value.got or "different number of tensors" in caught.value.got


@pytest.mark.parametrize("draw", [random.random, random.gauss, np.random.rand, np.random.randn])
def test_random_numbers_of_python_and_numpy_are_drawn_again_and_the_stream_goes_on_after_them(draw):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return x + (self.inner(x) * (2.0 if draw() < 0.5 else 0.5)).sin()

    def run(model):
        random.seed(1)
        np.random.seed(1)
        model.zero_grad()
        model(x).sum().backward()
        return draw()

    model, x = nn.Sequential(*(Scaled() for _ in range(6))), torch.randn(3, 4)
    twin = copy.deepcopy(model)
    apply(model, [Segment(str(i)) for i in range(6)])
    assert run(model) == run(twin)
    ours, theirs = gradients(model), gradients(twin)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_numpy_s_random_numbers_are_drawn_again_from_whatever_generator():
    class Scaled(nn.Module):
        def forward(self, x):
            return (x * np.random.rand()).sin()

    model, x = nn.Sequential(Scaled(), Scaled()), torch.randn(3, 4, requires_grad=True)
    before = np.random.get_bit_generator()
    try:
        found = []
        for recompute in (False, True):
            if recompute:
                apply(model, [Segment("0"), Segment("1")])
            np.random.set_bit_generator(np.random.PCG64(1))
            found.append((torch.autograd.grad(model(x).sum(), x)[0], np.random.rand()))
    finally:
        np.random.set_bit_generator(before)
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_a_repetition_runs_in_the_training_mode_of_its_forward():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)))
    twin = copy.deepcopy(model)
    apply(model, [Segment("0")])
    x = torch.randn(8, 4)
    for one in (model, twin):
        torch.manual_seed(0)
        loss = one(x).square().sum()
        one.eval()
        loss.backward()
        assert not one[0][1].training
    ours, theirs = gradients(model), gradients(twin)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ([],),
        lambda: collections.OrderedDict(seen=[]),
        lambda: collections.deque(),
        lambda: Output([], 3),
        lambda: Pair([], []),
    ],
)
def test_whatever_container_a_segment_adds_to_is_added_to_once(make):
    def inner(given):
        if isinstance(given, collections.deque):
            return given
        return given["seen"] if isinstance(given, dict) else given[0] if isinstance(given, tuple) else given.value

    class Region(nn.Module):
        def forward(self, x, given):
            inner(given).append(1.0)
            return (x * len(inner(given))).sin()

    model = nn.Sequential(Region())
    apply(model, [Segment("0")])
    given = make()
    x = torch.tensor(2.0, requires_grad=True)
    model[0](x, given).backward()
    assert list(inner(given)) == [1.0]
    assert x.grad.item() == pytest.approx(torch.tensor(2.0).cos().item())


def test_weights_that_change_before_backward_are_an_error():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    apply(model, [Segment("0")])
    loss = model(torch.randn(2, 4)).sum()
    with torch.no_grad():
        model[0][0].weight.mul_(2)
    with pytest.raises(UnsupportedError, match=r"optimizer\.step"):
        loss.backward()
    weights = {name: value.detach() * 2 for name, value in model.named_parameters()}
    weights = {name: value.requires_grad_() for name, value in weights.items()}
    with pytest.raises(UnsupportedError, match="functional_call"):
        torch.func.functional_call(model, weights, (torch.randn(2, 4),)).sum().backward()


def test_a_tensor_inside_of_an_argument_that_is_written_into_is_an_error():
    class Region(nn.Module):
        def forward(self, given):
            return given["x"].sin()

    model = nn.Sequential(Region())
    apply(model, [Segment("0")])
    x = torch.ones(3, requires_grad=True) * 1
    y = model({"x": x})
    x += y
    with pytest.raises(UnsupportedError, match="written into"):
        x.sum().backward()


RUN_POLICIES = ("full", "keep-matmul", "keep-last", "offload")


class Uses(nn.Module):
    """Blocks between which there is other code."""

    def __init__(self, between):
        super().__init__()
        self.blocks, self.between = nn.ModuleList(Residual(8) for _ in range(4)), between

    def forward(self, x):
        kept = []
        for i, block in enumerate(self.blocks):
            y = block(x)
            if self.between == "skips one" and i == 2:
                continue
            if self.between == "ends early" and i == 2:
                return y.sin().sum()
            if self.between == "writes":
                y = y.mul_(2)
            if self.between == "another operation":
                y = F.dropout(y.sin(), 0.5)
            if self.between == "a view":
                y = y.view(-1).view_as(y)
            if self.between == "a branch":
                y = y + 0.5 * x
            if self.between == "one twice" and i == 1:
                y = block(y)
            if self.between == "draws":
                torch.rand(3)
            kept.append(y)
            x = y
        return x.sum() + torch.stack(kept).square().mean() if self.between == "keeps" else x.sum()


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner, self.drop = nn.Linear(width, width), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(self.inner(x).sigmoid())


BETWEEN = (
    *("nothing", "keeps", "skips one", "ends early", "writes", "another operation", "a view", "a branch", "one twice"),
    "draws",
)


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("policy", RUN_POLICIES)
@pytest.mark.parametrize("lengths", [(4,), (2, 2), (1, 3)])
def test_runs_are_exact_whatever_the_code_between_their_modules_does(between, policy, lengths):
    model = Uses(between)
    twin = copy.deepcopy(model)
    names, chosen = [f"blocks.{i}" for i in range(4)], []
    for length in lengths:
        chosen.append(Segment(tuple(names[:length]), policy))
        del names[:length]
    apply(model, chosen)
    x = torch.randn(3, 8)
    assert trained_alike(model, twin, lambda one: one(x), windows=3)


def test_a_chain_keeps_the_input_of_its_first_module_and_a_branch_what_it_adds_to():
    x = torch.randn(3, 8)

    def saved(between):
        model = Uses(between)
        apply(model, [Segment(tuple(f"blocks.{i}" for i in range(4)))])
        return saved_bytes(lambda: model(x))

    assert saved("nothing") == saved("a view") - 3 * x.nbytes == x.nbytes
    assert saved("a branch") == 4 * x.nbytes


def test_what_comes_out_within_a_run_has_its_own_value_and_gradient():
    model = nn.Sequential(Residual(4), Residual(4), Residual(4)).eval()
    twin = copy.deepcopy(model)
    apply(model, [Segment(("0", "1", "2"))])
    x = torch.randn(2, 4)
    for one in (model, twin):
        one.first, one.second = one[0](x), None
        one.first.retain_grad()
        one.second = one[1](one.first)
        (one[2](one.second).sum() + one.first.square().sum()).backward()
    assert torch.equal(model.first, twin.first)
    assert torch.equal(model.first.grad, twin.first.grad)
    assert torch.equal(model.second, twin.second)


def test_each_module_of_a_run_is_run_once_in_the_forward_and_once_in_backward():
    calls = []

    class Counted(Residual):
        def forward(self, x):
            calls.append((self.number, is_recomputing()))
            return super().forward(x)

    model = nn.Sequential(*(Counted(4) for _ in range(4)))
    for number, block in enumerate(model):
        block.number = number
    apply(model, [Segment(("0", "1")), Segment(("2", "3"))])
    model(torch.randn(2, 4)).sum().backward()
    assert calls == [*((i, False) for i in range(4)), (2, True), (3, True), (0, True), (1, True)]


def test_modules_of_a_run_that_return_tuples_and_hand_on_their_parts():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, given, bias=None):
            x = given[0] if isinstance(given, tuple) else given
            bias = self.inner.bias * 2 if bias is None else bias
            return self.inner(x).sin() + bias, bias

    class Model(nn.Module):
        def __init__(self, whole):
            super().__init__()
            self.blocks, self.whole = nn.ModuleList(Two() for _ in range(3)), whole

        def forward(self, x):
            bias = None
            for block in self.blocks:
                result = block(x, bias=bias)
                x, bias = result if not self.whole else (result, result[1])
            return (x[0] if self.whole else x).sum() + bias.sum()

    for whole in (False, True):
        model = Model(whole)
        twin = copy.deepcopy(model)
        apply(model, [Segment(("blocks.0", "blocks.1", "blocks.2"))])
        x = torch.randn(3, 4)
        assert trained_alike(model, twin, lambda one, x=x: one(x))
        assert saved_bytes(lambda: model(x)) == x.nbytes  # noqa: B023


def test_old_weight_norm_parametrizations_and_hooks_on_the_modules_of_a_run():
    class Changed:
        calls = 0

        def __call__(self, module, args, result):
            self.calls += 1
            return result * 1.5

    def made():
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return nn.Sequential(
                nn.utils.weight_norm(nn.Linear(4, 4)),
                nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
                nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
                Residual(4),
            )

    model, twin = made(), made()
    hooks = [Changed(), Changed()]
    model[1].register_forward_hook(hooks[0])
    twin[1].register_forward_hook(hooks[1])
    apply(model, [Segment(("0", "1", "2", "3"))])
    x = torch.randn(3, 4)
    assert trained_alike(model, twin, lambda one: one(x).tanh().sum())
    assert hooks[0].calls == hooks[1].calls == 2


@pytest.mark.parametrize("kind", ["t5", "bert", "gpt2", "albert"])
def test_runs_of_models_of_transformers_with_their_hidden_states(kind):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    if kind == "t5":
        config = transformers.T5Config(
            vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=4, num_heads=2, decoder_start_token_id=0
        )
        model = transformers.T5ForConditionalGeneration(config)
        model.encoder.config.use_cache = model.decoder.config.use_cache = False
    elif kind == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=32, **sizes))
    elif kind == "albert":
        model = transformers.AlbertForMaskedLM(transformers.AlbertConfig(vocab_size=32, embedding_size=16, **sizes))
    else:
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=16, n_layer=4, n_head=2, vocab_size=32, n_positions=16)
        )
    model.config.use_cache = False
    model.train()
    twin, ids = copy.deepcopy(model), torch.arange(16).view(2, 8)
    chosen = segments(model, None)
    assert {len(segment.modules) for segment in chosen} == ({1} if kind == "albert" else {2})
    apply(model, chosen)

    def run(one):
        result = one(input_ids=ids, labels=ids, output_hidden_states=True)
        states = result.get("hidden_states") or (*result.encoder_hidden_states, *result.decoder_hidden_states)
        return result.loss + sum(state.square().mean() for state in states)

    assert trained_alike(model, twin, run)


def test_a_result_that_is_only_kept_once_is_refused_instead_of_handed_to_another_call():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.tables = nn.Linear(4, 4, bias=False), []

        def forward(self, x):
            if not self.tables:
                self.tables.append(torch.eye(7) @ torch.ones(7, 4))
            return x + self.inner(x).sin() * self.tables[0][0]

    model = nn.Sequential(Cached())
    apply(model, [Segment("0", "keep-matmul")])
    with pytest.raises(UnsupportedError, match="same order"):
        model(torch.randn(3, 4)).sum().backward()


@pytest.mark.parametrize("policy", ["full", "keep-matmul", "offload"])
def test_forwards_without_a_backward_leave_nothing_behind(policy):
    class Region(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            return x + self.inner(x).sigmoid()

    model = nn.Sequential(Region(), Region())
    apply(model, [Segment("0", policy), Segment("1", policy)])
    outputs = []
    for _ in range(3):
        y = model(torch.randn(4, 8))
        token = Output(y.detach(), 0)
        y.grad_fn.metadata["token"] = token  # lives as long as the node
        outputs.append(weakref.ref(token))
        del y, token
    gc.collect()
    assert [reference() for reference in outputs] == [None] * 3


def test_an_applied_model_is_pickled_after_a_forward():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    apply(model, [Segment("0", "keep-matmul")])
    model(torch.randn(2, 4)).sum().backward()
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again[0].weight, model[0].weight)


def test_what_is_no_segment_is_refused():
    with pytest.raises(PlanError, match="not a segment"):
        apply(Transformer(), "blocks")


def test_a_dense_block_that_is_handed_a_list_keeps_what_nothing_makes_again():
    class Layer(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.inner = nn.Linear(4 * number, 4)

        def forward(self, features):
            return self.inner(torch.cat(features, -1)).sigmoid()

    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer(i + 1) for i in range(4))

        def forward(self, x):
            features = [x]
            for layer in self.layers:
                features.append(layer(features))
            return torch.cat(features, -1).square().sum()

    model = Dense()
    twin = copy.deepcopy(model)
    apply(model, segments(model, 2))
    x = torch.randn(3, 4)
    assert trained_alike(model, twin, lambda one: one(x))


def test_a_weight_that_is_frozen_between_forward_and_backward_gets_the_gradient_it_would_have():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    twin = copy.deepcopy(model)
    apply(model, [Segment("0")])
    x = torch.randn(2, 4, requires_grad=True)
    for one in (model, twin):
        loss = one(x).square().sum()
        one[0][0].weight.requires_grad_(False)
        one[0][2].requires_grad_(False)
        loss.backward()
        assert not one[0][0].weight.requires_grad
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)


def test_generators_of_a_user_s_own_are_drawn_from_again_and_go_on_after_it():
    generator = torch.Generator().manual_seed(1)

    class Noisy(nn.Module):
        def forward(self, x):
            return (x * torch.rand(x.shape, generator=generator)).sin() * torch.empty(3).normal_(generator=generator)

    model = nn.Sequential(Noisy(), Noisy())
    x = torch.randn(3, requires_grad=True)
    results = []
    for chosen in ([], [Segment(("0", "1"))]):
        if chosen:
            apply(model, chosen)
        generator.manual_seed(1)
        for _ in range(3):
            (gradient,) = torch.autograd.grad(model(x).sum(), x)
        results.append((gradient, torch.rand(2, generator=generator)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_batch_norm_in_evaluation_is_repeated_with_the_statistics_it_had():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()))
    twin = copy.deepcopy(model)
    apply(model, [Segment("0")])
    x, other = torch.randn(6, 4), torch.randn(6, 4) * 3 + 1
    for _ in range(3):
        for one in (model, twin):
            one.zero_grad()
            one.eval()
            loss = one(x).square().sum()
            if one is twin:  # torch's own graph refers to the statistics themselves
                loss.backward()
            one.train()
            one(other)
            if one is model:
                loss.backward()
        ours, theirs = gradients(model), gradients(twin)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_buffer_that_is_written_into_between_forward_and_backward_is_refused_by_name():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(2**17, dtype=torch.long))

        def forward(self, x):
            return (x * self.scale).sin()

    model = nn.Sequential(Scaled())
    apply(model, [Segment("0")])
    y = model(torch.randn(2**17, requires_grad=True))
    model[0].scale.mul_(2)
    with pytest.raises(UnsupportedError, match="buffers were changed or exchanged between forward and backward: scale"):
        y.sum().backward()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_forward_that_breaks_off_in_a_run_leaves_the_next_step_as_it_would_be(error, where):
    class Breaking(Residual):
        breaks = False

        def forward(self, x):
            if self.breaks and not is_recomputing():
                raise error
            return super().forward(x)

    model = nn.Sequential(*(Breaking(4) for _ in range(3)))
    twin = copy.deepcopy(model)
    apply(model, [Segment(("0", "1", "2")), Segment("1", "keep-matmul")])
    x = torch.randn(2, 4)
    model[where].breaks = True
    with pytest.raises(error):
        model(x)
    model[where].breaks = False
    assert not is_recomputing()
    assert trained_alike(model, twin, lambda one: one(x).sum())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_repetition_that_breaks_off_leaves_everything_as_it_was(error):
    class Breaking(nn.Module):
        breaks = False

        def __init__(self):
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)

        def forward(self, x):
            x = self.drop(self.norm(x))
            if self.breaks and is_recomputing():
                raise error
            return x.sin()

    model = nn.Sequential(Breaking(), Breaking())
    twin = copy.deepcopy(model)
    apply(model, [Segment(("0", "1"))])
    x = torch.randn(5, 4)
    torch.manual_seed(0)
    loss = model(x).sum()
    expected = torch.rand(2)
    torch.manual_seed(0)
    twin(x)
    model[1].breaks = True
    with pytest.raises(error):
        loss.backward()
    model.zero_grad()
    assert not is_recomputing()
    torch.manual_seed(0)
    F.dropout(F.dropout(torch.ones(5, 4)))
    assert torch.equal(torch.rand(2), expected)
    model[1].breaks = False
    assert trained_alike(model, twin, lambda one: one(x).sum())
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))


def test_two_threads_run_the_same_run_at_the_same_time():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), Waiting(), nn.Tanh()) for _ in range(3)))
    for first in model[1:]:
        first[1].barrier = model[0][1].barrier
    apply(model, [Segment(("0", "1", "2"))])
    xs = [torch.randn(2, 4, requires_grad=True) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda x: torch.autograd.grad(model(x).sum(), x)[0], xs))
    for x, gradient in zip(xs, found, strict=True):
        y = x
        for block in model:
            y = block[2](block[0](y))
        assert torch.equal(gradient, torch.autograd.grad(y.sum(), x)[0])


class Waiting(nn.Module):
    """Lets two threads run the same modules in step."""

    def __init__(self):
        super().__init__()
        self.barrier = threading.Barrier(2, timeout=20)

    def forward(self, x):
        if not is_recomputing():
            self.barrier.wait()
        return x


def test_a_forward_that_catches_every_error_does_not_catch_the_end_of_its_repetition():
    class Catching(nn.Module):
        def forward(self, x):
            y = x.sin()
            try:
                y = y.exp()
            except Exception:
                pass
            return y + 1

    model = nn.Sequential(Catching(), Catching())
    twin = copy.deepcopy(model)
    apply(model, [Segment(("0", "1"))])
    given = [torch.ones(3, requires_grad=True) for _ in range(2)]
    for one, x in zip((model, twin), given, strict=True):
        one(x).sum().backward()
    assert torch.equal(given[0].grad, given[1].grad)


def test_a_pass_that_ends_early_keeps_nothing_alive_behind_its_backward():
    model = nn.Sequential(Residual(4), Residual(4))
    apply(model, [Segment(("0", "1"))])
    x = torch.randn(2, 4, requires_grad=True)
    reference = weakref.ref(x)
    gc.disable()
    try:
        model[0](x).sum().backward()
        del x
        assert reference() is None
    finally:
        gc.enable()


def test_saved_tensors_that_are_looked_at_from_outside_are_made_again():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    apply(model, [Segment("0")])
    y = model(torch.randn(2, 4))
    assert torch.equal(y.grad_fn._saved_result, y)
    assert torch.equal(y.grad_fn._saved_result, y)
    y.sum().backward()


def test_offload_on_the_host_says_that_nothing_is_moved():
    model = LinearStack()
    apply(model, [Segment(("layers.0", "layers.1"), "offload")])
    with pytest.warns(UserWarning, match="nothing is moved") as caught:
        model(torch.randn(2, 6))
    assert len(caught) == 1
    model(torch.randn(2, 6))


@settings(deadline=None, max_examples=40, derandomize=True)
@given(data=st.data())
def test_random_models_with_random_segments_are_exact(data):
    kinds = data.draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=2, max_size=5))
    wide = data.draw(st.sampled_from([torch.float32, torch.float64]))
    torch.manual_seed(data.draw(st.integers(0, 9)))
    model = nn.Sequential(*(KINDS[kind]() for kind in kinds)).to(wide)
    if data.draw(st.booleans()) and isinstance(model[0], Residual) and isinstance(model[-1], Residual):
        model[-1].inner = model[0].inner
    twin = copy.deepcopy(model)
    cut = data.draw(st.integers(1, len(kinds)))
    policy = st.sampled_from(["full", "keep-matmul", "keep-attention-last", "keep-last", "keep:addmm,native_dropout"])
    chosen = [Segment(tuple(map(str, range(cut))), data.draw(policy))]
    if cut > 1 and data.draw(st.booleans()):
        chosen.append(Segment(tuple(map(str, range(cut // 2))), data.draw(policy)))
    if cut < len(kinds):
        chosen.append(Segment(str(len(kinds) - 1), data.draw(policy)))
    apply(model, chosen)
    x = torch.randn(4, 6, dtype=wide)
    autocast = data.draw(st.booleans()) and wide == torch.float32
    how = data.draw(st.sampled_from(["once", "twice", "penalty"]))

    def run(one):
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = one(given).square().mean()
        if how == "twice":
            loss.backward(retain_graph=True)
        if how == "penalty":
            return loss + torch.autograd.grad(loss, given, create_graph=True)[0].square().sum()
        return loss

    assert trained_alike(model, twin, run)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))


KINDS = {
    "residual": lambda: Residual(6),
    "norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True)),
    "layer norm": lambda: nn.LayerNorm(6),
    "dropout": lambda: nn.Dropout(0.4),
    "linear": lambda: nn.Linear(6, 6),
    "gelu": lambda: nn.GELU(),
}
