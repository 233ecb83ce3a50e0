"""What a recomputed segment finds again in its repetition: gradients are plain training's, bit for bit on the CPU."""

import functools
import gc
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from snugfit import Segment, UnsupportedError, is_recomputing
from snugfit.training import random_sources
from snugfit.training.buffers import copies
from snugfit.training.checkpointing import apply
from snugfit.training.torch_private import DispatchMode

POLICIES = ("full", "keep-matmul", "keep-last")


def square(model, x):
    model(x).square().sum().backward()


class Names(DispatchMode):
    """The operations that run."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def state_of(make, chosen, step, steps):
    torch.manual_seed(0)
    model = make()
    handle = apply(model, chosen) if chosen else None
    gradients = []
    for number in range(steps):
        torch.manual_seed(number + 1)
        step(model, torch.randn(8, 8))
        gradients.append({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})
    if handle:
        handle.remove()
    return gradients, {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_exact(make, chosen, step=square, steps=3):
    """The same gradients in each of some steps, and the same buffers behind them, as without segments."""
    plain, plain_buffers = state_of(make, None, step, steps)
    found, buffers = state_of(make, chosen, step, steps)
    for one, other in zip(plain, found, strict=True):
        assert one
        assert one.keys() == other.keys()
        differing = [name for name in one if not torch.equal(one[name], other[name])]
        assert not differing
    assert all(torch.equal(plain_buffers[name].to_dense(), buffers[name].to_dense()) for name in plain_buffers)
    assert plain_buffers.keys() == buffers.keys()


# --- kept results that somebody writes into ---


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "activation",
    [
        lambda: nn.LeakyReLU(0.2, inplace=True),
        lambda: nn.SiLU(inplace=True),
        lambda: nn.Dropout(0.3, inplace=True),
    ],
    ids=["LeakyReLU", "SiLU", "Dropout"],
)
def test_a_later_module_of_a_run_writes_into_what_an_earlier_one_keeps(activation, policy):
    def make():
        return nn.Sequential(nn.Linear(8, 8), activation(), nn.Linear(8, 8), activation(), nn.Linear(8, 8))

    assert_exact(make, [Segment(("0", "1", "2", "3", "4"), policy)])


def test_a_product_that_a_later_module_of_its_run_writes_over_is_still_not_run_again():
    model = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2, inplace=True), nn.Linear(8, 8), nn.Tanh())
    apply(model, [Segment(("0", "1", "2", "3"), "keep-matmul")])
    for _ in range(2):
        square(model, torch.randn(4, 8))
    loss = model(torch.randn(4, 8)).sum()
    with Names() as names:
        loss.backward()
    assert "addmm" not in names.seen
    assert "leaky_relu_" in names.seen


class Router(nn.Module):
    """The best three of eight and their weights; the caller scales the former."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 8)

    def forward(self, x):
        values, experts = self.gate(x).topk(3)
        return values, experts, torch.softmax(values * 3, -1)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = Router()

    def forward(self, x):
        values, _, weights = self.router(x)
        values.mul_(2)
        return values * weights


@pytest.mark.parametrize("policy", POLICIES)
def test_a_caller_writes_into_a_routing_result_that_was_kept(policy):
    assert_exact(Scaled, [Segment("router", policy)])


def test_a_decision_that_falls_otherwise_when_its_values_were_written_into_is_refused():
    model = Scaled()
    apply(model, [Segment("router")])
    loss = model(torch.randn(4, 8)).square().sum()
    model.router.gate.weight.data.neg_()  # stands for a near tie: an input that is not bit for bit what it was
    with pytest.raises(UnsupportedError, match="fell the other way") as refused:
        loss.backward()
    assert refused.value.op == "topk"


