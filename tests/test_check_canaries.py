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
