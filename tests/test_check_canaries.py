"""Canaries: what is private in torch and that a check uses still does what it is used for."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from snugfit.training import torch_private


def test_random_operations_are_seen_by_their_names_and_give_constants():
    x = torch.ones(3, 4, requires_grad=True)
    with torch_private.Steady() as steady:
        dropped = F.dropout(x, 0.5)
        values = [
            torch.rand(4),
            torch.rand_like(x),
            torch.randn(4),
            torch.randn_like(x),
            torch.empty(4).uniform_(2, 4),
            torch.empty(4).normal_(1, 2),
            torch.normal(torch.ones(4), 2.0),
            torch.empty(4).exponential_(),
            torch.randint(0, 10, (4,)),
            torch.randint(4, (4,)),
            torch.bernoulli(torch.full((4,), 0.1)),
        ]
        order = torch.randperm(5)
    assert dropped.eq(2).all()
    expected = [0.5, 0.5, 0.5, 0.5, 3.0, 2.0, 2.0, 1.0, 4, 1, 1]
    assert [float(value.flatten()[0]) for value in values] == expected
    assert all((value == value.flatten()[0]).all() for value in values)
    assert order.tolist() == [0, 1, 2, 3, 4]
    assert {"bernoulli", "rand", "randn", "randint", "randperm", "normal", "uniform", "exponential"} <= steady.seen


def test_attention_drops_nothing_under_constants_in_forward_and_backward():
    query = torch.randn(1, 2, 3, 4, requires_grad=True)
    gradients = []
    for p in (0.0, 0.5):
        query.grad = None
        with torch_private.Steady():
            # what is kept is scaled, as dropout does
            F.scaled_dot_product_attention(query, query, query, dropout_p=p).square().mean().backward()
        gradients.append(query.grad * (1 - p) ** 2)
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_checkpoint_calls_are_seen_and_made_plain(reentrant, plain):
    calls, runs = [], []

    def around(call):
        calls.append((call.preserves_random_state, [type(value) for value in call.arguments]))
        return lambda: calls.append("after")

    def function(x):
        runs.append(1)
        return x.square()

    x = torch.ones(2, requires_grad=True)
    with torch_private.checkpoint_calls(around, plain=plain):
        checkpoint(function, x, use_reentrant=reentrant, preserve_rng_state=False).sum().backward()
    assert calls == [(False, [torch.Tensor]), "after"]
    assert len(runs) == (1 if plain else 2)
    assert x.grad.tolist() == [2.0, 2.0]
    checkpoint(function, x, use_reentrant=reentrant).sum().backward()
    assert len(calls) == 2


DRAWS = {
    "poisson": lambda: torch.poisson(torch.full((4,), 1.6)),
    "binomial": lambda: torch.binomial(torch.full((4,), 3.0), torch.full((4,), 0.4)),
    "gamma": lambda: torch.distributions.Gamma(torch.ones(4), 2.0).sample(),
    "dirichlet": lambda: torch.distributions.Dirichlet(torch.ones(4, 2)).sample()[:, 0],
    "beta": lambda: torch.distributions.Beta(torch.ones(4), 3.0).sample(),
    "multinomial": lambda: torch.multinomial(torch.tensor([[0.1, 0.9]] * 4), 1),
    "categorical": lambda: torch.distributions.Categorical(torch.tensor([[0.8, 0.2]] * 4)).sample(),
    "log-normal": lambda: torch.empty(4).log_normal_(0.0, 1.0),
    "cauchy": lambda: torch.empty(4).cauchy_(1.0, 2.0),
    "geometric": lambda: torch.empty(4).geometric_(0.3),
    "student": lambda: torch.distributions.StudentT(torch.full((4,), 5.0)).sample(),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_every_distribution_gives_one_constant_for_equal_parameters(draw):
    with torch_private.Steady() as steady:
        first, second = DRAWS[draw](), DRAWS[draw]()
    assert (first == first.flatten()[0]).all()
    assert (second == first).all()
    assert not steady.unknown
    assert steady.seen


def test_what_is_drawn_for_a_row_depends_on_that_row_alone():
    weights = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    with torch_private.Steady():
        assert torch.multinomial(weights, 1).flatten().tolist() == [1, 0, 1]
        assert torch.multinomial(weights[1:], 1).flatten().tolist() == [0, 1]
        assert torch.multinomial(weights, 2).tolist() == [[1, 0], [0, 1], [1, 0]]


@pytest.mark.parametrize("inplace", [False, True])
def test_a_random_slope_is_its_mean_forward_and_backward(inplace):
    x = torch.tensor([[-4.0, 2.0], [-1.0, 0.5]], requires_grad=True)
    with torch_private.Steady():
        y = F.rrelu(x * 1, 0.2, 0.4, training=True, inplace=inplace)
        y.sum().backward()
    torch.testing.assert_close(y.detach(), torch.tensor([[-1.2, 2.0], [-0.3, 0.5]]))
    torch.testing.assert_close(x.grad, torch.tensor([[0.3, 1.0], [0.3, 1.0]]))


def test_every_random_operation_of_torch_is_a_constant_or_told_apart():
    """Those that torch tags or that take a generator; a new one is reported as unknown when it draws."""
    assert torch_private._draws(torch.ops.aten.binomial.default)  # untagged, but takes a generator
    assert torch_private._draws(torch.ops.aten.randn.default)
    assert not torch_private._draws(torch.ops.aten.add.Tensor)
    known = dict(torch_private._CONSTANTS)
    del known["poisson"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_private, "_CONSTANTS", known)
        with torch_private.Steady() as steady:
            torch.poisson(torch.ones(4))
    assert steady.unknown == {"poisson"}