class Used(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.first(x)
        return h, self.second((h + 1).tanh())


class WrittenOver(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Used()

    def forward(self, x):
        h, y = self.block(x)
        h.view(-1).mul_(2)
        return h * y


@pytest.mark.parametrize("policy", POLICIES)
def test_a_caller_writes_into_a_product_that_was_kept(policy):
    assert_exact(WrittenOver, [Segment("block", policy)])


def test_a_kept_product_is_handed_out_right_after_a_repetition_wrote_into_it():
    def step(model, x):
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    make = lambda: nn.Sequential(nn.Linear(8, 8), nn.SiLU(inplace=True), nn.Linear(8, 8), nn.Tanh())  # noqa: E731
    assert_exact(make, [Segment(("0", "1", "2", "3"), "keep-matmul")], step)


# --- buffers and attributes ---


class Moving(nn.Module):
    """A buffer that its forward reads and then doubles without counting."""

    def __init__(self, shape, dtype):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("moving", torch.ones(shape, dtype=dtype))

    def forward(self, x):
        y = self.linear(x) * self.moving.flatten()[:8].clone()
        self.moving.data.mul_(2)
        return y.tanh()


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((8,), torch.float32), ((8,), torch.int64), ((2**13, 9), torch.float32), ((2**13, 9), torch.int32)],
    ids=str,
)
def test_a_buffer_that_is_written_through_data_moves_once_and_is_seen_as_it_was(shape, dtype, is_training):
    def step(model, x):
        (model(x).sum() * model(x + 1).sum()).backward()

    assert_exact(lambda: nn.Sequential(Moving(shape, dtype)).train(is_training), [Segment("0")], step)


def test_a_sparse_buffer_is_put_back():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("graph", torch.eye(8).to_sparse())

        def forward(self, x):
            y = self.linear(x) @ self.graph.to_dense()
            self.graph.mul_(2)
            return y.tanh()

    assert_exact(lambda: nn.Sequential(Sparse()), [Segment("0")])


def test_a_large_buffer_that_stays_is_neither_copied_nor_compared_after_the_first_forwards(monkeypatch):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("mask", torch.ones(2**17))
            self.register_buffer("row", self.mask[8:16])  # a small one that overlaps it

        def forward(self, x):
            return self.linear(x) * self.mask[:8]

    model = nn.Sequential(Masked())
    apply(model, [Segment("0")])
    compared = []
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda *pair: compared.append(pair) or equal(*pair))
    for number in range(4):
        with Names() as names:
            model(torch.randn(8, 8)).sum().backward()
        assert ("clone" in names.seen) == (number < 2)
    assert len(compared) == 4


