"""What modules of segments are called with and under: arguments of every kind, settings, caches, copies of modules."""

import collections
import copy
import dataclasses
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize

from models import gradients
from snugfit import PlanError, Segment, UnsupportedError, checkpointing

pytestmark = pytest.mark.filterwarnings("ignore:segments are offloaded to the host:UserWarning")
POLICIES = ("full", "keep-matmul", "keep-last", "offload")


class Inner(nn.Module):
    """A module of a segment that computes what a function says, with a linear layer."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, *given):
        return self.function(self.linear, *given)


class Outer(nn.Module):
    """Calls a segment with what a function makes of its input."""

    def __init__(self, inner, arguments):
        super().__init__()
        self.inner, self.arguments = inner, arguments

    def forward(self, x):
        return self.inner(*self.arguments(x))


def squares(model, x):
    return model(x).square().sum()


def same_as_plain(make, policy="full", step=lambda model, x: squares(model, x).backward(), name="inner"):
    """Train a model plainly and with one segment: gradients and buffers, bit for bit."""
    found = []
    for segments in ([], [Segment(name, policy)]):
        torch.manual_seed(0)
        model, x = make(), torch.randn(8, 8)
        if segments:
            checkpointing.apply(model, segments)
        torch.manual_seed(1)
        step(model, x)
        found.append({**gradients(model), **dict(model.named_buffers())})
    assert found[0].keys() == found[1].keys()
    return all(torch.equal(found[0][key], found[1][key]) for key in found[0])


class Slotted(collections.abc.MutableMapping):
    __slots__ = ("items_of",)

    def __init__(self, **items):
        self.items_of = items

    def __getitem__(self, key):
        return self.items_of[key]

    def __setitem__(self, key, value):
        self.items_of[key] = value

    def __delitem__(self, key):
        del self.items_of[key]

    def __iter__(self):
        return iter(self.items_of)

    def __len__(self):
        return len(self.items_of)


class OwnMapping(Slotted):
    pass


def writes_into(linear, x, given):
    given["h"] = (given["h"] * linear(x)).tanh()
    return given["h"] * x


@pytest.mark.parametrize("kind", [dict, collections.UserDict, collections.OrderedDict, OwnMapping, Slotted])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_mapping_that_a_segment_writes_into_is_given_to_it_as_it_was(kind, policy):
    assert same_as_plain(lambda: Outer(Inner(writes_into), lambda x: (x, kind(h=x))), policy)


def test_other_containers_that_a_segment_writes_into_are_given_to_it_as_they_were():
    def appends(linear, x, given):
        given.append((given[-1] * linear(x)).tanh())
        return given[-1] * x

    def sets(linear, x, given):
        given.h = (given.h * linear(x)).tanh()
        return given.h * x

    def counts(linear, x, given):
        given += 1
        return linear(x) * torch.from_numpy(given.copy())

    for function, arguments in (
        (counts, lambda x: (x, np.ones(8, np.float32))),
        (appends, lambda x: (x, collections.UserList([x]))),
        (appends, lambda x: (x, collections.deque([x]))),
        (sets, lambda x: (x, types.SimpleNamespace(h=x))),
    ):
        assert same_as_plain(lambda f=function, a=arguments: Outer(Inner(f), a))


def test_a_batch_of_a_tokenizer_that_a_segment_writes_into_is_given_to_it_as_it_was():
    assert same_as_plain(lambda: Outer(Inner(writes_into), lambda x: (x, transformers.BatchEncoding({"h": x}))))


def test_one_list_that_is_two_arguments_is_one_in_the_repetition():
    def forward(linear, x, first, second):
        first.append(linear(x).tanh())
        return (second[-1] * x).sin()

    def arguments(x):
        both = [x.cos()]
        return x, both, both

    assert same_as_plain(lambda: Outer(Inner(forward), arguments))


@dataclasses.dataclass
class Context:
    x: torch.Tensor
    own: object = None


class Two(tuple):
    def __new__(cls, a, b):
        return super().__new__(cls, (a, b))


def test_arguments_that_contain_themselves_and_tuples_with_a_constructor_of_their_own():
    def cyclic(x):
        context = Context(x.cos())
        context.own = [context]
        return x, context

    by_context = lambda linear, x, context: linear(x) * context.own[0].x  # noqa: E731
    for policy in POLICIES:
        assert same_as_plain(lambda: Outer(Inner(by_context), cyclic), policy)
        by_two = lambda linear, x, two: linear(x) * two[1]  # noqa: E731
        assert same_as_plain(lambda f=by_two: Outer(Inner(f), lambda x: (x, Two(x, x.sin()))), policy)


def test_what_topk_returns_may_be_an_argument():
    scaled = lambda linear, x, top: linear(x) * top.values  # noqa: E731
    assert same_as_plain(lambda: Outer(Inner(scaled), lambda x: (x, x.topk(8))))


@pytest.mark.parametrize("make", [iter, reversed, enumerate, lambda items: (item for item in items)])
def test_an_iterator_is_refused_by_name_since_it_can_be_read_once(make):
    def adds(linear, x, given):
        return sum((linear(x) for _ in given), x)

    model = Outer(Inner(adds), lambda x: (x, make([x, x])))
    checkpointing.apply(model, [Segment("inner")])
    with pytest.raises(UnsupportedError, match="used up") as caught:
        model(torch.randn(8, 8))
    assert "pass a list" in caught.value.hint
    assert same_as_plain(lambda: Outer(Inner(adds), lambda x: (x, make([x, x]))), "offload")


def test_a_container_that_cannot_be_copied_is_refused_by_name():
    class Single(OwnMapping):
        def __copy__(self):
            raise TypeError("there is one only")

    model = Outer(Inner(writes_into), lambda x: (x, Single(h=x)))
    checkpointing.apply(model, [Segment("inner")])
    with pytest.raises(UnsupportedError, match=r"cannot be copied[\s\S]*Single: there is one only"):
        model(torch.randn(8, 8))


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_an_input_whose_requires_grad_is_turned_behind_the_forward_is_repeated_as_it_was(policy, trains):
    def step(model, x):
        x.requires_grad_(trains)
        loss = squares(model, x)
        x.requires_grad_(not trains)
        loss.backward()
        model.register_buffer("of_input", x.grad)

    make = lambda: nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))  # noqa: E731
    assert same_as_plain(make, policy, step, "0")


def test_tensors_of_inference_mode_go_in_and_come_out_as_plainly():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift, self.linear = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)

        def forward(self, x):
            with torch.inference_mode():
                norm = x.detach().norm()
            return self.linear(x + self.shift).tanh(), norm

    def step(model, x):
        with torch.inference_mode():
            x = x + 1
        model(x)[0].square().sum().backward()

    for policy in POLICIES:
        assert same_as_plain(lambda: nn.Sequential(Shifted()), policy, step, "0")


def language_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=100, num_hidden_layers=2, **sizes))


@pytest.mark.filterwarnings("ignore:config.use_cache:UserWarning")
def test_a_cache_of_the_caller_s_grows_once():
    found = []
    ids = torch.arange(24).reshape(2, 12)
    for is_recomputed in (False, True):
        model = language_model()
        if is_recomputed:
            checkpointing.apply(model, checkpointing.blocks(model))
        cache = transformers.DynamicCache(config=model.config)
        model(input_ids=ids, labels=ids, past_key_values=cache, use_cache=True).loss.backward()
        assert cache.get_seq_length() == 12
        with torch.no_grad():
            later = model(input_ids=ids[:, :3], past_key_values=cache, use_cache=True).logits
        found.append([later, *gradients(model).values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.filterwarnings("ignore:config.use_cache:UserWarning")
def test_a_cache_that_is_written_in_place_is_refused_by_name():
    model, ids = language_model(), torch.arange(24).reshape(2, 12)
    checkpointing.apply(model, checkpointing.blocks(model))
    cache = transformers.StaticCache(config=model.config, max_cache_len=12)
    loss = model(input_ids=ids, labels=ids, past_key_values=cache, use_cache=True).loss
    with pytest.raises(UnsupportedError, match="written into") as caught:
        loss.backward()
    assert "DynamicCache" in caught.value.hint


@pytest.mark.parametrize("policy", POLICIES)
def test_a_child_of_torchscript_inside_of_a_segment(policy):
    def make():
        scripted = torch.jit.script(nn.Sequential(nn.BatchNorm1d(8), nn.ReLU()))
        return nn.Sequential(nn.Sequential(nn.Linear(8, 8), scripted), nn.Linear(8, 8))

    assert same_as_plain(make, policy, name="0")


def test_torch_func_inside_of_a_segment_is_refused_by_name_and_leaves_no_trace():
    def forward(linear, x):
        return linear(x) + torch.func.grad(lambda y: linear(y).square().sum())(x)

    for policy in POLICIES:
        model = Outer(Inner(forward), lambda x: (x,))
        handle = checkpointing.apply(model, [Segment("inner", policy)])
        with pytest.raises(UnsupportedError, match=r"torch\.func\.grad.* inside of inner"):
            model(torch.randn(8, 8))
        handle.remove()
        squares(model, torch.randn(8, 8)).backward()
    mapped = lambda linear, x: torch.vmap(linear)(x).tanh()  # noqa: E731
    assert same_as_plain(lambda: Outer(Inner(mapped), lambda x: (x,)))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_forward_of_lazy_modules_is_plain_and_says_so_and_later_ones_are_not(policy):
    def make():
        return nn.Sequential(nn.Sequential(nn.LazyLinear(8), nn.Dropout(0.5), nn.LazyLinear(8)))

    def two_steps(model, x):
        for _ in range(2):
            squares(model, x).backward()

    with pytest.warns(UserWarning, match="lazy modules make their weights"):
        assert same_as_plain(make, policy, two_steps, "0")


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_rows_of_an_embedding_that_its_forward_shortens_are_shortened_once(kind):
    class Short(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.linear = kind(9, 8, max_norm=1.0), nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(self.embedding((x[:, :4] > 0).long())).tanh()

    def step(model, x):
        squares(model, x).backward()
        model.register_buffer("weight", model[0].embedding.weight.detach().clone())
        assert model[0].embedding.max_norm == 1.0

    assert same_as_plain(lambda: nn.Sequential(Short()), step=step, name="0")


def test_a_forward_that_writes_into_its_own_weights_is_refused_as_that():
    def forward(linear, x):
        with torch.no_grad():
            linear.weight.mul_(0.5)
        return linear(x).tanh()

    model = Outer(Inner(forward), lambda x: (x,))
    checkpointing.apply(model, [Segment("inner")])
    loss = squares(model, torch.randn(8, 8))
    with pytest.raises(UnsupportedError, match="its own forward made, exchanged or wrote into") as caught:
        loss.backward()
    assert "no_grad" in caught.value.hint


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_backward_inside", [False, True])
def test_weights_that_parametrize_caches_are_found_computed_again(policy, is_backward_inside):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = parametrizations.weight_norm(nn.Linear(8, 8))

        def forward(self, x):
            with parametrize.cached():
                y = self.inner(self.inner(x).tanh())
                if is_backward_inside:
                    y.square().sum().backward()
                return y

    def step(model, x):
        y = model(x)
        if not is_backward_inside:
            y.square().sum().backward()

    assert same_as_plain(Twice, policy, step)


@pytest.mark.parametrize("policy", POLICIES)
def test_settings_of_torch_that_hold_in_the_forward_alone_hold_in_its_repetition(policy):
    def attention(linear, x):
        x = linear(x).view(1, 2, 8, 4)
        return F.scaled_dot_product_attention(x, x, x) * torch.rand(4).float()

    def step(model, x):
        torch.set_default_dtype(torch.float64)
        try:
            with sdpa_kernel(SDPBackend.MATH):
                loss = squares(model, x)
        finally:
            torch.set_default_dtype(torch.float32)
        loss.backward()
        assert torch.get_default_dtype() == torch.float32
        assert torch.backends.cuda.flash_sdp_enabled()

    assert same_as_plain(lambda: Outer(Inner(attention), lambda x: (x,)), policy, step)


def test_modules_of_a_run_that_are_called_alone_behind_a_backward_are_not_joined_to_it():
    found = []
    for segments in ([], [Segment(("0", "1"))]):
        torch.manual_seed(0)
        model, x = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))), torch.randn(8, 8)
        if segments:
            checkpointing.apply(model, segments)
        first = model[0](x)
        first.square().sum().backward(retain_graph=True)
        with torch.no_grad():
            model[0][0].weight.mul_(0.5)
        model[1](x).square().sum().backward()
        found.append(gradients(model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("make", [copy.copy, lambda module: module._replicate_for_data_parallel()])
def test_a_shallow_copy_of_a_module_of_a_segment_is_refused_and_its_original_is_not(make):
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(8, 8)
    handle = checkpointing.apply(model, [Segment("0")])
    twin = make(model[0])
    with pytest.raises(UnsupportedError, match="weights of the original"):
        twin(x)
    model(x).sum().backward()
    handle.remove()
    assert "forward" not in make(model[0]).__dict__
    assert not make(model[0])._forward_pre_hooks


def test_a_model_inside_of_data_parallel_is_refused_by_name_where_that_makes_copies():
    inner = nn.Sequential(nn.Linear(8, 8))
    model = nn.DataParallel(inner)
    handle = checkpointing.apply(model, [Segment("0")])  # without devices it calls the model itself
    model(torch.randn(8, 8)).sum().backward()
    handle.remove()
    model.device_ids = [0, 1]
    for around in (model, nn.Sequential(model)):
        with pytest.raises(UnsupportedError, match="DataParallel over 2 devices"):
            checkpointing.apply(around, [Segment("0")])
    assert "forward" not in inner[0].__dict__


def test_a_deep_copy_of_an_applied_model_refuses_shallow_copies_of_its_own():
    model = nn.Sequential(nn.Linear(8, 8))
    checkpointing.apply(model, [Segment("0")])
    twin, x = copy.deepcopy(model), torch.randn(8, 8)
    twin(x).sum().backward()
    with pytest.raises(UnsupportedError, match="weights of the original"):
        copy.copy(twin[0])(x)


NO_MODELS = (None, "model", 3, [1], torch.ones(3), nn.Linear)


@pytest.mark.parametrize(
    "use",
    [
        checkpointing.blocks,
        lambda model: checkpointing.every(model, 2),
        checkpointing.segments,
        lambda model: checkpointing.match(model, "*"),
        lambda model: checkpointing.apply(model, [Segment("0")]),
    ],
)
def test_what_is_no_model_is_refused(use):
    for model in NO_MODELS:
        with pytest.raises(PlanError, match="no model to look through"):
            use(model)


@pytest.mark.parametrize("given", [None, 3, Segment("0")])
def test_what_is_no_list_of_segments_is_refused_and_nothing_is_applied(given):
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(PlanError, match="passed as a list"):
        checkpointing.apply(model, given)
    assert "forward" not in model[0].__dict__


def test_true_is_no_number_of_segments_and_a_predicate_takes_a_name_and_a_module():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for name, function in (("k", checkpointing.every), ("n", checkpointing.segments)):
        with pytest.raises(PlanError, match=f"{name}=True"):
            function(model, True)
    with pytest.raises(PlanError, match="cannot be matched"):
        checkpointing.match(model, lambda name: True)
    assert len(checkpointing.match(model, lambda name, module: name == "1")) == 1