class Counted(nn.Module):
    """A large buffer that changes from the third forward on."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0
        self.register_buffer("scale", torch.ones(2**17))

    def forward(self, x):
        self.calls += not is_recomputing()
        y = self.linear(x) * self.scale[:8].clone()
        if self.calls > 3:
            self.scale.mul_(2)
        return y.tanh()


def test_a_large_buffer_that_begins_to_change_is_refused_once_and_exact_from_then_on():
    torch.manual_seed(0)
    model, plain = nn.Sequential(Counted()), nn.Sequential(Counted())
    plain.load_state_dict(model.state_dict())
    apply(model, [Segment("0")])
    x = torch.randn(8, 8)
    for _ in range(3):
        square(model, x)
        square(plain, x)
    with pytest.raises(UnsupportedError, match=r"buffers were changed or exchanged.*scale"):
        square(model, x)
    square(plain, x)
    for one in (model, plain):
        one.zero_grad()
        square(one, x)
    assert torch.equal(model[0].linear.weight.grad, plain[0].linear.weight.grad)
    assert torch.equal(model[0].scale, plain[0].scale)


class Adds(nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("number", buffer)

    def forward(self, x):
        with torch.no_grad():
            self.number.add_(1)
        return self.linear(x)


class Reads(Adds):
    def forward(self, x):
        return (self.linear(x) * self.number.clone()).tanh()


def one_object():
    number = torch.ones(())
    return number, number


def a_view():
    table = torch.ones(3, 5)
    return table, table[1, 2]


def of_another_type():
    table = torch.ones(4)
    return table, torch.view_as_complex(table.view(2, 2)).real[1]


@pytest.mark.parametrize("shared", [one_object, a_view, of_another_type])
@pytest.mark.parametrize("chosen", [Segment("0"), Segment(("0.0", "0.1"))], ids=["block", "run"])
def test_buffers_that_share_memory_share_it_in_a_repetition(shared, chosen):
    def make():
        written, read = shared()
        return nn.Sequential(nn.Sequential(Adds(written), Reads(read)))

    assert_exact(make, [chosen])


def test_large_buffers_that_share_memory_share_it_in_a_repetition():
    def make():
        table = torch.ones(2**17)
        return nn.Sequential(nn.Sequential(Adds(table), Reads(table[:8])))

    assert_exact(make, [Segment("0")])


def test_buffers_side_by_side_in_one_large_memory_are_copied_by_themselves():
    memory = torch.zeros(2**20)
    parts = [memory[:4], memory[-4:], memory[-2:]]
    first, second, third = copies(parts, [True, True, False])
    assert first.memory.nbytes == 16
    assert second.memory is third.memory
    assert second.memory.nbytes == 16
    second.value.fill_(1)
    assert third.value.tolist() == [1, 1]
    assert [one is None for one in copies(parts, [False, False, True])] == [True, False, False]


def resized(module):
    if module.held.numel() == 0:
        module.held.resize_(8).fill_(2.0)


def replaced(module):
    if module.held.numel() == 0:
        module.held = torch.full((8,), 2.0)


def made(module):
    if module.held is None:
        module.held = torch.full((8,), 2.0)


class Grows(nn.Module):
    """What is made in its first forward, as observers do; the product is saved in that forward alone."""

    def __init__(self, grow, value, is_buffer):
        super().__init__()
        self.linear, self.grow = nn.Linear(8, 8), grow
        if is_buffer:
            self.register_buffer("held", value)
        else:
            self.held = value

    def forward(self, x):
        y = self.linear(x)
        is_new = self.held is None or self.held.numel() == 0
        self.grow(self)
        return (y.sin() if is_new else y) * self.held


@pytest.mark.parametrize("is_buffer", [True, False], ids=["buffer", "attribute"])
@pytest.mark.parametrize("grow", [resized, replaced, made])
def test_what_is_resized_or_made_in_a_forward_is_so_again_in_its_repetition(grow, is_buffer):
    def make():
        return nn.Sequential(Grows(grow, None if grow is made else torch.empty(0), is_buffer))

    assert_exact(make, [Segment("0")])


def critic():
    norm = nn.utils.spectral_norm
    return nn.Sequential(norm(nn.Linear(8, 8)), nn.Tanh(), norm(nn.Linear(8, 8)))


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chosen", [("0", "2"), (("0", "1", "2"),)], ids=["each", "run"])
def test_a_weight_that_its_module_exchanges_between_two_calls_is_put_back(chosen, policy):
    def step(model, x):
        (model(x).square().sum() - model(x * 2).tanh().sum()).backward()

    assert_exact(critic, [Segment(names, policy) for names in chosen], step)


class Generated(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return (x @ self.weight + self.bias).tanh()


class Hypernetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.makes, self.layer = nn.Linear(2, 64), Generated()

    def forward(self, x):
        for number in (1.0, 2.0):
            self.layer.weight = self.makes(torch.full((2,), number)).view(8, 8)
            x = self.layer(x)
        return x


def test_a_weight_that_another_network_sets_is_put_back():
    assert_exact(Hypernetwork, [Segment("layer")])


class Recurrent(nn.Module):
    """The state of the last call goes into the next one, in an attribute."""

    def __init__(self, first):
        super().__init__()
        self.linear, self.state = nn.Linear(8, 8), first

    def forward(self, x):
        y = (self.linear(x) * self.state).tanh() + 1
        self.state = y.detach()
        return y


@pytest.mark.parametrize("first", [1.5, torch.ones(8)], ids=["a number", "a tensor"])
def test_a_state_that_a_module_keeps_in_an_attribute_is_as_it_was_and_moves_once(first):
    def step(model, x):
        (model(x).sum() * model(x + 1).sum()).backward()
        states.append(model[0].state)

    states = []
    assert_exact(lambda: nn.Sequential(Recurrent(first)), [Segment("0")], step)
    assert all(torch.equal(one, other) for one, other in zip(states[:3], states[3:], strict=True))


def test_a_result_that_is_kept_in_an_attribute_holds_no_earlier_forward():
    class Remembers(nn.Module):
        def forward(self, x):
            self.last = x.sin().sin()
            return self.last

    model = nn.Sequential(Remembers())
    apply(model, [Segment("0")])
    inputs = []
    for _ in range(3):
        x = torch.randn(4, requires_grad=True)
        inputs.append(weakref.ref(x))
        model(x)
    del x
    gc.collect()
    assert [one() is None for one in inputs] == [True, True, False]


# --- generators ---


class Sampled(nn.Module):
    """Experts that a generator of its own samples, and noise of the same generator behind them."""

    def __init__(self):
        super().__init__()
        self.gate, self.generator = nn.Linear(8, 8), torch.Generator().manual_seed(3)

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        experts = torch.multinomial(scores, 3, generator=self.generator)
        return scores.gather(-1, experts) * torch.rand(8, 3, generator=self.generator)


def test_noise_behind_a_kept_sample_of_the_same_generator_is_drawn_as_it_was():
    assert_exact(lambda: nn.Sequential(Sampled()), [Segment("0")])


hidden = torch.Generator()


class Noisy(nn.Module):
    """Noise in training alone, of a generator that is its own, given, or somewhere else."""

    def __init__(self, generator=None):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        if generator is not None:
            self.generator = generator

    def forward(self, x):
        y = self.linear(x)
        return y * torch.rand(y.shape, generator=self.of()) if self.training else y

    def of(self):
        return self.generator


class Late(Noisy):
    """Noise from the third forward on, with nothing else to tell."""

    calls = 0

    def forward(self, x):
        self.calls += not is_recomputing()
        y = self.linear(x)
        return y * torch.rand(y.shape, generator=self.of()) if self.calls > 2 else y


class Found:
    """Nobody looks for a generator in the attributes of a class."""

    generator = hidden


class NoisyByHidden(Noisy):
    def of(self):
        return Found.generator


class NoisyByName(Noisy):
    def of(self):
        return hidden


class LateByName(NoisyByName, Late):
    pass


class LateByClass(Late):
    generator = hidden


def first_without_noise(model, x):
    model.eval()
    square(model, x)
    model.zero_grad()
    model.train()
    square(model, x)


@pytest.mark.parametrize(
    "make",
    [lambda: Noisy(torch.Generator().manual_seed(3)), NoisyByHidden, NoisyByName],
    ids=["own", "hidden", "named"],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_generator_that_is_first_drawn_from_in_a_later_forward_is_drawn_from_again(make, policy):
    def fresh():
        hidden.manual_seed(3)
        return nn.Sequential(make())

    assert_exact(fresh, [Segment("0", policy)], first_without_noise)


@pytest.mark.parametrize("make", [lambda: Late(torch.Generator().manual_seed(3)), LateByName, LateByClass])
def test_a_generator_that_is_found_by_looking_is_drawn_from_again_whenever_it_is_first_used(make):
    def fresh():
        hidden.manual_seed(3)
        return nn.Sequential(make())

    assert_exact(fresh, [Segment("0")], steps=4)


class Source:
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __call__(self):
        return self.rng.random()


def uniform(rng):
    return lambda: rng.random()


SOURCES = {
    "numpy's generator": lambda: np.random.default_rng(0).random,
    "numpy's old generator": lambda: np.random.RandomState(0).rand,
    "another bit generator": lambda: np.random.Generator(np.random.Philox(1)).random,
    "Python's": lambda: random.Random(0).random,
    "a partial": lambda: functools.partial(random.Random(0).uniform, 0, 1),
    "an object": Source,
    "a closure": lambda: uniform(random.Random(0)),
}


class Drawing(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.linear, self.draws = nn.Linear(8, 8), {"one": [draw]}

    def forward(self, x):
        return (self.linear(x) * self.draws["one"][0]()).tanh()


@pytest.mark.parametrize("source", SOURCES)
def test_generators_of_numpy_and_python_that_a_module_holds_are_drawn_from_again(source):
    assert_exact(lambda: nn.Sequential(Drawing(SOURCES[source]())), [Segment("0")])


def test_a_generator_is_found_once_whatever_way_leads_to_it():
    rng = random.Random(0)
    inner = [rng]
    found = random_sources.Found()
    found.look([[[inner]]])
    assert found.sources == []  # too deep for a search before every forward
    found.look({"a": inner, "b": rng, "c": rng.random})
    assert found.sources == [rng]


def test_a_generator_that_a_forward_is_given_is_drawn_from_again():
    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, rng):
            return (self.linear(x) * rng.random()).tanh()

    class Gives(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.rng = Given(), np.random.default_rng(0)

        def forward(self, x):
            return self.block(x, self.rng)

    assert_exact(Gives, [Segment("block")])


# --- routing ---


class Switched(nn.Module):
    """Routing that begins when a flag is set."""

    def __init__(self):
        super().__init__()
        self.gate, self.is_sparse = nn.Linear(8, 8), False

    def forward(self, x):
        scores = self.gate(x)
        return scores.topk(2)[0].exp() if self.is_sparse else scores


def test_routing_that_begins_in_a_later_forward_is_kept():
    model = nn.Sequential(Switched())
    apply(model, [Segment("0")])
    square(model, torch.randn(4, 8))
    model[0].is_sparse = True
    loss = model(torch.randn(4, 8)).sum()
    with Names() as names:
        loss.backward()
    assert "addmm" in names.seen
    assert "topk" not in names.seen


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_a_scripted_module_inside_of_a_segment_is_repeated():
    def make():
        return nn.Sequential(nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Sequential(nn.BatchNorm1d(8)))))

    assert_exact(make, [Segment("0")])
